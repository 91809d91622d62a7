// S = <a, leaky(l_i + r_j + e_ij)>, with a parameter a per head and the values r_j.
struct Score : ScoreDefaults {
    // leaky(z) = (1 + slope) / 2 z + (1 - slope) / 2 |z|: a channel takes an addition and two multiply-adds, one less than
    // with a comparison.
    SCORE_FN float product(float sum, const Channel& c, const ScoreInputs&) {
        return fmaf(c.parameter, c.target + c.source, sum);
    }

    SCORE_FN float second_product(float sum, const Channel& c) {
        return fmaf(c.parameter, fabsf(c.target + c.source), sum);
    }

    SCORE_FN float join_products(float linear, float absolute, const ScoreInputs& in) {
        return fmaf(0.5f + 0.5f * in.slope, linear, (0.5f - 0.5f * in.slope) * absolute);
    }

    SCORE_FN float target_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds, centered_slope(c.target + c.source, in.slope), sum);
    }

    SCORE_FN float source_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * leaky_slope(c.target + c.source, in.slope), c.parameter, sum);
    }

    SCORE_FN float edge_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * leaky_slope(c.target + c.source, in.slope), c.parameter, sum);
    }

    SCORE_FN float parameter_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        const float z = c.target + c.source;
        return fmaf(ds * leaky_slope(z, in.slope), z, sum);
    }

    SCORE_FN float finish_target(float sum, const Channel& c, const ScoreInputs&) { return sum * c.parameter; }
};
