// The steps of DF-GNN's backward pass over targets (appendix B): SDDMM, softmax backward, SpMM.
//
//   scores     logits S and dP_ij = <dO_i, v_j>, edge parallel. S is computed anew and P follows from the maximum and
//              the inverse sum of the row, so that the forward pass leaves nothing per edge
//   softmax    P~ = P D and the gradient G of what the score is made of, a warp per row, lanes over edges and heads:
//              dS = P~ dP - P delta with delta_i = <dO_i, O_i>, which needs no sum over the edges, and
//                dot     G = scale dS          gradient of <q_i, k_j>
//                cosine  G = n_i n_j dS        that of <x_i, x_j>, less the factor beta
//                add     G = leaky'(z) dS      gradient of z = l_i + r_j + t_ij
//   gather     sum_j G_ij k_j, a warp per row, lanes over features
//
// P~ and G stay in `state` [2, E, HEADS] for the pass over sources.
#include "attention/backward.cuh"
#include "attention/paper_edges.cuh"

// Logits (dot, cosine) and dP of a share of the edges.
template <class Values>
__device__ __forceinline__ void score_edges_backward(const Edges& edges, const ScoreInputs& in,
                                                     const storage_t* grad_out, const Span& span, const Lanes& l,
                                                     const Values& logits, const Values& grads) {
    const Part weights = load_parameter(in, l);
    OwnRow own;
    Step next;
    if (span.begin < span.end) next = load_step<true>(edges, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const Step now = next;
        const Neighbours neighbours = load_neighbours(in, now, l);
        next = load_step<true>(edges, span, l, first + STEP_EDGES);

        HeadValues scalars[UNROLL];
        Products products;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            own.move_to(in, grad_out, now.row[u], l);
            scalars[u] = own.scalars;
            const Part grad = widen(own.grad), content = neighbours.content(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) products.value[u][h] = part_dot(grad, content, h);
#if HAS_TARGET_VECTOR
            const Part target = widen(own.target), other = neighbours.scored(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                products.score[u][h] = score_product(target, other, weights, in.slope, h);
            }
#endif
        }
        reduce_products(products);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int position = position_of(first, l, u);
#if HAS_TARGET_VECTOR
            const HeadValues factor = logit_factor(in, scalars[u]);
#endif
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                if (l.head_lane != 0 || position >= span.end || !has_head(l, h)) continue;
                grads.at(position, number_of(l, h)) = products.value[u][h];
#if HAS_TARGET_VECTOR
                logits.at(position, number_of(l, h)) =
                    score_logit(products.score[u][h], scalars[u].x[h], neighbours.scalar(u, h), 0.0f, factor.x[h],
                                in.slope);
#endif
            }
        }
    }
}

// delta = <dO_i, O_i> in a lane over heads. The terms of a row's dS cancel, so delta must not carry the rounding of a
// 16-bit output: there `out` is the fp32 copy that the forward pass left.
__device__ __forceinline__ float delta_of_row(const void* out, const storage_t* grad_out, i64 row, const Lanes& l) {
#if STORAGE != 0
    const Part own = load_part_fp32(static_cast<const float*>(out), row, l);
#else
    const Part own = load_part(static_cast<const storage_t*>(out), (int)row, l);
#endif
    return to_heads(head_dot(load_part(grad_out, (int)row, l), own));
}

// P~ and G of a row's edges, which take the place of logits and dP and go to the state too where that is another place.
// Returns the gradient of l_i (add).
template <class Values>
__device__ __forceinline__ float softmax_row_backward(const Edges& edges, const ScoreInputs& in, i64 row,
                                                      const Span& span, const Values& logits, const Values& grads,
                                                      const Scores<HEADS>& weight_state,
                                                      const Scores<HEADS>& grad_state, float2 softmax, float delta,
                                                      void* grad_edge) {
    const int head = group_head(), h = first_head() + head;
    float sum = 0.0f;
    if (has_group_head(head)) {
#if SCORE == SCORE_COSINE
        const float own = __ldg(in.target_scalars + row * HEADS + h);
#endif
        for (int e = span.begin + edge_lane(); e < span.end; e += EDGE_LANES) {
#if SCORE == SCORE_ADD
            const float z = add_pre_activation(edges, in, (int)row, e, head);
            const float logit = LOG2E * leaky(z, in.slope);
#else
            const float logit = logits.at(e, head);
#endif
            const float p = fast_exp2(logit - softmax.x) * softmax.y;
            const float weight = p * edge_dropout(edges, in, e, head);
            const float ds = weight * grads.at(e, head) - p * delta;
#if SCORE == SCORE_DOT
            const float grad = in.scale * ds;
#elif SCORE == SCORE_COSINE
            const float grad = own * __ldg(in.source_scalars + (i64)__ldg(edges.index + e) * HEADS + h) * ds;
#else
            const float grad = leaky_slope(z, in.slope) * ds;
            sum = fmaf(ds, centered_slope(z, in.slope), sum);
#if HAS_EDGE_SCALARS
            if (grad_edge != nullptr) {
                static_cast<float*>(grad_edge)[(i64)__ldg(edges.edge_id + e) * HEADS + h] = grad;
            }
#endif
#endif
            if (SCORE != SCORE_ADD || weight_state.base == nullptr) {
                logits.at(e, head) = weight;
                grads.at(e, head) = grad;
            }
            if (weight_state.base != nullptr) {
                weight_state.at(e, head) = weight;
                grad_state.at(e, head) = grad;
            }
        }
    }
    // Lanes over features read what lanes over edges wrote.
    __syncwarp();
    return row_sum(sum);
}

#if HAS_TARGET_VECTOR
// sum_j G_ij k_j (or x_j); the first warp of the row gets it. Writes the gradients of the edge vectors.
template <class Values>
__device__ __forceinline__ Part gather_row_backward(const Edges& edges, const ScoreInputs& in,
                                                    const storage_t* grad_out, i64 row, const Span& span,
                                                    const Lanes& l, const Values& weights, const Values& grads,
                                                    void* grad_edge) {
    Part total = zero_part(), acc = zero_part();
#if HAS_EDGE_VECTOR
    const Part own = load_part(in.target, (int)row, l), out = load_part(grad_out, (int)row, l);
#endif
    Step next;
    if (span.begin < span.end) next = load_step<false>(edges, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const Step now = next;
        const Neighbours neighbours = load_neighbours(in, now, l);
        next = load_step<false>(edges, span, l, first + STEP_EDGES);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Part other = neighbours.scored(u);
            const int position = position_of(first, l, u);
            const bool valid = position < span.end;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const float grad = valid && has_head(l, h) ? grads.at(position, number_of(l, h)) : 0.0f;
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) acc.x[h][c] = fmaf(grad, other.x[h][c], acc.x[h][c]);
            }
#if HAS_EDGE_VECTOR
            if (grad_edge == nullptr || !valid) continue;
            Part grad_e;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const int number = number_of(l, h);
                const float grad = has_head(l, h) ? grads.at(position, number) : 0.0f;
                const float weight = has_head(l, h) ? weights.at(position, number) : 0.0f;
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) grad_e.x[h][c] = fmaf(grad, own.x[h][c], weight * out.x[h][c]);
            }
            store_part(static_cast<storage_t*>(grad_edge), now.edge[u], l, grad_e);
#endif
        }
        fold_sum(total, acc, first - span.begin);
    }
    add_to(total, acc);
    row_sum(total);
    return total;
}
#endif

// From g = sum G x of the other ends to beta (g - n^2 <x, g> x), the gradient of x through the norm. Below the clamp of
// the norm the projection drops out. Returns <x, g>.
__device__ __forceinline__ HeadValues project_cosine(Part& g, const Part& x, const HeadValues& inverse_norm,
                                                     float beta) {
    const HeadValues along = head_dot(x, g);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const float n = inverse_norm.x[h];
        const float radial = n < 1e12f ? along.x[h] * n * n : 0.0f;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) g.x[h][c] = beta * (g.x[h][c] - radial * x.x[h][c]);
    }
    return along;
}

// Softmax backward and gather of a row, with its results.
template <class Values>
__device__ __forceinline__ void finish_row_backward(const Edges& edges, const ScoreInputs& in, i64 row, const Lanes& l,
                                                    const Values& logits, const Values& grads,
                                                    const Scores<HEADS>& weight_state,
                                                    const Scores<HEADS>& grad_state, const void* out,
                                                    const float* softmax, const storage_t* grad_out, float* records,
                                                    void* grad_target, float* grad_beta, void* grad_edge) {
    const Span span = share_of_row(edges, row);
    const float delta = delta_of_row(out, grad_out, row, l);
    const bool writes = is_first_warp() && edge_lane() == 0 && has_group_head(group_head());
    const i64 place = row * HEADS + first_head() + group_head();
    float2 own = make_float2(0.0f, 0.0f);
    if (has_group_head(group_head())) own = __ldg(reinterpret_cast<const float2*>(softmax) + place);
    if (writes) reinterpret_cast<float4*>(records)[place] = make_record(own.x, own.y, delta);
    const float sum = softmax_row_backward(edges, in, row, span, logits, grads, weight_state, grad_state, own, delta,
                                           grad_edge);
#if SCORE == SCORE_ADD
    if (writes) static_cast<float*>(grad_target)[place] = sum;
#else
    Part acc = gather_row_backward(edges, in, grad_out, row, span, l, logits, grads, grad_edge);
    if (!is_first_warp()) return;
#if SCORE == SCORE_COSINE
    const HeadValues along = project_cosine(acc, load_part(in.target, (int)row, l),
                                            load_scalars(in.target_scalars, (int)row, l), in.parameter[0]);
    if (l.edge_slot == 0) store_heads(grad_beta, row, l, along);
#endif
    if (l.edge_slot == 0) store_part(static_cast<storage_t*>(grad_target), (int)row, l, acc);
#endif
}
