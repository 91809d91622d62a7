// Copies of 16 and 4 bytes to shared memory that the thread does not wait for, in groups.
__device__ __forceinline__ void copy16(void* to, const void* from) {
#ifdef PYG_DFGNN_EMULATOR
    emu_copy(to, from, 16);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#endif
}

// The same, or 16 bytes of zeros, which read nothing.
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
#ifdef PYG_DFGNN_EMULATOR
    emu_copy(to, valid ? from : nullptr, 16);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

__device__ __forceinline__ void copy4(void* to, const void* from) {
#ifdef PYG_DFGNN_EMULATOR
    emu_copy(to, from, 4);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void close_copies() {
#ifdef PYG_DFGNN_EMULATOR
    emu_close_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of the thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#ifdef PYG_DFGNN_EMULATOR
    emu_wait_copies(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
