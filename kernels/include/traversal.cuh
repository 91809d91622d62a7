// The traversal of a compressed adjacency: who works on which edges.
//
// A work item is one row, or one chunk of a heavy row (a row with more than max_edges edges). Chunks come first. A warp
// holds WARP_ROWS items; EDGE_SLOTS groups of GROUP_LANES lanes share an item's edges, each with UNROLL edges in
// flight. All lanes of a warp take the same number of steps, so warp collectives use the full mask.
//
// With ORDERED light rows are taken in the order row_order, longest first, so that rows of a thread block end together.
//
// With JOINED the chunks of a row lie in one thread block, which joins their states in shared memory. Otherwise they
// are left in `partial`, for a merge kernel.
//
// With SMEM a thread block owns the nodes node_ptr[b] ... node_ptr[b + 1] - 1, which no edge leaves. Its warps take its
// rows in turn, heavy or not, so that what they gather stays near: in the L1 cache, or with IN_SHARED in shared memory,
// where it is copied once.
//
// A dense graph is swept in num_blocks launches, each over the edges whose other end lies in one block of nodes, so
// that the rows gathered in one launch stay in the L2 cache. Rows hand their state on through `carry`: block b starts
// from what block b - 1 left, the last one finishes the row. Sweeps take neither JOINED nor SMEM.
//
// What is computed is a functor F, a struct with
//
//   F::State, F::Index, F::Loaded   the sums of a row; what is read of the adjacency for an edge (`Index::load(a,
//                                   position)`: the column, the place in input order, or with INDICES rows of so many
//                                   other domains); what a lane gathers in one step
//   F::PREFETCHES                   whether the indices of the next step are read while this one is computed
//   F::HAS_FULL_STEPS               whether steps in which every lane has all its edges get a loop of their own
//   F::RESETS_EMPTY                 whether rows without edges, which read an edge of another row, start over at last
//   begin(a, item)                  reads what belongs to the row
//   empty()                         the state of no edges
//   load(step)                      gathers for the edges of a step
//   step<FULL>(state, loaded, a, item, step, number)   adds the edges of a step, and emits what an edge itself gets;
//                                   with FULL all of them are valid, see is_valid()
//   end(state, item)                after the last step; of rows without edges not called with RESETS_EMPTY
//   merge_slots(state)              joins the edge slots of a row; every slot ends with the result
//   merge<COMPENSATED>(state, buffer, count, begin, end)   adds the states begin ... end - 1, each slot every
//                                   EDGE_SLOTS-th, then joins the slots
//   save(state, buffer, count, i), restore(buffer, count, i)   state i in a buffer for `count` of them
//   store(state, row, writes)       finishes a row; all lanes call it, those with `writes` write the results
//
// store_block_sum() leaves the sum over a thread block of what functors keep beside the rows, for parameters.
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "include/copy.cuh"

#define ITEMS (WARPS * WARP_ROWS)
#define SWEPT (!JOINED && !SMEM)

#define ADJACENCY_PARAMETERS                                                                                         \
    const int *rowptr, const int *col, const int *perm, const int *chunk_row, const int *chunk_begin,                \
        const int *chunk_end, const int *chunk_join, const int *row_order, const int *node_ptr, i64 num_rows,        \
        i64 num_chunks, i64 max_edges, i64 block, i64 num_blocks
#define ADJACENCY                                                                                                    \
    {rowptr, col, perm, chunk_row, chunk_begin, chunk_end, chunk_join, row_order, node_ptr, num_rows, num_chunks,    \
     max_edges, block, num_blocks}

struct Adjacency {
    const int *rowptr, *col, *perm, *chunk_row, *chunk_begin, *chunk_end, *chunk_join, *row_order, *node_ptr;
    i64 num_rows, num_chunks, max_edges, block, num_blocks;
    // With SMEM: the thread block's nodes, and the first edge of their rows.
    int first_node, last_node, first_edge;
#ifdef INDICES
    // Rows of other domains by position.
    const int* index[INDICES];
#endif

    __device__ __forceinline__ int begin(i64 row) const { return rowptr[SWEPT ? row * num_blocks + block : row]; }
    __device__ __forceinline__ int end(i64 row) const { return rowptr[(SWEPT ? row * num_blocks + block : row) + 1]; }
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

// Calls work(item) with the warp's items, one after the other.
template <class Work>
__device__ __forceinline__ void for_each_item(const Adjacency& a, const Lanes& l, const Work& work) {
#if SMEM
    for (int row = a.first_node + threadIdx.x / 32 * WARP_ROWS; row < a.last_node; row += ITEMS) {
        Item item = {row, a.first_edge, a.first_edge, -1, false, false, 0};
        if (row + l.row_slot < a.last_node) {
            item.row = row + l.row_slot;
            item = {item.row, a.begin(item.row), a.end(item.row), -1, true, true, 0};
        }
        work(item);
    }
#else
    work(work_item(a, l));
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

// The edges that a lane works on in one step. Positions past the end repeat the last edge, so that loads need no
// predicate; they are not valid and get weight 0. A row without edges reads an edge of another row: its result is set
// to 0 at the end. To be loaded only when some item of the warp has edges.
template <class Index>
struct Step {
    Index edge[UNROLL];
};

// The column of an edge, and with PERM its place in input order.
template <bool PERM>
struct ColumnIndex {
    int col, perm;

    static __device__ __forceinline__ ColumnIndex load(const Adjacency& a, int position) {
        return {read<IN_SHARED>(a.col + position), PERM ? __ldg(a.perm + position) : 0};
    }
};

__device__ __forceinline__ int edge_position(const Item& item, const Lanes& l, int step, int u) {
    return item.begin + (step * UNROLL + u) * EDGE_SLOTS + l.edge_slot;
}

__device__ __forceinline__ bool is_valid(const Item& item, const Lanes& l, int step, int u) {
    return edge_position(item, l, step, u) < item.end;
}

template <class Index>
__device__ __forceinline__ Step<Index> load_step(const Adjacency& a, const Item& item, const Lanes& l, int step) {
    Step<Index> s;
    const int last = item.end > a.first_edge ? item.end - 1 : a.first_edge;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int position = edge_position(item, l, step, u);
        s.edge[u] = Index::load(a, position < last ? position : last);
    }
    return s;
}

// Adds up the state of an item and leaves it where its row is finished, or finishes the row.
template <class Functor>
__device__ __forceinline__ void complete(typename Functor::State& state, const Adjacency& a, const Item& item,
                                         const Lanes& l, const Functor& f, float* partial, float* carry) {
    f.merge_slots(state);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    bool finishes = item.active && item.chunk < 0 && a.finishes() && l.edge_slot == 0;
    if (SWEPT && item.active && l.edge_slot == 0 && !finishes) {
        const bool light = item.chunk < 0;
        f.save(state, light ? carry : partial, light ? a.num_rows : a.num_chunks, light ? item.row : item.chunk);
    }
#if JOINED
    if (has_chunks(a)) {
        float* states = reinterpret_cast<float*>(dynamic_shared());
        const int slot = item_slot(l);
        if (l.edge_slot == 0) f.save(state, states, ITEMS, slot);
        __syncthreads();
        state = f.empty();
        f.template merge<false>(state, states, ITEMS, slot, slot + item.join);
        finishes = item.first && l.edge_slot == 0;
    }
#endif
    if (a.finishes()) f.store(state, item.row, finishes);
}

template <class Functor>
__device__ __forceinline__ void traverse(const Adjacency& a, const Lanes& l, Functor& f, float* partial, float* carry) {
    typedef typename Functor::Index Index;
    for_each_item(a, l, [&](const Item& item) {
        const int steps = num_steps(item), full_steps = Functor::HAS_FULL_STEPS ? num_full_steps(item) : 0;
        f.begin(a, item);
        const bool carried = !a.starts() && item.active && item.chunk < 0 && l.edge_slot == 0;
        typename Functor::State state = carried ? f.restore(carry, a.num_rows, item.row) : f.empty();
        constexpr bool PREFETCHES = Functor::PREFETCHES && !IN_SHARED;
        Step<Index> next;
        if (PREFETCHES && steps > 0) next = load_step<Index>(a, item, l, 0);
        const auto advance = [&](int number, auto is_full) {
            const Step<Index> now = PREFETCHES ? next : load_step<Index>(a, item, l, number);
            typename Functor::Loaded loaded = f.load(now);
            if (PREFETCHES) next = load_step<Index>(a, item, l, number + 1);
            f.template step<decltype(is_full)::value>(state, loaded, a, item, now, number);
        };
        int number = 0;
#pragma unroll 1
        for (; number < full_steps; ++number) advance(number, Flag<true>());
#pragma unroll 1
        for (; number < steps; ++number) advance(number, Flag<false>());
        if (Functor::RESETS_EMPTY && WARP_ROWS > 1 && item.begin == item.end) {
            state = carried ? f.restore(carry, a.num_rows, item.row) : f.empty();
        } else {
            f.end(state, item);
        }
        complete(state, a, item, l, f, partial, carry);
    });
}

// Heavy rows, whose chunks a merge kernel adds.
#define HEAVY_PARAMETERS                                                                                             \
    const int *heavy_row, const int *heavy_ptr, i64 num_heavy, i64 num_chunks, i64 num_rows, i64 block, i64 num_blocks
#define HEAVY {heavy_row, heavy_ptr, num_heavy, num_chunks, num_rows, block, num_blocks}

struct HeavyRows {
    const int *row, *ptr;
    i64 num_heavy, num_chunks, num_rows, block, num_blocks;
};

// Merges the chunks of each heavy row in chunk order.
template <class Functor>
__device__ __forceinline__ void merge_heavy_rows(const HeavyRows& heavy, const Lanes& l, const Functor& f,
                                                 const float* partial, float* carry) {
    const i64 w = item_of_lane(l);
    const bool active = w < heavy.num_heavy, writes = active && l.edge_slot == 0;
    const int begin = active ? heavy.ptr[w] : 0, end = active ? heavy.ptr[w + 1] : 0, row = active ? heavy.row[w] : 0;
    typename Functor::State state = f.empty();
    if (heavy.block > 0 && writes) state = f.restore(carry, heavy.num_rows, row);
    f.template merge<true>(state, partial, heavy.num_chunks, begin, end);
    // The lanes of a head read the same carried numbers; one of them overwrites these.
    __syncwarp();
    if (heavy.block + 1 >= heavy.num_blocks) {
        f.store(state, row, writes);
    } else if (writes) {
        f.save(state, carry, heavy.num_rows, row);
    }
}

// One sum per thread block at its place in `sums` [..., HEADS, CHANNELS], to which each sweep adds.
__device__ __forceinline__ void store_block_sum(Fragment& sum, float* sums, i64 place, const Adjacency& a,
                                                const Lanes& l) {
    block_sum(sum);
    if (threadIdx.x < GROUP_LANES) {
        if (!a.starts()) add_to(sum, load_fragment_fp32(sums, place, l));
        store_fragment_fp32(sums, place, l, sum);
    }
}

__device__ __forceinline__ void find_nodes(Adjacency& a) {
#if SMEM
    a.first_node = a.node_ptr[blockIdx.x];
    a.last_node = a.node_ptr[blockIdx.x + 1];
#endif
}

#if IN_SHARED
// Replaces the rows first ... last - 1 of an array [rows, ROW] by a copy in shared memory, `used` bytes from its start,
// which then counts the copy too. It is indexed as the whole array; to be read after finish_copies().
template <int ROW, class T>
__device__ __forceinline__ void share(const T*& array, int first, int last, int& used) {
    constexpr int PIECE = ROW * sizeof(T) % 16 == 0 ? 16 : 4;
    char* to = reinterpret_cast<char*>(dynamic_shared()) + used;
    const char* begin = reinterpret_cast<const char*>(array + (i64)first * ROW);
    const int bytes = (last - first) * ROW * (int)sizeof(T);
    for (int i = threadIdx.x * PIECE; i < bytes; i += 32 * WARPS * PIECE) {
        if constexpr (PIECE == 16) {
            copy16(to + i, begin + i);
        } else {
            copy4(to + i, begin + i);
        }
    }
    used += (bytes + 15) / 16 * 16;
    array = reinterpret_cast<const T*>(to) - (i64)first * ROW;
}

template <int ROW, class T>
__device__ __forceinline__ void share_nodes(const T*& array, const Adjacency& a, int& used) {
    share<ROW>(array, a.first_node, a.last_node, used);
}

__device__ __forceinline__ void share_edges(Adjacency& a, int& used) {
    const int begin = a.rowptr[a.first_node], end = a.rowptr[a.last_node];
    a.first_edge = begin;
    share<1>(a.col, begin, end, used);
    share<1>(a.rowptr, a.first_node, a.last_node + 1, used);
}
#endif

__device__ __forceinline__ void finish_copies() {
#if IN_SHARED
    close_copies();
    wait_copies<0>();
    __syncthreads();
#endif
}
