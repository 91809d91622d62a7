// Attention weights after dropout, alpha_ij = P_ij D_ij, written as [E, HEADS] in input order of the edges.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/gather.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_weights(ADJACENCY_PARAMETERS, INPUT_PARAMETERS, const float* softmax, float* weights_out) {
    const Adjacency a = ADJACENCY;
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    const Item item = work_item(a, l);
    const int steps = num_steps(item);
    Part own = zero_part();
    if (HAS_TARGET_VECTOR) own = load_part<NODE_STRIDE>(in.target, item.row, l);
    const HeadValues own_scalars = load_scalars(in.target_scalars, item.row, l);
    const HeadValues factor = logit_factor(in, own_scalars);
    const RowSoftmax own_softmax = load_softmax(softmax, item.row, l);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;

    for (int step = 0; step < steps; ++step) {
        const Step now = load_step(a, item, l, step);
        const Neighbours neighbours = load_neighbours(in, now, l);
        float logit[UNROLL][LANE_HEADS];
        score_products(logit, neighbours, own, weights, in.slope);
        float dropout_factors[UNROLL][LANE_HEADS];
        load_dropout(a, item, l, step, key64, in.dropout, dropout_factors);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            HeadValues alpha;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float s = neighbours.logit(u, h, logit[u][h], own_scalars, factor, in.slope);
                // The logit may round otherwise than the maximum did.
                const float p = fast_exp2(s - own_softmax.max[h]) * own_softmax.inverse[h];
                alpha.x[h] = (p > 1.0f ? 1.0f : p) * dropout_factors[u][h];
            }
            if (is_valid(item, l, step, u)) {
                store_heads(weights_out, __ldg(edge_id + edge_position(item, l, step, u)), l, alpha);
            }
        }
    }
}
