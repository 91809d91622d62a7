// Attention backward over the rows of the CSC (sources): key, value and source-scalar gradients. Gathers target vectors
// and output gradients, and the statistics of rows that the pass over targets wrote.
#define ROWS_ARE_TARGETS 0
#include "include/traversal.cuh"
#include "attention/dropout.cuh"
#include "attention/lane_score.cuh"
#include "attention/smem.cuh"
#include "attention/gather.cuh"

#define SUMS_VALUE 1
// Elsewhere the score's gradient is added to that of the value at once.
#define SUMS_SCORE (HAS_KEY || HAS_NORMS)
#define SUMS_EDGE 0
#define SUMS_PARAMETER 0
#include "attention/backward_rows.cuh"

// What a row of the CSC reads of its targets.
struct Targets : EdgeTerms {
    Packed grads[UNROLL], queries[UNROLL];
#if HAS_EDGE_ROWS
    PackedOf<EdgeTargets> edge_targets[UNROLL], edge_grads[UNROLL];
#endif
    RowStats stats[UNROLL];
    HeadValues delta[UNROLL];

    __device__ __forceinline__ Fragment query(int u) const {
        return HAS_TARGET_VECTOR ? widen(queries[u]) : zero_fragment();
    }
};

__device__ __forceinline__ void load_bwd_row_stats(const float* base, int row, const Lanes& l, RowStats& stats,
                                                   HeadValues& delta) {
    const float4* lane_base = opaque<IN_SHARED>(reinterpret_cast<const float4*>(base) + l.first_head);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (has_head(l, h)) four = read<IN_SHARED>(lane_base + (u64)(u32)row * HEADS + h * HEAD_SLOTS);
        stats.max[h] = four.x;
        stats.inverse[h] = four.y;
        delta.x[h] = four.z;
    }
}

// Where the gradients of a source go; with TARGET_IS_VALUE and `target` not null that of the target is added in.
struct SourceGrads {
    storage_t *key, *value;
    float* scalars;
    const storage_t* target;
};

struct BackwardSources : Backward {
    typedef Targets Loaded;

    const ScoreInputs& gathered;
    const SourceGrads& grads;
    const Fragment& parameters;
    u64 seed;
    const storage_t *grad_out, *grad_edge_out;
    const float* bwd_row_stats;
    Fragment own_value, own_key;
    HeadValues own_scalars, factor;

    __device__ __forceinline__ BackwardSources(const ScoreInputs& in, const Lanes& l, const ScoreInputs& gathered,
                                               const SourceGrads& grads, const Fragment& parameters)
        : Backward{in, l}, gathered(gathered), grads(grads), parameters(parameters) {}

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) {
        own_value = load_fragment(in.value, item.row, l);
        own_key = own_value;
        if (HAS_KEY) own_key = load_fragment(in.key, item.row, l);
        own_scalars = load_scalars(in.source_scalars, item.row, l);
        factor = logit_factor(in, own_scalars);
    }

    __device__ __forceinline__ Targets load(const Step<Index>& step) const {
        Targets t;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int col = step.edge[u].col;
            load_bwd_row_stats(bwd_row_stats, col, l, t.stats[u], t.delta[u]);
            t.load_scalars(u, gathered.target_scalars, gathered.edge, step, l);
            if (HAS_TARGET_VECTOR) t.queries[u] = load_node(gathered.target, col, l);
            t.grads[u] = load_node(grad_out, col, l);
            t.load_edge(u, gathered.edge, step, l);
#if HAS_EDGE_ROWS
            const storage_t* edge_targets = at_lane<false, EdgeTargets>(in.edge_target, l);
            const storage_t* edge_grads = at_lane<false, EdgeTargets>(grad_edge_out, l);
            t.edge_targets[u] = load_packed<false, EDGE_STRIDE, EdgeTargets>(edge_targets, col, l);
            t.edge_grads[u] = load_packed<false, EDGE_STRIDE, EdgeTargets>(edge_grads, col, l);
#endif
        }
        return t;
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Sums& sums, const Targets& targets, const Adjacency& a, const Item& item,
                                         const Step<Index>&, int number) const {
        Products products;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            Fragment source = own_key, content = own_value;
            targets.add_edge(source, u);
            if (EDGE_IN_VALUE) targets.add_edge(content, u);
            const Fragment query = targets.query(u), grad = widen(targets.grads[u]);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
#if HAS_TARGET_VECTOR
                products.score[u][h] = score_product(query, source, parameters, in, h);
#endif
                products.value[u][h] = lane_dot(grad, content, h);
#if HAS_EDGE_ROWS
                const FragmentOf<EdgeRow> row = widen(targets.edges[u]);
                products.score[u][h] =
                    add_row_product(products.score[u][h], widen(targets.edge_targets[u]), row, in, h);
                products.value[u][h] = lane_dot(widen(targets.edge_grads[u]), row, h, products.value[u][h]);
#endif
            }
        }
        reduce_products(products);
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, number, seed, in.dropout, dropout_factors);

#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment query = targets.query(u), grad = widen(targets.grads[u]);
            Fragment source = own_key;
            targets.add_edge(source, u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const Terms terms = targets.terms(u, h, products.score[u][h], own_scalars, factor);
                const float weight =
                    exp_difference(Score::logit(terms, in), targets.stats[u].max[h]) * targets.stats[u].inverse[h];
                const float p = is_valid(item, l, number, u) ? weight : 0.0f;
                const float kept = p * dropout_factors[u][h];
                const float ds = kept * products.value[u][h] - p * targets.delta[u].x[h];
#if SUMS_SCALAR
                sums.scalars[0].x[h] = Score::source_scalar_grad(sums.scalars[0].x[h], ds, terms, in);
#endif
#if HAS_TARGET_VECTOR
                const float dp = Score::product_grad(ds, terms, in);
                Fragment& score_sum = SUMS_SCORE ? sums.score : sums.value;
#endif
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    sums.value.x[h][c] = fmaf(kept, grad.x[h][c], sums.value.x[h][c]);
#if HAS_TARGET_VECTOR
                    score_sum.x[h][c] = Score::source_grad(score_sum.x[h][c], dp,
                                                           channel_of(query, source, parameters, h, c), in);
#endif
                }
            }
        }
    }

    __device__ __forceinline__ void end(Sums&, const Item&) const {}

    __device__ __forceinline__ void store(Sums& sums, int row, bool writes) const {
#if HAS_NORMS
        project(sums.score, load_fragment(in.value, row, l), load_scalars(in.source_scalars, row, l));
#endif
        const bool adds = TARGET_IS_VALUE && grads.target != nullptr;
        const Fragment before = adds ? load_fragment(grads.target, row, l) : zero_fragment();
        if (!writes) return;
#if SUMS_SCORE
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                const float grad = Score::finish_source(sums.score.x[h][c], in);
                sums.score.x[h][c] = grad;
                if (!HAS_KEY) sums.value.x[h][c] += grad + before.x[h][c];
            }
        }
#endif
        if (TARGET_IS_VALUE && (HAS_KEY || !SUMS_SCORE)) add_to(sums.value, before);
        store_fragment(grads.value, row, l, sums.value);
        if (HAS_KEY) store_fragment(grads.key, row, l, sums.score);
        if (SUMS_SCALAR) store_heads(grads.scalars, row, l, sums.scalars[0]);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_backward_sources(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const float* bwd_row_stats,
                           const storage_t* grad_out, storage_t* grad_key, storage_t* grad_value,
                           float* grad_source_scalars, const storage_t* grad_target, const storage_t* edge_target,
                           const storage_t* grad_edge_out, float* partial, float* carry) {
    Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS_WITH_ROWS;
    const SourceGrads grads = {grad_key, grad_value, grad_source_scalars, grad_target};
    const Lanes l = lane_layout();
    ScoreInputs gathered = in;
    bring_targets(gathered, grad_out, bwd_row_stats, a);
    const Fragment parameters = load_parameter(in, l);
    BackwardSources functor(in, l, gathered, grads, parameters);
    functor.seed = DROPOUT ? *in.seed : 0;
    functor.grad_out = grad_out;
    functor.grad_edge_out = grad_edge_out;
    functor.bwd_row_stats = bwd_row_stats;
    finish_copies();
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attention_backward_sources_merge(HEAVY_PARAMETERS, const float* partial, const storage_t* value,
                                 const float* source_scalars, const float* parameter, double scale,
                                 storage_t* grad_key, storage_t* grad_value, float* grad_source_scalars,
                                 const storage_t* grad_target, float* carry) {
    ScoreInputs in = {};
    in.value = value;
    in.source_scalars = source_scalars;
    in.parameter = parameter;
    in.scale = (float)scale;
    const SourceGrads grads = {grad_key, grad_value, grad_source_scalars, grad_target};
    const Lanes l = lane_layout();
    const Fragment parameters = zero_fragment();
    merge_heavy_rows(HeavyRows HEAVY, l, BackwardSources(in, l, in, grads, parameters), partial, carry);
}
