"""Kernels with one fault each, that a tool of compute-sanitizer must find: python -m tests.proofs.planted TOOL."""

import sys

THREADS = 32
FAULTS = {
    # Writes behind the end of an array.
    "memcheck": "x[n + threadIdx.x] = 1.0f;",
    # Half of a warp meets at a barrier.
    "synccheck": "if (threadIdx.x < 16) __syncthreads();\n    x[threadIdx.x % n] = 1.0f;",
    # Reads what nobody has written.
    "initcheck": "if (x[n - 1 - threadIdx.x % n] == 3.0f) x[0] = 1.0f;",
    # Threads of two warps exchange values without a barrier.
    "racecheck": """
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = shared[63 - threadIdx.x] + 1.0f;""",
}
"""Tool -> the body of its kernel on an array of n floats; the slowest tool last, which has what the others leave of the
time."""
INITIALISED = ("racecheck", "synccheck", "memcheck")


def source(tool: str) -> str:
    """The text of the kernel of a tool."""
    return f'extern "C" __global__ void planted_{tool}(float* x, long long n) {{\n    {FAULTS[tool].strip()}\n}}\n'


def run(tool: str) -> None:
    """Launch the kernel of a tool on an array of its own."""
    import cupy

    count, threads = 64, 64 if tool == "racecheck" else THREADS
    # Memory of the driver alone: an allocator's pool has room behind an array.
    address = cupy.cuda.runtime.malloc(4 * count)
    if tool in INITIALISED:
        cupy.cuda.runtime.memset(address, 0, 4 * count)
    cupy.RawModule(code=source(tool)).get_function(f"planted_{tool}")((1,), (threads,), (address, count))
    cupy.cuda.runtime.deviceSynchronize()


if __name__ == "__main__":
    run(sys.argv[1])
