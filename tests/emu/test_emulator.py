"""The emulator itself: right results where a kernel is right, an error where a GPU would hang, race or read astray."""

import numpy as np
import pytest

from tests.emu import ORDERS, EmulationError, Kernel, build, needs_compiler

pytestmark = needs_compiler
FULL = "0xffffffffu"


def run(
    body: str, *arrays: np.ndarray, block: int = 32, grid: int = 1, shared_bytes: int = 0, order: str = "forward"
) -> None:
    """Launches a kernel with parameters float* a, float* b, ... and the given body."""
    parameters = ", ".join(f"float* {name}" for name, _ in zip("abcdef", arrays, strict=False))
    kernel = Kernel(f'extern "C" __global__ void test({parameters}) {{\n{body}\n}}', "test")
    kernel.launch((grid,), (block,), arrays, shared_bytes, order)


def fails(match: str, body: str, *arrays: np.ndarray, **options) -> None:
    with pytest.raises(EmulationError, match=match):
        run(body, *arrays, **options)


def floats(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.float32)


BLOCK_SUM = f"""
    __shared__ float sums[4];
    float v = a[blockIdx.x * blockDim.x + threadIdx.x];
    for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync({FULL}, v, mask);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) b[blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
"""


@pytest.mark.parametrize("order", ORDERS)
def test_block_reduction(order):
    a, b = floats(384), np.zeros(3, np.float32)
    run(BLOCK_SUM, a, b, block=128, grid=3, order=order)
    np.testing.assert_array_equal(b, a.reshape(3, 128).sum(1))


def test_missing_barrier_shows_in_another_order():
    body, results = BLOCK_SUM.replace("__syncthreads();", ""), []
    for order in ORDERS:
        b = np.zeros(1, np.float32)
        run(body, floats(128), b, block=128, order=order)
        results.append(float(b[0]))
    assert not all(result == floats(128).sum() for result in results)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("__shfl_sync({m}, v, 5)", np.full(32, 5)),
        ("__shfl_sync({m}, v, 3, 8)", np.arange(32) // 8 * 8 + 3),
        ("__shfl_up_sync({m}, v, 2, 8)", np.where(np.arange(32) % 8 < 2, np.arange(32), np.arange(32) - 2)),
        ("__shfl_down_sync({m}, v, 3)", np.where(np.arange(32) > 28, np.arange(32), np.arange(32) + 3)),
        ("__shfl_xor_sync({m}, v, 8, 8)", np.where(np.arange(32) % 16 < 8, np.arange(32), np.arange(32) - 8)),
        ("(float)__popc(__ballot_sync({m}, v >= 20))", np.full(32, 12)),
        ("(float)__any_sync({m}, v == 7)", np.full(32, 1)),
        ("(float)__all_sync({m}, v < 31)", np.full(32, 0)),
        ("(float)__shfl_sync({m}, (long long)v + 1, 9)", np.full(32, 10)),
        ("(float)__umulhi(0x80000000u, 2 * (unsigned)v)", np.arange(32)),
        ("(float)__syncthreads_count(v < 11)", np.full(32, 11)),
    ],
)
def test_collectives(call, expected):
    a = np.zeros(32, np.float32)
    run(f"const float v = threadIdx.x; a[threadIdx.x] = {call.format(m=FULL)};", a, order="random")
    np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_half_warps_diverge_with_their_own_masks(order):
    a = floats(32)
    run(
        """
        float v = a[threadIdx.x];
        if (threadIdx.x < 16) {
            for (int m = 8; m > 0; m /= 2) v += __shfl_xor_sync(0x0000ffffu, v, m);
        } else {
            v = __shfl_sync(0xffff0000u, v, 31);
            __syncwarp(0xffff0000u);
        }
        v += __shfl_xor_sync(0xffffffffu, v, 16);
        a[threadIdx.x] = v;
        """,
        a,
        order=order,
    )
    np.testing.assert_array_equal(a, np.full(32, 136 + 32))


def test_divergent_barrier():
    fails("32 at __syncthreads .* 32 of 64 threads have exited", "if (threadIdx.x < 32) __syncthreads();", block=64)
    fails("divergent barriers", "if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();", block=64)
    fails("deadlock", f"if (threadIdx.x < 16) __syncthreads(); else __shfl_sync({FULL}, 1, 16); a[0] = 0;", floats(1))


@pytest.mark.parametrize("order", ORDERS)
def test_exited_lane_in_mask(order):
    fails(
        "in the mask 0xffffffff but has exited",
        f"if (threadIdx.x == 3) return; __shfl_sync({FULL}, 1, 0);",
        order=order,
    )


def test_shuffle_from_outside_the_mask():
    fails("reads lane 16, which is not in the mask", "if (threadIdx.x < 16) __shfl_xor_sync(0x0000ffffu, 1, 16);")
    fails("not in its own mask", "__ballot_sync(0x0000ffffu, 1);")


def test_different_collectives_meet():
    fails("different collectives meet", f"if (threadIdx.x < 9) __syncwarp(); else __ballot_sync({FULL}, 1);")
    fails("different collectives meet", f"if (threadIdx.x < 9) __any_sync({FULL}, 1);\nelse __any_sync({FULL}, 0);")


@pytest.mark.parametrize("order", ORDERS)
def test_out_of_bounds(order):
    fails("out-of-bounds", "b[threadIdx.x] = a[threadIdx.x + 1024];", floats(32), floats(32), order=order)
    fails("out-of-bounds write", "a[threadIdx.x] = 0;", floats(31), order=order)
    fails("out-of-bounds", "a[(int)threadIdx.x - 1] = 0;", floats(32), order=order)


def test_out_of_bounds_tells_where():
    with pytest.raises(
        EmulationError, match=r"read at 0 bytes past the end of argument 0 of test \(float32 \[31\]\)\nkernel.cu:2"
    ):
        run("b[threadIdx.x] = a[threadIdx.x];", floats(31), floats(32))


def test_out_of_bounds_shared_memory():
    body = "extern __shared__ float buffer[];\nbuffer[threadIdx.x] = 1; a[threadIdx.x] = buffer[threadIdx.x];"
    a = floats(32)
    run(body, a, shared_bytes=128)
    np.testing.assert_array_equal(a, np.ones(32))
    fails("the dynamic shared memory", body, a, shared_bytes=112)


def test_null_and_stack_overflow_and_division():
    fails("address 0x0", "float* null = nullptr; a[threadIdx.x] = *null;", floats(32))
    fails("address", "volatile float big[1 << 17]; big[0] = 1; big[(1 << 17) - 1] = a[0];", floats(32))
    fails("Floating point exception\nkernel.cu:2", "a[0] = 7 / (int)(a[0] - 1);", floats(1), block=1)


def test_write_to_const_input():
    kernel = Kernel('extern "C" __global__ void test(const float* a) { const_cast<float*>(a)[0] = 0; }', "test")
    with pytest.raises(EmulationError, match="write at 0 bytes into argument 0 .* read-only"):
        kernel.launch((1,), (1,), [floats(4)])


def test_misaligned_vector_access():
    body = "a[0] = reinterpret_cast<const float4*>(a + {})->x;"
    run(body.format(4), floats(8), block=1)
    fails("misaligned access\nkernel.cu:2", body.format(2), floats(8), block=1)


def test_matrices_whose_rows_are_not_aligned():
    body = """
    unsigned numbers[4];
    emu_load_matrices(numbers, a + threadIdx.x % 8 * 4 + {offset});
    b[threadIdx.x] = __uint_as_float(numbers[1]);
    """
    a, b = floats(36), np.zeros(32, np.float32)
    run(body.replace("{offset}", "0"), a, b)
    np.testing.assert_array_equal(b, a[:32])
    fails("kernel.cu:.*: a row of a matrix is not aligned", body.replace("{offset}", "1"), a, b)


def test_uninitialised_memory_is_poisoned():
    body = """
        __shared__ float fixed[32];
        extern __shared__ float dynamic[];
        if (threadIdx.x == blockIdx.x) fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
        __syncthreads();
        a[blockIdx.x * 32 + threadIdx.x] = fixed[threadIdx.x] + dynamic[threadIdx.x];
    """
    a = np.zeros(64, np.float32)
    run(body, a, grid=2, shared_bytes=128)
    assert np.isfinite(a).nonzero()[0].tolist() == [0, 33]


def test_uninitialised_variables_are_no_numbers():
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    body = """
        float single, sum, several[4];
        struct { float first, second; } pair;
        if (threadIdx.x == 0) { single = 1; sum = 0; pair.second = 1; several[1] = 1; }
        pair.first = several[0] = 0;
        for (int i = 0; i < 4; ++i) sum += a[i];
        __syncthreads();
        a[threadIdx.x] = single;
        b[threadIdx.x] = threadIdx.x < 2 ? sum : threadIdx.x < 3 ? pair.first + pair.second : several[threadIdx.x ^ 2];
    """
    run(body, a, b, block=4)
    assert a[0] == 1 and b[0] == 0
    assert np.isnan(a[1:]).all() and np.isnan(b[1:]).all()


def test_shared_memory_of_inline_functions_and_members():
    source = """
    template <int SIZE> __device__ __forceinline__ float reversed(float value) {
        __shared__ float buffer[SIZE];
        buffer[threadIdx.x] = value;
        __syncthreads();
        return buffer[SIZE - 1 - threadIdx.x];
    }
    struct Pair {
        float a, b;
        __device__ __forceinline__ float sum() const { return a + b; }
    };
    extern "C" __global__ void test(float* a) {
        __shared__ float other[1];
        if (threadIdx.x == 0) other[0] = 3;
        const Pair pair = {reversed<32>(a[threadIdx.x]), other[0]};
        a[threadIdx.x] = pair.sum();
    }"""
    a = floats(32)
    Kernel(source, "test").launch((1,), (32,), [a], order="reverse")
    np.testing.assert_array_equal(a, floats(32)[::-1] + 3)


def test_atomics():
    source = """extern "C" __global__ void test(int* a, long long n) {
        atomicAdd(a, 2);
        int seen = a[1], before;
        do { before = seen; seen = atomicCAS(a + 1, before, before + (int)threadIdx.x); } while (seen != before);
    }"""
    a = np.zeros(2, np.int32)
    Kernel(source, "test").launch((3, 2), (8, 4), [a, 5], order="random")
    assert a.tolist() == [2 * 192, 6 * 4 * 28]


def test_half_conversions():
    source = """typedef unsigned short half_t;
    extern "C" __global__ void test(const half_t* half, float* wide, half_t* back, long long n) {
        for (int i = 0; i < n; ++i) wide[i] = emu_half_to_float(half[i]), back[i] = emu_float_to_half(wide[i]);
    }
    extern "C" __global__ void narrow(const float* wide, half_t* half, long long n) {
        for (int i = 0; i < n; ++i) half[i] = emu_float_to_half(wide[i]);
    }"""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide, back = np.zeros(half.size, np.float32), np.zeros(half.size, np.float16)
    Kernel(source, "test").launch((1,), (1,), [half, wide, back, half.size])
    np.testing.assert_array_equal(wide, half.astype(np.float32))
    np.testing.assert_array_equal(back, half)
    values = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    near = np.float32(
        [65504, 65519.99, 65520, 2**-24, 2**-25, 2.0**-25 * 1.0001, 2**-14, 2**-14 - 2**-26, 1 + 2**-11, 1 + 3 * 2**-11]
    )
    values = np.concatenate([values, near, -near, np.random.default_rng(1).normal(size=4096).astype(np.float32)])
    result = np.zeros(values.size, np.float16)
    Kernel(source, "narrow").launch((1,), (1,), [values, result, values.size])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result, values.astype(np.float16))


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((np.zeros(4, np.float64), 1, 1.0), "argument 0 of test needs items of type f4 .got float64"),
        ((np.zeros((4, 4), np.float32)[:, 0], 1, 1.0), "argument 0 of test needs a contiguous array"),
        ((np.zeros(4, np.float32), 1.0, 1.0), "argument 1 of test needs int .got float"),
        ((np.zeros(4, np.float32), 1, 1), "argument 2 of test needs double .got int"),
        ((np.zeros(4, np.float32), 1), "test takes 3 arguments .got 2"),
    ],
)
def test_arguments(args, match):
    kernel = Kernel('extern "C" __global__ void test(float* a, long long n, double x) {}', "test")
    with pytest.raises(EmulationError, match=match):
        kernel.launch((1,), (1,), args)


def test_refused_texts():
    with pytest.raises(EmulationError, match="kernel arguments are pointers, long long or double"):
        Kernel('extern "C" __global__ void test(float x) {}', "test")
    with pytest.raises(EmulationError, match="no entry 'other' .the text has test"):
        Kernel('extern "C" __global__ void test() {}', "other")


def test_texts_of_one_library(monkeypatch, tmp_path):
    """Names and macros that several texts have stay each text's own; a fault names the line of its text."""
    monkeypatch.setenv("PYG_DFGNN_EMULATOR_CACHE", str(tmp_path))
    head = 'static __device__ float twice(float v) { return v * VALUE; }\nextern "C" __global__ void test(float* a) {\n'
    bodies = ("a[0] = twice(a[0]);", "__shared__ float s[1]; s[0] = 4; a[0] = twice(s[0]);", "\n a[1] = 0;")
    sources = [f"#define VALUE {number}\n{head}{body} }}" for number, body in enumerate(bodies, 2)]
    build(sources[:2])
    build(sources)
    assert len(list(tmp_path.glob("library-*.so"))) == 2
    results = [floats(1) for _ in bodies]
    for source, result in zip(sources[:2], results, strict=False):
        Kernel(source, "test").launch((1,), (1,), [result])
    assert [result[0] for result in results] == [2, 12, 1]
    with pytest.raises(EmulationError, match=r"past the end .*\nkernel.cu:5"):
        Kernel(sources[2], "test").launch((1,), (1,), [results[2]])


def test_an_array_given_twice_is_one():
    a = floats(4)
    source = 'extern "C" __global__ void test(const float* a, float* b) { b[1] = a[0]; b[2] = a[1]; }'
    Kernel(source, "test").launch((1,), (1,), [a, a])
    assert a.tolist() == [1, 1, 1, 4]


# The second warp waits for the first, which goes on if it only arrives.
TURNS = """
    const int warp = threadIdx.x / 32;
    __shared__ float order[2];
    if (warp == 1) emu_named_barrier(1, 64, true);
    if (threadIdx.x % 32 == 0) order[warp] = warp == 1 ? order[0] + 1.0f : 5.0f;
    if (warp == 0) emu_named_barrier(1, 64, ARRIVES);
    if (threadIdx.x % 32 == 0) a[warp] = order[warp];
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("waits", ["true", "false"])
def test_named_barriers(waits, order):
    a = np.zeros(2, np.float32)
    run(TURNS.replace("ARRIVES", waits), a, block=64, order=order)
    np.testing.assert_array_equal(a, [5, 6])


def test_named_barriers_that_are_not_reached():
    fails("deadlock", "if (threadIdx.x < 32) emu_named_barrier(1, 64, true);", floats(1), block=64)
    fails("leaves 32 threads at a named barrier", "if (threadIdx.x < 32) emu_named_barrier(1, 64, false);", floats(1))
    fails("deadlock", "emu_named_barrier(threadIdx.x / 32, 64, true);", floats(1), block=64)


AHEAD = """
    const int warp = threadIdx.x / 32;
    __shared__ float written[2];
    emu_named_barrier(1 + warp, 32, true);
    if (threadIdx.x % 32 == 0) written[warp] = 7.0f;
    BETWEEN
    if (threadIdx.x % 32 == 0) a[warp] = written[1 - warp];
"""


@pytest.mark.parametrize("order", ORDERS)
def test_those_a_named_barrier_lets_go_may_run_ahead(order):
    """A missing barrier between the groups is seen."""
    a = np.zeros(2, np.float32)
    run(AHEAD.replace("BETWEEN", "__syncthreads();"), a, block=64, order=order)
    np.testing.assert_array_equal(a, [7, 7])
    run(AHEAD.replace("BETWEEN", ""), a, block=64, order=order)
    assert sum(np.isnan(a)) == 1


PRODUCT = """
    extern __shared__ unsigned held[];
    for (int i = threadIdx.x; i < 512; i += 128) held[i] = word(b, i / 4 % 64, i % 4 + i / 256 * 4);
    __syncthreads();
    const int group = threadIdx.x % 32 / 4, pos = threadIdx.x % 4, row = threadIdx.x / 32 * 16 + group;
    unsigned mine[4];
    for (int i = 0; i < 4; ++i) mine[i] = word(a, row + i % 2 * 8, pos + i / 2 * 4);
    float sums[32];
    emu_wgmma_KIND(sums, mine, AT | 64ull << 16 | 8ull << 32, 0);
    emu_wgmma_wait();
    for (int i = 0; i < 32; ++i) c[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * pos + i % 2] = sums[i];
"""
# Of a row of numbers those that word k holds.
WORDS = {
    "tf32": "const auto word = [](const float* x, int row, int k) { return __float_as_uint(x[row * 8 + k]); };",
    "fp16": """const auto word = [](const float* x, int row, int k) {
        const float* const pair = x + row * 16 + 2 * k;
        return emu_float_to_half(pair[0]) | (unsigned)emu_float_to_half(pair[1]) << 16;
    };""",
}


@pytest.mark.parametrize("kind", WORDS)
def test_products_of_a_warpgroup(kind):
    """By the layouts of PTX: A in registers, B in pieces of 8 columns by 16 bytes."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (64, 8 if kind == "tf32" else 16)).astype(np.float32) for _ in range(2))
    found = np.zeros((64, 64), np.float32)
    product = WORDS[kind] + PRODUCT.replace("KIND", kind)
    run(product.replace("AT", "0ull"), a, b, found, block=128, shared_bytes=2048)
    np.testing.assert_array_equal(found, a @ b.T)
    unwaited = product.replace("AT", "0ull").replace("emu_wgmma_wait();", "")
    fails("does not wait for its products", unwaited, a, b, found, block=128, shared_bytes=2048)
    fails("reaches beyond the shared memory", product.replace("AT", "1ull"), a, b, found, block=128, shared_bytes=2048)
