// Products on tensor cores by one warp: D (16 x 8, fp32) += A (16 x MMA_K) B (MMA_K x 8).
//
// fp32 storage multiplies in tf32. With SPLIT each number is the sum of two tf32 numbers and a product the sum of three
// (the fourth is below fp32), which is as accurate as fp32 arithmetic. 16-bit storage multiplies exactly.
//
// With group = lane / 4 and pos = lane % 4 a lane holds of D the rows group and group + 8, columns 2 pos and 2 pos + 1;
// of A the same rows and of B column group, both at positions pos and pos + 4 of MMA_K = 8, or 2 pos, 2 pos + 1, 2 pos
// + 8 and 2 pos + 9 of MMA_K = 16. The position that a number takes in MMA_K is free as long as A and B agree: a lane
// reads 16 bytes of a row and so holds its part of two products. So are the columns of D: column n stands for row
// shuffled(n) of a tile. With that order and the row stride no access to shared memory has a bank conflict: 16-byte
// reads of rows shuffled(2 i) and shuffled(2 i + 1), reads down the columns of rows shuffled(2 pos), and ldmatrix of 8
// rows. (An odd product at the end of a head is read in 8 bytes.)
#include "include/copy.cuh"

#if STORAGE == 0
#define MMA_K 8
#else
#define MMA_K 16
#endif

// Products over the channels of a head, and the channels that they read.
#define PRODUCTS ((CHANNELS + MMA_K - 1) / MMA_K)
#define PADDED_CHANNELS (PRODUCTS * MMA_K)
// A row of a tile: the channels of BLOCK_HEADS heads, what the products read beyond them, and then 8 numbers more for
// an odd multiple of 32 bytes (fp32) or of 16 bytes.
#define TILE_CHANNELS (((BLOCK_HEADS - 1) * CHANNELS + PADDED_CHANNELS + 15) / 16 * 16)
#define TILE_STRIDE (TILE_CHANNELS + 8)

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

// The row of 8 that stands at n = 2 i + odd.
__device__ __forceinline__ int shuffled(int i, int odd) {
#if STORAGE == 0
    return (i + (i & 2) * 2) ^ (odd * 2);
#else
    return i + 4 * odd;
#endif
}

// The row of 8 in a tile that a lane holds in B, and those of its two columns in D.
__device__ __forceinline__ int lane_row() { return shuffled(lane_group() >> 1, lane_group() & 1); }
__device__ __forceinline__ int lane_column(int odd) { return shuffled(lane_pos(), odd); }

// D += A B; with FIRST D = A B.
template <bool FIRST = false>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef PYG_DFGNN_EMULATOR
    u32 warp[32][6];
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    emu_gather_registers(mine, warp);
    for (int i = 0; i < 4; ++i) {
        if (FIRST) d[i] = 0.0f;
        const int half = i / 2, column = 2 * lane_pos() + i % 2;
        for (int k = 0; k < MMA_K; ++k) {
            const int pos = STORAGE == 0 ? k % 4 : k % 8 / 2, second = STORAGE == 0 ? k / 4 : k / 8;
            const u32 x = warp[lane_group() * 4 + pos][half + 2 * second], y = warp[column * 4 + pos][4 + second];
#if STORAGE == 0
            d[i] += __uint_as_float(x & 0xffffe000u) * __uint_as_float(y & 0xffffe000u);
#else
            d[i] += from_bits16(x >> 16 * (k % 2) & 0xffffu) * from_bits16(y >> 16 * (k % 2) & 0xffffu);
#endif
        }
    }
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

// Rounds what tensor cores would cut of the rest of A: cheap, as one A meets many B, and it takes a quarter off the
// error of products.
__device__ __forceinline__ void round_rest(Left& a) {
#if SPLIT
#pragma unroll
    for (int i = 0; i < 4; ++i) a.small[i] += 0x1000u;
#endif
}

__device__ __forceinline__ void set_word(Left& a, int i, u32 word) {
#if STORAGE == 0
    set_tf32(a, i, word);
#else
    a.big[i] = word;
#endif
}
__device__ __forceinline__ void set_word(Right& b, int i, u32 word) {
#if STORAGE == 0
    set_tf32(b, i, word);
#else
    b.big[i] = word;
#endif
}

// A of 16 rows is kept in shared memory as its lanes need it, 16 bytes for each product: a lane writes and reads its
// own.
#define LEFT_WORDS (PRODUCTS * 32 * 4)

__device__ __forceinline__ uint4* left_address(u32* words, int product) {
    return reinterpret_cast<uint4*>(words) + product * 32 + (threadIdx.x & 31);
}

// Puts the head's channels, in memory, of the two rows that stand at group and group + 8 where left_of_rows finds them.
__device__ __forceinline__ void keep_rows(u32* words, const storage_t* first, const storage_t* second) {
#pragma unroll
    for (int product = 0; product < PRODUCTS; product += 2) {
        if (product + 1 < PRODUCTS) {
            const int c = product * MMA_K + lane_pos() * (16 / STORAGE_BYTES);
            uint4 x = make_uint4(0u, 0u, 0u, 0u), y = x;
            if (PADDED_CHANNELS == CHANNELS || c < CHANNELS) {
                x = __ldg(reinterpret_cast<const uint4*>(first + c));
                y = __ldg(reinterpret_cast<const uint4*>(second + c));
            }
            *left_address(words, product) = make_uint4(x.x, y.x, x.y, y.y);
            *left_address(words, product + 1) = make_uint4(x.z, y.z, x.w, y.w);
        } else {
            const int c = product * MMA_K + lane_pos() * (8 / STORAGE_BYTES);
            uint2 x = make_uint2(0u, 0u), y = x;
            if (PADDED_CHANNELS == CHANNELS || c < CHANNELS) {
                x = __ldg(reinterpret_cast<const uint2*>(first + c));
                y = __ldg(reinterpret_cast<const uint2*>(second + c));
            }
            *left_address(words, product) = make_uint4(x.x, y.x, x.y, y.y);
        }
    }
}

__device__ __forceinline__ Left left_of_rows(u32* words, int product) {
    Left a;
    const uint4 x = *left_address(words, product);
    set_word(a, 0, x.x);
    set_word(a, 1, x.y);
    set_word(a, 2, x.z);
    set_word(a, 3, x.w);
    round_rest(a);
    return a;
}

// B of two products, whose columns are 8 rows of a tile, channels k to k + 2 MMA_K - 1.
__device__ __forceinline__ void right_rows(Right& first, Right& second, const storage_t* tile, int k) {
    const storage_t* address = tile + lane_row() * TILE_STRIDE + k + lane_pos() * (16 / STORAGE_BYTES);
    const uint4 x = *reinterpret_cast<const uint4*>(address);
    set_word(first, 0, x.x);
    set_word(first, 1, x.y);
    set_word(second, 0, x.z);
    set_word(second, 1, x.w);
}

// The same of one product.
__device__ __forceinline__ void right_rows(Right& b, const storage_t* tile, int k) {
    const storage_t* address = tile + lane_row() * TILE_STRIDE + k + lane_pos() * (8 / STORAGE_BYTES);
    const uint2 x = *reinterpret_cast<const uint2*>(address);
    set_word(b, 0, x.x);
    set_word(b, 1, x.y);
}

// B whose columns are channels c to c + 7 of MMA_K rows of a tile, at the positions that left_of gives them.
__device__ __forceinline__ Right right_columns(const storage_t* tile, int c) {
    Right b;
#if STORAGE == 0
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        set_tf32(b, i, __float_as_uint(tile[lane_column(i) * TILE_STRIDE + c + lane_group()]));
    }
#elif defined(PYG_DFGNN_EMULATOR)
    for (int i = 0; i < 2; ++i) {
        const storage_t* first = tile + 8 * i * TILE_STRIDE + c + lane_group();
        b.big[i] = (u32)first[lane_column(0) * TILE_STRIDE] | (u32)first[lane_column(1) * TILE_STRIDE] << 16;
    }
#else
    const int row = (threadIdx.x & 8) + shuffled((threadIdx.x & 7) >> 1, threadIdx.x & 1);
    const u32 address = (u32)__cvta_generic_to_shared(tile + row * TILE_STRIDE + c);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b.big[0]), "=r"(b.big[1])
                 : "r"(address));
#endif
    return b;
}

// A from MMA_K / 8 of D side by side: products become the left side of the next product.
__device__ __forceinline__ Left left_of(const float (*d)[4]) {
    Left a;
#if STORAGE == 0
    set_tf32(a, 0, __float_as_uint(d[0][0]));
    set_tf32(a, 1, __float_as_uint(d[0][2]));
    set_tf32(a, 2, __float_as_uint(d[0][1]));
    set_tf32(a, 3, __float_as_uint(d[0][3]));
    round_rest(a);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) a.big[i] = pack_pair(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]);
#endif
    return a;
}
