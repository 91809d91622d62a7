// Attention forward, row schedule: O_i = sum_j softmax_j(S_ij) D_ij v_j in one pass over the edges of a row, with an
// online softmax (Milakov and Gimelshein, arXiv 1805.02867). Writes O [num_targets, HEADS, CHANNELS] and the softmax of
// each row [num_targets, HEADS, 2] (see RowSoftmax) where `softmax` is not null; a row without edges gives zeros. With
// `exact` not null O is written in fp32 too.
//
// With TANGENT (add score) it also writes the derivative of O_i in l_i, so that the backward pass over targets reads no
// edge: dl_i = <dO_i, dO_i / dl_i>. With s the slope, and p+ and O+ what edges with a positive pre-activation give to
// the sum of weights, 1, and to O_i:
//
//   dO_i / dl_i = (1 - s) (O+ - p+ O_i)
//
// With NORMS (cosine score) it finds the inverse norms that it needs itself: with RESIDENT those of its sources, which it
// writes to `norms` (see resident.cuh); otherwise those of every row it reads, and it writes those of its targets, if
// these are the sources too and `norms` is not null. That takes two products in place of one, but no kernel before.
//
// With LAZY sums are scaled to a maximum only when it has grown by more than that many powers of two.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

// Sums of weights and of weighted values: part 0 over all edges, with TANGENT part 1 over those with z > 0.
#define PARTS (TANGENT ? 2 : 1)

struct Softmax {
    HeadValues max, sum[PARTS];
    Part acc[PARTS];
};

// The maximum over no edges: finite, so that a logit of -inf differs from it by -inf and not by NaN.
constexpr float NO_MAX = -3.0e38f;

__device__ __forceinline__ Softmax empty_softmax() {
    Softmax s;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) s.max.x[h] = NO_MAX;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        s.sum[part] = zero_heads();
        s.acc[part] = zero_part();
    }
    return s;
}

// Raises the maximum of head h and scales its sums to it.
__device__ __forceinline__ void raise_max(Softmax& s, int h, float max) {
    const float factor = fast_exp2(s.max.x[h] - max);
    s.max.x[h] = max;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        s.sum[part].x[h] *= factor;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) s.acc[part].x[h][c] *= factor;
    }
}

// Merges the states of the edge slots of a row; every slot ends with the result.
__device__ __forceinline__ void merge_slots(Softmax& s) {
#pragma unroll
    for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            raise_max(s, h, fmaxf(s.max.x[h], __shfl_xor_sync(FULL_MASK, s.max.x[h], mask)));
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                s.sum[part].x[h] += __shfl_xor_sync(FULL_MASK, s.sum[part].x[h], mask);
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    s.acc[part].x[h][c] += __shfl_xor_sync(FULL_MASK, s.acc[part].x[h][c], mask);
                }
            }
        }
    }
}

struct Results {
    storage_t* out;
    float *softmax, *exact, *tangent;
    float slope;
};

__device__ __forceinline__ void store_row(const Softmax& s, int row, const Lanes& l, const Results& results) {
    RowSoftmax softmax;
    Part out;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const bool empty = s.sum[0].x[h] == 0.0f;
        const float inverse = reciprocal(s.sum[0].x[h]);
        softmax.max[h] = empty ? 0.0f : s.max.x[h];
        softmax.inverse[h] = empty ? 0.0f : inverse;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) out.x[h][c] = empty ? 0.0f : s.acc[0].x[h][c] * inverse;
    }
    store_part(results.out, row, l, out);
    if (results.exact != nullptr) store_part_fp32(results.exact, row, l, out);
    store_softmax(results.softmax, row, l, softmax);
#if TANGENT
    Part tangent;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const bool empty = s.sum[0].x[h] == 0.0f;
        // Divided, as the share of all edges has to be exactly 1.
        const float share = empty ? 0.0f : s.sum[1].x[h] / s.sum[0].x[h];
        const float factor = (1.0f - results.slope) * softmax.inverse[h];
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            tangent.x[h][c] = factor * fmaf(-share, s.acc[0].x[h][c], s.acc[1].x[h][c]);
        }
    }
    store_part_fp32(results.tangent, row, l, tangent);
#endif
}

// States in a buffer for `count` of them: sums [PARTS, count, HEADS, CHANNELS], maxima [count, HEADS], weights
// [PARTS, count, HEADS].
__device__ __forceinline__ void store_state(float* buffer, i64 count, i64 i, const Lanes& l, const Softmax& s) {
    float* heads = buffer + PARTS * count * ROW_STRIDE;
    store_heads(heads, i, l, s.max);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        store_part_fp32(buffer, part * count + i, l, s.acc[part]);
        store_heads(heads, (part + 1) * count + i, l, s.sum[part]);
    }
}

__device__ __forceinline__ Softmax load_state(const float* buffer, i64 count, i64 i, const Lanes& l) {
    Softmax s;
    const float* heads = buffer + PARTS * count * ROW_STRIDE;
    s.max = load_state_heads(heads, i, l);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        s.acc[part] = load_part_fp32(buffer, part * count + i, l);
        s.sum[part] = load_state_heads(heads, (part + 1) * count + i, l);
    }
    return s;
}

// The chunks begin ... end - 1 in a buffer for `count` of them, merged into one state: each edge slot takes every
// EDGE_SLOTS-th in turn, then the slots are merged.
template <bool EXACT>
__device__ __forceinline__ void merge_chunks(Softmax& state, const float* buffer, i64 count, int begin, int end,
                                             const Lanes& l) {
    // The maximum first, so that what follows it does not form a chain.
    HeadValues max = state.max;
    const float* maxima = buffer + PARTS * count * ROW_STRIDE;
#pragma unroll 4
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const HeadValues other = load_state_heads(maxima, c, l);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) max.x[h] = fmaxf(max.x[h], other.x[h]);
    }
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) raise_max(state, h, max.x[h]);
    Softmax lost = empty_softmax();
#pragma unroll 2
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const Softmax other = load_state(buffer, count, c, l);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const float factor = fast_exp2(other.max.x[h] - max.x[h]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                accumulate<EXACT>(state.sum[part].x[h], lost.sum[part].x[h], other.sum[part].x[h] * factor);
#pragma unroll
                for (int v = 0; v < LANE_ELEMS; ++v) {
                    accumulate<EXACT>(state.acc[part].x[h][v], lost.acc[part].x[h][v],
                                      other.acc[part].x[h][v] * factor);
                }
            }
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        add_lost(state.sum[part], lost.sum[part]);
        add_lost(state.acc[part], lost.acc[part]);
    }
    merge_slots(state);
}

// Whether an edge with pre-activation z counts to a part.
__device__ __forceinline__ bool is_in(int part, float z) { return part == 0 || z > 0.0f; }

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_forward(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, storage_t* out, float* softmax, float* exact,
                  float* tangent, float* norms, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS;
    const Results results = {out, softmax, exact, tangent, (float)slope};
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_sources(gathered, a);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;
    finish_copies();
    find_norms(gathered, a, l, norms);
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item), full_steps = num_full_steps(item);

        Part own = zero_part();
        if (HAS_TARGET_VECTOR) own = load_part<NODE_STRIDE>(in.target, item.row, l);
        // Targets that are no sources have norms of their own.
        const bool shares = NORMS && in.target_scalars == in.source_scalars;
#if READS_NORMS
        const HeadValues own_scalars = shares ? load_heads<NORMS>(gathered.source_scalars, item.row, l)
                                              : load_scalars(in.target_scalars, item.row, l);
#else
        const HeadValues own_scalars = inverse_norms(own);
        if (norms != nullptr && shares && item.active && item.first && l.edge_slot == 0) {
            store_heads(norms, item.row, l, own_scalars);
        }
#endif
        const HeadValues factor = logit_factor(in, own_scalars);

        Softmax state = empty_softmax();
        if (!a.starts() && item.active && item.chunk < 0 && l.edge_slot == 0) {
            state = load_state(carry, num_rows, item.row, l);
        }
        Step next;
        if (!IN_SHARED && steps > 0) next = load_step(a, item, l, 0);
        const auto advance = [&](int step, auto is_full) {
            constexpr bool FULL = decltype(is_full)::value;
            const Step now = IN_SHARED ? load_step(a, item, l, step) : next;
            Neighbours neighbours = load_neighbours(gathered, now, l);
            if (!IN_SHARED) next = load_step(a, item, l, step + 1);

            float logit[UNROLL][LANE_HEADS];
#if READS_NORMS
            score_products(logit, neighbours, own, weights, in.slope);
#else
            score_products_and_norms(logit, neighbours, own);
#endif
            float dropout_factors[UNROLL][LANE_HEADS];
            load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);

            float weight[UNROLL][LANE_HEADS];
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                float max = state.max.x[h];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const float s = neighbours.logit(u, h, logit[u][h], own_scalars, factor, in.slope);
                    logit[u][h] = FULL || is_valid(item, l, step, u) ? s : negative_infinity();
                    max = fmaxf(max, logit[u][h]);
                }
#if LAZY
                // Weights of up to 2^LAZY are as good as weights of up to 1.
                if (__any_sync(FULL_MASK, max > state.max.x[h] + LAZY)) raise_max(state, h, max);
                max = state.max.x[h];
#else
                raise_max(state, h, max);
#endif
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const float p = fast_exp2(logit[u][h] - max);
                    weight[u][h] = p * dropout_factors[u][h];
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        if (is_in(part, neighbours.activation_input(u, h, own_scalars))) state.sum[part].x[h] += p;
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part v = neighbours.content(u);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        // The weight 0 of a padded position would turn an infinite value into NaN.
                        if ((FULL || is_valid(item, l, step, u)) &&
                            is_in(part, neighbours.activation_input(u, h, own_scalars))) {
#pragma unroll
                            for (int c = 0; c < LANE_ELEMS; ++c) {
                                state.acc[part].x[h][c] = fmaf(weight[u][h], v.x[h][c], state.acc[part].x[h][c]);
                            }
                        }
                    }
                }
            }
        };
        int step = 0;
        for (; step < full_steps; ++step) advance(step, Flag<true>());
        for (; step < steps; ++step) advance(step, Flag<false>());

        merge_slots(state);
#if JOINED
        if (has_chunks(a)) {
            float* states = reinterpret_cast<float*>(dynamic_shared());
            const int slot = item_slot(l);
            if (l.edge_slot == 0) store_state(states, ITEMS, slot, l, state);
            __syncthreads();
            state = empty_softmax();
            merge_chunks<false>(state, states, ITEMS, slot, slot + item.join, l);
            if (item.first && l.edge_slot == 0) store_row(state, item.row, l, results);
            return;
        }
#endif
        // The lanes of a head read the same carried numbers; one of them overwrites these.
        __syncwarp();
        if (!item.active || l.edge_slot != 0) return;
        if (SWEPT && item.chunk >= 0) {
            store_state(partial, num_chunks, item.chunk, l, state);
        } else if (!a.finishes()) {
            store_state(carry, num_rows, item.row, l, state);
        } else {
            store_row(state, item.row, l, results);
        }
    });
}

// Merges the chunks of each heavy row in chunk order.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_forward_merge(HEAVY_PARAMETERS, const float* partial, double slope, storage_t* out, float* softmax,
                        float* exact, float* tangent, float* carry) {
    const Results results = {out, softmax, exact, tangent, (float)slope};
    const Lanes l = lane_layout();
    const HeavyRows heavy = HEAVY;
    const HeavyRow row = heavy_row_of(heavy, l);

    Softmax state = empty_softmax();
    if (!heavy.starts() && row.active && l.edge_slot == 0) state = load_state(carry, num_rows, row.row, l);
    merge_chunks<true>(state, partial, num_chunks, row.begin, row.end, l);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (!row.active || l.edge_slot != 0) return;
    if (heavy.finishes()) {
        store_row(state, row.row, l, results);
    } else {
        store_state(carry, num_rows, row.row, l, state);
    }
}
