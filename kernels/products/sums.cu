// Sums [count] of partial [splits, count], four numbers per thread, in ascending order.
#include "include/number.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
products_sums(i64 count, i64 splits, const float* partial, float* sums) {
    const i64 first = 4 * ((i64)blockIdx.x * THREADS + threadIdx.x);
    if (first >= count) return;
    float4 sum = *reinterpret_cast<const float4*>(partial + first);
#pragma unroll 8
    for (i64 split = 1; split < splits; ++split) {
        const float4 part = *reinterpret_cast<const float4*>(partial + split * count + first);
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
    }
    *reinterpret_cast<float4*>(sums + first) = sum;
}
