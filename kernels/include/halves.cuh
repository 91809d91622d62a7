// Numbers of float32 as fp16, for the products of wgmma.cuh: scaled by a power of two, so that the largest of a row of A, or
// of a column of B, is below 2^15, and rounded. With SPLIT 2^11 times what is left is a second fp16 number, and a product
// is the sum of three: the fourth is less than what float32 rounds. No bit is lost down to 2^-29 of the largest.

// The size of a number, ordered: of one that is not finite less than of all others.
__device__ __forceinline__ u32 size_of(float x) { return 2 * __float_as_uint(x) + 0x1000000u; }
// The largest of four lanes that share a row of A.
__device__ __forceinline__ u32 largest_of_row(u32 size) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) size = max(size, __shfl_xor_sync(FULL_MASK, size, i));
    return size;
}

// Powers of two for numbers up to this size: `lowered` brings them below 2^15; what products of such add up to is brought
// back by `raised` of the one factor, then of the other, which with 2^-28 keeps what is in between from overflowing.
__device__ __forceinline__ int exponent_of(u32 size) { return max((int)(size >> 24) - 1, 29); }
__device__ __forceinline__ float lowered(int exponent) { return __int_as_float((268 - exponent) << 23); }
__device__ __forceinline__ float raised(int exponent) { return __int_as_float(exponent << 23); }
__device__ __forceinline__ float raised_less(int exponent) { return __int_as_float((exponent - 28) << 23); }

// Two numbers as fp16 in one word, the first in its lower half, and such a word as numbers.
__device__ __forceinline__ u32 halves_of(float low, float high) {
#ifdef PYG_DFGNN_EMULATOR
    return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
#else
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
#endif
}
__device__ __forceinline__ float2 numbers_of(u32 halves) {
    return make_float2(half_to_float((u16)halves), half_to_float((u16)(halves >> 16)));
}

// 2^11 times what the halves leave of two numbers.
__device__ __forceinline__ u32 rest_of(float low, float high, u32 halves) {
    const float2 first = numbers_of(halves);
    return halves_of((low - first.x) * 0x1p11f, (high - first.y) * 0x1p11f);
}

// Two numbers, lowered, as word i of a step.
template <int STEPS>
__device__ __forceinline__ void set(Factors<STEPS>& factors, int step, int i, float low, float high) {
    factors.first[step][i] = halves_of(low, high);
#if SPLIT
    factors.second[step][i] = rest_of(low, high, factors.first[step][i]);
#endif
}
// Two, or eight, in shared memory, the second halves `offset` words further.
__device__ __forceinline__ void hold_halves(float low, float high, u32* at, int offset) {
    at[0] = halves_of(low, high);
#if SPLIT
    at[offset] = rest_of(low, high, at[0]);
#endif
}
__device__ __forceinline__ void hold_halves(const float (&x)[8], u32* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(factors, 0, i, x[2 * i], x[2 * i + 1]);
    hold(factors, at, offset);
}

// D = A B for STEPS steps of B that are `step` apart, of the first halves.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply_first(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.first[j], b + j * step, j > 0);
}
#if SPLIT
// Of those with second halves, `offset` further in B: 2^11 times what they are.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply_second(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.second[j], b + j * step, j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.first[j], b + offset + j * step, 1);
}
#endif
