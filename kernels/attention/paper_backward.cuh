// The steps of DF-GNN's backward pass over targets (appendix B): SDDMM, softmax backward, SpMM.
//
//   scores     logits S and dP_ij = <dO_i, v_j>, edge parallel. S is computed anew and P follows from the maximum and
//              the inverse sum of the row, so that the forward pass leaves nothing per edge
//   softmax    P~ = P D and the gradient G of what the score is made of, a warp per row, lanes over edges and heads:
//              dS = P~ dP - P delta with delta_i = <dO_i, O_i>, which needs no sum over the edges, and G is what
//              follows from dS for the inner product, less the factor that finish_target and finish_source put in, or
//              for the scalar of the source
//   gather     sum_j G_ij k_j, a warp per row, lanes over features
//
// P~ and G stay in `state` [2, E, HEADS] for the pass over sources.
#include "attention/backward.cuh"
#include "attention/paper_edges.cuh"

// Logits of a score with vectors, and dP, of a share of the edges.
template <class Values>
__device__ __forceinline__ void score_edges_backward(const Edges& edges, const ScoreInputs& in,
                                                     const storage_t* grad_out, const Span& span, const Lanes& l,
                                                     const Values& logits, const Values& grads) {
    const Fragment parameters = load_parameter(in, l);
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
            own.move_to(in, grad_out, now.edge[u].row, l);
            scalars[u] = own.scalars;
            const Fragment grad = widen(own.grad), content = neighbours.content(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) products.value[u][h] = lane_dot(grad, content, h);
#if HAS_TARGET_VECTOR
            const Fragment target = widen(own.target), other = neighbours.scored(u);
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                products.score[u][h] = score_product(target, other, parameters, in, h);
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
                    Score::logit(neighbours.terms(u, h, products.score[u][h], scalars[u], factor), in);
#endif
            }
        }
    }
}

// delta = <dO_i, O_i> in a lane over heads. The terms of a row's dS cancel, so delta must not carry the rounding of a
// 16-bit output: there `out` is the fp32 copy that the forward pass left.
__device__ __forceinline__ float delta_of_row(const void* out, const storage_t* grad_out, i64 row, const Lanes& l) {
#if STORAGE != 0
    const Fragment own = load_fragment_fp32(static_cast<const float*>(out), row, l);
#else
    const Fragment own = load_fragment(static_cast<const storage_t*>(out), (int)row, l);
#endif
    return to_heads(head_dot(load_fragment(grad_out, (int)row, l), own));
}

// P~ and G of a row's edges, which take the place of logits and dP and go to the state too where that is another place.
// Returns the gradient of the target's scalar.
template <class Values>
__device__ __forceinline__ float softmax_row_backward(const Edges& edges, const ScoreInputs& in, i64 row,
                                                      const Span& span, const Values& logits, const Values& grads,
                                                      const Scores<HEADS>& weight_state,
                                                      const Scores<HEADS>& grad_state, float2 row_stats, float delta,
                                                      void* grad_edge) {
    const int head = group_head(), h = first_head() + head;
    float sum = 0.0f;
    if (has_group_head(head)) {
#if HAS_NORMS
        const float own = __ldg(in.target_scalars + row * HEADS + h);
#endif
        for (int e = span.begin + edge_lane(); e < span.end; e += EDGE_LANES) {
#if HAS_TARGET_VECTOR
            const float logit = logits.at(e, head);
#else
            const Terms terms = scalar_terms(edges, in, (int)row, e, head);
            const float logit = Score::logit(terms, in);
#endif
            const float p = exp_difference(logit, row_stats.x) * row_stats.y;
            const float weight = p * edge_dropout(edges, in, e, head);
            const float ds = weight * grads.at(e, head) - p * delta;
#if HAS_NORMS
            const float grad = own * __ldg(in.source_scalars + (i64)__ldg(edges.col + e) * HEADS + h) * ds;
#elif HAS_TARGET_VECTOR
            const float grad = ds;
#else
            const float grad = Score::source_scalar_grad(0.0f, ds, terms, in);
            sum = Score::target_scalar_grad(sum, ds, terms, in);
#if HAS_EDGE_SCALARS
            if (grad_edge != nullptr) {
                static_cast<float*>(grad_edge)[(i64)__ldg(edges.perm + e) * HEADS + h] =
                    Score::edge_scalar_grad(ds, terms, in);
            }
#endif
#endif
            if (HAS_TARGET_VECTOR || weight_state.base == nullptr) {
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
// sum_j G_ij k_j, less the factor of finish_target; the first warp of the row gets it. Writes the gradients of the
// edge vectors.
template <class Values>
__device__ __forceinline__ Fragment gather_row_backward(const Edges& edges, const ScoreInputs& in,
                                                    const storage_t* grad_out, i64 row, const Span& span,
                                                    const Lanes& l, const Values& weights, const Values& grads,
                                                    void* grad_edge) {
    Fragment total = zero_fragment(), acc = zero_fragment();
#if HAS_EDGE_VECTOR
    const Fragment own = load_fragment(in.target, (int)row, l), out = load_fragment(grad_out, (int)row, l);
#endif
    Step next;
    if (span.begin < span.end) next = load_step<false>(edges, span, l, span.begin);
    for (int first = span.begin; first < span.end; first += STEP_EDGES) {
        const Step now = next;
        const Neighbours neighbours = load_neighbours(in, now, l);
        next = load_step<false>(edges, span, l, first + STEP_EDGES);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment other = neighbours.scored(u);
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
            Fragment grad_e;
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
                const int number = number_of(l, h);
                const float grad = has_head(l, h) ? grads.at(position, number) : 0.0f;
                const float weight = has_head(l, h) ? weights.at(position, number) : 0.0f;
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    const float content_grad = EDGE_IN_VALUE ? weight * out.x[h][c] : 0.0f;
                    grad_e.x[h][c] = Score::edge_grad(content_grad, grad, {own.x[h][c], 0.0f, 0.0f}, in);
                }
            }
            store_fragment(static_cast<storage_t*>(grad_edge), now.edge[u].perm, l, grad_e);
#endif
        }
        fold_sum(total, acc, first - span.begin);
    }
    add_to(total, acc);
    row_sum(total);
    return total;
}
#endif

// From g = sum G x of the other ends to g - n^2 <x, g> x, the gradient of x through the norm. Below the clamp of the
// norm the projection drops out. Returns <x, g>.
__device__ __forceinline__ HeadValues project_normalised(Fragment& g, const Fragment& x,
                                                         const HeadValues& inverse_norm) {
    const HeadValues along = head_dot(x, g);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        const float n = inverse_norm.x[h];
        const float radial = n < 1e12f ? along.x[h] * n * n : 0.0f;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) g.x[h][c] -= radial * x.x[h][c];
    }
    return along;
}

// Softmax backward and gather of a row, with its results.
template <class Values>
__device__ __forceinline__ void finish_row_backward(const Edges& edges, const ScoreInputs& in, i64 row, const Lanes& l,
                                                    const Values& logits, const Values& grads,
                                                    const Scores<HEADS>& weight_state,
                                                    const Scores<HEADS>& grad_state, const void* out,
                                                    const float* row_stats, const storage_t* grad_out,
                                                    float* bwd_row_stats,
                                                    void* grad_target, float* grad_parameter, void* grad_edge) {
    const Span span = share_of_row(edges, row);
    const float delta = delta_of_row(out, grad_out, row, l);
    const bool writes = is_first_warp() && edge_lane() == 0 && has_group_head(group_head());
    const i64 place = row * HEADS + first_head() + group_head();
    float2 own = make_float2(0.0f, 0.0f);
    if (has_group_head(group_head())) own = __ldg(reinterpret_cast<const float2*>(row_stats) + place);
    if (writes) reinterpret_cast<float4*>(bwd_row_stats)[place] = make_bwd_row_stats(own.x, own.y, delta);
    const float sum = softmax_row_backward(edges, in, row, span, logits, grads, weight_state, grad_state, own, delta,
                                           grad_edge);
    if (SUMS_SCALAR && writes) static_cast<float*>(grad_target)[place] = sum;
#if HAS_TARGET_VECTOR
    Fragment acc = gather_row_backward(edges, in, grad_out, row, span, l, logits, grads, grad_edge);
    if (!is_first_warp()) return;
#if HAS_NORMS
    const HeadValues along = project_normalised(acc, load_fragment(in.target, (int)row, l),
                                                load_scalars(in.target_scalars, (int)row, l));
    if (PARAMETER == 1 && l.edge_slot == 0) store_heads(grad_parameter, row, l, along);
#endif
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) acc.x[h][c] = Score::finish_target(acc.x[h][c], {}, in);
    }
    if (l.edge_slot == 0) store_fragment(static_cast<storage_t*>(grad_target), (int)row, l, acc);
#endif
}
