// What the aggregation kernels share: their inputs, what a message states, and the loads of an edge.
//
// Constants of the prologue beside those of storage.cuh, with HEADS 1: SUM, MEAN, MAX, MIN, VAR, STD, MUL (which statistics
// there are), AT_SUM ... AT_MUL (their places in the output [rows, STATS, CHANNELS]), EDGE (what a message reads of an edge:
// 0 nothing, 1 a vector, 2 a number, 3 what a linear layer makes of EDGE_NUMBERS numbers), HAS_KEY, HAS_TARGET,
// SOURCE_SCALED, TARGET_SCALED (whether there are these scales), SELF_LOOPS (whether a sum has the node's own message too),
// ROUNDS (messages of an extreme are rounded to the storage type), READS_MESSAGES (backward depends on them).
#include "include/traversal.cuh"

#define SUMS (SUM + MEAN)
#define MOMENTS (VAR + STD > 0)
#define EXTREMES (MAX + MIN)
#define STATS (SUMS + EXTREMES + VAR + STD + MUL)
#define OUT_STRIDE (STATS * ROW_STRIDE)
// Arrays have an element more than they need: none may be empty.
#define ROOM(count) ((count) > 0 ? (count) : 1)

#define INPUT_PARAMETERS                                                                                             \
    const storage_t *target, const storage_t *key, const storage_t *value, const void *edge,                         \
        const float *source_scale, const float *target_scale, const float *inverse_degree, const float *lin_weight,  \
        const float *lin_bias
#define INPUTS {target, key, value, edge, source_scale, target_scale, inverse_degree, lin_weight, lin_bias}
#define KEPT_PARAMETERS(CONST)                                                                                       \
    CONST u16 *arg_max, CONST u16 *arg_min, CONST float *num_max, CONST float *num_min, CONST float *center,         \
        CONST float *others

struct Inputs {
    const storage_t* target;     // [num_targets, CHANNELS]
    const storage_t* key;        // [num_sources, CHANNELS]
    const storage_t* value;      // [num_sources, CHANNELS]
    const void* edge;            // [E, CHANNELS] storage_t, [E] fp32, or [E, EDGE_NUMBERS] storage_t
    const float* source_scale;   // [num_sources], with SOURCE_SCALED
    const float* target_scale;   // [num_targets], with TARGET_SCALED
    const float* inverse_degree; // [num_targets], with MEAN, VAR or STD: 1 / max(degree, 1)
    const float* lin_weight;     // [EDGE_NUMBERS, CHANNELS], with EDGE 3
    const float* lin_bias;       // [CHANNELS], with EDGE 3
};

constexpr float LOG2E = 1.4426950408889634f;

// One channel of an edge; 0 for what a message does not read.
struct Operands {
    float value, edge, key, target;
};

#define MESSAGE_FN static __device__ __forceinline__

// What a message states: its value and the gradients of its operands, given the gradient g of the message. Those that it
// does not read it may leave out.
struct MessageDefaults {
    MESSAGE_FN float edge_grad(float, const Operands&) { return 0.0f; }
    MESSAGE_FN float key_grad(float, const Operands&) { return 0.0f; }
    MESSAGE_FN float target_grad(float, const Operands&) { return 0.0f; }
};

#include "message.cuh"

// The message times the scale of its source. Rounded to the storage type, as PyG's is, where messages are compared.
__device__ __forceinline__ float message_of(const Operands& o, float scale) {
    const float m = SOURCE_SCALED ? scale * Message::value(o) : Message::value(o);
#if ROUNDS
    return from_bits16(pack_pair(m, 0.0f) & 0xffffu);
#else
    return m;
#endif
}

__device__ __forceinline__ float source_scale_of(const Inputs& in, int row) {
    return SOURCE_SCALED ? __ldg(in.source_scale + row) : 1.0f;
}

// What the sums of a row are multiplied by, the first of them or the second: a sum, a mean, or both in this order.
__device__ __forceinline__ float target_scale_of(const Inputs& in, int row, int k = 0) {
    const float scale = TARGET_SCALED && SUMS ? __ldg(in.target_scale + row) : 1.0f;
    return MEAN && k == SUM ? scale * __ldg(in.inverse_degree + row) : scale;
}

// One number of features, or of the output.
__device__ __forceinline__ float number_at(const storage_t* out, i64 place) {
#if STORAGE == 0
    return __ldg(out + place);
#else
    return from_bits16(__ldg(out + place));
#endif
}

// A lane's share of the linear layer of the edges, or of its gradient.
struct EdgeLayer {
#if EDGE == 3
    Fragment weight[EDGE_NUMBERS], bias;

    __device__ __forceinline__ void load(const Inputs& in, const Lanes& l) {
#pragma unroll
        for (int d = 0; d < EDGE_NUMBERS; ++d) weight[d] = load_fragment_fp32(in.lin_weight, d, l);
        bias = load_fragment_fp32(in.lin_bias, 0, l);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int d = 0; d < EDGE_NUMBERS; ++d) weight[d] = zero_fragment();
        bias = zero_fragment();
    }
#else
    __device__ __forceinline__ void load(const Inputs&, const Lanes&) {}
    __device__ __forceinline__ void clear() {}
#endif
};

// The edge's own operand for UNROLL edges.
struct EdgeOperand {
    Packed vectors[EDGE == 1 ? UNROLL : 1];
    float numbers[EDGE == 2 ? UNROLL : 1];
#if EDGE == 3
    float rows[UNROLL][EDGE_NUMBERS];
#endif

    __device__ __forceinline__ void load(const void* edge, int u, int perm, const Lanes& l) {
#if EDGE == 1
        vectors[u] = load_packed(at_lane(static_cast<const storage_t*>(edge), l), perm, l);
#elif EDGE == 2
        numbers[u] = __ldg(static_cast<const float*>(edge) + perm);
#elif EDGE == 3
#pragma unroll
        for (int d = 0; d < EDGE_NUMBERS; ++d) {
            rows[u][d] = number_at(static_cast<const storage_t*>(edge), (i64)perm * EDGE_NUMBERS + d);
        }
#endif
    }

    __device__ __forceinline__ Fragment at(int u, const EdgeLayer& layer) const {
#if EDGE == 1
        return widen(vectors[u]);
#elif EDGE == 3
        Fragment fragment = layer.bias;
#pragma unroll
        for (int d = 0; d < EDGE_NUMBERS; ++d) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
                for (int c = 0; c < LANE_ELEMS; ++c) {
                    fragment.x[h][c] = fmaf(rows[u][d], layer.weight[d].x[h][c], fragment.x[h][c]);
                }
            }
        }
        return fragment;
#else
        Fragment fragment = zero_fragment();
#if EDGE == 2
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; ++c) fragment.x[h][c] = numbers[u];
        }
#endif
        return fragment;
#endif
    }
};

// Places in the output of the sums and of the extremes, as far as they are there.
#define SUM_PLACE(k) (SUM && (k) == 0 ? AT_SUM : AT_MEAN)
#define EXTREME_PLACE(k) (MAX && (k) == 0 ? AT_MAX : AT_MIN)

// A lane's share of a row of the output, or of its gradient: the statistic at `place` of row `row`.
__device__ __forceinline__ Packed load_out(const storage_t* out, int place, int row, const Lanes& l) {
    return load_packed<false, OUT_STRIDE>(at_lane(out + place * ROW_STRIDE, l), row, l);
}

__device__ __forceinline__ void store_out(storage_t* out, int place, int row, const Lanes& l,
                                          const Fragment& fragment) {
    store_fragment<OUT_STRIDE>(out + place * ROW_STRIDE, row, l, fragment);
}

// What tells an extreme from almost all other messages: 15 bits of its value, and in the lowest bit whether more than one
// edge has it. Two values may have the same bits, so that whoever finds them compares the values too.
constexpr u32 TIED = 1u, KEY = 0xfffeu;

__device__ __forceinline__ u32 key_of(float m) {
    // Both zeros are one.
    const u32 bits = __float_as_uint(m + 0.0f);
    return (bits ^ bits >> 16) & KEY;
}

// A lane's share of a row [rows, CHANNELS] of 16-bit keys, two to a word.
#define ARG_WORDS ((VEC + 1) / 2)
struct Args {
    u32 words[LANE_VECS][ARG_WORDS];

    // A bit for each channel that has the key of the other, and seldom for one that has not; see channel_of().
    __device__ __forceinline__ u32 matches(const Args& other, const Lanes& l) const {
        u32 bits = 0;
#pragma unroll
        for (int k = 0; k < LANE_VECS; ++k) {
            if (!has_vec(l, 0, k)) continue;
#pragma unroll
            for (int w = 0; w < ARG_WORDS; ++w) {
                // A half of x that is 0 sets its upper bit here.
                const u32 x = (words[k][w] ^ other.words[k][w]) & KEY * 0x10001u;
                bits |= ((x - 0x10001u) & ~x & (VEC == 1 ? 0x8000u : 0x80008000u)) >> (k * ARG_WORDS + w);
            }
        }
        return bits;
    }
};

// The channel, of those that a lane holds, that a bit stands for.
__device__ __forceinline__ int channel_of(int bit) {
    const int word = 15 - bit % 16;
    return word / ARG_WORDS * VEC + word % ARG_WORDS * 2 + bit / 16;
}

__device__ __forceinline__ Args keys_of(const Fragment& m) {
    Args keys;
#pragma unroll
    for (int k = 0; k < LANE_VECS; ++k) {
#pragma unroll
        for (int w = 0; w < ARG_WORDS; ++w) {
            const float* pair = &m.x[0][k * VEC + 2 * w];
            keys.words[k][w] = key_of(pair[0]) | (2 * w + 1 < VEC ? key_of(pair[1]) << 16 : 0u);
        }
    }
    return keys;
}

__device__ __forceinline__ Args load_args(const u16* base, int row, const Lanes& l) {
    Args args;
    const u16* address = base + (i64)row * ROW_STRIDE + l.offset;
#pragma unroll
    for (int k = 0; k < LANE_VECS; ++k) {
        const u16* from = address + vec_offset(0, k);
        u32(&words)[ARG_WORDS] = args.words[k];
#pragma unroll
        for (int w = 0; w < ARG_WORDS; ++w) words[w] = 0u;
        if (!has_vec(l, 0, k)) continue;
#if VEC == 8
        const uint4 r = __ldg(reinterpret_cast<const uint4*>(from));
        words[0] = r.x;
        words[1] = r.y;
        words[2] = r.z;
        words[3] = r.w;
#elif VEC == 4
        const uint2 r = __ldg(reinterpret_cast<const uint2*>(from));
        words[0] = r.x;
        words[1] = r.y;
#elif VEC == 2
        words[0] = __ldg(reinterpret_cast<const u32*>(from));
#else
        words[0] = __ldg(from);
#endif
    }
    return args;
}

// Calls work(h, c, place) for every channel of a row that the lane has; place counts from the row's first channel.
template <class Work>
__device__ __forceinline__ void for_each_channel(const Lanes& l, const Work& work) {
#pragma unroll
    for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < LANE_ELEMS; ++c) work(h, c, l.offset + vec_offset(h, c / VEC) + c % VEC);
    }
}
