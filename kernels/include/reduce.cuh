// Warp reductions over the lane layout of storage.cuh. Every lane of the warp takes fragment; the order is fixed.

// Sums COUNT values over the lanes of a head, MASK = HEAD_LANES / 2, or with LEAST = HEAD_LANES and MASK = GROUP_LANES / 2
// over the heads side by side. While several values are left, each exchange
// halves them (a lane keeps one half and sends the other), which needs COUNT + log2(HEAD_LANES) shuffles instead of
// COUNT * log2(HEAD_LANES). The tree of additions of each value does not depend on COUNT.
template <int COUNT, int MASK, int LEAST = 1>
__device__ __forceinline__ void head_sum(float* v) {
    static_assert((COUNT & (COUNT - 1)) == 0, "halving needs a power of two");
    if constexpr (MASK >= LEAST) {
        if constexpr (COUNT == 1) {
            v[0] += __shfl_xor_sync(FULL_MASK, v[0], MASK);
            head_sum<1, MASK / 2, LEAST>(v);
        } else {
            constexpr int HALF = COUNT / 2;
            const bool upper = (threadIdx.x & MASK) != 0;
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float kept = upper ? v[HALF + i] : v[i];
                const float sent = upper ? v[i] : v[HALF + i];
                v[i] = kept + __shfl_xor_sync(FULL_MASK, sent, MASK);
            }
            head_sum<HALF, MASK / 2, LEAST>(v);
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float other = __shfl_xor_sync(FULL_MASK, v[i], MASK);
                v[HALF + i] = upper ? v[i] : other;
                v[i] = upper ? other : v[i];
            }
        }
    }
}

// One lane's part of the product of head h, which it adds to a sum.
template <class S, class T>
__device__ __forceinline__ float lane_dot(const FragmentOf<S>& a, const FragmentOf<T>& b, int h, float sum = 0.0f) {
#pragma unroll
    for (int c = 0; c < S::elements; ++c) sum = fmaf(a.x[h][c], b.x[T::heads == 1 ? 0 : h][c], sum);
    return sum;
}

__device__ __forceinline__ HeadValues head_dot(const Fragment& a, const Fragment& b,
                                               const HeadValues& parts = {}) {
    HeadValues sums;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) sums.x[h] = lane_dot(a, b, h, parts.x[h]);
    head_sum<LANE_HEADS, HEAD_LANES / 2>(sums.x);
    return sums;
}

// 1 / max(||x||, 1e-12) of the sum of squares, as torch.nn.functional.normalize clamps the norm.
__device__ __forceinline__ float inverse_norm(float squares) { return 1.0f / fmaxf(sqrtf(squares), 1e-12f); }

__device__ __forceinline__ HeadValues inverse_norms(const Fragment& x) {
    HeadValues norms = head_dot(x, x);
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) norms.x[h] = inverse_norm(norms.x[h]);
    return norms;
}

// Sums over the edge slots of a row (and, with ROWS, over the rows of the warp too).
template <bool ROWS>
__device__ __forceinline__ float slot_sum(float value) {
#pragma unroll
    for (int mask = GROUP_LANES; mask < (ROWS ? 32 : GROUP_LANES * EDGE_SLOTS); mask *= 2) {
        value += __shfl_xor_sync(FULL_MASK, value, mask);
    }
    return value;
}

template <bool ROWS, class S>
__device__ __forceinline__ void slot_sum(FragmentOf<S>& fragment) {
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int c = 0; c < S::elements; ++c) fragment.x[h][c] = slot_sum<ROWS>(fragment.x[h][c]);
    }
}

__device__ __forceinline__ void slot_sum(HeadValues& values) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) values.x[h] = slot_sum<false>(values.x[h]);
}

// Sums over the rows of a thread block, which its first GROUP_LANES threads get.
__device__ __forceinline__ void block_sum(Fragment& fragment) {
    __shared__ float shared[WARPS][GROUP_LANES][LANE_HEADS * LANE_ELEMS];
    slot_sum<true>(fragment);
    const int lane = threadIdx.x & 31;
    if (lane < GROUP_LANES) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) shared[threadIdx.x / 32][lane][h * LANE_ELEMS + c] = fragment.x[h][c];
        }
    }
    __syncthreads();
    if (threadIdx.x >= GROUP_LANES) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; ++w) sum += shared[w][threadIdx.x][h * LANE_ELEMS + c];
            fragment.x[h][c] = sum;
        }
    }
}

__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
    for (int mask = GROUP_LANES * EDGE_SLOTS; mask < 32; mask *= 2) {
        const int other = __shfl_xor_sync(FULL_MASK, value, mask);
        value = other > value ? other : value;
    }
    return value;
}

template <class S = Features>
__device__ __forceinline__ FragmentOf<S> zero_fragment() {
    FragmentOf<S> fragment;
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int c = 0; c < S::elements; ++c) fragment.x[h][c] = 0.0f;
    }
    return fragment;
}

__device__ __forceinline__ HeadValues zero_heads() {
    HeadValues values;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) values.x[h] = 0.0f;
    return values;
}

__device__ __forceinline__ void add_to(Fragment& fragment, const Fragment& other) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) fragment.x[h][c] += other.x[h][c];
    }
}

// Adds to a sum of many terms. COMPENSATED gathers what rounding takes from the sum in `lost`, to be added at the end
// (Knuth's two-sum): a chain over the thousands of chunks of a hub would cost several bits.
template <bool COMPENSATED>
__device__ __forceinline__ void accumulate(float& sum, float& lost, float term) {
    const float total = sum + term;
    if (COMPENSATED) {
        const float added = total - sum;
        lost += (sum - (total - added)) + (term - added);
    }
    sum = total;
}

template <bool COMPENSATED, class S>
__device__ __forceinline__ void accumulate(FragmentOf<S>& sum, FragmentOf<S>& lost, const FragmentOf<S>& term) {
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int c = 0; c < S::elements; ++c) accumulate<COMPENSATED>(sum.x[h][c], lost.x[h][c], term.x[h][c]);
    }
}

template <bool COMPENSATED>
__device__ __forceinline__ void accumulate(HeadValues& sum, HeadValues& lost, const HeadValues& term) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) accumulate<COMPENSATED>(sum.x[h], lost.x[h], term.x[h]);
}

// Adds what a sum has lost; an infinite one has no such number.
__device__ __forceinline__ void add_lost(float& sum, float lost) { sum += lost == lost ? lost : 0.0f; }

template <class S>
__device__ __forceinline__ void add_lost(FragmentOf<S>& sum, const FragmentOf<S>& lost) {
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int c = 0; c < S::elements; ++c) add_lost(sum.x[h][c], lost.x[h][c]);
    }
}

__device__ __forceinline__ void add_lost(HeadValues& sum, const HeadValues& lost) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) add_lost(sum.x[h], lost.x[h]);
}
