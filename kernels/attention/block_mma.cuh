// The schedule `block_mma`: attention inside dense blocks, on tensor cores.
//
// A window is up to WINDOW consecutive rows of a compressed side, all in one thread block and 16 in each warp. Its
// columns are listed, 32 to a block, with one bit per row and column that tells where an edge is. The window passes
// over its columns STEP at a time: their rows are copied to shared memory while the step before is computed. Rows that
// the window owns and columns that it visits are gathered alike, so a small graph stays on chip while all its edges are
// used. A thread block takes BLOCK_HEADS heads side by side, which share the bits.
//
// Constants beside those of the score: STORAGE, EDGE (0), SPLIT, HEADS, BLOCK_HEADS (divides HEADS), CHANNELS (16
// bytes or a multiple of them), WARPS, STEP (16 or 32), LISTED (whether columns are listed one by one, or follow each
// other), FOLD (see multiply_rows), MIN_BLOCKS.
#define THREADS (32 * WARPS)
#define WINDOW (16 * WARPS)
#define STEP_TILES (STEP / 8)
#define CHANNEL_TILES ((CHANNELS + 7) / 8)
#define TILE_ELEMENTS(rows) ((rows) * TILE_STRIDE)
// Channel tiles that share one left side at a time.
#define TILE_GROUP (CHANNEL_TILES % 4 == 0 ? 4 : CHANNEL_TILES % 2 == 0 ? 2 : 1)

// Scalars of a step in the order that lanes read them: [head][pos][tile, odd].
#define LANE_SCALARS (STEP / 4)

struct Window {
    int first_row, end_row, first_block, num_columns, first_column;
};

#define BLOCK_SPARSE_PARAMETERS const int *windows, const int *columns, const u32 *bits

struct BlockSparse {
    const int* windows;  // [num_windows, 8]: the fields of Window
    const int* columns;  // [num_blocks, 32] with LISTED; past the end the last one again
    const u32* bits;     // [num_blocks, WINDOW]: bit c of word r stands for row r of the window, column c of the block
};

// The two rows of the window that a lane holds results of, 8 apart.
struct OwnRows {
    int row[2];      // the last row of the window again where there are fewer
    bool exists[2];
};

__device__ __forceinline__ Window load_window(const BlockSparse& t) {
    const int4* const fields = reinterpret_cast<const int4*>(t.windows) + 2 * (i64)blockIdx.x;
    const int4 w = __ldg(fields);
    return {w.x, w.y, w.z, w.w, LISTED ? 0 : __ldg(fields + 1).x};
}

__device__ __forceinline__ int first_warp_row() { return threadIdx.x / 32 * 16; }

__device__ __forceinline__ OwnRows own_rows(const Window& w) {
    OwnRows own;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = w.first_row + first_warp_row() + lane_group() + 8 * half;
        own.exists[half] = row < w.end_row;
        own.row[half] = own.exists[half] ? row : w.end_row - 1;
    }
    return own;
}

// The node at a column; the last one again past the end.
__device__ __forceinline__ int column_node(const BlockSparse& t, const Window& w, int column) {
    if (LISTED) return __ldg(t.columns + (i64)w.first_block * 32 + column);
    return w.first_column + (column < w.num_columns ? column : w.num_columns - 1);
}

// Where the numbers of head h of the thread block are.
__device__ __forceinline__ i64 head_index(int row, int h) { return (i64)row * HEADS + blockIdx.y * BLOCK_HEADS + h; }

// Starts to copy what the heads need of a step's rows: with TENSORS = 2 those of `first`, and those of `last`, each to
// a tile of its own.
template <int TENSORS, class RowOf>
__device__ __forceinline__ void copy_rows(storage_t* stage, const storage_t* first, const storage_t* last,
                                          RowOf row_of) {
    constexpr int ELEMENTS = 16 / STORAGE_BYTES, PIECES = BLOCK_HEADS * CHANNELS / ELEMENTS;
    const auto copy = [&](int row, int piece) {
        const u64 from = (u64)(u32)row_of(row) * ROW_STRIDE + blockIdx.y * (BLOCK_HEADS * CHANNELS) + piece * ELEMENTS;
        storage_t* const to = stage + row * TILE_STRIDE + piece * ELEMENTS;
        if (TENSORS == 2) copy16(to, first + from);
        copy16(to + TILE_ELEMENTS((TENSORS - 1) * STEP), last + from);
    };
    if constexpr (THREADS % PIECES == 0) {
        constexpr int STRIDE = THREADS / PIECES;
        const int first_row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
#pragma unroll
        for (int row = 0; row < STEP; row += STRIDE) {
            if (STEP % STRIDE == 0 || row + first_row < STEP) copy(row + first_row, piece);
        }
    } else {
        for (int i = threadIdx.x; i < STEP * PIECES; i += THREADS) copy(i / PIECES, i % PIECES);
    }
}

// The column of a step that stands at place i of a head's scalars.
__device__ __forceinline__ int scalar_column(int i) {
    return 8 * (i % LANE_SCALARS / 2) + shuffled(i / LANE_SCALARS, i % 2);
}

// The same for one number per head of each row: each head's side by side, in the order of lanes.
template <class RowOf>
__device__ __forceinline__ void copy_scalars(float* values, const float* tensor, RowOf row_of) {
    constexpr int COUNT = STEP * BLOCK_HEADS;
#pragma unroll
    for (int first = 0; first < COUNT; first += THREADS) {
        const int i = first + threadIdx.x, h = i % BLOCK_HEADS, place = i / BLOCK_HEADS;
        if (COUNT % THREADS == 0 || i < COUNT) {
            copy4(values + h * STEP + place, tensor + head_index(row_of(scalar_column(place)), h));
        }
    }
}

// A lane's scalars of one head in a step, if the score has any: number 2 n + odd stands for its column `odd` of tile n.
__device__ __forceinline__ void lane_scalars(float (&x)[LANE_SCALARS], const float* scalars) {
#pragma unroll
    for (int i = 0; i < LANE_SCALARS; i += 4) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (HAS_NODE_SCALARS) four = *reinterpret_cast<const float4*>(scalars + lane_pos() * LANE_SCALARS + i);
        x[i] = four.x;
        x[i + 1] = four.y;
        x[i + 2] = four.z;
        x[i + 3] = four.w;
    }
}

// Keeps the window's own rows of a tensor as left sides, head by head.
__device__ __forceinline__ void keep_own_rows(u32* words, const storage_t* tensor, const OwnRows& own) {
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; ++h) {
        keep_rows(words + h * LEFT_WORDS, tensor + head_index(own.row[0], h) * CHANNELS,
                  tensor + head_index(own.row[1], h) * CHANNELS);
    }
}

// Zeros between the channels of a row and the width that the products read.
__device__ __forceinline__ void clear_padding(storage_t* tiles, int rows) {
    constexpr int FIRST = BLOCK_HEADS * CHANNELS, WIDTH = TILE_CHANNELS - FIRST, DIVISOR = WIDTH > 0 ? WIDTH : 1;
    for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
        tiles[i / DIVISOR * TILE_STRIDE + FIRST + i % DIVISOR] = 0;
    }
}

// Edge bits of a lane's two rows in one block of columns, and those of one step, its first column lowest.
struct StepBits {
    u32 word[2];

    __device__ __forceinline__ StepBits of_step(int step) const {
        return {{word[0] >> step * STEP % 32, word[1] >> step * STEP % 32}};
    }
};

__device__ __forceinline__ StepBits load_bits(const BlockSparse& t, const Window& w, int step) {
    const u32* words = t.bits + (i64)(w.first_block + step * STEP / 32) * WINDOW + first_warp_row() + lane_group();
    return {{__ldg(words), __ldg(words + 8)}};
}

// What takes the logits without an edge out of a step: a test of each bit, or for several heads an upper bound,
// infinite where there is an edge and else minus infinity.
struct Mask {
    StepBits bits;
#if BLOCK_HEADS > 1
    float bounds[STEP_TILES][4];
#endif

    __device__ __forceinline__ explicit Mask(const StepBits& b) : bits(b) {
#if BLOCK_HEADS > 1
#pragma unroll
        for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) bounds[n][i] = has_edge(n, i) ? -negative_infinity() : negative_infinity();
        }
#endif
    }

    __device__ __forceinline__ bool has_edge(int tile, int i) const {
        return bits.word[i / 2] >> (8 * tile + lane_column(i % 2)) & 1u;
    }

    __device__ __forceinline__ float logit(float s, int tile, int i) const {
#if BLOCK_HEADS > 1
        return fminf(s, bounds[tile][i]);
#else
        return has_edge(tile, i) ? s : negative_infinity();
#endif
    }

    // exp(s - max), 0 without an edge.
    __device__ __forceinline__ float power(float s, float max, int tile, int i) const {
        const float x = base2_difference(s, max);
#if BLOCK_HEADS > 1
        return fast_exp2(fminf(x, bounds[tile][i]));
#else
        return has_edge(tile, i) ? fast_exp2(x) : 0.0f;
#endif
    }
};

// Ones where there is an edge, for each number of D or each pair that pack_pair makes of them: taken after the
// exponential, so that neither infinities nor bounds are needed.
struct Cut {
    u32 words[STEP_TILES][STORAGE == 0 ? 4 : 2];

    __device__ __forceinline__ explicit Cut(const StepBits& b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 mine = b.word[half] >> lane_pos();
#pragma unroll
            for (int n = 0; n < STEP_TILES; ++n) {
#if STORAGE == 0
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    words[n][2 * half + odd] = (u32)((int)(b.word[half] << (31 - 8 * n - lane_column(odd))) >> 31);
                }
#else
                // Columns pos and pos + 4.
                const u32 pair = mine >> 8 * n;
                words[n][half] = ((pair & 1u) | (pair & 16u) << 12) * 0xffffu;
#endif
            }
        }
    }

#if STORAGE == 0
    __device__ __forceinline__ float apply(float x, int n, int i) const {
        return __uint_as_float(__float_as_uint(x) & words[n][i]);
    }
#else
    // A product's left side of tiles n and n + 1.
    __device__ __forceinline__ void apply(Left& a, int n) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a.big[i] &= words[n + i / 2][i % 2];
    }
#endif
};

__device__ __forceinline__ bool warp_has_edges(const StepBits& bits) {
    const u32 mask = STEP == 32 ? 0xffffffffu : (1u << STEP % 32) - 1u;
    return __any_sync(FULL_MASK, ((bits.word[0] | bits.word[1]) & mask) != 0u);
}

// Passes over the columns of a window: work(step, edges) for the steps in which the warp has edges, while
// fetch(step + 1) copies what the next step gathers. The caller has fetched step 0.
template <class Fetch, class Work>
__device__ __forceinline__ void for_each_step(const BlockSparse& t, const Window& w, int steps, const Fetch& fetch,
                                              const Work& work) {
    StepBits next_bits = {};
    if (steps > 0) next_bits = load_bits(t, w, 0);
    for (int step = 0; step < steps; ++step) {
        const StepBits edges = next_bits.of_step(step);
        wait_copies<0>();
        // All copies of this step have arrived, and nobody reads the stage of the step before any more.
        __syncthreads();
        if (step + 1 < steps) {
            fetch(step + 1);
            next_bits = load_bits(t, w, step + 1);
        }
        if (warp_has_edges(edges)) work(step, edges);
    }
}

template <int TILES>
__device__ __forceinline__ void clear(float (&d)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[n][i] = 0.0f;
    }
}

// d += A B with the coefficients of a step as A and a tile of STEP rows as B. Tensor cores cut the sums that they add
// to, which would show after many steps: with FOLD the products are summed for each step and then added with rounding.
__device__ __forceinline__ void multiply_rows(float (&d)[CHANNEL_TILES][4], const float (&coefficients)[STEP_TILES][4],
                                              const storage_t* tile) {
#if FOLD
    Left a[STEP / MMA_K];
#pragma unroll
    for (int k = 0; k < STEP / MMA_K; ++k) a[k] = left_of(&coefficients[k * (MMA_K / 8)]);
#pragma unroll
    for (int c = 0; c < CHANNEL_TILES; c += TILE_GROUP) {
        float sums[TILE_GROUP][4];
        clear(sums);
#pragma unroll
        for (int k = 0; k < STEP / MMA_K; ++k) {
            Right b[TILE_GROUP];
#pragma unroll
            for (int n = 0; n < TILE_GROUP; ++n) b[n] = right_columns(tile + k * MMA_K * TILE_STRIDE, 8 * (c + n));
            multiply(sums, a[k], b);
        }
#pragma unroll
        for (int n = 0; n < TILE_GROUP; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) d[c + n][i] += sums[n][i];
        }
    }
#else
#pragma unroll
    for (int k = 0; k < STEP / MMA_K; ++k) {
        const Left a = left_of(&coefficients[k * (MMA_K / 8)]);
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; c += TILE_GROUP) {
            Right b[TILE_GROUP];
#pragma unroll
            for (int n = 0; n < TILE_GROUP; ++n) b[n] = right_columns(tile + k * MMA_K * TILE_STRIDE, 8 * (c + n));
            multiply(&d[c], a, b);
        }
    }
#endif
}

// d = A B with own rows as A and, as columns of B, the STEP rows of a tile. From three products on two sums at a time,
// for fewer waits.
__device__ __forceinline__ void multiply_transposed(float (&d)[STEP_TILES][4], u32* own_words, const storage_t* tile) {
    if constexpr (PRODUCTS <= 2) {
        Right first[STEP_TILES], second[STEP_TILES];
#pragma unroll
        for (int n = 0; n < STEP_TILES; ++n) {
            if (PRODUCTS == 1) right_rows(first[n], tile + 8 * n * TILE_STRIDE, 0);
            else right_rows(first[n], second[n], tile + 8 * n * TILE_STRIDE, 0);
        }
        multiply<true>(d, left_of_rows(own_words, 0), first);
        if (PRODUCTS == 2) multiply(d, left_of_rows(own_words, 1), second);
        return;
    }
    float other[STEP_TILES][4];
    clear(d);
    clear(other);
#pragma unroll
    for (int product = 0; product < PRODUCTS; product += 2) {
        Right first[STEP_TILES], second[STEP_TILES];
        if (product + 1 < PRODUCTS) {
#pragma unroll
            for (int n = 0; n < STEP_TILES; ++n) {
                right_rows(first[n], second[n], tile + 8 * n * TILE_STRIDE, product * MMA_K);
            }
            multiply(d, left_of_rows(own_words, product), first, other, left_of_rows(own_words, product + 1), second);
        } else {
#pragma unroll
            for (int n = 0; n < STEP_TILES; ++n) right_rows(first[n], tile + 8 * n * TILE_STRIDE, product * MMA_K);
            multiply(d, left_of_rows(own_words, product), first);
        }
    }
#pragma unroll
    for (int n = 0; n < STEP_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[n][i] += other[n][i];
    }
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(FULL_MASK, value, 1);
    return value + __shfl_xor_sync(FULL_MASK, value, 2);
}

// What a row's four lanes have summed; the part of a gradient along a normalised row takes the row's own norm too.
__device__ __forceinline__ void sum_scalars(float (&sum)[2], const float (&own)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = quad_sum(sum[half]) * (HAS_NORMS ? own[half] : 1.0f);
    }
}

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 1));
    return fmaxf(value, __shfl_xor_sync(FULL_MASK, value, 2));
}

// Stores a lane's two channels of one channel tile.
__device__ __forceinline__ void store_pair(storage_t* address, float first, float second) {
#if STORAGE == 0
    *reinterpret_cast<float2*>(address) = make_float2(first, second);
#else
    *reinterpret_cast<u32*>(address) = pack_pair(first, second);
#endif
}

// Whether a lane's two channels of channel tile c exist; CHANNELS is even.
__device__ __forceinline__ bool has_channels(int c) { return CHANNELS % 8 == 0 || 8 * c + 2 * lane_pos() < CHANNELS; }

__device__ __forceinline__ void store_rows(storage_t* base, const OwnRows& own, int h,
                                           const float (&d)[CHANNEL_TILES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        storage_t* row = base + head_index(own.row[half], h) * CHANNELS + 2 * lane_pos();
        if (!own.exists[half]) continue;
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            if (has_channels(c)) store_pair(row + 8 * c, d[c][2 * half], d[c][2 * half + 1]);
        }
    }
}

// One number per row of the window and head.
__device__ __forceinline__ void store_scalars(float* base, const OwnRows& own, int h, const float (&values)[2]) {
    if (lane_pos() != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (own.exists[half]) base[head_index(own.row[half], h)] = values[half];
    }
}

__device__ __forceinline__ float load_scalar(const float* base, int row, int h) {
    return HAS_NODE_SCALARS ? __ldg(base + head_index(row, h)) : 0.0f;
}

// Two channels of a row that a lane holds, from memory.
__device__ __forceinline__ float2 load_pair(const storage_t* address) {
#if STORAGE == 0
    return __ldg(reinterpret_cast<const float2*>(address));
#else
    const u32 pair = __ldg(reinterpret_cast<const u32*>(address));
    return make_float2(from_bits16(pair & 0xffffu), from_bits16(pair >> 16));
#endif
}

// Removes the radial part of a gradient g through the norms, given the own rows x: (g - x^ <x^, g>) / norm, where
// `along` is <x^, g>. Below the clamp of the norm the projection drops out.
__device__ __forceinline__ void project(float (&g)[CHANNEL_TILES][4], const storage_t* x, const OwnRows& own, int h,
                                        const float (&inverse_norm)[2], const float (&along)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const storage_t* row = x + head_index(own.row[half], h) * CHANNELS + 2 * lane_pos();
        const float n = inverse_norm[half], radial = n < 1e12f ? along[half] * n : 0.0f;
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            const float2 pair = has_channels(c) ? load_pair(row + 8 * c) : make_float2(0.0f, 0.0f);
            g[c][2 * half] = n * (g[c][2 * half] - radial * pair.x);
            g[c][2 * half + 1] = n * (g[c][2 * half + 1] - radial * pair.y);
        }
    }
}

// From sums over the products of a row to its gradients: `finish` is a function of the score.
template <class Finish>
__device__ __forceinline__ void finish_tiles(float (&d)[CHANNEL_TILES][4], const Finish& finish) {
#pragma unroll
    for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[c][i] = finish(d[c][i]);
    }
}

__device__ __forceinline__ void add_tiles(float (&d)[CHANNEL_TILES][4], const float (&other)[CHANNEL_TILES][4]) {
#pragma unroll
    for (int c = 0; c < CHANNEL_TILES; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[c][i] += other[c][i];
    }
}

__device__ __forceinline__ void add_rows(float (&d)[CHANNEL_TILES][4], const storage_t* base, const OwnRows& own,
                                         int h) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const storage_t* row = base + head_index(own.row[half], h) * CHANNELS + 2 * lane_pos();
#pragma unroll
        for (int c = 0; c < CHANNEL_TILES; ++c) {
            if (!has_channels(c)) continue;
            const float2 pair = load_pair(row + 8 * c);
            d[c][2 * half] += pair.x;
            d[c][2 * half + 1] += pair.y;
        }
    }
}
