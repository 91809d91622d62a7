// From the ends of edges to the edges by target (CSR) and by source (CSC), without a word to the host: graph_count, a
// running sum of the counts, graph_place, graph_order.
//
// An edge is left out if one of its ends is out of range or, with LOOPS, if it is a self-loop. With LOOPS each of the
// first num_loops nodes gets a self-loop, numbered behind the edges. Edges find their places in any order and are sorted
// by number within each row at last, so that results are the same in every run.
//
// With PADDED the sizes are those of room for a batch, whose own numbers of edges and of nodes are read from `batch`: ids
// are to be below these, and what is behind them has no edges.
//
// Reports lie in memory of the host: of targets, then of sources, whether an id was out of range, one that was, and the
// number of nodes; then whether a row had more than LONG_ROW edges. Whichever thread writes last is right.
typedef long long i64;

#if WIDE_IDS
typedef i64 id_t;
#else
typedef int id_t;
#endif

#define THREAD ((i64)blockIdx.x * blockDim.x + threadIdx.x)
#define FULL_MASK 0xffffffffu
#define WARPS 8
#define WARP_ROW 128
#define LONG_ROW_REPORT 6

#if PADDED
#define BATCH_ARGUMENT , const i64* batch
#define OWN_SIZE(place, room) batch[place]
#else
#define BATCH_ARGUMENT
#define OWN_SIZE(place, room) (room)
#endif

__device__ __forceinline__ bool is_out_of_range(i64 id, i64 size, volatile i64* report) {
    if (id >= 0 && id < size) return false;
    report[1] = id;
    report[2] = size;
    __threadfence_system();
    report[0] = 1;
    return true;
}

// Counts the edges of each target, then of each source. `ranks` gets how many a count had before, or -1 for an edge that
// is left out: of each edge at its target, then of each at its source.
extern "C" __global__ void graph_count(const id_t* target, const id_t* source, i64 num_edges, i64 num_loops,
                                       i64 num_dst, i64 num_src, int* counts, int* ranks, i64* report BATCH_ARGUMENT) {
    const i64 i = THREAD, total = num_edges + num_loops;
    if (i >= total) return;
    i64 t = i - num_edges, s = t;
    if (i < num_edges ? i >= OWN_SIZE(0, num_edges) : t >= OWN_SIZE(1, num_loops)) {
        ranks[i] = -1;
        return;
    }
    if (i < num_edges) {
        t = target[i];
        s = source[i];
        const bool bad_target = is_out_of_range(t, OWN_SIZE(1, num_dst), report);
        const bool bad_source = is_out_of_range(s, OWN_SIZE(1, num_src), report + 3);
        if (bad_target || bad_source || (LOOPS && t == s)) {
            ranks[i] = -1;
            return;
        }
    }
    ranks[i] = atomicAdd(counts + t, 1);
    ranks[total + i] = atomicAdd(counts + num_dst + s, 1);
}

// Puts the number of each edge into its row, from the running sums `ends` of the counts.
extern "C" __global__ void graph_place(const id_t* target, const id_t* source, i64 num_edges, i64 num_loops,
                                       i64 num_dst, i64 num_src, const int* ends, const int* ranks, int* rowptr,
                                       int* perm, int* source_rowptr, int* source_perm) {
    const i64 i = THREAD, total = num_edges + num_loops;
    const int* source_ends = ends + num_dst;
    const int before = num_dst > 0 ? ends[num_dst - 1] : 0;
    if (i <= num_dst) rowptr[i] = i > 0 ? ends[i - 1] : 0;
    if (i <= num_src) source_rowptr[i] = i > 0 ? source_ends[i - 1] - before : 0;
    if (i >= total || ranks[i] < 0) return;
    const i64 t = i < num_edges ? (i64)target[i] : i - num_edges, s = i < num_edges ? (i64)source[i] : t;
    perm[(t > 0 ? ends[t - 1] : 0) + ranks[i]] = (int)i;
    source_perm[(s > 0 ? source_ends[s - 1] - before : 0) + ranks[total + i]] = (int)i;
}

struct Row {
    const id_t* other_end;
    int *perm, *col;
    int count;
};

__device__ __forceinline__ int end_of(const Row& row, int number, i64 num_edges) {
    return number < num_edges ? (int)row.other_end[number] : number - (int)num_edges;
}

// Sorts the numbers of a row, all threads of the block together: a bitonic sort whose numbers past the end are infinite.
__device__ __forceinline__ void sort_by_block(int* numbers, int count) {
    const auto exchange = [&](i64 low, i64 high) {
        if (high >= count) return;
        const int a = numbers[low], b = numbers[high];
        if (a > b) {
            numbers[low] = b;
            numbers[high] = a;
        }
    };
    for (i64 size = 2; size < 2 * (i64)count; size *= 2) {
        for (i64 span = size / 2; span > 0; span /= 2) {
            __syncthreads();
            for (i64 i = threadIdx.x; i / span * 2 * span + i % span < count; i += blockDim.x) {
                const i64 first = i / span * 2 * span, place = i % span;
                exchange(first + place, 2 * span == size ? first + size - 1 - place : first + span + place);
            }
        }
    }
    __syncthreads();
}

// Sorts the numbers of a row of up to 32 * PARTS edges, the threads of a warp together, and writes the other ends. The
// place of a number is how many of the row are smaller.
template <int PARTS>
__device__ __forceinline__ void sort_by_warp(const Row& row, i64 num_edges) {
    const int lane = threadIdx.x % 32;
    int numbers[PARTS], places[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int i = 32 * part + lane;
        numbers[part] = i < row.count ? row.perm[i] : 0;
        places[part] = 0;
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        for (int k = 0; k < 32 && 32 * part + k < row.count; ++k) {
            const int other = __shfl_sync(FULL_MASK, numbers[part], k);
#pragma unroll
            for (int own = 0; own < PARTS; ++own) places[own] += other < numbers[own];
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (32 * part + lane >= row.count) continue;
        row.perm[places[part]] = numbers[part];
        row.col[places[part]] = end_of(row, numbers[part], num_edges);
    }
}

// Sorts the numbers of the edges within each row, and writes the other end of each edge. A warp takes a row of up to
// WARP_ROW edges, the block longer ones.
extern "C" __global__ void graph_order(const id_t* target, const id_t* source, i64 num_edges, i64 num_dst, i64 num_src,
                                       const int* rowptr, int* perm, int* col, const int* source_rowptr,
                                       int* source_perm, int* source_col, volatile i64* report) {
    const auto row_of = [&](i64 row) {
        Row none = {source, perm, col, 0};
        if (row >= num_dst + num_src) return none;
        const bool by_source = row >= num_dst;
        const int* begins = by_source ? source_rowptr + (row - num_dst) : rowptr + row;
        const int begin = begins[0];
        const Row found = {by_source ? target : source, (by_source ? source_perm : perm) + begin,
                           (by_source ? source_col : col) + begin, begins[1] - begin};
        return found;
    };
    const i64 first = (i64)blockIdx.x * WARPS;
    const Row own = row_of(first + threadIdx.x / 32);
    if (own.count <= 32) sort_by_warp<1>(own, num_edges);
    else if (own.count <= 64) sort_by_warp<2>(own, num_edges);
    else if (own.count <= WARP_ROW) sort_by_warp<WARP_ROW / 32>(own, num_edges);
    for (int k = 0; k < WARPS; ++k) {
        const Row row = row_of(first + k);
        if (row.count <= WARP_ROW) continue;
        if (row.count > LONG_ROW) report[LONG_ROW_REPORT] = 1;
        sort_by_block(row.perm, row.count);
        for (int i = threadIdx.x; i < row.count; i += blockDim.x) row.col[i] = end_of(row, row.perm[i], num_edges);
    }
}
