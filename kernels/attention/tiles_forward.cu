// Attention forward, tile schedule: O_i = sum_j softmax_j(S_ij) v_j over the columns of a window, with an online softmax.
// Results as in forward.cu.
#include "include/number.cuh"
#include "include/mma.cuh"
#include "attention/logit.cuh"
#include "attention/tiles.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS (HAS_TARGET_VECTOR ? BLOCK_HEADS * LEFT_WORDS : 0)

// exp2 differences against -inf stay 0 instead of NaN.
__device__ __forceinline__ float finite(float max) { return max == negative_infinity() ? 0.0f : max; }

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2], max[2], sum[2], acc[CHANNEL_TILES][4];
};

// Adds a step to the online softmax of one head, whose channels begin at `stage` and scalars at `others`.
__device__ __forceinline__ void add_step(Head& head, const ScoreInputs& in, const Mask& mask, u32* own_words,
                                         const storage_t* stage, const float* others) {
    float p[STEP_TILES][4];
#if HAS_TARGET_VECTOR
    multiply_transposed(p, own_words, stage);
#endif
    const float before[2] = {head.max[0], head.max[1]};
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = HAS_NODE_SCALARS ? others[(8 * n + lane_column(i % 2)) * BLOCK_HEADS] : 0.0f;
            const float s = score_logit(p[n][i], head.own_scalar[i / 2], other, 0.0f, head.factor[i / 2], in.slope);
            p[n][i] = mask.logit(s, n, i);
            head.max[i / 2] = fmaxf(head.max[i / 2], p[n][i]);
        }
    }
    float reference[2], rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        head.max[half] = quad_max(head.max[half]);
        reference[half] = finite(head.max[half]);
        rescale[half] = fast_exp2(before[half] - reference[half]);
        head.sum[half] *= rescale[half];
    }
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[n][i] = fast_exp2(p[n][i] - reference[i / 2]);
            head.sum[i / 2] += p[n][i];
        }
    }
    if (__any_sync(FULL_MASK, head.max[0] != before[0] || head.max[1] != before[1])) {
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) head.acc[c][i] *= rescale[i / 2];
        }
    }
    multiply_rows(head.acc, p, stage + TILE_ELEMENTS(KEY_ROWS));
}

__device__ __forceinline__ void store_head(Head& head, const OwnRows& own, int h, storage_t* out, float* softmax,
                                           float* exact) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(head.sum[half]);
        const bool empty = sum == 0.0f;
        const float inverse = empty ? 0.0f : reciprocal(sum);
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) head.acc[c][i] = empty ? 0.0f : head.acc[c][i] * inverse;
        }
        const i64 index = head_index(own.row[half], h);
        if (softmax != nullptr && lane_pos() == 0 && own.exists[half]) {
            reinterpret_cast<float2*>(softmax)[index] = make_float2(finite(head.max[half]), inverse);
        }
        if (exact != nullptr && own.exists[half]) {
            float* const row = exact + index * CHANNELS + 2 * lane_pos();
#pragma unroll
            for (int c = 0; c < CHANNEL_TILES; ++c) {
                if (!has_channels(c)) continue;
                *reinterpret_cast<float2*>(row + 8 * c) = make_float2(head.acc[c][2 * half], head.acc[c][2 * half + 1]);
            }
        }
    }
    store_rows(out, own, h, head.acc);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_tiles_forward(const int* windows, const int* columns, const u32* bits, const storage_t* target,
                        const storage_t* key, const storage_t* value, const float* target_scalars,
                        const float* source_scalars, const float* parameter, const void* edge, const u64* seed,
                        double scale, double slope, double dropout, storage_t* out, float* softmax, float* exact) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Tiles tiles = {windows, columns, bits};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    u32* const own_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
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
    if (HAS_TARGET_VECTOR) keep_own_rows(own_words, in.target, own);
    Head heads[BLOCK_HEADS];
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            heads[h].own_scalar[half] = load_scalar(in.target_scalars, own.row[half], h);
            heads[h].factor[half] = logit_factor(in, heads[h].own_scalar[half]);
            heads[h].max[half] = negative_infinity();
            heads[h].sum[half] = 0.0f;
        }
        clear(heads[h].acc);
    }

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
            const storage_t* const stage = stages + step % 2 * STAGE_ELEMENTS;
            const float* const others = scalars + step % 2 * STEP * BLOCK_HEADS;
            const Mask mask(edges);
#pragma unroll
            for (int h = 0; h < BLOCK_HEADS; ++h) {
                add_step(heads[h], in, mask, own_words + h * LEFT_WORDS, stage + h * CHANNELS, others + h);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) store_head(heads[h], own, h, out, softmax, exact);
}
