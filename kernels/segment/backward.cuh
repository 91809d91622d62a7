// What the two backward passes share: the operands of one end of an edge, and sums that become gradients.
#include "segment/segment.cuh"

#define BACKWARD_PARAMETERS                                                                                          \
    INPUT_PARAMETERS, const storage_t *out, KEPT_PARAMETERS(const), const storage_t *grad_out, const float *slope,   \
        const float *offset

// The state of a row: GRADIENTS sums.
struct Sums {
    Fragment of[GRADIENTS];
};

struct Backward {
    typedef Sums State;
    typedef ColumnIndex<(EDGE != 0)> Index;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = true, RESETS_EMPTY = false;

    const Inputs& in;
    const Lanes& l;

    __device__ __forceinline__ Sums empty() const {
        Sums s;
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) s.of[k] = zero_fragment();
        return s;
    }

    __device__ __forceinline__ void end(State&, const Item&) const {}

    __device__ __forceinline__ void merge_slots(Sums& s) const {
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) slot_sum<false>(s.of[k]);
    }

    __device__ __forceinline__ void save(const Sums& s, float* buffer, i64 count, i64 i) const {
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) store_fragment_fp32(buffer, k * count + i, l, s.of[k]);
    }

    __device__ __forceinline__ Sums restore(const float* buffer, i64 count, i64 i) const {
        Sums s;
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) s.of[k] = load_fragment_fp32(buffer, k * count + i, l);
        return s;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Sums& state, const float* buffer, i64 count, int begin, int end) const {
        Sums lost = empty();
#pragma unroll 2
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const Sums other = restore(buffer, count, i);
#pragma unroll
            for (int k = 0; k < GRADIENTS; ++k) accumulate<COMPENSATED>(state.of[k], lost.of[k], other.of[k]);
        }
#pragma unroll
        for (int k = 0; k < GRADIENTS; ++k) add_lost(state.of[k], lost.of[k]);
        merge_slots(state);
    }
};
