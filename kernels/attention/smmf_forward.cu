// Attention forward in one kernel (DF-GNN's shared-memory maximisation fusion): a block owns BLOCK_ROWS consecutive
// rows, divides their edges evenly over its warps for the scores, keeps these in shared memory, and gives each warp a
// row for softmax and gather. Dynamic shared memory: GROUP_HEADS numbers for each edge of the block. Writes what
// forward.cu writes.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/philox.cuh"
#include "attention/score.cuh"
#include "attention/paper_forward.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
attention_smmf_forward(const int* ptr, const int* row, const int* index, const int* edge_id, i64 num_rows,
                       INPUT_PARAMETERS, storage_t* out, float* softmax, float* exact) {
    extern __shared__ float shared[];
    const Edges edges = {ptr, row, index, edge_id};
    const ScoreInputs in = INPUTS;
    const Lanes l = lane_layout();
    const int warp = threadIdx.x / 32;
    const i64 first_row = (i64)blockIdx.x * BLOCK_ROWS, end_row = min(first_row + BLOCK_ROWS, num_rows);
    const Span block = {ptr[first_row], ptr[end_row]};
    const Scores<GROUP_HEADS> logits = {shared, block.begin};
#if BALANCED
    score_edges(edges, in, share_of(block, warp, WARPS), l, logits);
#else
    for (i64 r = first_row + warp; r < end_row; r += WARPS) score_row(edges, in, r, logits);
#endif
    __syncthreads();
    for (i64 r = first_row + warp; r < end_row; r += WARPS) {
        attend_row(edges, in, r, l, logits, out, softmax, exact);
    }
}
