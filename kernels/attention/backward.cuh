// What both backward kernels share. With the weights P_ij, dropout factors D_ij and delta_i = <dO_i, O_i>:
//
//   dP_ij = <dO_i, v_ij>,  dS_ij = P_ij (D_ij dP_ij - delta_i),  dv_ij = P_ij D_ij dO_i
//
// There are no atomics and no per-edge buffer: weights are recomputed from the statistics of the row. The pass over
// targets leaves (max, inverse, delta, max - log(inverse)) per target and head [num_targets, HEADS, 4] for the pass
// over sources, which gathers it with one load.
#include "attention/row_stats.cuh"

#define COUNT (UNROLL * LANE_HEADS)

// Products of one step, reduced over the lanes of a head: first the score's, then <dO, v>.
struct Products {
    float score[UNROLL][LANE_HEADS], value[UNROLL][LANE_HEADS];
};

__device__ __forceinline__ void reduce_products(Products& p) {
#if HAS_TARGET_VECTOR
    float all[2 * COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        all[i] = p.score[i / LANE_HEADS][i % LANE_HEADS];
        all[COUNT + i] = p.value[i / LANE_HEADS][i % LANE_HEADS];
    }
    head_sum<2 * COUNT, HEAD_LANES / 2>(all);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        p.score[i / LANE_HEADS][i % LANE_HEADS] = all[i];
        p.value[i / LANE_HEADS][i % LANE_HEADS] = all[COUNT + i];
    }
#else
    head_sum<COUNT, HEAD_LANES / 2>(&p.value[0][0]);
#endif
}

// Removes the radial part: x^ (x) -> g - x^ <x^, g>. Below the clamp of the norm the projection drops out.
__device__ __forceinline__ HeadValues project(Fragment& g, const Fragment& x, const HeadValues& inverse_norm) {
    HeadValues along = head_dot(x, g);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const float n = inverse_norm.x[h];
        along.x[h] *= n;
        const float radial = n < 1e12f ? along.x[h] * n : 0.0f;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) g.x[h][c] = n * (g.x[h][c] - radial * x.x[h][c]);
    }
    return along;
}
