// Partial sums over the rows of a matrix, rows [num_rows, columns]: split s sums `rows_per_split` rows into row s of
// sums [splits, columns] in float32. Columns are a multiple of the numbers in 16 bytes.
//
// A thread block sums WIDTH columns of a split, TURNS rows at a time. A thread adds its rows in ascending order, and a block
// the sums of its threads; a second launch adds the splits.
#include "include/number.cuh"

#define THREADS 256
#define NUMBERS (16 / STORAGE_BYTES)
#define LANES 16
#define WIDTH (LANES * NUMBERS)
#define TURNS (THREADS / LANES)
#define AHEAD 8

struct alignas(16) Chunk {
    storage_t x[NUMBERS];
};

__device__ __forceinline__ float number_of(storage_t x) {
#if STORAGE == 0
    return x;
#else
    return from_bits16(x);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_sums(i64 num_rows, i64 columns, i64 rows_per_split, const storage_t* rows, float* sums) {
    __shared__ float turns[TURNS][WIDTH];
    const int groups = (int)((columns + WIDTH - 1) / WIDTH), split_index = (int)blockIdx.x / groups;
    const int lane = (int)threadIdx.x % LANES, turn = (int)threadIdx.x / LANES, mine = (int)threadIdx.x;
    const i64 first_column = (i64)((int)blockIdx.x % groups) * WIDTH, column = first_column + lane * NUMBERS;
    const i64 begin = split_index * rows_per_split;
    const i64 limit = num_rows - begin < rows_per_split ? num_rows : begin + rows_per_split;
    float own[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) own[i] = 0.0f;
#pragma unroll 1
    for (i64 first = begin + turn; first < limit; first += AHEAD * TURNS) {
        Chunk chunks[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const i64 row = first + k * TURNS;
            chunks[k] = {};
            if (row < limit && column < columns) chunks[k] = *reinterpret_cast<const Chunk*>(rows + row * columns + column);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) own[i] += number_of(chunks[k].x[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) turns[turn][lane * NUMBERS + i] = own[i];
    __syncthreads();
    if (mine >= WIDTH || first_column + mine >= columns) return;
    float sum = turns[0][mine];
#pragma unroll
    for (int i = 1; i < TURNS; ++i) sum += turns[i][mine];
    sums[split_index * columns + first_column + mine] = sum;
}
