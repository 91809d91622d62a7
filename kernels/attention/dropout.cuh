#include "include/philox.cuh"

// Dropout factors of a step. The lanes of a head share the draws: lane i computes number i, a shuffle hands it on.
__device__ __forceinline__ void load_dropout(const Adjacency& a, const Item& item, const Lanes& l, int step, u64 seed,
                                             float p, float (&factor)[UNROLL][LANE_HEADS]) {
#if DROPOUT
    constexpr int COUNT = UNROLL * LANE_HEADS;
    const int first_lane = (threadIdx.x & 31) - l.head_lane;
#pragma unroll
    for (int base = 0; base < COUNT; base += HEAD_LANES) {
        const int number = base + l.head_lane;
        const int position = edge_position(item, l, step, number / LANE_HEADS);
        float mine = 0.0f;
        if (number < COUNT && position < item.end) {
            mine = dropout_factor(seed, (u32)a.perm[position], (u32)head_of(l, number % LANE_HEADS), p);
        }
#pragma unroll
        for (int i = 0; i < HEAD_LANES; ++i) {
            if (base + i < COUNT) {
                factor[(base + i) / LANE_HEADS][(base + i) % LANE_HEADS] = __shfl_sync(FULL_MASK, mine, first_lane + i);
            }
        }
    }
#else
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) factor[u][h] = 1.0f;
    }
#endif
}
