// Linear layers of one input, or the gradient of that input, for many rows, on compute capability 9.0 (sm_90a):
//   Y_l = X W_l^T + b_l           x [num_rows, FEATURES], w [CHANNELS, FEATURES], b [CHANNELS] or null of each layer
//   grad_x = sum_l G_l W_l        with BACKWARD: `a` are the gradients, `y0` is grad_x, and there are no biases
//
// A thread block holds COLUMNS columns of the right matrix, B, in shared memory. Each of its warpgroups takes strips of 64
// rows; a thread copies the numbers that it multiplies itself, RING sections of SECTION places ahead. A column of B has a
// scale in each matrix, a row of A in each section. Tensor cores cut what they add to a sum, so the sums of sections are
// added with rounding.
//
// The order of places in a sum is free as long as A and B have the same, and the order of columns if results are written
// accordingly. A float4 of a thread's row, places 16 c + 4 pos + r, goes into step c at slots 2 pos + r % 2 + 8 (r / 2); a
// float4 of its results, columns 16 i + 4 pos + 2 h + e, comes from slots 16 i + 8 h + 2 pos + e.
#include "include/number.cuh"
#include "include/copy.cuh"
#include "include/wgmma.cuh"
#include "include/fp16_split.cuh"
#include "gemm/layers.cuh"

#define THREADS (128 * WARPGROUPS)
#define WARPS (4 * WARPGROUPS)
#define MATRICES (BACKWARD ? LAYERS : 1)
#define GROUP_LAYERS (BACKWARD ? 1 : LAYERS)
#define DEPTH (BACKWARD ? CHANNELS : FEATURES)
#define WIDTH (BACKWARD ? FEATURES : CHANNELS)
#define GROUPS ((WIDTH + COLUMNS - 1) / COLUMNS)
#define MATRIX_SECTIONS (PLACES / SECTION)
#define SECTIONS (MATRICES * MATRIX_SECTIONS)
#define STEPS (SECTION / 16)
#define STEP (2 * COLUMNS)
// Whether the warpgroups take turns, so that one multiplies while the other reads and writes.
#define TURNS (SECTIONS == 1 && WARPGROUPS == 2)
// The numbers that a lane reads of B at a time, and the words of B's high numbers.
#define NUMBERS (BACKWARD ? 8 : 4)
#define RIGHT (MATRICES * PLACES * COLUMNS / 2)

// PLACES counts the places of one matrix, filled up to whole sections.
static_assert(PLACES % SECTION == 0 && SECTION % 16 == 0 && PLACES >= DEPTH && DEPTH % 4 == 0, "whole sections of float4");

__device__ __forceinline__ int column_of(int slot) {
    return slot / 16 * 16 + slot % 8 / 2 * 4 + slot / 8 % 2 * 2 + slot % 2;
}

// The column of an item of B.
__device__ __forceinline__ int slot_of(int item) {
    const int lane = (int)threadIdx.x % 32;
    return BACKWARD ? item % (COLUMNS / 32) * 32 + lane : item / (PLACES / 16) * 8 + lane / 4;
}

// Reads a lane's numbers of B: eight places of a column with BACKWARD, else four.
__device__ __forceinline__ void load_right(float (&x)[NUMBERS], const float* matrix, int item, int first_column) {
#if BACKWARD
    const int chunk = item / (COLUMNS / 32), column = first_column + column_of(slot_of(item));
    const int first_place = chunk / 2 * 16 + chunk % 2 * 2;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int place = first_place + i / 2 * 4 + i % 2;
        x[i] = column < FEATURES && place < CHANNELS ? matrix[place * FEATURES + column] : 0.0f;
    }
#else
    const int place = item % (PLACES / 16) * 16 + threadIdx.x % 4 * 4, column = first_column + column_of(slot_of(item));
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < CHANNELS && place < FEATURES) {
        v = *reinterpret_cast<const float4*>(matrix + column * FEATURES + place);
    }
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#endif
}
__device__ __forceinline__ void store_right(const float (&x)[NUMBERS], float lower, u32* right, int item) {
    u32* const column = right + slot_of(item) * 4;
    float numbers[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) numbers[i] = x[i] * lower;
#if BACKWARD
    store_fp16(numbers, column + item / (COLUMNS / 32) * (COLUMNS * 4), RIGHT);
#else
    u32* const at = column + item % (PLACES / 16) * (2 * COLUMNS * 4) + threadIdx.x % 4;
    store_fp16(numbers[0], numbers[1], at, RIGHT);
    store_fp16(numbers[2], numbers[3], at + COLUMNS * 4, RIGHT);
#endif
}

// Brings B into shared memory: the threads read all of it, find the scales and write it; `raise` undoes the scales.
__device__ __forceinline__ void hold_right(u32* right, float (&raise)[MATRICES][COLUMNS],
                                           const Layers<const float>& weights, int layer, int first_column) {
    __shared__ u32 sizes[MATRICES][COLUMNS];
    const int warp = (int)threadIdx.x / 32;
    constexpr int COUNT = PLACES * COLUMNS / (32 * NUMBERS), ITEMS = (COUNT + WARPS - 1) / WARPS;
    float numbers[MATRICES][ITEMS][NUMBERS];
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) {
        const float* const matrix = weights[BACKWARD ? m : layer];
#pragma unroll
        for (int t = 0; t < ITEMS; ++t) load_right(numbers[m][t], matrix, warp + t * WARPS, first_column);
    }
    for (int i = (int)threadIdx.x; i < MATRICES * COLUMNS; i += THREADS) sizes[i / COLUMNS][i % COLUMNS] = 0;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < MATRICES * ITEMS; ++t) {
        const int m = t / ITEMS, item = warp + t % ITEMS * WARPS;
        u32 size = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) size = max(size, size_of(numbers[m][t % ITEMS][i]));
        if (item < COUNT) atomicMax(&sizes[m][slot_of(item)], size);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < MATRICES * ITEMS; ++t) {
        const int m = t / ITEMS, item = warp + t % ITEMS * WARPS;
        if (item >= COUNT) continue;
        const int exponent = exponent_of(sizes[m][slot_of(item)]);
        store_right(numbers[m][t % ITEMS], lowered(exponent), right + m * (PLACES * COLUMNS / 2), item);
    }
    for (int i = (int)threadIdx.x; i < MATRICES * COLUMNS; i += THREADS) {
        raise[i / COLUMNS][i % COLUMNS] = raised_less(exponent_of(sizes[i / COLUMNS][i % COLUMNS]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm_forward_strips(i64 num_rows, const float* a0, const float* a1, const float* a2, const float* a3, const float* w0,
                    const float* w1, const float* w2, const float* w3, const float* b0, const float* b1,
                    const float* b2, const float* b3, float* y0, float* y1, float* y2, float* y3) {
    extern __shared__ __align__(128) u32 held[];
    __shared__ __align__(8) float raised_right[MATRICES][COLUMNS];
#if !BACKWARD
    // The biases of the block's columns, or zeros: reads from memory would keep each strip waiting.
    __shared__ __align__(16) float held_biases[COLUMNS];
#endif
    const Layers<const float> weights = {w0, w1, w2, w3}, lefts = {a0, a1, a2, a3};
    const Layers<float> results = {y0, y1, y2, y3};
    constexpr int BLOCK_GROUPS = GROUP_LAYERS * GROUPS;
    float* const ring = reinterpret_cast<float*>(held + 2 * RIGHT) + 4 * threadIdx.x;
    // Thread blocks that follow each other read the same rows.
    const int group = (int)blockIdx.x % BLOCK_GROUPS, layer = group / GROUPS, first_column = group % GROUPS * COLUMNS;
    const int block = (int)blockIdx.x / BLOCK_GROUPS, blocks = (int)gridDim.x / BLOCK_GROUPS;
    const int warpgroup = (int)threadIdx.x / 128, warp = (int)threadIdx.x / 32 % 4;
    const int lane = (int)threadIdx.x % 32, pos = lane % 4;
    const i64 strips = (num_rows + 63) / 64, step = WARPGROUPS * blocks, first_strip = block + blocks * warpgroup;

    // The next section to copy.
    i64 next_strip = first_strip;
    int next_section = 0, next_slot = 0;
    const auto start = [&]() {
        if (next_strip < strips) {
            const i64 row = next_strip * 64 + warp * 16 + lane / 4;
            const int matrix = next_section / MATRIX_SECTIONS, place = next_section % MATRIX_SECTIONS * SECTION + 4 * pos;
            const float* const left = BACKWARD ? lefts[matrix] : a0;
            const float* const from = left + (row * DEPTH + place);
            float* const to = ring + next_slot * (2 * STEPS * THREADS * 4);
            const bool first_exists = row < num_rows, second_exists = row + 8 < num_rows;
#pragma unroll
            for (int c = 0; c < STEPS; ++c) {
                const bool exists = PLACES == DEPTH || place + 16 * c < DEPTH;
                const bool first = first_exists && exists, second = second_exists && exists;
                copy16(to + 2 * c * THREADS * 4, first ? from + 16 * c : a0, first);
                copy16(to + (2 * c + 1) * THREADS * 4, second ? from + 16 * c + 8 * DEPTH : a0, second);
            }
        }
        close_copies();
        if (++next_section == SECTIONS) {
            next_section = 0;
            next_strip += step;
        }
        if (++next_slot == RING) next_slot = 0;
    };
#pragma unroll 1
    for (int i = 0; i < RING; ++i) start();
#if !BACKWARD
    const float* const bias = Layers<const float>{b0, b1, b2, b3}[layer];
    for (int i = (int)threadIdx.x; i < COLUMNS; i += THREADS) {
        held_biases[i] = bias != nullptr && first_column + i < CHANNELS ? bias[first_column + i] : 0.0f;
    }
#endif
    hold_right(held, raised_right, weights, layer, first_column);
    fence_proxy_async();
    __syncthreads();

    const u64 right_at = matrix_descriptor(held, COLUMNS * 16);
    float high_sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) high_sums[i] = 0.0f;
    float low_sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) low_sums[i] = 0.0f;
#if TURNS
    // There are as many turns as the first warpgroup has strips.
    const i64 turns = block < strips ? (strips - block + step - 1) / step : 0;
    i64 turn = 0;
    if (warpgroup == 1 && turns > 0) barrier_arrive(1, THREADS);
#endif
    float* const result = results[layer];
    int slot = 0;
#pragma unroll 1
    for (i64 strip = first_strip; strip < strips; strip += step) {
        float sums[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
        for (int section = 0; section < SECTIONS; ++section) {
            wait_copies<RING - 1>();
            const float* const mine = ring + slot * (2 * STEPS * THREADS * 4);
            if (++slot == RING) slot = 0;
            // The numbers of the upper row and of the row 8 below it.
            float4 numbers[2][STEPS];
            float lower[2], raise[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 size = 0;
#pragma unroll
                for (int c = 0; c < STEPS; ++c) {
                    const float4 v = numbers[h][c] = *reinterpret_cast<const float4*>(mine + (2 * c + h) * THREADS * 4);
                    size = max(max(max(size, size_of(v.x)), max(size_of(v.y), size_of(v.z))), size_of(v.w));
                }
                const int exponent = exponent_of(largest_of_row(size));
                lower[h] = lowered(exponent);
                raise[h] = raised(exponent);
            }
            Factors<STEPS> left;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; ++i) {
                const int c = i / 2, h = i % 2;
                const float4 v = numbers[h][c];
                set(left, c, h, v.x * lower[h], v.y * lower[h]);
                set(left, c, h + 2, v.z * lower[h], v.w * lower[h]);
            }
            pin(left);
#if TURNS
            barrier_sync(1 + warpgroup, THREADS);
#endif
            pin(high_sums);
            const u64 from = right_at + section * (STEPS * STEP);
            pin(low_sums);
            wgmma_fence();
            multiply_low(low_sums, left, from, STEP, RIGHT / 4);
            multiply_high(high_sums, left, from, STEP);
            wgmma_commit();
#if TURNS
            if (warpgroup == 0 || ++turn < turns) barrier_arrive(2 - warpgroup, THREADS);
#endif
            // The numbers of this section are in registers.
            start();
            wgmma_wait();
            pin(high_sums);
            pin(low_sums);
            pin(left);
            const float* const raise_right = raised_right[section / MATRIX_SECTIONS] + 2 * pos;
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i += 2) {
                const float2 of_column = *reinterpret_cast<const float2*>(raise_right + i / 4 * 8);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float sum = fmaf(low_sums[i + e], 0x1p-11f, high_sums[i + e]);
                    sums[i + e] = fmaf(sum * (e ? of_column.y : of_column.x), raise[i / 2 % 2], sums[i + e]);
                }
            }
        }
        const i64 row = strip * 64 + warp * 16 + lane / 4;
        const int column = first_column + 4 * pos;
        float* const line = result + (row * WIDTH + column);
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) {
            if (column + 16 * i >= WIDTH) continue;
            float4 added = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if !BACKWARD
            added = *reinterpret_cast<const float4*>(held_biases + 4 * pos + 16 * i);
#endif
            const float* const x = sums + 8 * i;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (row + 8 * h >= num_rows) continue;
                *reinterpret_cast<float4*>(line + 8 * h * WIDTH + 16 * i) =
                    make_float4(x[2 * h] + added.x, x[2 * h + 1] + added.y, x[2 * h + 4] + added.z, x[2 * h + 5] + added.w);
            }
        }
    }
#if TURNS
    // The first warpgroup waits for each of its turns, also where the second one has one strip less.
    if (warpgroup == 1) {
#pragma unroll 1
        while (turn < turns) {
            barrier_sync(2, THREADS);
            if (++turn < turns) barrier_arrive(1, THREADS);
        }
    }
#endif
    wait_copies<0>();
}
