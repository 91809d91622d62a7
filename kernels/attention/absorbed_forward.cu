// The forward pass of absorbed.cuh. Where gradients follow it leaves q and z [N, CHANNELS] and the softmax of each row
// [N, 2], see storage.cuh; else these are null.
#include "attention/absorbed.cuh"

constexpr float NO_MAX = -3.0e38f;

// What edges add up to: the largest logit, the sum of weights, and that of weighted rows.
struct Softmax {
    float max, sum;
    Part acc;
};

__device__ __forceinline__ void raise_max(Softmax& s, float max) {
    const float factor = fast_exp2(s.max - max);
    s.max = max;
    s.sum *= factor;
#pragma unroll
    for (int c = 0; c < LANE_ELEMS; ++c) s.acc.x[0][c] *= factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_absorbed_forward(TILE_PARAMETERS, const float* x, const u32* images, double scale, float* q, float* z,
                           float* softmax, float* out) {
    extern __shared__ __align__(128) u32 held[];
    __shared__ bool filled[MAX_SLOTS];
    // What waits for memory first, and what waits for nothing.
    const Strip strip = strip_of(tile_rows, order);
    const Bounds bounds = bounds_of(tile_ptr);
    bring_image(held, images, QUERY_IMAGE);
    const Tile tile = bring_tile(held, bounds, tile_rows, items, index);
    const Lanes l = lane_layout();
    multiply_strip(
        held, strip, [&](int h, int chunk) { return read_chunk(x, strip.row[h], chunk); },
        [&](int h, int, int chunk, float4 sums, float4 bias) {
            const float4 v = plus(sums, bias);
            if (q != nullptr) *chunk_of(q, strip.row[h], chunk) = v;
            *tile.at(strip.slot + 8 * h, chunk) = v;
        });
    __syncthreads();
    bring_image(held, images, OUT_IMAGE);

    const auto finish = [&](int slot, int row, const Softmax& s) {
        const bool empty = s.sum == 0.0f;
        const float inverse = empty ? 0.0f : reciprocal(s.sum);
        Part mean;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) mean.x[0][c] = empty ? 0.0f : s.acc.x[0][c] * inverse;
        tile.store(slot, l, mean);
        if (z != nullptr) store_part(z, row, l, mean);
        RowSoftmax mine;
        mine.max[0] = empty ? 0.0f : s.max;
        mine.inverse[0] = inverse;
        store_softmax(softmax, row, l, mine);
        if (l.head_lane == 0) filled[slot] = !empty;
    };
    const float factor = (float)scale * LOG2E;
    struct Nothing {};
    for_each_item<Softmax>(
        tile, at_lane(x, l), l, [&]() { return Softmax{NO_MAX, 0.0f, zero_part()}; },
        [&](const Item&) { return Nothing(); },
        [&](const Packed(&rows)[UNROLL], int first, const Item& item, const Nothing&, Softmax& s) {
            float logit[UNROLL];
            const Part query = tile.load(anew(item.slot()), l);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) logit[u] = lane_dot(query, widen(rows[u]), 0);
            head_sum<UNROLL, HEAD_LANES / 2>(logit);
            float max = s.max;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                logit[u] = first + u < item.count ? logit[u] * factor : negative_infinity();
                max = fmaxf(max, logit[u]);
            }
            raise_max(s, max);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float p = fast_exp2(logit[u] - max);
                s.sum += p;
                const Part row = widen(rows[u]);
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) s.acc.x[0][c] = fmaf(p, row.x[0][c], s.acc.x[0][c]);
            }
        },
        [&](const Item& item, const Softmax& s) {
            if (item.active() && item.chunks() == 0) finish(item.slot(), item.row, s);
            if (item.chunks() > 0) {
                float* const state = tile.states + item.state() * STATE_WORDS;
                store_part_fp32(state, 0, l, s.acc);
                if (l.head_lane == 0) *reinterpret_cast<float2*>(state + CHANNELS) = make_float2(s.max, s.sum);
            }
            if (!__any_sync(FULL_MASK, item.chunks() > 0) || !arrives_last(tile, item, l)) return;
            Softmax all = {NO_MAX, 0.0f, zero_part()};
#pragma unroll 1
            for (int k = 0; k < item.chunks(); ++k) {
                const float* const state = tile.states + (item.first_state() + k) * STATE_WORDS;
                const float2 other = *reinterpret_cast<const float2*>(state + CHANNELS);
                const Part acc = load_part_fp32(state, 0, l);
                const float max = fmaxf(all.max, other.x);
                raise_max(all, max);
                const float share = fast_exp2(other.x - max);
                all.sum = fmaf(other.y, share, all.sum);
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) all.acc.x[0][c] = fmaf(acc.x[0][c], share, all.acc.x[0][c]);
            }
            finish(item.slot(), item.row, all);
        });
    __syncthreads();
    multiply_strip(
        held, strip, [&](int h, int chunk) { return *tile.at(strip.slot + 8 * h, chunk); },
        [&](int h, int, int chunk, float4 sums, float4 bias) {
            *chunk_of(out, strip.row[h], chunk) = filled[strip.slot + 8 * h] ? plus(sums, bias) : sums;
        });
}
