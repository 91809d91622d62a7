// What the rows of a thread block gather, with IN_SHARED as copies in shared memory.
//
// With NORMS (forward, cosine score) a thread block computes the inverse norms of its nodes: a kernel of their own would
// read all features once more. They lie at the beginning of its dynamic shared memory.
#define HOLDS_NORMS (NORMS && RESIDENT)

// Shared memory for the norms of so many nodes.
__device__ __forceinline__ int norm_bytes(int nodes) { return HOLDS_NORMS ? (nodes * HEADS * 4 + 15) / 16 * 16 : 0; }

#if IN_SHARED
static_assert(PROJECTIONS == 1, "rows are copied as they lie, one after the other");

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
    const int begin = a.ptr[a.first_node], end = a.ptr[a.last_node];
    a.first_edge = begin;
    share<1>(a.index, begin, end, used);
    share<1>(a.ptr, a.first_node, a.last_node + 1, used);
}
#endif

__device__ __forceinline__ void find_nodes(Adjacency& a) {
#if RESIDENT
    a.first_node = a.node_ptr[blockIdx.x];
    a.last_node = a.node_ptr[blockIdx.x + 1];
#endif
#if HOLDS_NORMS
    // Rows that are not there read the first edge of the block, whose node has its norm here.
    a.first_edge = a.ptr[a.first_node];
#endif
}

// For rows of the CSR.
__device__ __forceinline__ void bring_sources(ScoreInputs& in, Adjacency& a) {
    find_nodes(a);
#if IN_SHARED
    int used = norm_bytes(a.last_node - a.first_node);
    if (HAS_KEY) share_nodes<ROW_STRIDE>(in.key, a, used);
    share_nodes<ROW_STRIDE>(in.value, a, used);
    if (HAS_NODE_SCALARS && !NORMS) share_nodes<HEADS>(in.source_scalars, a, used);
    share_edges(a, used);
#endif
}

// For rows of the CSC.
__device__ __forceinline__ void bring_targets(ScoreInputs& in, const storage_t*& grad_out, const float*& records,
                                              Adjacency& a) {
    find_nodes(a);
#if IN_SHARED
    int used = 0;
    if (HAS_TARGET_VECTOR) share_nodes<ROW_STRIDE>(in.target, a, used);
    share_nodes<ROW_STRIDE>(grad_out, a, used);
    share_nodes<4 * HEADS>(records, a, used);
    if (HAS_NODE_SCALARS) share_nodes<HEADS>(in.target_scalars, a, used);
    share_edges(a, used);
#endif
}

__device__ __forceinline__ void finish_copies() {
#if IN_SHARED
    close_copies();
    wait_copies<0>();
    __syncthreads();
#endif
}

// Computes the norms of HOLDS_NORMS, which `in` then reads and `results` [num_sources, HEADS] gets; after
// finish_copies().
__device__ __forceinline__ void find_norms(ScoreInputs& in, const Adjacency& a, const Lanes& l, float* results) {
#if HOLDS_NORMS
    static_assert(EDGE_SLOTS == 1, "a group of lanes takes the whole row of one node");
    float* const norms = reinterpret_cast<float*>(dynamic_shared()) - (i64)a.first_node * HEADS;
    const storage_t* const base = at_lane<IN_SHARED>(in.value, l);
    // More loads at once.
#pragma unroll 2
    for (int first = a.first_node + threadIdx.x / 32 * WARP_ROWS; first < a.last_node; first += ITEMS) {
        const bool active = first + l.row_slot < a.last_node;
        const int row = active ? first + l.row_slot : first;
        const HeadValues inverse = inverse_norms(widen(load_packed<IN_SHARED>(base, row, l)));
        if (!active) continue;
        store_heads(norms, row, l, inverse);
        store_heads(results, row, l, inverse);
    }
    in.source_scalars = norms;
    __syncthreads();
#endif
}
