// Products on tensor cores by one warp: D (16 x 8, fp32) += A (16 x MMA_K) B (MMA_K x 8).
//
// fp32 storage multiplies in tf32. With SPLIT each number is the sum of two tf32 numbers and a product the sum of three
// (the fourth is below fp32), which is as accurate as fp32 arithmetic. 16-bit storage multiplies exactly.
//
// With group = lane / 4 and pos = lane % 4 a lane holds of D the rows group and group + 8, columns 2 pos and 2 pos + 1;
// of A the same rows and of B column group, both at positions pos and pos + 4 of MMA_K = 8, or 2 pos, 2 pos + 1, 2 pos
// + 8 and 2 pos + 9 of MMA_K = 16. The position that a number takes in MMA_K is free as long as A and B agree.

#if STORAGE == 0
#define MMA_K 8
#else
#define MMA_K 16
#endif

struct Left {
    u32 big[4];
#if SPLIT
    u32 small[4];
#endif
};
struct Right {
    u32 big[2];
#if SPLIT
    u32 small[2];
#endif
};

__device__ __forceinline__ int lane_group() { return (threadIdx.x & 31) >> 2; }
__device__ __forceinline__ int lane_pos() { return threadIdx.x & 3; }

// D += A B; with FIRST D = A B.
template <bool FIRST = false>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef PYG_DFGNN_EMULATOR
    emu_mma(d, a, b, FIRST, STORAGE);
#else
#if STORAGE == 0
#define MMA_NAME "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#elif STORAGE == 1
#define MMA_NAME "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA_NAME "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
    if constexpr (FIRST) {
        asm(MMA_NAME " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    } else {
        asm(MMA_NAME " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// One A for N of B: D += A B; with FIRST D = A B. Products of one kind follow each other, so that N independent sums are
// in flight.
template <bool FIRST = false, int N>
__device__ __forceinline__ void multiply(float (*d)[4], const Left& a, const Right (&b)[N]) {
#if SPLIT
#pragma unroll
    for (int n = 0; n < N; ++n) mma<FIRST>(d[n], a.small, b[n].big);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(d[n], a.big, b[n].small);
#endif
#pragma unroll
    for (int n = 0; n < N; ++n) mma<FIRST && !SPLIT>(d[n], a.big, b[n].big);
}

// Number `i` of an operand from the bits of an fp32 number. The tensor cores cut the low 13 bits: alone, a number is
// rounded to nearest (the maximum keeps the NaN that arithmetic makes, 0x7fffffff, from overflowing to zero); of a split
// number the rest makes up for it.
template <class Operand>
__device__ __forceinline__ void set_tf32(Operand& operand, int i, u32 bits) {
#if SPLIT
    operand.big[i] = bits;
    operand.small[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & 0xffffe000u));
#else
    operand.big[i] = (u32)max((int)(bits + 0x1000u), (int)bits);
#endif
}

// The same with the high number rounded to nearest: so the low one is half as large, no more than one of its bits is cut,
// and a product of two low numbers is below what float32 rounds.
template <class Operand>
__device__ __forceinline__ void set_number(Operand& operand, int i, u32 bits) {
#if SPLIT
    operand.big[i] = (bits + 0x1000u) & 0xffffe000u;
    operand.small[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(operand.big[i]));
#else
    set_tf32(operand, i, bits);
#endif
}

// Two such products side by side.
template <int N>
__device__ __forceinline__ void multiply(float (*d)[4], const Left& a, const Right (&b)[N], float (*e)[4],
                                         const Left& f, const Right (&g)[N]) {
#if SPLIT
#pragma unroll
    for (int n = 0; n < N; ++n) mma(d[n], a.small, b[n].big);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(e[n], f.small, g[n].big);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(d[n], a.big, b[n].small);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(e[n], f.big, g[n].small);
#endif
#pragma unroll
    for (int n = 0; n < N; ++n) mma(d[n], a.big, b[n].big);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(e[n], f.big, g[n].big);
}

// Rounds what tensor cores would cut of the rest of A: cheap, as one A meets many B, and products err less.
__device__ __forceinline__ void round_rest(Left& a) {
#if SPLIT
#pragma unroll
    for (int i = 0; i < 4; ++i) a.small[i] += 0x1000u;
#endif
}
