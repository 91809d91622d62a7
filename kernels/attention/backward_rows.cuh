// What the functors of both backward passes share: the sums of a row over its edges. Those of the features that are
// averaged (SUMS_VALUE), those of the score's vector (SUMS_SCORE), those of what the target has for the rows of its edges
// (SUMS_EDGE), and numbers per head: one where nodes have scalars, three of targets for a parameter [1].
#include "attention/backward.cuh"

#define SUMS_HEADS (SUMS_PARAMETER ? 3 : SUMS_SCALAR)

struct Sums {
    Fragment value, score;
    HeadValues scalars[SUMS_HEADS > 0 ? SUMS_HEADS : 1];
    FragmentOf<EdgeTargets> edge;
};

struct Backward {
    typedef Sums State;
    typedef ColumnIndex<(EDGE != 0)> Index;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = false, RESETS_EMPTY = true;

    const ScoreInputs& in;
    const Lanes& l;

    __device__ __forceinline__ Sums empty() const {
        return {zero_fragment(), zero_fragment(), {}, zero_fragment<EdgeTargets>()};
    }

    __device__ __forceinline__ void merge_slots(Sums& sums) const {
        if (SUMS_VALUE) slot_sum<false>(sums.value);
        if (SUMS_SCORE) slot_sum<false>(sums.score);
#pragma unroll
        for (int k = 0; k < SUMS_HEADS; ++k) slot_sum(sums.scalars[k]);
        if (SUMS_EDGE) slot_sum<false>(sums.edge);
    }

    // Value [count, HEADS, CHANNELS], score likewise, scalars [SUMS_HEADS, count, HEADS], edge [count, HEADS, EDGE_CHANNELS].
    static __device__ __forceinline__ i64 edge_sums(i64 count) {
        return count * ((SUMS_VALUE + SUMS_SCORE) * ROW_STRIDE + SUMS_HEADS * HEADS);
    }

    __device__ __forceinline__ void save(const Sums& sums, float* buffer, i64 count, i64 i) const {
        float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
        if (SUMS_VALUE) store_fragment_fp32(buffer, i, l, sums.value);
        if (SUMS_SCORE) store_fragment_fp32(rest, i, l, sums.score);
        float* heads = rest + SUMS_SCORE * count * ROW_STRIDE;
#pragma unroll
        for (int k = 0; k < SUMS_HEADS; ++k) store_heads(heads, k * count + i, l, sums.scalars[k]);
        if (SUMS_EDGE) store_fragment_fp32<false>(buffer + edge_sums(count), i, l, sums.edge);
    }

    __device__ __forceinline__ Sums restore(const float* buffer, i64 count, i64 i) const {
        Sums sums = empty();
        const float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
        if (SUMS_VALUE) sums.value = load_fragment_fp32(buffer, i, l);
        if (SUMS_SCORE) sums.score = load_fragment_fp32(rest, i, l);
        const float* heads = rest + SUMS_SCORE * count * ROW_STRIDE;
#pragma unroll
        for (int k = 0; k < SUMS_HEADS; ++k) sums.scalars[k] = load_state_heads(heads, k * count + i, l);
        if (SUMS_EDGE) sums.edge = load_fragment_fp32<EdgeTargets, false>(buffer + edge_sums(count), i, l);
        return sums;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Sums& sums, const float* buffer, i64 count, int begin, int end) const {
        Sums lost = empty();
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const Sums other = restore(buffer, count, i);
            if (SUMS_VALUE) accumulate<COMPENSATED>(sums.value, lost.value, other.value);
            accumulate<COMPENSATED>(sums.score, lost.score, other.score);
#pragma unroll
            for (int k = 0; k < SUMS_HEADS; ++k) {
                accumulate<COMPENSATED>(sums.scalars[k], lost.scalars[k], other.scalars[k]);
            }
            if (SUMS_EDGE) accumulate<COMPENSATED>(sums.edge, lost.edge, other.edge);
        }
        if (SUMS_VALUE) add_lost(sums.value, lost.value);
        add_lost(sums.score, lost.score);
#pragma unroll
        for (int k = 0; k < SUMS_HEADS; ++k) add_lost(sums.scalars[k], lost.scalars[k]);
        if (SUMS_EDGE) add_lost(sums.edge, lost.edge);
        merge_slots(sums);
    }
};
