// Attention backward over windows of targets, tile schedule: records and target gradients, as in backward_targets.cu.
// Row dot products of the step are recomputed on tensor cores, and the gradient is the product of dS with the step's
// rows.
#include "include/number.cuh"
#include "include/operands.cuh"
#include "attention/logit.cuh"
#include "attention/record.cuh"
#include "attention/block_mma.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS ((HAS_TARGET_VECTOR ? 2 : 1) * BLOCK_HEADS * LEFT_WORDS)

// Whether dS is summed without the inverse of its row, which comes last; half precision would lose small numbers.
#define INVERSE_LAST (STORAGE != 1)

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2], max[2], inverse[2], delta[2];
    // The gradient of l (add), or <x^, g> (cosine): summed here as the products' operands may be rounded to 16 bits.
    float scalar_sum[2];
#if SCORE != SCORE_ADD
    float acc[CHANNEL_TILES][4];
#endif
};

__device__ __forceinline__ void load_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                          const float* out, const float* softmax, const storage_t* grad_out,
                                          float* records) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 index = head_index(own.row[half], h), first = index * CHANNELS + 2 * lane_pos();
        head.own_scalar[half] = load_scalar(in.target_scalars, own.row[half], h);
        head.factor[half] = logit_factor(in, head.own_scalar[half]);
        const float2 pair = __ldg(reinterpret_cast<const float2*>(softmax) + index);
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
            float4* const record = reinterpret_cast<float4*>(records) + index;
            *record = make_record(head.max[half], head.inverse[half], head.delta[half]);
        }
    }
#if SCORE != SCORE_ADD
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
            const float s = score_logit(logit[n][i], head.own_scalar[half], other, 0.0f, head.factor[half], in.slope);
            float p = mask.power(difference(s, head.max[half]), n, i);
            if (!INVERSE_LAST) p *= head.inverse[half];
            ds[n][i] = p * (ds[n][i] - head.delta[half]);
#if SCORE == SCORE_ADD
            const float z = pre_activation(head.own_scalar[half], other, 0.0f);
            head.scalar_sum[half] = fmaf(ds[n][i], centered_slope(z, in.slope), head.scalar_sum[half]);
#elif SCORE == SCORE_COSINE
            ds[n][i] *= other;
            head.scalar_sum[half] = fmaf(ds[n][i], logit[n][i], head.scalar_sum[half]);
#endif
        }
    }
#if SCORE != SCORE_ADD
    multiply_rows(head.acc, ds, keys);
#endif
}

__device__ __forceinline__ void store_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h,
                                           void* grad_target, float* grad_beta) {
#if INVERSE_LAST
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        head.scalar_sum[half] *= head.inverse[half];
#if SCORE != SCORE_ADD
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            head.acc[c][2 * half] *= head.inverse[half];
            head.acc[c][2 * half + 1] *= head.inverse[half];
        }
#endif
    }
#endif
    if (SCORE != SCORE_DOT) sum_scalars(head.scalar_sum, head.own_scalar);
#if SCORE == SCORE_ADD
    store_scalars(static_cast<float*>(grad_target), own, h, head.scalar_sum);
#else
#if SCORE == SCORE_COSINE
    project(head.acc, in.target, own, h, head.own_scalar, head.scalar_sum);
    store_scalars(grad_beta, own, h, head.scalar_sum);
#endif
    scale_tiles(head.acc, SCORE == SCORE_COSINE ? in.parameter[0] : in.scale);
    store_rows(static_cast<storage_t*>(grad_target), own, h, head.acc);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block_mma_backward_targets(TILES_PARAMETERS, INPUT_PARAMETERS, const float* out, const float* softmax,
                                 const storage_t* grad_out, float* records, void* grad_target, float* grad_beta) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles tiles = {windows, columns, bits};
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
    for (int h = 0; h < BLOCK_HEADS; ++h) load_head(heads[h], in, own, h, out, softmax, grad_out, records);

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
    for (int h = 0; h < BLOCK_HEADS; ++h) store_head(heads[h], in, own, h, grad_target, grad_beta);
}
