// What dropout multiplies the numbers of a row by: number n of the row, of all heads and channels, draws for (row, n).
#include "include/philox.cuh"

struct DropoutRow {
    u64 seed;
    int row;
    u32 stream;
    float p;

    __device__ __forceinline__ float factor(int number) const {
        return dropout_factor(seed, (u32)row, (u32)number, p, stream);
    }

    // A row [H, C] or, with the same factors for all heads, [C].
    template <bool HAS_HEADS>
    __device__ __forceinline__ Fragment channels(const Lanes& l) const {
        // Four channels in a row share the words of one counter.
        constexpr int RUN = VEC % 4 == 0 && CHANNELS % 4 == 0 ? 4 : 1;
        Fragment factors;
#pragma unroll
        for (int h = 0; h < LANE_HEADS; ++h) {
#pragma unroll
            for (int c = 0; c < LANE_ELEMS; c += RUN) {
                const int number = (HAS_HEADS ? head_of(l, h) * CHANNELS : 0) + channel_at(l, c);
                if constexpr (RUN == 4) {
                    const PhiloxWords words = philox_words(seed, (u32)row, (u32)number >> 2, stream);
#pragma unroll
                    for (int i = 0; i < 4; ++i) factors.x[h][c + i] = dropout_factor_of(words.x[i], p);
                } else {
                    factors.x[h][c] = factor(number);
                }
            }
        }
        return factors;
    }

    // A row [H] or one number for all heads.
    template <bool HAS_HEADS>
    __device__ __forceinline__ HeadValues heads(const Lanes& l) const {
        HeadValues factors;
        EACH_HEAD factors.x[h] = factor(HAS_HEADS ? head_of(l, h) : 0);
        return factors;
    }
};
