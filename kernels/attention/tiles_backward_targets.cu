// Attention backward over windows of targets, tile schedule: records and target gradients, as in backward_targets.cu. Row
// dot products of the step are recomputed on tensor cores, and the gradient is the product of dS with the step's rows.
#include "include/number.cuh"
#include "include/mma.cuh"
#include "attention/logit.cuh"
#include "attention/tiles.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS ((HAS_TARGET_VECTOR ? 2 : 1) * BLOCK_HEADS * LEFT_WORDS)

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2], max[2], inverse[2], delta[2];
    // The gradient of l (add), or <x^, g> (cosine): summed here as the products' operands may be rounded to 16 bits.
    float scalar_sum[2];
#if SCORE != SCORE_ADD
    float acc[CHANNEL_TILES][4];
#endif
};

__device__ __forceinline__ void load_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h, const float* out,
                                          const float* softmax, const storage_t* grad_out, float* records) {
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
            reinterpret_cast<float4*>(records)[index] =
                make_float4(head.max[half], head.inverse[half], head.delta[half], 0.0f);
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
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2;
            const float other = HAS_NODE_SCALARS ? others[(8 * n + lane_column(i % 2)) * BLOCK_HEADS] : 0.0f;
            const float s = score_logit(logit[n][i], head.own_scalar[half], other, 0.0f, head.factor[half], in.slope);
            const float p = mask.weight(s, head.max[half], head.inverse[half], n, i);
            ds[n][i] = p * ds[n][i] - p * head.delta[half];
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

__device__ __forceinline__ void store_head(Head& head, const ScoreInputs& in, const OwnRows& own, int h, void* grad_target,
                                           float* grad_beta) {
#if SCORE != SCORE_DOT
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        head.scalar_sum[half] = quad_sum(head.scalar_sum[half]) * (SCORE == SCORE_COSINE ? head.own_scalar[half] : 1.0f);
    }
#endif
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
attention_tiles_backward_targets(const int* windows, const int* columns, const u32* bits, const storage_t* target,
                                 const storage_t* key, const storage_t* value, const float* target_scalars,
                                 const float* source_scalars, const float* parameter, const void* edge,
                                 const u64* seed, double scale, double slope, double dropout, const float* out,
                                 const float* softmax, const storage_t* grad_out, float* records, void* grad_target,
                                 float* grad_beta) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles tiles = {windows, columns, bits};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    u32* const grad_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
    u32* const target_words = grad_words + OWN_WORDS - BLOCK_HEADS * LEFT_WORDS;
    storage_t* const stages = reinterpret_cast<storage_t*>(reinterpret_cast<u32*>(memory) + WARPS * OWN_WORDS);
    float* const scalars = reinterpret_cast<float*>(stages + 2 * STAGE_ELEMENTS);
    const Window w = load_window(tiles);
    const int steps = (w.num_columns + STEP - 1) / STEP;

    const auto fetch = [&](int step) {
        storage_t* const stage = stages + step % 2 * STAGE_ELEMENTS;
        const auto id = [&](int row) { return column_node(tiles, w, step * STEP + row); };
#if HAS_KEY
        storage_t* const rows[2] = {stage, stage + TILE_ELEMENTS(STEP)};
        const storage_t* const tensors[2] = {in.key, in.value};
        copy_rows<STEP, 2>(rows, tensors, id);
#else
        copy_rows<STEP>(stage, in.value, id);
#endif
        if (HAS_NODE_SCALARS) copy_scalars<STEP>(scalars + step % 2 * STEP * BLOCK_HEADS, in.source_scalars, id);
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

    StepBits next_bits = {};
    if (steps > 0) next_bits = load_bits(tiles, w, 0);
    for (int step = 0; step < steps; ++step) {
        const StepBits edges = next_bits.of_step(step);
        wait_copies<0>();
        // All copies of this step have arrived, and nobody reads the stage of the step before any more.
        __syncthreads();
        if (step + 1 < steps) {
            fetch(step + 1);
            next_bits = load_bits(tiles, w, step + 1);
        }
        if (warp_has_edges(edges)) {
            const storage_t* const keys = stages + step % 2 * STAGE_ELEMENTS;
            const storage_t* const values = keys + TILE_ELEMENTS(KEY_ROWS);
            const float* const others = scalars + step % 2 * STEP * BLOCK_HEADS;
            const Mask mask(edges);
#pragma unroll
            for (int h = 0; h < BLOCK_HEADS; ++h) {
                add_step(heads[h], in, mask, grad_words + h * LEFT_WORDS, target_words + h * LEFT_WORDS,
                         keys + h * CHANNELS, values + h * CHANNELS, others + h);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) store_head(heads[h], in, own, h, grad_target, grad_beta);
}
