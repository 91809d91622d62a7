// S = leaky((l_i + r_j) sigmoid(<x_i, x_j>)), with scalars l and r per head, and the values x_j.
struct Score : ScoreDefaults {
    SCORE_FN float gate(const Terms& t) { return 1.0f / (1.0f + fast_exp2(-LOG2E * t.product)); }

    // A sigmoid is positive: the logit bends where this plain sum does.
    SCORE_FN float bent(const Terms& t, const ScoreInputs& in) { return leaky(t.own + t.other, in.slope); }

    SCORE_FN float product(float sum, const Channel& c, const ScoreInputs&) { return fmaf(c.target, c.source, sum); }

    SCORE_FN float logit(const Terms& t, const ScoreInputs& in) { return t.factor * bent(t, in) * gate(t); }

    SCORE_FN float product_grad(float ds, const Terms& t, const ScoreInputs& in) {
        const float g = gate(t);
        return ds * bent(t, in) * g * (1.0f - g);
    }

    SCORE_FN float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    SCORE_FN float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }

    SCORE_FN float target_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
        return fmaf(ds * gate(t), leaky_slope(t.own + t.other, in.slope), sum);
    }

    SCORE_FN float source_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
        return target_scalar_grad(sum, ds, t, in);
    }
};
