// Attention backward over the rows of the CSR (targets): delta, target gradients, edge and parameter gradients. Gathers
// what the forward gathers. Heavy rows write partial sums per chunk; the merge kernel adds them in chunk order.
#include "include/traversal.cuh"
#include "attention/dropout.cuh"
#include "attention/lane_score.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

#define SUMS_VALUE 0
#define SUMS_SCORE HAS_TARGET_VECTOR
#define SUMS_EDGE HAS_EDGE_ROWS
#define SUMS_PARAMETER (PARAMETER == 1)
#include "attention/backward_rows.cuh"

// Where the gradients go: of a target's vector or of its scalars, its share of that of a parameter [1] (or next to a vector
// that of its scalars), of edges, and of what the target has for the rows of its edges. Those of these rows are [E, gridDim.y, EDGE_CHANNELS], one for each group
// of heads.
struct TargetGrads {
    void* target;
    float* parameter;
    void* edge;
    storage_t* edge_target;
};

struct BackwardTargets : Backward {
    typedef Neighbours Loaded;

    const ScoreInputs& gathered;
    const TargetGrads& grads;
    const Fragment& parameters;
    u64 seed;
    const void* out;
    const float* row_stats;
    const storage_t* grad_out;
    float* bwd_row_stats;
    const void* edge_out;
    const storage_t* grad_edge_out;
    // Over all rows, and of one row: the gradient of a parameter [HEADS, CHANNELS].
    Fragment parameter_sum, own_parameter_sum;
    // With such a parameter: the sum of dS over the edges of the item.
    HeadValues ds_sum;
    Fragment own, grad;
    FragmentOf<EdgeTargets> edge_target, edge_grad;
    HeadValues own_scalars, own_delta, factor;
    RowStats own_stats;

    __device__ __forceinline__ BackwardTargets(const ScoreInputs& in, const Lanes& l, const ScoreInputs& gathered,
                                               const TargetGrads& grads, const Fragment& parameters)
        : Backward{in, l}, gathered(gathered), grads(grads), parameters(parameters) {}

    __device__ __forceinline__ void begin(const Adjacency& a, const Item& item) {
        grad = load_fragment(grad_out, item.row, l);
        own_stats = load_row_stats(row_stats, item.row, l);
        edge_target = load_edge_target(in.edge_target, item.row, l);
        edge_grad = load_edge_target(grad_edge_out, item.row, l);
        const FragmentOf<EdgeTargets> edge_average = load_out<EDGE_STRIDE, EdgeTargets>(edge_out, item.row, l);
        HeadValues edge_parts;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) edge_parts.x[h] = lane_dot(edge_grad, edge_average, h);
        const Fragment average = load_out(out, item.row, l);
        own_delta = head_dot(grad, average, edge_parts);
        if (PARAMETER == 2) ds_sum = zero_heads();
        if (a.starts() && item.first && l.edge_slot == 0) {
            store_bwd_row_stats(bwd_row_stats, item.row, l, own_stats, own_delta);
        }
        if (HAS_TARGET_VECTOR) own = load_fragment(in.target, item.row, l);
        own_scalars = load_scalars(in.target_scalars, item.row, l);
        factor = logit_factor(in, own_scalars);
        if (PARAMETER == 2) own_parameter_sum = zero_fragment();
    }

    __device__ __forceinline__ Neighbours load(const Step<Index>& step) const {
        return load_neighbours(gathered, step, l);
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Sums& sums, const Neighbours& neighbours, const Adjacency& a,
                                         const Item& item, const Step<Index>& now, int number) {
        Products products;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment content = neighbours.content(u);
#if HAS_TARGET_VECTOR
            const Fragment other = neighbours.scored(u);
#endif
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
#if HAS_TARGET_VECTOR
                products.score[u][h] = score_product(own, other, parameters, in, h);
#endif
                products.value[u][h] = lane_dot(grad, content, h);
#if HAS_EDGE_ROWS
                const FragmentOf<EdgeRow> row = widen(neighbours.edges[u]);
                products.score[u][h] = add_row_product(products.score[u][h], edge_target, row, in, h);
                products.value[u][h] = lane_dot(edge_grad, row, h, products.value[u][h]);
#endif
            }
        }
        reduce_products(products);
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, number, seed, in.dropout, dropout_factors);

#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#if HAS_TARGET_VECTOR
            const Fragment other = neighbours.scored(u);
#endif
#if HAS_EDGE_VECTOR
            Fragment grad_e;
#elif HAS_EDGE_SCALARS
            HeadValues grad_e;
#elif HAS_EDGE_ROWS
            const FragmentOf<EdgeRow> row = widen(neighbours.edges[u]);
            FragmentOf<EdgeRow> grad_e = zero_fragment<EdgeRow>();
#endif
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const Terms terms = neighbours.terms(u, h, products.score[u][h], own_scalars, factor);
                const float weight = exp_difference(Score::logit(terms, in), own_stats.max[h]) * own_stats.inverse[h];
                const float p = is_valid(item, l, number, u) ? weight : 0.0f;
                const float kept = p * dropout_factors[u][h];
                const float ds = kept * products.value[u][h] - p * own_delta.x[h];
#if PARAMETER == 2
                ds_sum.x[h] += ds;
#endif
#if SUMS_SCALAR
                sums.scalars[0].x[h] = Score::target_scalar_grad(sums.scalars[0].x[h], ds, terms, in);
#endif
#if HAS_EDGE_SCALARS
                grad_e.x[h] = Score::edge_scalar_grad(ds, terms, in);
#endif
#if HAS_TARGET_VECTOR
                const float dp = Score::product_grad(ds, terms, in);
#if SUMS_PARAMETER
                const float part = Score::product_grad(1.0f, terms, in) * terms.product;
                sums.scalars[0].x[h] = fmaf(ds, part, sums.scalars[0].x[h]);
                sums.scalars[1].x[h] += ds;
                sums.scalars[2].x[h] = fmaf(p, part, sums.scalars[2].x[h]);
#endif
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    const Channel channel = channel_of(own, other, parameters, h, c);
                    sums.score.x[h][c] = Score::target_grad(sums.score.x[h][c], dp, channel, in);
#if PARAMETER == 2
                    own_parameter_sum.x[h][c] = Score::parameter_grad(own_parameter_sum.x[h][c], dp, channel, in);
#endif
#if HAS_EDGE_VECTOR
                    const float content_grad = EDGE_IN_VALUE ? kept * grad.x[h][c] : 0.0f;
                    grad_e.x[h][c] = Score::edge_grad(content_grad, dp, channel, in);
#endif
                }
#endif
#if HAS_EDGE_ROWS
#pragma unroll
                for (int c = 0; c < EdgeRow::elements; ++c) {
                    const Channel channel = channel_of(edge_target, row, h, c);
                    sums.edge.x[h][c] = Score::target_grad(sums.edge.x[h][c], dp, channel, in);
                    if (grads.edge == nullptr) continue;
                    const float averaged = fmaf(kept, edge_grad.x[h][c], grad_e.x[0][c]);
                    grad_e.x[0][c] = Score::edge_grad(averaged, dp, channel, in);
                }
#endif
            }
#if HAS_EDGE_ROWS
            if (grads.edge != nullptr) {
#pragma unroll
                for (int k = 0; k < EdgeRow::loads; ++k) {
                    head_sum<EDGE_VEC, GROUP_LANES / 2, HEAD_LANES>(&grad_e.x[0][k * EDGE_VEC]);
                }
            }
#endif
#if EDGE
            if (grads.edge != nullptr && is_valid(item, l, number, u)) {
#if HAS_EDGE_SCALARS
                store_heads(static_cast<float*>(grads.edge), now.edge[u].perm, l, grad_e);
#elif HAS_EDGE_ROWS
                const i64 place = (i64)now.edge[u].perm * gridDim.y + blockIdx.y;
                storage_t* address = static_cast<storage_t*>(grads.edge) + place * EDGE_CHANNELS + edge_row_offset(l);
                if (threadIdx.x % GROUP_LANES < HEAD_LANES) store_at(address, l, grad_e);
#else
                store_fragment(static_cast<storage_t*>(grads.edge), now.edge[u].perm, l, grad_e);
#endif
            }
#endif
        }
    }

    // All dS of a row add up to 0, so what they do add up to is rounding, of delta above all. In the gradient of a parameter
    // it meets the average of what the score takes of the row's sources; that is taken off, as the gradient's terms may
    // cancel and the rounding would stay. A parameter per channel takes this at the output in place of the average.
    __device__ __forceinline__ void end(Sums&, const Item& item) {
#if PARAMETER == 2
        const Fragment average = load_out(out, item.row, l);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                const Channel channel = channel_of(own, average, parameters, h, c);
                own_parameter_sum.x[h][c] =
                    Score::parameter_grad(own_parameter_sum.x[h][c], -ds_sum.x[h], channel, in);
            }
        }
        add_to(parameter_sum, own_parameter_sum);
#endif
    }

    __device__ __forceinline__ void store(Sums& sums, int row, bool writes) const {
#if HAS_TARGET_VECTOR
        Fragment& sum = sums.score;
#if HAS_NORMS
        const HeadValues norm = load_scalars(in.target_scalars, row, l);
        project(sum, load_fragment(in.target, row, l), norm);
#endif
        // Read once more: a merge kernel has no registers to spare before.
        const Fragment weights = load_parameter(in, l);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                sum.x[h][c] = Score::finish_target(sum.x[h][c], {0.0f, 0.0f, weights.x[h][c]}, in);
            }
        }
        if (writes) store_fragment(static_cast<storage_t*>(grads.target), row, l, sum);
#if HAS_EDGE_ROWS
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < EdgeTargets::elements; ++c) {
                sums.edge.x[h][c] = Score::finish_target(sums.edge.x[h][c], {0.0f, 0.0f, 0.0f}, in);
            }
        }
        if (writes) store_fragment<EDGE_STRIDE>(grads.edge_target, row, l, sums.edge);
#endif
#if PARAMETER == 1
        // The logit is the parameter times <x^_i, x^_j>; sums of dS <x_i, x^_j>, of dS, and of P <x_i, x^_j>.
        HeadValues& grad_of_row = sums.scalars[0];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            const float excess = sums.scalars[1].x[h] * sums.scalars[2].x[h];
            grad_of_row.x[h] = norm.x[h] * (grad_of_row.x[h] - excess);
        }
        if (writes) store_heads(grads.parameter, row, l, grad_of_row);
#elif SUMS_SCALAR
        if (writes) store_heads(grads.parameter, row, l, sums.scalars[0]);
#endif
#elif SUMS_SCALAR
        if (writes) store_heads(static_cast<float*>(grads.target), row, l, sums.scalars[0]);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_targets(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const void* out, const float* row_stats,
                           const storage_t* grad_out, float* bwd_row_stats, void* grad_target, float* grad_parameter,
                           void* grad_edge, float* parameter_sums, const storage_t* edge_target, const void* edge_out,
                           const storage_t* grad_edge_out, storage_t* grad_edge_target, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS_WITH_ROWS;
    const TargetGrads grads = {grad_target, grad_parameter, grad_edge, grad_edge_target};
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_sources(gathered, a);
    const Fragment parameters = load_parameter(in, l);
    BackwardTargets functor(in, l, gathered, grads, parameters);
    functor.seed = DROPOUT ? *in.seed : 0;
    functor.out = out;
    functor.row_stats = row_stats;
    functor.grad_out = grad_out;
    functor.bwd_row_stats = bwd_row_stats;
    functor.edge_out = edge_out;
    functor.grad_edge_out = grad_edge_out;
    if (PARAMETER == 2) functor.parameter_sum = zero_fragment();
    finish_copies();
    traverse(a, l, functor, partial, carry);
#if PARAMETER == 2
    store_block_sum(functor.parameter_sum, parameter_sums, blockIdx.x, a, l);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_backward_targets_merge(HEAVY_PARAMETERS, const float* partial, const storage_t* target,
                                 const float* target_scalars, const float* parameter, double scale, void* grad_target,
                                 float* grad_parameter, storage_t* grad_edge_target, float* carry) {
    ScoreInputs in = {};
    in.target = target;
    in.target_scalars = target_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const TargetGrads grads = {grad_target, grad_parameter, nullptr, grad_edge_target};
    const Lanes l = lane_layout();
    const Fragment parameters = zero_fragment();
    merge_heavy_rows(HeavyRows HEAVY, l, BackwardTargets(in, l, in, grads, parameters), partial, carry);
}
