// A tile C (TILE_M x TILE_N) of a product of two float32 matrices, by the WARPS_M x WARPS_N warps of a thread block.
//
// With SPLIT tensor cores multiply each number as two tf32 numbers, else as one (mma.cuh). They cut what they add to a sum,
// so with SPLIT the products of DEPTH places are summed separately and then added with rounding. Sums run in a fixed order.
//
// Operands come from memory DEPTH places of the sum at a time, STAGES - 1 steps ahead, and lie in shared memory in chunks
// of 4 numbers. An operand whose places follow each other in memory (ALONG) has a line of DEPTH numbers for each row, any
// other operand a line of all its rows for each place. The order of the chunks in a line avoids bank conflicts.
#include "include/number.cuh"
#include "include/mma.cuh"
#include "include/copy.cuh"
#include "gemm/layers.cuh"

#define THREADS (32 * WARPS_M * WARPS_N)
#define WARP_M (TILE_M / WARPS_M)
#define WARP_N (TILE_N / WARPS_N)
#define M_FRAGMENTS (WARP_M / 16)
#define N_FRAGMENTS (WARP_N / 8)
#define STAGE_NUMBERS ((TILE_M + TILE_N) * DEPTH)

// A block of a matrix in memory: element (row, place) is at row * stride + place with ALONG, else at place * stride + row.
struct Operand {
    const float* first;
    i64 stride;
    int rows;    // rows that exist; numbers beyond them or beyond `places` count as 0
    int places;
};

__device__ __forceinline__ int at_most(i64 count, int limit) { return count < limit ? (int)count : limit; }

__device__ __forceinline__ float* stages() {
    extern __shared__ __align__(128) float stage_numbers[];
    return stage_numbers;
}

// The position of a chunk in its line.
template <bool ALONG>
__device__ __forceinline__ int swizzled(int chunk, int line) {
    return ALONG ? chunk ^ (line & 7) : chunk ^ (line & 3) * 2;
}

// Starts to copy SIZE rows of DEPTH places.
template <bool ALONG, int SIZE>
__device__ __forceinline__ void copy_operand(float* tile, const Operand& from) {
    // Chunks of a line, lines that all threads copy at once, and copies of a thread.
    constexpr int WIDTH = ALONG ? DEPTH / 4 : SIZE / 4, LINES = THREADS / WIDTH, COPIES = SIZE * DEPTH / 4 / THREADS;
    static_assert(LINES % (ALONG ? 8 : 4) == 0 && COPIES * THREADS * 4 == SIZE * DEPTH, "each thread copies as much");
    const int chunk = (int)threadIdx.x % WIDTH, line = (int)threadIdx.x / WIDTH;
    const float* address = from.first + (line * from.stride + 4 * chunk);
    float* to = tile + (line * WIDTH + swizzled<ALONG>(chunk, line)) * 4;
    if (from.rows == SIZE && from.places == DEPTH) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            copy16(to + i * LINES * WIDTH * 4, address);
            address += LINES * from.stride;
        }
        return;
    }
    const int lines = 4 * chunk < (ALONG ? from.places : from.rows) ? (ALONG ? from.rows : from.places) : 0;
#pragma unroll 1
    for (int i = line; i < LINES * COPIES; i += LINES) {
        copy16(to, i < lines ? address : from.first, i < lines);
        address += LINES * from.stride;
        to += LINES * WIDTH * 4;
    }
}

// Reads four matrices of 8 rows and 4 places. Lane i gives the address of row i % 8 of matrix i / 8, and gets row lane / 4,
// place lane % 4 of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&numbers)[4], const float* row) {
#ifdef PYG_DFGNN_EMULATOR
    emu_load_matrices(numbers, row);
#else
    const u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(numbers[0]), "=r"(numbers[1]), "=r"(numbers[2]), "=r"(numbers[3])
                 : "r"(address));
#endif
}

static_assert(TILE_M % (16 * WARPS_M) == 0 && TILE_N % (16 * WARPS_N) == 0, "a warp multiplies 16 by 16 at least");
static_assert(STAGES >= 2 && DEPTH == 32, "a line of a row is the eight chunks that their order is made for");

struct Sums {
    float x[M_FRAGMENTS][N_FRAGMENTS][4];
};

// The first row and column of a warp in the tile.
__device__ __forceinline__ int warp_row() { return (int)threadIdx.x / 32 / WARPS_N * WARP_M; }
__device__ __forceinline__ int warp_column() { return (int)threadIdx.x / 32 % WARPS_N * WARP_N; }

// Read A's rows `row` to row + 15, or B's columns `column` to column + 15, at places 8 j to 8 j + 7.
template <bool ALONG>
__device__ __forceinline__ Left read_left(const float* tile, int row, int j) {
    u32 numbers[4];
    if constexpr (ALONG) {
        const int line = row + (threadIdx.x & 15), chunk = 2 * j + (threadIdx.x >> 4 & 1);
        load_matrices(numbers, tile + line * DEPTH + swizzled<true>(chunk, line) * 4);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = 8 * j + i / 2 * 4 + lane_pos(), at = row + i % 2 * 8 + lane_group();
            numbers[i] = __float_as_uint(tile[line * TILE_M + swizzled<false>(at / 4, lane_pos()) * 4 + at % 4]);
        }
    }
    Left a;
#pragma unroll
    for (int i = 0; i < 4; ++i) set_number(a, i, numbers[i]);
    return a;
}
template <bool ALONG>
__device__ __forceinline__ void read_right(Right& first, Right& second, const float* tile, int column, int j) {
    u32 numbers[4];
    if constexpr (ALONG) {
        const int line = column + (threadIdx.x & 7) + (threadIdx.x >> 1 & 8), chunk = 2 * j + (threadIdx.x >> 3 & 1);
        load_matrices(numbers, tile + line * DEPTH + swizzled<true>(chunk, line) * 4);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = 8 * j + i % 2 * 4 + lane_pos(), at = column + i / 2 * 8 + lane_group();
            numbers[i] = __float_as_uint(tile[line * TILE_N + swizzled<false>(at / 4, lane_pos()) * 4 + at % 4]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        set_number(first, i, numbers[i]);
        set_number(second, i, numbers[i + 2]);
    }
}

// D += A B of all fragments; with FIRST D = A B. Products of one kind follow each other, so that as many independent sums as
// there are fragments are in flight.
template <bool FIRST>
__device__ __forceinline__ void multiply(Sums& d, const Left (&a)[M_FRAGMENTS], const Right (&b)[N_FRAGMENTS]) {
#if SPLIT
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS; ++i) {
        mma<FIRST>(d.x[i / N_FRAGMENTS][i % N_FRAGMENTS], a[i / N_FRAGMENTS].small, b[i % N_FRAGMENTS].big);
    }
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS; ++i) {
        mma(d.x[i / N_FRAGMENTS][i % N_FRAGMENTS], a[i / N_FRAGMENTS].big, b[i % N_FRAGMENTS].small);
    }
#endif
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS * N_FRAGMENTS; ++i) {
        mma(d.x[i / N_FRAGMENTS][i % N_FRAGMENTS], a[i / N_FRAGMENTS].big, b[i % N_FRAGMENTS].big);
    }
}

template <bool A_ALONG, bool B_ALONG, bool FIRST>
__device__ __forceinline__ void add_places(Sums& sums, const float* a, const float* b, int j) {
    Left x[M_FRAGMENTS];
    Right y[N_FRAGMENTS];
#pragma unroll
    for (int n = 0; n < N_FRAGMENTS; n += 2) read_right<B_ALONG>(y[n], y[n + 1], b, warp_column() + 8 * n, j);
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; ++m) x[m] = read_left<A_ALONG>(a, warp_row() + 16 * m, j);
    multiply<FIRST>(sums, x, y);
}

// Adds the products of DEPTH places to the tile.
template <bool A_ALONG, bool B_ALONG>
__device__ __forceinline__ void add_stage(Sums& sums, const float* a, const float* b) {
#if SPLIT
    Sums stage_sums;
    add_places<A_ALONG, B_ALONG, true>(stage_sums, a, b, 0);
#pragma unroll
    for (int j = 1; j < DEPTH / 8; ++j) add_places<A_ALONG, B_ALONG, false>(stage_sums, a, b, j);
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; ++m) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.x[m][n][i] += stage_sums.x[m][n][i];
        }
    }
#else
#pragma unroll
    for (int j = 0; j < DEPTH / 8; ++j) add_places<A_ALONG, B_ALONG, false>(sums, a, b, j);
#endif
}

// Sums over all steps; `next(a, b)` says in turn what each reads, and `look(a)` sees its A in shared memory.
template <bool A_ALONG, bool B_ALONG, class Next, class Look>
__device__ __forceinline__ void add_steps(Sums& sums, int steps, Next next, Look look) {
    int started = 0;
    float* free_stage = stages();
    const auto start = [&]() {
        if (started < steps) {
            Operand left, right;
            next(left, right);
            copy_operand<A_ALONG, TILE_M>(free_stage, left);
            copy_operand<B_ALONG, TILE_N>(free_stage + TILE_M * DEPTH, right);
        }
        close_copies();
        ++started;
        free_stage = free_stage == stages() + (STAGES - 1) * STAGE_NUMBERS ? stages() : free_stage + STAGE_NUMBERS;
    };
#pragma unroll
    for (int m = 0; m < M_FRAGMENTS; ++m) {
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.x[m][n][i] = 0.0f;
        }
    }
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) start();
    const float* full_stage = stages();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_copies<STAGES - 2>();
        // All copies of this step have arrived, and nobody reads the stage that the next copies overwrite.
        __syncthreads();
        start();
        add_stage<A_ALONG, B_ALONG>(sums, full_stage, full_stage + TILE_M * DEPTH);
        look(full_stage);
        full_stage = full_stage == stages() + (STAGES - 1) * STAGE_NUMBERS ? stages() : full_stage + STAGE_NUMBERS;
    }
}

// Writes the tile, plus a number for each column if `added` is not null, as far as there are rows and columns.
__device__ __forceinline__ void write_tile(const Sums& sums, float* to, i64 stride, int rows, int columns,
                                           const float* added) {
    const int column = warp_column() + 2 * lane_pos();
    float2 more[N_FRAGMENTS];
#pragma unroll
    for (int n = 0; n < N_FRAGMENTS; ++n) {
        const bool reads = added != nullptr && column + 8 * n < columns;
        more[n] = reads ? make_float2(added[column + 8 * n], added[column + 8 * n + 1]) : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; ++i) {
        const int row = warp_row() + 8 * i + lane_group();
        float* const line = to + (row * stride + column);
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) {
            const float *pair = sums.x[i / 2][n] + i % 2 * 2;
            if (column + 8 * n >= columns) continue;
            *reinterpret_cast<float2*>(line + 8 * n) = make_float2(pair[0] + more[n].x, pair[1] + more[n].y);
        }
    }
}
