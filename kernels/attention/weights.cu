// Attention weights after dropout, alpha_ij = P_ij D_ij, written as [E, HEADS] in input order of the edges.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/rows.cuh"
#include "attention/score.cuh"
#include "attention/gather.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_weights(const int* ptr, const int* index, const int* edge_id, const int* chunk_row, const int* chunk_begin,
                  const int* chunk_end, const int* chunk_join, const int* row_order, const int* node_ptr, i64 num_rows,
                  i64 num_chunks, i64 max_edges, i64 block, i64 num_blocks, const storage_t* target, const storage_t* key, const storage_t* value, const float* target_scalars,
                  const float* source_scalars, const float* parameter, const void* edge, const u64* seed, double scale,
                  double slope, double dropout, const float* softmax, float* weights_out) {
    const Adjacency a = {ptr,       index,    edge_id,  chunk_row,  chunk_begin, chunk_end, chunk_join,
                   row_order, node_ptr, num_rows, num_chunks, max_edges,   block,     num_blocks};
    const ScoreInputs in = {target,    key,  value, target_scalars, source_scalars, parameter,
                            edge,      seed, (float)scale, (float)slope, (float)dropout};
    const Lanes l = lane_layout();
    const Item item = work_item(a, l);
    const int steps = num_steps(item);
    Part own = zero_part();
    if (HAS_TARGET_VECTOR) own = load_part(in.target, item.row, l);
    const HeadValues own_scalars = load_scalars(in.target_scalars, item.row, l);
    const HeadValues factor = logit_factor(in, own_scalars);
    const RowSoftmax own_softmax = load_softmax(softmax, item.row, l);
    const Part weights = load_parameter(in, l);
    const u64 key64 = DROPOUT ? *in.seed : 0;

    for (int step = 0; step < steps; ++step) {
        const Step now = load_step(a, item, l, step);
        const Neighbours neighbours = load_neighbours(in, now, l);
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
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            HeadValues alpha;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float s = score_logit(logit[u][h], own_scalars.x[h], neighbours.scalar(u, h),
                                            neighbours.edge_scalar(u, h), factor.x[h], in.slope);
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
