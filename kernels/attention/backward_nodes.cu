// Attention backward over targets where the forward pass left the derivative of the output in the target's scalar
// (DOUT_DLOGIT in forward.cu): a dot product per node, dl_i = <dO_i, dO_i / dl_i>, and no edge is read.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "attention/row_stats.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_backward_nodes(i64 num_rows, const void* out, const float* dout_dlogit, const float* row_stats,
                         const storage_t* grad_out, float* bwd_row_stats, float* grad_target) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    const bool active = w < num_rows;
    const int row = active ? (int)w : 0;
    const Fragment grad = load_fragment(grad_out, row, l);
    const HeadValues delta = head_dot(grad, load_out(out, row, l));
    const HeadValues derivative = head_dot(grad, load_fragment_fp32(dout_dlogit, row, l));
    if (!active) return;
    store_bwd_row_stats(bwd_row_stats, row, l, load_row_stats(row_stats, row, l), delta);
    store_heads(grad_target, row, l, derivative);
}
