// Gradients of the parameters of query and key from those of M = W_k^T W_q and m = W_k^T b_q:
//   dW_q = W_k dM,  db_q = W_k dm,  dW_k = W_q dM^T + b_q dm^T,  db_k = 0
// with w_q, w_k, their gradients [CHANNELS, CHANNELS], grad_m [CHANNELS, CHANNELS], grad_bias [CHANNELS], b_q,
// grad_bq and grad_bk [CHANNELS] or null. A thread block makes 8 rows and 32 columns of one of them,
// in four parts of the sum.
#include "include/number.cuh"

#define ROWS 8
#define COLUMNS 32
#define SHARES 4
#define THREADS (ROWS * COLUMNS / 4 * SHARES)
#define COLUMN_TILES ((CHANNELS + COLUMNS - 1) / COLUMNS)
static_assert(CHANNELS % COLUMNS == 0 && CHANNELS % ROWS == 0, "whole tiles");

extern "C" __global__ void __launch_bounds__(THREADS)
attention_absorbed_parameters(const float* w_q, const float* w_k, const float* b_q, const float* grad_m,
                              const float* grad_bias, float* grad_wq, float* grad_wk, float* grad_bq, float* grad_bk) {
    // A row more, or a column, for other banks.
    __shared__ float left[ROWS][CHANNELS + 1];
    __shared__ __align__(16) float right[CHANNELS][COLUMNS + 4];
    __shared__ float4 parts[SHARES][ROWS][8];
    __shared__ float of_biases[CHANNELS], bias_parts[SHARES][ROWS];
    const bool is_query = blockIdx.x % 2 == 0;
    const int tile = (int)blockIdx.x / 2, first_row = tile / COLUMN_TILES * ROWS, first_column = tile % COLUMN_TILES * COLUMNS;
    const float* const factors = (is_query ? w_k : w_q) + first_row * CHANNELS;
#pragma unroll
    for (int i = (int)threadIdx.x; i < ROWS * CHANNELS / 4; i += THREADS) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(factors) + i);
        float* const to = &left[4 * i / CHANNELS][4 * i % CHANNELS];
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
#pragma unroll
    for (int i = (int)threadIdx.x; i < CHANNELS * COLUMNS / 4; i += THREADS) {
        if (is_query) {
            const int k = 4 * i / COLUMNS, column = 4 * i % COLUMNS;
            *reinterpret_cast<float4*>(&right[k][column]) =
                __ldg(reinterpret_cast<const float4*>(grad_m + k * CHANNELS + first_column + column));
        } else {
            const int column = i % COLUMNS, k = i / COLUMNS * 4;
            const float4 v = __ldg(reinterpret_cast<const float4*>(grad_m + (first_column + column) * CHANNELS + k));
            right[k][column] = v.x, right[k + 1][column] = v.y, right[k + 2][column] = v.z, right[k + 3][column] = v.w;
        }
    }
    if (threadIdx.x < CHANNELS) of_biases[threadIdx.x] = __ldg(grad_bias + threadIdx.x);
    __syncthreads();
    // Of a share of the sum, a row of the tile and four of its columns.
    const int share = (int)threadIdx.x / (THREADS / SHARES), mine = (int)threadIdx.x % (THREADS / SHARES) / 8;
    const int lane = (int)threadIdx.x % 8, row = first_row + mine, column = first_column + 4 * lane;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float of_bias = 0.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS / SHARES; ++i) {
        const int k = share * (CHANNELS / SHARES) + i;
        const float a = left[mine][k];
        const float4 b = *reinterpret_cast<const float4*>(&right[k][4 * lane]);
        sum = make_float4(fmaf(a, b.x, sum.x), fmaf(a, b.y, sum.y), fmaf(a, b.z, sum.z), fmaf(a, b.w, sum.w));
        of_bias = fmaf(a, of_biases[k], of_bias);
    }
    parts[share][mine][lane] = sum;
    if (lane == 0) bias_parts[share][mine] = of_bias;
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int i = 1; i < SHARES; ++i) {
        const float4 other = parts[i][mine][lane];
        sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        of_bias += bias_parts[i][mine];
    }
    if (!is_query && b_q != nullptr) {
        const float bias = __ldg(b_q + row);
        const float4 b = __ldg(reinterpret_cast<const float4*>(grad_bias + column));
        sum = make_float4(fmaf(bias, b.x, sum.x), fmaf(bias, b.y, sum.y), fmaf(bias, b.z, sum.z), fmaf(bias, b.w, sum.w));
    }
    *reinterpret_cast<float4*>((is_query ? grad_wq : grad_wk) + row * CHANNELS + column) = sum;
    if (first_column > 0 || lane > 0 || grad_bq == nullptr) return;
    // The softmax does not see what the key's bias adds.
    if (is_query) grad_bq[row] = of_bias;
    if (!is_query) grad_bk[row] = 0.0f;
}
