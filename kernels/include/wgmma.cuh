// Products on tensor cores by a warpgroup, four warps: D (64 x N, fp32) += A (64 x 8) B (8 x N) in tf32, on compute
// capability 9.0 with its own features (sm_90a).
//
// A comes from registers: with group = lane / 4 and pos = lane % 4 a lane holds the rows group and group + 8 of its warp's
// 16, at places pos, then pos + 4; of D the same rows, and of each 8 columns 2 pos and 2 pos + 1. B lies in shared memory
// in pieces of 8 columns by 4 places, 16 bytes for a column: `leading` bytes from the first 4 places to the others, 128
// from 8 columns to the next.

// Where B is.
__device__ __forceinline__ u64 described(const void* b, u32 leading) {
#ifdef PYG_DFGNN_EMULATOR
    const u32 address = (u32)(reinterpret_cast<const char*>(b) - emu::launch->shared);
#else
    const u32 address = (u32)__cvta_generic_to_shared(b);
#endif
    return (u64)((address & 0x3ffffu) >> 4) | (u64)(leading >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// What threads have written to shared memory is seen by the products that start after the next barrier.
__device__ __forceinline__ void show_products() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Before the first of some products, whose registers have been written.
__device__ __forceinline__ void open_products() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void close_products() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_products() {
#ifdef PYG_DFGNN_EMULATOR
    emu_wait_products();
#else
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

// Registers that products read or write stay where they are up to here.
template <int COUNT>
__device__ __forceinline__ void pin(float (&x)[COUNT]) {
#ifndef PYG_DFGNN_EMULATOR
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
#endif
}
template <int COUNT>
__device__ __forceinline__ void pin(u32 (&x)[COUNT][4]) {
#ifndef PYG_DFGNN_EMULATOR
#pragma unroll
    for (int i = 0; i < 4 * COUNT; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
#endif
}

// Named barriers, after which those who wait go on: all of `threads` have to come, some only arrive.
__device__ __forceinline__ void wait_named(int id, int threads) {
#ifdef PYG_DFGNN_EMULATOR
    emu_named_barrier(id, threads, true);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void arrive_named(int id, int threads) {
#ifdef PYG_DFGNN_EMULATOR
    emu_named_barrier(id, threads, false);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

#define WGMMA_10(ten) \
    "%" #ten "0, %" #ten "1, %" #ten "2, %" #ten "3, %" #ten "4, %" #ten "5, %" #ten "6, %" #ten "7, %" #ten "8, %" #ten "9"
#define WGMMA_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_SUMS(i), WGMMA_SUMS(i + 4), WGMMA_SUMS(i + 8), WGMMA_SUMS(i + 12)

// Starts D += A B, or with `adds` 0 D = A B, for N = 2 COUNT columns.
template <int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const u32 (&a)[4], u64 b, int adds) {
    static_assert(COUNT == 32 || COUNT == 64, "64 or 128 columns");
#ifdef PYG_DFGNN_EMULATOR
    emu_wgmma(d, a, b, adds);
#else
    if constexpr (COUNT == 32) {
        asm volatile(
            "{.reg .pred adds; setp.ne.b32 adds, %37, 0;"
            "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " WGMMA_10(1)
            ", " WGMMA_10(2) ", %30, %31}, {%32, %33, %34, %35}, %36, adds, 1, 1;}"
            : WGMMA_16(0), WGMMA_16(16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
    } else {
        asm volatile(
            "{.reg .pred adds; setp.ne.b32 adds, %69, 0;"
            "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " WGMMA_10(1)
            ", " WGMMA_10(2) ", " WGMMA_10(3) ", " WGMMA_10(4) ", " WGMMA_10(5)
            ", %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, adds, 1, 1;}"
            : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
    }
#endif
}

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

// The parts of numbers that products of STEPS steps multiply, in registers.
template <int STEPS>
struct Factors {
    u32 big[STEPS][4];
#if SPLIT
    u32 small[STEPS][4];
#endif
    __device__ __forceinline__ void set(int step, int i, float x) {
#if SPLIT
        split(x, big[step][i], small[step][i]);
#else
        big[step][i] = rounded(x);
#endif
    }
};
template <int STEPS>
__device__ __forceinline__ void pin(Factors<STEPS>& factors) {
    pin(factors.big);
#if SPLIT
    pin(factors.small);
#endif
}

// The same in shared memory: `at` of the first parts, the second ones `offset` numbers further.
__device__ __forceinline__ void hold(float x, float* at, int offset) {
#if SPLIT
    u32 big, small;
    split(x, big, small);
    at[0] = __uint_as_float(big);
    at[offset] = __uint_as_float(small);
#else
    at[0] = __uint_as_float(rounded(x));
#endif
}
__device__ __forceinline__ void hold(const float (&x)[4], float* at, int offset) {
    Factors<1> factors;
#pragma unroll
    for (int i = 0; i < 4; ++i) factors.set(0, i, x[i]);
    *reinterpret_cast<uint4*>(at) = make_uint4(factors.big[0][0], factors.big[0][1], factors.big[0][2], factors.big[0][3]);
#if SPLIT
    *reinterpret_cast<uint4*>(at + offset) =
        make_uint4(factors.small[0][0], factors.small[0][1], factors.small[0][2], factors.small[0][3]);
#endif
}

// D = A B, or with `adds` D += A B, for STEPS steps of B that are `step` apart, its second parts `offset` further. Of
// split numbers the three products that matter, the small ones first.
template <int STEPS, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], const Factors<STEPS>& a, u64 b, u64 step, u64 offset,
                                         bool adds) {
#if SPLIT
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma(d, a.small[j], b + j * step, adds || j > 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma(d, a.big[j], b + offset + j * step, 1);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma(d, a.big[j], b + j * step, 1);
#else
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma(d, a.big[j], b + j * step, adds || j > 0);
#endif
}
