// Attention forward, row schedule: O_i = sum_j softmax_j(S_ij) D_ij v_j in one pass over the edges of a row, with an
// online softmax (Milakov and Gimelshein, arXiv 1805.02867). Writes O [num_targets, HEADS, CHANNELS] and the softmax of
// each row [num_targets, HEADS, 2] (see RowSoftmax); a row without edges gives zeros. With `exact` not null O is written
// in fp32 too.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/gather.cuh"

struct Softmax {
    HeadValues max, sum;
    Part acc;
};

// exp2 differences against -inf stay 0 instead of NaN.
__device__ __forceinline__ float finite(float max) { return max == negative_infinity() ? 0.0f : max; }

__device__ __forceinline__ Softmax empty_softmax() {
    Softmax s;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        s.max.x[h] = negative_infinity();
        s.sum.x[h] = 0.0f;
    }
    s.acc = zero_part();
    return s;
}

// Merges the states of the edge slots of a row; every slot ends with the result.
__device__ __forceinline__ void merge_slots(Softmax& s) {
#pragma unroll
    for (int mask = GROUP_LANES; mask < GROUP_LANES * EDGE_SLOTS; mask *= 2) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const float max = fmaxf(s.max.x[h], __shfl_xor_sync(FULL_MASK, s.max.x[h], mask));
            const float factor = fast_exp2(s.max.x[h] - finite(max));
            s.max.x[h] = max;
            s.sum.x[h] *= factor;
            s.sum.x[h] += __shfl_xor_sync(FULL_MASK, s.sum.x[h], mask);
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                s.acc.x[h][c] *= factor;
                s.acc.x[h][c] += __shfl_xor_sync(FULL_MASK, s.acc.x[h][c], mask);
            }
        }
    }
}

__device__ __forceinline__ void store_row(Softmax& s, int row, const Lanes& l, storage_t* out, float* softmax,
                                          float* exact) {
    RowSoftmax values;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const bool empty = s.sum.x[h] == 0.0f;
        const float inverse = 1.0f / s.sum.x[h];
        values.max[h] = finite(s.max.x[h]);
        values.inverse[h] = empty ? 0.0f : inverse;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) s.acc.x[h][c] = empty ? 0.0f : s.acc.x[h][c] * inverse;
    }
    store_part(out, row, l, s.acc);
    if (exact != nullptr) store_part_fp32(exact, row, l, s.acc);
    store_softmax(softmax, row, l, values);
}

// States in a buffer for `count` of them: sums [count, HEADS, CHANNELS], maxima [count, HEADS], weights [count, HEADS].
__device__ __forceinline__ void store_state(float* buffer, i64 count, i64 i, const Lanes& l, const Softmax& s) {
    store_part_fp32(buffer, i, l, s.acc);
    store_heads(buffer + count * ROW_STRIDE, i, l, s.max);
    store_heads(buffer + count * (ROW_STRIDE + HEADS), i, l, s.sum);
}

__device__ __forceinline__ Softmax load_state(const float* buffer, i64 count, i64 i, const Lanes& l) {
    Softmax s;
    s.acc = load_part_fp32(buffer, i, l);
    s.max = load_heads(buffer + count * ROW_STRIDE, i, l);
    s.sum = load_heads(buffer + count * (ROW_STRIDE + HEADS), i, l);
    return s;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_forward(const int* ptr, const int* index, const int* edge_id, const int* chunk_row, const int* chunk_begin,
                  const int* chunk_end, i64 num_rows, i64 num_chunks, i64 max_edges, i64 block, i64 num_blocks, const storage_t* target,
                  const storage_t* key, const storage_t* value, const float* target_scalars,
                  const float* source_scalars, const float* parameter, const void* edge, const u64* seed, double scale,
                  double slope, double dropout, storage_t* out, float* softmax, float* exact, float* partial,
                  float* carry) {
    const Adjacency a = {ptr, index, edge_id, chunk_row, chunk_begin, chunk_end,
                         num_rows, num_chunks, max_edges, block, num_blocks};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    const Lanes l = lane_layout();
    const Item item = work_item(a, l);
    const int steps = num_steps(item);

    Part own = zero_part();
    if (HAS_TARGET_VECTOR) own = load_part(in.target, item.row, l);
    const HeadValues own_scalars = load_scalars(in.target_scalars, item.row, l);
    const HeadValues factor = logit_factor(in, own_scalars);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;

    Softmax state = empty_softmax();
    if (block > 0 && item.active && item.chunk < 0 && l.edge_slot == 0) state = load_state(carry, num_rows, item.row, l);
    Step next;
    if (steps > 0) next = load_step(a, item, l, 0);
    for (int step = 0; step < steps; ++step) {
        const Step now = next;
        const Neighbours neighbours = load_neighbours(in, now, l);
        next = load_step(a, item, l, step + 1);

        float logit[UNROLL][LANE_HEADS];
#if SCORE != SCORE_ADD
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Part other = neighbours.scored(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) logit[u][h] = score_product(own, other, weights, in.slope, h);
        }
        head_sum<UNROLL * LANE_HEADS, HEAD_LANES / 2>(&logit[0][0]);
#endif
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);

        float weight[UNROLL][LANE_HEADS];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            float max = state.max.x[h];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float s = score_logit(logit[u][h], own_scalars.x[h], neighbours.scalar(u, h),
                                            neighbours.edge_scalar(u, h), factor.x[h], in.slope);
                logit[u][h] = is_valid(item, l, step, u) ? s : negative_infinity();
                max = fmaxf(max, logit[u][h]);
            }
            const float reference = finite(max);
            const float rescale = fast_exp2(state.max.x[h] - reference);
            state.max.x[h] = max;
            state.sum.x[h] *= rescale;
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) state.acc.x[h][c] *= rescale;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float p = fast_exp2(logit[u][h] - reference);
                state.sum.x[h] += p;
                weight[u][h] = p * dropout_factors[u][h];
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Part v = neighbours.content(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    state.acc.x[h][c] = fmaf(weight[u][h], v.x[h][c], state.acc.x[h][c]);
                }
            }
        }
    }

    merge_slots(state);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (!item.active || l.edge_slot != 0) return;
    if (item.chunk >= 0) {
        store_state(partial, num_chunks, item.chunk, l, state);
    } else if (block + 1 < num_blocks) {
        store_state(carry, num_rows, item.row, l, state);
    } else {
        store_row(state, item.row, l, out, softmax, exact);
    }
}

// Merges the chunks of each heavy row in chunk order (chunk c goes to slot c % EDGE_SLOTS).
extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_forward_merge(const int* heavy_row, const int* heavy_ptr, i64 num_heavy, i64 num_chunks, i64 num_rows,
                        i64 block, i64 num_blocks, const float* partial, storage_t* out, float* softmax, float* exact,
                        float* carry) {
    const Lanes l = lane_layout();
    const i64 w = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS + l.row_slot;
    const bool active = w < num_heavy;
    const int begin = active ? heavy_ptr[w] : 0, end = active ? heavy_ptr[w + 1] : 0;
    const int row = active ? heavy_row[w] : 0;

    Softmax state = empty_softmax();
    if (block > 0 && active && l.edge_slot == 0) state = load_state(carry, num_rows, row, l);
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const Softmax other = load_state(partial, num_chunks, c, l);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const float max = fmaxf(state.max.x[h], other.max.x[h]);
            const float before = fast_exp2(state.max.x[h] - finite(max)), now = fast_exp2(other.max.x[h] - finite(max));
            state.max.x[h] = max;
            state.sum.x[h] = state.sum.x[h] * before + other.sum.x[h] * now;
#pragma unroll
            for (int v = 0; v < LANE_ELEMS; ++v) {
                state.acc.x[h][v] = state.acc.x[h][v] * before + other.acc.x[h][v] * now;
            }
        }
    }
    merge_slots(state);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (!active || l.edge_slot != 0) return;
    if (block + 1 < num_blocks) {
        store_state(carry, num_rows, row, l, state);
    } else {
        store_row(state, row, l, out, softmax, exact);
    }
}
