// Backward of means, variances and deviations over targets, before the pass over sources: no edge is read. The gradient of a
// message m of target i is slope_i m + offset_i, both [num_targets, CHANNELS] in fp32:
//
//   slope_i = (2 dO_i,var + dO_i,std / O_i,std) / n_i,  offset_i = dO_i,sum + dO_i,mean / n_i - slope_i mean_i
//
// where a deviation of 0 gives nothing.
#include "segment/segment.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
segment_backward_nodes(i64 num_rows, const float* inverse_degree, const storage_t* out, const float* center,
                       const storage_t* grad_out, float* slope, float* offset) {
    const Lanes l = lane_layout();
    const i64 w = item_of_lane(l);
    if (w >= num_rows) return;
    const int row = (int)w;
    const float inverse = __ldg(inverse_degree + row);
    const Fragment mean = load_fragment_fp32(center, row, l);
    const auto load = [&](bool is_there, const storage_t* from, int place) {
        return is_there ? widen(load_out(from, place, row, l)) : zero_fragment();
    };
    const Fragment sum_grad = load(SUM, grad_out, AT_SUM), mean_grad = load(MEAN, grad_out, AT_MEAN);
    const Fragment var_grad = load(VAR, grad_out, AT_VAR), std_grad = load(STD, grad_out, AT_STD);
    const Fragment deviation = load(STD, out, AT_STD);
    Fragment slopes, offsets;
    for_each_channel(l, [&](int h, int c, int) {
        const float of_std = deviation.x[h][c] == 0.0f ? 0.0f : std_grad.x[h][c] / deviation.x[h][c];
        slopes.x[h][c] = inverse * fmaf(2.0f, var_grad.x[h][c], of_std);
        const float linear = fmaf(inverse, mean_grad.x[h][c], sum_grad.x[h][c]);
        offsets.x[h][c] = fmaf(-slopes.x[h][c], mean.x[h][c], linear);
    });
    store_fragment_fp32(slope, row, l, slopes);
    store_fragment_fp32(offset, row, l, offsets);
}
