// Backward of the aggregation over the rows of the CSR: the gradient of the target's vector, for sums and means.
#define GRADIENTS 1
#include "segment/backward.cuh"

struct Sources {
    Packed values[UNROLL], keys[UNROLL];
    EdgeOperand edges;
    float scale[UNROLL];
};

struct BackwardTargets : Backward {
    typedef Sources Loaded;

    const storage_t* grad_out;
    storage_t* grad_target;
    Fragment own, grad;

    __device__ __forceinline__ BackwardTargets(const Inputs& in, const Lanes& l, storage_t* grad_target)
        : Backward{in, l}, grad_target(grad_target) {}

    __device__ __forceinline__ void begin(const Adjacency&, const Item& item) {
        own = load_fragment(in.target, item.row, l);
        grad = zero_fragment();
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
            const Fragment of_sum = widen(load_out(grad_out, SUM_PLACE(k), item.row, l));
            const float scale = target_scale_of(in, item.row, k);
            for_each_channel(l, [&](int h, int c, int) { grad.x[h][c] = fmaf(scale, of_sum.x[h][c], grad.x[h][c]); });
        }
    }

    __device__ __forceinline__ Sources load(const Step<Index>& step) const {
        Sources s;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int col = step.edge[u].col;
            s.values[u] = load_packed(at_lane(in.value, l), col, l);
            if (HAS_KEY) s.keys[u] = load_packed(at_lane(in.key, l), col, l);
            s.edges.load(in.edge, u, step.edge[u].perm, l);
            s.scale[u] = source_scale_of(in, col);
        }
        return s;
    }

    template <bool FULL>
    __device__ __forceinline__ void step(Sums& sums, const Sources& s, const Adjacency&, const Item& item,
                                         const Step<Index>&, int number) const {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Fragment value = widen(s.values[u]), edge = s.edges.at(u, {});
            const Fragment key = HAS_KEY ? widen(s.keys[u]) : zero_fragment();
            const bool counts = FULL || is_valid(item, l, number, u);
            for_each_channel(l, [&](int h, int c, int) {
                const Operands o = {value.x[h][c], edge.x[h][c], key.x[h][c], own.x[h][c]};
                const float g = Message::target_grad(s.scale[u] * grad.x[h][c], o);
                sums.of[0].x[h][c] += counts ? g : 0.0f;
            });
        }
    }

    __device__ __forceinline__ void store(const Sums& sums, int row, bool writes) const {
        if (writes) store_fragment(grad_target, row, l, sums.of[0]);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
segment_backward_targets(ADJACENCY_PARAMETERS, BACKWARD_PARAMETERS, storage_t* grad_target, float* partial,
                         float* carry) {
    const Adjacency a = ADJACENCY;
    const Inputs in = INPUTS;
    const Lanes l = lane_layout();
    BackwardTargets functor(in, l, grad_target);
    functor.grad_out = grad_out;
    traverse(a, l, functor, partial, carry);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
segment_backward_targets_merge(HEAVY_PARAMETERS, const float* partial, storage_t* grad_target, float* carry) {
    const Inputs in = {};
    const Lanes l = lane_layout();
    merge_heavy_rows(HeavyRows HEAVY, l, BackwardTargets(in, l, grad_target), partial, carry);
}
