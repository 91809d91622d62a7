// Storage types, 16-byte loads and the lane layout of a feature row [HEADS, CHANNELS].
//
// Constants of the prologue: STORAGE (0 fp32, 1 fp16, 2 bf16), HEADS, CHANNELS, VEC (elements of one load), HEAD_LANES
// (lanes that share a head), LANE_VECS (loads per lane and head), HEAD_SLOTS (heads side by side in a warp), LANE_HEADS
// (heads a lane walks through), EDGE_SLOTS (edges of one row side by side), WARP_ROWS (rows side by side), UNROLL
// (edges a slot keeps in flight), WARPS (per block). HEAD_LANES * HEAD_SLOTS * EDGE_SLOTS * WARP_ROWS == 32.
#include "include/number.cuh"

#define GROUP_LANES (HEAD_LANES * HEAD_SLOTS)
#define GROUP_HEADS (HEAD_SLOTS * LANE_HEADS)
#define LANE_ELEMS (LANE_VECS * VEC)
#define PACK_BYTES (VEC * STORAGE_BYTES)
#define PACK_WORDS ((PACK_BYTES + 3) / 4)

// A read of memory that the kernel does not write, or of shared memory.
template <bool SHARED, class T>
__device__ __forceinline__ T read(const T* address) {
    if constexpr (SHARED) {
        return *address;
    } else {
        return __ldg(address);
    }
}

template <bool SHARED>
__device__ __forceinline__ void load_pack(const storage_t* address, u32 (&words)[PACK_WORDS]) {
#if PACK_BYTES == 16
    const uint4 r = read<SHARED>(reinterpret_cast<const uint4*>(address));
    words[0] = r.x;
    words[1] = r.y;
    words[2] = r.z;
    words[3] = r.w;
#elif PACK_BYTES == 8
    const uint2 r = read<SHARED>(reinterpret_cast<const uint2*>(address));
    words[0] = r.x;
    words[1] = r.y;
#elif PACK_BYTES == 4
    words[0] = read<SHARED>(reinterpret_cast<const u32*>(address));
#else
    words[0] = read<SHARED>(reinterpret_cast<const u16*>(address));
#endif
}

__device__ __forceinline__ void store_pack(storage_t* address, const u32 (&words)[PACK_WORDS]) {
#if PACK_BYTES == 16
    *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
#elif PACK_BYTES == 8
    *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
#elif PACK_BYTES == 4
    *reinterpret_cast<u32*>(address) = words[0];
#else
    *reinterpret_cast<u16*>(address) = (u16)words[0];
#endif
}

__device__ __forceinline__ void unpack(const u32 (&words)[PACK_WORDS], float* x) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
#if STORAGE == 0
        x[v] = __uint_as_float(words[v]);
#else
        x[v] = from_bits16((words[v / 2] >> (16 * (v % 2))) & 0xffffu);
#endif
    }
}

__device__ __forceinline__ void pack(const float* x, u32 (&words)[PACK_WORDS]) {
#pragma unroll
    for (int w = 0; w < PACK_WORDS; ++w) {
#if STORAGE == 0
        words[w] = __float_as_uint(x[w]);
#else
        words[w] = pack_pair(x[2 * w], 2 * w + 1 < VEC ? x[2 * w + 1] : 0.0f);
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

__device__ __forceinline__ bool has_vec(const Lanes& l, int h, int k) {
    return has_head(l, h) && (CHANNELS == HEAD_LANES * LANE_ELEMS || (k * HEAD_LANES + l.head_lane) * VEC < CHANNELS);
}

__device__ __forceinline__ int vec_offset(int h, int k) { return h * HEAD_SLOTS * CHANNELS + k * HEAD_LANES * VEC; }

// A lane's share of one row, as stored and as fp32.
struct Packed {
    u32 words[LANE_HEADS][LANE_VECS][PACK_WORDS];
};
struct Fragment {
    float x[LANE_HEADS][LANE_ELEMS];
};

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
template <bool SHARED = false>
__device__ __forceinline__ const storage_t* at_lane(const storage_t* base, const Lanes& l) {
    return opaque<SHARED>(base + l.offset);
}

template <bool SHARED = false, int STRIDE = ROW_STRIDE>
__device__ __forceinline__ Packed load_packed(const storage_t* lane_base, int row, const Lanes& l) {
    Packed p;
    const storage_t* address = lane_base + (u64)(u32)row * STRIDE;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (has_vec(l, h, k)) {
                load_pack<SHARED>(address + vec_offset(h, k), p.words[h][k]);
            } else {
#pragma unroll
                for (int w = 0; w < PACK_WORDS; ++w) p.words[h][k][w] = 0u;
            }
        }
    }
    return p;
}

__device__ __forceinline__ Fragment widen(const Packed& p) {
    Fragment fragment;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) unpack(p.words[h][k], &fragment.x[h][k * VEC]);
    }
    return fragment;
}

template <int STRIDE = ROW_STRIDE>
__device__ __forceinline__ Fragment load_fragment(const storage_t* base, int row, const Lanes& l) {
    return widen(load_packed<false, STRIDE>(at_lane(base, l), row, l));
}

template <int STRIDE = ROW_STRIDE>
__device__ __forceinline__ void store_fragment(storage_t* base, int row, const Lanes& l, const Fragment& fragment) {
    storage_t* address = base + (i64)row * STRIDE + l.offset;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (has_vec(l, h, k)) {
                u32 words[PACK_WORDS];
                pack(&fragment.x[h][k * VEC], words);
                store_pack(address + vec_offset(h, k), words);
            }
        }
    }
}

// The same for fp32 buffers whatever the storage type: parameters, outputs, states. Plain loads, as a kernel may write
// the buffer that it reads.
__device__ __forceinline__ Fragment load_fragment_fp32(const float* base, i64 row, const Lanes& l) {
    Fragment fragment;
    const float* address = base + row * ROW_STRIDE + l.offset;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            float* x = &fragment.x[h][k * VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) x[v] = 0.0f;
            if (!has_vec(l, h, k)) continue;
#if VEC % 4 == 0
#pragma unroll
            for (int v = 0; v < VEC; v += 4) {
                const float4 r = *reinterpret_cast<const float4*>(address + vec_offset(h, k) + v);
                x[v] = r.x;
                x[v + 1] = r.y;
                x[v + 2] = r.z;
                x[v + 3] = r.w;
            }
#else
#pragma unroll
            for (int v = 0; v < VEC; ++v) x[v] = address[vec_offset(h, k) + v];
#endif
        }
    }
    return fragment;
}

__device__ __forceinline__ void store_fragment_fp32(float* base, i64 row, const Lanes& l, const Fragment& fragment) {
    float* address = base + row * ROW_STRIDE + l.offset;
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (!has_vec(l, h, k)) continue;
            const float* x = &fragment.x[h][k * VEC];
#if VEC % 4 == 0
#pragma unroll
            for (int v = 0; v < VEC; v += 4) {
                *reinterpret_cast<float4*>(address + vec_offset(h, k) + v) =
                    make_float4(x[v], x[v + 1], x[v + 2], x[v + 3]);
            }
#else
#pragma unroll
            for (int v = 0; v < VEC; ++v) address[vec_offset(h, k) + v] = x[v];
#endif
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
