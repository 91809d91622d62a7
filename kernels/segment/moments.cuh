// Mean and variance of the messages of a row, channel by channel.
//
// Deviations are taken from a center close to the mean, so that no digits cancel where the mean is large beside them: from
// the first message, then from the mean of the messages so far, whenever their number has grown fourfold (a chain of
// sums stays short by that too). Two sets join as Chan, Golub and LeVeque, "Algorithms for Computing the Sample
// Variance", 1983, state.

// PyG's least variance of a deviation.
#define LEAST_VARIANCE 1e-5f

struct Moments {
    // With `first` the sum and `second` the sum of squares of the deviations from `center`.
    Fragment center, first, second;
    float number;
};

__device__ __forceinline__ Moments no_moments() { return {zero_fragment(), zero_fragment(), zero_fragment(), 0.0f}; }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

// Before the first message m of a sweep: an infinite center would turn all deviations into NaNs.
__device__ __forceinline__ void start(Moments& s, const Fragment& m, const Lanes& l) {
    const bool is_new = s.number == 0.0f;
    for_each_channel(l, [&](int h, int c, int) {
        float& center = s.center.x[h][c];
        if (is_new) center = m.x[h][c];
        if (is_finite(center)) return;
        s.first.x[h][c] = is_new ? 0.0f : center;
        center = 0.0f;
    });
}

__device__ __forceinline__ void take_deviation(Moments& s, int h, int c, float m) {
    const float deviation = m - s.center.x[h][c];
    s.first.x[h][c] += deviation;
    s.second.x[h][c] = fmaf(deviation, deviation, s.second.x[h][c]);
}

// Moves the center to the mean; one that is not finite it reaches only in the `last` step.
__device__ __forceinline__ void recenter(Moments& s, const Lanes& l, bool last) {
    const float inverse = s.number > 0.0f ? 1.0f / s.number : 0.0f;
    for_each_channel(l, [&](int h, int c, int) {
        const float shift = s.first.x[h][c] * inverse;
        if (!last && !is_finite(shift)) return;
        s.center.x[h][c] += shift;
        s.second.x[h][c] = max_or_nan(fmaf(-s.first.x[h][c], shift, s.second.x[h][c]), 0.0f);
        s.first.x[h][c] = 0.0f;
    });
}

// Steps after which the center moves, of those that every number of edges in flight has: at 4, 16, 64, ... edges.
__device__ __forceinline__ bool moves_center(int step) {
    const u32 edges = (u32)step * UNROLL;
    return edges >= 4u && (edges & (edges - 1u)) == 0u && (edges & 0x55555555u) != 0u;
}

// Joins two sets that lie at their means; `lost` is for the chain of them, see accumulate().
template <bool COMPENSATED>
__device__ __forceinline__ void join(float& center, float& second, float& lost, float number, float other_center,
                                     float other_second, float other_number) {
    const float total = number + other_number, share = other_number / (total > 0.0f ? total : 1.0f);
    // What belongs to no message may be anything.
    if (other_number == 0.0f) return;
    if (number == 0.0f) {
        center = other_center;
        second = other_second;
        return;
    }
    const float difference = other_center - center;
    accumulate<COMPENSATED>(second, lost, fmaf(number * share * difference, difference, other_second));
    center = fmaf(other_center, share, center * (number / total));
}
