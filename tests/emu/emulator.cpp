// Runs the threads of kernel texts, see emulator.h: compiled once, linked to each kernel.
#include "emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

uint3 threadIdx, blockIdx, blockDim, gridDim;
extern char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {
// Grows and keeps what it has taken; without the C++ library, which takes longer to link than a kernel to compile.
template <class T> struct List {
    T* items;
    size_t count, room;
    void push(const T& item) {
        if (count == room) items = static_cast<T*>(realloc(items, (room = 2 * room + 8) * sizeof(T)));
        items[count++] = item;
    }
};

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
struct Thread {
    Context context;
    uint3 index;
    State state;
    Site site;
    unsigned mask;
    int source;
    u64 value, result;
};
Launch* launch;
unsigned num_threads, current;
static void (*call)(void**);
static Thread* threads;
static unsigned num_at_barrier;
static Context scheduler;
static sigjmp_buf escape;

void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(launch->message, sizeof(launch->message), format, list);
    va_end(list);
    siglongjmp(escape, FAILED);
}

static void wait() { switch_context(threads[current].context, scheduler); }

int barrier(const Site& site, bool value) {
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

void named_barrier(const Site& site, int id, unsigned expected, bool waits) {
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

u64 meet(const Site& site, unsigned mask, u64 value, int source) {
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

unsigned active_mask() {
    unsigned mask = 0;
    for (unsigned l = 0, t = current / 32 * 32; l < 32 && t + l < num_threads; ++l) {
        mask |= threads[t + l].state != EXITED ? 1u << l : 0u;
    }
    return mask;
}

void load_matrices(const Site& site, unsigned (&numbers)[4], const float* row) {
    static const float* rows[1024];
    if (reinterpret_cast<u64>(row) % 16) fail("%s:%d: a row of a matrix is not aligned", site.file, site.line);
    rows[current] = row;
    meet(site, 0xffffffffu, 0, -1);
    for (unsigned i = 0; i < 4; ++i) {
        numbers[i] = bit_cast<unsigned>(rows[current / 32 * 32 + 8 * i + current % 32 / 4][current % 4]);
    }
    meet(site, 0xffffffffu, 0, -1);
}

void multiply(const Site& site, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bool first, int storage) {
    static unsigned exchange[1024][6];
    const unsigned lane = current % 32, group = lane / 4, steps = storage == 0 ? 4 : 8;
    unsigned(*const warp)[6] = exchange + current / 32 * 32;
    memcpy(warp[lane], a, sizeof(a));
    memcpy(warp[lane] + 4, b, sizeof(b));
    meet(site, 0xffffffffu, 0, -1);
    const auto number = [storage](unsigned word, unsigned k) {
        if (storage == 0) return bit_cast<float>(word & 0xffffe000u);
        const unsigned bits = word >> 16 * (k % 2) & 0xffffu;
        return storage == 1 ? emu_half_to_float((unsigned short)bits) : bit_cast<float>(bits << 16);
    };
    for (unsigned i = 0; i < 4; ++i) {
        float sum = first ? 0.0f : d[i];
        for (unsigned k = 0; k < 2 * steps; ++k) {
            const unsigned pos = storage == 0 ? k % 4 : k % 8 / 2, second = k / steps;
            const unsigned column = lane % 4 * 2 + i % 2, x = warp[group * 4 + pos][i / 2 + 2 * second];
            sum += number(x, k) * number(warp[column * 4 + pos][4 + second], k);
        }
        d[i] = sum;
    }
    meet(site, 0xffffffffu, 0, -1);
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
static List<Product> products[1024];

void start_product(const Site& site, float* sums, int count, const unsigned (&a)[4], u64 b, bool adds, bool fp16) {
    const u64 end = ((b & 0x3fff) << 4) + ((b >> 16 & 0x3fff) << 4) + count / 4 * 128;
    if (b >> 46 || (b >> 32 & 0x3fff) != 8) fail("%s:%d: what describes B is not understood", site.file, site.line);
    if (end > launch->shared_bytes) fail("%s:%d: B reaches beyond the shared memory", site.file, site.line);
    products[current].push({sums, count, {a[0], a[1], a[2], a[3]}, b, adds, fp16});
}

void wait_products(const Site& site) {
    static unsigned exchange[1024][4];
    const unsigned first = current / 128 * 128, thread = current % 128, row = thread / 4 * 4;
    for (size_t p = 0; p < products[current].count; ++p) {
        const Product product = products[current].items[p];
        const char* const b = launch->shared + ((product.b & 0x3fff) << 4);
        memcpy(exchange[current], product.a, sizeof(product.a));
        named_barrier(site, 16 + first / 128, 128, true);
        for (int i = 0; i < product.count; ++i) {
            const unsigned column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = product.adds ? product.sums[i] : 0.0;
            for (unsigned k = 0; k < 8; ++k) {
                const unsigned x = exchange[first + row + k % 4][i / 2 % 2 + k / 4 * 2];
                unsigned y;
                memcpy(&y, b + k / 4 * ((product.b >> 16 & 0x3fff) << 4) + column * 16 + k % 4 * 4, 4);
                if (!product.fp16) {
                    sum += (double)bit_cast<float>(x & 0xffffe000u) * bit_cast<float>(y & 0xffffe000u);
                    continue;
                }
                for (unsigned half = 0; half < 32; half += 16) {
                    sum += (double)emu_half_to_float((unsigned short)(x >> half)) * emu_half_to_float((unsigned short)(y >> half));
                }
            }
            product.sums[i] = (float)sum;
        }
        named_barrier(site, 16 + first / 128, 128, true);
    }
    products[current].count = 0;
}

struct Copy {
    void* to;
    const void* from;
    unsigned bytes, group;
};
struct Copies {
    List<Copy> under_way;
    unsigned group;
};
static Copies copies[1024];

void copy(const Site& site, void* to, const void* from, unsigned bytes) {
    if (reinterpret_cast<u64>(to) % bytes || reinterpret_cast<u64>(from) % bytes) {
        fail("%s:%d: a copy of %u bytes is not aligned", site.file, site.line, bytes);
    }
    Copies& own = copies[current];
    own.under_way.push({to, from, bytes, own.group});
}
void close_copies() { ++copies[current].group; }
void wait_copies(unsigned pending) {
    Copies& own = copies[current];
    List<Copy>& list = own.under_way;
    size_t late = 0;
    for (; late < list.count && list.items[late].group + pending < own.group; ++late) {
        const Copy& copy = list.items[late];
        if (copy.from) {
            memcpy(copy.to, copy.from, copy.bytes);
        } else {
            memset(copy.to, 0, copy.bytes);
        }
    }
    list.count -= late;
    memmove(list.items, list.items + late, list.count * sizeof(Copy));
}

static void leave() {
    Thread* warp = threads + current / 32 * 32;
    if (products[current].count != 0) fail("thread %u does not wait for its products", current);
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
        const unsigned other = (random_state >> 33) % i, item = items[other];
        items[other] = items[i - 1];
        items[i - 1] = item;
    }
}

static void run_block(unsigned* order, char* stacks) {
    memset(__start_emu_shared, 0xff, __stop_emu_shared - __start_emu_shared);
    memset(launch->shared, 0xff, launch->shared_bytes);
    for (unsigned t = 0; t < num_threads; ++t) {
        threads[t].state = RUNNABLE;
        copies[t].under_way.count = 0;
        products[t].count = 0;
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

int run(Launch* description, void (*entry)(void**)) {
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
}  // namespace emu
