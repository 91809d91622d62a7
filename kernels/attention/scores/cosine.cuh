// S = beta * n_i * n_j * <x_i, x_j>, with inverse norms n and the values x_j. The kernels take the gradients through the
// norms.
struct Score : ScoreDefaults {
    static __device__ __forceinline__ float factor(const ScoreInputs& in, float own) {
        return in.parameter[0] * LOG2E * own;
    }

    static __device__ __forceinline__ float product(float sum, const Channel& c, const ScoreInputs&) {
        return fmaf(c.target, c.source, sum);
    }

    static __device__ __forceinline__ float logit(const Terms& t, const ScoreInputs&) {
        return t.factor * t.other * t.product;
    }

    // What no base-2 logit exceeds in size.
    static __device__ __forceinline__ float bound(const ScoreInputs& in) { return fabsf(in.parameter[0]) * LOG2E; }

    static __device__ __forceinline__ float product_grad(float ds, const Terms& t, const ScoreInputs&) {
        return ds * t.other;
    }

    static __device__ __forceinline__ float target_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.source, sum);
    }

    static __device__ __forceinline__ float source_grad(float sum, float ds, const Channel& c, const ScoreInputs&) {
        return fmaf(ds, c.target, sum);
    }

    static __device__ __forceinline__ float finish_target(float sum, const Channel&, const ScoreInputs& in) {
        return sum * in.parameter[0];
    }

    static __device__ __forceinline__ float finish_source(float sum, const ScoreInputs& in) {
        return sum * in.parameter[0];
    }
};
