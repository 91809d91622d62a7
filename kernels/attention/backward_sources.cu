// Attention backward over the rows of the CSC (sources): key, value and source-scalar gradients. Gathers target vectors and
// output gradients, and the records that the pass over targets wrote.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/backward.cuh"

#define SOURCE_PARTS (SCORE == SCORE_DOT || SCORE == SCORE_COSINE ? 2 : 1)

// What a source sums over its edges: the value's gradient, the score's (key or cosine), or one number per head (add).
struct SourceSums {
    Part value, score;
    HeadValues scalar;
};

__device__ __forceinline__ SourceSums zero_source_sums() { return {zero_part(), zero_part(), zero_heads()}; }

__device__ __forceinline__ void sum_slots(SourceSums& sums) {
    slot_sum<false>(sums.value);
    if (SOURCE_PARTS == 2) slot_sum<false>(sums.score);
    if (SCORE == SCORE_ADD) slot_sum(sums.scalar);
}

// Sums in a buffer for `count` of them: value [count, HEADS, CHANNELS], then score likewise or scalar [count, HEADS].
__device__ __forceinline__ void store_sums(float* buffer, i64 count, i64 i, const Lanes& l, const SourceSums& sums) {
    store_part_fp32(buffer, i, l, sums.value);
    if (SOURCE_PARTS == 2) store_part_fp32(buffer + count * ROW_STRIDE, i, l, sums.score);
    if (SCORE == SCORE_ADD) store_heads(buffer + count * ROW_STRIDE, i, l, sums.scalar);
}

__device__ __forceinline__ SourceSums load_sums(const float* buffer, i64 count, i64 i, const Lanes& l) {
    SourceSums sums = zero_source_sums();
    sums.value = load_part_fp32(buffer, i, l);
    if (SOURCE_PARTS == 2) sums.score = load_part_fp32(buffer + count * ROW_STRIDE, i, l);
    if (SCORE == SCORE_ADD) sums.scalar = load_state_heads(buffer + count * ROW_STRIDE, i, l);
    return sums;
}

// Adds the chunks begin ... end - 1 in a buffer for `count` of them: each edge slot takes every EDGE_SLOTS-th in turn,
// then the slots are added.
template <bool EXACT>
__device__ __forceinline__ SourceSums add_chunks(SourceSums sums, const float* buffer, i64 count, int begin, int end,
                                                 const Lanes& l) {
    SourceSums lost = zero_source_sums();
    for (int c = begin + l.edge_slot; c < end; c += EDGE_SLOTS) {
        const SourceSums other = load_sums(buffer, count, c, l);
        accumulate<EXACT>(sums.value, lost.value, other.value);
        accumulate<EXACT>(sums.score, lost.score, other.score);
        accumulate<EXACT>(sums.scalar, lost.scalar, other.scalar);
    }
    add_lost(sums.value, lost.value);
    add_lost(sums.score, lost.score);
    add_lost(sums.scalar, lost.scalar);
    sum_slots(sums);
    return sums;
}

// Turns the sums of source `row` into its gradients and stores them. With grad_target not null, target and source are
// the same tensor (cosine) and the target part is added in.
__device__ __forceinline__ void store_source(const ScoreInputs& in, int row, const Lanes& l, SourceSums& sums,
                                             storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                             const storage_t* grad_target, bool store) {
#if SCORE == SCORE_COSINE
    project(sums.score, load_part(in.value, row, l), load_scalars(in.source_scalars, row, l));
    const float beta = in.parameter[0];
    const Part before = grad_target == nullptr ? zero_part() : load_part(grad_target, row, l);
#endif
    if (!store) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
#if SCORE == SCORE_DOT
            sums.score.x[h][c] *= in.scale;
#elif SCORE == SCORE_COSINE
            sums.value.x[h][c] += fmaf(beta, sums.score.x[h][c], before.x[h][c]);
#endif
        }
    }
    store_part(grad_value, row, l, sums.value);
    if (HAS_KEY) store_part(grad_key, row, l, sums.score);
    if (SCORE == SCORE_ADD) store_heads(grad_source, row, l, sums.scalar);
}

// What the rows of the CSC gather: with IN_SHARED in shared memory, but for the edges.
struct TargetInputs {
    const storage_t *target, *grad_out;
    const float *scalars, *records;
    const void* edge;
};

#if RESIDENT
// What the rows of the thread block gather, with IN_SHARED as copies.
__device__ __forceinline__ TargetInputs bring_targets(const TargetInputs& whole, Adjacency& a) {
    TargetInputs gathered = whole;
    find_nodes(a);
#if IN_SHARED
    int used = 0;
    if (HAS_TARGET_VECTOR) gathered.target = share<ROW_STRIDE>(whole.target, a.first_node, a.last_node, used);
    gathered.grad_out = share<ROW_STRIDE>(whole.grad_out, a.first_node, a.last_node, used);
    gathered.records = share<4 * HEADS>(whole.records, a.first_node, a.last_node, used);
    if (HAS_NODE_SCALARS) gathered.scalars = share<HEADS>(whole.scalars, a.first_node, a.last_node, used);
    share_edges(a, used);
#endif
    return gathered;
}
#endif

// What a row of the CSC reads of its neighbours in one step: terms of UNROLL targets.
struct Targets {
    Packed grads[UNROLL];
    RowSoftmax softmax[UNROLL];
    HeadValues delta[UNROLL];
#if HAS_TARGET_VECTOR
    Packed queries[UNROLL];
#endif
#if HAS_EDGE_VECTOR
    Packed edges[UNROLL];
#endif
#if HAS_NODE_SCALARS
    HeadValues scalars[UNROLL];
#endif
#if HAS_EDGE_SCALARS
    HeadValues edge_scalars[UNROLL];
#endif

    __device__ __forceinline__ Part query(int u) const {
#if HAS_TARGET_VECTOR
        return widen(queries[u]);
#else
        return zero_part();
#endif
    }

    __device__ __forceinline__ float scalar(int u, int h) const {
#if HAS_NODE_SCALARS
        return scalars[u].x[h];
#else
        return 0.0f;
#endif
    }

    __device__ __forceinline__ float edge_scalar(int u, int h) const {
#if HAS_EDGE_SCALARS
        return edge_scalars[u].x[h];
#else
        return 0.0f;
#endif
    }
};

__device__ __forceinline__ void load_record(const float* records, int row, const Lanes& l, RowSoftmax& softmax,
                                            HeadValues& delta) {
    const float4* lane_records = opaque<IN_SHARED>(reinterpret_cast<const float4*>(records) + l.first_head);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        float4 record = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (has_head(l, h)) {
            record = read<IN_SHARED>(lane_records + (u64)(u32)row * HEADS + h * HEAD_SLOTS);
        }
        softmax.max[h] = record.x;
        softmax.inverse[h] = record.y;
        delta.x[h] = record.z;
    }
}

__device__ __forceinline__ Targets load_targets(const TargetInputs& in, const Step& step, const Lanes& l) {
    Targets t;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        load_record(in.records, step.node[u], l, t.softmax[u], t.delta[u]);
#if HAS_NODE_SCALARS
        t.scalars[u] = load_heads<IN_SHARED>(in.scalars, step.node[u], l);
#endif
#if HAS_EDGE_SCALARS
        t.edge_scalars[u] = load_heads(static_cast<const float*>(in.edge), step.edge[u], l);
#endif
#if HAS_TARGET_VECTOR
        t.queries[u] = load_packed<IN_SHARED>(at_lane<IN_SHARED>(in.target, l), step.node[u], l);
#endif
        t.grads[u] = load_packed<IN_SHARED>(at_lane<IN_SHARED>(in.grad_out, l), step.node[u], l);
#if HAS_EDGE_VECTOR
        t.edges[u] = load_packed(at_lane(static_cast<const storage_t*>(in.edge), l), step.edge[u], l);
#endif
    }
    return t;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_sources(const int* ptr, const int* index, const int* edge_id, const int* chunk_row,
                           const int* chunk_begin, const int* chunk_end, const int* chunk_join,
                           const int* row_order, const int* node_ptr, i64 num_rows, i64 num_chunks, i64 max_edges,
                           i64 block, i64 num_blocks,
                           const storage_t* target, const storage_t* key, const storage_t* value,
                           const float* target_scalars, const float* source_scalars, const float* parameter,
                           const void* edge, const u64* seed, double scale, double slope, double dropout,
                           const float* records, const storage_t* grad_out, storage_t* grad_key,
                           storage_t* grad_value, float* grad_source, const storage_t* grad_target, float* partial,
                           float* carry) {
    Adjacency a = {ptr,       index,    edge_id,  chunk_row,  chunk_begin, chunk_end, chunk_join,
                   row_order, node_ptr, num_rows, num_chunks, max_edges,   block,     num_blocks};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    const Lanes l = lane_layout();
    TargetInputs gathered = {in.target, grad_out, in.target_scalars, records, in.edge};
#if RESIDENT
    gathered = bring_targets(gathered, a);
#endif
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;

#if IN_SHARED
    finish_copies();
#endif
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item);

        const Part own_value = load_part(in.value, item.row, l);
        Part own_key = own_value;
        if (HAS_KEY) own_key = load_part(in.key, item.row, l);
        const HeadValues own_scalars = load_scalars(in.source_scalars, item.row, l);
        const HeadValues factor = logit_factor(in, own_scalars);

        const bool continues = !a.starts() && item.active && item.chunk < 0 && l.edge_slot == 0;
        SourceSums sums = continues ? load_sums(carry, num_rows, item.row, l) : zero_source_sums();
        Step next;
        if (!IN_SHARED && steps > 0) next = load_step(a, item, l, 0);
        for (int step = 0; step < steps; ++step) {
            const Step now = IN_SHARED ? load_step(a, item, l, step) : next;
            const Targets targets = load_targets(gathered, now, l);
            if (!IN_SHARED) next = load_step(a, item, l, step + 1);

            Products products;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                Part source = own_key, content = own_value;
#if HAS_EDGE_VECTOR
                add_to(source, widen(targets.edges[u]));
                if (HAS_KEY) add_to(content, widen(targets.edges[u]));
#endif
                const Part query = targets.query(u), grad = widen(targets.grads[u]);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    products.score[u][h] = SCORE == SCORE_ADD ? 0.0f : score_product(query, source, weights, in.slope, h);
                    products.value[u][h] = part_dot(grad, content, h);
                }
            }
            reduce_products(products);
            float dropout_factors[UNROLL][LANE_HEADS];
            load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);

#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part query = targets.query(u), grad = widen(targets.grads[u]);
#if SCORE == SCORE_GATV2
                Part source = own_value;
#if HAS_EDGE_VECTOR
                add_to(source, widen(targets.edges[u]));
#endif
#endif
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    const float logit = score_logit(products.score[u][h], own_scalars.x[h], targets.scalar(u, h),
                                                    targets.edge_scalar(u, h), factor.x[h], in.slope);
                    const float weight = fast_exp2(logit - targets.softmax[u].max[h]) * targets.softmax[u].inverse[h];
                    const float p = is_valid(item, l, step, u) ? weight : 0.0f;
                    const float kept = p * dropout_factors[u][h];
                    const float ds = kept * products.value[u][h] - p * targets.delta[u].x[h];
#if SCORE == SCORE_ADD
                    const float z = pre_activation(own_scalars.x[h], targets.scalar(u, h), targets.edge_scalar(u, h));
                    sums.scalar.x[h] += ds * leaky_slope(z, in.slope);
#elif SCORE == SCORE_COSINE
                    const float coefficient = ds * targets.scalar(u, h);
#elif SCORE == SCORE_DOT
                    const float coefficient = ds;
#endif
#pragma unroll
                    for (int c = 0; c < LANE_ELEMS; ++c) {
                        sums.value.x[h][c] = fmaf(kept, grad.x[h][c], sums.value.x[h][c]);
#if SCORE == SCORE_GATV2
                        const float z = query.x[h][c] + source.x[h][c];
                        sums.value.x[h][c] = fmaf(ds * leaky_slope(z, in.slope), weights.x[h][c], sums.value.x[h][c]);
#elif SCORE != SCORE_ADD
                        sums.score.x[h][c] = fmaf(coefficient, query.x[h][c], sums.score.x[h][c]);
#endif
                    }
                }
            }
        }

        if (WARP_ROWS > 1 && item.begin == item.end) {
            sums = continues ? load_sums(carry, num_rows, item.row, l) : zero_source_sums();
        }
        sum_slots(sums);
        // The lanes of a head read the same carried numbers; one of them overwrites these.
        __syncwarp();
        bool finishes = item.active && item.chunk < 0 && a.finishes() && l.edge_slot == 0;
        if (SWEPT && item.active && l.edge_slot == 0 && !finishes) {
            const bool light = item.chunk < 0;
            store_sums(light ? carry : partial, light ? num_rows : num_chunks, light ? item.row : item.chunk, l, sums);
        }
#if JOINED
        if (has_chunks(a)) {
            float* shared_sums = reinterpret_cast<float*>(dynamic_shared());
            const int slot = item_slot(l);
            if (l.edge_slot == 0) store_sums(shared_sums, ITEMS, slot, l, sums);
            __syncthreads();
            sums = add_chunks<false>(zero_source_sums(), shared_sums, ITEMS, slot, slot + item.join, l);
            finishes = item.first && l.edge_slot == 0;
        }
#endif
        if (a.finishes()) {
            store_source(in, item.row, l, sums, grad_key, grad_value, grad_source, grad_target, finishes);
        }
    });
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_backward_sources_merge(const int* heavy_row, const int* heavy_ptr, i64 num_heavy, i64 num_chunks,
                                 i64 num_rows, i64 block, i64 num_blocks, const float* partial, const storage_t* value,
                                 const float* source_scalars, const float* parameter, double scale,
                                 storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                 const storage_t* grad_target, float* carry) {
    ScoreInputs in = {};
    in.value = value;
    in.source_scalars = source_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const Lanes l = lane_layout();
    const i64 w = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS + l.row_slot;
    const bool active = w < num_heavy, writes = active && l.edge_slot == 0;
    const int begin = active ? heavy_ptr[w] : 0, end = active ? heavy_ptr[w + 1] : 0;
    const int row = active ? heavy_row[w] : 0;
    SourceSums sums = zero_source_sums();
    if (block > 0 && writes) sums = load_sums(carry, num_rows, row, l);
    sums = add_chunks<true>(sums, partial, num_chunks, begin, end, l);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (block + 1 < num_blocks) {
        if (writes) store_sums(carry, num_rows, row, l, sums);
    } else {
        store_source(in, row, l, sums, grad_key, grad_value, grad_source, grad_target, writes);
    }
}
