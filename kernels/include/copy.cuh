// Copies of 16 and 4 bytes to shared memory that the thread does not wait for, in groups.
__device__ __forceinline__ void copy16(void* to, const void* from) {
#ifdef PYG_DFGNN_EMULATOR
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#endif
}

// The same, or 16 bytes of zeros, which read nothing.
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
#ifdef PYG_DFGNN_EMULATOR
    *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0u, 0u, 0u, 0u);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

__device__ __forceinline__ void copy4(void* to, const void* from) {
#ifdef PYG_DFGNN_EMULATOR
    *static_cast<u32*>(to) = *static_cast<const u32*>(from);
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void close_copies() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of the thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#ifndef PYG_DFGNN_EMULATOR
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
