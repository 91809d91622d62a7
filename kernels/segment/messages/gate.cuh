// m = sigmoid(t + k) v.
struct Message : MessageDefaults {
    MESSAGE_FN float gate(const Operands& o) { return 1.0f / (1.0f + fast_exp2(-LOG2E * (o.target + o.key))); }
    MESSAGE_FN float value(const Operands& o) { return gate(o) * o.value; }
    MESSAGE_FN float value_grad(float g, const Operands& o) { return g * gate(o); }
    MESSAGE_FN float key_grad(float g, const Operands& o) {
        const float s = gate(o);
        return g * o.value * s * (1.0f - s);
    }
    MESSAGE_FN float target_grad(float g, const Operands& o) { return key_grad(g, o); }
};
