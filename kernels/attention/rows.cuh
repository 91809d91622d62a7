// The row schedule: who works on which edges.
//
// A work item is one row of a compressed adjacency, or one chunk of a heavy row (a row with more than max_edges edges).
// Chunks come first. A warp holds WARP_ROWS items; EDGE_SLOTS groups of GROUP_LANES lanes share an item's edges, each
// with UNROLL edges in flight. All lanes of a warp take the same number of steps, so warp collectives use the full
// mask.
//
// With ORDERED light rows are taken in the order row_order, longest first, so that rows of a thread block end together.
//
// With JOINED the chunks of a row lie in one thread block, which joins their states in shared memory. Otherwise they
// are left in `partial`, for a merge kernel.
//
// With RESIDENT a thread block owns the nodes node_ptr[b] ... node_ptr[b + 1] - 1, which no edge leaves. Its warps take
// its rows in turn, heavy or not, so that what they gather stays near: in the L1 cache, or with IN_SHARED in shared
// memory, where it is copied once.
//
// A dense graph is swept in num_blocks launches, each over the edges whose other end lies in one block of nodes, so
// that the rows gathered in one launch stay in the L2 cache. Rows hand their state on through `carry`: block b starts
// from what block b - 1 left, the last one finishes the row. Sweeps take neither JOINED nor RESIDENT.
#include "include/copy.cuh"

#define ITEMS (WARPS * WARP_ROWS)
#define SWEPT (!JOINED && !RESIDENT)

#define ADJACENCY_PARAMETERS                                                                                         \
    const int *ptr, const int *index, const int *edge_id, const int *chunk_row, const int *chunk_begin,              \
        const int *chunk_end, const int *chunk_join, const int *row_order, const int *node_ptr, i64 num_rows,        \
        i64 num_chunks, i64 max_edges, i64 block, i64 num_blocks
#define ADJACENCY                                                                                                    \
    {ptr, index, edge_id, chunk_row, chunk_begin, chunk_end, chunk_join, row_order, node_ptr, num_rows, num_chunks,  \
     max_edges, block, num_blocks}

struct Adjacency {
    const int *ptr, *index, *edge_id, *chunk_row, *chunk_begin, *chunk_end, *chunk_join, *row_order, *node_ptr;
    i64 num_rows, num_chunks, max_edges, block, num_blocks;
    // With RESIDENT: the thread block's nodes, and the first edge of their rows.
    int first_node, last_node, first_edge;

    __device__ __forceinline__ int begin(i64 row) const { return SWEPT ? ptr[row * num_blocks + block] : ptr[row]; }
    __device__ __forceinline__ int end(i64 row) const {
        return SWEPT ? ptr[row * num_blocks + block + 1] : ptr[row + 1];
    }
    __device__ __forceinline__ bool starts() const { return !SWEPT || block == 0; }
    __device__ __forceinline__ bool finishes() const { return !SWEPT || block + 1 == num_blocks; }
};

struct Item {
    int row, begin, end, chunk;
    bool active, first;
    // With JOINED: of the first chunk of a row the number of them all, else 0.
    int join;
};

__device__ __forceinline__ Item work_item(const Adjacency& a, const Lanes& l) {
    const i64 w = item_of_lane(l);
    Item item = {0, 0, 0, -1, false, false, 0};
    if (w < a.num_chunks) {
        item = {a.chunk_row[w], a.chunk_begin[w], a.chunk_end[w], (int)w, true, false, 0};
#if JOINED
        item.join = a.chunk_join[w];
        item.first = item.join > 0;
#else
        item.first = item.begin == a.begin(item.row);
#endif
    } else if (w - a.num_chunks < a.num_rows) {
        const int place = (int)(w - a.num_chunks);
        const int row = ORDERED ? __ldg(a.row_order + place) : place;
        const int begin = a.begin(row), end = a.end(row);
        if (end - begin <= a.max_edges) item = {row, begin, end, -1, true, true, 0};
    }
    return item;
}

// Calls walk(item) with the warp's items, one after the other.
template <class Walk>
__device__ __forceinline__ void for_each_item(const Adjacency& a, const Lanes& l, const Walk& walk) {
#if RESIDENT
    for (int row = a.first_node + threadIdx.x / 32 * WARP_ROWS; row < a.last_node; row += ITEMS) {
        Item item = {row, a.first_edge, a.first_edge, -1, false, false, 0};
        if (row + l.row_slot < a.last_node) {
            item.row = row + l.row_slot;
            item = {item.row, a.begin(item.row), a.end(item.row), -1, true, true, 0};
        }
        walk(item);
    }
#else
    walk(work_item(a, l));
#endif
}

__device__ __forceinline__ uint4* dynamic_shared() {
    extern __shared__ uint4 memory[];
    return memory;
}

#if JOINED
// Whether this thread block works on chunks, all of it.
__device__ __forceinline__ bool has_chunks(const Adjacency& a) { return (i64)blockIdx.x * ITEMS < a.num_chunks; }

__device__ __forceinline__ int item_slot(const Lanes& l) { return threadIdx.x / 32 * WARP_ROWS + l.row_slot; }
#endif

__device__ __forceinline__ int num_steps(const Item& item) {
    return warp_max((item.end - item.begin + UNROLL * EDGE_SLOTS - 1) / (UNROLL * EDGE_SLOTS));
}

// The first steps, in which every lane of the warp has UNROLL edges.
__device__ __forceinline__ int num_full_steps(const Item& item) {
    return -warp_max(-((item.end - item.begin) / (UNROLL * EDGE_SLOTS)));
}

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// The edges a lane works on in one step. Positions past the end repeat the last edge, so that loads need no predicate;
// they are not valid and get weight 0. A row without edges reads an edge of another row: its result is set to 0 at the
// end. To be called only when some item of the warp has edges.
struct Step {
    int node[UNROLL], edge[UNROLL];
};

__device__ __forceinline__ int edge_position(const Item& item, const Lanes& l, int step, int u) {
    return item.begin + (step * UNROLL + u) * EDGE_SLOTS + l.edge_slot;
}

__device__ __forceinline__ bool is_valid(const Item& item, const Lanes& l, int step, int u) {
    return edge_position(item, l, step, u) < item.end;
}

__device__ __forceinline__ Step load_step(const Adjacency& a, const Item& item, const Lanes& l, int step) {
    Step s;
    const int last = item.end > a.first_edge ? item.end - 1 : a.first_edge;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int position = edge_position(item, l, step, u);
        const int clamped = position < last ? position : last;
        s.node[u] = read<IN_SHARED>(a.index + clamped);
        s.edge[u] = EDGE ? __ldg(a.edge_id + clamped) : 0;
    }
    return s;
}

// Dropout factors of a step. The lanes of a head share the draws: lane i computes number i, a shuffle hands it on.
__device__ __forceinline__ void load_dropout(const Adjacency& a, const Item& item, const Lanes& l, int step, u64 seed,
                                             float p, float (&factor)[UNROLL][LANE_HEADS]) {
#if DROPOUT
    constexpr int COUNT = UNROLL * LANE_HEADS;
    const int first_lane = (threadIdx.x & 31) - l.head_lane;
#pragma unroll
    for (int base = 0; base < COUNT; base += HEAD_LANES) {
        const int number = base + l.head_lane;
        const int position = edge_position(item, l, step, number / LANE_HEADS);
        float mine = 0.0f;
        if (number < COUNT && position < item.end) {
            mine = dropout_factor(seed, (u32)a.edge_id[position], (u32)head_of(l, number % LANE_HEADS), p);
        }
#pragma unroll
        for (int i = 0; i < HEAD_LANES; ++i) {
            if (base + i < COUNT) {
                factor[(base + i) / LANE_HEADS][(base + i) % LANE_HEADS] = __shfl_sync(FULL_MASK, mine, first_lane + i);
            }
        }
    }
#else
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) factor[u][h] = 1.0f;
    }
#endif
}

// Heavy rows, whose chunks a merge kernel adds.
#define HEAVY_PARAMETERS                                                                                             \
    const int *heavy_row, const int *heavy_ptr, i64 num_heavy, i64 num_chunks, i64 num_rows, i64 block, i64 num_blocks
#define HEAVY {heavy_row, heavy_ptr, num_heavy, num_chunks, num_rows, block, num_blocks}

struct HeavyRows {
    const int *row, *ptr;
    i64 num_heavy, num_chunks, num_rows, block, num_blocks;

    __device__ __forceinline__ bool starts() const { return block <= 0; }
    __device__ __forceinline__ bool finishes() const { return block + 1 >= num_blocks; }
};

// The row of a lane, and its chunks.
struct HeavyRow {
    int begin, end, row;
    bool active;
};

__device__ __forceinline__ HeavyRow heavy_row_of(const HeavyRows& heavy, const Lanes& l) {
    const i64 w = item_of_lane(l);
    const bool active = w < heavy.num_heavy;
    return {active ? heavy.ptr[w] : 0, active ? heavy.ptr[w + 1] : 0, active ? heavy.row[w] : 0, active};
}
