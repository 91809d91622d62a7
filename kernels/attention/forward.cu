// Attention forward over the rows of the CSR: O_i = sum_j softmax_j(S_ij) D_ij v_j in one pass over the edges of a row,
// with an online softmax (Milakov and Gimelshein, arXiv 1805.02867). Writes O [num_targets, HEADS, CHANNELS] and the
// softmax of each row [num_targets, HEADS, 2] (see RowStats) where `row_stats` is not null; a row without edges gives
// zeros. With `out_fp32` not null O is written in fp32 too.
//
// With DOUT_DLOGIT it also writes the derivative of O_i in the target's scalar l_i, so that the backward pass over
// targets reads no edge: dl_i = <dO_i, dO_i / dl_i>. The logit has slope 1 or s in l_i; with p+ and O+ what edges with
// slope 1 give to the sum of weights, 1, and to O_i:
//
//   dO_i / dl_i = (1 - s) (O+ - p+ O_i)
//
// With NORMS it finds the inverse norms that it needs itself: with SMEM those of its sources, which it writes to
// `norms` (see smem.cuh); otherwise those of every row it reads, and it writes those of its targets, if these are the
// sources too and `norms` is not null. That takes two products in place of one, but no kernel before.
//
// With rows of edges it also writes their average, A_i = sum_j softmax_j(S_ij) D_ij a_ij, to `edge_out` [num_targets,
// HEADS, EDGE_CHANNELS], and with `edge_out_fp32` not null in fp32 too.
//
// With LAZY sums are scaled to a maximum only when it has grown by more than that many powers of two.
#include "include/traversal.cuh"
#include "attention/dropout.cuh"
#include "attention/lane_score.cuh"
#include "attention/row_stats.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

// Sums of weights and of weighted values: the first over all edges, with DOUT_DLOGIT the second over those with slope
// 1.
#define ACCUMULATORS (DOUT_DLOGIT ? 2 : 1)

struct Softmax {
    HeadValues max, sum[ACCUMULATORS];
    Fragment acc[ACCUMULATORS];
    FragmentOf<EdgeTargets> edge_acc;
};

// The maximum over no edges: finite, so that a logit of -inf differs from it by -inf and not by NaN.
constexpr float NO_MAX = -3.0e38f;

// Raises the maximum of head h and scales its sums to it.
__device__ __forceinline__ void raise_max(Softmax& s, int h, float max) {
    const float factor = exp_difference(s.max.x[h], max);
    s.max.x[h] = max;
#pragma unroll
    for (int c = 0; c < EdgeTargets::elements; ++c) s.edge_acc.x[h][c] *= factor;
#pragma unroll
    for (int k = 0; k < ACCUMULATORS; ++k) {
        s.sum[k].x[h] *= factor;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) s.acc[k].x[h][c] *= factor;
    }
}

// Whether an edge counts to a sum.
__device__ __forceinline__ bool counts(int k, const Terms& terms) {
#if DOUT_DLOGIT
    return k == 0 || Score::is_steep(terms);
#else
    return true;
#endif
}

struct Results {
    storage_t* out;
    float *row_stats, *out_fp32, *dout_dlogit, *norms;
    storage_t* edge_out;
    float* edge_out_fp32;
};

struct Forward {
    typedef Softmax State;
    typedef ColumnIndex<(EDGE != 0)> Index;
    typedef Neighbours Loaded;
    static constexpr bool PREFETCHES = true, HAS_FULL_STEPS = true, RESETS_EMPTY = false;

    const ScoreInputs &in, &gathered;
    const Results& results;
    const Lanes& l;
    const Fragment& parameters;
    u64 seed;
    Fragment own;
    FragmentOf<EdgeTargets> edge_target;
    HeadValues own_scalars, factor;

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) {
        own = zero_fragment();
        if (HAS_TARGET_VECTOR) own = load_fragment(in.target, item.row, l);
        edge_target = load_edge_target(in.edge_target, item.row, l);
        // Targets that are no sources have norms of their own.
        const bool shares = NORMS && in.target_scalars == in.source_scalars;
#if READS_NORMS
        own_scalars = shares ? load_heads<NORMS>(gathered.source_scalars, item.row, l)
                             : load_scalars(in.target_scalars, item.row, l);
#else
        own_scalars = inverse_norms(own);
        if (results.norms != nullptr && shares && item.active && item.first && l.edge_slot == 0) {
            store_heads(results.norms, item.row, l, own_scalars);
        }
#endif
        factor = logit_factor(in, own_scalars);
    }

    __device__ __forceinline__ Softmax empty() const {
        Softmax s;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) s.max.x[h] = NO_MAX;
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            s.sum[k] = zero_heads();
            s.acc[k] = zero_fragment();
        }
        s.edge_acc = zero_fragment<EdgeTargets>();
        return s;
    }

    __device__ __forceinline__ Neighbours load(const Step<Index>& step) const { return load_neighbours(gathered, step,
                                                                                                       l); }

    template <bool FULL>
    __device__ __forceinline__ void step(Softmax& state, Neighbours& neighbours, const Adjacency& a, const Item& item,
                                         const Step<Index>&, int number) const {
        float logit[UNROLL][LANE_HEADS];
#if READS_NORMS
        score_products(logit, neighbours, own, edge_target, parameters, in);
#else
        score_products_and_norms(logit, neighbours, own);
#endif
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, number, seed, in.dropout, dropout_factors);

        float weight[UNROLL][LANE_HEADS];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            float max = state.max.x[h];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float s = Score::logit(neighbours.terms(u, h, logit[u][h], own_scalars, factor), in);
                logit[u][h] = FULL || is_valid(item, l, number, u) ? s : negative_infinity();
                max = fmaxf(max, logit[u][h]);
            }
#if LAZY
            // Weights of up to 2^LAZY are as good as weights of up to 1.
            if (__any_sync(FULL_MASK, max > state.max.x[h] + LAZY / LOG2E)) raise_max(state, h, max);
            max = state.max.x[h];
#else
            raise_max(state, h, max);
#endif
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float p = exp_difference(logit[u][h], max);
                weight[u][h] = p * dropout_factors[u][h];
#pragma unroll
                for (int k = 0; k < ACCUMULATORS; ++k) {
                    if (counts(k, neighbours.terms(u, h, 0.0f, own_scalars, factor))) state.sum[k].x[h] += p;
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment v = neighbours.content(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
                for (int k = 0; k < ACCUMULATORS; ++k) {
                    // The weight 0 of a padded position would turn an infinite value into NaN.
                    if ((FULL || is_valid(item, l, number, u)) &&
                        counts(k, neighbours.terms(u, h, 0.0f, own_scalars, factor))) {
#pragma unroll
                        for (int c = 0; c < LANE_ELEMS; ++c) {
                            state.acc[k].x[h][c] = fmaf(weight[u][h], v.x[h][c], state.acc[k].x[h][c]);
                        }
                    }
                }
#if HAS_EDGE_ROWS
                if (FULL || is_valid(item, l, number, u)) {
                    const FragmentOf<EdgeRow> row = widen(neighbours.edges[u]);
#pragma unroll
                    for (int c = 0; c < EdgeRow::elements; ++c) {
                        state.edge_acc.x[h][c] = fmaf(weight[u][h], row.x[0][c], state.edge_acc.x[h][c]);
                    }
                }
#endif
            }
        }
    }

    __device__ __forceinline__ void end(Softmax&, const Item&) const {}

    __device__ __forceinline__ void merge_slots(Softmax& s) const {
#pragma unroll
        for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                raise_max(s, h, fmaxf(s.max.x[h], __shfl_xor_sync(FULL_MASK, s.max.x[h], mask)));
#pragma unroll
                for (int k = 0; k < ACCUMULATORS; ++k) {
                    s.sum[k].x[h] += __shfl_xor_sync(FULL_MASK, s.sum[k].x[h], mask);
#pragma unroll
                    for (int c = 0; c < LANE_ELEMS; ++c) {
                        s.acc[k].x[h][c] += __shfl_xor_sync(FULL_MASK, s.acc[k].x[h][c], mask);
                    }
                }
#pragma unroll
                for (int c = 0; c < EdgeTargets::elements; ++c) {
                    s.edge_acc.x[h][c] += __shfl_xor_sync(FULL_MASK, s.edge_acc.x[h][c], mask);
                }
            }
        }
    }

    // Sums [ACCUMULATORS, count, HEADS, CHANNELS], maxima [count, HEADS], weights [ACCUMULATORS, count, HEADS], sums of
    // edges' rows [count, HEADS, EDGE_CHANNELS].
    static __device__ __forceinline__ i64 edge_sums(i64 count) {
        return count * (ACCUMULATORS * ROW_STRIDE + (1 + ACCUMULATORS) * HEADS);
    }

    __device__ __forceinline__ void save(const Softmax& s, float* buffer, i64 count, i64 i) const {
        float* heads = buffer + ACCUMULATORS * count * ROW_STRIDE;
        store_heads(heads, i, l, s.max);
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            store_fragment_fp32(buffer, k * count + i, l, s.acc[k]);
            store_heads(heads, (k + 1) * count + i, l, s.sum[k]);
        }
        store_fragment_fp32<false>(buffer + edge_sums(count), i, l, s.edge_acc);
    }

    __device__ __forceinline__ Softmax restore(const float* buffer, i64 count, i64 i) const {
        Softmax s;
        const float* heads = buffer + ACCUMULATORS * count * ROW_STRIDE;
        s.max = load_state_heads(heads, i, l);
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            s.acc[k] = load_fragment_fp32(buffer, k * count + i, l);
            s.sum[k] = load_state_heads(heads, (k + 1) * count + i, l);
        }
        s.edge_acc = load_fragment_fp32<EdgeTargets, false>(buffer + edge_sums(count), i, l);
        return s;
    }

    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(Softmax& state, const float* buffer, i64 count, int begin, int end) const {
        // The maximum first, so that what follows it does not form a chain.
        HeadValues max = state.max;
        const float* maxima = buffer + ACCUMULATORS * count * ROW_STRIDE;
#pragma unroll 4
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const HeadValues other = load_state_heads(maxima, i, l);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) max.x[h] = fmaxf(max.x[h], other.x[h]);
        }
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) raise_max(state, h, max.x[h]);
        Softmax lost = empty();
#pragma unroll 2
        for (int i = begin + l.edge_slot; i < end; i += EDGE_SLOTS) {
            const Softmax other = restore(buffer, count, i);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float scale = exp_difference(other.max.x[h], max.x[h]);
#pragma unroll
                for (int k = 0; k < ACCUMULATORS; ++k) {
                    accumulate<COMPENSATED>(state.sum[k].x[h], lost.sum[k].x[h], other.sum[k].x[h] * scale);
#pragma unroll
                    for (int c = 0; c < LANE_ELEMS; ++c) {
                        accumulate<COMPENSATED>(state.acc[k].x[h][c], lost.acc[k].x[h][c],
                                                other.acc[k].x[h][c] * scale);
                    }
                }
#pragma unroll
                for (int c = 0; c < EdgeTargets::elements; ++c) {
                    accumulate<COMPENSATED>(state.edge_acc.x[h][c], lost.edge_acc.x[h][c],
                                            other.edge_acc.x[h][c] * scale);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            add_lost(state.sum[k], lost.sum[k]);
            add_lost(state.acc[k], lost.acc[k]);
        }
        add_lost(state.edge_acc, lost.edge_acc);
        merge_slots(state);
    }

    __device__ __forceinline__ void store(const Softmax& s, int row, bool writes) const {
        if (!writes) return;
        RowStats stats;
        Fragment out;
        FragmentOf<EdgeTargets> edge_out;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const bool empty = s.sum[0].x[h] == 0.0f;
            const float inverse = reciprocal(s.sum[0].x[h]);
            stats.max[h] = empty ? 0.0f : s.max.x[h];
            stats.inverse[h] = empty ? 0.0f : inverse;
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) out.x[h][c] = empty ? 0.0f : s.acc[0].x[h][c] * inverse;
#pragma unroll
            for (int c = 0; c < EdgeTargets::elements; ++c) {
                edge_out.x[h][c] = empty ? 0.0f : s.edge_acc.x[h][c] * inverse;
            }
        }
        store_fragment(results.out, row, l, out);
        if (results.out_fp32 != nullptr) store_fragment_fp32(results.out_fp32, row, l, out);
        store_fragment<EDGE_STRIDE>(results.edge_out, row, l, edge_out);
        if (results.edge_out_fp32 != nullptr) store_fragment_fp32(results.edge_out_fp32, row, l, edge_out);
        store_row_stats(results.row_stats, row, l, stats);
#if DOUT_DLOGIT
        Fragment derivative;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const bool empty = s.sum[0].x[h] == 0.0f;
            // Divided, as the share of all edges has to be exactly 1.
            const float share = empty ? 0.0f : s.sum[1].x[h] / s.sum[0].x[h];
            const float scale = (1.0f - Score::flat_slope(in)) * stats.inverse[h];
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                derivative.x[h][c] = scale * fmaf(-share, s.acc[0].x[h][c], s.acc[1].x[h][c]);
            }
        }
        store_fragment_fp32(results.dout_dlogit, row, l, derivative);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_forward(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, storage_t* out, float* row_stats, float* out_fp32,
                  float* dout_dlogit, const storage_t* edge_target, storage_t* edge_out, float* edge_out_fp32,
                  float* norms, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS_WITH_ROWS;
    const Results results = {out, row_stats, out_fp32, dout_dlogit, norms, edge_out, edge_out_fp32};
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_sources(gathered, a);
    const Fragment parameters = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;
    finish_copies();
    find_norms(gathered, a, l, norms);
    Forward functor = {in, gathered, results, l, parameters, key64};
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_forward_merge(HEAVY_PARAMETERS, const float* partial, double slope, storage_t* out, float* row_stats,
                        float* out_fp32, float* dout_dlogit, storage_t* edge_out, float* edge_out_fp32,
                        float* carry) {
    ScoreInputs in = {};
    in.slope = (float)slope;
    const Results results = {out, row_stats, out_fp32, dout_dlogit, nullptr, edge_out, edge_out_fp32};
    const Lanes l = lane_layout();
    const Fragment parameters = zero_fragment();
    const Forward functor = {in, in, results, l, parameters, 0};
    merge_heavy_rows(HeavyRows HEAVY, l, functor, partial, carry);
}
