// Products over rows that are sorted by their type, on tensor cores (mma.cuh): what the kernels share.
//
// A thread block takes an item of a list: consecutive rows of one type. Row i of the list is row list[i] of a tensor, or row
// i where the list is null.
#include "include/number.cuh"
#include "include/mma.cuh"
#include "include/copy.cuh"

// Warps that share the places of a sum.
#ifndef WARPS_K
#define WARPS_K 1
#endif
#define THREADS (32 * WARPS_M * WARPS_N * WARPS_K)
#define WARP_M (TILE_M / WARPS_M)
#define WARP_N (TILE_N / WARPS_N)
#define M_FRAGMENTS (WARP_M / 16)
#define N_FRAGMENTS (WARP_N / 8)
// The numbers of one word, and of 16 bytes.
#define PACKED (4 / STORAGE_BYTES)
#define VECTOR (16 / STORAGE_BYTES)

static_assert(TILE_M % (16 * WARPS_M) == 0 && TILE_N % (8 * WARPS_N) == 0, "a warp multiplies 16 by 8 at least");

// A type, the range of its rows, and where partial sums go; -1: the result is whole.
struct Item {
    int type, begin, end, place;
};
// Thread blocks that follow each other take the same rows, each of them another of `groups` parts of the result.
__device__ __forceinline__ Item item_of(const int* items, int groups) {
    const int4 words = *reinterpret_cast<const int4*>(items + 4 * (i64)((int)blockIdx.x / groups));
    return {words.x, words.y, words.z, words.w};
}

__device__ __forceinline__ int row_of(const int* list, int row) { return list == nullptr ? row : list[row]; }

__device__ __forceinline__ u32 bits_of(const storage_t* address) {
#if STORAGE == 0
    return __float_as_uint(*address);
#else
    return *address;
#endif
}
__device__ __forceinline__ float number_of(const storage_t* address) {
#if STORAGE == 0
    return *address;
#else
    return from_bits16(*address);
#endif
}

template <class Operand>
__device__ __forceinline__ void set_word(Operand& operand, int i, u32 word) {
#if STORAGE == 0
    set_number(operand, i, word);
#else
    operand.big[i] = word;
#endif
}

// Stores COUNT numbers that follow each other, or the first `left` of them. ALIGNED: all or none exist, at a multiple of
// their size.
template <bool ALIGNED, int COUNT>
__device__ __forceinline__ void store_numbers(float* to, const float (&x)[COUNT], int left) {
    if constexpr (ALIGNED) {
        if (left <= 0) return;
        if constexpr (COUNT == 4) {
            *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i < left) to[i] = x[i];
        }
    }
}

#if STORAGE != 0
template <bool ALIGNED, int COUNT>
__device__ __forceinline__ void store_numbers(storage_t* to, const float (&x)[COUNT], int left) {
    if constexpr (ALIGNED) {
        if (left <= 0) return;
        if constexpr (COUNT == 4) {
            *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]));
        } else {
            *reinterpret_cast<u32*>(to) = pack_pair(x[0], x[1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i < left) to[i] = to_bits16(x[i]);
        }
    }
}
#endif

struct Sums {
    float x[M_FRAGMENTS][N_FRAGMENTS][4];
};
__device__ __forceinline__ float& number(Sums& sums, int i) {
    return sums.x[i / 4 / N_FRAGMENTS][i / 4 % N_FRAGMENTS][i % 4];
}
__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS * 4; ++i) number(sums, i) = 0.0f;
}

// Tensor cores cut what they add to a sum, so with SPLIT the products of a step are summed separately and then added with
// rounding.
#if SPLIT
__device__ __forceinline__ void add(Sums& sums, Sums& terms) {
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS * 4; ++i) number(sums, i) += number(terms, i);
}
#endif

__device__ __forceinline__ void multiply(Sums& sums, const Left (&a)[M_FRAGMENTS], const Right (&b)[N_FRAGMENTS]) {
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; ++m) multiply(sums.x[m], a[m], b);
}

// The first row and column of a warp in the tile.
__device__ __forceinline__ int warp_row() { return (int)threadIdx.x / 32 / WARPS_N % WARPS_M * WARP_M; }
__device__ __forceinline__ int warp_column() { return (int)threadIdx.x / 32 % WARPS_N * WARP_N; }

__device__ __forceinline__ uint4* shared_vectors() {
    extern __shared__ __align__(128) uint4 vectors[];
    return vectors;
}
