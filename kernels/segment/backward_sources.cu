// Backward of the aggregation over the rows of the CSC (sources): gradients of value, key and edge. The gradient of the
// message m = a_j m_ij is
//
//   g_ij = t_i dO_i,sum + t_i dO_i,mean / n_i + [m = max_i] dO_i,max / number of edges that have it + the same of min
//          + dO_i,mul O_i,mul / m
//
// where the extremes are looked at only for messages of their key, and the last term is dO_i,mul times the product of the
// others for an m of 0. With MOMENTS the sum and the mean are part of slope_i m + offset_i, see backward_nodes.cu.
#define GRADIENTS (1 + HAS_KEY)
#include "segment/backward.cuh"

// Whether a message is the same for all edges of its source.
#define IS_OF_SOURCE (EDGE == 0 && !HAS_KEY && !HAS_TARGET)

struct Kept {
    const storage_t* out;
    const u16 *arg_max, *arg_min;
    const float *num_max, *num_min, *others, *slope, *offset;
};

struct Grads {
    storage_t *key, *value;
    // Of the shape and type of the edge's operand.
    void* edge;
};

struct Targets {
    Packed sums[MOMENTS ? 1 : ROOM(SUMS)][UNROLL];
    Fragment slope[MOMENTS ? UNROLL : 1], offset[MOMENTS ? UNROLL : 1];
    Packed product[MUL ? UNROLL : 1], product_grad[MUL ? UNROLL : 1];
    Args args[ROOM(EXTREMES)][UNROLL];
    Packed targets[HAS_TARGET ? UNROLL : 1];
    EdgeOperand edges;
    float scale[ROOM(SUMS)][UNROLL];
};

struct BackwardSources : Backward {
    typedef Targets Loaded;

    const Kept& kept;
    const Grads& grads;
    const storage_t* grad_out;
    EdgeLayer layer, layer_grad;
    Fragment own_value, own_key;
    float own_scale;
    Args own_keys;

    __device__ __forceinline__ BackwardSources(const Inputs& in, const Lanes& l, const Kept& kept, const Grads& grads)
        : Backward{in, l}, kept(kept), grads(grads) {}

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) {
        own_value = zero_fragment();
        if (READS_MESSAGES) own_value = load_fragment(in.value, item.row, l);
        own_key = zero_fragment();
        if (HAS_KEY) own_key = load_fragment(in.key, item.row, l);
        own_scale = source_scale_of(in, item.row);
        if (IS_OF_SOURCE && EXTREMES) {
            Fragment m;
            for_each_channel(l, [&](int h, int c, int) { m.x[h][c] = message_of({own_value.x[h][c]}, own_scale); });
            own_keys = keys_of(m);
        }
    }

    __device__ __forceinline__ Targets load(const Step<Index>& step) const {
        Targets t;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int col = step.edge[u].col;
#pragma unroll
            for (int k = 0; k < (MOMENTS ? 0 : SUMS); ++k) {
                t.sums[k][u] = load_out(grad_out, SUM_PLACE(k), col, l);
                t.scale[k][u] = target_scale_of(in, col, k);
            }
            if (MOMENTS) {
                t.slope[MOMENTS ? u : 0] = load_fragment_fp32(kept.slope, col, l);
                t.offset[MOMENTS ? u : 0] = load_fragment_fp32(kept.offset, col, l);
            }
            if (MUL) {
                t.product[MUL ? u : 0] = load_out(kept.out, AT_MUL, col, l);
                t.product_grad[MUL ? u : 0] = load_out(grad_out, AT_MUL, col, l);
            }
            if (MAX) t.args[0][u] = load_args(kept.arg_max, col, l);
            if (MIN) t.args[MAX ? 1 : 0][u] = load_args(kept.arg_min, col, l);
            if (HAS_TARGET) t.targets[HAS_TARGET ? u : 0] = load_packed(at_lane(in.target, l), col, l);
            if (READS_MESSAGES) t.edges.load(in.edge, u, step.edge[u].perm, l);
        }
        return t;
    }

    // Adds to the gradients of the messages m of an edge what extreme k of its target gives to some of them.
    __device__ __forceinline__ void add_extreme(Fragment& g, const Fragment& m, const Args& args, u32 bits, int k,
                                                int row) const {
        for (; bits != 0; bits &= bits - 1) {
            const int channel = channel_of(__ffs(bits) - 1);
            const int place = l.offset + vec_offset(0, channel / VEC) + channel % VEC;
            const i64 at = (i64)row * OUT_STRIDE + EXTREME_PLACE(k) * ROW_STRIDE + place;
            const float best = number_at(kept.out, at);
            float grad = number_at(grad_out, at);
            bool tied = false;
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                if (c == channel) tied = args.words[c / VEC][c % VEC / 2] >> 16 * (c % VEC % 2) & TIED;
            }
            if (tied) {
                grad /= __ldg((k == 0 && MAX ? kept.num_max : kept.num_min) + (i64)row * ROW_STRIDE + place);
            }
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) {
                if (c == channel && m.x[0][c] == best) g.x[0][c] += grad;
            }
        }
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Sums& sums, const Targets& t, const Adjacency&, const Item& item,
                                         const Step<Index>& step, int number) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment edge = READS_MESSAGES ? t.edges.at(u, layer) : zero_fragment();
            const Fragment target = HAS_TARGET ? widen(t.targets[HAS_TARGET ? u : 0]) : zero_fragment();
            const bool counts = FULL || is_valid(item, l, number, u);
            const int col = step.edge[u].col;
            const auto operands = [&](int h, int c) -> Operands {
                return {own_value.x[h][c], edge.x[h][c], own_key.x[h][c], target.x[h][c]};
            };
            Fragment m = zero_fragment();
            for_each_channel(l, [&](int h, int c, int) {
                if (MOMENTS || EXTREMES || MUL) m.x[h][c] = message_of(operands(h, c), own_scale);
            });
            u32 bits[ROOM(EXTREMES)] = {};
#pragma unroll
            for (int k = 0; k < EXTREMES; ++k) {
                if (counts) bits[k] = t.args[k][u].matches(IS_OF_SOURCE ? own_keys : keys_of(m), l);
            }
            // Most edges give nothing to an extreme.
            if (STATS == EXTREMES && EDGE == 0 && (bits[0] | bits[EXTREMES > 1 ? 1 : 0]) == 0) continue;

            Fragment edge_grad, g = zero_fragment();
#if MOMENTS
            for_each_channel(l, [&](int h, int c, int) {
                g.x[h][c] = fmaf(t.slope[u].x[h][c], m.x[h][c], t.offset[u].x[h][c]);
            });
#else
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                const Fragment of_sum = widen(t.sums[k][u]);
                for_each_channel(l, [&](int h, int c, int) {
                    g.x[h][c] = fmaf(t.scale[k][u], of_sum.x[h][c], g.x[h][c]);
                });
            }
#endif
#if MUL
            const Fragment product = widen(t.product[u]), product_grad = widen(t.product_grad[u]);
            for_each_channel(l, [&](int h, int c, int place) {
                const bool is_zero = m.x[h][c] == 0.0f && counts && has_vec(l, h, c / VEC);
                const float rest = is_zero ? __ldg(kept.others + (i64)col * ROW_STRIDE + place)
                                           : product.x[h][c] / m.x[h][c];
                g.x[h][c] = fmaf(product_grad.x[h][c], rest, g.x[h][c]);
            });
#endif
#pragma unroll
            for (int k = 0; k < EXTREMES; ++k) add_extreme(g, m, t.args[k][u], bits[k], k, col);
            float edge_sum = 0.0f;
            for_each_channel(l, [&](int h, int c, int) {
                const Operands o = operands(h, c);
                const float grad = SOURCE_SCALED ? g.x[h][c] * own_scale : g.x[h][c];
                if (counts) {
                    sums.of[0].x[h][c] += Message::value_grad(grad, o);
                    if (HAS_KEY) sums.of[HAS_KEY].x[h][c] += Message::key_grad(grad, o);
                }
                if (EDGE != 0) edge_grad.x[h][c] = Message::edge_grad(grad, o);
                if (EDGE == 2) edge_sum += has_vec(l, h, c / VEC) ? edge_grad.x[h][c] : 0.0f;
            });
#if EDGE == 1
            if (counts && grads.edge != nullptr) {
                store_fragment(static_cast<storage_t*>(grads.edge), step.edge[u].perm, l, edge_grad);
            }
#elif EDGE == 2
            if (grads.edge != nullptr) {
                head_sum<1, GROUP_LANES / 2>(&edge_sum);
                if (counts && l.head_lane == 0) static_cast<float*>(grads.edge)[step.edge[u].perm] = edge_sum;
            }
#elif EDGE == 3
            if (counts) take_layer(edge_grad, t.edges.rows[u]);
            if (grads.edge != nullptr) store_row(edge_grad, step.edge[u].perm, counts);
#endif
        }
    }

#if EDGE == 3
    // Adds what an edge gives to the gradient of the layer, given that of what the layer makes of its row.
    __device__ __forceinline__ void take_layer(const Fragment& grad, const float (&row)[EDGE_NUMBERS]) {
        for_each_channel(l, [&](int h, int c, int) {
            layer_grad.bias.x[h][c] += grad.x[h][c];
#pragma unroll
            for (int d = 0; d < EDGE_NUMBERS; ++d) {
                layer_grad.weight[d].x[h][c] = fmaf(row[d], grad.x[h][c], layer_grad.weight[d].x[h][c]);
            }
        });
    }

    // Stores the gradient of an edge's row.
    __device__ __forceinline__ void store_row(const Fragment& grad, int perm, bool counts) const {
        storage_t* row = static_cast<storage_t*>(grads.edge) + (i64)perm * EDGE_NUMBERS;
#pragma unroll
        for (int d = 0; d < EDGE_NUMBERS; ++d) {
            float sum = 0.0f;
            for_each_channel(l, [&](int h, int c, int) { sum = fmaf(grad.x[h][c], layer.weight[d].x[h][c], sum); });
            head_sum<1, GROUP_LANES / 2>(&sum);
#if STORAGE == 0
            if (counts && l.head_lane == 0) row[d] = sum;
#else
            if (counts && l.head_lane == 0) row[d] = to_bits16(sum);
#endif
        }
    }
#endif

    __device__ __forceinline__ void store(const Sums& sums, int row, bool writes) const {
        if (!writes) return;
        Fragment value = sums.of[0];
#if SELF_LOOPS
        const Fragment own = widen(load_out(grad_out, AT_SUM, row, l));
        const float scale = source_scale_of(in, row) * target_scale_of(in, row);
        for_each_channel(l, [&](int h, int c, int) { value.x[h][c] = fmaf(scale, own.x[h][c], value.x[h][c]); });
#endif
        store_fragment(grads.value, row, l, value);
        if (HAS_KEY) store_fragment(grads.key, row, l, sums.of[HAS_KEY]);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
segment_backward_sources(ADJACENCY_PARAMETERS, BACKWARD_PARAMETERS, storage_t* grad_key, storage_t* grad_value,
                         void* grad_edge, float* weight_sums, float* bias_sums, float* partial, float* carry) {
    const Adjacency a = ADJACENCY;
    const Inputs in = INPUTS;
    const Kept kept = {out, arg_max, arg_min, num_max, num_min, others, slope, offset};
    const Grads grads = {grad_key, grad_value, grad_edge};
    const Lanes l = lane_layout();
    BackwardSources functor(in, l, kept, grads);
    functor.grad_out = grad_out;
    functor.layer.load(in, l);
    functor.layer_grad.clear();
    traverse(a, l, functor, partial, carry);
#if EDGE == 3
#pragma unroll 1
    for (int d = 0; d < EDGE_NUMBERS; ++d) {
        // Constant places keep the sums in registers.
        Fragment sum;
#pragma unroll
        for (int k = 0; k < EDGE_NUMBERS; ++k) {
            if (k == d) sum = functor.layer_grad.weight[k];
        }
        store_block_sum(sum, weight_sums, (i64)blockIdx.x * EDGE_NUMBERS + d, a, l);
        // All sums take the same shared memory.
        __syncthreads();
    }
    store_block_sum(functor.layer_grad.bias, bias_sums, blockIdx.x, a, l);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
segment_backward_sources_merge(HEAVY_PARAMETERS, const float* partial, const float* source_scale,
                               const float* target_scale, const storage_t* grad_out, storage_t* grad_key,
                               storage_t* grad_value, float* carry) {
    Inputs in = {};
    in.source_scale = source_scale;
    in.target_scale = target_scale;
    const Kept kept = {};
    const Grads grads = {grad_key, grad_value, nullptr};
    const Lanes l = lane_layout();
    BackwardSources functor(in, l, kept, grads);
    functor.grad_out = grad_out;
    merge_heavy_rows(HeavyRows HEAVY, l, functor, partial, carry);
}
