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

// A row that all heads share: each lane of a head has its channels of one.
typedef ChannelMap<CHANNELS, VEC, LANE_VECS, 1> SharedRow;

__device__ __forceinline__ bool has_shared(const Lanes& l, int k) {
    return CHANNELS == HEAD_LANES * LANE_ELEMS || (k * HEAD_LANES + l.head_lane) * VEC < CHANNELS;
}

template <>
struct Leaf<false, 2> {
    PackedOf<SharedRow> packed;
    __device__ __forceinline__ void load(const storage_t* base, int row, const Lanes& l) {
        const storage_t* address = base + (i64)row * CHANNELS + l.head_lane * VEC;
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (has_shared(l, k)) {
                load_pack<false, SharedRow>(address + k * HEAD_LANES * VEC, packed.words[0][k]);
            } else {
#pragma unroll
                for (int w = 0; w < SharedRow::words; ++w) packed.words[0][k][w] = 0u;
            }
        }
    }
    __device__ __forceinline__ Fragment get() const {
        const FragmentOf<SharedRow> row = widen(packed);
        Fragment fragment;
        EACH_CHANNEL fragment.x[h][c] = row.x[0][c];
        return fragment;
    }
};

#if STORAGE == 0
template <>
struct Leaf<true, 2> : Leaf<false, 2> {};
#else
template <>
struct Leaf<true, 2> {
    float x[LANE_ELEMS];
    __device__ __forceinline__ void load(const float* base, int row, const Lanes& l) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            const int channel = channel_at(l, c);
            x[c] = channel < CHANNELS ? __ldg(base + (i64)row * CHANNELS + channel) : 0.0f;
        }
    }
    __device__ __forceinline__ Fragment get() const {
        Fragment fragment;
        EACH_CHANNEL fragment.x[h][c] = x[c];
        return fragment;
    }
};
#endif

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

#define EACH_SHORT(K) _Pragma("unroll") for (int k = 0; k < K; ++k)

// A short row, which every lane holds whole.
template <int K>
struct Short {
    float x[K];
};

// In memory it begins at a multiple of UNIT numbers.
template <bool EXACT, int K, int UNIT>
struct ShortLeaf {
    // Numbers of one load, which begins at a multiple of its size.
    static constexpr int WIDTH = 16 / STORAGE_BYTES, PACK = EXACT           ? 1
                                                            : UNIT % WIDTH == 0 ? WIDTH
                                                            : UNIT % 2 == 0     ? 2
                                                                                : 1;
    typedef ChannelMap<K, PACK, K / PACK, 1> Map;
    u32 words[K / PACK][Map::words];

    __device__ __forceinline__ void load(const storage_t* base, int row, const Lanes&) {
#pragma unroll
        for (int p = 0; p < K / PACK; ++p) load_pack<false, Map>(base + (i64)row * K + p * PACK, words[p]);
    }
    __device__ __forceinline__ Short<K> get() const {
        Short<K> row;
#pragma unroll
        for (int p = 0; p < K / PACK; ++p) unpack<Map>(words[p], row.x + p * PACK);
        return row;
    }
};

#if STORAGE != 0
template <int K, int UNIT>
struct ShortLeaf<true, K, UNIT> {
    Short<K> row;
    __device__ __forceinline__ void load(const float* base, int number, const Lanes&) {
        EACH_SHORT(K) row.x[k] = __ldg(base + (i64)number * K + k);
    }
    __device__ __forceinline__ Short<K> get() const { return row; }
};
#endif

template <class L, class T>
__device__ __forceinline__ auto read_row(const T* base, int row, const Lanes& l) {
    L leaf;
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
    } else if (l.first_head != 0) {
        return;
    } else if constexpr (STORAGE == 0 || !EXACT) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (has_shared(l, k)) {
                u32 words[SharedRow::words];
                pack<SharedRow>(&fragment.x[0][k * VEC], words);
                store_pack<SharedRow>(base + (i64)row * CHANNELS + (k * HEAD_LANES + l.head_lane) * VEC, words);
            }
        }
    } else {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            const int channel = channel_at(l, c);
            if (channel < CHANNELS) put(base + (i64)row * CHANNELS + channel, fragment.x[0][c]);
        }
    }
}

// The lanes of the first head write a short row in turn.
template <class T, int K>
__device__ __forceinline__ void write_short(T* base, int row, const Lanes& l, const Short<K>& values) {
    if (l.first_head != 0) return;
    EACH_SHORT(K) {
        if (k % HEAD_LANES == l.head_lane) put(base + (i64)row * K + k, values.x[k]);
    }
}

// The lanes of the first head write zeros in turn.
template <int K, class T>
__device__ __forceinline__ void write_zeros(T* address, const Lanes& l) {
    if (l.first_head != 0) return;
    for (int k = l.head_lane; k < K; k += HEAD_LANES) put(address + k, 0.0f);
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

template <class Work>
__device__ __forceinline__ void for_each_number(Fragment& x, const Work& work) {
    EACH_CHANNEL work(x.x[h][c], h, c);
}
template <class Work>
__device__ __forceinline__ void for_each_number(HeadValues& x, const Work& work) {
    EACH_HEAD work(x.x[h], h, 0);
}
template <class Work>
__device__ __forceinline__ void for_each_number(const Fragment& x, const Work& work) {
    EACH_CHANNEL work(x.x[h][c], h, c);
}
template <class Work>
__device__ __forceinline__ void for_each_number(const HeadValues& x, const Work& work) {
    EACH_HEAD work(x.x[h], h, 0);
}
__device__ __forceinline__ float number_at(const Fragment& x, int h, int c) { return x.x[h][c]; }
__device__ __forceinline__ float number_at(const HeadValues& x, int h, int) { return x.x[h]; }

template <int K, class Work>
__device__ __forceinline__ void for_each_number(Short<K>& x, const Work& work) {
    EACH_SHORT(K) work(x.x[k], k, 0);
}
template <int K>
__device__ __forceinline__ float number_at(const Short<K>& x, int k, int) {
    return x.x[k];
}

template <class T>
__device__ __forceinline__ T filled(float number) {
    T x;
    for_each_number(x, [&](float& y, int, int) { y = number; });
    return x;
}

// How the numbers of a row are joined: sums, and the largest.
struct Plus {
    static constexpr bool ADDS = true;
    static __device__ __forceinline__ float none() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

struct Larger {
    static constexpr bool ADDS = false;
    static __device__ __forceinline__ float none() { return negative_infinity(); }
    static __device__ __forceinline__ float of(float a, float b) { return max_or_nan(a, b); }
};

// Joins a number of each lane, over lanes BEGIN, 2 BEGIN ... END / 2 apart; all of them get the result.
template <class Join, int BEGIN, int END>
__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
    for (int mask = BEGIN; mask < END; mask *= 2) x = Join::of(x, __shfl_xor_sync(FULL_MASK, x, mask));
    return x;
}

// The term(h, c) of each head joined over its channels; what a lane holds beyond them is not part of it.
template <class Join, class Term>
__device__ __forceinline__ HeadValues over_channels(const Lanes& l, const Term& term) {
    HeadValues joined;
    EACH_HEAD {
        joined.x[h] = Join::none();
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) {
            joined.x[h] = Join::of(joined.x[h], channel_at(l, c) < CHANNELS ? term(h, c) : Join::none());
        }
    }
    if constexpr (Join::ADDS) {
        head_sum<LANE_HEADS, HEAD_LANES / 2>(joined.x);
    } else {
        EACH_HEAD joined.x[h] = over_lanes<Join, 1, HEAD_LANES>(joined.x[h]);
    }
    return joined;
}

// The term(h, c) of each channel, or one number, T, joined over the heads, which all get the result.
template <class Join, class T, class Term>
__device__ __forceinline__ T over_heads(const Lanes& l, const Term& term) {
    // Of T, so that it is checked only where heads are joined.
    static_assert(sizeof(T) == 0 || GROUP_HEADS >= HEADS, "a group of lanes has to hold all heads");
    T joined;
    for_each_number(joined, [&](float& x, int h, int c) {
        if (h > 0) return;
        x = Join::none();
#pragma unroll
        for (int k = 0; k < LANE_HEADS; ++k) x = Join::of(x, has_head(l, k) ? term(k, c) : Join::none());
        x = over_lanes<Join, HEAD_LANES, GROUP_LANES>(x);
    });
    for_each_number(joined, [&](float& x, int, int c) { x = number_at(joined, 0, c); });
    return joined;
}
template <class Join>
__device__ __forceinline__ HeadValues over_heads(const Lanes& l, const HeadValues& values) {
    return over_heads<Join, HeadValues>(l, [&](int h, int) { return values.x[h]; });
}

// A stored weight of K rows. A lane keeps its share of few rows, and reads that of many where it needs them: they are
// near, as all lanes read them again and again.
constexpr int KEPT_WEIGHTS = 32;

// Hides that rows have been read before, which the compiler would else keep in registers between their uses.
template <class T>
__device__ __forceinline__ const T* anew(const T* pointer) {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("" : "+l"(pointer));
#endif
    return pointer;
}

template <bool EXACT, int FORM, int K>
struct Weights {
    typedef Leaf<EXACT, FORM> Row;
    static constexpr int size = K, form = FORM;
    static constexpr bool KEPT = K * LANE_HEADS * (FORM >= 2 ? LANE_ELEMS : 1) <= KEPT_WEIGHTS;
    Row rows[KEPT ? K : 1];

    template <class T>
    __device__ __forceinline__ void load(const T* base, const Lanes& l) {
        if constexpr (KEPT) {
            EACH_SHORT(K) rows[k].load(base, k, l);
        }
    }
    template <class T>
    __device__ __forceinline__ auto row(const T* base, int k, const Lanes& l) const {
        if constexpr (KEPT) {
            return rows[k].get();
        } else {
            return read_row<Row>(anew(base), k, l);
        }
    }
};

// The sum of x_k w_k.
template <class W, class T, int K>
__device__ __forceinline__ auto spread(const W& weights, const T* base, const Short<K>& x, const Lanes& l) {
    auto y = filled<decltype(weights.row(base, 0, l))>(0.0f);
    EACH_SHORT(K) {
        const auto row = weights.row(base, k, l);
        for_each_number(y, [&](float& sum, int h, int c) { sum = fmaf(x.x[k], number_at(row, h, c), sum); });
    }
    return y;
}

// The inner products of x with each w_k: over all heads and channels, the channels that all heads share, or a number of
// each head.
template <class W, class T, class X>
__device__ __forceinline__ auto project(const W& weights, const T* base, const X& x, const Lanes& l) {
    constexpr int K = W::size, FORM = W::form, LEAST = FORM == 1 ? HEAD_LANES : 1;
    constexpr int COUNT = K <= 1 ? 1 : K <= 2 ? 2 : K <= 4 ? 4 : K <= 8 ? 8 : K <= 16 ? 16 : 32;
    static_assert(FORM == 2 || GROUP_HEADS >= HEADS, "a group of lanes has to hold all heads");
    float sums[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) sums[k] = 0.0f;
    EACH_SHORT(K) {
        const auto row = weights.row(base, k, l);
        for_each_number(row, [&](float w, int h, int c) {
            const bool counts = FORM == 2 ? h == 0 : has_head(l, h);
            const bool is_channel = FORM == 1 || channel_at(l, c) < CHANNELS;
            if (counts && is_channel) sums[k] = fmaf(number_at(x, h, c), w, sums[k]);
        });
    }
    head_sum<COUNT, (FORM == 2 ? HEAD_LANES : GROUP_LANES) / 2, LEAST>(sums);
    Short<K> joined;
    EACH_SHORT(K) joined.x[k] = sums[k];
    return joined;
}
