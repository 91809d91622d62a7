// CUDA C on a CPU, for tests: the kernel text is compiled unchanged after this header. Every CUDA thread of a block is
// a fiber that runs until it waits at a barrier or a warp collective; blocks run one after another. What a GPU would
// hide is an error here: divergent barriers, lanes missing from a collective, shuffles from outside the mask,
// misaligned and out-of-bounds accesses (guard pages, set up by the loader), uninitialised shared memory (NaN), races
// (thread orders), copies that nobody waits for. A barrier needs all threads of the block, also those that have returned.
// Not covered: PTX, cooperative groups, fences, memory-model races between blocks, spinning on a flag.
// Kernel texts are compiled with this header; emulator.cpp, compiled once and linked to each of them, runs the threads.
#include <math.h>
#include <stdio.h>
#include <string.h>

#define PYG_DFGNN_EMULATOR 1
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static __attribute__((section("emu_shared")))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define EMU_VECTOR(scalar, name, bytes)                                                                        \
    struct alignas(2 * bytes) name##2 { scalar x, y; };                                                        \
    struct name##3 { scalar x, y, z; };                                                                        \
    struct alignas(4 * bytes > 16 ? 16 : 4 * bytes) name##4 { scalar x, y, z, w; };                            \
    static inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                \
    static inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                   \
    static inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
EMU_VECTOR(float, float, 4)
EMU_VECTOR(double, double, 8)
EMU_VECTOR(int, int, 4)
EMU_VECTOR(unsigned, uint, 4)
EMU_VECTOR(short, short, 2)
EMU_VECTOR(unsigned short, ushort, 2)

// What both have is theirs alone, so that each library has threads of its own.
#pragma GCC visibility push(hidden)
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace emu {
typedef unsigned long long u64;

// What the loader hands in and reads back; tests/emu/loader.py holds the same structure.
struct Launch {
    unsigned grid[3], block[3];
    void** args;
    u64 shared_bytes, seed;
    int order;
    char* shared;
    void *fault_address, *fault_code;
    int fault_signal, fault_write;
    char message[1024];
};
enum Order { FORWARD, REVERSE, RANDOM };
enum Result { DONE, FAILED, FAULT };

// A place of a kernel text where threads wait.
struct Site {
    const char *name, *file;
    int line;
    bool operator==(const Site& o) const { return line == o.line && same(name, o.name) && same(file, o.file); }
    static bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
};
extern Launch* launch;
extern unsigned num_threads, current;

__attribute__((noreturn, format(printf, 1, 2))) void fail(const char* format, ...);
// Waits for all threads of the block at the same place; returns for how many of them `value` is not zero.
int barrier(const Site& site, bool value);
// Counts a thread in; if it waits, it does so until `expected` have been counted.
void named_barrier(const Site& site, int id, unsigned expected, bool waits);
// Waits for the lanes of `mask`; returns the value of lane `source`, or with source < 0 the ballot of the values.
u64 meet(const Site& site, unsigned mask, u64 value, int source);
// The lanes of the warp that have not exited.
unsigned active_mask();
// Reads four matrices of 8 rows and 4 numbers: row i % 8 of matrix i / 8 is where lane i says.
void load_matrices(const Site& site, unsigned (&numbers)[4], const float* row);
// The product of a warp, include/mma.cuh, of tf32, fp16 or bf16 by STORAGE; `first` leaves out what D holds.
void multiply(const Site& site, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool first, int storage);
// The products of a warpgroup, include/wgmma.cuh, read shared memory as late as they may, when the threads wait for them.
void start_product(const Site& site, float* sums, int count, const unsigned (&a)[4], u64 b, bool adds, bool fp16);
void wait_products(const Site& site);
// Asynchronous copies arrive as late as they may, when the thread waits for their group. `from` null: zeros.
void copy(const Site& site, void* to, const void* from, unsigned bytes);
void close_copies();
void wait_copies(unsigned pending);
// Runs a grid. Faults of the kernel are caught on a stack of their own and end the launch.
int run(Launch* description, void (*entry)(void**));

// ---- entry points: arguments arrive as an array of pointers, as in cuLaunchKernel ----
template <class T> struct Item { static const char kind = 'i'; };
template <> struct Item<float> { static const char kind = 'f'; };
template <> struct Item<double> { static const char kind = 'f'; };
template <class T> struct Parameter {
    static_assert(!sizeof(T), "kernel arguments are pointers, long long or double");
    static int describe(char*) { return 0; }
};
template <> struct Parameter<long long> {
    static int describe(char* text) { return sprintf(text, "int "); }
};
template <> struct Parameter<double> {
    static int describe(char* text) { return sprintf(text, "double "); }
};
template <class T> struct Parameter<T*> {
    static int describe(char* text) { return sprintf(text, "write:%c%d ", Item<T>::kind, (int)sizeof(T)); }
};
template <class T> struct Parameter<const T*> {
    static int describe(char* text) { return sprintf(text, "read:%c%d ", Item<T>::kind, (int)sizeof(T)); }
};
template <> struct Parameter<void*> {
    static int describe(char* text) { return sprintf(text, "write:any "); }
};
template <> struct Parameter<const void*> {
    static int describe(char* text) { return sprintf(text, "read:any "); }
};
template <class... A> static const char* signature(void (*)(A...)) {
    static char text[16 * sizeof...(A) + 1];
    char* end = text;
    ((end += Parameter<A>::describe(end)), ...);
    return text;
}
template <class... A> struct Call {
    Call(void (*kernel)(A...), A... args) { kernel(args...); }
};
template <class... A> static void apply(void (*kernel)(A...), void** args) {
    // Braces: one argument after the other.
    Call<A...>{kernel, *static_cast<A*>(*args++)...};
}
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))
#define EMU_ENTRY(text, name)                                                                                 \
    EMU_EXPORT const char* emu_signature_##text##_##name() { return emu::signature(text::name); }             \
    EMU_EXPORT int emu_launch_##text##_##name(emu::Launch* launch) {                                          \
        return emu::run(launch, [](void** args) { emu::apply(text::name, args); });                           \
    }

template <class T> static T shuffle(const Site& site, unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = meet(site, mask, bits, source);
    memcpy(&value, &bits, sizeof(T));
    return value;
}
// The lane at `target`, or the caller itself where that leaves its group of `width` lanes on the wrong side.
static int lane_at(int target, bool inside) { return inside ? target : (int)(current % 32); }
static int group_first(int width) { return (int)(current % 32) & ~(width - 1); }
template <class To, class From> static To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
}  // namespace emu
#pragma GCC visibility pop

#include "intrinsics.h"
