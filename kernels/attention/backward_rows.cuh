// What the functors of both backward passes share: the sums of a row over its edges. Those of the features that are
// averaged (SUMS_VALUE), those of the score's vector (SUMS_SCORE), and where nodes have scalars one number per head.
#include "attention/backward.cuh"

struct Sums {
    Fragment value, score;
    HeadValues scalar;
};

struct Backward {
    typedef Sums State;
    typedef ColumnIndex<(EDGE != 0)> Index;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = false, RESETS_EMPTY = true;

    const ScoreInputs& in;
    const Lanes& l;

    __device__ __forceinline__ Sums empty() const { return {zero_fragment(), zero_fragment(), zero_heads()}; }

    __device__ __forceinline__ void merge_slots(Sums& sums) const {
        if (SUMS_VALUE) slot_sum<false>(sums.value);
        if (SUMS_SCORE) slot_sum<false>(sums.score);
        if (SUMS_SCALAR) slot_sum(sums.scalar);
    }

    // Value [count, HEADS, CHANNELS], score likewise, scalar [count, HEADS].
    __device__ __forceinline__ void save(const Sums& sums, float* buffer, i64 count, i64 i) const {
        float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
        if (SUMS_VALUE) store_fragment_fp32(buffer, i, l, sums.value);
        if (SUMS_SCORE) store_fragment_fp32(rest, i, l, sums.score);
        if (SUMS_SCALAR) store_heads(rest + SUMS_SCORE * count * ROW_STRIDE, i, l, sums.scalar);
    }

    __device__ __forceinline__ Sums restore(const float* buffer, i64 count, i64 i) const {
        Sums sums = empty();
        const float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
        if (SUMS_VALUE) sums.value = load_fragment_fp32(buffer, i, l);
        if (SUMS_SCORE) sums.score = load_fragment_fp32(rest, i, l);
        if (SUMS_SCALAR) sums.scalar = load_state_heads(rest + SUMS_SCORE * count * ROW_STRIDE, i, l);
        return sums;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Sums& sums, const float* buffer, i64 count, int begin, int end) const {
        Sums lost = empty();
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const Sums other = restore(buffer, count, i);
            if (SUMS_VALUE) accumulate<COMPENSATED>(sums.value, lost.value, other.value);
            accumulate<COMPENSATED>(sums.score, lost.score, other.score);
            accumulate<COMPENSATED>(sums.scalar, lost.scalar, other.scalar);
        }
        if (SUMS_VALUE) add_lost(sums.value, lost.value);
        add_lost(sums.score, lost.score);
        add_lost(sums.scalar, lost.scalar);
        merge_slots(sums);
    }
};
