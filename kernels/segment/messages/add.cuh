// m = v + e.
struct Message : MessageDefaults {
    MESSAGE_FN float value(const Operands& o) { return o.value + o.edge; }
    MESSAGE_FN float value_grad(float g, const Operands&) { return g; }
    MESSAGE_FN float edge_grad(float g, const Operands&) { return g; }
};
