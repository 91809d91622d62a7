// Attention backward over the rows of the CSR (targets): delta, target gradients, edge and parameter gradients. Gathers
// what the forward gathers. Heavy rows write partial sums per chunk; the merge kernel adds them in chunk order.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

#define SUMS_VALUE 0
#define SUMS_SCORE (SCORE != SCORE_ADD)
#include "attention/backward_rows.cuh"

// Turns the sum over the edges of target `row` into its gradient and stores it.
__device__ __forceinline__ void store_target(const ScoreInputs& in, int row, const Lanes& l, Sums& sums,
                                             void* grad_target, float* grad_beta, bool store) {
#if SCORE == SCORE_ADD
    if (store) store_heads(static_cast<float*>(grad_target), row, l, sums.scalar);
#else
    Part& acc = sums.score;
#if SCORE == SCORE_COSINE
    const Part own = load_part<NODE_STRIDE>(in.target, row, l);
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
    store_part<NODE_STRIDE>(static_cast<storage_t*>(grad_target), row, l, acc);
#if SCORE == SCORE_COSINE
    store_heads(grad_beta, row, l, cosine_sum);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_targets(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const void* out, const float* softmax,
                           const storage_t* grad_out, float* records, void* grad_target, float* grad_beta,
                           void* grad_edge, float* parameter_sums, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_sources(gathered, a);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;
    Part parameter_acc = zero_part();
    finish_copies();
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item);

        const Part grad = load_part(grad_out, item.row, l);
        const RowSoftmax own_softmax = load_softmax(softmax, item.row, l);
        const HeadValues own_delta = head_dot(grad, load_out(out, item.row, l));
        if (a.starts() && item.first && l.edge_slot == 0) store_records(records, item.row, l, own_softmax, own_delta);
        Part own = zero_part();
        if (HAS_TARGET_VECTOR) own = load_part<NODE_STRIDE>(in.target, item.row, l);
        const HeadValues own_scalars = load_scalars(in.target_scalars, item.row, l);
        const HeadValues factor = logit_factor(in, own_scalars);

        const bool carried = is_carried(a, item, l);
        Sums sums = carried ? load_sums(carry, num_rows, item.row, l) : zero_sums();
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
                    if (SCORE != SCORE_ADD) products.score[u][h] = score_product(own, other, weights, in.slope, h);
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
                    const float logit =
                        neighbours.logit(u, h, products.score[u][h], own_scalars, factor, in.slope);
                    const float weight = fast_exp2(logit - own_softmax.max[h]) * own_softmax.inverse[h];
                    const float p = is_valid(item, l, step, u) ? weight : 0.0f;
                    const float kept = p * dropout_factors[u][h];
                    const float ds = kept * products.value[u][h] - p * own_delta.x[h];
#if SCORE == SCORE_ADD
                    const float z = neighbours.activation_input(u, h, own_scalars);
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
                        sums.score.x[h][c] = fmaf(ds, centered_slope(z, in.slope), sums.score.x[h][c]);
                        own_parameter_acc.x[h][c] = fmaf(m, z, own_parameter_acc.x[h][c]);
#if HAS_EDGE_VECTOR
                        grad_e.x[h][c] = m * weights.x[h][c];
#endif
#elif SCORE == SCORE_DOT
                        sums.score.x[h][c] = fmaf(ds, other.x[h][c], sums.score.x[h][c]);
#if HAS_EDGE_VECTOR
                        grad_e.x[h][c] = fmaf(ds * in.scale, own.x[h][c], kept * grad.x[h][c]);
#endif
#else
                        sums.score.x[h][c] = fmaf(ds * neighbours.scalar(u, h), other.x[h][c], sums.score.x[h][c]);
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
            sums = carried ? load_sums(carry, num_rows, item.row, l) : zero_sums();
        } else {
            add_to(parameter_acc, own_parameter_acc);
        }
        const bool finishes = complete_sums(sums, a, item, l, partial, carry);
        if (a.finishes()) store_target(in, item.row, l, sums, grad_target, grad_beta, finishes);
    });

#if SCORE == SCORE_GATV2
    // The parameter's gradient: one partial sum per thread block [gridDim.x, HEADS, CHANNELS], to which each sweep
    // adds.
    block_sum(parameter_acc);
    if (threadIdx.x < GROUP_LANES) {
        if (!a.starts()) add_to(parameter_acc, load_part_fp32(parameter_sums, blockIdx.x, l));
        store_part_fp32(parameter_sums, blockIdx.x, l, parameter_acc);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_backward_targets_merge(HEAVY_PARAMETERS, const float* partial, const storage_t* target,
                                 const float* target_scalars, const float* parameter, double scale, void* grad_target,
                                 float* grad_beta, float* carry) {
    ScoreInputs in = {};
    in.target = target;
    in.target_scalars = target_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const Lanes l = lane_layout();
    const HeavyRows heavy = HEAVY;
    const HeavyRow row = heavy_row_of(heavy, l);
    Sums sums = merge_sums(heavy, row, l, partial, carry);
    const bool writes = row.active && l.edge_slot == 0;
    if (heavy.finishes()) {
        store_target(in, row.row, l, sums, grad_target, grad_beta, writes);
    } else if (writes) {
        store_sums(carry, num_rows, row.row, l, sums);
    }
}
