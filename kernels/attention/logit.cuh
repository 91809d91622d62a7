// Score functors. Logits are kept in base 2: S2 = S * log2(e), P_ij = exp2(S2_ij - max_i) / sum_i.
//
//   dot     S = scale * <q_i, k_j + e_ij>                   target vector q, key vector k
//   cosine  S = beta * n_i * n_j * <x_i, x_j>               target vector x_i, value vector x_j, inverse norms n
//   add     S = leaky(l_i + r_j + t_ij)                     scalars per node and head
//   gatv2   S = <a, leaky(l_i + r_j + e_ij)>                target vector l, value vector r, parameter a
//
// leaky(z) = z > 0 ? z : slope * z. The pre-activation z is a plain sum, so its sign is the same in every kernel.
#define SCORE_DOT 0
#define SCORE_COSINE 1
#define SCORE_ADD 2
#define SCORE_GATV2 3

#define HAS_KEY (SCORE == SCORE_DOT)
// Whether key and value are one tensor (dot).
#ifndef KEY_IS_VALUE
#define KEY_IS_VALUE 0
#endif
#define HAS_TARGET_VECTOR (SCORE != SCORE_ADD)
#define HAS_NODE_SCALARS (SCORE == SCORE_ADD || SCORE == SCORE_COSINE)
#define HAS_EDGE_VECTOR (EDGE && SCORE != SCORE_ADD)
#define HAS_EDGE_SCALARS (EDGE && SCORE == SCORE_ADD)

#define INPUT_PARAMETERS                                                                                             \
    const storage_t *target, const storage_t *key, const storage_t *value, const float *target_scalars,              \
        const float *source_scalars, const float *parameter, const void *edge, const u64 *seed, double scale,        \
        double slope, double dropout
#define INPUTS                                                                                                       \
    {target, key, value, target_scalars, source_scalars, parameter, edge, seed, (float)scale, (float)slope,          \
     (float)dropout}

struct ScoreInputs {
    const storage_t* target;       // [num_targets, HEADS, CHANNELS]: q, x_dst, -, l
    const storage_t* key;          // [num_sources, HEADS, CHANNELS]: dot only
    const storage_t* value;        // [num_sources, HEADS, CHANNELS]
    const float* target_scalars;   // [num_targets, HEADS]: inverse norms (cosine), l (add)
    const float* source_scalars;   // [num_sources, HEADS]: inverse norms (cosine), r (add)
    const float* parameter;        // beta [1] (cosine), a [HEADS, CHANNELS] (gatv2)
    const void* edge;              // [E, HEADS, CHANNELS] storage_t (dot, gatv2) or [E, HEADS] fp32 (add)
    const u64* seed;               // [1], dropout only
    float scale, slope, dropout;
};

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float leaky_slope(float z, float slope) { return z > 0.0f ? 1.0f : slope; }

// The slope less the mean of its two values. As dS sums to 0 over a row, sum dS slope = sum dS centered_slope, but
// rounding errors that all dS of a row share (of delta above all) cancel in the second form.
__device__ __forceinline__ float centered_slope(float z, float slope) {
    return z > 0.0f ? 0.5f - 0.5f * slope : 0.5f * slope - 0.5f;
}

__device__ __forceinline__ float leaky(float z, float slope) { return z > 0.0f ? z : slope * z; }

// Reduced product (or node scalars) to base-2 logit; `factor` holds the row's own scalar where the score multiplies it.
__device__ __forceinline__ float score_logit(float product, float own, float other, float edge, float factor,
                                             float slope) {
#if HAS_EDGE_SCALARS
    return factor * leaky(own + other + edge, slope);
#elif SCORE == SCORE_ADD
    return factor * leaky(own + other, slope);
#elif SCORE == SCORE_COSINE
    return factor * other * product;
#else
    return factor * product;
#endif
}

// The pre-activation of the add score, with the sign that score_logit sees: own + other commutes exactly.
__device__ __forceinline__ float pre_activation(float own, float other, float edge) {
#if HAS_EDGE_SCALARS
    return own + other + edge;
#else
    return own + other;
#endif
}
