// Inverse norms of nodes per head, [num_rows, HEADS].
#include "include/storage.cuh"
#include "include/reduce.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_inverse_norm(i64 num_rows, const storage_t* x, float* inverse_norm) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    const bool active = w < num_rows && l.edge_slot == 0;
    const HeadValues norms = inverse_norms(load_fragment(x, active ? (int)w : 0, l));
    if (active) store_heads(inverse_norm, w, l, norms);
}
