// Attention backward over targets where the forward pass left the derivative of the output in the target scalar (add
// score, TANGENT in forward.cu): a dot product per node, dl_i = <dO_i, dO_i / dl_i>, and no edge is read.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "attention/records.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_backward_nodes(i64 num_rows, const void* out, const float* tangent, const float* softmax,
                         const storage_t* grad_out, float* records, float* grad_target) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    const bool active = w < num_rows;
    const int row = active ? (int)w : 0;
    const Part grad = load_part(grad_out, row, l);
    const HeadValues delta = head_dot(grad, load_out(out, row, l));
    const HeadValues derivative = head_dot(grad, load_part_fp32(tangent, row, l));
    if (!active) return;
    store_records(records, row, l, load_softmax(softmax, row, l), delta);
    store_heads(grad_target, row, l, derivative);
}
