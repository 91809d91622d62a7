// S = scale * <q_i, k_j + e_ij>, with the values v_j + e_ij.
struct Score : ScoreDefaults {
    static __device__ __forceinline__ float factor(const ScoreInputs& in, float) { return in.scale * LOG2E; }

    static __device__ __forceinline__ float product(float sum, const Channel& c, const ScoreInputs&) {
        return fmaf(c.target, c.source, sum);
    }

    static __device__ __forceinline__ float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    static __device__ __forceinline__ float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }

    static __device__ __forceinline__ float edge_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * in.scale, c.target, sum);
    }

    static __device__ __forceinline__ float finish_target(float sum, const Channel&, const ScoreInputs& in) {
        return sum * in.scale;
    }

    static __device__ __forceinline__ float finish_source(float sum, const ScoreInputs& in) { return sum * in.scale; }
};
