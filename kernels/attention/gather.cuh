// Whether norms are read; otherwise they are found from the rows that are read.
#define READS_NORMS (!NORMS || SMEM)

// What a row reads in one step of UNROLL edges and of the nodes at their other ends. Vectors that a variant does not
// read are left out of the text: the compiler would unroll less for them.
struct EdgeTerms {
#if HAS_EDGE_VECTOR
    Packed edges[UNROLL];
#elif HAS_EDGE_ROWS
    PackedOf<EdgeRow> edges[UNROLL];
#endif
    HeadValues scalars[UNROLL], edge_scalars[UNROLL];

    __device__ __forceinline__ float scalar(int u, int h) const { return HAS_NODE_SCALARS ? scalars[u].x[h] : 0.0f; }

    __device__ __forceinline__ float edge_scalar(int u, int h) const {
        return HAS_EDGE_SCALARS ? edge_scalars[u].x[h] : 0.0f;
    }

    __device__ __forceinline__ void add_edge(Fragment& fragment, int u) const {
#if HAS_EDGE_VECTOR
        add_to(fragment, widen(edges[u]));
#endif
    }

    // What the score knows of edge u in head h, given its reduced product and what the row contributes.
    __device__ __forceinline__ Terms terms(int u, int h, float product, const HeadValues& own,
                                           const HeadValues& factor) const {
        return {product, own.x[h], scalar(u, h), edge_scalar(u, h), factor.x[h]};
    }

    template <class EdgeStep>
    __device__ __forceinline__ void load_scalars(int u, const float* base, const void* edge, const EdgeStep& step,
                                                 const Lanes& l) {
        if (HAS_NODE_SCALARS && READS_NORMS) scalars[u] = load_heads<IN_SHARED || NORMS>(base, step.edge[u].col, l);
        if (HAS_EDGE_SCALARS) edge_scalars[u] = load_heads(static_cast<const float*>(edge), step.edge[u].perm, l);
    }

    template <class EdgeStep>
    __device__ __forceinline__ void load_edge(int u, const void* edge, const EdgeStep& step, const Lanes& l) {
#if HAS_EDGE_VECTOR
        edges[u] = load_packed(at_lane(static_cast<const storage_t*>(edge), l), step.edge[u].perm, l);
#elif HAS_EDGE_ROWS
        const storage_t* base = opaque(static_cast<const storage_t*>(edge) + edge_row_offset(l));
        edges[u] = load_packed<false, EDGE_CHANNELS, EdgeRow>(base, step.edge[u].perm, l);
#endif
    }
};

// Features of a node that an edge leads to, with IN_SHARED from shared memory.
__device__ __forceinline__ Packed load_node(const storage_t* base, int node, const Lanes& l) {
    return load_packed<IN_SHARED>(at_lane<IN_SHARED>(base, l), node, l);
}

// What a row of the CSR reads of its sources.
struct Neighbours : EdgeTerms {
    Packed values[UNROLL];
#if HAS_KEY
    Packed keys[UNROLL];
#endif

    // The vector the score takes: key or value, plus the edge's.
    __device__ __forceinline__ Fragment scored(int u) const {
#if HAS_KEY
        Fragment fragment = widen(keys[u]);
#else
        Fragment fragment = widen(values[u]);
#endif
        add_edge(fragment, u);
        return fragment;
    }

    // The vector that is averaged: the value, with EDGE_IN_VALUE plus the edge's.
    __device__ __forceinline__ Fragment content(int u) const {
        Fragment fragment = widen(values[u]);
        if (EDGE_IN_VALUE) add_edge(fragment, u);
        return fragment;
    }
};

template <class EdgeStep>
__device__ __forceinline__ Neighbours load_neighbours(const ScoreInputs& in, const EdgeStep& step, const Lanes& l) {
    Neighbours n;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        n.load_scalars(u, in.source_scalars, in.edge, step, l);
#if HAS_KEY
        n.keys[u] = load_node(in.key, step.edge[u].col, l);
#endif
        n.values[u] = load_node(in.value, step.edge[u].col, l);
        n.load_edge(u, in.edge, step, l);
    }
    return n;
}

// The score's products of a step, reduced over the lanes of a head; a score without vectors has none.
__device__ __forceinline__ void score_products(float (&product)[UNROLL][LANE_HEADS], const Neighbours& neighbours,
                                               const Fragment& own, const FragmentOf<EdgeTargets>& edge_target,
                                               const Fragment& parameter, const ScoreInputs& in) {
#if HAS_TARGET_VECTOR
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const Fragment other = neighbours.scored(u);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            product[u][h] = score_product(own, other, parameter, in, h);
#if HAS_EDGE_ROWS
            product[u][h] = add_row_product(product[u][h], edge_target, widen(neighbours.edges[u]), in, h);
#endif
        }
    }
    head_sum<UNROLL * LANE_HEADS, HEAD_LANES / 2>(&product[0][0]);
#endif
}

#if !READS_NORMS
// The same with the norms of the sources, from one exchange between lanes: a second one would double the wait.
__device__ __forceinline__ void score_products_and_norms(float (&product)[UNROLL][LANE_HEADS], Neighbours& neighbours,
                                                         const Fragment& own) {
    float sums[UNROLL][LANE_HEADS][2];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const Fragment other = neighbours.scored(u);
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            sums[u][h][0] = lane_dot(own, other, h);
            sums[u][h][1] = lane_dot(other, other, h);
        }
    }
    head_sum<2 * UNROLL * LANE_HEADS, HEAD_LANES / 2>(&sums[0][0][0]);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
            product[u][h] = sums[u][h][0];
            neighbours.scalars[u].x[h] = inverse_norm(sums[u][h][1]);
        }
    }
}
#endif
