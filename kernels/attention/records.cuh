#include "attention/record.cuh"

// The terms of a row's dS cancel, so delta must not carry the rounding of a 16-bit output: there `out` is the fp32 copy
// that the forward pass left.
__device__ __forceinline__ Part load_out(const void* out, int row, const Lanes& l) {
#if STORAGE != 0
    return load_part_fp32(static_cast<const float*>(out), row, l);
#else
    return load_part(static_cast<const storage_t*>(out), row, l);
#endif
}

__device__ __forceinline__ void store_records(float* records, int row, const Lanes& l, const RowSoftmax& softmax,
                                              const HeadValues& delta) {
    if (l.head_lane != 0) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        if (has_head(l, h)) {
            reinterpret_cast<float4*>(records)[(i64)row * HEADS + head_of(l, h)] =
                make_record(softmax.max[h], softmax.inverse[h], delta.x[h]);
        }
    }
}
