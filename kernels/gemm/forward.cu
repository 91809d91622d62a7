// Linear layers of one input, Y_l = X W_l^T + b_l. The input is x [num_rows, features]; each layer has w [channels,
// features], b [channels] or null, and y [num_rows, channels]. With INTERLEAVED all results are in y0 [num_rows, LAYERS,
// channels].
#include "gemm/tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gemm_forward(i64 num_rows, i64 features, i64 channels, const float* x, const float* w0, const float* w1,
             const float* w2, const float* w3, const float* b0, const float* b1, const float* b2, const float* b3,
             float* y0, float* y1, float* y2, float* y3) {
    const Layers<const float> weights = {w0, w1, w2, w3}, biases = {b0, b1, b2, b3};
    const Layers<float> results = {y0, y1, y2, y3};
    const int layer_tiles = (int)((channels + TILE_N - 1) / TILE_N), tiles = LAYERS * layer_tiles;
    // Thread blocks that follow each other read the same rows.
    const int tile = (int)(blockIdx.x % tiles), layer = tile / layer_tiles;
    const i64 row = (i64)(blockIdx.x / tiles) * TILE_M, column = (i64)(tile % layer_tiles) * TILE_N;
    const int rows = at_most(num_rows - row, TILE_M), columns = at_most(channels - column, TILE_N);
    const float *left_at = x + row * features, *right_at = weights[layer] + column * features;
    i64 places = features;
    Sums sums;
    add_steps<true, true>(
        sums, (int)((features + DEPTH - 1) / DEPTH),
        [&](Operand& left, Operand& right) {
            left = {left_at, features, rows, at_most(places, DEPTH)};
            right = {right_at, features, columns, at_most(places, DEPTH)};
            left_at += DEPTH;
            right_at += DEPTH;
            places -= DEPTH;
        },
        [](const float*) {});
    const i64 stride = INTERLEAVED ? LAYERS * channels : channels;
    float* const out = (INTERLEAVED ? y0 + layer * channels : results[layer]) + row * stride + column;
    const float* const bias = biases[layer];
    write_tile(sums, out, stride, rows, columns, bias == nullptr ? bias : bias + column);
}
