// Attention of one head over the rows x of its own input, into which the linear layers of key and value are absorbed, on
// compute capability 9.0 (sm_90a). With M = W_k^T W_q and m = W_k^T b_q
//
//   q_i = M x_i + m,  S_ij = scale <q_i, x_j>,  z_i = sum_j softmax_j(S_ij) x_j,  O_i = W_v z_i + b_v
//
// O_i is 0 for a row without edges; what b_k adds is the same for all edges of a row, so the softmax takes it away. An
// edge gathers one row of CHANNELS numbers in place of a key and a value, and what linear layers make of a row is needed
// where that row is worked on: a thread block owns a tile of rows, which it multiplies before and after it has gathered.
//
// `order` [tiles, tile_rows] has the rows of each tile, -1 where there is none, and `index` the other ends of their edges.
// `tile_ptr` [tiles + 1, 2] says where the items and edges of a tile begin, edges at a multiple of four. An item is (row,
// begin, end, which): a row of the tile with its edges, counted from the first of the tile, and its slot; or, if it has
// more edges than CHUNK, a chunk of them, with (slot, state, first state, states) in a byte each. Warps take the next four
// items in turn. Who finishes the last chunk of a row adds their states in order, so that the result does not depend on it.
//
// Matrices are multiplied as in products/rows.cu, by fp16 halves. absorbed_images.cu leaves them as shared memory is to
// hold them, an image: the first halves, with SPLIT the second ones, what undoes the scale of each column, and a bias.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/copy.cuh"
#include "include/wgmma.cuh"
#include "include/halves.cuh"

#define THREADS (32 * WARPS)
#define STATE_WORDS (CHANNELS + 4)

static_assert(CHUNK == 16 && HEAD_LANES == 8 && WARP_ROWS == 4 && WARPS % 4 == 0, "four items in a warp");
static_assert(CHANNELS % 32 == 0 && CHANNELS <= 128, "one section");

constexpr float LOG2E = 1.4426950408889634f;

// The columns of an image, words of its first halves, and where the scales, the bias and the next image begin.
#define COLUMNS (CHANNELS <= 64 ? 64 : 128)
#define STEPS (CHANNELS / 16)
#define HALVES (CHANNELS * COLUMNS / 2)
#define RAISE ((1 + SPLIT) * HALVES)
#define BIAS (RAISE + COLUMNS)
#define IMAGE (BIAS + COLUMNS)
// M and m for q, W_v and b_v for the output, W_v^T for the gradient of z, M^T for that of x by q.
#define QUERY_IMAGE 0
#define OUT_IMAGE 1
#define MEAN_IMAGE 2
#define INPUT_IMAGE 3
#define MAX_SLOTS (16 * WARPS)

#define TILE_PARAMETERS i64 tile_rows, const int *order, const int *tile_ptr, const int *items, const int *index

// A thread block's tile: what of it lies in shared memory, behind the image. With eight lanes of a row, or four lanes of
// each of two rows, side by side, all banks are reached.
struct Tile {
    const int4* items;
    const int* index;
    int *next, *arrived;
    int num_items;
    float *features, *states;

    __device__ __forceinline__ float4* at(int slot, int chunk) const {
        return reinterpret_cast<float4*>(features + slot * CHANNELS) + (chunk ^ (slot & 1) << 2);
    }
    __device__ __forceinline__ void store(int slot, const Lanes& l, const Part& part) const {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            const float* const v = &part.x[0][4 * k];
            *at(slot, k * 8 + l.head_lane) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    __device__ __forceinline__ Part load(int slot, const Lanes& l) const {
        Part part;
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            const float4 v = *at(slot, k * 8 + l.head_lane);
            part.x[0][4 * k] = v.x, part.x[0][4 * k + 1] = v.y, part.x[0][4 * k + 2] = v.z, part.x[0][4 * k + 3] = v.w;
        }
        return part;
    }
};

// Where the items and edges of the thread block's tile begin and end.
struct Bounds {
    int2 first, last;
};

__device__ __forceinline__ Bounds bounds_of(const int* tile_ptr) {
    const int2* const ptr = reinterpret_cast<const int2*>(tile_ptr) + blockIdx.x;
    return {__ldg(ptr), __ldg(ptr + 1)};
}

// The thread block's tile: starts to copy its items and edges.
__device__ __forceinline__ Tile bring_tile(u32* held, const Bounds& bounds, i64 tile_rows, const int* items,
                                           const int* index) {
    __shared__ int4 held_items[MAX_ITEMS];
    __shared__ __align__(16) int held_index[MAX_EDGES];
    __shared__ int next, arrived[MAX_SLOTS];
    const int2 first = bounds.first, last = bounds.last;
    float* const features = reinterpret_cast<float*>(held + IMAGE);
    for (int i = (int)threadIdx.x; i < last.x - first.x; i += THREADS) copy16(held_items + i, items + 4 * (i64)(first.x + i));
    for (int i = (int)threadIdx.x; i < (last.y - first.y) / 4; i += THREADS) copy16(held_index + 4 * i, index + first.y + 4 * i);
    close_copies();
    for (int i = (int)threadIdx.x; i < MAX_SLOTS; i += THREADS) arrived[i] = 0;
    if (threadIdx.x == 0) next = 0;
    return {held_items, held_index, &next, arrived, last.x - first.x, features, features + tile_rows * CHANNELS};
}

// Starts to copy an image to shared memory.
__device__ __forceinline__ void bring_image(u32* held, const u32* images, int which) {
    const u32* const image = images + which * IMAGE;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < IMAGE / 4; i += THREADS) copy16(held + 4 * i, image + 4 * i);
    close_copies();
}

// The slots of the tile that a thread multiplies: `slot` and the one 8 further, with their rows or -1. A warpgroup takes 64.
struct Strip {
    int slot, row[2];
    bool works;
};

__device__ __forceinline__ Strip strip_of(i64 tile_rows, const int* order) {
    Strip strip;
    strip.slot = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;
    strip.works = (int)threadIdx.x / 128 * 64 < tile_rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int slot = strip.slot + 8 * h;
        strip.row[h] = slot < tile_rows ? __ldg(order + (i64)blockIdx.x * tile_rows + slot) : -1;
    }
    return strip;
}

// Multiplies the strip with an image: `load(h, chunk)` gives 16 bytes of a row, `store(h, i, chunk, sums, bias)` takes the
// thread's i-th 16 of the result. In between all threads wait for the image, which they have copied.
template <class Load, class Store>
__device__ __forceinline__ void multiply_strip(const u32* held, const Strip& strip, const Load& load, const Store& store) {
    const int pos = (int)threadIdx.x % 4;
    float4 numbers[2][STEPS];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            numbers[h][c] = strip.row[h] < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load(h, 4 * c + pos);
        }
    }
    Factors<STEPS> left;
    float raise[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 size = 0;
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            const float4 v = numbers[h][c];
            size = max(max(max(size, size_of(v.x)), max(size_of(v.y), size_of(v.z))), size_of(v.w));
        }
        const int exponent = exponent_of(largest_of_row(size));
        const float lower = lowered(exponent);
        raise[h] = raised(exponent);
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            const float4 v = numbers[h][c];
            set(left, c, h, v.x * lower, v.y * lower);
            set(left, c, h + 2, v.z * lower, v.w * lower);
        }
    }
    wait_copies<0>();
    show_products();
    __syncthreads();
    if (!strip.works) return;
    const u64 right_at = described(held, COLUMNS * 16);
    float sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
    pin(left);
    pin(sums);
    open_products();
#if SPLIT
    // The small products first: there is no room for sums of their own.
    multiply_second(sums, left, right_at, 2 * COLUMNS, HALVES / 4);
    close_products();
    wait_products();
    pin(sums);
    pin(left);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] *= 0x1p-11f;
    pin(sums);
    open_products();
#endif
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_fp16(sums, left.first[j], right_at + j * 2 * COLUMNS, SPLIT || j > 0);
    close_products();
    wait_products();
    pin(sums);
    pin(left);
    const float* const raise_right = reinterpret_cast<const float*>(held + RAISE) + 2 * pos;
    const float* const bias = reinterpret_cast<const float*>(held + BIAS) + 4 * pos;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
        const float2 low = *reinterpret_cast<const float2*>(raise_right + 16 * i);
        const float2 high = *reinterpret_cast<const float2*>(raise_right + 16 * i + 8);
        const float* const x = sums + 8 * i;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (strip.row[h] < 0 || 16 * i + 4 * pos >= CHANNELS) continue;
            store(h, i, 4 * i + pos,
                  make_float4(x[2 * h] * low.x * raise[h], x[2 * h + 1] * low.y * raise[h],
                              x[2 * h + 4] * high.x * raise[h], x[2 * h + 5] * high.y * raise[h]),
                  *reinterpret_cast<const float4*>(bias + 16 * i));
        }
    }
}

// 16 bytes of a row of a matrix [N, CHANNELS].
__device__ __forceinline__ float4* chunk_of(float* rows, int row, int chunk) {
    return reinterpret_cast<float4*>(rows + (i64)row * CHANNELS) + chunk;
}
__device__ __forceinline__ float4 read_chunk(const float* rows, int row, int chunk) {
    return __ldg(reinterpret_cast<const float4*>(rows + (i64)row * CHANNELS) + chunk);
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// A slot whose features are to be read anew, which costs less than the registers that would keep them.
__device__ __forceinline__ int anew(int slot) {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("" : "+r"(slot));
#endif
    return slot;
}

// An item of a lane's row slot.
struct Item {
    int row, begin, count, most;
    u32 which;
    __device__ __forceinline__ int slot() const { return (int)(which & 255u); }
    // Of the chunks of a row: how many, or 0; the state of the first, and of this.
    __device__ __forceinline__ int chunks() const { return (int)(which >> 24); }
    __device__ __forceinline__ int first_state() const { return (int)(which >> 16 & 255u); }
    __device__ __forceinline__ int state() const { return (int)(which >> 8 & 255u); }
    __device__ __forceinline__ bool active() const { return count >= 0; }
};

__device__ __forceinline__ Item next_item(const Tile& tile, const Lanes& l) {
    int first = 0;
    if (threadIdx.x % 32 == 0) first = atomicAdd(tile.next, WARP_ROWS);
    first = __shfl_sync(FULL_MASK, first, 0);
    Item item = {0, 0, -1, -1, 0u};
    if (first >= tile.num_items) return item;
    if (first + l.row_slot < tile.num_items) {
        const int4 given = tile.items[first + l.row_slot];
        item.row = given.x, item.begin = given.y, item.count = given.z - given.y, item.which = (u32)given.w;
    }
    item.most = warp_max(item.count);
    return item;
}

// The rows of UNROLL edges from `begin` on, of which there are `count`; past the last, zeros.
__device__ __forceinline__ void load_rows(Packed (&rows)[UNROLL], const float* x, const Tile& tile, int begin, int count,
                                          const Lanes& l) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        rows[u] = {};
        if (u < count) rows[u] = load_packed(x, tile.index[begin + u], l);
    }
}

// Takes items until none is left: fetch(item) gives what is read of the item's row while those before are worked on,
// step(rows, first edge, item, fetched, sums) takes edges, whose rows come as early, end(item, sums) an item's results.
template <class Sums, class Start, class Fetch, class Step, class End>
__device__ __forceinline__ void for_each_item(const Tile& tile, const float* x, const Lanes& l, const Start& start,
                                              const Fetch& fetch, const Step& step, const End& end) {
    Item item = next_item(tile, l);
    if (item.most < 0) return;
    auto fetched = fetch(item);
    Packed even[UNROLL], odd[UNROLL];
    load_rows(even, x, tile, item.begin, item.count, l);
    Item after = next_item(tile, l);
    auto fetched_after = fetch(after);
    Sums sums = start();
    int i = 0;
    const auto advance = [&](const Packed(&rows)[UNROLL], Packed(&coming)[UNROLL]) {
        const int next = i + UNROLL;
        const bool more = next < item.most;
        load_rows(coming, x, tile, more ? item.begin + next : after.begin, more ? item.count - next : after.count, l);
        step(rows, i, item, fetched, sums);
        i = next;
        if (more) return true;
        end(item, sums);
        if (after.most < 0) return false;
        item = after;
        fetched = fetched_after;
        sums = start();
        i = 0;
        after = next_item(tile, l);
        fetched_after = fetch(after);
        return true;
    };
    // In turn, as copies between registers would take a third of a step.
#pragma unroll 1
    while (advance(even, odd) && advance(odd, even)) {
    }
}

// Whether all chunks of the item's row are there, this one as the last; all lanes of the warp call it.
__device__ __forceinline__ bool arrives_last(const Tile& tile, const Item& item, const Lanes& l) {
    __threadfence_block();
    __syncwarp();
    int before = -1;
    if (item.chunks() > 0 && l.head_lane == 0) before = atomicAdd(tile.arrived + item.slot(), 1);
    before = __shfl_sync(FULL_MASK, before, (int)threadIdx.x % 32 - l.head_lane);
    __threadfence_block();
    return item.chunks() > 0 && before == item.chunks() - 1;
}
