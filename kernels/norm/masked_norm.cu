// Batch norm over the first rows of a padded batch, whose number n is read on the device: out = (x - mean) / sqrt(var +
// eps) * weight + bias, and 0 in rows of padding, which have no gradient either. Constant: STORAGE, of x.
//
// A warp has neighbouring columns, and the rows of a column are dealt out to the SLOTS warps of all gridDim.y blocks in
// turn. The first kernel of each direction writes what each block has found of a column, the second joins that in a
// fixed order, so that results are the same in every run.
#include "include/number.cuh"

#define COLUMNS 32
#define SLOTS 8

__device__ __forceinline__ float load(const storage_t* address) {
#if STORAGE == 0
    return *address;
#else
    return from_bits16(*address);
#endif
}

__device__ __forceinline__ void store(storage_t* address, float value) {
#if STORAGE == 0
    *address = value;
#else
    *address = to_bits16(value);
#endif
}

__device__ __forceinline__ i64 column_of_thread() { return (i64)blockIdx.x * COLUMNS + threadIdx.x % COLUMNS; }
__device__ __forceinline__ i64 slot_of_thread() { return (i64)blockIdx.y * SLOTS + threadIdx.x / COLUMNS; }
__device__ __forceinline__ i64 all_slots() { return (i64)gridDim.y * SLOTS; }

// Mean of some numbers and the sum of the squares of their deviations from it.
struct Moments {
    float mean, second, number;

    __device__ __forceinline__ void take(float x) {
        number += 1.0f;
        const float deviation = x - mean;
        mean += deviation / number;
        second = fmaf(deviation, x - mean, second);
    }

    // Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983.
    __device__ __forceinline__ void join(const Moments& other) {
        if (other.number == 0.0f) return;
        const float total = number + other.number, share = other.number / total, difference = other.mean - mean;
        mean = fmaf(difference, share, mean);
        second += fmaf(difference * difference, number * share, other.second);
        number = total;
    }

    __device__ __forceinline__ void put(float* pair, i64 channels) const {
        pair[0] = mean;
        pair[channels] = second;
    }

    static __device__ __forceinline__ Moments of(const float* pair, i64 channels, float number) {
        return {pair[0], pair[channels], number};
    }
};

// Sums of the gradients of a column, and of their products with its normalised numbers.
struct Sums {
    float first, second;

    __device__ __forceinline__ void join(const Sums& other) {
        first += other.first;
        second += other.second;
    }

    __device__ __forceinline__ void put(float* pair, i64 channels) const {
        pair[0] = first;
        pair[channels] = second;
    }

    static __device__ __forceinline__ Sums of(const float* pair, i64 channels, float) {
        return {pair[0], pair[channels]};
    }
};

// Joins what the warps of a block have of the same columns; the first warp, and with EACH each one, gets the result.
template <class T, bool EACH>
__device__ __forceinline__ T over_block(const T& own) {
    __shared__ T found[SLOTS][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, slot = threadIdx.x / COLUMNS;
    found[slot][lane] = own;
    __syncthreads();
    T all = found[0][lane];
    if (EACH || slot == 0) {
        for (int other = 1; other < SLOTS; ++other) all.join(found[other][lane]);
    }
    return all;
}

// Joins what all blocks have written of a column.
template <class T>
__device__ __forceinline__ T over_blocks(const float* pairs, i64 channels, i64 n) {
    const i64 column = column_of_thread(), rounds = n / all_slots();
    // Of the last round, some blocks have rows of all their warps, one of a few, and the others none.
    const int rest = (int)(n - rounds * all_slots());
    T own = {};
    for (int block = threadIdx.x / COLUMNS; column < channels && block < gridDim.y; block += SLOTS) {
        const int last = rest - block * SLOTS;
        const float number = (float)rounds * SLOTS + (float)(last < 0 ? 0 : last > SLOTS ? SLOTS : last);
        own.join(T::of(pairs + 2 * (i64)block * channels + column, channels, number));
    }
    return over_block<T, true>(own);
}

extern "C" __global__ void masked_norm_moments(const storage_t* x, const i64* count, i64 channels, float* pairs) {
    const i64 column = column_of_thread(), n = *count;
    Moments own = {};
    for (i64 row = slot_of_thread(); column < channels && row < n; row += all_slots()) {
        own.take(load(x + row * channels + column));
    }
    const Moments all = over_block<Moments, false>(own);
    if (threadIdx.x < COLUMNS && column < channels) all.put(pairs + 2 * blockIdx.y * channels + column, channels);
}

// `statistics` gets the mean and 1 / sqrt(var + eps) of each column. With a momentum below 0 the running statistics are
// means over all batches, of which `batches` is the number.
extern "C" __global__ void masked_norm_forward(const storage_t* x, const i64* count, i64 rows, i64 channels,
                                               const float* pairs, const float* weight, const float* bias,
                                               double momentum, double eps, const i64* batches, float* running_mean,
                                               float* running_var, float* statistics, storage_t* out) {
    const i64 column = column_of_thread(), n = *count;
    const Moments all = over_blocks<Moments>(pairs, channels, n);
    if (column >= channels) return;
    const float variance = all.second / (float)n, inverse = 1.0f / sqrtf(variance + (float)eps);
    if (blockIdx.y == 0 && threadIdx.x < COLUMNS) {
        statistics[column] = all.mean;
        statistics[channels + column] = inverse;
        if (running_mean) {
            const float share = momentum < 0.0 ? 1.0f / (float)*batches : (float)momentum;
            const float unbiased = all.second / (float)(n > 1 ? n - 1 : 1);
            running_mean[column] = fmaf(share, all.mean - running_mean[column], running_mean[column]);
            running_var[column] = fmaf(share, unbiased - running_var[column], running_var[column]);
        }
    }
    const float scale = weight ? weight[column] : 1.0f, shift = bias ? bias[column] : 0.0f;
    for (i64 row = slot_of_thread(); row < rows; row += all_slots()) {
        const i64 at = row * channels + column;
        store(out + at, row < n ? fmaf((load(x + at) - all.mean) * inverse, scale, shift) : 0.0f);
    }
}

extern "C" __global__ void masked_norm_sums(const storage_t* grad, const storage_t* x, const i64* count, i64 channels,
                                            const float* statistics, float* pairs) {
    const i64 column = column_of_thread(), n = *count;
    Sums own = {};
    if (column < channels) {
        const float mean = statistics[column], inverse = statistics[channels + column];
        for (i64 row = slot_of_thread(); row < n; row += all_slots()) {
            const i64 at = row * channels + column;
            const float g = load(grad + at);
            own.first += g;
            own.second = fmaf(g, (load(x + at) - mean) * inverse, own.second);
        }
    }
    const Sums all = over_block<Sums, false>(own);
    if (threadIdx.x < COLUMNS && column < channels) all.put(pairs + 2 * blockIdx.y * channels + column, channels);
}

// `grads` gets the gradients of the bias and of the weight.
extern "C" __global__ void masked_norm_backward(const storage_t* grad, const storage_t* x, const i64* count, i64 rows,
                                                i64 channels, const float* statistics, const float* pairs,
                                                const float* weight, float* grads, storage_t* grad_x) {
    const i64 column = column_of_thread(), n = *count;
    const Sums all = over_blocks<Sums>(pairs, channels, n);
    if (column >= channels) return;
    if (blockIdx.y == 0 && threadIdx.x < COLUMNS) all.put(grads + column, channels);
    if (!grad_x) return;
    const float mean = statistics[column], inverse = statistics[channels + column];
    const float scale = (weight ? weight[column] : 1.0f) * inverse, first = all.first / (float)n;
    const float second = all.second / (float)n;
    for (i64 row = slot_of_thread(); row < rows; row += all_slots()) {
        const i64 at = row * channels + column;
        if (row >= n) {
            store(grad_x + at, 0.0f);
            continue;
        }
        store(grad_x + at, scale * (load(grad + at) - first - (load(x + at) - mean) * inverse * second));
    }
}
