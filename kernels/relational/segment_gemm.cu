// Linear maps of rows by the weight of their type:
//   Y[s(i), h] = X[g(i), h] B[t(i), h] + b[t(i), h],   B = W, or with TRANSPOSED W^T.
// X is [., heads, PLACES], Y [., heads, COLUMNS], b [T, heads, COLUMNS] or null, and W [T, w_heads, PLACES, COLUMNS], with
// TRANSPOSED [T, w_heads, COLUMNS, PLACES]; one head of W may stand for all.
//
// Y is in storage numbers or, with EXACT, float32.
//
// Heads of W that share X may also lie side by side in one B, for heads = 1: COLUMNS = w_heads * HEAD_COLUMNS.
//
// A thread block takes the rows of an item, TILE_M at a time, and TILE_N columns of one head. The places come in chunks of
// 64 bytes of a row, and lie in shared memory as [chunk][row or column][64 bytes]: a lane reads 16 bytes and so holds its
// part of two products. Rows are copied STAGES - 1 steps ahead; B is in shared memory as a whole (HELD), or comes along.
// Column n of a tile stands for column_of(n), so that a lane writes four columns that follow each other.
#include "relational/typed_rows.cuh"

#define CHUNK (4 * VECTOR)
#define CHUNKS ((PLACES + CHUNK - 1) / CHUNK)
#define STAGE_CHUNKS (CHUNKS > 1 ? 2 : 1)
#define STEPS ((CHUNKS + STAGE_CHUNKS - 1) / STAGE_CHUNKS)
#define LEFT_VECTORS (TILE_M * 4)
#define RIGHT_VECTORS (TILE_N * 4)
#define STAGE_VECTORS (STAGE_CHUNKS * (LEFT_VECTORS + (HELD ? 0 : RIGHT_VECTORS)))
#define TILES ((COLUMNS + TILE_N - 1) / TILE_N)
#define ALIGNED (PLACES % VECTOR == 0)

#if EXACT
typedef float result_t;
#else
typedef storage_t result_t;
#endif

static_assert(STAGES >= 2 && LEFT_VECTORS % THREADS == 0, "each thread copies as much");

__device__ __forceinline__ int column_of(int slot) {
    return N_FRAGMENTS == 1 ? slot : slot / 16 * 16 + slot % 8 / 2 * 4 + slot / 8 % 2 * 2 + slot % 2;
}

// Reads the first `left` numbers of 16 bytes, and zeros, from where `at(i)` says.
template <class At>
__device__ __forceinline__ uint4 load_vector(int left, At at) {
    u32 words[4] = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if (i < left) words[i / PACKED] |= bits_of(at(i)) << (i % PACKED * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Brings COUNT chunks of B's columns from `first_column` on into shared memory; a head of W has `head_numbers` numbers.
template <int COUNT>
__device__ __forceinline__ void load_right(uint4* to, const storage_t* weight, i64 head_numbers, int first_chunk,
                                           int first_column) {
#pragma unroll 4
    for (int v = (int)threadIdx.x; v < COUNT * RIGHT_VECTORS; v += THREADS) {
        const int place = (first_chunk + v / RIGHT_VECTORS) * CHUNK + v % 4 * VECTOR;
        const int column = first_column + column_of(v % RIGHT_VECTORS / 4);
        const int left = column < COLUMNS ? PLACES - place : 0;
        const int column_head = COLUMNS == HEAD_COLUMNS ? 0 : column / HEAD_COLUMNS;
        const storage_t* const matrix = weight + column_head * head_numbers;
        const auto at = [&](int i) {
            const int x = place + i, y = column - column_head * HEAD_COLUMNS;
            return matrix + (TRANSPOSED ? (i64)y * PLACES + x : (i64)x * HEAD_COLUMNS + y);
        };
        if constexpr (TRANSPOSED && ALIGNED) {
            to[v] = left > 0 ? *reinterpret_cast<const uint4*>(at(0)) : make_uint4(0u, 0u, 0u, 0u);
        } else {
            to[v] = load_vector(left, at);
        }
    }
}

// Adds the products of a chunk.
__device__ __forceinline__ void add_chunk(Sums& sums, const uint4* left, const uint4* right) {
    const int lane = (int)threadIdx.x % 32;
    uint4 rows[M_FRAGMENTS][2], columns[N_FRAGMENTS];
#pragma unroll
    for (int i = 0; i < 2 * M_FRAGMENTS; ++i) rows[i / 2][i % 2] = left[(warp_row() + 8 * i) * 4 + lane];
#pragma unroll
    for (int n = 0; n < N_FRAGMENTS; ++n) columns[n] = right[(warp_column() + 8 * n) * 4 + lane];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
        Left a[M_FRAGMENTS];
        Right b[N_FRAGMENTS];
#pragma unroll
        for (int i = 0; i < 2 * M_FRAGMENTS; ++i) {
            const uint4 row = rows[i / 2][i % 2];
            set_word(a[i / 2], i % 2, second ? row.z : row.x);
            set_word(a[i / 2], i % 2 + 2, second ? row.w : row.y);
        }
#pragma unroll
        for (int n = 0; n < N_FRAGMENTS; ++n) {
            set_word(b[n], 0, second ? columns[n].z : columns[n].x);
            set_word(b[n], 1, second ? columns[n].w : columns[n].y);
        }
        multiply(sums, a, b);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
segment_gemm(i64 heads, i64 w_heads, const int* items, const int* gather, const int* scatter, const storage_t* x,
             const storage_t* w, const storage_t* bias, result_t* y) {
    __shared__ int from_rows[ITEM_ROWS], to_rows[ITEM_ROWS];
    const int groups = (int)heads * TILES, group = (int)blockIdx.x % groups;
    const Item item = item_of(items, groups);
    const int head = group / TILES, first_column = group % TILES * TILE_N;
    const int num_rows = item.end - item.begin, strips = (num_rows + TILE_M - 1) / TILE_M;
    const i64 head_numbers = w_heads == 1 ? 0 : (i64)PLACES * HEAD_COLUMNS;
    const storage_t* const weight = w + (item.type * w_heads * ((i64)PLACES * HEAD_COLUMNS) + head * head_numbers);
    const int lane = (int)threadIdx.x % 32;
    uint4* const ring = shared_vectors() + (HELD ? CHUNKS * RIGHT_VECTORS : 0);
    for (int i = (int)threadIdx.x; i < num_rows; i += THREADS) {
        from_rows[i] = row_of(gather, item.begin + i);
        to_rows[i] = row_of(scatter, item.begin + i);
    }
    __syncthreads();

    // The next step to copy.
    int next_row = 0, next_chunk = 0;
    uint4* free_stage = ring;
    const auto start = [&]() {
        if (next_row < num_rows) {
#pragma unroll
            for (int i = 0; i < LEFT_VECTORS / THREADS; ++i) {
                const int row = next_row + ((int)threadIdx.x + i * THREADS) / 4;
                const storage_t* from = x;
                if (row < num_rows) from += (from_rows[row] * heads + head) * PLACES;
#pragma unroll
                for (int c = 0; c < STAGE_CHUNKS; ++c) {
                    const int chunk = next_chunk + c, place = chunk * CHUNK + (int)threadIdx.x % 4 * VECTOR;
                    if (CHUNKS % STAGE_CHUNKS != 0 && chunk >= CHUNKS) continue;
                    const bool exists = row < num_rows && place < PLACES;
                    uint4* const to = free_stage + c * LEFT_VECTORS + threadIdx.x + i * THREADS;
                    if constexpr (ALIGNED) {
                        copy16(to, exists ? from + place : x, exists);
                    } else {
                        *to = load_vector(exists ? PLACES - place : 0, [&](int k) { return from + place + k; });
                    }
                }
            }
            if constexpr (!HELD) {
                uint4* const to = free_stage + STAGE_CHUNKS * LEFT_VECTORS;
                load_right<STAGE_CHUNKS>(to, weight, head_numbers, next_chunk, first_column);
            }
        }
        close_copies();
        next_chunk += STAGE_CHUNKS;
        if (next_chunk >= CHUNKS) {
            next_chunk = 0;
            next_row += TILE_M;
        }
        free_stage = free_stage == ring + (STAGES - 1) * STAGE_VECTORS ? ring : free_stage + STAGE_VECTORS;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) start();
    if constexpr (HELD) load_right<CHUNKS>(shared_vectors(), weight, head_numbers, 0, first_column);

    constexpr int WIDTH = N_FRAGMENTS == 1 ? 2 : 4, PIECES = 2 * N_FRAGMENTS / WIDTH;
    const int column = first_column + warp_column() + WIDTH * lane_pos();
    float added[PIECES][WIDTH];
#pragma unroll
    for (int i = 0; i < PIECES * WIDTH; ++i) {
        const int place = column + i / WIDTH * (4 * WIDTH) + i % WIDTH;
        added[i / WIDTH][i % WIDTH] =
            bias != nullptr && place < COLUMNS ? number_of(bias + (item.type * heads + head) * COLUMNS + place) : 0.0f;
    }
    const uint4* full_stage = ring;
#pragma unroll 1
    for (int strip = 0; strip < strips; ++strip) {
        // Warps beyond the last row only copy.
        const int first_row = strip * TILE_M + warp_row();
        Sums sums;
        clear(sums);
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            wait_copies<STAGES - 2>();
            // All copies of this step have arrived, and nobody reads the stage that the next copies overwrite.
            __syncthreads();
            start();
            if (first_row < num_rows) {
#if SPLIT
                Sums step_sums;
                clear(step_sums);
#else
                Sums& step_sums = sums;
#endif
#pragma unroll
                for (int c = 0; c < STAGE_CHUNKS; ++c) {
                    const int chunk = step * STAGE_CHUNKS + c;
                    if (CHUNKS % STAGE_CHUNKS != 0 && chunk >= CHUNKS) continue;
                    const uint4* const right = HELD ? shared_vectors() + chunk * RIGHT_VECTORS
                                                    : full_stage + STAGE_CHUNKS * LEFT_VECTORS + c * RIGHT_VECTORS;
                    add_chunk(step_sums, full_stage + c * LEFT_VECTORS, right);
                }
#if SPLIT
                add(sums, step_sums);
#endif
            }
            full_stage = full_stage == ring + (STAGES - 1) * STAGE_VECTORS ? ring : full_stage + STAGE_VECTORS;
        }
#pragma unroll
        for (int i = 0; i < 2 * M_FRAGMENTS; ++i) {
            const int row = first_row + 8 * i + lane / 4;
            if (row >= num_rows) continue;
            result_t* const line = y + ((to_rows[row] * heads + head) * COLUMNS + column);
#pragma unroll
            for (int n = 0; n < PIECES; ++n) {
                float numbers[WIDTH];
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    numbers[e] = sums.x[i / 2][n * (WIDTH / 2) + e / 2][i % 2 * 2 + e % 2] + added[n][e];
                }
                const int place = n * (4 * WIDTH);
                store_numbers<COLUMNS % WIDTH == 0>(line + place, numbers, COLUMNS - column - place);
            }
        }
    }
}
