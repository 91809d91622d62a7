// Reductions of a generated step over the rows of an adjacency, with STATE_FRAGMENTS vectors in a state. The text of the step is injected as step.cuh:
//
//   STEP_PARAMETERS, STEP_ARGUMENTS, struct Arguments   index arrays, then the buffers that are read and written
//   set_indices(a, arg)         the index arrays by position in the adjacency, INDICES of them
//   struct RowIndex             which rows of other domains a position reads
//   struct Own                  what belongs to the row: load(arg, row, l)
//   struct Gathered             what is gathered for a position: load(arg, index, l)
//   struct Accumulators         the state of a row; ACCUMULATORS(DO) calls DO(accumulator) for each
//   add_terms(state, arg, own, loaded, index, l, counts)   the terms of a position, and what is stored of it
//   finish_row(state, arg, row, l, writes, is_empty)       what follows from the sums, written
#include "include/traversal.cuh"
#include "relational/rows.cuh"
#include "relational/accumulators.cuh"

#include "step.cuh"

struct Neighbours {
    Gathered of[UNROLL];
};

struct Reduction {
    typedef Accumulators State;
    typedef RowIndex Index;
    typedef Neighbours Loaded;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = false, RESETS_EMPTY = false;

    const Arguments& arg;
    const Lanes& l;
    // Null where no row is empty.
    const int* rowptr;
    Own own;

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) { own.load(arg, item.row, l); }

    __device__ __forceinline__ State empty() const {
        State s;
#define CLEAR(accumulator) s.accumulator.clear();
        ACCUMULATORS(CLEAR)
        return s;
    }

    __device__ __forceinline__ Neighbours load(const Step<Index>& step) const {
        Neighbours g;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) g.of[u].load(arg, step.edge[u], l);
        return g;
    }

    template <bool FULL>
    __device__ __forceinline__ void step(State& state, const Neighbours& g, const Adjacency&, const Item& item,
                                         const Step<Index>& step, int number) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            add_terms(state, arg, own, g.of[u], step.edge[u], l, FULL || is_valid(item, l, number, u));
        }
    }

    __device__ __forceinline__ void end(State&, const Item&) const {}

    __device__ __forceinline__ void merge_slots(State& s) const {
#pragma unroll
        for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
#define EXCHANGE(accumulator) s.accumulator.exchange(mask);
            ACCUMULATORS(EXCHANGE)
        }
    }

    __device__ __forceinline__ void save(const State& s, float* buffer, i64 count, i64 i) const {
        StateAt at(buffer, count, i);
#define SAVE(accumulator) s.accumulator.save(at, l);
        ACCUMULATORS(SAVE)
    }

    __device__ __forceinline__ State restore(const float* buffer, i64 count, i64 i) const {
        StateAt at(buffer, count, i);
        State s;
#define RESTORE(accumulator) s.accumulator.restore(at, l);
        ACCUMULATORS(RESTORE)
        return s;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(State& state, const float* buffer, i64 count, int begin, int end) const {
        State lost;
#define LOSE(accumulator) lost.accumulator.lose();
        ACCUMULATORS(LOSE)
#pragma unroll 2
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const State other = restore(buffer, count, i);
#define TAKE(accumulator) state.accumulator.template take<COMPENSATED>(lost.accumulator, other.accumulator);
            ACCUMULATORS(TAKE)
        }
#define FINISH(accumulator) state.accumulator.finish(lost.accumulator);
        ACCUMULATORS(FINISH)
        merge_slots(state);
    }

    __device__ __forceinline__ void store(const State& state, int row, bool writes) const {
        finish_row(state, arg, row, l, writes, rowptr != nullptr && rowptr[row] == rowptr[row + 1]);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
relational_traversal(ADJACENCY_PARAMETERS, STEP_PARAMETERS, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const Arguments arg = STEP_ARGUMENTS;
    set_indices(a, arg);
    const Lanes l = lane_layout();
    Reduction functor = {arg, l, rowptr};
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
relational_traversal_merge(HEAVY_PARAMETERS, const float* partial, STEP_PARAMETERS, float* carry) {
    const Arguments arg = STEP_ARGUMENTS;
    const Lanes l = lane_layout();
    const Reduction functor = {arg, l, nullptr};
    merge_heavy_rows(HeavyRows HEAVY, l, functor, partial, carry);
}
