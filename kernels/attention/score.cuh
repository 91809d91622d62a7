// What the row schedules compute of a score on a lane's part of a row; the scores themselves are in logit.cuh.
#include "attention/logit.cuh"

// One lane's part of the product of head h; the sum over the lanes of the head is the score's reduction.
__device__ __forceinline__ float score_product(const Part& target, const Part& source, const Part& parameter,
                                               float slope, int h) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE_ELEMS; ++c) {
#if SCORE == SCORE_GATV2
        sum = fmaf(parameter.x[h][c], leaky(target.x[h][c] + source.x[h][c], slope), sum);
#else
        sum = fmaf(target.x[h][c], source.x[h][c], sum);
#endif
    }
    return sum;
}

__device__ __forceinline__ HeadValues load_scalars(const float* base, int row, const Lanes& l) {
#if HAS_NODE_SCALARS
    return load_heads(base, row, l);
#else
    return zero_heads();
#endif
}

// The factor between the reduced product and the base-2 logit of a row.
__device__ __forceinline__ HeadValues logit_factor(const ScoreInputs& in, const HeadValues& own) {
    HeadValues factor;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#if SCORE == SCORE_DOT
        factor.x[h] = in.scale * LOG2E;
#elif SCORE == SCORE_COSINE
        factor.x[h] = in.parameter[0] * LOG2E * own.x[h];
#else
        factor.x[h] = LOG2E;
#endif
    }
    return factor;
}

__device__ __forceinline__ void add_to(Part& part, const Part& other) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) part.x[h][c] += other.x[h][c];
    }
}

// Adds to a sum of many terms. EXACT gathers what rounding takes from the sum in `lost`, to be added at the end
// (Knuth's two-sum): a chain over the thousands of chunks of a hub would cost several bits.
template <bool EXACT>
__device__ __forceinline__ void accumulate(float& sum, float& lost, float term) {
    const float total = sum + term;
    if (EXACT) {
        const float added = total - sum;
        lost += (sum - (total - added)) + (term - added);
    }
    sum = total;
}

template <bool EXACT>
__device__ __forceinline__ void accumulate(Part& sum, Part& lost, const Part& term) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) accumulate<EXACT>(sum.x[h][c], lost.x[h][c], term.x[h][c]);
    }
}

template <bool EXACT>
__device__ __forceinline__ void accumulate(HeadValues& sum, HeadValues& lost, const HeadValues& term) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) accumulate<EXACT>(sum.x[h], lost.x[h], term.x[h]);
}

// Adds what a sum has lost; an infinite one has no such number.
__device__ __forceinline__ void add_lost(float& sum, float lost) { sum += lost == lost ? lost : 0.0f; }

__device__ __forceinline__ void add_lost(Part& sum, const Part& lost) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) add_lost(sum.x[h][c], lost.x[h][c]);
    }
}

__device__ __forceinline__ void add_lost(HeadValues& sum, const HeadValues& lost) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) add_lost(sum.x[h], lost.x[h]);
}

__device__ __forceinline__ Part load_parameter(const ScoreInputs& in, const Lanes& l) {
#if SCORE == SCORE_GATV2
    return load_part_fp32(in.parameter, 0, l);
#else
    return zero_part();
#endif
}
