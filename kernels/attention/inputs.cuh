// The inputs of an attention kernel, and what a score states in its own file, `struct Score`.
//
// The record of a score says which operands there are, and the prologue repeats it: HAS_TARGET_VECTOR, HAS_KEY (key and
// value are two tensors), NODE_SCALARS (0 none, 1 the user's own, 2 inverse norms), EDGE (0 none, 1 a vector, 2 a
// scalar, 3 a row that all heads share), EDGE_IN_VALUE (the edge vector is added to the value too), PARAMETER (0 none, 1
// a number, 2 [HEADS, CHANNELS]), TARGET_IS_VALUE (they may be one tensor, whose gradient is the sum of both).
//
// The row a_ij of an edge is further channels of what the score multiplies and of what is averaged. With q' (edge_target)
// for the target q, the score is that of [q_i, q'_i] with [k_j, a_ij], and [v_j, a_ij] are averaged.
#define HAS_NODE_SCALARS (NODE_SCALARS != 0)
#define HAS_NORMS (NODE_SCALARS == 2)
#define SUMS_SCALAR (NODE_SCALARS == 1)
#define HAS_EDGE_VECTOR (EDGE == 1)
#define HAS_EDGE_SCALARS (EDGE == 2)
#define HAS_EDGE_ROWS (EDGE == 3)

#define INPUT_PARAMETERS                                                                                             \
    const storage_t *target, const storage_t *key, const storage_t *value, const float *target_scalars,              \
        const float *source_scalars, const float *parameter, const void *edge, const u64 *seed, double scale,        \
        double slope, double dropout
#define INPUTS                                                                                                       \
    {target, key, value, target_scalars, source_scalars, parameter, edge, seed, (float)scale, (float)slope,          \
     (float)dropout, nullptr}
// The same for kernels that take rows of edges, which have the parameter `edge_target`.
#define INPUTS_WITH_ROWS                                                                                             \
    {target, key, value, target_scalars, source_scalars, parameter, edge, seed, (float)scale, (float)slope,          \
     (float)dropout, edge_target}

struct ScoreInputs {
    const storage_t* target;       // [num_targets, HEADS, CHANNELS]
    const storage_t* key;          // [num_sources, HEADS, CHANNELS]
    const storage_t* value;        // [num_sources, HEADS, CHANNELS]
    const float* target_scalars;   // [num_targets, HEADS]
    const float* source_scalars;   // [num_sources, HEADS]
    const float* parameter;        // [1] or [HEADS, CHANNELS]
    const void* edge;              // [E, HEADS, CHANNELS] or [E, EDGE_CHANNELS] storage_t, or [E, HEADS] fp32
    const u64* seed;               // [1], dropout only
    float scale, slope, dropout;
    const storage_t* edge_target;  // [num_targets, HEADS, EDGE_CHANNELS]
};

// Whether rows are those of the CSR, or sources.
#ifndef ROWS_ARE_TARGETS
#define ROWS_ARE_TARGETS 1
#endif

// P_ij = exp(S_ij - max_i) / sum_i by exp2. The base changes behind the difference: a large logit would be rounded again.
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float base2_difference(float s, float max) { return LOG2E * difference(s, max); }
__device__ __forceinline__ float exp_difference(float s, float max) { return fast_exp2(base2_difference(s, max)); }

// One channel of an edge or of its row: of the target's vector, of the source's vector (key or value, plus the edge's vector), and of
// the parameter [HEADS, CHANNELS]. 0 for what a score does not read.
struct Channel {
    float target, source, parameter;
};

// One edge in one head: the sum of Score::product over the channels, the scalars of the row that owns the edge, of the
// node at its other end and of the edge, and what Score::factor gave for the row.
struct Terms {
    float product, own, other, edge, factor;

    __device__ __forceinline__ float target() const { return ROWS_ARE_TARGETS ? own : other; }
    __device__ __forceinline__ float source() const { return ROWS_ARE_TARGETS ? other : own; }
};

#define SCORE_FN static __device__ __forceinline__

// What a score states:
//
//   float product(float sum, const Channel&, const ScoreInputs&)   with vectors: adds one channel; for a channel of
//                                                                  zeros, which pads a row, it adds 0
//   float target_grad(float sum, float ds, const Channel&, const ScoreInputs&), source_grad, with an edge vector
//   edge_grad, with a parameter per channel parameter_grad         add the gradients of one channel
//   float target_scalar_grad(float sum, float ds, const Terms&, const ScoreInputs&), source_scalar_grad
//                                                                  with scalars of the user's own: add their gradients
//   float edge_scalar_grad(float ds, const Terms&, const ScoreInputs&)   with edge scalars: their gradient
//   bool is_steep(const Terms&), float flat_slope(const ScoreInputs&)    to leave dout_dlogit, see forward.cu
//
// ds is the gradient of S, the logit in base e. What follows a score may leave out.
struct ScoreDefaults {
    // The factor of the logit that all edges of a row share, given the row's own scalar.
    SCORE_FN float factor(const ScoreInputs&, float) { return 1.0f; }

    // A second sum over the channels of a score that has two, and the product that it makes of both.
    SCORE_FN float second_product(float sum, const Channel&) { return sum; }
    SCORE_FN float join_products(float first, float, const ScoreInputs&) { return first; }

    // The logit.
    SCORE_FN float logit(const Terms& t, const ScoreInputs&) { return t.factor * t.product; }

    // The gradient of the product, which target_grad, source_grad, edge_grad and parameter_grad then take as ds.
    SCORE_FN float product_grad(float ds, const Terms&, const ScoreInputs&) { return ds; }

    // From the sum of target_grad over the edges of a target to the gradient, and from that of source_grad where the
    // source's vector is not the value or has norms.
    SCORE_FN float finish_target(float sum, const Channel&, const ScoreInputs&) { return sum; }
    SCORE_FN float finish_source(float sum, const ScoreInputs&) { return sum; }
};

// LeakyReLU and its slope. The pre-activation z should be a plain sum, so that its sign is the same in every kernel.
__device__ __forceinline__ float leaky(float z, float slope) { return z > 0.0f ? z : slope * z; }

__device__ __forceinline__ float leaky_slope(float z, float slope) { return z > 0.0f ? 1.0f : slope; }

// The slope less the mean of its two values. As dS sums to 0 over a row, sum dS slope = sum dS centered_slope, but
// rounding errors that all dS of a row share (of delta above all) cancel in the second form.
__device__ __forceinline__ float centered_slope(float z, float slope) {
    return z > 0.0f ? 0.5f - 0.5f * slope : 0.5f * slope - 0.5f;
}

#include "score.cuh"
