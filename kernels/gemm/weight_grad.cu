// Gradients of the parameters of linear layers of one input, for many rows, on compute capability 9.0 (sm_90a):
// grad_w_l = G_l^T X and grad_b_l = G_l^T 1 with x [num_rows, FEATURES] and g [num_rows, CHANNELS] of each layer. A thread
// block takes up to 128 features and 128 channels of one layer, and each of its two warpgroups 64 of these channels. Each
// split of `rows_per_split` rows leaves its sums in partial [splits, LAYERS * CHANNELS * FEATURES + LAYERS * CHANNELS],
// weights first.
//
// The rows are the places of the sum, in sections of 32. Rows of X lie in shared memory, as two tf32 numbers each;
// while one section is multiplied the next is written. Gradients go from memory to the registers of the warps that multiply
// them. Tensor cores cut what they add to a sum, so the sums of sections are added with rounding. Columns are in
// the order of forward_strips.cu.
#include "include/number.cuh"
#include "include/wgmma.cuh"
#include "include/tf32_split.cuh"
#include "gemm/layers.cuh"

#define THREADS 256
#define COLUMNS 128
#define SECTION 32
#define SECTION_WORDS (SECTION * COLUMNS)
#define STAGE (2 * SECTION_WORDS)
#define FEATURE_GROUPS ((FEATURES + COLUMNS - 1) / COLUMNS)
#define CHANNEL_GROUPS ((CHANNELS + 127) / 128)
#define GROUPS (LAYERS * CHANNEL_GROUPS * FEATURE_GROUPS)

static_assert(FEATURES % 4 == 0 && CHANNELS % 4 == 0, "whole float4");

// The numbers that a thread reads of a section: four rows of its four features, and eight rows of its two channels.
struct Raw {
    float4 x[4];
    float2 g[8];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm_weight_grad(i64 num_rows, i64 rows_per_split, const float* x, const float* g0, const float* g1, const float* g2,
                 const float* g3, float* partial) {
    extern __shared__ __align__(128) u32 stages[];
    const Layers<const float> grads = {g0, g1, g2, g3};
    const int group = (int)blockIdx.x % GROUPS, split_index = (int)blockIdx.x / GROUPS;
    const int layer = group / (CHANNEL_GROUPS * FEATURE_GROUPS);
    const int first_feature = group % FEATURE_GROUPS * COLUMNS;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, pos = lane % 4;
    const float* const grad = grads[layer];
    const i64 begin = split_index * rows_per_split;
    const i64 limit = num_rows - begin < rows_per_split ? num_rows : begin + rows_per_split;
    // Channels `channel` and the next are the rows lane / 4 and lane / 4 + 8 of the warp's 16.
    const int channel = group / FEATURE_GROUPS % CHANNEL_GROUPS * 128 + warp * 16 + lane / 4 * 2;
    const bool has_channels = channel < CHANNELS, has_features = first_feature + 4 * lane < FEATURES;
    const bool swaps = lane >> 2 & 1;
    u32* const to = stages + (warp * COLUMNS + lane / 4 * 16 + pos * 2) * 4;

    const auto load_x = [&](Raw& raw, i64 section) {
        const i64 row = section + warp * 4;
        const float* const from = x + (row * FEATURES + first_feature + 4 * lane);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            raw.x[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (has_features && row + k < limit) raw.x[k] = *reinterpret_cast<const float4*>(from + k * FEATURES);
        }
    };
    const auto load_g = [&](Raw& raw, i64 section) {
        const i64 row = section + pos;
        const float* const from = grad + (row * CHANNELS + channel);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            raw.g[j] = make_float2(0.0f, 0.0f);
            if (has_channels && row + 4 * j < limit) raw.g[j] = *reinterpret_cast<const float2*>(from + 4 * j * CHANNELS);
        }
    };
    // Column 2 h + e of the lane's four is at slot 8 h + e; half of the lanes write e in the other order, so that 8 lanes
    // write to all banks.
    const auto store = [&](const Raw& raw, int stage) {
        const float columns[4][4] = {{raw.x[0].x, raw.x[1].x, raw.x[2].x, raw.x[3].x},
                                     {raw.x[0].y, raw.x[1].y, raw.x[2].y, raw.x[3].y},
                                     {raw.x[0].z, raw.x[1].z, raw.x[2].z, raw.x[3].z},
                                     {raw.x[0].w, raw.x[1].w, raw.x[2].w, raw.x[3].w}};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float mine[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) mine[k] = swaps ? columns[c ^ 1][k] : columns[c][k];
            u32* const at = to + stage * STAGE + (c / 2 * 8 + (swaps ? (c & 1) ^ 1 : c & 1)) * 4;
            store_tf32(mine, at, SECTION_WORDS);
        }
    };

    float section_sums[COLUMNS / 2];
    float2 column_sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) section_sums[i] = 0.0f;
    float sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
    Raw raw;
    load_x(raw, begin);
    load_g(raw, begin);
    store(raw, 0);
    load_x(raw, begin + SECTION);
    fence_proxy_async();
    __syncthreads();
    const u64 right_at = matrix_descriptor(stages, COLUMNS * 16);
    int stage = 0;
#pragma unroll 1
    for (i64 section = begin; section < limit; section += SECTION) {
        Factors<SECTION / 8> left;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            column_sums.x += raw.g[j].x, column_sums.y += raw.g[j].y;
            set(left, j / 2, j % 2 * 2, raw.g[j].x);
            set(left, j / 2, j % 2 * 2 + 1, raw.g[j].y);
        }
        pin(left);
        pin(section_sums);
        wgmma_fence();
        multiply(section_sums, left, right_at + stage * (STAGE / 4), 2 * COLUMNS, SECTION_WORDS / 4);
        wgmma_commit();
        // All threads have waited for the products that read the other stage.
        stage ^= 1;
        if (section + SECTION < limit) {
            load_g(raw, section + SECTION);
            store(raw, stage);
            load_x(raw, section + 2 * SECTION);
        }
        fence_proxy_async();
        wgmma_wait();
        pin(section_sums);
        pin(left);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] += section_sums[i];
        __syncthreads();
    }

    float* const mine = partial + split_index * ((i64)LAYERS * CHANNELS * (FEATURES + 1));
    const int feature = first_feature + 4 * pos;
    float* const line = mine + (layer * CHANNELS + channel) * FEATURES + feature;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
        if (!has_channels || feature + 16 * i >= FEATURES) continue;
        const float* const v = sums + 8 * i;
        *reinterpret_cast<float4*>(line + 16 * i) = make_float4(v[0], v[1], v[4], v[5]);
        *reinterpret_cast<float4*>(line + FEATURES + 16 * i) = make_float4(v[2], v[3], v[6], v[7]);
    }
    // A thread has summed every fourth row.
#pragma unroll
    for (int i = 1; i < 4; i *= 2) {
        column_sums.x += __shfl_xor_sync(FULL_MASK, column_sums.x, i);
        column_sums.y += __shfl_xor_sync(FULL_MASK, column_sums.y, i);
    }
    if (pos > 0 || !has_channels || first_feature > 0) return;
    *reinterpret_cast<float2*>(mine + LAYERS * CHANNELS * FEATURES + layer * CHANNELS + channel) = column_sums;
}
