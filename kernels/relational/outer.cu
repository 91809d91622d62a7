// Gradients of the weights of types: dW[t, h] = sum over the rows i of type t of X[g(i), h]^T G[k(i), h]. X is [., heads,
// FEATURES], G [., heads, CHANNELS], and dW [T, heads, FEATURES, CHANNELS]. Heads that share X lie side by side as channels,
// for heads = 1: each has HEAD_CHANNELS of them, and FEATURES * HEAD_CHANNELS numbers of the result.
//
// A thread block sums the rows of an item for TILE_M features and TILE_N channels of one head, STAGE_LINES lines of rows at
// a time: a line is one row, or two rows of 16-bit numbers whose words hold one number of each. The rows of the next stage
// are in registers while one is multiplied. WARPS_K warps share the lines of a stage and add their sums at the end. Items that share a type leave their sums in partial [place, heads, FEATURES,
// CHANNELS], float32, which segment_outer_sum adds in the order of the items.
#include "relational/typed_rows.cuh"

#define STAGE_LINES 32
#define STAGE_ROWS (STAGE_LINES * PACKED)
// Distances of lines in shared memory with which no read has a bank conflict.
#define LINE_OF(TILE) ((TILE) % 16 == 8 ? (TILE) : (TILE) + 8)
#define LEFT_LINE LINE_OF(TILE_M)
#define RIGHT_LINE LINE_OF(TILE_N)
#define STAGE_WORDS (STAGE_LINES * (LEFT_LINE + RIGHT_LINE))
#define M_TILES ((FEATURES + TILE_M - 1) / TILE_M)
#define N_TILES ((CHANNELS + TILE_N - 1) / TILE_N)
// Rows whose places in the tensors are in shared memory at a time.
#define LIST_ROWS 512
#define SUM_LANES 32
#define SUM_TURNS 8

// The words of four numbers of a row, zeros beyond the first `left`.
template <bool ALIGNED>
__device__ __forceinline__ void load_four(u32* words, const storage_t* from, int left) {
#pragma unroll
    for (int i = 0; i < 4 / PACKED; ++i) words[i] = 0u;
    if constexpr (ALIGNED) {
        if (left <= 0) return;
#if STORAGE == 0
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
#else
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words[0] = v.x, words[1] = v.y;
#endif
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < left) words[i / PACKED] |= bits_of(from + i) << (i % PACKED * 16);
        }
    }
}

// What a thread reads of a stage of one matrix, four numbers of each row of a line at a time: a row has WIDTH numbers, of
// which a tile takes SIZE from `first_column` on.
template <int SIZE, int WIDTH>
struct Lines {
    static constexpr int COUNT = STAGE_LINES * SIZE / 4, ITEMS = (COUNT + THREADS - 1) / THREADS, LINE = LINE_OF(SIZE);
    u32 words[ITEMS][4];

    __device__ __forceinline__ void load(const storage_t* matrix, i64 row_numbers, int first_column, const int* rows,
                                         int first_row, int num_rows) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int v = (int)threadIdx.x + i * THREADS, column = v % (SIZE / 4) * 4;
            const int row = first_row + v / (SIZE / 4) * PACKED;
#pragma unroll
            for (int k = 0; k < PACKED; ++k) {
                const bool exists = row + k < num_rows && (COUNT % THREADS == 0 || v < COUNT);
                const storage_t* from = matrix + first_column + column;
                if (exists) from += rows[row + k] * row_numbers;
                load_four<WIDTH % 4 == 0>(words[i] + k * (4 / PACKED), from, exists ? WIDTH - first_column - column : 0);
            }
        }
    }
    __device__ __forceinline__ void store(u32* to) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int v = (int)threadIdx.x + i * THREADS;
            if (COUNT % THREADS != 0 && v >= COUNT) continue;
            u32 line[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 first = words[i][e / PACKED], second = words[i][(4 + e) / PACKED % 4];
                if (PACKED == 1) line[e] = first;
                if (PACKED == 2) line[e] = e % 2 ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
            }
            *reinterpret_cast<uint4*>(to + v / (SIZE / 4) * LINE + v % (SIZE / 4) * 4) =
                make_uint4(line[0], line[1], line[2], line[3]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
segment_outer(i64 heads, const int* items, const int* gather_x, const int* gather_g, const storage_t* x,
              const storage_t* g, storage_t* dw, float* partial) {
    __shared__ int x_rows[LIST_ROWS], g_rows[LIST_ROWS];
    u32* const words = reinterpret_cast<u32*>(shared_vectors());
    const int groups = (int)heads * M_TILES * N_TILES, group = (int)blockIdx.x % groups;
    const Item item = item_of(items, groups);
    const int tile = group % (M_TILES * N_TILES), head = group / (M_TILES * N_TILES);
    const int first_feature = tile / N_TILES * TILE_M, first_channel = tile % N_TILES * TILE_N;
    const storage_t *const left_at = x + head * FEATURES, *const right_at = g + head * CHANNELS;
    const int part = (int)threadIdx.x / (THREADS / WARPS_K);
    Lines<TILE_M, FEATURES> left;
    Lines<TILE_N, CHANNELS> right;
    Sums sums;
    clear(sums);
    u32* stage = words;
#pragma unroll 1
    for (int begin = item.begin; begin < item.end; begin += LIST_ROWS) {
        const int num_rows = min(item.end - begin, LIST_ROWS);
        for (int i = (int)threadIdx.x; i < num_rows; i += THREADS) {
            x_rows[i] = row_of(gather_x, begin + i);
            g_rows[i] = row_of(gather_g, begin + i);
        }
        __syncthreads();
        const auto load = [&](int first_row) {
            left.load(left_at, heads * FEATURES, first_feature, x_rows, first_row, num_rows);
            right.load(right_at, heads * CHANNELS, first_channel, g_rows, first_row, num_rows);
        };
        load(0);
#pragma unroll 1
        for (int row = 0; row < num_rows; row += STAGE_ROWS) {
            left.store(stage);
            right.store(stage + STAGE_LINES * LEFT_LINE);
            // Nobody reads the other stage any more, nor what the lists hold after the last of these barriers.
            __syncthreads();
            load(row + STAGE_ROWS);
#pragma unroll
            for (int j = 0; j < STAGE_LINES / 8 / WARPS_K; ++j) {
#if SPLIT
                // Sums of more than one product lose too much: rows may differ by orders of magnitude.
                Sums products;
                clear(products);
#else
                Sums& products = sums;
#endif
                Left a[M_FRAGMENTS];
                Right b[N_FRAGMENTS];
                const int line = (j * WARPS_K + part) * 8 + lane_pos();
                const u32* const lefts = stage + line * LEFT_LINE + warp_row() + lane_group();
                const u32* const rights =
                    stage + STAGE_LINES * LEFT_LINE + line * RIGHT_LINE + warp_column() + lane_group();
#pragma unroll
                for (int i = 0; i < 4 * M_FRAGMENTS; ++i) {
                    set_word(a[i / 4], i % 4, lefts[i % 4 / 2 * 4 * LEFT_LINE + i / 4 * 16 + i % 2 * 8]);
                }
#pragma unroll
                for (int i = 0; i < 2 * N_FRAGMENTS; ++i) {
                    set_word(b[i / 2], i % 2, rights[i % 2 * 4 * RIGHT_LINE + i / 2 * 8]);
                }
                multiply(products, a, b);
#if SPLIT
                add(sums, products);
#endif
            }
            stage = stage == words ? words + STAGE_WORDS : words;
        }
    }
#if WARPS_K > 1
    float* const parts = reinterpret_cast<float*>(words) + threadIdx.x % (THREADS / WARPS_K);
    constexpr int COUNT = M_FRAGMENTS * N_FRAGMENTS * 4, STRIDE = THREADS / WARPS_K;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (part > 0) parts[((part - 1) * COUNT + i) * STRIDE] = number(sums, i);
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int i = 0; i < (WARPS_K - 1) * COUNT; ++i) number(sums, i % COUNT) += parts[i * STRIDE];
#endif

    // Two channels of one head follow each other in memory.
    constexpr int WIDTH = HEAD_CHANNELS % 2 == 0 ? 2 : 1;
    const i64 matrix = heads * FEATURES * CHANNELS;
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; ++i) {
        const int feature = first_feature + warp_row() + 8 * i + lane_group();
        if (feature >= FEATURES) continue;
#pragma unroll
        for (int k = 0; k < 2 * N_FRAGMENTS; k += WIDTH) {
            const int channel = first_channel + warp_column() + 2 * lane_pos() + k / 2 * 8 + k % 2;
            if (channel >= CHANNELS) continue;
            const int side = CHANNELS == HEAD_CHANNELS ? 0 : channel / HEAD_CHANNELS;
            const i64 line = (i64)(head + side) * FEATURES + feature;
            const i64 place = line * HEAD_CHANNELS + channel - side * HEAD_CHANNELS;
            float numbers[WIDTH];
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) numbers[e] = sums.x[i / 2][k / 2][i % 2 * 2 + k % 2 + e];
            if (item.place < 0) {
                store_numbers<WIDTH == 2>(dw + (item.type * matrix + place), numbers, WIDTH);
                continue;
            }
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) partial[item.place * matrix + place + e] = numbers[e];
        }
    }
}

// Adds the partial sums ptr[k] to ptr[k + 1] of the type types[k], matrix by matrix of `size` numbers.
extern "C" __global__ void __launch_bounds__(SUM_LANES * SUM_TURNS)
segment_outer_sum(i64 size, const int* types, const int* ptr, const float* partial, storage_t* dw) {
    __shared__ float turns[SUM_TURNS][SUM_LANES];
    const int groups = (int)((size + SUM_LANES - 1) / SUM_LANES), type = (int)(blockIdx.x / groups);
    const int lane = (int)threadIdx.x % SUM_LANES, turn = (int)threadIdx.x / SUM_LANES;
    const i64 number = (i64)(blockIdx.x % groups) * SUM_LANES + lane;
    float sum = 0.0f;
    if (number < size) {
#pragma unroll 8
        for (int k = ptr[type] + turn; k < ptr[type + 1]; k += SUM_TURNS) sum += partial[k * size + number];
    }
    turns[turn][lane] = sum;
    __syncthreads();
    if (turn > 0 || number >= size) return;
#pragma unroll
    for (int i = 1; i < SUM_TURNS; ++i) sum += turns[i][lane];
    const float sums[1] = {sum};
    store_numbers<false>(dw + types[type] * size + number, sums, 1);
}
