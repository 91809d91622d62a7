// The matrices that absorbed.cuh multiplies with, as images, from the weights and biases of its linear layers: w_q, w_k,
// w_v [CHANNELS, CHANNELS], b_q, b_v [CHANNELS] or null.
#include "attention/absorbed.cuh"

__device__ __forceinline__ float4 plus(float4 sum, float4 v, float factor) {
    return make_float4(fmaf(factor, v.x, sum.x), fmaf(factor, v.y, sum.y), fmaf(factor, v.z, sum.z), fmaf(factor, v.w, sum.w));
}

// A column of an image by a warp, of which lane i has the places 4 i to 4 i + 3.
__device__ __forceinline__ void write_column(u32* image, int column, float4 x, float bias) {
    const int lane = (int)threadIdx.x % 32;
    const int slot = column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
    u32 size = max(max(size_of(x.x), size_of(x.y)), max(size_of(x.z), size_of(x.w)));
#pragma unroll
    for (int i = 1; i < 32; i *= 2) size = max(size, __shfl_xor_sync(FULL_MASK, size, i));
    const int exponent = exponent_of(size);
    const float lower = lowered(exponent);
    if (lane < STEPS * 4) {
        u32* const at = image + (lane / 4 * 2 * COLUMNS + slot) * 4 + lane % 4;
        hold_halves(x.x * lower, x.y * lower, at, HALVES);
        hold_halves(x.z * lower, x.w * lower, at + COLUMNS * 4, HALVES);
    }
    if (lane == 0) {
        reinterpret_cast<float*>(image + RAISE)[slot] = raised_less(exponent);
        reinterpret_cast<float*>(image + BIAS)[column] = bias;
    }
}

// Keeps the compiler from reading a number only when it is used.
__device__ __forceinline__ void hold_here(float4& v) {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w));
#endif
}

// Warps that share the sums of four columns of M; of the other images each makes a column.
#define SHARES 16
#define TURNS (CHANNELS / SHARES)

extern "C" __global__ void __launch_bounds__(32 * SHARES)
attention_absorbed_images(const float* w_q, const float* w_k, const float* w_v, const float* b_q, const float* b_v,
                          u32* images) {
    __shared__ float4 parts[SHARES][4][32];
    __shared__ float4 biases[SHARES];
    constexpr int BLOCKS = COLUMNS / 4;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, block = (int)blockIdx.x;
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (block < 2 * BLOCKS) {
        // Rows of M for M x, columns of M for M^T dq. Each warp takes some of the channels.
        const bool is_query = block < BLOCKS;
        const int first = 4 * (block % BLOCKS);
        const float* const four = is_query ? w_k : w_q;
        const float* const all = is_query ? w_q : w_k;
        float4 x[4] = {zeros, zeros, zeros, zeros};
        float4 bias = zeros;
        if (first < CHANNELS) {
            // All at once: the weights come from memory, as the optimizer left them long ago.
            float4 factors[TURNS], rows[TURNS];
            float added[TURNS];
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int c = warp + i * SHARES;
                factors[i] = __ldg(reinterpret_cast<const float4*>(four + c * CHANNELS + first));
                rows[i] = lane < CHANNELS / 4 ? __ldg(reinterpret_cast<const float4*>(all + c * CHANNELS) + lane) : zeros;
                added[i] = is_query && b_q != nullptr ? __ldg(b_q + c) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < TURNS; ++i) hold_here(factors[i]), hold_here(rows[i]);
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const float4 f = factors[i];
                x[0] = plus(x[0], rows[i], f.x), x[1] = plus(x[1], rows[i], f.y);
                x[2] = plus(x[2], rows[i], f.z), x[3] = plus(x[3], rows[i], f.w);
                bias = plus(bias, f, added[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) parts[warp][i][lane] = x[i];
        if (lane == 0) biases[warp] = bias;
        __syncthreads();
        if (warp >= 4) return;
        float4 sum = parts[0][warp][lane];
        float added = reinterpret_cast<const float*>(&biases[0])[warp];
#pragma unroll
        for (int i = 1; i < SHARES; ++i) {
            sum = plus(sum, parts[i][warp][lane]);
            added += reinterpret_cast<const float*>(&biases[i])[warp];
        }
        write_column(images + (is_query ? QUERY_IMAGE : INPUT_IMAGE) * IMAGE, first + warp, sum, added);
        return;
    }
    // Rows of W_v for the output, columns for the gradient of z.
    const int place = (block - 2 * BLOCKS) * SHARES + warp, column = place % COLUMNS;
    const bool is_out = place < COLUMNS;
    float4 x = zeros;
    if (column < CHANNELS && lane < CHANNELS / 4) {
        const float* const from = w_v + 4 * lane * CHANNELS + column;
        x = is_out ? __ldg(reinterpret_cast<const float4*>(w_v + column * CHANNELS) + lane)
                   : make_float4(__ldg(from), __ldg(from + CHANNELS), __ldg(from + 2 * CHANNELS), __ldg(from + 3 * CHANNELS));
    }
    const float bias = is_out && column < CHANNELS && b_v != nullptr ? __ldg(b_v + column) : 0.0f;
    write_column(images + (is_out ? OUT_IMAGE : MEAN_IMAGE) * IMAGE, column, x, bias);
}
