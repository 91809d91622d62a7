#include "attention/bwd_row_stats.cuh"

// The softmax of a row, per head: P_ij = exp(S_ij - max) * inverse. Kept as two numbers because one log-sum-exp in
// fp32 would blur the weights of long rows and of large logits. [rows, HEADS, 2], 0 and 0 for a row without edges.
struct RowStats {
    float max[LANE_HEADS], inverse[LANE_HEADS];
};

__device__ __forceinline__ RowStats load_row_stats(const float* base, i64 row, const Lanes& l) {
    RowStats stats;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (has_head(l, h)) pair = __ldg(reinterpret_cast<const float2*>(base) + row * HEADS + head_of(l, h));
        stats.max[h] = pair.x;
        stats.inverse[h] = pair.y;
    }
    return stats;
}

__device__ __forceinline__ void store_row_stats(float* base, i64 row, const Lanes& l, const RowStats& stats) {
    if (base == nullptr || l.head_lane != 0) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        if (has_head(l, h)) {
            reinterpret_cast<float2*>(base)[row * HEADS + head_of(l, h)] = make_float2(stats.max[h], stats.inverse[h]);
        }
    }
}

// The terms of a row's dS cancel, so delta must not carry the rounding of a 16-bit output: there `out` is the fp32 copy
// that the forward pass left.
template <int STRIDE = ROW_STRIDE, class S = Features>
__device__ __forceinline__ FragmentOf<S> load_out(const void* out, int row, const Lanes& l) {
#if STORAGE != 0
    return load_fragment_fp32<S>(static_cast<const float*>(out), row, l);
#else
    return load_fragment<STRIDE, S>(static_cast<const storage_t*>(out), row, l);
#endif
}

__device__ __forceinline__ void store_bwd_row_stats(float* base, int row, const Lanes& l, const RowStats& stats,
                                                    const HeadValues& delta) {
    if (l.head_lane != 0) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        if (has_head(l, h)) {
            reinterpret_cast<float4*>(base)[(i64)row * HEADS + head_of(l, h)] =
                make_bwd_row_stats(stats.max[h], stats.inverse[h], delta.x[h]);
        }
    }
}
