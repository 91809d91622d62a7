// Attention forward in two kernels (DF-GNN's parallelism maximisation fusion): scores with the edges divided evenly
// over all warps, kept in `scores` [E, HEADS] fp32; then softmax and gather with a warp or a block per row of any
// degree, which overwrites them with exponentials. Writes what forward.cu writes.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/lane_score.cuh"
#include "attention/paper_forward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_forward_scores(const int* row, const int* col, const int* perm, i64 num_edges, i64 warp_edges,
                             INPUT_PARAMETERS, float* scores) {
    const Edges edges = {nullptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    score_edges(edges, in, share_of_warp(num_edges, warp_edges), lane_layout(), scores_in_memory(scores));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_pmf_forward(const int* rowptr, const int* row, const int* col, const int* perm, i64 num_rows,
                      INPUT_PARAMETERS, float* scores, storage_t* out, float* row_stats, float* out_fp32) {
    const Edges edges = {rowptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    const i64 r = row_of_warp();
    if (r < num_rows) attend_row(edges, in, r, lane_layout(), scores_in_memory(scores), out, row_stats, out_fp32);
}
