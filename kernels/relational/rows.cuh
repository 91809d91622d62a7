// Rows of generated kernels: what a lane reads, computes with and writes.
//
// A value of a row is a Fragment, [H, C] or [C] of all heads, or HeadValues, [H] or one number of all heads. In memory
// (FORM) it is [H, C] (3), [C] (2), [H] (1) or one number (0), in the storage type or, EXACT, in fp32.
#include "relational/pointwise.cuh"

#define EACH_HEAD _Pragma("unroll") for (int h = 0; h < LANE_HEADS; ++h)
#define EACH_CHANNEL EACH_HEAD _Pragma("unroll") for (int c = 0; c < LANE_ELEMS; ++c)

#if STORAGE == 0
__device__ __forceinline__ float to_fp32(float x) { return x; }
__device__ __forceinline__ void put(float* address, float x) { *address = x; }
#else
__device__ __forceinline__ float to_fp32(float x) { return x; }
__device__ __forceinline__ float to_fp32(storage_t x) { return from_bits16(x); }
__device__ __forceinline__ void put(float* address, float x) { *address = x; }
__device__ __forceinline__ void put(storage_t* address, float x) { *address = to_bits16(x); }
#endif

// The channels of a head that a lane has: its load k, number v, is channel channel_at(l, k * VEC + v) of them.
__device__ __forceinline__ int channel_at(const Lanes& l, int c) {
    return (c / VEC * HEAD_LANES + l.head_lane) * VEC + c % VEC;
}

// What a lane has loaded of a row, as it lies in memory.
template <bool EXACT, int FORM>
struct Leaf;

template <>
struct Leaf<false, 3> {
    Packed packed;
    __device__ __forceinline__ void load(const storage_t* base, int row, const Lanes& l) {
        packed = load_packed(at_lane(base, l), row, l);
    }
    __device__ __forceinline__ Fragment get() const { return widen(packed); }
};

#if STORAGE == 0
template <>
struct Leaf<true, 3> : Leaf<false, 3> {};
#else
template <>
struct Leaf<true, 3> {
    Fragment fragment;
    __device__ __forceinline__ void load(const float* base, int row, const Lanes& l) {
        fragment = load_fragment_fp32(base, row, l);
    }
    __device__ __forceinline__ Fragment get() const { return fragment; }
};
#endif

template <bool EXACT>
struct Leaf<EXACT, 2> {
    float x[LANE_ELEMS];
    template <class T>
    __device__ __forceinline__ void load(const T* base, int row, const Lanes& l) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            const int channel = channel_at(l, c);
            x[c] = channel < CHANNELS ? to_fp32(__ldg(base + (i64)row * CHANNELS + channel)) : 0.0f;
        }
    }
    __device__ __forceinline__ Fragment get() const {
        Fragment fragment;
        EACH_CHANNEL fragment.x[h][c] = x[c];
        return fragment;
    }
};

template <bool EXACT>
struct Leaf<EXACT, 1> {
    HeadValues values;
    template <class T>
    __device__ __forceinline__ void load(const T* base, int row, const Lanes& l) {
        EACH_HEAD values.x[h] = has_head(l, h) ? to_fp32(__ldg(base + (i64)row * HEADS + head_of(l, h))) : 0.0f;
    }
    __device__ __forceinline__ HeadValues get() const { return values; }
};

template <bool EXACT>
struct Leaf<EXACT, 0> {
    float number;
    template <class T>
    __device__ __forceinline__ void load(const T* base, int row, const Lanes& l) {
        number = to_fp32(__ldg(base + row));
    }
    __device__ __forceinline__ HeadValues get() const {
        HeadValues values;
        EACH_HEAD values.x[h] = number;
        return values;
    }
};

template <bool EXACT, int FORM, class T>
__device__ __forceinline__ auto read_row(const T* base, int row, const Lanes& l) {
    Leaf<EXACT, FORM> leaf;
    leaf.load(base, row, l);
    return leaf.get();
}

// Writes a row; of what all heads share, the first head's lanes do.
template <bool EXACT, int FORM, class T>
__device__ __forceinline__ void write_row(T* base, int row, const Lanes& l, const Fragment& fragment) {
    if constexpr (FORM == 3 && EXACT) {
        store_fragment_fp32(base, row, l, fragment);
    } else if constexpr (FORM == 3) {
        store_fragment(base, row, l, fragment);
    } else if (l.first_head == 0) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            const int channel = channel_at(l, c);
            if (channel < CHANNELS) put(base + (i64)row * CHANNELS + channel, fragment.x[0][c]);
        }
    }
}

template <bool EXACT, int FORM, class T>
__device__ __forceinline__ void write_row(T* base, int row, const Lanes& l, const HeadValues& values) {
    if (l.head_lane != 0) return;
    if constexpr (FORM == 1) {
        EACH_HEAD {
            if (has_head(l, h)) put(base + (i64)row * HEADS + head_of(l, h), values.x[h]);
        }
    } else if (l.first_head == 0) {
        put(base + row, values.x[0]);
    }
}

// The sum over the channels of each head; what a lane holds beyond them is not part of it.
template <class Term>
__device__ __forceinline__ HeadValues channel_sum(const Lanes& l, const Term& term) {
    HeadValues sums;
    EACH_HEAD {
        sums.x[h] = 0.0f;
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) sums.x[h] += channel_at(l, c) < CHANNELS ? term(h, c) : 0.0f;
    }
    head_sum<LANE_HEADS, HEAD_LANES / 2>(sums.x);
    return sums;
}
