// Attention backward over targets in two kernels: the schedule of pmf_forward.cu, with logits and dP kept in `state`,
// where the second kernel replaces them (see paper_backward.cuh). Writes what backward_targets.cu writes.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/score.cuh"
#include "attention/paper_backward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_targets_scores(const int* row, const int* index, const int* edge_id, i64 num_edges, i64 warp_edges,
                             INPUT_PARAMETERS, const storage_t* grad_out, float* state) {
    const Edges edges = {nullptr, row, index, edge_id};
    const ScoreInputs in = INPUTS;
    score_edges_backward(edges, in, grad_out, share_of_warp(num_edges, warp_edges), lane_layout(),
                         scores_in_memory(state), scores_in_memory(state + num_edges * HEADS));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_targets(const int* ptr, const int* row, const int* index, const int* edge_id, i64 num_rows, i64 num_edges,
                      INPUT_PARAMETERS, const void* out, const float* softmax, const storage_t* grad_out,
                      float* records, void* grad_target, float* grad_beta, void* grad_edge, float* state) {
    const Edges edges = {ptr, row, index, edge_id};
    const ScoreInputs in = INPUTS;
    const Scores<HEADS> in_place = {nullptr, 0};
    const i64 r = row_of_warp();
    if (r < num_rows) {
        finish_row_backward(edges, in, r, lane_layout(), scores_in_memory(state),
                            scores_in_memory(state + num_edges * HEADS), in_place, in_place, out, softmax, grad_out,
                            records, grad_target, grad_beta, grad_edge);
    }
}
