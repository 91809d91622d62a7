// S = scale * <q_i, k_j + e_ij>, with the values v_j + e_ij.
struct Score : ScoreDefaults {
    SCORE_FN float factor(const ScoreInputs& in, float) { return in.scale; }

    SCORE_FN float product(float sum, const Channel& c, const ScoreInputs&) { return fmaf(c.target, c.source, sum); }

    SCORE_FN float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    SCORE_FN float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }

    SCORE_FN float edge_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * in.scale, c.target, sum);
    }

    SCORE_FN float finish_target(float sum, const Channel&, const ScoreInputs& in) { return sum * in.scale; }

    SCORE_FN float finish_source(float sum, const ScoreInputs& in) { return sum * in.scale; }
};
