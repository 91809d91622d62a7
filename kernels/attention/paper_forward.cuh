// The three steps of DF-GNN's forward pass, each with its own mapping of threads:
//
//   scores (SDDMM)   edge parallel: a warp walks over its share of the edges, lanes over features
//   softmax          a warp owns a row, lanes over its edges and heads; exponentials take the place of the logits
//   gather (SpMM)    a warp owns a row, lanes over features with 16-byte loads; sums stay in registers
//
// BALANCED, EDGE_SOFTMAX and VECTOR_GATHER switch the three on, each alone. Without one the warp of a row does the step
// feature-parallel: scores and gather one edge at a time with scalar loads, the softmax in every lane over all edges,
// and its exponentials anew in the gather.
#include "attention/paper_edges.cuh"

// Logits of a share of the edges.
template <class Logits>
__device__ __forceinline__ void score_edges(const Edges& edges, const ScoreInputs& in, const Span& span, const Lanes& l,
                                            const Logits& logits) {
#if !HAS_TARGET_VECTOR
    const int head = group_head();
    for (int e = span.begin + edge_lane(); e < span.end; e += EDGE_LANES) {
        if (!has_group_head(head)) continue;
        logits.at(e, head) = Score::logit(scalar_terms(edges, in, __ldg(edges.row + e), e, head), in);
    }
#else
    const Fragment parameters = load_parameter(in, l);
    OwnRow own;
    Step next;
    if (span.begin < span.end) next = load_step<true>(edges, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const Step now = next;
        const Neighbours neighbours = load_neighbours(in, now, l);
        next = load_step<true>(edges, span, l, first + STEP_EDGES);

        HeadValues scalars[UNROLL];
        float product[UNROLL][LANE_HEADS];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            own.move_to(in, nullptr, now.edge[u].row, l);
            scalars[u] = own.scalars;
            const Fragment target = widen(own.target), other = neighbours.scored(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) product[u][h] = score_product(target, other, parameters, in, h);
        }
        head_sum<UNROLL * LANE_HEADS, HEAD_LANES / 2>(&product[0][0]);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const HeadValues factor = logit_factor(in, scalars[u]);
            const int position = position_of(first, l, u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                if (l.head_lane != 0 || position >= span.end || !has_head(l, h)) continue;
                logits.at(position, number_of(l, h)) =
                    Score::logit(neighbours.terms(u, h, product[u][h], scalars[u], factor), in);
            }
        }
    }
#endif
}

#if !BALANCED || !VECTOR_GATHER
__device__ __forceinline__ float load_scalar(const storage_t* address) {
#if STORAGE == 0
    return __ldg(address);
#else
    return from_bits16(__ldg(address));
#endif
}
#endif

#if !BALANCED
// Logits of a row, feature-parallel.
template <class Logits>
__device__ __forceinline__ void score_row(const Edges& edges, const ScoreInputs& in, i64 row, const Logits& logits) {
    const Span span = edges_of_row(edges, row);
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int e = span.begin; e < span.end; ++e) {
        const i64 node = __ldg(edges.col + e);
#pragma unroll 1
        for (int head = 0; head < GROUP_HEADS; ++head) {
            if (!has_group_head(head)) continue;
#if !HAS_TARGET_VECTOR
            const float logit = Score::logit(scalar_terms(edges, in, (int)row, e, head), in);
#else
            const int h = first_head() + head;
            const storage_t* source = (HAS_KEY ? in.key : in.value) + (node * HEADS + h) * CHANNELS;
            float product = 0.0f;
#pragma unroll 1
            for (int c = lane; c < CHANNELS; c += 32) {
                float other = load_scalar(source + c);
#if HAS_EDGE_VECTOR
                const i64 id = __ldg(edges.perm + e);
                other += load_scalar(static_cast<const storage_t*>(in.edge) + (id * HEADS + h) * CHANNELS + c);
#endif
                const float own = load_scalar(in.target + (row * HEADS + h) * CHANNELS + c);
                product = Score::product(product, {own, other, 0.0f}, in);
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) product += __shfl_xor_sync(FULL_MASK, product, mask);
            const float own = HAS_NODE_SCALARS ? in.target_scalars[row * HEADS + h] : 0.0f;
            const float other = HAS_NODE_SCALARS ? in.source_scalars[node * HEADS + h] : 0.0f;
            const float logit = Score::logit({product, own, other, 0.0f, Score::factor(in, own)}, in);
#endif
            if (lane == 0) logits.at(e, head) = logit;
        }
    }
}
#endif

// The softmax of a row in a lane over heads: P = exp(logit - max) * inverse, 0 and 0 without edges.
struct HeadSoftmax {
    float max, inverse;
};

// With EDGE_SOFTMAX a logit makes way for exp(logit - max), times the dropout factor.
template <class Logits>
__device__ __forceinline__ HeadSoftmax softmax_row(const Edges& edges, const ScoreInputs& in, const Span& span,
                                                   const Logits& logits) {
    const int head = group_head(), first = EDGE_SOFTMAX ? edge_lane() : 0, stride = EDGE_SOFTMAX ? EDGE_LANES : 1;
    const int end = has_group_head(head) ? span.end : span.begin;
    float max = negative_infinity(), sum = 0.0f;
    for (int e = span.begin + first; e < end; e += stride) max = fmaxf(max, logits.at(e, head));
    if (EDGE_SOFTMAX) max = row_max(max);
    // Differences from -inf stay 0 instead of NaN.
    if (max == negative_infinity()) max = 0.0f;
    for (int e = span.begin + first; e < end; e += stride) {
        const float weight = exp_difference(logits.at(e, head), max);
        sum += weight;
        if (EDGE_SOFTMAX) logits.at(e, head) = weight * edge_dropout(edges, in, e, head);
    }
    if (EDGE_SOFTMAX) sum = row_sum(sum);
    // Lanes over features read what lanes over edges wrote.
    __syncwarp();
    return {max, sum == 0.0f ? 0.0f : 1.0f / sum};
}

template <class Logits>
__device__ __forceinline__ float gather_weight(const Edges& edges, const ScoreInputs& in, const Logits& logits,
                                               int position, int head, float max) {
    const float score = logits.at(position, head);
    return EDGE_SOFTMAX ? score : exp_difference(score, max) * edge_dropout(edges, in, position, head);
}

#if VECTOR_GATHER
// Sum over a row of weights times values, not yet divided by the sum of the weights; the first warp of the row gets it.
template <class Logits>
__device__ __forceinline__ Fragment gather_row(const Edges& edges, const ScoreInputs& in, const Span& span,
                                               const Lanes& l,
                                           const Logits& logits, const HeadValues& max) {
    Fragment total = zero_fragment(), acc = zero_fragment();
    Step next;
    if (span.begin < span.end) next = load_step<false>(edges, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const Neighbours neighbours = load_neighbours(in, next, l);
        next = load_step<false>(edges, span, l, first + STEP_EDGES);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment content = neighbours.content(u);
            const int position = position_of(first, l, u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                float weight = 0.0f;
                if (position < span.end && has_head(l, h)) {
                    weight = gather_weight(edges, in, logits, position, number_of(l, h), max.x[h]);
                }
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) acc.x[h][c] = fmaf(weight, content.x[h][c], acc.x[h][c]);
            }
        }
        fold_sum(total, acc, first - span.begin);
    }
    add_to(total, acc);
    row_sum(total);
    return total;
}
#else
// The output of a row with scalar loads: the outer loop over features, the inner one over edges.
template <class Logits>
__device__ __forceinline__ void gather_row_scalar(const Edges& edges, const ScoreInputs& in, i64 row, const Span& span,
                                                  const Logits& logits, const HeadSoftmax& own, storage_t* out,
                                                  float* out_fp32) {
#pragma unroll 1
    for (int first = 0; first < GROUP_HEADS * CHANNELS; first += 32) {
        const int c = first + (threadIdx.x & 31), head = c / CHANNELS;
        const float max = __shfl_sync(FULL_MASK, own.max, head % 32);
        const float inverse = __shfl_sync(FULL_MASK, own.inverse, head % 32);
        if (head >= GROUP_HEADS || !has_group_head(head)) continue;
        const i64 offset = first_head() * CHANNELS + c;
        float acc = 0.0f;
#pragma unroll 1
        for (int e = span.begin; e < span.end; ++e) {
            float content = load_scalar(in.value + (i64)__ldg(edges.col + e) * ROW_STRIDE + offset);
#if HAS_EDGE_VECTOR
            const i64 id = __ldg(edges.perm + e);
            content += load_scalar(static_cast<const storage_t*>(in.edge) + id * ROW_STRIDE + offset);
#endif
            acc = fmaf(gather_weight(edges, in, logits, e, head, max), content, acc);
        }
        acc *= inverse;
#if STORAGE == 0
        out[row * ROW_STRIDE + offset] = acc;
#else
        out[row * ROW_STRIDE + offset] = to_bits16(acc);
#endif
        if (out_fp32 != nullptr) out_fp32[row * ROW_STRIDE + offset] = acc;
    }
}
#endif

// Softmax and gather of a row, with its results.
template <class Logits>
__device__ __forceinline__ void attend_row(const Edges& edges, const ScoreInputs& in, i64 row, const Lanes& l,
                                           const Logits& logits, storage_t* out, float* row_stats, float* out_fp32) {
    const Span span = share_of_row(edges, row);
    const HeadSoftmax own = softmax_row(edges, in, span, logits);
    if (row_stats != nullptr && is_first_warp() && edge_lane() == 0 && has_group_head(group_head())) {
        reinterpret_cast<float2*>(row_stats)[row * HEADS + first_head() + group_head()] =
            make_float2(own.max, own.inverse);
    }
#if VECTOR_GATHER
    const HeadValues max = to_features(own.max, l), inverse = to_features(own.inverse, l);
    Fragment acc = gather_row(edges, in, span, l, logits, max);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) acc.x[h][c] *= inverse.x[h];
    }
    if (!is_first_warp() || l.edge_slot != 0) return;
    store_fragment(out, (int)row, l, acc);
    if (out_fp32 != nullptr) store_fragment_fp32(out_fp32, row, l, acc);
#else
    gather_row_scalar(edges, in, row, span, logits, own, out, out_fp32);
#endif
}
