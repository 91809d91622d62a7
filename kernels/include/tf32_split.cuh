// float32 numbers as tf32 for wgmma.cuh: rounded, or with SPLIT split into a high and a low number whose sum they are.

// Split a number, the high one rounded to nearest; or round it, where the maximum keeps the NaN that arithmetic makes,
// 0x7fffffff, from overflowing to zero.
__device__ __forceinline__ void split(float x, u32& high, u32& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}
__device__ __forceinline__ u32 rounded(float x) {
    const int bits = __float_as_int(x);
    return (u32)max((int)((u32)bits + 0x1000u), bits);
}

// Sets word i of a step.
template <int STEPS>
__device__ __forceinline__ void set(Factors<STEPS>& factors, int step, int i, float x) {
#if SPLIT
    split(x, factors.high[step][i], factors.low[step][i]);
#else
    factors.high[step][i] = rounded(x);
#endif
}
// Stores four numbers in shared memory, the low ones `offset` words after the high ones.
__device__ __forceinline__ void store_tf32(const float (&x)[4], u32* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(factors, 0, i, x[i]);
    store_factors(factors, at, offset);
}

// D = A B, or with `adds` D += A B, for STEPS steps of B at a distance of `step`; B's low numbers lie `offset` after the
// high ones. Of split numbers it adds the three products that matter, the small ones first.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset,
                                         bool adds) {
#if SPLIT
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.low[j], b + j * step, adds || j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.high[j], b + offset + j * step, 1);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.high[j], b + j * step, 1);
#else
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.high[j], b + j * step, adds || j > 0);
#endif
}
