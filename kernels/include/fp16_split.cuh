// float32 numbers as two fp16 numbers each for wgmma.cuh. A power of two scales each row of A and each column of B so that its
// largest number is below 2^15. A number is split into a high one, rounded to fp16, and a low one, 2^11 times the rest; a
// product is the sum of three, as the fourth is less than what float32 rounds. Numbers down to 2^-29 of the largest lose no
// bit.

// The size of a number, ordered; numbers that are not finite are smaller than all others.
__device__ __forceinline__ u32 size_of(float x) { return 2 * __float_as_uint(x) + 0x1000000u; }
// The largest size of the four lanes that share a row of A.
__device__ __forceinline__ u32 largest_of_row(u32 size) {
#pragma unroll
    for (int i = 1; i < 4; i *= 2) size = max(size, __shfl_xor_sync(FULL_MASK, size, i));
    return size;
}

// Powers of two for numbers up to a size: `lowered` brings them below 2^15. `raised` of one factor and `raised_less` of the
// other bring sums of products back; the 2^-28 of the latter keeps the number in between from overflowing.
__device__ __forceinline__ int exponent_of(u32 size) { return max((int)(size >> 24) - 1, 29); }
__device__ __forceinline__ float lowered(int exponent) { return __int_as_float((268 - exponent) << 23); }
__device__ __forceinline__ float raised(int exponent) { return __int_as_float(exponent << 23); }
__device__ __forceinline__ float raised_less(int exponent) { return __int_as_float((exponent - 28) << 23); }

// Packs two numbers as fp16 into one word, x into its lower half, and unpacks such a word.
__device__ __forceinline__ u32 pack_fp16(float x, float y) {
#ifdef PYG_DFGNN_EMULATOR
    return (u32)float_to_half(x) | (u32)float_to_half(y) << 16;
#else
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
    return word;
#endif
}
__device__ __forceinline__ float2 unpack_fp16(u32 word) {
    return make_float2(half_to_float((u16)word), half_to_float((u16)(word >> 16)));
}

// Packs the low numbers of x and y, whose high numbers are packed in `high`.
__device__ __forceinline__ u32 pack_fp16_low(float x, float y, u32 high) {
    const float2 rounded = unpack_fp16(high);
    return pack_fp16((x - rounded.x) * 0x1p11f, (y - rounded.y) * 0x1p11f);
}

// Sets word i of a step from two lowered numbers.
template <int STEPS>
__device__ __forceinline__ void set(Factors<STEPS>& factors, int step, int i, float x, float y) {
    factors.high[step][i] = pack_fp16(x, y);
    factors.low[step][i] = pack_fp16_low(x, y, factors.high[step][i]);
}
// Store two, or eight, lowered numbers in shared memory, the low numbers `offset` words after the high ones.
__device__ __forceinline__ void store_fp16(float x, float y, u32* at, int offset) {
    at[0] = pack_fp16(x, y);
    at[offset] = pack_fp16_low(x, y, at[0]);
}
__device__ __forceinline__ void store_fp16(const float (&x)[8], u32* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) set(factors, 0, i, x[2 * i], x[2 * i + 1]);
    store_factors(factors, at, offset);
}

// D = A B of the high numbers, for STEPS steps of B at a distance of `step`.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply_high(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.high[j], b + j * step, j > 0);
}
// D = 2^11 times the products of a high and a low number; the low numbers of B lie `offset` after the high ones.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply_low(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset) {
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.low[j], b + j * step, j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(d, a.high[j], b + offset + j * step, 1);
}
