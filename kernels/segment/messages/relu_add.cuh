// m = max(v + e, 0).
struct Message : MessageDefaults {
    // A NaN stays a NaN.
    MESSAGE_FN float value(const Operands& o) {
        const float sum = o.value + o.edge;
        return sum <= 0.0f ? 0.0f : sum;
    }
    MESSAGE_FN float value_grad(float g, const Operands& o) { return o.value + o.edge > 0.0f ? g : 0.0f; }
    MESSAGE_FN float edge_grad(float g, const Operands& o) { return value_grad(g, o); }
};
