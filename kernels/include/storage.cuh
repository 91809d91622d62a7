// Storage types, 16-byte loads and the lane layout of a feature row [HEADS, CHANNELS].
//
// Constants of the prologue: STORAGE (0 fp32, 1 fp16, 2 bf16), HEADS, CHANNELS, VEC (elements of one load), HEAD_LANES
// (lanes that share a head), LANE_VECS (loads per lane and head), HEAD_SLOTS (heads side by side in a warp), LANE_HEADS
// (heads a lane walks through), EDGE_SLOTS (edges of one row side by side), WARP_ROWS (rows side by side), UNROLL
// (edges a slot keeps in flight), WARPS (per block). HEAD_LANES * HEAD_SLOTS * EDGE_SLOTS * WARP_ROWS == 32.
// EDGE_CHANNELS, EDGE_VEC and EDGE_VECS say of the rows of edges that all heads share what CHANNELS, VEC and LANE_VECS
// say of a head's features; they are not defined where there are no such rows.
#include "include/number.cuh"

#define GROUP_LANES (HEAD_LANES * HEAD_SLOTS)
#define GROUP_HEADS (HEAD_SLOTS * LANE_HEADS)
#define LANE_ELEMS (LANE_VECS * VEC)
#ifndef EDGE_CHANNELS
#define EDGE_CHANNELS 0
#define EDGE_VEC 1
#define EDGE_VECS 0
#endif
#define EDGE_STRIDE (HEADS * EDGE_CHANNELS)

// How channels lie on the lanes of a head: load k of lane i takes `width` of them from (k * HEAD_LANES + i) * width on.
// A lane has so many `heads` of them.
template <int CHANNELS_, int WIDTH, int LOADS, int LANE_HEADS_ = LANE_HEADS>
struct ChannelMap {
    static constexpr int channels = CHANNELS_, width = WIDTH, loads = LOADS, heads = LANE_HEADS_;
    static constexpr int elements = LOADS * WIDTH, words = (WIDTH * STORAGE_BYTES + 3) / 4;
    // Of a map without channels nothing is read, but arrays have a length.
    static constexpr int room = LOADS > 0 ? LOADS : 1;
};
typedef ChannelMap<CHANNELS, VEC, LANE_VECS> Features;
// What each head has for the channels of an edge's row, and the row itself.
typedef ChannelMap<EDGE_CHANNELS, EDGE_VEC, EDGE_VECS> EdgeTargets;
typedef ChannelMap<EDGE_CHANNELS, EDGE_VEC, EDGE_VECS, 1> EdgeRow;

// A read of memory that the kernel does not write, or of shared memory.
template <bool SHARED, class T>
__device__ __forceinline__ T read(const T* address) {
    if constexpr (SHARED) {
        return *address;
    } else {
        return __ldg(address);
    }
}

template <bool SHARED, class S>
__device__ __forceinline__ void load_pack(const storage_t* address, u32 (&words)[S::words]) {
    if constexpr (S::width * STORAGE_BYTES == 16) {
        const uint4 r = read<SHARED>(reinterpret_cast<const uint4*>(address));
        words[0] = r.x;
        words[1] = r.y;
        words[2] = r.z;
        words[3] = r.w;
    } else if constexpr (S::width * STORAGE_BYTES == 8) {
        const uint2 r = read<SHARED>(reinterpret_cast<const uint2*>(address));
        words[0] = r.x;
        words[1] = r.y;
    } else if constexpr (S::width * STORAGE_BYTES == 4) {
        words[0] = read<SHARED>(reinterpret_cast<const u32*>(address));
    } else {
        words[0] = read<SHARED>(reinterpret_cast<const u16*>(address));
    }
}

template <class S>
__device__ __forceinline__ void store_pack(storage_t* address, const u32 (&words)[S::words]) {
    if constexpr (S::width * STORAGE_BYTES == 16) {
        *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (S::width * STORAGE_BYTES == 8) {
        *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
    } else if constexpr (S::width * STORAGE_BYTES == 4) {
        *reinterpret_cast<u32*>(address) = words[0];
    } else {
        *reinterpret_cast<u16*>(address) = (u16)words[0];
    }
}

template <class S>
__device__ __forceinline__ void unpack(const u32 (&words)[S::words], float* x) {
#pragma unroll
    for (int v = 0; v < S::width; ++v) {
#if STORAGE == 0
        x[v] = __uint_as_float(words[v]);
#else
        x[v] = from_bits16((words[v / 2] >> (16 * (v % 2))) & 0xffffu);
#endif
    }
}

template <class S>
__device__ __forceinline__ void pack(const float* x, u32 (&words)[S::words]) {
#pragma unroll
    for (int w = 0; w < S::words; ++w) {
#if STORAGE == 0
        words[w] = __float_as_uint(x[w]);
#else
        words[w] = pack_pair(x[2 * w], 2 * w + 1 < S::width ? x[2 * w + 1] : 0.0f);
#endif
    }
}

// Where a lane sits: its row, its edge of that row, its head and its part of the head.
struct Lanes {
    int head_lane, edge_slot, row_slot, first_head, offset;
};

__device__ __forceinline__ Lanes lane_layout() {
    const int lane = threadIdx.x & 31;
    Lanes l;
    l.head_lane = lane % HEAD_LANES;
    l.edge_slot = lane / GROUP_LANES % EDGE_SLOTS;
    l.row_slot = lane / (GROUP_LANES * EDGE_SLOTS);
    l.first_head = (int)blockIdx.y * GROUP_HEADS + lane / HEAD_LANES % HEAD_SLOTS;
    l.offset = l.first_head * CHANNELS + l.head_lane * VEC;
    return l;
}

// The number of a lane's item in the grid.
__device__ __forceinline__ i64 item_of_lane(const Lanes& l) {
    return ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_ROWS + l.row_slot;
}

__device__ __forceinline__ int head_of(const Lanes& l, int h) { return l.first_head + h * HEAD_SLOTS; }

__device__ __forceinline__ bool has_head(const Lanes& l, int h) {
    return HEADS % GROUP_HEADS == 0 || head_of(l, h) < HEADS;
}

template <class S = Features>
__device__ __forceinline__ bool has_vec(const Lanes& l, int h, int k) {
    return has_head(l, h) && (S::channels == HEAD_LANES * S::elements ||
                              (k * HEAD_LANES + l.head_lane) * S::width < S::channels);
}

template <class S = Features>
__device__ __forceinline__ int vec_offset(int h, int k) {
    return h * HEAD_SLOTS * S::channels + k * HEAD_LANES * S::width;
}

// Where a lane's share of a row begins; all heads read one EdgeRow.
template <class S>
__device__ __forceinline__ int lane_offset(const Lanes& l) {
    return l.first_head * S::channels + l.head_lane * S::width;
}
template <>
__device__ __forceinline__ int lane_offset<Features>(const Lanes& l) {
    return l.offset;
}
__device__ __forceinline__ int edge_row_offset(const Lanes& l) { return l.head_lane * EDGE_VEC; }

// A lane's share of one row, as stored and as fp32.
template <class S>
struct PackedOf {
    u32 words[S::heads][S::room][S::words];
};
template <class S>
struct FragmentOf {
    float x[S::heads][S::room * S::width];
};
typedef PackedOf<Features> Packed;
typedef FragmentOf<Features> Fragment;

// Hides where a pointer comes from, so that it stays in registers as it is: a row is then addressed by one
// multiply-add, where the compiler would else add up base, offset and row anew for each edge. Of a pointer to shared
// memory the compiler has to see that it is one.
template <bool SHARED = false, class T>
__device__ __forceinline__ const T* opaque(const T* pointer) {
#ifndef PYG_DFGNN_EMULATOR
    if constexpr (!SHARED) asm("" : "+l"(pointer));
#endif
    return pointer;
}

// Tensors [rows, HEADS, CHANNELS], STRIDE elements from row to row, are addressed from a lane's own offset.
template <bool SHARED = false, class S = Features>
__device__ __forceinline__ const storage_t* at_lane(const storage_t* base, const Lanes& l) {
    return opaque<SHARED>(base + lane_offset<S>(l));
}

template <bool SHARED = false, int STRIDE = ROW_STRIDE, class S = Features>
__device__ __forceinline__ PackedOf<S> load_packed(const storage_t* lane_base, int row, const Lanes& l) {
    PackedOf<S> p;
    const storage_t* address = lane_base + (u64)(u32)row * STRIDE;
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int k = 0; k < S::loads; ++k) {
            if (has_vec<S>(l, h, k)) {
                load_pack<SHARED, S>(address + vec_offset<S>(h, k), p.words[h][k]);
            } else {
#pragma unroll
                for (int w = 0; w < S::words; ++w) p.words[h][k][w] = 0u;
            }
        }
    }
    return p;
}

template <class S>
__device__ __forceinline__ FragmentOf<S> widen(const PackedOf<S>& p) {
    FragmentOf<S> fragment;
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int k = 0; k < S::loads; ++k) unpack<S>(p.words[h][k], &fragment.x[h][k * S::width]);
    }
    return fragment;
}

template <int STRIDE = ROW_STRIDE, class S = Features>
__device__ __forceinline__ FragmentOf<S> load_fragment(const storage_t* base, int row, const Lanes& l) {
    return widen(load_packed<false, STRIDE, S>(at_lane<false, S>(base, l), row, l));
}

// Writes a row that begins at `address` for this lane.
template <class S>
__device__ __forceinline__ void store_at(storage_t* address, const Lanes& l, const FragmentOf<S>& fragment) {
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int k = 0; k < S::loads; ++k) {
            if (has_vec<S>(l, h, k)) {
                u32 words[S::words];
                pack<S>(&fragment.x[h][k * S::width], words);
                store_pack<S>(address + vec_offset<S>(h, k), words);
            }
        }
    }
}

template <int STRIDE = ROW_STRIDE, class S>
__device__ __forceinline__ void store_fragment(storage_t* base, int row, const Lanes& l,
                                               const FragmentOf<S>& fragment) {
    store_at(base + (i64)row * STRIDE + lane_offset<S>(l), l, fragment);
}

// The same for fp32 buffers whatever the storage type: parameters, outputs, states. Plain loads, as a kernel may write
// the buffer that it reads. A buffer that is not ALIGNED to 16 bytes is read number by number.
template <class S = Features, bool ALIGNED = true>
__device__ __forceinline__ FragmentOf<S> load_fragment_fp32(const float* base, i64 row, const Lanes& l) {
    FragmentOf<S> fragment;
    const float* address = base + row * (HEADS * S::channels) + lane_offset<S>(l);
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int k = 0; k < S::loads; ++k) {
            float* x = &fragment.x[h][k * S::width];
#pragma unroll
            for (int v = 0; v < S::width; ++v) x[v] = 0.0f;
            if (!has_vec<S>(l, h, k)) continue;
            if constexpr (ALIGNED && S::width % 4 == 0) {
#pragma unroll
                for (int v = 0; v < S::width; v += 4) {
                    const float4 r = *reinterpret_cast<const float4*>(address + vec_offset<S>(h, k) + v);
                    x[v] = r.x;
                    x[v + 1] = r.y;
                    x[v + 2] = r.z;
                    x[v + 3] = r.w;
                }
            } else {
#pragma unroll
                for (int v = 0; v < S::width; ++v) x[v] = address[vec_offset<S>(h, k) + v];
            }
        }
    }
    return fragment;
}

template <bool ALIGNED = true, class S>
__device__ __forceinline__ void store_fragment_fp32(float* base, i64 row, const Lanes& l,
                                                    const FragmentOf<S>& fragment) {
    float* address = base + row * (HEADS * S::channels) + lane_offset<S>(l);
#pragma unroll
    for (int h = 0; h < S::heads; ++h) {
#pragma unroll
        for (int k = 0; k < S::loads; ++k) {
            if (!has_vec<S>(l, h, k)) continue;
            const float* x = &fragment.x[h][k * S::width];
            if constexpr (ALIGNED && S::width % 4 == 0) {
#pragma unroll
                for (int v = 0; v < S::width; v += 4) {
                    *reinterpret_cast<float4*>(address + vec_offset<S>(h, k) + v) =
                        make_float4(x[v], x[v + 1], x[v + 2], x[v + 3]);
                }
            } else {
#pragma unroll
                for (int v = 0; v < S::width; ++v) address[vec_offset<S>(h, k) + v] = x[v];
            }
        }
    }
}

// One number per head of a row [rows, HEADS] in fp32.
struct HeadValues {
    float x[LANE_HEADS];
};

template <bool SHARED = false>
__device__ __forceinline__ HeadValues load_heads(const float* base, i64 row, const Lanes& l) {
    HeadValues values;
    const float* address = opaque<SHARED>(base + l.first_head) + (u64)(u32)row * HEADS;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        values.x[h] = has_head(l, h) ? read<SHARED>(address + h * HEAD_SLOTS) : 0.0f;
    }
    return values;
}

// The same for a buffer that the kernel may write too.
__device__ __forceinline__ HeadValues load_state_heads(const float* base, i64 row, const Lanes& l) {
    HeadValues values;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) values.x[h] = has_head(l, h) ? base[row * HEADS + head_of(l, h)] : 0.0f;
    return values;
}

__device__ __forceinline__ void store_heads(float* base, i64 row, const Lanes& l, const HeadValues& values) {
    if (l.head_lane != 0) return;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
        if (has_head(l, h)) base[row * HEADS + head_of(l, h)] = values.x[h];
    }
}
