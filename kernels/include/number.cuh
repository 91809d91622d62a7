// Types, storage formats and numbers. Constants: STORAGE (0 fp32, 1 fp16, 2 bf16), HEADS, CHANNELS.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define FULL_MASK 0xffffffffu
#define ROW_STRIDE (HEADS * CHANNELS)

#if STORAGE == 0
#define STORAGE_BYTES 4
typedef float storage_t;
#else
#define STORAGE_BYTES 2
typedef u16 storage_t;
#endif

__device__ __forceinline__ float fast_exp2(float x) {
#ifdef PYG_DFGNN_EMULATOR
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// a - b where a is rounded on its own: it is 0 of a product and the same product, however large, that was stored before.
__device__ __forceinline__ float difference(float a, float b) {
#ifdef PYG_DFGNN_EMULATOR
    return a - b;
#else
    return __fadd_rn(a, -b);
#endif
}

// 1 / x for an x that is neither huge nor tiny: a Newton step on an approximation, without the branches of a division.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef PYG_DFGNN_EMULATOR
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(fmaf(-x, y, 1.0f), y, y);
#endif
}

// The larger of two numbers; a NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
#ifdef PYG_DFGNN_EMULATOR
    return x != x || y != y ? x + y : fmaxf(x, y);
#else
    float max;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(x), "f"(y));
    return max;
#endif
}

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float half_to_float(u16 bits) {
#ifdef PYG_DFGNN_EMULATOR
    return emu_half_to_float(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ u16 float_to_half(float value) {
#ifdef PYG_DFGNN_EMULATOR
    return emu_float_to_half(value);
#else
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

// Round to nearest even; a NaN stays a NaN.
__device__ __forceinline__ u16 float_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ u16 to_bits16(float value) {
#if STORAGE == 1
    return float_to_half(value);
#else
    return float_to_bf16(value);
#endif
}

// Two numbers in one word, the first in its lower half.
__device__ __forceinline__ u32 pack_pair(float low, float high) {
#ifdef PYG_DFGNN_EMULATOR
    return (u32)to_bits16(low) | (u32)to_bits16(high) << 16;
#else
    u32 pair;
#if STORAGE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
#endif
}

__device__ __forceinline__ float from_bits16(u32 bits) {
#if STORAGE == 1
    return half_to_float((u16)bits);
#else
    return __uint_as_float(bits << 16);
#endif
}
