// Counter-based dropout: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// Key = the 64-bit seed of the call; counter = (row, number / 4, stream, 0); word number % 4. Of attention the row is the
// edge id, the number is the head and the stream is 0. A draw depends on these alone, so every schedule, the forward and
// both backward passes see the same mask and nothing is stored.
struct PhiloxWords {
    u32 x[4];
};

__device__ __forceinline__ PhiloxWords philox_words(u64 seed, u32 row, u32 quarter, u32 stream) {
    u32 c0 = row, c1 = quarter, c2 = stream, c3 = 0u;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// 0 with probability p, else 1 / (1 - p); the 24 high bits of the word are the uniform number.
__device__ __forceinline__ float dropout_factor_of(u32 word, float p) {
    const float uniform = (float)(word >> 8) * 5.9604644775390625e-8f;
    return uniform >= p ? 1.0f / (1.0f - p) : 0.0f;
}

__device__ __forceinline__ float dropout_factor(u64 seed, u32 row, u32 number, float p, u32 stream = 0u) {
    const PhiloxWords words = philox_words(seed, row, number >> 2, stream);
    const u32 word = number & 3u;
    return dropout_factor_of(word == 0u ? words.x[0] : word == 1u ? words.x[1] : word == 2u ? words.x[2] : words.x[3], p);
}
