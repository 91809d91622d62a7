// The backward pass of absorbed.cuh over targets: with G the gradient of O
//
//   dz_i = W_v^T G_i,  delta_i = <dz_i, z_i>,  dS_ij = P_ij (<dz_i, x_j> - delta_i)
//   dq_i = scale sum_j dS_ij x_j,  and to grad_x the part M^T dq_i, to which the pass over sources adds the rest
//
// It leaves dz and dq [N, CHANNELS], and (max, inverse, delta, 0) of each row [N, 4] for the pass over sources.
#include "attention/absorbed.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_absorbed_targets(TILE_PARAMETERS, const float* x, const u32* images, double scale, const float* q,
                           const float* z, const float* softmax, const float* grad_out, float* records, float* dz,
                           float* dq, float* grad_x) {
    extern __shared__ __align__(128) u32 held[];
    // (max, inverse, delta) of each slot.
    __shared__ float4 held_records[MAX_SLOTS];
    // What waits for memory first, and what waits for nothing.
    const Strip strip = strip_of(tile_rows, order);
    const Bounds bounds = bounds_of(tile_ptr);
    bring_image(held, images, MEAN_IMAGE);
    const Tile tile = bring_tile(held, bounds, tile_rows, items, index);
    const Lanes l = lane_layout();
    float2 mine[2];
    // In the order in which eight lanes add up a product: where z is the row of the only edge, dS is 0.
    float deltas[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = strip.row[h];
        mine[h] = row < 0 ? make_float2(0.0f, 0.0f) : __ldg(reinterpret_cast<const float2*>(softmax) + row);
        // What the thread needs of z when it has found dz, which then takes its place.
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            const int chunk = 4 * c + (int)threadIdx.x % 4;
            if (row >= 0) copy16(tile.at(strip.slot + 8 * h, chunk), z + ((i64)row * CHANNELS + 4 * chunk));
        }
    }
    close_copies();
    multiply_strip(
        held, strip, [&](int h, int chunk) { return read_chunk(grad_out, strip.row[h], chunk); },
        [&](int h, int i, int chunk, float4 v, float4) {
            float4* const at = tile.at(strip.slot + 8 * h, chunk);
            const float4 mean = *at;
            float& sum = deltas[h][i % 2];
            sum = fmaf(v.w, mean.w, fmaf(v.z, mean.z, fmaf(v.y, mean.y, fmaf(v.x, mean.x, sum))));
            *chunk_of(dz, strip.row[h], chunk) = v;
            *at = v;
        });
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float delta = deltas[h][0] + deltas[h][1];
#pragma unroll
        for (int i = 2; i > 0; i /= 2) delta += __shfl_xor_sync(FULL_MASK, delta, i);
        if (strip.row[h] < 0 || threadIdx.x % 4 > 0) continue;
        const float4 record = make_float4(mine[h].x, mine[h].y, delta, 0.0f);
        held_records[strip.slot + 8 * h] = record;
        reinterpret_cast<float4*>(records)[strip.row[h]] = record;
    }
    __syncthreads();
    bring_image(held, images, INPUT_IMAGE);

    const auto finish = [&](int slot, int row, Part sums) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) sums.x[0][c] *= (float)scale;
        tile.store(slot, l, sums);
        store_part(dq, row, l, sums);
    };
    const float factor = (float)scale * LOG2E;
    for_each_item<Part>(
        tile, at_lane(x, l), l, [&]() { return zero_part(); },
        [&](const Item& item) { return load_packed(at_lane(q, l), item.row, l); },
        [&](const Packed(&rows)[UNROLL], int first, const Item& item, const Packed& query, Part& sums) {
            float products[2 * UNROLL];
            const Part own = widen(query), grad = tile.load(anew(item.slot()), l);
            const float4 record = held_records[item.slot()];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const Part other = widen(rows[u]);
                products[u] = lane_dot(own, other, 0);
                products[UNROLL + u] = lane_dot(grad, other, 0);
            }
            head_sum<2 * UNROLL, HEAD_LANES / 2>(products);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float p = fast_exp2(products[u] * factor - record.x) * record.y;
                const float ds = first + u < item.count ? p * (products[UNROLL + u] - record.z) : 0.0f;
                const Part other = widen(rows[u]);
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) sums.x[0][c] = fmaf(ds, other.x[0][c], sums.x[0][c]);
            }
        },
        [&](const Item& item, const Part& sums) {
            if (item.active() && item.chunks() == 0) finish(item.slot(), item.row, sums);
            if (item.chunks() > 0) store_part_fp32(tile.states + item.state() * STATE_WORDS, 0, l, sums);
            if (!__any_sync(FULL_MASK, item.chunks() > 0) || !arrives_last(tile, item, l)) return;
            Part all = zero_part();
#pragma unroll 1
            for (int k = 0; k < item.chunks(); ++k) {
                const Part other = load_part_fp32(tile.states + (item.first_state() + k) * STATE_WORDS, 0, l);
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) all.x[0][c] += other.x[0][c];
            }
            finish(item.slot(), item.row, all);
        });
    __syncthreads();
    multiply_strip(
        held, strip, [&](int h, int chunk) { return *tile.at(strip.slot + 8 * h, chunk); },
        [&](int h, int, int chunk, float4 sums, float4) { *chunk_of(grad_x, strip.row[h], chunk) = sums; });
}
