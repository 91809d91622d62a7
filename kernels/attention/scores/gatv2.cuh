// S = <a, leaky(l_i + r_j + e_ij)>, with a parameter a per head and the values r_j.
struct Score : ScoreDefaults {
    static __device__ __forceinline__ float product(float sum, const Channel& c, const ScoreInputs& in) {
        return fmaf(c.parameter, leaky(c.target + c.source, in.slope), sum);
    }

    static __device__ __forceinline__ float target_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds, centered_slope(c.target + c.source, in.slope), sum);
    }

    static __device__ __forceinline__ float source_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * leaky_slope(c.target + c.source, in.slope), c.parameter, sum);
    }

    static __device__ __forceinline__ float edge_grad(float sum, float ds, const Channel& c, const ScoreInputs& in) {
        return fmaf(ds * leaky_slope(c.target + c.source, in.slope), c.parameter, sum);
    }

    static __device__ __forceinline__ float parameter_grad(float sum, float ds, const Channel& c,
                                                           const ScoreInputs& in) {
        const float z = c.target + c.source;
        return fmaf(ds * leaky_slope(z, in.slope), z, sum);
    }

    static __device__ __forceinline__ float finish_target(float sum, const Channel& c, const ScoreInputs&) {
        return sum * c.parameter;
    }
};
