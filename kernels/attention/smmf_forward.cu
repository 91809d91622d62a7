// Attention forward in one kernel (DF-GNN's shared-memory maximisation fusion): a block owns BLOCK_ROWS consecutive
// rows, divides their edges evenly over its warps for the scores, keeps these in shared memory, and gives each warp a
// row for softmax and gather. Dynamic shared memory: GROUP_HEADS numbers for each edge of the block. Writes what
// forward.cu writes.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/lane_score.cuh"
#include "attention/paper_forward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_smmf_forward(const int* rowptr, const int* row, const int* col, const int* perm, i64 num_rows,
                       INPUT_PARAMETERS, storage_t* out, float* row_stats, float* out_fp32) {
    extern __shared__ float shared[];
    const Edges edges = {rowptr, row, col, perm};
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    const int warp = threadIdx.x / 32;
    const i64 first_row = (i64)blockIdx.x * BLOCK_ROWS, end_row = min(first_row + BLOCK_ROWS, num_rows);
    const Span block = {rowptr[first_row], rowptr[end_row]};
    const Scores<GROUP_HEADS> logits = {shared, block.begin};
#if BALANCED
    score_edges(edges, in, share_of(block, warp, WARPS), l, logits);
#else
    for (i64 r = first_row + warp; r < end_row; r += WARPS) score_row(edges, in, r, logits);
#endif
    __syncthreads();
    for (i64 r = first_row + warp; r < end_row; r += WARPS) {
        attend_row(edges, in, r, l, logits, out, row_stats, out_fp32);
    }
}
