// Attention forward, tile schedule: O_i = sum_j softmax_j(S_ij) v_j over the columns of a window, with an online softmax.
// Results as in forward.cu.
#include "include/number.cuh"
#include "include/mma.cuh"
#include "attention/logit.cuh"
#include "attention/tiles.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS (HAS_TARGET_VECTOR ? LEFT_WORDS : 0)

// exp2 differences against -inf stay 0 instead of NaN.
__device__ __forceinline__ float finite(float max) { return max == negative_infinity() ? 0.0f : max; }

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
        if (HAS_NODE_SCALARS && threadIdx.x < STEP) {
            copy4(scalars + step % 2 * STEP + threadIdx.x, in.source_scalars + head_index(id(threadIdx.x)));
        }
        close_copies();
    };

    clear_padding(stages, 2 * (KEY_ROWS + STEP));
    if (steps > 0) fetch(0);
    const OwnRows own = own_rows(w);
    if (HAS_TARGET_VECTOR) keep_own_rows(own_words, in.target, own);
    float own_scalar[2], factor[2], max[2], sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        own_scalar[half] = load_scalar(in.target_scalars, own.row[half]);
        factor[half] = logit_factor(in, own_scalar[half]);
        max[half] = negative_infinity();
        sum[half] = 0.0f;
    }
    float acc[CHANNEL_TILES][4];
    clear(acc);

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
            const float* const others = scalars + step % 2 * STEP;
            float p[STEP_TILES][4];
#if HAS_TARGET_VECTOR
            multiply_transposed(p, own_words, stage);
#endif
            float before[2] = {max[0], max[1]};
#pragma unroll
            for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float other = HAS_NODE_SCALARS ? others[8 * n + lane_column(i % 2)] : 0.0f;
                    const float s = score_logit(p[n][i], own_scalar[i / 2], other, 0.0f, factor[i / 2], in.slope);
                    p[n][i] = has_edge(edges, n, i) ? s : negative_infinity();
                    max[i / 2] = fmaxf(max[i / 2], p[n][i]);
                }
            }
            float reference[2], rescale[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                max[half] = quad_max(max[half]);
                reference[half] = finite(max[half]);
                rescale[half] = fast_exp2(before[half] - reference[half]);
                sum[half] *= rescale[half];
            }
#pragma unroll
            for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[n][i] = fast_exp2(p[n][i] - reference[i / 2]);
                    sum[i / 2] += p[n][i];
                }
            }
            if (__any_sync(FULL_MASK, max[0] != before[0] || max[1] != before[1])) {
#pragma unroll
                for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[c][i] *= rescale[i / 2];
                }
            }
            multiply_rows(acc, p, stage + TILE_ELEMENTS(KEY_ROWS));
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = quad_sum(sum[half]);
        const bool empty = sum[half] == 0.0f;
        const float inverse = empty ? 0.0f : 1.0f / sum[half];
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) acc[c][i] = empty ? 0.0f : acc[c][i] * inverse;
        }
        if (lane_pos() == 0 && own.exists[half]) {
            reinterpret_cast<float2*>(softmax)[head_index(own.row[half])] = make_float2(finite(max[half]), inverse);
        }
    }
    store_rows(out, own, acc);
    if (exact != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* const row = exact + head_index(own.row[half]) * CHANNELS + 2 * lane_pos();
#pragma unroll
            for (int c = 0; c < CHANNEL_TILES; ++c) {
                if (own.exists[half] && has_channels(c)) {
                    *reinterpret_cast<float2*>(row + 8 * c) = make_float2(acc[c][2 * half], acc[c][2 * half + 1]);
                }
            }
        }
    }
}
