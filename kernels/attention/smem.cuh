// What the rows of a thread block gather, with IN_SHARED as copies in shared memory.
//
// With NORMS (forward) a thread block computes the inverse norms of its nodes: a kernel of their own would
// read all features once more. They lie at the beginning of its dynamic shared memory.
#define HOLDS_NORMS (NORMS && SMEM)

// Shared memory for the norms of so many nodes.
__device__ __forceinline__ int norm_bytes(int nodes) { return HOLDS_NORMS ? (nodes * HEADS * 4 + 15) / 16 * 16 : 0; }

// Finds the thread block's nodes.
__device__ __forceinline__ void find_block(Adjacency& a) {
    find_nodes(a);
    // Rows that are not there read the first edge of the block, whose node has its norm here.
    if (HOLDS_NORMS) a.first_edge = a.rowptr[a.first_node];
}

// For rows of the CSR.
__device__ __forceinline__ void bring_sources(ScoreInputs& in, Adjacency& a) {
    find_block(a);
#if IN_SHARED
    int used = norm_bytes(a.last_node - a.first_node);
    if (HAS_KEY) share_nodes<ROW_STRIDE>(in.key, a, used);
    share_nodes<ROW_STRIDE>(in.value, a, used);
    if (HAS_NODE_SCALARS && !NORMS) share_nodes<HEADS>(in.source_scalars, a, used);
    share_edges(a, used);
#endif
}

// For rows of the CSC.
__device__ __forceinline__ void bring_targets(ScoreInputs& in, const storage_t*& grad_out, const float*& bwd_row_stats,
                                              Adjacency& a) {
    find_block(a);
#if IN_SHARED
    int used = 0;
    if (HAS_TARGET_VECTOR) share_nodes<ROW_STRIDE>(in.target, a, used);
    share_nodes<ROW_STRIDE>(grad_out, a, used);
    share_nodes<4 * HEADS>(bwd_row_stats, a, used);
    if (HAS_NODE_SCALARS) share_nodes<HEADS>(in.target_scalars, a, used);
    share_edges(a, used);
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
