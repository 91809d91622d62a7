// Attention backward over the rows of the CSR (targets): delta, target gradients, edge and parameter gradients. Gathers
// what the forward gathers. Heavy rows write partial sums per chunk; the merge kernel adds them in chunk order.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/gather.cuh"
#include "attention/backward.cuh"

#define TARGET_SCALARS_ONLY (SCORE == SCORE_ADD)

// What a target sums over its edges: a vector, or for the add score one number per head.
struct TargetSums {
    Part vector;
    HeadValues scalar;
};

__device__ __forceinline__ TargetSums zero_target_sums() { return {zero_part(), zero_heads()}; }

__device__ __forceinline__ void sum_slots(TargetSums& sums) {
#if TARGET_SCALARS_ONLY
    slot_sum(sums.scalar);
#else
    slot_sum<false>(sums.vector);
#endif
}

__device__ __forceinline__ void store_sums(float* buffer, i64 i, const Lanes& l, const TargetSums& sums) {
#if TARGET_SCALARS_ONLY
    store_heads(buffer, i, l, sums.scalar);
#else
    store_part_fp32(buffer, i, l, sums.vector);
#endif
}

__device__ __forceinline__ TargetSums load_sums(const float* buffer, i64 i, const Lanes& l) {
#if TARGET_SCALARS_ONLY
    return {zero_part(), load_state_heads(buffer, i, l)};
#else
    return {load_part_fp32(buffer, i, l), zero_heads()};
#endif
}

// Adds the chunks begin ... end - 1 in a buffer: each edge slot takes every EDGE_SLOTS-th in turn, then the slots are
// added.
template <bool EXACT>
__device__ __forceinline__ TargetSums add_chunks(TargetSums sums, const float* buffer, int begin, int end,
                                                 const Lanes& l) {
    TargetSums lost = zero_target_sums();
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const TargetSums other = load_sums(buffer, c, l);
        accumulate<EXACT>(sums.vector, lost.vector, other.vector);
        accumulate<EXACT>(sums.scalar, lost.scalar, other.scalar);
    }
    add_lost(sums.vector, lost.vector);
    add_lost(sums.scalar, lost.scalar);
    sum_slots(sums);
    return sums;
}

// Turns the sum over the edges of target `row` into its gradient and stores it.
__device__ __forceinline__ void store_target(const ScoreInputs& in, int row, const Lanes& l, TargetSums& sums,
                                             void* grad_target, float* grad_beta, bool store) {
#if SCORE == SCORE_ADD
    if (store) store_heads(static_cast<float*>(grad_target), row, l, sums.scalar);
#else
    Part& acc = sums.vector;
#if SCORE == SCORE_COSINE
    const Part own = load_part(in.target, row, l);
    const HeadValues norms = load_scalars(in.target_scalars, row, l);
    const HeadValues cosine_sum = project(acc, own, norms);
    const Part factor = zero_part();
    const float beta = in.parameter[0];
#else
    const Part factor = load_parameter(in, l);
#endif
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
#if SCORE == SCORE_DOT
            acc.x[h][c] *= in.scale;
#elif SCORE == SCORE_COSINE
            acc.x[h][c] *= beta;
#else
            acc.x[h][c] *= factor.x[h][c];
#endif
        }
    }
    if (!store) return;
    store_part(static_cast<storage_t*>(grad_target), row, l, acc);
#if SCORE == SCORE_COSINE
    store_heads(grad_beta, row, l, cosine_sum);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_targets(const int* ptr, const int* index, const int* edge_id, const int* chunk_row,
                           const int* chunk_begin, const int* chunk_end, const int* chunk_join,
                           const int* row_order, const int* node_ptr, i64 num_rows, i64 num_chunks, i64 max_edges,
                           i64 block, i64 num_blocks,
                           const storage_t* target, const storage_t* key, const storage_t* value,
                           const float* target_scalars, const float* source_scalars, const float* parameter,
                           const void* edge, const u64* seed, double scale, double slope, double dropout,
                           const void* out, const float* softmax, const storage_t* grad_out, float* records,
                           void* grad_target, float* grad_beta, void* grad_edge, float* parameter_sums, float* partial,
                           float* carry) {
    Adjacency a = {ptr,       index,    edge_id,  chunk_row,  chunk_begin, chunk_end, chunk_join,
                   row_order, node_ptr, num_rows, num_chunks, max_edges,   block,     num_blocks};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    const Lanes l = lane_layout();
#if RESIDENT
    const ScoreInputs gathered = bring_sources(in, a);
#else
    const ScoreInputs& gathered = in;
#endif
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;
    Part parameter_acc = zero_part();

#if IN_SHARED
    finish_copies();
#endif
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item);

        const Part grad = load_part(grad_out, item.row, l);
        const RowSoftmax own_softmax = load_softmax(softmax, item.row, l);
        const HeadValues own_delta = head_dot(grad, load_out(out, item.row, l));
        if (a.starts() && item.first && l.edge_slot == 0) store_records(records, item.row, l, own_softmax, own_delta);
        Part own = zero_part();
        if (HAS_TARGET_VECTOR) own = load_part(in.target, item.row, l);
        const HeadValues own_scalars = load_scalars(in.target_scalars, item.row, l);
        const HeadValues factor = logit_factor(in, own_scalars);

        const bool continues = !a.starts() && item.active && item.chunk < 0 && l.edge_slot == 0;
        TargetSums sums = continues ? load_sums(carry, item.row, l) : zero_target_sums();
        Part own_parameter_acc = zero_part();
        Step next;
        if (!IN_SHARED && steps > 0) next = load_step(a, item, l, 0);
        for (int step = 0; step < steps; ++step) {
            const Step now = IN_SHARED ? load_step(a, item, l, step) : next;
            const Neighbours neighbours = load_neighbours(gathered, now, l);
            if (!IN_SHARED) next = load_step(a, item, l, step + 1);

            Products products;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part other = neighbours.scored(u), content = neighbours.content(u);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    products.score[u][h] = SCORE == SCORE_ADD ? 0.0f : score_product(own, other, weights, in.slope, h);
                    products.value[u][h] = part_dot(grad, content, h);
                }
            }
            reduce_products(products);
            float dropout_factors[UNROLL][LANE_HEADS];
            load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);

#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part other = neighbours.scored(u);
#if HAS_EDGE_VECTOR
                Part grad_e;
#elif HAS_EDGE_SCALARS
                HeadValues grad_e;
#endif
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    const float logit = score_logit(products.score[u][h], own_scalars.x[h], neighbours.scalar(u, h),
                                                    neighbours.edge_scalar(u, h), factor.x[h], in.slope);
                    const float weight = fast_exp2(logit - own_softmax.max[h]) * own_softmax.inverse[h];
                    const float p = is_valid(item, l, step, u) ? weight : 0.0f;
                    const float kept = p * dropout_factors[u][h];
                    const float ds = kept * products.value[u][h] - p * own_delta.x[h];
#if SCORE == SCORE_ADD
                    const float z = pre_activation(own_scalars.x[h], neighbours.scalar(u, h), neighbours.edge_scalar(u, h));
                    sums.scalar.x[h] = fmaf(ds, centered_slope(z, in.slope), sums.scalar.x[h]);
#if HAS_EDGE_SCALARS
                    grad_e.x[h] = ds * leaky_slope(z, in.slope);
#endif
#else
#pragma unroll
                    for (int c = 0; c < LANE_ELEMS; ++c) {
#if SCORE == SCORE_GATV2
                        const float z = own.x[h][c] + other.x[h][c];
                        const float m = ds * leaky_slope(z, in.slope);
                        sums.vector.x[h][c] = fmaf(ds, centered_slope(z, in.slope), sums.vector.x[h][c]);
                        own_parameter_acc.x[h][c] = fmaf(m, z, own_parameter_acc.x[h][c]);
#if HAS_EDGE_VECTOR
                        grad_e.x[h][c] = m * weights.x[h][c];
#endif
#elif SCORE == SCORE_DOT
                        sums.vector.x[h][c] = fmaf(ds, other.x[h][c], sums.vector.x[h][c]);
#if HAS_EDGE_VECTOR
                        grad_e.x[h][c] = fmaf(ds * in.scale, own.x[h][c], kept * grad.x[h][c]);
#endif
#else
                        sums.vector.x[h][c] = fmaf(ds * neighbours.scalar(u, h), other.x[h][c], sums.vector.x[h][c]);
#endif
                    }
#endif
                }
#if EDGE
                if (grad_edge != nullptr && is_valid(item, l, step, u)) {
#if HAS_EDGE_SCALARS
                    store_heads(static_cast<float*>(grad_edge), now.edge[u], l, grad_e);
#else
                    store_part(static_cast<storage_t*>(grad_edge), now.edge[u], l, grad_e);
#endif
                }
#endif
            }
        }

        if (WARP_ROWS > 1 && item.begin == item.end) {
            sums = continues ? load_sums(carry, item.row, l) : zero_target_sums();
        } else {
            add_to(parameter_acc, own_parameter_acc);
        }
        sum_slots(sums);
        // The lanes of a head read the same carried numbers; one of them overwrites these.
        __syncwarp();
        bool finishes = item.active && item.chunk < 0 && a.finishes() && l.edge_slot == 0;
        if (SWEPT && item.active && l.edge_slot == 0 && !finishes) {
            store_sums(item.chunk < 0 ? carry : partial, item.chunk < 0 ? item.row : item.chunk, l, sums);
        }
#if JOINED
        if (has_chunks(a)) {
            float* shared_sums = reinterpret_cast<float*>(dynamic_shared());
            const int slot = item_slot(l);
            if (l.edge_slot == 0) store_sums(shared_sums, slot, l, sums);
            __syncthreads();
            sums = add_chunks<false>(zero_target_sums(), shared_sums, slot, slot + item.join, l);
            finishes = item.first && l.edge_slot == 0;
        }
#endif
        if (a.finishes()) store_target(in, item.row, l, sums, grad_target, grad_beta, finishes);
    });

#if SCORE == SCORE_GATV2
    // The parameter's gradient: one partial sum per thread block [gridDim.x, HEADS, CHANNELS], to which each sweep adds.
    __shared__ float shared[WARPS][GROUP_LANES][LANE_HEADS * LANE_ELEMS];
    slot_sum<true>(parameter_acc);
    const int lane = threadIdx.x & 31;
    if (lane < GROUP_LANES) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                shared[threadIdx.x / 32][lane][h * LANE_ELEMS + c] = parameter_acc.x[h][c];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < GROUP_LANES) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                float sum = 0.0f;
                for (int w = 0; w < WARPS; ++w) sum += shared[w][threadIdx.x][h * LANE_ELEMS + c];
                parameter_acc.x[h][c] = sum;
            }
        }
        if (!a.starts()) add_to(parameter_acc, load_part_fp32(parameter_sums, blockIdx.x, l));
        store_part_fp32(parameter_sums, blockIdx.x, l, parameter_acc);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_backward_targets_merge(const int* heavy_row, const int* heavy_ptr, i64 num_heavy, i64 num_chunks,
                                 i64 num_rows, i64 block, i64 num_blocks, const float* partial,
                                 const storage_t* target, const float* target_scalars, const float* parameter,
                                 double scale, void* grad_target, float* grad_beta, float* carry) {
    ScoreInputs in = {};
    in.target = target;
    in.target_scalars = target_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const Lanes l = lane_layout();
    const i64 w = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS + l.row_slot;
    const bool active = w < num_heavy, writes = active && l.edge_slot == 0;
    const int begin = active ? heavy_ptr[w] : 0, end = active ? heavy_ptr[w + 1] : 0;
    const int row = active ? heavy_row[w] : 0;
    TargetSums sums = zero_target_sums();
    if (block > 0 && writes) sums = load_sums(carry, row, l);
    sums = add_chunks<true>(sums, partial, begin, end, l);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (block + 1 < num_blocks) {
        if (writes) store_sums(carry, row, l, sums);
    } else {
        store_target(in, row, l, sums, grad_target, grad_beta, writes);
    }
}
