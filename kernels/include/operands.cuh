// Operands of products (mma.cuh) from the rows of nodes, and products as operands.
//
// A lane reads 16 bytes of a row and so holds its part of two products. The columns of D are free too: column n stands
// for row shuffled(n) of a tile. With that order and the row stride no access to shared memory has a bank conflict:
// 16-byte reads of rows shuffled(2 i) and shuffled(2 i + 1), reads down the columns of rows shuffled(2 pos), and
// ldmatrix of 8 rows. (An odd product at the end of a head is read in 8 bytes.)
#include "include/mma.cuh"
#include "include/copy.cuh"

// Products over the channels of a head, and the channels that they read.
#define PRODUCTS ((CHANNELS + MMA_K - 1) / MMA_K)
#define PADDED_CHANNELS (PRODUCTS * MMA_K)
// A row of a tile: the channels of BLOCK_HEADS heads, what the products read beyond them, and then 8 numbers more for
// an odd multiple of 32 bytes (fp32) or of 16 bytes.
#define TILE_CHANNELS (((BLOCK_HEADS - 1) * CHANNELS + PADDED_CHANNELS + 15) / 16 * 16)
#define TILE_STRIDE (TILE_CHANNELS + 8)

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

template <class Operand>
__device__ __forceinline__ void set_word(Operand& operand, int i, u32 word) {
#if STORAGE == 0
    set_tf32(operand, i, word);
#else
    operand.big[i] = word;
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
