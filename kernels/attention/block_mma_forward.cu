// Attention forward, schedule `block_mma`: O_i = sum_j softmax_j(S_ij) v_j over the columns of a window. Results as in
// forward.cu, with `max` any number close to the logits of a row: P = exp(S - max). Where one is known beforehand, no
// maximum is taken, and nothing is scaled again as the row goes on:
//
//   HAS_NORMS  the bound of the score, if it is small enough
//   FACTORED   the logit with the largest scalar of the window's columns, if they lie close enough together. Then no
//              exponential per edge is left: P = max(A_i B_j, A'_i B'_j), whose factors the score states
//   vectors    otherwise the maximum of the first steps, once all rows have edges, unless it is large
//
// If the sum of a row then runs out of bounds, its thread block starts again and takes the maximum of every step.
//
// Constants beside those of block_mma.cuh: FACTORED.
#include "include/number.cuh"
#include "include/operands.cuh"
#include "attention/inputs.cuh"
#include "attention/block_mma.cuh"

#define KEY_ROWS (HAS_KEY ? STEP : 0)
#define STAGE_ELEMENTS TILE_ELEMENTS(KEY_ROWS + STEP)
#define OWN_WORDS (HAS_TARGET_VECTOR ? BLOCK_HEADS * LEFT_WORDS : 0)

// Whether some maximum can be fixed; that of factors always stands before the first step.
#define CAN_FIX (HAS_TARGET_VECTOR || FACTORED)
// 16-bit weights are summed by a product with ones.
#define SUM_MMA (STORAGE != 0)

// What sums of weights may reach, and how far, in powers of two, logits may lie below a maximum that is fixed.
constexpr float MAX_SUM = STORAGE == 1 ? 32768.0f : 1.0995e12f, MAX_DEPTH = STORAGE == 1 ? 8.0f : 40.0f;
// Maxima to base 2 up to which a product and a difference may be rounded at once here and apart elsewhere.
constexpr float MAX_FIXED = 64.0f;

// Differences from -inf stay 0 instead of NaN.
__device__ __forceinline__ float finite(float max) { return max == negative_infinity() ? 0.0f : max; }

// What a lane holds of one head.
struct Head {
    float own_scalar[2], factor[2], max[2], sum[2], acc[CHANNEL_TILES][4];
#if SUM_MMA
    float sums[4];
#endif
#if FACTORED
    float rise[2], fall[2];  // A and A'
#endif
};

// Adds weights P times the values of a step, and with CUT, where weights without an edge are not 0 yet, to their sum.
template <bool CUT>
__device__ __forceinline__ void add_values(Head& head, float (&p)[STEP_TILES][4], const Cut* cut,
                                           const storage_t* values) {
#if SUM_MMA
#pragma unroll
    for (int k = 0; k < STEP / MMA_K; ++k) {
        Left a = left_of(&p[k * (MMA_K / 8)]);
        if constexpr (CUT) cut->apply(a, 2 * k);
        const u32 one = STORAGE == 1 ? 0x3c003c00u : 0x3f803f80u, ones[2] = {one, one};
        mma(head.sums, a.big, ones);
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; c += TILE_GROUP) {
            Right b[TILE_GROUP];
#pragma unroll
            for (int n = 0; n < TILE_GROUP; ++n) b[n] = right_columns(values + k * MMA_K * TILE_STRIDE, 8 * (c + n));
            multiply(&head.acc[c], a, b);
        }
    }
#else
    if constexpr (CUT) {
#pragma unroll
        for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[n][i] = cut->apply(p[n][i], n, i);
                head.sum[i / 2] += p[n][i];
            }
        }
    }
    multiply_rows(head.acc, p, values);
#endif
}

#if CAN_FIX
// Adds a step to the sums of one head whose maximum is fixed.
__device__ __forceinline__ void add_fixed_step(Head& head, const Cut& cut, u32* own_words, const storage_t* stage,
                                              const float* others, const float* falling) {
    float p[STEP_TILES][4];
#if FACTORED
    float rising_other[LANE_SCALARS], falling_other[LANE_SCALARS];
    lane_scalars(rising_other, others);
    lane_scalars(falling_other, falling);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = 2 * n + i % 2;
            p[n][i] = fmaxf(head.rise[i / 2] * rising_other[place], head.fall[i / 2] * falling_other[place]);
        }
    }
#else
    multiply_transposed(p, own_words, stage);
    float other[LANE_SCALARS];
    lane_scalars(other, others);
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (HAS_NORMS) p[n][i] *= other[2 * n + i % 2];
            p[n][i] = fast_exp2(fmaf(p[n][i], LOG2E * head.factor[i / 2], -LOG2E * head.max[i / 2]));
        }
    }
#endif
    add_values<true>(head, p, &cut, stage + TILE_ELEMENTS(KEY_ROWS));
}
#endif

// Adds a step to the online softmax of one head, whose channels begin at `stage` and scalars at `others`.
__device__ __forceinline__ void add_step(Head& head, const ScoreInputs& in, const Mask& mask, u32* own_words,
                                         const storage_t* stage, const float* others) {
    float p[STEP_TILES][4];
#if HAS_TARGET_VECTOR
    multiply_transposed(p, own_words, stage);
#endif
    float other_scalars[LANE_SCALARS];
    lane_scalars(other_scalars, others);
    const float before[2] = {head.max[0], head.max[1]};
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = other_scalars[2 * n + i % 2];
            const float s = Score::logit({p[n][i], head.own_scalar[i / 2], other, 0.0f, head.factor[i / 2]}, in);
            p[n][i] = mask.logit(s, n, i);
            head.max[i / 2] = fmaxf(head.max[i / 2], p[n][i]);
        }
    }
    float reference[2], rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        head.max[half] = quad_max(head.max[half]);
        reference[half] = finite(head.max[half]);
        rescale[half] = exp_difference(before[half], reference[half]);
        head.sum[half] *= rescale[half];
    }
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[n][i] = exp_difference(p[n][i], reference[i / 2]);
            head.sum[i / 2] += p[n][i];
        }
    }
    if (__any_sync(FULL_MASK, head.max[0] != before[0] || head.max[1] != before[1])) {
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) head.acc[c][i] *= rescale[i / 2];
        }
#if SUM_MMA
#pragma unroll
        for (int i = 0; i < 4; ++i) head.sums[i] *= rescale[i / 2];
#endif
    }
    add_values<false>(head, p, nullptr, stage + TILE_ELEMENTS(KEY_ROWS));
}

__device__ __forceinline__ float sum_of(const Head& head, int half) {
#if SUM_MMA
    return head.sums[2 * half];
#else
    return quad_sum(head.sum[half]);
#endif
}

__device__ __forceinline__ void store_head(Head& head, const OwnRows& own, int h, storage_t* out, float* row_stats,
                                           float* out_fp32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of(head, half);
        const bool empty = sum == 0.0f;
        const float inverse = empty ? 0.0f : reciprocal(sum);
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) head.acc[c][i] = empty ? 0.0f : head.acc[c][i] * inverse;
        }
        const i64 index = head_index(own.row[half], h);
        if (row_stats != nullptr && lane_pos() == 0 && own.exists[half]) {
            const float max = empty ? 0.0f : finite(head.max[half]);
            reinterpret_cast<float2*>(row_stats)[index] = make_float2(max, inverse);
        }
        if (out_fp32 != nullptr && own.exists[half]) {
            float* const row = out_fp32 + index * CHANNELS + 2 * lane_pos();
#pragma unroll
            for (int c = 0; c < CHANNEL_TILES; ++c) {
                if (!has_channels(c)) continue;
                *reinterpret_cast<float2*>(row + 8 * c) = make_float2(head.acc[c][2 * half], head.acc[c][2 * half + 1]);
            }
        }
    }
    store_rows(out, own, h, head.acc);
}

#if FACTORED
// Finds B and B' of all columns, each [step][head][place], A and A' of the rows, and c, `top`. Returns whether all of
// them are within bounds. `bounds` has room for two numbers per warp.
__device__ __forceinline__ bool find_factors(Head (&heads)[BLOCK_HEADS], float& top, float* rising, float* falling,
                                             float* bounds, const ScoreInputs& in, const BlockSparse& tiles,
                                             const Window& w,
                                             const OwnRows& own, int count) {
    float bottom = -negative_infinity();
    top = negative_infinity();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int place = i % STEP, h = i / STEP % BLOCK_HEADS, step = i / (STEP * BLOCK_HEADS);
        const int node = column_node(tiles, w, step * STEP + scalar_column(place));
        const float r = __ldg(in.source_scalars + head_index(node, h));
        rising[i] = r;
        top = fmaxf(top, r);
        bottom = fminf(bottom, r);
        if (r != r) bottom = negative_infinity();
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, mask));
        bottom = fminf(bottom, __shfl_xor_sync(FULL_MASK, bottom, mask));
    }
    if (threadIdx.x % 32 == 0) {
        bounds[threadIdx.x / 32 * 2] = top;
        bounds[threadIdx.x / 32 * 2 + 1] = bottom;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        top = fmaxf(top, bounds[2 * i]);
        bottom = fminf(bottom, bounds[2 * i + 1]);
    }
    bool bounded = (top - bottom) * LOG2E <= MAX_DEPTH && Score::has_factors(in);
    if (bounded) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const float depth = (rising[i] - top) * LOG2E;
            rising[i] = fast_exp2(depth);
            falling[i] = fast_exp2(Score::falling(depth, in));
        }
    }
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float highest = load_scalar(in.target_scalars, own.row[half], h) + top;
            bounded = bounded && fabsf(highest) * LOG2E <= MAX_FIXED;
            const float bent = Score::bend(highest, in);
            heads[h].rise[half] = fast_exp2(fminf(bent, 0.0f));
            heads[h].fall[half] = fast_exp2(fminf(-bent, 0.0f));
        }
    }
    return __syncthreads_and(bounded);
}
#endif

// The maximum of a row that is known before its first step.
__device__ __forceinline__ float known_max(const ScoreInputs& in, float own_scalar, float top) {
#if FACTORED
    return Score::highest_logit(own_scalar, top, in);
#elif HAS_NORMS
    return Score::bound(in);
#else
    return negative_infinity();
#endif
}

// Whether the maxima of a head's rows may stay.
__device__ __forceinline__ bool may_stay(const Head& head, const OwnRows& own) {
    const auto is_small = [&](int half) { return LOG2E * fabsf(head.max[half]) <= MAX_FIXED || !own.exists[half]; };
    return is_small(0) && is_small(1);
}

// Whether the sums under a fixed maximum are out of bounds, or not a number.
__device__ __forceinline__ bool is_out_of_bounds(const Head& head, const OwnRows& own) {
    const float first = sum_of(head, 0), second = sum_of(head, 1);
    return (own.exists[0] && !(first <= MAX_SUM)) || (own.exists[1] && !(second <= MAX_SUM));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_block_mma_forward(BLOCK_SPARSE_PARAMETERS, INPUT_PARAMETERS, storage_t* out, float* row_stats,
                            float* out_fp32) {
    extern __shared__ __align__(16) unsigned char memory[];
    const BlockSparse tiles = {windows, columns, bits};
    const ScoreInputs in = INPUTS;
    u32* const own_words = reinterpret_cast<u32*>(memory) + threadIdx.x / 32 * OWN_WORDS;
    storage_t* const stages = reinterpret_cast<storage_t*>(reinterpret_cast<u32*>(memory) + WARPS * OWN_WORDS);
    float* const scalars = reinterpret_cast<float*>(stages + 2 * STAGE_ELEMENTS);
    const Window w = load_window(tiles);
    const int steps = (w.num_columns + STEP - 1) / STEP;
    // Whether the maximum is taken of every step.
    bool careful = !CAN_FIX;

    const auto fetch = [&](int step) {
        const auto id = [&](int row) { return column_node(tiles, w, step * STEP + row); };
        copy_rows<HAS_KEY ? 2 : 1>(stages + step % 2 * STAGE_ELEMENTS, in.key, in.value, id);
        if (HAS_NODE_SCALARS && (!FACTORED || careful || step == 0)) {
            copy_scalars(scalars + step % 2 * STEP * BLOCK_HEADS, in.source_scalars, id);
        }
        close_copies();
    };

    clear_padding(stages, 2 * (KEY_ROWS + STEP));
    if (steps > 0) fetch(0);
    const OwnRows own = own_rows(w);
    if (HAS_TARGET_VECTOR) keep_own_rows(own_words, in.target, own);
    Head heads[BLOCK_HEADS];
    float top = 0.0f;
#if FACTORED
    const int count = steps * STEP * BLOCK_HEADS;
    float* const bounds = scalars + 2 * STEP * BLOCK_HEADS;
    float* const rising = bounds + (2 * WARPS + 3) / 4 * 4;
    float* const falling = rising + count;
    const bool known = find_factors(heads, top, rising, falling, bounds, in, tiles, w, own, count);
    careful = !known;
#elif HAS_NORMS
    const bool known = 2.0f * LOG2E * Score::bound(in) <= MAX_DEPTH;
#else
    const bool known = false;
#endif

#pragma unroll 1
    for (;;) {
        bool fixed = !careful && known;
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; ++h) {
            Head& head = heads[h];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                head.own_scalar[half] = load_scalar(in.target_scalars, own.row[half], h);
                head.factor[half] = Score::factor(in, head.own_scalar[half]);
                head.max[half] = fixed ? known_max(in, head.own_scalar[half], top) : negative_infinity();
                head.sum[half] = 0.0f;
            }
            clear(head.acc);
#if SUM_MMA
#pragma unroll
            for (int i = 0; i < 4; ++i) head.sums[i] = 0.0f;
#endif
        }

        for_each_step(tiles, w, steps, fetch, [&](int step, const StepBits& edges) {
            const storage_t* const stage = stages + step % 2 * STAGE_ELEMENTS;
            const float* const others = scalars + step % 2 * STEP * BLOCK_HEADS;
#if CAN_FIX
            if (fixed) {
                const Cut cut(edges);
#pragma unroll
                for (int h = 0; h < BLOCK_HEADS; ++h) {
#if FACTORED
                    const int at = (step * BLOCK_HEADS + h) * STEP;
                    add_fixed_step(heads[h], cut, nullptr, stage + h * CHANNELS, rising + at, falling + at);
#else
                    add_fixed_step(heads[h], cut, own_words + h * LEFT_WORDS, stage + h * CHANNELS, others + h * STEP,
                                  nullptr);
#endif
                }
                return;
            }
#endif
            const Mask mask(edges);
#pragma unroll
            for (int h = 0; h < BLOCK_HEADS; ++h) {
                add_step(heads[h], in, mask, own_words + h * LEFT_WORDS, stage + h * CHANNELS, others + h * STEP);
            }
            if (CAN_FIX && !FACTORED && !careful) {
                fixed = true;
#pragma unroll
                for (int h = 0; h < BLOCK_HEADS; ++h) fixed = fixed && may_stay(heads[h], own);
                fixed = __all_sync(FULL_MASK, fixed);
            }
        });
        if (careful) break;
        bool wrong = false;
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; ++h) wrong = is_out_of_bounds(heads[h], own) || wrong;
        if (!__syncthreads_or(wrong)) break;
        careful = true;
        if (steps > 0) fetch(0);
    }

#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) store_head(heads[h], own, h, out, row_stats, out_fp32);
}
