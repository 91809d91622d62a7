// Aggregation over the rows of the CSR: every statistic of the messages a_j m_ij of a row in one gather,
//
//   t_i sum,  t_i sum / n_i,  max,  min,  var = sum (a_j m_ij - mean)^2 / n_i,  std = sqrt(max(var, 1e-5)),  product
//
// (with SELF_LOOPS t_i (sum + a_i v_i)) as far as they are asked for, std with 0 where var is at most 1e-5, as PyG has it. A row without edges gives zeros, and
// 1 for the product; a NaN among its messages is its maximum and its minimum. With ARGS it also writes the key of each
// extreme (see segment.cuh) and how many edges have it, the mean that deviations are taken from, and the product of the
// messages that are not 0, or 0 where several are, all [num_targets, CHANNELS].
#include "segment/segment.cuh"
#include "segment/moments.cuh"

// Sums with their scales; the moments give them too.
#define PLAIN_SUM (SUMS > 0 && !MOMENTS)

struct Stats {
    Fragment sum[ROOM(PLAIN_SUM)];
    Moments moments[ROOM(MOMENTS)];
    // Of messages, for the minimum of their negatives.
    Fragment best[ROOM(EXTREMES)];
    // How many edges have it.
    Fragment count[ROOM(EXTREMES)];
    // Of the messages that are not 0, and how many are.
    Fragment product[ROOM(MUL)], zeros[ROOM(MUL)];
};

struct Results {
    storage_t* out;
    u16 *arg_max, *arg_min;
    float *num_max, *num_min, *center, *others;
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
    EdgeLayer layer;
    Fragment own;

    __device__ __forceinline__ void begin(const Adjacency& a, const Item& item) {
        const i64 blocks = SWEPT ? a.num_blocks : 1;
        is_empty = item.chunk < 0 && a.rowptr[item.row * blocks] == a.rowptr[(item.row + 1) * blocks];
        own = zero_fragment();
        if (HAS_TARGET) own = load_fragment(in.target, item.row, l);
    }

    __device__ __forceinline__ Stats empty() const {
        Stats s;
        if (PLAIN_SUM) s.sum[0] = zero_fragment();
        if (MOMENTS) s.moments[0] = no_moments();
        if (MUL) {
            s.zeros[0] = zero_fragment();
            for_each_channel(l, [&](int h, int c, int) { s.product[0].x[h][c] = 1.0f; });
        }
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

    __device__ __forceinline__ Fragment messages(const Neighbours& n, int u) const {
        const Fragment value = widen(n.values[u]), edge = n.edges.at(u, layer);
        const Fragment key = HAS_KEY ? widen(n.keys[HAS_KEY ? u : 0]) : zero_fragment();
        Fragment m;
        for_each_channel(l, [&](int h, int c, int) {
            m.x[h][c] = message_of({value.x[h][c], edge.x[h][c], key.x[h][c], own.x[h][c]}, n.scale[u]);
        });
        return m;
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Stats& state, Neighbours& n, const Adjacency&, const Item& item,
                                         const Step<Index>&, int number) const {
#if MOMENTS
        if (number == 0) start(state.moments[0], messages(n, 0), l);
        if (moves_center(number)) recenter(state.moments[0], l, false);
#endif
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment messages_of_edge = messages(n, u);
            if (!FULL && !is_valid(item, l, number, u)) continue;
            for_each_channel(l, [&](int h, int c, int) {
                const float m = messages_of_edge.x[h][c];
                if (PLAIN_SUM) state.sum[0].x[h][c] += m;
                if (MOMENTS) take_deviation(state.moments[0], h, c, m);
                if (MUL) {
                    state.product[0].x[h][c] *= m == 0.0f ? 1.0f : m;
                    state.zeros[0].x[h][c] += m == 0.0f ? 1.0f : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < EXTREMES; ++k) {
                    take(state.best[k].x[h][c], state.count[k].x[h][c], signed_message(k, m), 1.0f);
                }
            });
            if (MOMENTS) state.moments[0].number += 1.0f;
        }
    }

    __device__ __forceinline__ void end(State& state, const Item&) const {
        if (MOMENTS) recenter(state.moments[0], l, true);
    }

    // Calls work(fragment) for every fragment that is saved, in the order in which they lie in a buffer.
    template <class State, class Work>
    static __device__ __forceinline__ void for_each_fragment(State& s, const Work& work) {
        if (PLAIN_SUM) work(s.sum[0]);
        if (MOMENTS) {
            work(s.moments[0].center);
            work(s.moments[0].second);
        }
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            work(s.best[k]);
            if (ARGS) work(s.count[k]);
        }
        if (MUL) {
            work(s.product[0]);
            work(s.zeros[0]);
        }
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void add(Stats& s, Stats& lost, const Stats& other) const {
        for_each_channel(l, [&](int h, int c, int) {
            if (PLAIN_SUM) {
                accumulate<COMPENSATED>(s.sum[0].x[h][c], lost.sum[0].x[h][c], other.sum[0].x[h][c]);
            }
            if (MOMENTS) {
                Moments& own = s.moments[0];
                const Moments& more = other.moments[0];
                join<COMPENSATED>(own.center.x[h][c], own.second.x[h][c], lost.moments[0].second.x[h][c], own.number,
                                  more.center.x[h][c], more.second.x[h][c], more.number);
            }
#pragma unroll
            for (int k = 0; k < EXTREMES; ++k) {
                take(s.best[k].x[h][c], s.count[k].x[h][c], other.best[k].x[h][c], other.count[k].x[h][c]);
            }
            if (MUL) {
                s.product[0].x[h][c] *= other.product[0].x[h][c];
                s.zeros[0].x[h][c] += other.zeros[0].x[h][c];
            }
        });
        if (MOMENTS) s.moments[0].number += other.moments[0].number;
    }

    __device__ __forceinline__ void merge_slots(Stats& s) const {
        Stats lost = empty();
#pragma unroll
        for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
            Stats other = s;
            for_each_fragment(other, [&](Fragment& fragment) {
                for_each_channel(l, [&](int h, int c, int) {
                    fragment.x[h][c] = __shfl_xor_sync(FULL_MASK, fragment.x[h][c], mask);
                });
            });
            if (MOMENTS) other.moments[0].number = __shfl_xor_sync(FULL_MASK, s.moments[0].number, mask);
            add<false>(s, lost, other);
        }
    }

    // [fragments, count, CHANNELS], with MOMENTS followed by the numbers of messages [count].
    __device__ __forceinline__ void save(const Stats& s, float* buffer, i64 count, i64 i) const {
        i64 place = i;
        for_each_fragment(s, [&](const Fragment& fragment) {
            store_fragment_fp32(buffer, place, l, fragment);
            place += count;
        });
        if (MOMENTS && l.head_lane == 0) buffer[(place - i) * ROW_STRIDE + i] = s.moments[0].number;
    }

    __device__ __forceinline__ Stats restore(const float* buffer, i64 count, i64 i) const {
        Stats s = empty();
        i64 place = i;
        for_each_fragment(s, [&](Fragment& fragment) {
            fragment = load_fragment_fp32(buffer, place, l);
            place += count;
        });
        if (MOMENTS) s.moments[0].number = buffer[(place - i) * ROW_STRIDE + i];
        return s;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Stats& state, const float* buffer, i64 count, int begin, int end) const {
        Stats lost = empty();
#pragma unroll 2
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            add<COMPENSATED>(state, lost, restore(buffer, count, i));
        }
        if (PLAIN_SUM) add_lost(state.sum[0], lost.sum[0]);
        if (MOMENTS) add_lost(state.moments[0].second, lost.moments[0].second);
        merge_slots(state);
    }

    __device__ __forceinline__ void store(const Stats& s, int row, bool writes) const {
        if (!writes) return;
#if MOMENTS
        store_moments(s.moments[0], row);
#else
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
            const float scale = target_scale_of(in, row, k);
            Fragment out = s.sum[0];
#if SELF_LOOPS
            const Fragment value = load_fragment(in.value, row, l);
            const float source_scale = source_scale_of(in, row);
            for_each_channel(l, [&](int h, int c, int) {
                out.x[h][c] += message_of({value.x[h][c]}, source_scale);
            });
#endif
            for_each_channel(l, [&](int h, int c, int) { out.x[h][c] *= scale; });
            store_out(results.out, SUM_PLACE(k), row, l, out);
        }
#endif
#pragma unroll
        for (int k = 0; k < EXTREMES; ++k) {
            Fragment out;
            for_each_channel(l, [&](int h, int c, int) {
                out.x[h][c] = is_empty ? 0.0f : signed_message(k, s.best[k].x[h][c]);
            });
            store_out(results.out, EXTREME_PLACE(k), row, l, out);
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
#if MUL
        Fragment out, others;
        for_each_channel(l, [&](int h, int c, int) {
            const float product = s.product[0].x[h][c], zeros = s.zeros[0].x[h][c];
            out.x[h][c] = zeros > 0.0f ? product * 0.0f : product;
            others.x[h][c] = zeros > 1.0f ? 0.0f : product;
        });
        store_out(results.out, AT_MUL, row, l, out);
        if (ARGS) store_fragment_fp32(results.others, row, l, others);
#endif
    }

#if MOMENTS
    __device__ __forceinline__ void store_moments(const Moments& s, int row) const {
        const float inverse = __ldg(in.inverse_degree + row);
        // The square root of the least variance, as a float.
        const float least = sqrtf(LEAST_VARIANCE);
        Fragment mean, sum, variance, deviation;
        for_each_channel(l, [&](int h, int c, int) {
            mean.x[h][c] = s.number > 0.0f ? s.center.x[h][c] : 0.0f;
            sum.x[h][c] = mean.x[h][c] * s.number;
            variance.x[h][c] = s.second.x[h][c] * inverse;
            const float root = sqrtf(max_or_nan(variance.x[h][c], LEAST_VARIANCE));
            deviation.x[h][c] = root <= least ? 0.0f : root;
        });
        if (SUM) store_out(results.out, AT_SUM, row, l, sum);
        if (MEAN) store_out(results.out, AT_MEAN, row, l, mean);
        if (VAR) store_out(results.out, AT_VAR, row, l, variance);
        if (STD) store_out(results.out, AT_STD, row, l, deviation);
        if (ARGS) store_fragment_fp32(results.center, row, l, mean);
    }
#endif
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
segment_forward(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, storage_t* out, KEPT_PARAMETERS(), float* partial,
                float* carry) {
    const Adjacency a = ADJACENCY;
    const Inputs in = INPUTS;
    const Results results = {out, arg_max, arg_min, num_max, num_min, center, others};
    const Lanes l = lane_layout();
    Forward functor = {in, results, l, false};
    functor.layer.load(in, l);
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
segment_forward_merge(HEAVY_PARAMETERS, const float* partial, const storage_t* value, const float* source_scale,
                      const float* target_scale, const float* inverse_degree, storage_t* out, KEPT_PARAMETERS(),
                      float* carry) {
    Inputs in = {};
    in.value = value;
    in.source_scale = source_scale;
    in.target_scale = target_scale;
    in.inverse_degree = inverse_degree;
    const Results results = {out, arg_max, arg_min, num_max, num_min, center, others};
    const Lanes l = lane_layout();
    const Forward functor = {in, results, l, false};
    merge_heavy_rows(HeavyRows HEAVY, l, functor, partial, carry);
}
