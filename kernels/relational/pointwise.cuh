// The pointwise functions of programs (pyg_dfgnn/ir/pointwise.py) in fp32, as torch computes them. A NaN stays one.
#define POINTWISE static __device__ __forceinline__ float

POINTWISE point_add(float a, float b) { return a + b; }
POINTWISE point_sub(float a, float b) { return difference(a, b); }
POINTWISE point_mul(float a, float b) { return a * b; }
POINTWISE point_div(float a, float b) { return a / b; }
POINTWISE point_where(float condition, float a, float b) { return condition != 0.0f ? a : b; }
POINTWISE point_eq(float a, float b) { return a == b ? 1.0f : 0.0f; }
POINTWISE point_greater(float a, float b) { return a > b ? 1.0f : 0.0f; }
// As torch's, a NaN if either is one.
POINTWISE point_maximum(float a, float b) { return a > b || a != a ? a : b; }
POINTWISE point_heaviside(float x) { return x > 0.0f ? 1.0f : 0.0f; }
POINTWISE point_in_range(float x, float low, float high) { return x >= low && x <= high ? 1.0f : 0.0f; }
POINTWISE point_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? 0.0f : x; }
POINTWISE point_neg(float x) { return -x; }
POINTWISE point_abs(float x) { return fabsf(x); }
POINTWISE point_exp(float x) { return expf(x); }
POINTWISE point_log(float x) { return logf(x); }
POINTWISE point_sqrt(float x) { return sqrtf(x); }
// The exponent is a constant. Those that torch writes as products or roots cost fewer instructions than powf.
POINTWISE point_pow(float x, float exponent) {
    return exponent == 0.0f    ? 1.0f
           : exponent == 0.5f  ? sqrtf(x)
           : exponent == 1.0f  ? x
           : exponent == 2.0f  ? x * x
           : exponent == 3.0f  ? x * x * x
           : exponent == -0.5f ? 1.0f / sqrtf(x)
           : exponent == -1.0f ? 1.0f / x
           : exponent == -2.0f ? 1.0f / (x * x)
                               : powf(x, exponent);
}
POINTWISE point_sin(float x) { return sinf(x); }
POINTWISE point_cos(float x) { return cosf(x); }
POINTWISE point_erf(float x) { return erff(x); }
POINTWISE point_clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
POINTWISE point_relu(float x) { return x < 0.0f ? 0.0f : x; }
POINTWISE point_leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
POINTWISE point_elu(float x) { return x > 0.0f ? x : expm1f(x); }
POINTWISE point_gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }
POINTWISE point_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
POINTWISE point_silu(float x) { return x / (1.0f + expf(-x)); }
POINTWISE point_tanh(float x) { return tanhf(x); }
POINTWISE point_sinh(float x) { return sinhf(x); }
POINTWISE point_cosh(float x) { return coshf(x); }
POINTWISE point_asin(float x) { return asinf(x); }
POINTWISE point_acos(float x) { return acosf(x); }
POINTWISE point_atan(float x) { return atanf(x); }
POINTWISE point_asinh(float x) { return asinhf(x); }
POINTWISE point_acosh(float x) { return acoshf(x); }
POINTWISE point_atanh(float x) { return atanhf(x); }
POINTWISE point_expm1(float x) { return expm1f(x); }
POINTWISE point_log1p(float x) { return log1pf(x); }
POINTWISE point_atan2(float y, float x) { return atan2f(y, x); }
POINTWISE point_floor(float x) { return floorf(x); }
POINTWISE point_round(float x) { return rintf(x); }
POINTWISE point_remainder(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
POINTWISE point_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
