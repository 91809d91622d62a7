// CUDA C on a CPU, for tests: the kernel text is compiled unchanged after this header. Every CUDA thread of a block is
// a fiber that runs until it waits at a barrier or a warp collective; blocks run one after another. What a GPU would
// hide is an error here: divergent barriers, lanes missing from a collective, shuffles from outside the mask,
// misaligned and out-of-bounds accesses (guard pages, set up by the loader), uninitialised shared memory (NaN), races
// (thread orders), copies that nobody waits for. A barrier needs all threads of the block, also those that have returned.
// Not covered: PTX, cooperative groups, fences, memory-model races between blocks, spinning on a flag.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>
#include <vector>

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

static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
extern char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));

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

// ---- fibers ----
constexpr size_t STACK_BYTES = 256 * 1024, PAGE_BYTES = 4096;
#if defined(__x86_64__)
typedef void* Context;
extern "C" __attribute__((visibility("hidden"))) void emu_switch(Context* from, Context* to);
asm(R"(
    .text
    .local emu_switch
    .type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void make_context(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    memset(top - 8, 0, 8 * sizeof(void*));
    top[-2] = reinterpret_cast<void*>(entry);
    context = top - 8;
}
static void switch_context(Context& from, Context& to) { emu_switch(&from, &to); }
#else
typedef ucontext_t Context;
static void make_context(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
static void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

// ---- threads of a block ----
enum State { RUNNABLE, AT_BARRIER, AT_NAMED, AT_COLLECTIVE, EXITED };
struct Site {
    const char *name, *file;
    int line;
    bool operator==(const Site& o) const { return line == o.line && !strcmp(name, o.name) && !strcmp(file, o.file); }
};
struct Thread {
    Context context;
    uint3 index;
    State state;
    Site site;
    unsigned mask;
    int source;
    u64 value, result;
};
static Launch* launch;
static void (*call)(void**);
static Thread* threads;
static unsigned num_threads, current, num_at_barrier;
static Context scheduler;
static sigjmp_buf escape;

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(launch->message, sizeof(launch->message), format, list);
    va_end(list);
    siglongjmp(escape, FAILED);
}

static void wait() { switch_context(threads[current].context, scheduler); }

// Waits for all threads of the block at the same place; returns for how many of them `value` is not zero.
static int barrier(const Site& site, bool value) {
    Thread& self = threads[current];
    for (unsigned t = 0; t < num_threads; ++t) {
        const Thread& other = threads[t];
        if (other.state == AT_BARRIER && !(other.site == site)) {
            fail("divergent barriers: thread %u waits at %s (%s:%d) and thread %u at %s (%s:%d)", t, other.site.name,
                 other.site.file, other.site.line, current, site.name, site.file, site.line);
        }
    }
    self.site = site;
    self.value = value;
    self.state = AT_BARRIER;
    if (++num_at_barrier == num_threads) {
        int count = 0;
        for (unsigned t = 0; t < num_threads; ++t) count += threads[t].value != 0;
        for (unsigned t = 0; t < num_threads; ++t) threads[t].result = count, threads[t].state = RUNNABLE;
        num_at_barrier = 0;
    }
    wait();
    return (int)self.result;
}

// Named barriers: the 16 of a block, and one for the products of each warpgroup. Whether one has just let threads go.
static unsigned num_at_named[16 + 8];
static bool released;

// Counts a thread in; if it waits, it does so until `expected` have been counted.
static void named_barrier(const Site& site, int id, unsigned expected, bool waits) {
    Thread& self = threads[current];
    self.site = site, self.source = id;
    if (waits) self.state = AT_NAMED;
    if (++num_at_named[id] == expected) {
        for (unsigned t = 0; t < num_threads; ++t) {
            if (threads[t].state == AT_NAMED && threads[t].source == id) threads[t].state = RUNNABLE;
        }
        num_at_named[id] = 0;
        released = true;
    }
    if (waits) wait();
}

// Waits for the lanes of `mask`; returns the value of lane `source`, or with source < 0 the ballot of the values.
static u64 meet(const Site& site, unsigned mask, u64 value, int source) {
    Thread& self = threads[current];
    Thread* warp = threads + current / 32 * 32;
    const unsigned lane = current % 32, lanes = num_threads - current / 32 * 32;
    if (!(mask >> lane & 1)) {
        fail("%s (%s:%d): lane %u is not in its own mask 0x%08x", site.name, site.file, site.line, lane, mask);
    }
    if (source >= 0 && !(mask >> source & 1)) {
        fail("%s (%s:%d): lane %u reads lane %d, which is not in the mask 0x%08x", site.name, site.file, site.line,
             lane, source, mask);
    }
    self.site = site, self.mask = mask, self.value = value, self.source = source;
    self.state = AT_COLLECTIVE;
    bool complete = true;
    for (unsigned l = 0; l < 32; ++l) {
        if (!(mask >> l & 1)) continue;
        if (l >= lanes || warp[l].state == EXITED) {
            fail("%s (%s:%d): lane %u is in the mask 0x%08x but has exited", site.name, site.file, site.line, l, mask);
        }
        const Thread& other = warp[l];
        if (other.state != AT_COLLECTIVE) {
            complete = false;
        } else if (other.mask != mask || !(other.site == site)) {
            complete = false;
            if (other.mask >> lane & 1) {
                fail("different collectives meet: lane %u in %s (%s:%d) with mask 0x%08x, "
                     "lane %u in %s (%s:%d) with mask 0x%08x",
                     lane, site.name, site.file, site.line, mask, l, other.site.name, other.site.file,
                     other.site.line, other.mask);
            }
        }
    }
    if (complete) {
        unsigned ballot = 0;
        for (unsigned l = 0; l < 32; ++l) ballot |= mask >> l & 1 && warp[l].value ? 1u << l : 0u;
        for (unsigned l = 0; l < 32; ++l) {
            if (!(mask >> l & 1)) continue;
            warp[l].result = warp[l].source >= 0 ? warp[warp[l].source].value : ballot;
            warp[l].state = RUNNABLE;
        }
    }
    wait();
    return self.result;
}

// A product that a warpgroup has started: by one thread its A and sums.
struct Product {
    float* sums;
    int count;
    unsigned a[4];
    u64 b;
    bool adds;
    // Of two numbers of fp16 in a word, else of one of tf32.
    bool fp16;
};
static std::vector<Product> products[1024];

static void leave() {
    Thread* warp = threads + current / 32 * 32;
    if (!products[current].empty()) fail("thread %u does not wait for its products", current);
    threads[current].state = EXITED;
    for (unsigned l = 0; l < 32 && warp + l < threads + num_threads; ++l) {
        const Thread& other = warp[l];
        if (other.state == AT_COLLECTIVE && other.mask >> (current % 32) & 1) {
            fail("%s (%s:%d): lane %u is in the mask 0x%08x but has exited", other.site.name, other.site.file,
                 other.site.line, current % 32, other.mask);
        }
    }
}

static void thread_main() {
    call(launch->args);
    leave();
    wait();
}

__attribute__((noreturn)) static void report_deadlock() {
    char text[900] = "";
    size_t used = 0;
    unsigned exited = 0;
    for (unsigned t = 0; t < num_threads; ++t) {
        const Thread& first = threads[t];
        if (first.state == EXITED) {
            ++exited;
            continue;
        }
        unsigned before = 0, together = 0;
        for (unsigned s = 0; s < num_threads; ++s) {
            const bool same = threads[s].state == first.state && threads[s].site == first.site;
            before += same && s < t;
            together += same;
        }
        if (before != 0 || used + 200 > sizeof(text)) continue;
        used += snprintf(text + used, sizeof(text) - used, "%u at %s (%s:%d), first thread %u; ", together,
                         first.site.name, first.site.file, first.site.line, t);
    }
    fail("deadlock in block (%u, %u, %u): %s%u of %u threads have exited", blockIdx.x, blockIdx.y, blockIdx.z, text,
         exited, num_threads);
}

static u64 random_state;
static void arrange(unsigned* items, unsigned count) {
    for (unsigned i = 0; i < count; ++i) items[i] = launch->order == REVERSE ? count - 1 - i : i;
    for (unsigned i = count; launch->order == RANDOM && i > 1; --i) {
        random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(items[i - 1], items[(random_state >> 33) % i]);
    }
}

struct Copy {
    void* to;
    const void* from;
    unsigned bytes, group;
};
struct Copies {
    std::vector<Copy> under_way;
    unsigned group;
};
static Copies copies[1024];

static void run_block(unsigned* order, char* stacks) {
    memset(__start_emu_shared, 0xff, __stop_emu_shared - __start_emu_shared);
    memset(launch->shared, 0xff, launch->shared_bytes);
    for (unsigned t = 0; t < num_threads; ++t) {
        threads[t].state = RUNNABLE;
        copies[t].under_way.clear();
        products[t].clear();
        threads[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        make_context(threads[t].context, stacks + t * (STACK_BYTES + PAGE_BYTES) + PAGE_BYTES, thread_main);
    }
    num_at_barrier = 0;
    memset(num_at_named, 0, sizeof(num_at_named));
    for (unsigned exited = 0; exited < num_threads;) {
        bool progress = false;
        arrange(order, num_threads);
        for (unsigned i = 0; i < num_threads; ++i) {
            current = order[i];
            if (threads[current].state != RUNNABLE) continue;
            progress = true;
            threadIdx = threads[current].index;
            switch_context(scheduler, threads[current].context);
            exited += threads[current].state == EXITED;
            // Those go on before others come to the next barrier, as a warpgroup may.
            if (released) released = false, i = -1u;
        }
        if (!progress) report_deadlock();
    }
    for (const unsigned count : num_at_named) {
        if (count == 0) continue;
        fail("block (%u, %u, %u) leaves %u threads at a named barrier", blockIdx.x, blockIdx.y, blockIdx.z, count);
    }
}

static void on_fault(int signal, siginfo_t* info, void* raw) {
    launch->fault_signal = signal;
    launch->fault_address = info->si_addr;
#if defined(__x86_64__)
    const greg_t* registers = static_cast<ucontext_t*>(raw)->uc_mcontext.gregs;
    launch->fault_code = reinterpret_cast<void*>(registers[REG_RIP]);
    launch->fault_write = registers[REG_ERR] >> 1 & 1;
#endif
    siglongjmp(escape, FAULT);
}

// Runs a grid. Faults of the kernel are caught on a stack of their own and end the launch.
static int run(Launch* description, void (*entry)(void**)) {
    launch = description;
    call = entry;
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    num_threads = blockDim.x * blockDim.y * blockDim.z;
    random_state = launch->seed;
    const unsigned num_blocks = gridDim.x * gridDim.y * gridDim.z;
    const size_t stack_total = num_threads * (STACK_BYTES + PAGE_BYTES);
    char* const stacks = static_cast<char*>(
        mmap(nullptr, stack_total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (unsigned t = 0; t < num_threads; ++t) mprotect(stacks + t * (STACK_BYTES + PAGE_BYTES), PAGE_BYTES, PROT_NONE);
    threads = static_cast<Thread*>(calloc(num_threads, sizeof(Thread)));
    unsigned* const order = static_cast<unsigned*>(calloc(num_blocks + num_threads, sizeof(unsigned)));

    static char fault_stack[64 * 1024];
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    struct sigaction action = {}, before[4];
    stack_t alternate = {}, alternate_before;
    alternate.ss_sp = fault_stack;
    alternate.ss_size = sizeof(fault_stack);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&alternate, &alternate_before);
    for (int s = 0; s < 4; ++s) sigaction(signals[s], &action, &before[s]);

    const int result = sigsetjmp(escape, 1);
    if (result == DONE) {
        arrange(order, num_blocks);
        for (unsigned b = 0; b < num_blocks; ++b) {
            blockIdx = {order[b] % gridDim.x, order[b] / gridDim.x % gridDim.y, order[b] / (gridDim.x * gridDim.y)};
            run_block(order + num_blocks, stacks);
        }
    }
    for (int s = 0; s < 4; ++s) sigaction(signals[s], &before[s], nullptr);
    sigaltstack(&alternate_before, nullptr);
    free(order);
    free(threads);
    munmap(stacks, stack_total);
    return result;
}

// ---- entry points: arguments arrive as an array of pointers, as in cuLaunchKernel ----
template <class T> static void describe(char*& text) {
    static_assert(std::is_pointer<T>::value || std::is_same<T, long long>::value || std::is_same<T, double>::value,
                  "kernel arguments are pointers, long long or double");
    if constexpr (!std::is_pointer<T>::value) {
        text += sprintf(text, std::is_same<T, double>::value ? "double " : "int ");
    } else {
        typedef typename std::remove_pointer<T>::type Item;
        const char* access = std::is_const<Item>::value ? "read" : "write";
        if constexpr (std::is_void<Item>::value) {
            text += sprintf(text, "%s:any ", access);
        } else {
            const char kind = std::is_floating_point<Item>::value ? 'f' : 'i';
            text += sprintf(text, "%s:%c%d ", access, kind, (int)sizeof(Item));
        }
    }
}
template <class... A> static const char* signature(void (*)(A...)) {
    static char text[16 * sizeof...(A) + 1];
    char* end = text;
    (describe<A>(end), ...);
    return text;
}
template <class... A, size_t... I> static void apply(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<typename std::remove_const<A>::type*>(args[I])...);
}
template <class... A> static void apply(void (*kernel)(A...), void** args) {
    apply(kernel, args, std::index_sequence_for<A...>());
}
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))
#define EMU_ENTRY(name)                                                                                       \
    EMU_EXPORT const char* emu_signature_##name() { return emu::signature(emu_text::name); }                  \
    EMU_EXPORT int emu_launch_##name(emu::Launch* launch) {                                                   \
        return emu::run(launch, [](void** args) { emu::apply(emu_text::name, args); });                       \
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

// GCC calls this (-fsanitize=alignment) before an access that is not aligned to its type.
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void* data, void* address) {
    const struct Location { const char* file; int line; }* where = static_cast<Location*>(data);
    emu::fail("misaligned access at %s:%d (address ends in 0x%x)", where->file, where->line,
              (unsigned)((size_t)address & 31));
}

#include "intrinsics.h"
