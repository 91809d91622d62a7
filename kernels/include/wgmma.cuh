// Warpgroup products on tensor cores (wgmma), by four warps: D (64 x N, fp32) += A (64 x K) B (K x N), with K 16 in fp16 or
// 8 in tf32, on compute capability 9.0 with its own features (sm_90a).
//
// A comes from registers of two fp16 numbers or one tf32 number: with group = lane / 4 and pos = lane % 4 a lane holds words
// pos and pos + 4 of the rows group and group + 8 of its warp's 16. Of D it holds the same rows, and columns 2 pos and
// 2 pos + 1 of every 8. B lies in shared memory in pieces of 8 columns by 16 bytes, 8 or 4 places: there are `leading` bytes
// from the first half of the places to the second, and 128 bytes from 8 columns to the next.

// The descriptor of B.
__device__ __forceinline__ u64 matrix_descriptor(const void* b, u32 leading) {
#ifdef PYG_DFGNN_EMULATOR
    const u32 address = (u32)(reinterpret_cast<const char*>(b) - emu::launch->shared);
#else
    const u32 address = (u32)__cvta_generic_to_shared(b);
#endif
    return (u64)((address & 0x3ffffu) >> 4) | (u64)(leading >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// Lets products that start after the next barrier see what this thread has written to shared memory.
__device__ __forceinline__ void fence_proxy_async() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Comes before the first product of a group, after their registers have been written.
__device__ __forceinline__ void wgmma_fence() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_wait() {
#ifdef PYG_DFGNN_EMULATOR
    emu_wgmma_wait();
#else
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

// Keeps registers that products read or write where they are up to here.
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

// Named barriers: threads that sync go on when `threads` threads have synced or arrived.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
#ifdef PYG_DFGNN_EMULATOR
    emu_named_barrier(id, threads, true);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
#ifdef PYG_DFGNN_EMULATOR
    emu_named_barrier(id, threads, false);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// The left factors of STEPS steps in registers: the words of the high numbers and of the low ones.
template <int STEPS>
struct Factors {
    u32 high[STEPS][4];
    u32 low[STEPS][4];
};
template <int STEPS>
__device__ __forceinline__ void pin(Factors<STEPS>& factors) {
    pin(factors.high);
    pin(factors.low);
}
// Stores factors in shared memory, the low words `offset` words after the high ones.
__device__ __forceinline__ void store_factors(const Factors<1>& factors, u32* at, int offset) {
    const u32(&x)[4] = factors.high[0];
    *reinterpret_cast<uint4*>(at) = make_uint4(x[0], x[1], x[2], x[3]);
    const u32(&y)[4] = factors.low[0];
    *reinterpret_cast<uint4*>(at + offset) = make_uint4(y[0], y[1], y[2], y[3]);
}

#define WGMMA_10(ten) \
    "%" #ten "0, %" #ten "1, %" #ten "2, %" #ten "3, %" #ten "4, %" #ten "5, %" #ten "6, %" #ten "7, %" #ten "8, %" #ten "9"
#define WGMMA_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_SUMS(i), WGMMA_SUMS(i + 4), WGMMA_SUMS(i + 8), WGMMA_SUMS(i + 12)
// The product for 128 columns, of `a` and `b`, to `d`.
#define WGMMA_128(shape, more)                                                                                        \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %69, 0;"                                                        \
                 "wgmma.mma_async.sync.aligned." shape " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " WGMMA_10(1)       \
                 ", " WGMMA_10(2) ", " WGMMA_10(3) ", " WGMMA_10(4) ", " WGMMA_10(5)                                  \
                 ", %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, adds, 1, 1" more ";}"                             \
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48)                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// Starts D += A B, or with `adds` 0 D = A B, for N = 2 COUNT columns, in fp16.
template <int COUNT>
__device__ __forceinline__ void wgmma_fp16(float (&d)[COUNT], const u32 (&a)[4], u64 b, int adds) {
    static_assert(COUNT == 32 || COUNT == 64, "64 or 128 columns");
#ifdef PYG_DFGNN_EMULATOR
    emu_wgmma_fp16(d, a, b, adds);
#else
    if constexpr (COUNT == 32) {
        asm volatile(
            "{.reg .pred adds; setp.ne.b32 adds, %37, 0;"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " WGMMA_10(1)
            ", " WGMMA_10(2) ", %30, %31}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;}"
            : WGMMA_16(0), WGMMA_16(16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
    } else {
        WGMMA_128("m64n128k16.f32.f16.f16", ", 0");
    }
#endif
}
// The same for 128 columns in tf32.
__device__ __forceinline__ void wgmma_tf32(float (&d)[64], const u32 (&a)[4], u64 b, int adds) {
#ifdef PYG_DFGNN_EMULATOR
    emu_wgmma_tf32(d, a, b, adds);
#else
    WGMMA_128("m64n128k8.f32.tf32.tf32", "");
#endif
}
