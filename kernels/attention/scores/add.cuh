// S = leaky(l_i + r_j + t_ij), with scalars l, r and t per head.
struct Score : ScoreDefaults {
    SCORE_FN float pre_activation(const Terms& t) {
#if HAS_EDGE_SCALARS
        return t.own + t.other + t.edge;
#else
        return t.own + t.other;
#endif
    }

    SCORE_FN float logit(const Terms& t, const ScoreInputs& in) {
        return t.factor * leaky(pre_activation(t), in.slope);
    }

    SCORE_FN float target_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
        return fmaf(ds, centered_slope(pre_activation(t), in.slope), sum);
    }

    SCORE_FN float source_scalar_grad(float sum, float ds, const Terms& t, const ScoreInputs& in) {
        return fmaf(ds, leaky_slope(pre_activation(t), in.slope), sum);
    }

    SCORE_FN float edge_scalar_grad(float ds, const Terms& t, const ScoreInputs& in) {
        return ds * leaky_slope(pre_activation(t), in.slope);
    }

    // With DOUT_DLOGIT: the logit has slope 1 in l_i at steep edges and flat_slope at all others.
    SCORE_FN bool is_steep(const Terms& t) { return pre_activation(t) > 0.0f; }
    SCORE_FN float flat_slope(const ScoreInputs& in) { return in.slope; }

#if FACTORED
    // As leaky(z) = max(z, slope z) for a slope in [0, 1], a weight is the larger of two products of factors of the
    // nodes. With c the largest r_j they are A_i B_j and A'_i B'_j, where B_j = exp(r_j - c) and B'_j = exp(slope (r_j
    // - c)). `falling` gives the base-2 logarithm of B'_j from that of B_j, `bend` that of A_i / A'_i from l_i + c.
    SCORE_FN bool has_factors(const ScoreInputs& in) { return in.slope >= 0.0f && in.slope <= 1.0f; }
    SCORE_FN float falling(float rising, const ScoreInputs& in) { return rising * in.slope; }
    SCORE_FN float bend(float z, const ScoreInputs& in) { return (1.0f - in.slope) * LOG2E * z; }
    SCORE_FN float highest_logit(float own, float top, const ScoreInputs& in) {
        return leaky(own + top, in.slope);
    }
#endif
};
