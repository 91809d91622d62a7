// What the backward pass over targets leaves of each target for the pass over sources, per head: (max, inverse, delta,
// max - log(inverse)). The last number gives a weight in one step, exp(S - number), which is enough for 16-bit
// inputs: it is rounded as one number, so a weight loses what the maximum has beyond its size.
__device__ __forceinline__ float4 make_bwd_row_stats(float max, float inverse, float delta) {
    return make_float4(max, inverse, delta, inverse == 0.0f ? 0.0f : max - logf(inverse));
}
