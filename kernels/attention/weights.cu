// Attention weights after dropout, alpha_ij = P_ij D_ij, written as [E, HEADS] in input order of the edges.
#include "include/traversal.cuh"
#include "attention/dropout.cuh"
#include "attention/lane_score.cuh"
#include "attention/row_stats.cuh"
#include "attention/gather.cuh"

struct Weights {
    // Nothing is summed.
    struct State {};
    typedef ColumnIndex<(EDGE != 0)> Index;
    typedef Neighbours Loaded;
    static constexpr bool PREFETCHES = false, HAS_FULL_STEPS = false, RESETS_EMPTY = false;

    const ScoreInputs& in;
    const Lanes& l;
    const Fragment& parameters;
    u64 seed;
    const float* row_stats;
    float* weights_out;
    Fragment own;
    FragmentOf<EdgeTargets> edge_target;
    HeadValues own_scalars, factor;
    RowStats own_stats;

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) {
        own = zero_fragment();
        if (HAS_TARGET_VECTOR) own = load_fragment(in.target, item.row, l);
        edge_target = load_edge_target(in.edge_target, item.row, l);
        own_scalars = load_scalars(in.target_scalars, item.row, l);
        factor = logit_factor(in, own_scalars);
        own_stats = load_row_stats(row_stats, item.row, l);
    }

    __device__ __forceinline__ Neighbours load(const Step<Index>& step) const { return load_neighbours(in, step, l); }

    template <bool FULL>
    __device__ __forceinline__ void step(State&, const Neighbours& neighbours, const Adjacency& a, const Item& item,
                                         const Step<Index>&, int number) const {
        float product[UNROLL][LANE_HEADS];
        score_products(product, neighbours, own, edge_target, parameters, in);
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, number, seed, in.dropout, dropout_factors);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            HeadValues alpha;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float s = Score::logit(neighbours.terms(u, h, product[u][h], own_scalars, factor), in);
                // The logit of another schedule may round otherwise than this one.
                const float p = exp_difference(s, own_stats.max[h]) * own_stats.inverse[h];
                alpha.x[h] = (p > 1.0f ? 1.0f : p) * dropout_factors[u][h];
            }
            if (is_valid(item, l, number, u)) {
                store_heads(weights_out, __ldg(a.perm + edge_position(item, l, number, u)), l, alpha);
            }
        }
    }

    __device__ __forceinline__ State empty() const { return {}; }
    __device__ __forceinline__ State restore(const float*, i64, i64) const { return {}; }
    __device__ __forceinline__ void save(State, float*, i64, i64) const {}
    __device__ __forceinline__ void end(State&, const Item&) const {}
    __device__ __forceinline__ void merge_slots(State) const {}
    template <bool COMPENSATED>
    __device__ __forceinline__ void merge(State, const float*, i64, int, int) const {}
    __device__ __forceinline__ void store(State, int, bool) const {}
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_weights(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const float* row_stats, float* weights_out,
                  const storage_t* edge_target) {
    const Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS_WITH_ROWS;
    const Lanes l = lane_layout();
    const Fragment parameters = load_parameter(in, l);
    Weights functor = {in, l, parameters, DROPOUT ? *in.seed : 0, row_stats, weights_out};
    traverse(a, l, functor, nullptr, nullptr);
}
