// m = e v, with one number per edge.
struct Message : MessageDefaults {
    MESSAGE_FN float value(const Operands& o) { return o.edge * o.value; }
    MESSAGE_FN float value_grad(float g, const Operands& o) { return g * o.edge; }
    MESSAGE_FN float edge_grad(float g, const Operands& o) { return g * o.value; }
};
