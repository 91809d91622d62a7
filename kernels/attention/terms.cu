// Terms of nodes for the add score, t_i = <a, x_i> per head [num_rows, HEADS], for one or two vectors a [HEADS,
// CHANNELS]: the second is null where there is one.
#include "include/storage.cuh"
#include "include/reduce.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_terms(i64 num_rows, const storage_t* x, const float* first, const float* second, float* first_terms,
                float* second_terms) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    const bool active = w < num_rows;
    const Fragment fragment = load_fragment(x, active ? (int)w : 0, l);
    const HeadValues terms = head_dot(fragment, load_fragment_fp32(first, 0, l));
    if (active) store_heads(first_terms, w, l, terms);
    if (second == nullptr) return;
    const HeadValues others = head_dot(fragment, load_fragment_fp32(second, 0, l));
    if (active) store_heads(second_terms, w, l, others);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_terms_backward(i64 num_rows, const storage_t* x, const float* first, const float* second,
                         const float* grad_first_terms, const float* grad_second_terms, storage_t* grad_x,
                         float* sums) {
    const Lanes l = lane_layout();
    const bool both = second != nullptr;
    const Fragment a = load_fragment_fp32(first, 0, l);
    const Fragment b = both ? load_fragment_fp32(second, 0, l) : zero_fragment();
    Fragment first_sum = zero_fragment(), second_sum = zero_fragment();
    const i64 step = (i64)gridDim.x * WARPS * WARP_ROWS;
    for (i64 w = item_of_lane(l); w < num_rows; w += step) {
        const Fragment fragment = load_fragment(x, (int)w, l);
        const HeadValues da = load_heads(grad_first_terms, w, l);
        const HeadValues db = both ? load_heads(grad_second_terms, w, l) : zero_heads();
        Fragment grad;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                grad.x[h][c] = fmaf(db.x[h], b.x[h][c], da.x[h] * a.x[h][c]);
                first_sum.x[h][c] = fmaf(da.x[h], fragment.x[h][c], first_sum.x[h][c]);
                second_sum.x[h][c] = fmaf(db.x[h], fragment.x[h][c], second_sum.x[h][c]);
            }
        }
        store_fragment(grad_x, (int)w, l, grad);
    }
    block_sum(first_sum);
    if (threadIdx.x < GROUP_LANES) store_fragment_fp32(sums, blockIdx.x, l, first_sum);
    if (!both) return;
    // Both sums take the same shared memory.
    __syncthreads();
    block_sum(second_sum);
    if (threadIdx.x < GROUP_LANES) store_fragment_fp32(sums, (i64)gridDim.x + blockIdx.x, l, second_sum);
}
