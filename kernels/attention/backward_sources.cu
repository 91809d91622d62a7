// Attention backward over the rows of the CSC (sources): key, value and source-scalar gradients. Gathers target vectors
// and output gradients, and the records that the pass over targets wrote.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

#define SUMS_VALUE 1
#define SUMS_SCORE (SCORE == SCORE_DOT || SCORE == SCORE_COSINE)
#include "attention/backward_rows.cuh"

// Turns the sums of source `row` into its gradients and stores them. With grad_target not null, target and source are
// the same tensor (cosine) and the target part is added in.
__device__ __forceinline__ void store_source(const ScoreInputs& in, int row, const Lanes& l, Sums& sums,
                                             storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                             const storage_t* grad_target, bool store) {
#if SCORE == SCORE_COSINE
    project(sums.score, load_part<NODE_STRIDE>(in.value, row, l), load_scalars(in.source_scalars, row, l));
    const float beta = in.parameter[0];
#endif
#if SCORE == SCORE_COSINE || KEY_IS_VALUE
    const Part before = grad_target == nullptr ? zero_part() : load_part<NODE_STRIDE>(grad_target, row, l);
#endif
    if (!store) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
#if KEY_IS_VALUE
            sums.value.x[h][c] += fmaf(in.scale, sums.score.x[h][c], before.x[h][c]);
#elif SCORE == SCORE_DOT
            sums.score.x[h][c] *= in.scale;
#elif SCORE == SCORE_COSINE
            sums.value.x[h][c] += fmaf(beta, sums.score.x[h][c], before.x[h][c]);
#endif
        }
    }
    store_part<NODE_STRIDE>(grad_value, row, l, sums.value);
    if (HAS_KEY && !KEY_IS_VALUE) store_part<NODE_STRIDE>(grad_key, row, l, sums.score);
    if (SCORE == SCORE_ADD) store_heads(grad_source, row, l, sums.scalar);
}

// What a row of the CSC reads of its targets.
struct Targets : EdgeTerms {
    Packed grads[UNROLL], queries[UNROLL];
    RowSoftmax softmax[UNROLL];
    HeadValues delta[UNROLL];

    __device__ __forceinline__ Part query(int u) const { return HAS_TARGET_VECTOR ? widen(queries[u]) : zero_part(); }
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

__device__ __forceinline__ Targets load_targets(const ScoreInputs& in, const storage_t* grad_out, const float* records,
                                                const Step& step, const Lanes& l) {
    Targets t;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        load_record(records, step.node[u], l, t.softmax[u], t.delta[u]);
        t.load_scalars(u, in.target_scalars, in.edge, step, l);
        if (HAS_TARGET_VECTOR) t.queries[u] = load_node(in.target, step.node[u], l);
        t.grads[u] = load_node<ROW_STRIDE>(grad_out, step.node[u], l);
        t.load_edge(u, in.edge, step, l);
    }
    return t;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_sources(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const float* records, const storage_t* grad_out,
                           storage_t* grad_key, storage_t* grad_value, float* grad_source,
                           const storage_t* grad_target, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_targets(gathered, grad_out, records, a);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;
    finish_copies();
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item);

        const Part own_value = load_part<NODE_STRIDE>(in.value, item.row, l);
        Part own_key = own_value;
        if (HAS_KEY && !KEY_IS_VALUE) own_key = load_part<NODE_STRIDE>(in.key, item.row, l);
        const HeadValues own_scalars = load_scalars(in.source_scalars, item.row, l);
        const HeadValues factor = logit_factor(in, own_scalars);

        const bool carried = is_carried(a, item, l);
        Sums sums = carried ? load_sums(carry, num_rows, item.row, l) : zero_sums();
        Step next;
        if (!IN_SHARED && steps > 0) next = load_step(a, item, l, 0);
        for (int step = 0; step < steps; ++step) {
            const Step now = IN_SHARED ? load_step(a, item, l, step) : next;
            const Targets targets = load_targets(gathered, grad_out, records, now, l);
            if (!IN_SHARED) next = load_step(a, item, l, step + 1);

            Products products;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                Part source = own_key, content = own_value;
                targets.add_edge(source, u);
                if (HAS_KEY) targets.add_edge(content, u);
                const Part query = targets.query(u), grad = widen(targets.grads[u]);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    if (SCORE != SCORE_ADD) products.score[u][h] = score_product(query, source, weights, in.slope, h);
                    products.value[u][h] = part_dot(grad, content, h);
                }
            }
            reduce_products(products);
            float dropout_factors[UNROLL][LANE_HEADS];
            load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);

#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part query = targets.query(u), grad = widen(targets.grads[u]);
                Part source = own_value;
                targets.add_edge(source, u);
#pragma unroll
                for (int h = 0; h < LANE_HEADS; ++h) {
                    const float logit = targets.logit(u, h, products.score[u][h], own_scalars, factor, in.slope);
                    const float weight = fast_exp2(logit - targets.softmax[u].max[h]) * targets.softmax[u].inverse[h];
                    const float p = is_valid(item, l, step, u) ? weight : 0.0f;
                    const float kept = p * dropout_factors[u][h];
                    const float ds = kept * products.value[u][h] - p * targets.delta[u].x[h];
#if SCORE == SCORE_ADD
                    const float z = targets.activation_input(u, h, own_scalars);
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
            sums = carried ? load_sums(carry, num_rows, item.row, l) : zero_sums();
        }
        const bool finishes = complete_sums(sums, a, item, l, partial, carry);
        if (a.finishes()) {
            store_source(in, item.row, l, sums, grad_key, grad_value, grad_source, grad_target, finishes);
        }
    });
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_backward_sources_merge(HEAVY_PARAMETERS, const float* partial, const storage_t* value,
                                 const float* source_scalars, const float* parameter, double scale,
                                 storage_t* grad_key, storage_t* grad_value, float* grad_source,
                                 const storage_t* grad_target, float* carry) {
    ScoreInputs in = {};
    in.value = value;
    in.source_scalars = source_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const Lanes l = lane_layout();
    const HeavyRows heavy = HEAVY;
    const HeavyRow row = heavy_row_of(heavy, l);
    Sums sums = merge_sums(heavy, row, l, partial, carry);
    const bool writes = row.active && l.edge_slot == 0;
    if (heavy.finishes()) {
        store_source(in, row.row, l, sums, grad_key, grad_value, grad_source, grad_target, writes);
    } else if (writes) {
        store_sums(carry, num_rows, row.row, l, sums);
    }
}
