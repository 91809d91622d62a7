// Attention backward over targets in two kernels: the schedule of pmf_forward.cu, with logits and dP kept in `state`,
// where the second kernel replaces them (see paper_backward.cuh). Writes what backward_targets.cu writes.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/lane_score.cuh"
#include "attention/paper_backward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_targets_scores(const int* row, const int* col, const int* perm, i64 num_edges, i64 warp_edges,
                             INPUT_PARAMETERS, const storage_t* grad_out, float* state) {
    const Edges edges = {nullptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    score_edges_backward(edges, in, grad_out, share_of_warp(num_edges, warp_edges), lane_layout(),
                         scores_in_memory(state), scores_in_memory(state + num_edges * HEADS));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_targets(const int* rowptr, const int* row, const int* col, const int* perm, i64 num_rows, i64 num_edges,
                      INPUT_PARAMETERS, const void* out, const float* row_stats, const storage_t* grad_out,
                      float* bwd_row_stats, void* grad_target, float* grad_parameter, void* grad_edge,
                      float* state) {
    const Edges edges = {rowptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    const Scores<HEADS> in_place = {nullptr, 0};
    const i64 r = row_of_warp();
    if (r < num_rows) {
        finish_row_backward(edges, in, r, lane_layout(), scores_in_memory(state),
                            scores_in_memory(state + num_edges * HEADS), in_place, in_place, out, row_stats, grad_out,
                            bwd_row_stats, grad_target, grad_parameter, grad_edge);
    }
}
