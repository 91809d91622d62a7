// Attention backward over targets in one kernel: the schedule of smmf_forward.cu. Dynamic shared memory: 2 GROUP_HEADS
// numbers for each edge of the block, 1 for the add score. Writes what backward_targets.cu writes, and `state` (see
// paper_backward.cuh).
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/lane_score.cuh"
#include "attention/paper_backward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_smmf_targets(const int* rowptr, const int* row, const int* col, const int* perm, i64 num_rows,
                       i64 num_edges, INPUT_PARAMETERS, const void* out, const float* row_stats,
                       const storage_t* grad_out, float* bwd_row_stats, void* grad_target, float* grad_parameter,
                       void* grad_edge, float* state) {
    extern __shared__ float shared[];
    const Edges edges = {rowptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    const int warp = threadIdx.x / 32;
    const i64 first_row = (i64)blockIdx.x * BLOCK_ROWS, end_row = min(first_row + BLOCK_ROWS, num_rows);
    const Span block = {rowptr[first_row], rowptr[end_row]};
    const Scores<GROUP_HEADS> grads = {shared, block.begin};
    const Scores<GROUP_HEADS> logits = {shared + (block.end - block.begin) * GROUP_HEADS, block.begin};
    score_edges_backward(edges, in, grad_out, share_of(block, warp, WARPS), l, logits, grads);
    __syncthreads();
    for (i64 r = first_row + warp; r < end_row; r += WARPS) {
        finish_row_backward(edges, in, r, l, logits, grads, scores_in_memory(state),
                            scores_in_memory(state + num_edges * HEADS), out, row_stats, grad_out, bwd_row_stats,
                            grad_target, grad_parameter, grad_edge);
    }
}
