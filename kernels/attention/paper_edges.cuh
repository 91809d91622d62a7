// Edges and lanes of the schedules of DF-GNN (Liu et al., "DF-GNN: Dynamic fusion framework for attention graph neural
// networks on GPUs", LoG 2024). A warp works either on features, in the lanes of storage.cuh, or on edges: then lane i
// takes every EDGE_LANES-th edge, for head i % GROUP_HEADS of the block's group. GROUP_HEADS is at most 32.
// ROW_WARPS warps share a row: 1, or all WARPS of a block.
#define EDGE_LANES (32 / GROUP_HEADS)
#define STEP_EDGES (UNROLL * EDGE_SLOTS)

// A compressed side of the graph with the row of each edge: CSR and COO in one.
struct Edges {
    const int *rowptr, *row, *col, *perm;
};

struct Span {
    int begin, end;
};

__device__ __forceinline__ Span edges_of_row(const Edges& edges, i64 row) {
    return {__ldg(edges.rowptr + row), __ldg(edges.rowptr + row + 1)};
}

// Fragment `part` of `parts` equal ones.
__device__ __forceinline__ Span share_of(const Span& span, int part, int parts) {
    const int size = (span.end - span.begin + parts - 1) / parts;
    const int begin = span.begin + part * size;
    return {begin, min(begin + size, span.end)};
}

// The share of the calling warp when warps of the whole grid take `warp_edges` edges each.
__device__ __forceinline__ Span share_of_warp(i64 num_edges, i64 warp_edges) {
    const i64 begin = min(((i64)blockIdx.x * WARPS + threadIdx.x / 32) * warp_edges, num_edges);
    return {(int)begin, (int)min(begin + warp_edges, num_edges)};
}

// A number per edge and head of the block's group: in shared memory, or in global memory, where STRIDE is HEADS.
template <int STRIDE>
struct Scores {
    float* base;
    int first;

    __device__ __forceinline__ float& at(int edge, int head) const {
        return base[(u64)(u32)(edge - first) * STRIDE + head];
    }
};

__device__ __forceinline__ Scores<HEADS> scores_in_memory(float* base) {
    return {base + (i64)blockIdx.y * GROUP_HEADS, 0};
}

// Heads of the group by number; where lanes go over edges and heads, a lane's own one is group_head().
__device__ __forceinline__ int group_head() { return (int)(threadIdx.x & 31) % GROUP_HEADS; }

__device__ __forceinline__ int edge_lane() { return (int)(threadIdx.x & 31) / GROUP_HEADS; }

__device__ __forceinline__ int first_head() { return (int)blockIdx.y * GROUP_HEADS; }

__device__ __forceinline__ bool has_group_head(int head) {
    return HEADS % GROUP_HEADS == 0 || first_head() + head < HEADS;
}

// The number in the group of the h-th head of a lane that works on features.
__device__ __forceinline__ int number_of(const Lanes& l, int h) { return head_of(l, h) - first_head(); }

// From lanes over heads to lanes over features, and back.
__device__ __forceinline__ HeadValues to_features(float value, const Lanes& l) {
    HeadValues values;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) values.x[h] = __shfl_sync(FULL_MASK, value, number_of(l, h));
    return values;
}

__device__ __forceinline__ float to_heads(const HeadValues& values) {
    float value = 0.0f;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const float other = __shfl_sync(FULL_MASK, values.x[h], group_head() % HEAD_SLOTS * HEAD_LANES);
        if (group_head() / HEAD_SLOTS == h) value = other;
    }
    return value;
}

// The row of a warp and its share of the edges; the first of the warps that share a row writes its results.
__device__ __forceinline__ i64 row_of_warp() { return ((i64)blockIdx.x * WARPS + threadIdx.x / 32) / ROW_WARPS; }

__device__ __forceinline__ bool is_first_warp() { return threadIdx.x / 32 % ROW_WARPS == 0; }

__device__ __forceinline__ Span share_of_row(const Edges& edges, i64 row) {
    return share_of(edges_of_row(edges, row), threadIdx.x / 32 % ROW_WARPS, ROW_WARPS);
}

// Sum or maximum over the warps that share a row, for each lane, in the order of the warps.
template <bool MAX>
__device__ __forceinline__ float row_warps_reduce(float value) {
#if ROW_WARPS > 1
    __shared__ float values[WARPS][32];
    __syncthreads();
    values[threadIdx.x / 32][threadIdx.x & 31] = value;
    __syncthreads();
    value = values[0][threadIdx.x & 31];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
        const float other = values[w][threadIdx.x & 31];
        value = MAX ? fmaxf(value, other) : value + other;
    }
#endif
    return value;
}

// Over all edges of a row, from lanes over edges.
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
    for (int mask = GROUP_HEADS; mask < 32; mask *= 2) value += __shfl_xor_sync(FULL_MASK, value, mask);
    return row_warps_reduce<false>(value);
}

__device__ __forceinline__ float row_max(float value) {
#pragma unroll
    for (int mask = GROUP_HEADS; mask < 32; mask *= 2) value = fmaxf(value, __shfl_xor_sync(FULL_MASK, value, mask));
    return row_warps_reduce<true>(value);
}

// Over all edges of a row, from lanes over features: the edge slots, then the warps. The first warp gets the sum.
__device__ __forceinline__ void row_sum(Fragment& fragment) {
    slot_sum<false>(fragment);
#if ROW_WARPS > 1
    __shared__ float values[WARPS][LANE_HEADS * LANE_ELEMS][32];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LANE_HEADS * LANE_ELEMS; ++i) {
        values[threadIdx.x / 32][i][threadIdx.x & 31] = fragment.x[i / LANE_ELEMS][i % LANE_ELEMS];
    }
    __syncthreads();
    if (!is_first_warp()) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
#pragma unroll
        for (int i = 0; i < LANE_HEADS * LANE_ELEMS; ++i) {
            fragment.x[i / LANE_ELEMS][i % LANE_ELEMS] += values[w][i][threadIdx.x & 31];
        }
    }
#endif
}

// The edges that a lane over features works on in one step. Positions past the end repeat the last edge.
struct RowIndex {
    int row, col, perm;
};

struct Step {
    RowIndex edge[UNROLL];
};

__device__ __forceinline__ int position_of(int first, const Lanes& l, int u) {
    return first + u * EDGE_SLOTS + l.edge_slot;
}

template <bool ROWS_TOO>
__device__ __forceinline__ Step load_step(const Edges& edges, const Span& span, const Lanes& l, int first) {
    Step step;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int position = min(position_of(first, l, u), span.end - 1);
        step.edge[u] = {ROWS_TOO ? __ldg(edges.row + position) : 0, __ldg(edges.col + position),
                        EDGE ? __ldg(edges.perm + position) : 0};
    }
    return step;
}

// Rows are gathered from global memory.
#define IN_SHARED 0
#define NORMS 0
#define SMEM 0
#include "attention/gather.cuh"

// What a warp that walks over edges knows of their target, read again where the row changes.
struct OwnRow {
    int row = -1;
    Packed target, grad;
    HeadValues scalars;

    __device__ __forceinline__ void move_to(const ScoreInputs& in, const storage_t* grad_out, int to, const Lanes& l) {
        if (to == row) return;
        row = to;
        if (HAS_TARGET_VECTOR) target = load_packed(at_lane(in.target, l), row, l);
        if (grad_out != nullptr) grad = load_packed(at_lane(grad_out, l), row, l);
        scalars = load_scalars(in.target_scalars, row, l);
    }
};

// What a score that reads no vectors knows of an edge in one head of the group.
__device__ __forceinline__ Terms scalar_terms(const Edges& edges, const ScoreInputs& in, int row, int position,
                                              int head) {
    const int h = first_head() + head;
    const float own = __ldg(in.target_scalars + (i64)row * HEADS + h);
    const float other = __ldg(in.source_scalars + (i64)__ldg(edges.col + position) * HEADS + h);
    float edge = 0.0f;
#if HAS_EDGE_SCALARS
    edge = __ldg(static_cast<const float*>(in.edge) + (i64)__ldg(edges.perm + position) * HEADS + h);
#endif
    return {0.0f, own, other, edge, Score::factor(in, own)};
}

__device__ __forceinline__ float edge_dropout(const Edges& edges, const ScoreInputs& in, int position, int head) {
#if DROPOUT
    return dropout_factor(*in.seed, (u32)__ldg(edges.perm + position), (u32)(first_head() + head), in.dropout);
#else
    return 1.0f;
#endif
}

// A super node's sum in parts of some hundred edges, so that rounding does not grow with its degree.
__device__ __forceinline__ void fold_sum(Fragment& total, Fragment& acc, int edges_before) {
    constexpr int STEPS = 64;
    if (edges_before / STEP_EDGES % STEPS != STEPS - 1) return;
    add_to(total, acc);
    acc = zero_fragment();
}
