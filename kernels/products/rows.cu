// Linear layers of one input, or the gradient of that input, for many rows, on compute capability 9.0 (sm_90a):
//   Y_l = X W_l^T + b_l           x [num_rows, FEATURES], w [CHANNELS, FEATURES], b [CHANNELS] or null of each layer
//   grad_x = sum_l G_l W_l        with BACKWARD: gradients as `a`, grad_x as `y0`, no biases
// With BESIDE the results, or the gradients of them, are in one matrix [num_rows, LAYERS, CHANNELS]. With BACKWARD the sum
// is over TAKEN layers from layer FIRST on, and unless that is 0 it is added to what is there.
//
// A thread block holds COLUMNS columns of what rows are multiplied by, B, in shared memory, with SPLIT as two tf32 parts;
// each of its warpgroups takes strips of 64 rows, of which a thread copies what it multiplies itself, RING sections of
// SECTION places ahead. Tensor cores cut what they add to a sum, so with SPLIT those of sections are added with rounding.
//
// The order of places in a sum is free as long as both sides have the same, and the order of columns if results are
// written accordingly. A float4 of a thread's row, places 16 c + 4 pos + r, is its share of steps 2 c + r / 2 at slots
// pos + 4 (r % 2); a float4 of its results, columns 16 i + 4 pos + 2 h + e, comes from slots 16 i + 8 h + 2 pos + e.
#include "include/number.cuh"
#include "include/copy.cuh"
#include "include/wgmma.cuh"
#include "products/layers.cuh"

#define THREADS (128 * WARPGROUPS)
// Whether the warpgroups take turns: one multiplies while the other reads and writes.
#define TURNS (SPLIT && !BACKWARD)
// Whether the sums of sections are added one by one.
#define ADDED (SPLIT && BACKWARD)
#define MATRICES (BACKWARD ? TAKEN : 1)
#define GROUP_LAYERS (BACKWARD ? 1 : LAYERS)
#define DEPTH (BACKWARD ? CHANNELS : FEATURES)
#define WIDTH (BACKWARD ? FEATURES : CHANNELS)
#define GROUPS ((WIDTH + COLUMNS - 1) / COLUMNS)
#define LEFT_STRIDE (BACKWARD && BESIDE ? LAYERS * CHANNELS : DEPTH)
#define OUT_STRIDE (!BACKWARD && BESIDE ? LAYERS * CHANNELS : WIDTH)
#define PARTS (PLACES / SECTION)
#define SECTIONS (MATRICES * PARTS)
#define STEPS (SECTION / 8)
#define RIGHT (MATRICES * PLACES * COLUMNS)

// PLACES are those of one matrix, filled up to whole sections.
static_assert(PLACES % SECTION == 0 && SECTION % 16 == 0 && PLACES >= DEPTH && DEPTH % 4 == 0, "whole sections of float4");
static_assert(!TURNS || (WARPGROUPS == 2 && SECTIONS == 1), "two take turns by strips");

__device__ __forceinline__ int column_of(int slot) {
    return slot / 16 * 16 + slot % 8 / 2 * 4 + slot / 8 % 2 * 2 + slot % 2;
}

// B: a warp reads several items before it writes them.
__device__ __forceinline__ void hold_right(float* right, const Layers<const float>& weights, int layer,
                                           int first_column) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    constexpr int WARPS = THREADS / 32, BATCH = BACKWARD ? 4 : 8;
    constexpr int ITEMS = BACKWARD ? MATRICES * PLACES / 4 * (COLUMNS / 32) : PLACES / 16 * (COLUMNS / 8);
#pragma unroll 1
    for (int first = warp; first < ITEMS; first += WARPS * BATCH) {
        float numbers[BATCH][4];
#pragma unroll
        for (int t = 0; t < BATCH; ++t) {
            const int item = first + t * WARPS;
#if BACKWARD
            const int chunk = item / (COLUMNS / 32), column = first_column + column_of(item % (COLUMNS / 32) * 32 + lane);
            const int place = chunk % (PLACES / 4) / 4 * 16 + chunk % 4;
            const float* const from = weights[FIRST + (item < ITEMS ? chunk / (PLACES / 4) : 0)] + (place * FEATURES + column);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const bool exists = item < ITEMS && column < FEATURES && place + 4 * q < CHANNELS;
                numbers[t][q] = exists ? from[4 * q * FEATURES] : 0.0f;
            }
#else
            const int column = first_column + column_of(item / (PLACES / 16) * 8 + lane / 4);
            const int place = item % (PLACES / 16) * 16 + lane % 4 * 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (item < ITEMS && column < CHANNELS && place < FEATURES) {
                v = *reinterpret_cast<const float4*>(weights[layer] + column * FEATURES + place);
            }
            numbers[t][0] = v.x;
            numbers[t][1] = v.y;
            numbers[t][2] = v.z;
            numbers[t][3] = v.w;
#endif
        }
#pragma unroll
        for (int t = 0; t < BATCH; ++t) {
            const int item = first + t * WARPS;
            if (item >= ITEMS) continue;
#if BACKWARD
            const int at = (item / (COLUMNS / 32) * COLUMNS + item % (COLUMNS / 32) * 32 + lane) * 4;
            hold(numbers[t], right + at, RIGHT);
#else
            const int slot = item / (PLACES / 16) * 8 + lane / 4;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int at = ((item % (PLACES / 16) * 4 + r) * COLUMNS + slot) * 4 + lane % 4;
                hold(numbers[t][r], right + at, RIGHT);
            }
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
products_rows(i64 num_rows, const float* a0, const float* a1, const float* a2, const float* a3, const float* w0,
              const float* w1, const float* w2, const float* w3, const float* b0, const float* b1, const float* b2,
              const float* b3, float* y0, float* y1, float* y2, float* y3) {
    extern __shared__ __align__(128) float held[];
    const Layers<const float> weights = {w0, w1, w2, w3}, lefts = {a0, a1, a2, a3}, biases = {b0, b1, b2, b3};
    const Layers<float> results = {y0, y1, y2, y3};
    constexpr int BLOCK_GROUPS = GROUP_LAYERS * GROUPS;
    float* const ring = held + (1 + SPLIT) * RIGHT + 4 * threadIdx.x;
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
            const int matrix = next_section / PARTS, place = next_section % PARTS * SECTION + 4 * pos;
            const float* const left = BACKWARD ? (BESIDE ? a0 + (FIRST + matrix) * CHANNELS : lefts[FIRST + matrix]) : a0;
            const float* const from = left + (row * LEFT_STRIDE + place);
            float* const to = ring + next_slot * (STEPS * THREADS * 4);
            const bool first_exists = row < num_rows, second_exists = row + 8 < num_rows;
#pragma unroll
            for (int c = 0; c < STEPS / 2; ++c) {
                const bool exists = PLACES == DEPTH || place + 16 * c < DEPTH;
                const bool first = first_exists && exists, second = second_exists && exists;
                copy16(to + 2 * c * THREADS * 4, first ? from + 16 * c : a0, first);
                copy16(to + (2 * c + 1) * THREADS * 4, second ? from + 16 * c + 8 * LEFT_STRIDE : a0, second);
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
    hold_right(held, weights, layer, first_column);
    show_products();
    __syncthreads();

    const u64 right_at = described(held, COLUMNS * 16);
    float parts[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) parts[i] = 0.0f;
#if ADDED
    float sums[COLUMNS / 2];
#endif
#if TURNS
    // As many as the first has strips.
    const i64 turns = block < strips ? (strips - block + step - 1) / step : 0;
    i64 turn = 0;
    if (warpgroup == 1 && turns > 0) arrive_named(1, THREADS);
#endif
    // Found here, stores of 16 bytes are known to be aligned.
    float* const result = OUT_STRIDE == WIDTH ? results[layer] : y0 + layer * CHANNELS;
    int slot = 0;
#pragma unroll 1
    for (i64 strip = first_strip; strip < strips; strip += step) {
#if ADDED
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.0f;
#endif
#pragma unroll 1
        for (int section = 0; section < SECTIONS; ++section) {
            wait_copies<RING - 1>();
            Factors<STEPS> left;
            const float* const mine = ring + slot * (STEPS * THREADS * 4);
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                // Of the upper row and of the one 8 below.
                const float4 v = *reinterpret_cast<const float4*>(mine + i * THREADS * 4);
                const int half = i % 2, first = i / 2 * 2;
                left.set(first, half, v.x);
                left.set(first, half + 2, v.y);
                left.set(first + 1, half, v.z);
                left.set(first + 1, half + 2, v.w);
            }
            if (++slot == RING) slot = 0;
            pin(left);
#if TURNS
            wait_named(1 + warpgroup, THREADS);
#endif
            pin(parts);
            open_products();
            multiply(parts, left, right_at + section * STEPS * 2 * COLUMNS, 2 * COLUMNS, RIGHT / 4,
                     !ADDED && section > 0);
            close_products();
#if TURNS
            if (warpgroup == 0 || ++turn < turns) arrive_named(2 - warpgroup, THREADS);
#endif
            // The numbers of this section are in registers.
            start();
            wait_products();
            pin(parts);
            pin(left);
#if ADDED
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) sums[i] += parts[i];
#endif
        }
#if ADDED
        const float(&found)[COLUMNS / 2] = sums;
#else
        const float(&found)[COLUMNS / 2] = parts;
#endif
        const i64 row = strip * 64 + warp * 16 + lane / 4;
        const int column = first_column + 4 * pos;
        float* const line = result + (row * OUT_STRIDE + column);
        const float* const bias = BACKWARD ? nullptr : biases[layer];
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) {
            if (column + 16 * i >= WIDTH) continue;
            float4 more = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (bias != nullptr) more = *reinterpret_cast<const float4*>(bias + column + 16 * i);
            const float* const x = found + 8 * i;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (row + 8 * h >= num_rows) continue;
                float4* const at = reinterpret_cast<float4*>(line + 8 * h * OUT_STRIDE + 16 * i);
                if (FIRST > 0) more = *at;
                *at = make_float4(x[2 * h] + more.x, x[2 * h + 1] + more.y, x[2 * h + 4] + more.z, x[2 * h + 5] + more.w);
            }
        }
    }
#if TURNS
    // The first warpgroup waits for each of its turns, also where the second has one strip less.
    if (warpgroup == 1) {
#pragma unroll 1
        while (turn < turns) {
            wait_named(2, THREADS);
            if (++turn < turns) arrive_named(1, THREADS);
        }
    }
#endif
    wait_copies<0>();
}
