// The device functions that kernels use, for emulator.h.
#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
static inline void __syncthreads(EMU_HERE) { emu::barrier({"__syncthreads", file, line}, false); }
static inline int __syncthreads_count(int value, EMU_HERE) {
    return emu::barrier({"__syncthreads_count", file, line}, value);
}
static inline int __syncthreads_or(int value, EMU_HERE) {
    return emu::barrier({"__syncthreads_or", file, line}, value) != 0;
}
static inline int __syncthreads_and(int value, EMU_HERE) {
    return emu::barrier({"__syncthreads_and", file, line}, !value) == 0;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) {
    emu::meet({"__syncwarp", file, line}, mask, 0, -1);
}
static inline unsigned __ballot_sync(unsigned mask, int value, EMU_HERE) {
    return (unsigned)emu::meet({"__ballot_sync", file, line}, mask, value != 0, -1);
}
static inline int __any_sync(unsigned mask, int value, EMU_HERE) {
    return emu::meet({"__any_sync", file, line}, mask, value != 0, -1) != 0;
}
static inline int __all_sync(unsigned mask, int value, EMU_HERE) {
    return emu::meet({"__all_sync", file, line}, mask, value == 0, -1) == 0;
}
static inline unsigned __activemask() { return emu::active_mask(); }
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_HERE) {
    return emu::shuffle({"__shfl_sync", file, line}, mask, value, emu::group_first(width) + (source & (width - 1)));
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int target = (int)(emu::current % 32) - (int)delta;
    return emu::shuffle({"__shfl_up_sync", file, line}, mask, value,
                        emu::lane_at(target, target >= emu::group_first(width)));
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int target = (int)(emu::current % 32 + delta);
    return emu::shuffle({"__shfl_down_sync", file, line}, mask, value,
                        emu::lane_at(target, target < emu::group_first(width) + width));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_HERE) {
    const int target = (int)(emu::current % 32) ^ lanes;
    return emu::shuffle({"__shfl_xor_sync", file, line}, mask, value,
                        emu::lane_at(target, target < emu::group_first(width) + width));
}

static inline void emu_load_matrices(unsigned (&numbers)[4], const float* row, EMU_HERE) {
    emu::load_matrices({"ldmatrix", file, line}, numbers, row);
}
static inline void emu_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool first, int storage, EMU_HERE) {
    emu::multiply({"mma", file, line}, d, a, b, first, storage);
}
static inline void emu_named_barrier(int id, int threads, bool waits, EMU_HERE) {
    emu::named_barrier({"named barrier", file, line}, id, (unsigned)threads, waits);
}
template <int COUNT>
static inline void emu_wgmma_fp16(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int adds, EMU_HERE) {
    emu::start_product({"wgmma", file, line}, d, COUNT, a, b, adds != 0, true);
}
template <int COUNT>
static inline void emu_wgmma_tf32(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int adds, EMU_HERE) {
    emu::start_product({"wgmma", file, line}, d, COUNT, a, b, adds != 0, false);
}
static inline void emu_wgmma_wait(EMU_HERE) { emu::wait_products({"wgmma", file, line}); }
static inline void emu_copy(void* to, const void* from, unsigned bytes, EMU_HERE) {
    emu::copy({"copy", file, line}, to, from, bytes);
}
static inline void emu_close_copies() { emu::close_copies(); }
static inline void emu_wait_copies(unsigned pending) { emu::wait_copies(pending); }
template <class T> static inline T __ldg(const T* address) { return *address; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
template <class T> static inline T emu_exchange(T* address, T value) {
    const T before = *address;
    *address = value;
    return before;
}
#define EMU_ATOMICS(T)                                                                                        \
    static inline T atomicAdd(T* a, T value) { return emu_exchange(a, (T)(*a + value)); }                     \
    static inline T atomicExch(T* a, T value) { return emu_exchange(a, value); }                              \
    static inline T atomicMax(T* a, T value) { return emu_exchange(a, *a > value ? *a : value); }             \
    static inline T atomicMin(T* a, T value) { return emu_exchange(a, *a < value ? *a : value); }             \
    static inline T atomicCAS(T* a, T compare, T value) { return emu_exchange(a, *a == compare ? value : *a); }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
static inline float atomicAdd(float* a, float value) { return emu_exchange(a, *a + value); }

static inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
static inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
static inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
// A name that newer C libraries have too.
#define rsqrtf emu_rsqrtf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }

static inline float emu_half_to_float(unsigned short half) {
    const unsigned sign = (unsigned)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)fraction * 0x1p-24f));
    return __uint_as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}
// Round to nearest even, as cvt.rn; the NaN is the GPU's canonical one.
static inline unsigned short emu_float_to_half(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    const float magnitude = __uint_as_float(rest);
    if (value != value) return 0x7fff;
    if (magnitude >= 65520.0f) return (unsigned short)(sign | 0x7c00);
    if (magnitude < 0x1p-14f) return (unsigned short)(sign | (unsigned)nearbyintf(magnitude * 0x1p24f));
    return (unsigned short)(sign | ((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10));
}
