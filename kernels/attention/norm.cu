// Inverse norms n_i = 1 / max(||x_i||, 1e-12) per head [num_rows, HEADS], as torch.nn.functional.normalize clamps them.
#include "include/storage.cuh"
#include "include/reduce.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_inverse_norm(i64 num_rows, const storage_t* x, float* inverse_norm) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    const bool active = w < num_rows && l.edge_slot == 0;
    const Part part = load_part(x, active ? (int)w : 0, l);
    HeadValues norms = head_dot(part, part);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) norms.x[h] = 1.0f / fmaxf(sqrtf(norms.x[h]), 1e-12f);
    if (active) store_heads(inverse_norm, w, l, norms);
}
