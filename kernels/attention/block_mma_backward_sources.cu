// Attention backward over windows of sources, schedule `block_mma`: key, value and source-scalar gradients, as in
// backward_sources.cu. The transposed blocks of P and dS are recomputed on tensor cores and multiplied with the step's
// rows.
#define ROWS_ARE_TARGETS 0
#include "include/number.cuh"
#include "include/operands.cuh"
#include "attention/inputs.cuh"
#include "attention/block_mma.cuh"

#define TARGET_ROWS (HAS_TARGET_VECTOR ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(TARGET_ROWS + STEP)
#define OWN_WORDS ((HAS_KEY ? 2 : 1) * BLOCK_HEADS * LEFT_WORDS)
#define STAGE_STATS (STEP * BLOCK_HEADS)

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2];
    // The gradient of the row's scalar, or with norms that along the row: summed here as the products' operands may be
    // rounded to 16 bits.
    float scalar_sum[2];
    float value[CHANNEL_TILES][4];
#if HAS_TARGET_VECTOR
    float score[CHANNEL_TILES][4];
#endif
};

// Adds a step to the sums of one head, whose channels begin at `targets` and `grads`, row statistics at
// `bwd_row_stats` and scalars at `others`.
__device__ __forceinline__ void add_step(Head& head, const ScoreInputs& in, const Mask& mask, u32* value_words,
                                         u32* key_words, const storage_t* targets, const storage_t* grads,
                                         const float4* bwd_row_stats, const float* others) {
    float p[STEP_TILES][4], ds[STEP_TILES][4];
    multiply_transposed(ds, value_words, grads);
#if HAS_TARGET_VECTOR
    multiply_transposed(p, key_words, targets);
#endif
    float other_scalars[LANE_SCALARS];
    lane_scalars(other_scalars, others);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2, place = (8 * n + lane_column(i % 2)) * BLOCK_HEADS;
            const float4 stats = bwd_row_stats[place];
            const float other = other_scalars[2 * n + i % 2];
            const Terms terms = {p[n][i], head.own_scalar[half], other, 0.0f, head.factor[half]};
            const float s = Score::logit(terms, in);
#if STORAGE != 0
            const float weight = mask.power(s, stats.w, n, i);
#else
            const float weight = mask.power(s, stats.x, n, i) * stats.y;
#endif
            ds[n][i] = weight * (ds[n][i] - stats.z);
#if SUMS_SCALAR
            head.scalar_sum[half] = Score::source_scalar_grad(head.scalar_sum[half], ds[n][i], terms, in);
#endif
#if HAS_TARGET_VECTOR
            ds[n][i] = Score::product_grad(ds[n][i], terms, in);
#endif
#if HAS_NORMS
            head.scalar_sum[half] = fmaf(ds[n][i], p[n][i], head.scalar_sum[half]);
#endif
            p[n][i] = weight;
        }
    }
    multiply_rows(head.value, p, grads);
#if HAS_TARGET_VECTOR
    multiply_rows(head.score, ds, targets);
#endif
}

__device__ __forceinline__ void store_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                           storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                           const storage_t* grad_target) {
    if (HAS_NODE_SCALARS) sum_scalars(head.scalar_sum, head.own_scalar);
    if (SUMS_SCALAR) store_scalars(grad_source, own, h, head.scalar_sum);
#if HAS_NORMS
    project(head.score, in.value, own, h, head.own_scalar, head.scalar_sum);
#endif
#if HAS_TARGET_VECTOR
    finish_tiles(head.score, [&](float sum) { return Score::finish_source(sum, in); });
    if (HAS_KEY) store_rows(grad_key, own, h, head.score);
#endif
#if HAS_TARGET_VECTOR && !HAS_KEY
    add_tiles(head.value, head.score);
#endif
#if TARGET_IS_VALUE
    if (grad_target != nullptr) add_rows(head.value, grad_target, own, h);
#endif
    store_rows(grad_value, own, h, head.value);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block_mma_backward_sources(BLOCK_SPARSE_PARAMETERS, INPUT_PARAMETERS, const float* bwd_row_stats,
                                     const storage_t* grad_out,
                                 storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                 const storage_t* grad_target) {
    extern __shared__ __align__(16) unsigned char memory[];
    const BlockSparse tiles = {windows, columns, bits};
    const ScoreInputs in = INPUTS;
    u32* const value_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
    u32* const key_words = value_words + OWN_WORDS - BLOCK_HEADS * LEFT_WORDS;
    storage_t* const stages = reinterpret_cast<storage_t*>(reinterpret_cast<u32*>(memory) + WARPS * OWN_WORDS);
    float4* const stage_stats = reinterpret_cast<float4*>(stages + 2 * STAGE_ELEMENTS);
    float* const scalars = reinterpret_cast<float*>(stage_stats + 2 * STAGE_STATS);
    const Window w = load_window(tiles);
    const int steps = (w.num_columns + STEP - 1) / STEP;

    const auto fetch = [&](int step) {
        const auto id = [&](int row) { return column_node(tiles, w, step * STEP + row); };
        copy_rows<HAS_TARGET_VECTOR ? 2 : 1>(stages + step % 2 * STAGE_ELEMENTS, in.target, grad_out, id);
#pragma unroll
        for (int first = 0; first < STAGE_STATS; first += THREADS) {
            const int i = first + threadIdx.x;
            if (STAGE_STATS % THREADS != 0 && i >= STAGE_STATS) continue;
            const i64 index = head_index(id(i / BLOCK_HEADS), i % BLOCK_HEADS);
            copy16(stage_stats + step % 2 * STAGE_STATS + i, bwd_row_stats + 4 * index);
        }
        if (HAS_NODE_SCALARS) copy_scalars(scalars + step % 2 * STAGE_STATS, in.target_scalars, id);
        close_copies();
    };

    clear_padding(stages, 2 * (TARGET_ROWS + STEP));
    if (steps > 0) fetch(0);
    const OwnRows own = own_rows(w);
    keep_own_rows(value_words, in.value, own);
    if (HAS_KEY) keep_own_rows(key_words, in.key, own);
    Head heads[BLOCK_HEADS];
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            heads[h].own_scalar[half] = load_scalar(in.source_scalars, own.row[half], h);
            heads[h].factor[half] = Score::factor(in, heads[h].own_scalar[half]);
            heads[h].scalar_sum[half] = 0.0f;
        }
        clear(heads[h].value);
#if HAS_TARGET_VECTOR
        clear(heads[h].score);
#endif
    }

    for_each_step(tiles, w, steps, fetch, [&](int step, const StepBits& edges) {
        const storage_t* const targets = stages + step % 2 * STAGE_ELEMENTS;
        const storage_t* const grads = targets + TILE_ELEMENTS(TARGET_ROWS);
        const float4* const bwd_row_stats = stage_stats + step % 2 * STAGE_STATS;
        const float* const others = scalars + step % 2 * STAGE_STATS;
        const Mask mask(edges);
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; ++h) {
            add_step(heads[h], in, mask, value_words + h * LEFT_WORDS, key_words + h * LEFT_WORDS,
                     targets + h * CHANNELS, grads + h * CHANNELS, bwd_row_stats + h, others + h * STEP);
        }
    });

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
        store_head(heads[h], in, own, h, grad_key, grad_value, grad_source, grad_target);
    }
}
