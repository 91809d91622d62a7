// S = leaky(scale * <x_i, x_j>), with the values x_j.
struct Score : ScoreDefaults {
    SCORE_FN float product(float sum, const Channel& c, const ScoreInputs&) { return fmaf(c.target, c.source, sum); }

    SCORE_FN float logit(const Terms& t, const ScoreInputs& in) {
        return t.factor * leaky(in.scale * t.product, in.slope);
    }

    SCORE_FN float product_grad(float ds, const Terms& t, const ScoreInputs& in) {
        return ds * in.scale * leaky_slope(in.scale * t.product, in.slope);
    }

    SCORE_FN float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    SCORE_FN float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }
};
