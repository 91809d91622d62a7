// float32 numbers for wgmma.cuh as the sum of two tf32 numbers, a high and a low one.

// Splits a number, the high one rounded to nearest.
__device__ __forceinline__ void split(float x, u32& high, u32& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// Sets word i of a step.
template <int STEPS>
__device__ __forceinline__ void set(Factors<STEPS>& factors, int step, int i, float x) {
    split(x, factors.high[step][i], factors.low[step][i]);
}
// Stores four numbers in shared memory, the low ones `offset` words after the high ones.
__device__ __forceinline__ void store_tf32(const float (&x)[4], u32* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(factors, 0, i, x[i]);
    store_factors(factors, at, offset);
}

// D = A B for STEPS steps of B at a distance of `step`; B's low numbers lie `offset` after the high ones. The three products
// that matter are added, the small ones first.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.low[j], b + j * step, j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.high[j], b + offset + j * step, 1);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_tf32(d, a.high[j], b + j * step, 1);
}
