// Gradients of linear layers of one input. The gradients of the results are g [num_rows, channels] of each layer, or with
// INTERLEAVED g0 [num_rows, LAYERS, channels].
//   grad_x = sum_l G_l W_l: the first `x_blocks` thread blocks compute it.
//   grad_w_l = G_l^T X, grad_b_l = G_l^T 1: the other blocks compute them with split-K. Each split of `rows_per_split` rows
//   leaves its sums in partial [splits, LAYERS * channels * features + LAYERS * channels], weights before biases.
#include "gemm/tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_backward(i64 num_rows, i64 features, i64 channels, i64 x_blocks, i64 rows_per_split, const float* x,
              const float* w0, const float* w1, const float* w2, const float* w3, const float* g0, const float* g1,
              const float* g2, const float* g3, float* grad_x, float* partial) {
    const Layers<const float> weights = {w0, w1, w2, w3}, grads = {g0, g1, g2, g3};
    const i64 stride = INTERLEAVED ? LAYERS * channels : channels;
    const auto grad_of = [&](int layer) { return INTERLEAVED ? g0 + layer * channels : grads[layer]; };
    const int feature_tiles = (int)((features + TILE_N - 1) / TILE_N);
    Sums sums;
    if (blockIdx.x < x_blocks) {
        const i64 row = (i64)(blockIdx.x / feature_tiles) * TILE_M;
        const i64 column = (i64)(blockIdx.x % feature_tiles) * TILE_N;
        const int rows = at_most(num_rows - row, TILE_M), columns = at_most(features - column, TILE_N);
        int layer = 0;
        i64 begin = 0;
        add_steps<true, false>(
            sums, LAYERS * (int)((channels + DEPTH - 1) / DEPTH),
            [&](Operand& left, Operand& right) {
                const int places = at_most(channels - begin, DEPTH);
                left = {grad_of(layer) + (row * stride + begin), stride, rows, places};
                right = {weights[layer] + (begin * features + column), features, columns, places};
                begin += DEPTH;
                if (begin >= channels) {
                    begin = 0;
                    ++layer;
                }
            },
            [](const float*) {});
        write_tile(sums, grad_x + row * features + column, features, rows, columns, nullptr);
        return;
    }
    const int block = (int)(blockIdx.x - x_blocks), layer_tiles = (int)((channels + TILE_M - 1) / TILE_M);
    const int tiles = LAYERS * layer_tiles * feature_tiles, tile = block % tiles, split_index = block / tiles;
    const int layer = tile / feature_tiles / layer_tiles;
    const i64 row = (i64)(tile / feature_tiles % layer_tiles) * TILE_M, column = (i64)(tile % feature_tiles) * TILE_N;
    const int rows = at_most(channels - row, TILE_M), columns = at_most(features - column, TILE_N);
    const i64 first = split_index * rows_per_split;
    i64 places = num_rows - first < rows_per_split ? num_rows - first : rows_per_split;
    const float *left_at = grad_of(layer) + first * stride + row, *right_at = x + first * features + column;
    // The sums of A's columns, by TURNS threads each, are the gradient of the bias.
    constexpr int TURNS = THREADS / TILE_M;
    static_assert(TURNS > 0 && THREADS % TILE_M == 0 && DEPTH / TURNS % 4 == 0, "each column has as many threads");
    const int mine = (int)threadIdx.x % TILE_M, turn = (int)threadIdx.x / TILE_M;
    const bool sums_columns = tile % feature_tiles == 0;
    float column_sum = 0.0f;
    add_steps<false, false>(
        sums, (int)((places + DEPTH - 1) / DEPTH),
        [&](Operand& left, Operand& right) {
            left = {left_at, stride, rows, at_most(places, DEPTH)};
            right = {right_at, features, columns, at_most(places, DEPTH)};
            left_at += DEPTH * stride;
            right_at += DEPTH * features;
            places -= DEPTH;
        },
        [&](const float* a) {
            if (!sums_columns) return;
            const float* const line = a + turn * (DEPTH / TURNS) * TILE_M;
#pragma unroll
            for (int i = 0; i < DEPTH / TURNS; ++i) {
                column_sum += line[i * TILE_M + swizzled<false>(mine / 4, i) * 4 + mine % 4];
            }
        });
    float* const weight_sums = partial + split_index * (LAYERS * channels * (features + 1));
    write_tile(sums, weight_sums + (layer * channels + row) * features + column, features, rows, columns, nullptr);
    if (!sums_columns) return;
    __shared__ float turns[TURNS][TILE_M];
    turns[turn][mine] = column_sum;
    __syncthreads();
    if (turn > 0 || mine >= rows) return;
#pragma unroll
    for (int i = 1; i < TURNS; ++i) column_sum += turns[i][mine];
    weight_sums[LAYERS * channels * features + layer * channels + row + mine] = column_sum;
}
