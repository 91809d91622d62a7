// Attention backward over sources from the `state` of the pass over targets (see paper_backward.cuh):
// dV_j = sum_i P~_ij dO_i and, with vectors q, dK_j = sum_i G_ij q_i, else dr_j = sum_i G_ij for the scalars. A warp
// or a block owns a row of the CSC, lanes over features; `position` tells where in the CSR, and so in the state, an
// edge is.
#define ROWS_ARE_TARGETS 0
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/lane_score.cuh"
#include "attention/paper_backward.cuh"

struct SourceStep {
    int col[UNROLL], position[UNROLL];
};

__device__ __forceinline__ SourceStep load_source_step(const int* col, const int* position, const Span& span,
                                                       const Lanes& l, int first) {
    SourceStep step;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int entry = min(position_of(first, l, u), span.end - 1);
        step.col[u] = __ldg(col + entry);
        step.position[u] = __ldg(position + entry);
    }
    return step;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_paper_sources(const int* rowptr, const int* col, const int* position, i64 num_rows, i64 num_edges,
                        INPUT_PARAMETERS, const float* state, const storage_t* grad_out, storage_t* grad_key,
                        storage_t* grad_value, float* grad_source, const storage_t* grad_target) {
    const Lanes l = lane_layout();
    const i64 row = row_of_warp();
    if (row >= num_rows) return;
    const Span span = share_of_row({rowptr, nullptr, col, nullptr}, row);
    const float* const grad_state = state + num_edges * HEADS;

    Fragment value_sum = zero_fragment(), score_sum = zero_fragment();
    HeadValues scalar_sum = zero_heads();
    SourceStep next;
    if (span.begin < span.end) next = load_source_step(col, position, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const SourceStep now = next;
        HeadValues weights[UNROLL], grads[UNROLL];
        Packed outs[UNROLL];
#if HAS_TARGET_VECTOR
        Packed targets[UNROLL];
#endif
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            weights[u] = load_heads(state, now.position[u], l);
            grads[u] = load_heads(grad_state, now.position[u], l);
            outs[u] = load_packed(at_lane(grad_out, l), now.col[u], l);
#if HAS_TARGET_VECTOR
            targets[u] = load_packed(at_lane(target, l), now.col[u], l);
#endif
        }
        next = load_source_step(col, position, span, l, first + STEP_EDGES);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const bool valid = position_of(first, l, u) < span.end;
            const Fragment out = widen(outs[u]);
#if HAS_TARGET_VECTOR
            const Fragment other = widen(targets[u]);
#endif
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float weight = valid ? weights[u].x[h] : 0.0f, grad = valid ? grads[u].x[h] : 0.0f;
                scalar_sum.x[h] += grad;
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    value_sum.x[h][c] = fmaf(weight, out.x[h][c], value_sum.x[h][c]);
#if HAS_TARGET_VECTOR
                    score_sum.x[h][c] = fmaf(grad, other.x[h][c], score_sum.x[h][c]);
#endif
                }
            }
        }
    }
    row_sum(value_sum);
#if !HAS_TARGET_VECTOR
    slot_sum(scalar_sum);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) scalar_sum.x[h] = row_warps_reduce<false>(scalar_sum.x[h]);
    if (is_first_warp() && l.edge_slot == 0) store_heads(grad_source, row, l, scalar_sum);
#else
    row_sum(score_sum);
#endif
    if (!is_first_warp()) return;
#if HAS_NORMS
    project_normalised(score_sum, load_fragment(value, (int)row, l), load_scalars(source_scalars, (int)row, l));
#endif
#if HAS_TARGET_VECTOR
    const ScoreInputs in = INPUTS;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) score_sum.x[h][c] = Score::finish_source(score_sum.x[h][c], in);
    }
    if (!HAS_KEY) add_to(value_sum, score_sum);
#endif
#if TARGET_IS_VALUE
    if (grad_target != nullptr) add_to(value_sum, load_fragment(grad_target, (int)row, l));
#endif
    if (l.edge_slot != 0) return;
    store_fragment(grad_value, (int)row, l, value_sum);
    if (HAS_KEY) store_fragment(grad_key, (int)row, l, score_sum);
}
