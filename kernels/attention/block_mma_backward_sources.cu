// Attention backward over windows of sources, tile schedule: key, value and source-scalar gradients, as in
// backward_sources.cu. The transposed blocks of P and dS are recomputed on tensor cores and multiplied with the step's
// rows.
#include "include/number.cuh"
#include "include/operands.cuh"
#include "attention/logit.cuh"
#include "attention/block_mma.cuh"

#define TARGET_ROWS (HAS_TARGET_VECTOR ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(TARGET_ROWS + STEP)
#define OWN_WORDS ((HAS_KEY ? 2 : 1) * BLOCK_HEADS * LEFT_WORDS)
#define STAGE_RECORDS (STEP * BLOCK_HEADS)

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2];
    // The gradient of r (add), or <x^, g> (cosine): summed here as the products' operands may be rounded to 16 bits.
    float scalar_sum[2];
    float value[CHANNEL_TILES][4];
#if SCORE != SCORE_ADD
    float score[CHANNEL_TILES][4];
#endif
};

// Adds a step to the sums of one head, whose channels begin at `targets` and `grads`, records at `softmax` and scalars
// at `others`.
__device__ __forceinline__ void add_step(Head& head, const ScoreInputs& in, const Mask& mask, u32* value_words,
                                         u32* key_words, const storage_t* targets, const storage_t* grads,
                                         const float4* softmax, const float* others) {
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
            const float4 record = softmax[place];
            const float other = other_scalars[2 * n + i % 2];
            const float s = score_logit(p[n][i], head.own_scalar[half], other, 0.0f, head.factor[half], in.slope);
#if STORAGE != 0
            const float weight = mask.power(difference(s, record.w), n, i);
#else
            const float weight = mask.power(difference(s, record.x), n, i) * record.y;
#endif
            ds[n][i] = weight * (ds[n][i] - record.z);
#if SCORE == SCORE_ADD
            const float z = pre_activation(head.own_scalar[half], other, 0.0f);
            head.scalar_sum[half] += ds[n][i] * leaky_slope(z, in.slope);
#elif SCORE == SCORE_COSINE
            ds[n][i] *= other;
            head.scalar_sum[half] = fmaf(ds[n][i], p[n][i], head.scalar_sum[half]);
#endif
            p[n][i] = weight;
        }
    }
    multiply_rows(head.value, p, grads);
#if SCORE != SCORE_ADD
    multiply_rows(head.score, ds, targets);
#endif
}

__device__ __forceinline__ void store_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                           storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                           const storage_t* grad_target) {
    if (SCORE != SCORE_DOT) sum_scalars(head.scalar_sum, head.own_scalar);
#if SCORE == SCORE_ADD
    store_scalars(grad_source, own, h, head.scalar_sum);
#elif SCORE == SCORE_COSINE
    project(head.score, in.value, own, h, head.own_scalar, head.scalar_sum);
    const float beta = in.parameter[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 first = head_index(own.row[half], h) * CHANNELS + 2 * lane_pos();
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            const bool added = grad_target != nullptr && has_channels(c);
            const float2 before = added ? load_pair(grad_target + first + 8 * c) : make_float2(0.0f, 0.0f);
            head.value[c][2 * half] += fmaf(beta, head.score[c][2 * half], before.x);
            head.value[c][2 * half + 1] += fmaf(beta, head.score[c][2 * half + 1], before.y);
        }
    }
#else
    scale_tiles(head.score, in.scale);
    store_rows(grad_key, own, h, head.score);
#endif
    store_rows(grad_value, own, h, head.value);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block_mma_backward_sources(TILES_PARAMETERS, INPUT_PARAMETERS, const float* records, const storage_t* grad_out,
                                 storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                 const storage_t* grad_target) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles tiles = {windows, columns, bits};
    const ScoreInputs in = INPUTS;
    u32* const value_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
    u32* const key_words = value_words + OWN_WORDS - BLOCK_HEADS * LEFT_WORDS;
    storage_t* const stages = reinterpret_cast<storage_t*>(reinterpret_cast<u32*>(memory) + WARPS * OWN_WORDS);
    float4* const stage_records = reinterpret_cast<float4*>(stages + 2 * STAGE_ELEMENTS);
    float* const scalars = reinterpret_cast<float*>(stage_records + 2 * STAGE_RECORDS);
    const Window w = load_window(tiles);
    const int steps = (w.num_columns + STEP - 1) / STEP;

    const auto fetch = [&](int step) {
        const auto id = [&](int row) { return column_node(tiles, w, step * STEP + row); };
        copy_rows<HAS_TARGET_VECTOR ? 2 : 1>(stages + step % 2 * STAGE_ELEMENTS, in.target, grad_out, id);
#pragma unroll
        for (int first = 0; first < STAGE_RECORDS; first += THREADS) {
            const int i = first + threadIdx.x;
            if (STAGE_RECORDS % THREADS != 0 && i >= STAGE_RECORDS) continue;
            const i64 index = head_index(id(i / BLOCK_HEADS), i % BLOCK_HEADS);
            copy16(stage_records + step % 2 * STAGE_RECORDS + i, records + 4 * index);
        }
        if (HAS_NODE_SCALARS) copy_scalars(scalars + step % 2 * STAGE_RECORDS, in.target_scalars, id);
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
            heads[h].factor[half] = logit_factor(in, heads[h].own_scalar[half]);
            heads[h].scalar_sum[half] = 0.0f;
        }
        clear(heads[h].value);
#if SCORE != SCORE_ADD
        clear(heads[h].score);
#endif
    }

    for_each_step(tiles, w, steps, fetch, [&](int step, const StepBits& edges) {
        const storage_t* const targets = stages + step % 2 * STAGE_ELEMENTS;
        const storage_t* const grads = targets + TILE_ELEMENTS(TARGET_ROWS);
        const float4* const softmax = stage_records + step % 2 * STAGE_RECORDS;
        const float* const others = scalars + step % 2 * STAGE_RECORDS;
        const Mask mask(edges);
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; ++h) {
            add_step(heads[h], in, mask, value_words + h * LEFT_WORDS, key_words + h * LEFT_WORDS,
                     targets + h * CHANNELS, grads + h * CHANNELS, softmax + h, others + h * STEP);
        }
    });

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
        store_head(heads[h], in, own, h, grad_key, grad_value, grad_source, grad_target);
    }
}
