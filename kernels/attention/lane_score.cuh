// What the row schedules compute of a score on a lane's part of a row.
#include "attention/inputs.cuh"

__device__ __forceinline__ Channel channel_of(const Fragment& target, const Fragment& source,
                                              const Fragment& parameter, int h,
                                              int c) {
    return {HAS_TARGET_VECTOR ? target.x[h][c] : 0.0f, source.x[h][c], PARAMETER == 2 ? parameter.x[h][c] : 0.0f};
}

#if HAS_TARGET_VECTOR
// One lane's part of the product of head h; the sum over the lanes of the head is the product.
__device__ __forceinline__ float score_product(const Fragment& target, const Fragment& source,
                                               const Fragment& parameter,
                                               const ScoreInputs& in, int h) {
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE_ELEMS; ++c) {
        const Channel channel = channel_of(target, source, parameter, h, c);
        first = Score::product(first, channel, in);
        second = Score::second_product(second, channel);
    }
    return Score::join_products(first, second, in);
}
#endif

#if HAS_EDGE_ROWS
__device__ __forceinline__ Channel channel_of(const FragmentOf<EdgeTargets>& target, const FragmentOf<EdgeRow>& row,
                                              int h, int c) {
    return {target.x[h][c], row.x[0][c], 0.0f};
}

// Adds the channels of an edge's row to a lane's part of the product of head h.
__device__ __forceinline__ float add_row_product(float sum, const FragmentOf<EdgeTargets>& target,
                                                 const FragmentOf<EdgeRow>& row, const ScoreInputs& in, int h) {
#pragma unroll
    for (int c = 0; c < EdgeRow::elements; ++c) sum = Score::product(sum, channel_of(target, row, h, c), in);
    return sum;
}
#endif

// What the target of a row has for the rows of its edges.
__device__ __forceinline__ FragmentOf<EdgeTargets> load_edge_target(const storage_t* base, int row, const Lanes& l) {
    return load_fragment<EDGE_STRIDE, EdgeTargets>(base, row, l);
}

__device__ __forceinline__ HeadValues load_scalars(const float* base, int row, const Lanes& l) {
#if HAS_NODE_SCALARS
    return load_heads(base, row, l);
#else
    return zero_heads();
#endif
}

// What all edges of a row share of the logit.
__device__ __forceinline__ HeadValues logit_factor(const ScoreInputs& in, const HeadValues& own) {
    HeadValues factor;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        factor.x[h] = Score::factor(in, own.x[h]);
    }
    return factor;
}

__device__ __forceinline__ Fragment load_parameter(const ScoreInputs& in, const Lanes& l) {
#if PARAMETER == 2
    return load_fragment_fp32(in.parameter, 0, l);
#else
    return zero_fragment();
#endif
}
