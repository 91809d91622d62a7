// What a row of the CSR reads of its neighbours in one step: value, key, edge and scalar terms of UNROLL sources. With
// IN_SHARED `in` has them in shared memory, but for the edges.
struct Neighbours {
    Packed values[UNROLL];
#if HAS_KEY
    Packed keys[UNROLL];
#endif
#if HAS_EDGE_VECTOR
    Packed edges[UNROLL];
#endif
#if HAS_NODE_SCALARS
    HeadValues scalars[UNROLL];
#endif
#if HAS_EDGE_SCALARS
    HeadValues edge_scalars[UNROLL];
#endif

    __device__ __forceinline__ Part edge(int u) const {
#if HAS_EDGE_VECTOR
        return widen(edges[u]);
#else
        return zero_part();
#endif
    }

    // The vector the score takes: key or value, plus the edge's.
    __device__ __forceinline__ Part scored(int u) const {
#if HAS_KEY
        Part part = widen(keys[u]);
#else
        Part part = widen(values[u]);
#endif
#if HAS_EDGE_VECTOR
        add_to(part, widen(edges[u]));
#endif
        return part;
    }

    // The vector that is averaged: the value, plus the edge's for the dot score.
    __device__ __forceinline__ Part content(int u) const {
        Part part = widen(values[u]);
#if HAS_EDGE_VECTOR && HAS_KEY
        add_to(part, widen(edges[u]));
#endif
        return part;
    }

    __device__ __forceinline__ float scalar(int u, int h) const {
#if HAS_NODE_SCALARS
        return scalars[u].x[h];
#else
        return 0.0f;
#endif
    }

    __device__ __forceinline__ float edge_scalar(int u, int h) const {
#if HAS_EDGE_SCALARS
        return edge_scalars[u].x[h];
#else
        return 0.0f;
#endif
    }
};

__device__ __forceinline__ Neighbours load_neighbours(const ScoreInputs& in, const Step& step, const Lanes& l) {
    Neighbours n;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#if HAS_NODE_SCALARS
        n.scalars[u] = load_heads<IN_SHARED>(in.source_scalars, step.node[u], l);
#endif
#if HAS_EDGE_SCALARS
        n.edge_scalars[u] = load_heads(static_cast<const float*>(in.edge), step.edge[u], l);
#endif
#if HAS_KEY
        n.keys[u] = load_packed<IN_SHARED>(at_lane<IN_SHARED>(in.key, l), step.node[u], l);
#endif
        n.values[u] = load_packed<IN_SHARED>(at_lane<IN_SHARED>(in.value, l), step.node[u], l);
#if HAS_EDGE_VECTOR
        n.edges[u] = load_packed(at_lane(static_cast<const storage_t*>(in.edge), l), step.edge[u], l);
#endif
    }
    return n;
}

#if RESIDENT
// What the rows of the thread block gather, with IN_SHARED as copies.
__device__ __forceinline__ ScoreInputs bring_sources(const ScoreInputs& in, Adjacency& a) {
    ScoreInputs gathered = in;
    find_nodes(a);
#if IN_SHARED
    int used = 0;
    if (HAS_KEY) gathered.key = share<ROW_STRIDE>(in.key, a.first_node, a.last_node, used);
    gathered.value = share<ROW_STRIDE>(in.value, a.first_node, a.last_node, used);
    if (HAS_NODE_SCALARS) gathered.source_scalars = share<HEADS>(in.source_scalars, a.first_node, a.last_node, used);
    share_edges(a, used);
#endif
    return gathered;
}
#endif
