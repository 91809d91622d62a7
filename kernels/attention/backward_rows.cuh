// What the row kernels of both backward passes share: the sums of a row over its edges. Those of the features that are
// averaged (SUMS_VALUE), those of the score's vector (SUMS_SCORE), and for the add score one number per head.
#include "attention/backward.cuh"

#define SUMS_SCALAR (SCORE == SCORE_ADD)

struct Sums {
    Part value, score;
    HeadValues scalar;
};

__device__ __forceinline__ Sums zero_sums() { return {zero_part(), zero_part(), zero_heads()}; }

__device__ __forceinline__ void sum_slots(Sums& sums) {
    if (SUMS_VALUE) slot_sum<false>(sums.value);
    if (SUMS_SCORE) slot_sum<false>(sums.score);
    if (SUMS_SCALAR) slot_sum(sums.scalar);
}

// Sums in a buffer for `count` of them: value [count, HEADS, CHANNELS], then score likewise or scalar [count, HEADS].
__device__ __forceinline__ void store_sums(float* buffer, i64 count, i64 i, const Lanes& l, const Sums& sums) {
    float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
    if (SUMS_VALUE) store_part_fp32(buffer, i, l, sums.value);
    if (SUMS_SCORE) store_part_fp32(rest, i, l, sums.score);
    if (SUMS_SCALAR) store_heads(rest, i, l, sums.scalar);
}

__device__ __forceinline__ Sums load_sums(const float* buffer, i64 count, i64 i, const Lanes& l) {
    Sums sums = zero_sums();
    const float* rest = buffer + SUMS_VALUE * count * ROW_STRIDE;
    if (SUMS_VALUE) sums.value = load_part_fp32(buffer, i, l);
    if (SUMS_SCORE) sums.score = load_part_fp32(rest, i, l);
    if (SUMS_SCALAR) sums.scalar = load_state_heads(rest, i, l);
    return sums;
}

// Adds the chunks begin ... end - 1 in a buffer for `count` of them: each edge slot takes every EDGE_SLOTS-th in turn,
// then the slots are added.
template <bool EXACT>
__device__ __forceinline__ void add_chunks(Sums& sums, const float* buffer, i64 count, int begin, int end,
                                           const Lanes& l) {
    Sums lost = zero_sums();
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const Sums other = load_sums(buffer, count, c, l);
        if (SUMS_VALUE) accumulate<EXACT>(sums.value, lost.value, other.value);
        accumulate<EXACT>(sums.score, lost.score, other.score);
        accumulate<EXACT>(sums.scalar, lost.scalar, other.scalar);
    }
    if (SUMS_VALUE) add_lost(sums.value, lost.value);
    add_lost(sums.score, lost.score);
    add_lost(sums.scalar, lost.scalar);
    sum_slots(sums);
}

// Whether an item starts from the sums that earlier sweeps carried here.
__device__ __forceinline__ bool is_carried(const Adjacency& a, const Item& item, const Lanes& l) {
    return !a.starts() && item.active && item.chunk < 0 && l.edge_slot == 0;
}

// Adds up the sums of an item and leaves them where its row is finished. Returns whether the lane finishes it here.
__device__ __forceinline__ bool complete_sums(Sums& sums, const Adjacency& a, const Item& item, const Lanes& l,
                                              float* partial, float* carry) {
    sum_slots(sums);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    bool finishes = item.active && item.chunk < 0 && a.finishes() && l.edge_slot == 0;
    if (SWEPT && item.active && l.edge_slot == 0 && !finishes) {
        const bool light = item.chunk < 0;
        store_sums(light ? carry : partial, light ? a.num_rows : a.num_chunks, light ? item.row : item.chunk, l, sums);
    }
#if JOINED
    if (has_chunks(a)) {
        float* shared_sums = reinterpret_cast<float*>(dynamic_shared());
        const int slot = item_slot(l);
        if (l.edge_slot == 0) store_sums(shared_sums, ITEMS, slot, l, sums);
        __syncthreads();
        sums = zero_sums();
        add_chunks<false>(sums, shared_sums, ITEMS, slot, slot + item.join, l);
        finishes = item.first && l.edge_slot == 0;
    }
#endif
    return finishes;
}

// The sums of a heavy row over its chunks.
__device__ __forceinline__ Sums merge_sums(const HeavyRows& heavy, const HeavyRow& row, const Lanes& l,
                                           const float* partial, const float* carry) {
    const bool writes = row.active && l.edge_slot == 0;
    Sums sums = zero_sums();
    if (!heavy.starts() && writes) sums = load_sums(carry, heavy.num_rows, row.row, l);
    add_chunks<true>(sums, partial, heavy.num_chunks, row.begin, row.end, l);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    return sums;
}
