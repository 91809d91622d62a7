// Numbers of float32 as tf32, for the products of wgmma.cuh: rounded, or with SPLIT as the sum of two.

// A number as two tf32 numbers, the first rounded to nearest; or as that one alone, where the maximum keeps the NaN that
// arithmetic makes, 0x7fffffff, from overflowing to zero.
__device__ __forceinline__ void split(float x, u32& big, u32& small) {
    big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
}
__device__ __forceinline__ u32 rounded(float x) {
    const int bits = __float_as_int(x);
    return (u32)max((int)((u32)bits + 0x1000u), bits);
}

// A number as word i of a step.
template <int STEPS>
__device__ __forceinline__ void set(Factors<STEPS>& factors, int step, int i, float x) {
#if SPLIT
    split(x, factors.first[step][i], factors.second[step][i]);
#else
    factors.first[step][i] = rounded(x);
#endif
}
// Four in shared memory, the second parts `offset` words further.
__device__ __forceinline__ void hold_parts(const float (&x)[4], u32* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(factors, 0, i, x[i]);
    hold(factors, at, offset);
}

// D = A B, or with `adds` D += A B, for STEPS steps of B that are `step` apart, its second parts `offset` further. Of
// split numbers the three products that matter, the small ones first.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset,
                                         bool adds) {
#if SPLIT
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.second[j], b + j * step, adds || j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.first[j], b + offset + j * step, 1);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.first[j], b + j * step, 1);
#else
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.first[j], b + j * step, adds || j > 0);
#endif
}
