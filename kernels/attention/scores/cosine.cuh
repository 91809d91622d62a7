// S = beta * n_i * n_j * <x_i, x_j>, with inverse norms n and the values x_j. The kernels take the gradients through
// the norms.
struct Score : ScoreDefaults {
    SCORE_FN float factor(const ScoreInputs& in, float own) { return in.parameter[0] * own; }

    SCORE_FN float product(float sum, const Channel& c, const ScoreInputs&) { return fmaf(c.target, c.source, sum); }

    SCORE_FN float logit(const Terms& t, const ScoreInputs&) { return t.factor * t.other * t.product; }

    // What no logit exceeds in size.
    SCORE_FN float bound(const ScoreInputs& in) { return fabsf(in.parameter[0]); }

    SCORE_FN float product_grad(float ds, const Terms& t, const ScoreInputs&) { return ds * t.other; }

    SCORE_FN float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    SCORE_FN float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }

    SCORE_FN float finish_target(float sum, const Channel&, const ScoreInputs& in) { return sum * in.parameter[0]; }

    SCORE_FN float finish_source(float sum, const ScoreInputs& in) { return sum * in.parameter[0]; }
};
