// A linear layer of few channels, y = x W^T + b, and its gradients, in float32: x [num_rows, FEATURES], w [CHANNELS, FEATURES],
// b [CHANNELS] or null, y [num_rows, CHANNELS]. A warp reads four rows at a time, a lane every 32nd 16 bytes of each, and
// holds its part of w.
//
// Backward, a thread block takes a share of `share` rows, which is a multiple of four: gradients of these rows of x, and of
// the parameters its sums in partial [shares, SUMS], weights first, then biases, then zeros. grad_x or partial may be null.
#include "include/number.cuh"

#define WARPS 8
#define ROWS 4
#define VECS ((FEATURES + 127) / 128)
// Numbers of a group of rows, which lanes hold one each.
#define NUMBERS (ROWS * CHANNELS)
#define SUMS ((CHANNELS * (FEATURES + 1) + 3) / 4 * 4)

static_assert(FEATURES % 4 == 0 && NUMBERS <= 32, "whole float4, a number for each lane");

__device__ __forceinline__ bool has_vec(int v, int lane) { return FEATURES % 128 == 0 || (v * 32 + lane) * 4 < FEATURES; }

// A lane's part of a row; zeros where there is none.
__device__ __forceinline__ void load_part(float4 (&part)[VECS], const float* rows, i64 row, bool exists, int lane) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
        part[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (exists && has_vec(v, lane)) part[v] = __ldg(reinterpret_cast<const float4*>(rows + row * FEATURES) + v * 32 + lane);
    }
}

__device__ __forceinline__ void add_to(float4& sum, float factor, float4 x) {
    sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
gemm_narrow_forward(i64 num_rows, const float* x, const float* w, const float* b, float* y) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    float4 weights[CHANNELS][VECS];
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) load_part(weights[k], w, k, true, lane);
    const float bias = b != nullptr && lane < NUMBERS ? __ldg(b + lane % CHANNELS) : 0.0f;
    const i64 step = (i64)gridDim.x * WARPS * ROWS;
#pragma unroll 1
    for (i64 row = ((i64)blockIdx.x * WARPS + warp) * ROWS; row < num_rows; row += step) {
        float4 rows[ROWS][VECS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) load_part(rows[r], x, row + r, row + r < num_rows, lane);
        float mine = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) {
                float sum = 0.0f;
#pragma unroll
                for (int v = 0; v < VECS; ++v) {
                    const float4 a = rows[r][v], c = weights[k][v];
                    sum = fmaf(a.w, c.w, fmaf(a.z, c.z, fmaf(a.y, c.y, fmaf(a.x, c.x, sum))));
                }
#pragma unroll
                for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, i);
                if (lane == r * CHANNELS + k) mine = sum;
            }
        }
        if (lane < NUMBERS && row + lane / CHANNELS < num_rows) y[row * CHANNELS + lane] = mine + bias;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
gemm_narrow_backward(i64 num_rows, i64 share, const float* x, const float* w, const float* g, float* grad_x,
                         float* partial) {
    __shared__ __align__(16) float block_sums[SUMS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const i64 begin = (i64)blockIdx.x * share, limit = num_rows - begin < share ? num_rows : begin + share;
    float4 weights[CHANNELS][VECS], sums[CHANNELS][VECS];
    float bias = 0.0f;
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) {
        load_part(weights[k], w, k, grad_x != nullptr, lane);
#pragma unroll
        for (int v = 0; v < VECS; ++v) sums[k][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll 1
    for (i64 row = begin + warp * ROWS; row < limit; row += WARPS * ROWS) {
        float mine = 0.0f;
        if (lane < NUMBERS && row + lane / CHANNELS < limit) mine = __ldg(g + row * CHANNELS + lane);
        bias += mine;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool exists = row + r < limit;
            float4 own[VECS], grad[VECS];
            load_part(own, x, row + r, exists && partial != nullptr, lane);
#pragma unroll
            for (int v = 0; v < VECS; ++v) grad[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) {
                const float factor = __shfl_sync(FULL_MASK, mine, r * CHANNELS + k);
#pragma unroll
                for (int v = 0; v < VECS; ++v) {
                    add_to(grad[v], factor, weights[k][v]);
                    add_to(sums[k][v], factor, own[v]);
                }
            }
            if (grad_x == nullptr || !exists) continue;
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
                if (has_vec(v, lane)) reinterpret_cast<float4*>(grad_x + (row + r) * FEATURES)[v * 32 + lane] = grad[v];
            }
        }
    }
    if (partial == nullptr) return;
    // Lane k has what the rows of a group give to channel k, as its first CHANNELS lanes add it up.
    float of_bias = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) of_bias += __shfl_sync(FULL_MASK, bias, r * CHANNELS + lane % CHANNELS);
    // The warps in turn, for one order of additions.
#pragma unroll 1
    for (int turn = 0; turn < WARPS; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
                for (int v = 0; v < VECS; ++v) {
                    if (!has_vec(v, lane)) continue;
                    float4* const at = reinterpret_cast<float4*>(block_sums + k * FEATURES) + v * 32 + lane;
                    float4 sum = turn > 0 ? *at : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    add_to(sum, 1.0f, sums[k][v]);
                    *at = sum;
                }
            }
            const int at = CHANNELS * FEATURES + lane;
            if (at < SUMS) block_sums[at] = lane >= CHANNELS ? 0.0f : (turn > 0 ? block_sums[at] : 0.0f) + of_bias;
        }
        __syncthreads();
    }
    for (int i = (int)threadIdx.x; i < SUMS / 4; i += 32 * WARPS) {
        reinterpret_cast<float4*>(partial + (i64)blockIdx.x * SUMS)[i] = reinterpret_cast<const float4*>(block_sums)[i];
    }
}
