// Aggregation over the rows of the CSR: every statistic of the messages m_ij of a row in one gather,
//
//   O_is = t_i sum_j a_j m_ij,  t_i sum_j (a_j m_ij)^2,  max_j a_j m_ij,  min_j a_j m_ij
//
// in this order, as far as they are asked for. A row without edges gives zeros; a NaN among its messages is its maximum
// and its minimum. With ARGS it also writes the key of each extreme (see segment.cuh) and how many edges have it, both
// [num_targets, CHANNELS].
#include "segment/segment.cuh"

struct Stats {
    Fragment sums[ROOM(SUMS)];
    // Of messages, for the minimum of their negatives.
    Fragment best[ROOM(EXTREMES)];
    // How many edges have it.
    Fragment count[ROOM(EXTREMES)];
};

struct Results {
    out_t* out;
    u16 *arg_max, *arg_min;
    float *num_max, *num_min;
};

// Takes `number` messages x into an extreme.
__device__ __forceinline__ void take(float& best, float& count, float x, float number) {
    const float max = max_or_nan(best, x);
    if (ARGS) count = max != best ? number : x == best ? count + number : count;
    best = max;
}

__device__ __forceinline__ float signed_message(int extreme, float m) { return extreme == 0 && MAX ? m : -m; }

struct Neighbours {
    Packed values[UNROLL], keys[HAS_KEY ? UNROLL : 1];
    EdgeOperand edges;
    float scale[UNROLL];
};

struct Forward {
    typedef Stats State;
    typedef ColumnIndex<(EDGE != 0)> Index;
    typedef Neighbours Loaded;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = true, RESETS_EMPTY = false;

    const Inputs& in;
    const Results& results;
    const Lanes& l;
    bool is_empty;
    Fragment own;

    __device__ __forceinline__ void begin(const Adjacency& a, const Item& item) {
        const i64 blocks = SWEPT ? a.num_blocks : 1;
        is_empty = item.chunk < 0 && a.rowptr[item.row * blocks] == a.rowptr[(item.row + 1) * blocks];
        own = zero_fragment();
        if (HAS_TARGET) own = load_fragment(in.target, item.row, l);
    }

    __device__ __forceinline__ Stats empty() const {
        Stats s;
#pragma unroll
        for (int k = 0; k < SUMS; ++k) s.sums[k] = zero_fragment();
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            s.count[k] = zero_fragment();
            for_each_channel(l, [&](int h, int c, int) { s.best[k].x[h][c] = negative_infinity(); });
        }
        return s;
    }

    __device__ __forceinline__ Neighbours load(const Step<Index>& step) const {
        Neighbours n;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int col = step.edge[u].col;
            n.values[u] = load_packed(at_lane(in.value, l), col, l);
            if (HAS_KEY) n.keys[HAS_KEY ? u : 0] = load_packed(at_lane(in.key, l), col, l);
            n.edges.load(in.edge, u, step.edge[u].perm, l);
            n.scale[u] = source_scale_of(in, col);
        }
        return n;
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Stats& state, Neighbours& n, const Adjacency&, const Item& item,
                                         const Step<Index>&, int number) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment value = widen(n.values[u]), edge = n.edges.at(u);
            const Fragment key = HAS_KEY ? widen(n.keys[HAS_KEY ? u : 0]) : zero_fragment();
            const bool counts = FULL || is_valid(item, l, number, u);
            for_each_channel(l, [&](int h, int c, int) {
                const float m = message_of({value.x[h][c], edge.x[h][c], key.x[h][c], own.x[h][c]}, n.scale[u]);
                if (!counts) return;
                if (SUM) state.sums[0].x[h][c] += m;
                if (SQUARES) state.sums[SUM].x[h][c] = fmaf(m, m, state.sums[SUM].x[h][c]);
#pragma unroll
                for (int k = 0; k < EXTREMES; ++k) {
                    take(state.best[k].x[h][c], state.count[k].x[h][c], signed_message(k, m), 1.0f);
                }
            });
        }
    }

    __device__ __forceinline__ void end(State&, const Item&) const {}

    __device__ __forceinline__ void merge_slots(Stats& s) const {
#pragma unroll
        for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
            for_each_channel(l, [&](int h, int c, int) {
#pragma unroll
                for (int k = 0; k < SUMS; ++k) s.sums[k].x[h][c] += __shfl_xor_sync(FULL_MASK, s.sums[k].x[h][c], mask);
#pragma unroll
                for (int k = 0; k < EXTREMES; ++k) {
                    const float best = __shfl_xor_sync(FULL_MASK, s.best[k].x[h][c], mask);
                    const float count = ARGS ? __shfl_xor_sync(FULL_MASK, s.count[k].x[h][c], mask) : 0.0f;
                    take(s.best[k].x[h][c], s.count[k].x[h][c], best, count);
                }
            });
        }
    }

    // [SUMS + EXTREMES, and with ARGS + EXTREMES, count, CHANNELS].
    __device__ __forceinline__ void save(const Stats& s, float* buffer, i64 count, i64 i) const {
#pragma unroll
        for (int k = 0; k < SUMS; ++k) store_fragment_fp32(buffer, k * count + i, l, s.sums[k]);
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            store_fragment_fp32(buffer, (SUMS + k) * count + i, l, s.best[k]);
            if (ARGS) store_fragment_fp32(buffer, (SUMS + EXTREMES + k) * count + i, l, s.count[k]);
        }
    }

    __device__ __forceinline__ Stats restore(const float* buffer, i64 count, i64 i) const {
        Stats s = empty();
#pragma unroll
        for (int k = 0; k < SUMS; ++k) s.sums[k] = load_fragment_fp32(buffer, k * count + i, l);
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            s.best[k] = load_fragment_fp32(buffer, (SUMS + k) * count + i, l);
            if (ARGS) s.count[k] = load_fragment_fp32(buffer, (SUMS + EXTREMES + k) * count + i, l);
        }
        return s;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Stats& state, const float* buffer, i64 count, int begin, int end) const {
        Stats lost = empty();
#pragma unroll 2
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const Stats other = restore(buffer, count, i);
#pragma unroll
            for (int k = 0; k < SUMS; ++k) accumulate<COMPENSATED>(state.sums[k], lost.sums[k], other.sums[k]);
            for_each_channel(l, [&](int h, int c, int) {
#pragma unroll
                for (int k = 0; k < EXTREMES; ++k) {
                    take(state.best[k].x[h][c], state.count[k].x[h][c], other.best[k].x[h][c], other.count[k].x[h][c]);
                }
            });
        }
#pragma unroll
        for (int k = 0; k < SUMS; ++k) add_lost(state.sums[k], lost.sums[k]);
        merge_slots(state);
    }

    __device__ __forceinline__ void store(const Stats& s, int row, bool writes) const {
        if (!writes) return;
        const float scale = target_scale_of(in, row);
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
            Fragment out = s.sums[k];
            for_each_channel(l, [&](int h, int c, int) { out.x[h][c] *= scale; });
            store_out(results.out, k, row, l, out);
        }
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            Fragment out;
            for_each_channel(l, [&](int h, int c, int) {
                out.x[h][c] = is_empty ? 0.0f : signed_message(k, s.best[k].x[h][c]);
            });
            store_out(results.out, SUMS + k, row, l, out);
#if ARGS
            const bool is_max = k == 0 && MAX;
            u16* args = (is_max ? results.arg_max : results.arg_min) + (i64)row * ROW_STRIDE;
            Fragment count = s.count[k];
            for_each_channel(l, [&](int h, int c, int place) {
                // torch's scatter_reduce starts from zeros, and an extreme of 0 is shared with that start.
                count.x[h][c] += out.x[h][c] == 0.0f ? 1.0f : 0.0f;
                const u32 key = key_of(out.x[h][c]) | (count.x[h][c] > 1.0f ? TIED : 0u);
                if (has_vec(l, h, c / VEC)) args[place] = (u16)key;
            });
            store_fragment_fp32(is_max ? results.num_max : results.num_min, row, l, count);
#endif
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
segment_forward(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, out_t* out, u16* arg_max, u16* arg_min, float* num_max,
                float* num_min, float* partial, float* carry) {
    const Adjacency a = ADJACENCY;
    const Inputs in = INPUTS;
    const Results results = {out, arg_max, arg_min, num_max, num_min};
    const Lanes l = lane_layout();
    Forward functor = {in, results, l, false};
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
segment_forward_merge(HEAVY_PARAMETERS, const float* partial, const float* target_scale, out_t* out, u16* arg_max,
                      u16* arg_min, float* num_max, float* num_min, float* carry) {
    Inputs in = {};
    in.target_scale = target_scale;
    const Results results = {out, arg_max, arg_min, num_max, num_min};
    const Lanes l = lane_layout();
    const Forward functor = {in, results, l, false};
    merge_heavy_rows(HeavyRows HEAVY, l, functor, partial, carry);
}
