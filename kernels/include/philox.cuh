// Counter-based dropout: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// Key = the 64-bit seed of the call; counter = (edge id, head / 4, 0, 0); word head % 4. The draw depends on the edge
// and the head alone, so every schedule, the forward and both backward passes see the same mask and nothing is stored.
__device__ __forceinline__ u32 philox_word(u64 seed, u32 edge, u32 head) {
    u32 c0 = edge, c1 = head >> 2, c2 = 0u, c3 = 0u;
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
    const u32 word = head & 3u;
    return word == 0u ? c0 : word == 1u ? c1 : word == 2u ? c2 : c3;
}

// 0 with probability p, else 1 / (1 - p); the 24 high bits of the word are the uniform number.
__device__ __forceinline__ float dropout_factor(u64 seed, u32 edge, u32 head, float p) {
    const float uniform = (float)(philox_word(seed, edge, head) >> 8) * 5.9604644775390625e-8f;
    return uniform >= p ? 1.0f / (1.0f - p) : 0.0f;
}
