// Attention backward over windows of targets, dense blocks: row statistics and target gradients, as in
// backward_targets.cu.
// Row dot products of the step are recomputed on tensor cores, and the gradient is the product of dS with the step's
// rows.
#include "include/number.cuh"
#include "include/operands.cuh"
#include "attention/inputs.cuh"
#include "attention/bwd_row_stats.cuh"
#include "attention/block_mma.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS ((HAS_TARGET_VECTOR ? 2 : 1) * BLOCK_HEADS * LEFT_WORDS)

// Whether dS is summed without the inverse of its row, which comes last; half precision would lose small numbers.
#define INVERSE_LAST (STORAGE != 1)

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2], max[2], inverse[2], delta[2];
    // The gradient of the row's scalar, or with norms that along the row: summed here as the products' operands may be
    // rounded to 16 bits.
    float scalar_sum[2];
#if HAS_TARGET_VECTOR
    float acc[CHANNEL_TILES][4];
#endif
};

__device__ __forceinline__ void load_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                          const float* out, const float* row_stats, const storage_t* grad_out,
                                          float* bwd_row_stats) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 index = head_index(own.row[half], h), first = index * CHANNELS + 2 * lane_pos();
        head.own_scalar[half] = load_scalar(in.target_scalars, own.row[half], h);
        head.factor[half] = Score::factor(in, head.own_scalar[half]);
        const float2 pair = __ldg(reinterpret_cast<const float2*>(row_stats) + index);
        head.max[half] = pair.x;
        head.inverse[half] = pair.y;
        head.scalar_sum[half] = 0.0f;
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            if (!has_channels(c)) continue;
            const float2 o = __ldg(reinterpret_cast<const float2*>(out + first + 8 * c));
            const float2 g = load_pair(grad_out + first + 8 * c);
            dot = fmaf(o.x, g.x, fmaf(o.y, g.y, dot));
        }
        head.delta[half] = quad_sum(dot);
        if (lane_pos() == 0 && own.exists[half]) {
            float4* const stats = reinterpret_cast<float4*>(bwd_row_stats) + index;
            *stats = make_bwd_row_stats(head.max[half], head.inverse[half], head.delta[half]);
        }
    }
#if HAS_TARGET_VECTOR
    clear(head.acc);
#endif
}

// Adds a step to the sums of one head, whose channels begin at `keys` and `values` and scalars at `others`.
__device__ __forceinline__ void add_step(Head& head, const ScoreInputs& in, const Mask& mask, u32* grad_words,
                                         u32* target_words, const storage_t* keys, const storage_t* values,
                                         const float* others) {
    float logit[STEP_TILES][4], ds[STEP_TILES][4];
    multiply_transposed(ds, grad_words, values);
#if HAS_TARGET_VECTOR
    multiply_transposed(logit, target_words, keys);
#endif
    float other_scalars[LANE_SCALARS];
    lane_scalars(other_scalars, others);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2;
            const float other = other_scalars[2 * n + i % 2];
            const Terms terms = {logit[n][i], head.own_scalar[half], other, 0.0f, head.factor[half]};
            float p = mask.power(Score::logit(terms, in), head.max[half], n, i);
            if (!INVERSE_LAST) p *= head.inverse[half];
            ds[n][i] = p * (ds[n][i] - head.delta[half]);
#if SUMS_SCALAR
            head.scalar_sum[half] = Score::target_scalar_grad(head.scalar_sum[half], ds[n][i], terms, in);
#endif
#if HAS_TARGET_VECTOR
            ds[n][i] = Score::product_grad(ds[n][i], terms, in);
#endif
#if HAS_NORMS
            head.scalar_sum[half] = fmaf(ds[n][i], logit[n][i], head.scalar_sum[half]);
#endif
        }
    }
#if HAS_TARGET_VECTOR
    multiply_rows(head.acc, ds, keys);
#endif
}

__device__ __forceinline__ void store_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                           void* grad_target, float* grad_parameter) {
#if INVERSE_LAST
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        head.scalar_sum[half] *= head.inverse[half];
#if HAS_TARGET_VECTOR
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            head.acc[c][2 * half] *= head.inverse[half];
            head.acc[c][2 * half + 1] *= head.inverse[half];
        }
#endif
    }
#endif
    if (HAS_NODE_SCALARS) sum_scalars(head.scalar_sum, head.own_scalar);
    if (SUMS_SCALAR) store_scalars(static_cast<float*>(grad_target), own, h, head.scalar_sum);
#if HAS_NORMS
    project(head.acc, in.target, own, h, head.own_scalar, head.scalar_sum);
    if (PARAMETER == 1) store_scalars(grad_parameter, own, h, head.scalar_sum);
#endif
#if HAS_TARGET_VECTOR
    finish_tiles(head.acc, [&](float sum) { return Score::finish_target(sum, {}, in); });
    store_rows(static_cast<storage_t*>(grad_target), own, h, head.acc);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block_mma_backward_targets(BLOCK_SPARSE_PARAMETERS, INPUT_PARAMETERS, const float* out,
                                     const float* row_stats,
                                     const storage_t* grad_out, float* bwd_row_stats, void* grad_target,
                                     float* grad_parameter) {
    extern __shared__ __align__(16) unsigned char memory[];
    const BlockSparse tiles = {windows, columns, bits};
    const ScoreInputs in = INPUTS;
    u32* const grad_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
    u32* const target_words = grad_words + OWN_WORDS - BLOCK_HEADS * LEFT_WORDS;
    storage_t* const stages = reinterpret_cast<storage_t*>(reinterpret_cast<u32*>(memory) + WARPS * OWN_WORDS);
    float* const scalars = reinterpret_cast<float*>(stages + 2 * STAGE_ELEMENTS);
    const Window w = load_window(tiles);
    const int steps = (w.num_columns + STEP - 1) / STEP;

    const auto fetch = [&](int step) {
        const auto id = [&](int row) { return column_node(tiles, w, step * STEP + row); };
        copy_rows<HAS_KEY ? 2 : 1>(stages + step % 2 * STAGE_ELEMENTS, in.key, in.value, id);
        if (HAS_NODE_SCALARS) copy_scalars(scalars + step % 2 * STEP * BLOCK_HEADS, in.source_scalars, id);
        close_copies();
    };

    clear_padding(stages, 2 * (KEY_ROWS + STEP));
    if (steps > 0) fetch(0);
    const OwnRows own = own_rows(w);
    keep_own_rows(grad_words, grad_out, own);
    if (HAS_TARGET_VECTOR) keep_own_rows(target_words, in.target, own);
    Head heads[BLOCK_HEADS];
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) load_head(heads[h], in, own, h, out, row_stats, grad_out, bwd_row_stats);

    for_each_step(tiles, w, steps, fetch, [&](int step, const StepBits& edges) {
        const storage_t* const keys = stages + step % 2 * STAGE_ELEMENTS;
        const storage_t* const values = keys + TILE_ELEMENTS(KEY_ROWS);
        const float* const others = scalars + step % 2 * STEP * BLOCK_HEADS;
        const Mask mask(edges);
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; ++h) {
            add_step(heads[h], in, mask, grad_words + h * LEFT_WORDS, target_words + h * LEFT_WORDS,
                     keys + h * CHANNELS, values + h * CHANNELS, others + h * STEP);
        }
    });

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) store_head(heads[h], in, own, h, grad_target, grad_parameter);
}
