// m = v.
struct Message : MessageDefaults {
    MESSAGE_FN float value(const Operands& o) { return o.value; }
    MESSAGE_FN float value_grad(float g, const Operands&) { return g; }
};
