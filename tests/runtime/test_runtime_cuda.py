"""The runtime on a GPU: caches, shared memory, errors, streams, threads, devices, and the bridge."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from pyg_dfgnn.runtime import bridge, compiler
from pyg_dfgnn.runtime.compiler import CompileError, precompile
from pyg_dfgnn.runtime.launcher import Kernel, addresses, launch
from pyg_dfgnn.statements.spec import Spec
from tests.runtime.conftest import REVERSE, SCALE, forget

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
# Long enough for the host to get ahead of the device.
SLEEP_CYCLES = 50_000_000


def scale(x, kernel=None):
    """x times 6, in place."""
    launch(
        kernel or Kernel(SCALE, "scale"), (-(-x.numel() // 32), 1, 1), (32, 1, 1), addresses((x, x.numel())), x.device
    )
    return x


# Compilation ----------------------------------------------------------------------------------------------------------


def in_a_process(code, cache, *arguments):
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*.cubin")}


def test_binaries_are_on_disk_by_content(kernels, tmp_path):
    """Another process finds a binary again; a changed header or constant makes a new one."""
    code = (
        "import sys, pathlib\n"
        "from pyg_dfgnn.runtime import compiler\n"
        "from pyg_dfgnn.statements import spec as source\n"
        "source.kernels_dir = lambda: pathlib.Path(sys.argv[1])\n"
        "compiler.module(compiler.Spec('scale.cu', (('FACTOR', int(sys.argv[2])),)), 0)\n"
    )
    cache = tmp_path / "cache"
    first = in_a_process(code, cache, kernels, 3)
    assert len(first) == 1
    assert in_a_process(code, cache, kernels, 3) == first
    (kernels / "a.cuh").write_text("#define TWO 4\n")
    edited = in_a_process(code, cache, kernels, 3)
    assert len(edited) == 2 and first.items() <= edited.items()
    assert len(in_a_process(code, cache, kernels, 5)) == 3


def test_precompile_in_workers(tmp_path):
    """Processes fill the disk cache, and this one compiles nothing more."""
    code = (
        "import pathlib, os, sys\n"
        "import torch\n"
        "from pyg_dfgnn.dispatch.attention.row_split import node_constants\n"
        "from pyg_dfgnn.runtime.compiler import module, precompile\n"
        "from pyg_dfgnn.statements.spec import Spec\n"
        "specs = [Spec('attention/norm.cu', tuple(node_constants(3, c, torch.float32).items())) for c in (8, 24, 40)]\n"
        "precompile([*specs, specs[0]], workers=2)\n"
        "cache = pathlib.Path(os.environ['CUPY_CACHE_DIR'])\n"
        "before = sorted(cache.glob('*.cubin'))\n"
        "assert len(before) == 3, before\n"
        "for spec in specs:\n"
        "    module(spec, 0)\n"
        "assert sorted(cache.glob('*.cubin')) == before\n"
    )
    assert len(in_a_process(code, tmp_path / "cache")) == 3


def test_precompile_hands_the_error_on():
    with pytest.raises(CompileError, match="attention/norm.cu-HEADS2"):
        precompile([Spec("attention/norm.cu", (("HEADS", 2),))], workers=1)


def test_a_compile_error_shows_the_log_and_the_numbered_source(kernels):
    (kernels / "b.cuh").write_text("__device__ float twice(float x) {\n    return TWO * y;\n}\n")
    forget()
    with pytest.raises(CompileError) as caught:
        compiler.module(SCALE, 0)
    message = str(caught.value)
    assert message.startswith("scale.cu-FACTOR3\n")
    assert 'b.cuh(2): error: identifier "y" is undefined' in message
    assert "    2 |     return TWO * y;" in message
    # Nothing is left behind: the next kernel runs.
    (kernels / "b.cuh").write_text("__device__ float twice(float x) { return 2 * x; }\n")
    forget()
    assert torch.equal(scale(torch.ones(40, device=DEVICE)), torch.full((40,), 6.0, device=DEVICE))


def test_a_module_is_loaded_once(kernels):
    assert compiler.module(SCALE, 0) is compiler.module(Spec("scale.cu", (("FACTOR", 3),)), 0)


# Launches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_bytes", [1 << 10, 48 << 10, 64 << 10, 96 << 10])
def test_dynamic_shared_memory(kernels, shared_bytes):
    """Above 48 KB the kernel opts in by itself."""
    x = torch.randn(shared_bytes // 4, device=DEVICE)
    want = x.flip(0)
    kernel = Kernel(REVERSE, "reverse")
    launch(kernel, (1, 1, 1), (128, 1, 1), addresses((x, x.numel())), DEVICE, shared_bytes)
    assert torch.equal(x, want)
    # The same kernel still runs with less.
    y = torch.arange(8.0, device=DEVICE)
    launch(kernel, (1, 1, 1), (32, 1, 1), addresses((y, 8)), DEVICE, 32)
    assert torch.equal(y, torch.arange(8.0, device=DEVICE).flip(0))


def test_more_shared_memory_than_there_is(kernels):
    x = torch.ones(8, device=DEVICE)
    with pytest.raises(Exception, match="CUDA|invalid"):
        launch(Kernel(REVERSE, "reverse"), (1, 1, 1), (32, 1, 1), addresses((x, 8)), DEVICE, 1 << 20)
    assert torch.equal(scale(x), torch.full((8,), 6.0, device=DEVICE))


def test_a_launch_is_on_the_current_stream(kernels):
    """Work that was queued on the stream before comes first; the default stream does not wait for it."""
    scale(torch.ones(1, device=DEVICE))
    x = torch.zeros(1000, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(1.0)
        scale(x)
    torch.cuda.default_stream().synchronize()
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(x, torch.full_like(x, 6.0))


def test_a_launch_is_captured(kernels):
    kernel, x = Kernel(SCALE, "scale"), torch.ones(50, device=DEVICE)
    scale(x.clone(), kernel)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        scale(x, kernel)
    assert torch.equal(x, torch.ones_like(x))
    for factor in (6.0, 36.0):
        captured.replay()
        assert torch.equal(x, torch.full_like(x, factor))


def test_launches_from_other_threads(kernels):
    """Also from threads that have not used CUDA before, several at once, each with arguments of its own."""
    kernel = Kernel(SCALE, "scale")
    tensors = [torch.full((100 + i,), float(i), device=DEVICE) for i in range(8)]
    torch.cuda.synchronize()
    failures = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    tensors[i].fill_(float(i))
                    scale(tensors[i], kernel)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, 6.0 * i))


def test_no_memory_of_cupy_is_used(kernels):
    import cupy

    before = cupy.get_default_memory_pool().total_bytes()
    scale(torch.ones(1000, device=DEVICE))
    assert cupy.get_default_memory_pool().total_bytes() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_on_a_device_that_is_not_current(kernels):
    kernel = Kernel(SCALE, "scale")
    with torch.cuda.device(0):
        for index in (1, 0, 1):
            x = torch.ones(40, device=f"cuda:{index}")
            scale(x, kernel)
            assert torch.cuda.current_device() == 0
            assert torch.equal(x.cpu(), torch.full((40,), 6.0))


# Bridge ---------------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways_share_the_memory(dtype):
    import cupy

    x = torch.arange(12, device=DEVICE).reshape(3, 4).to(dtype)
    array = bridge.to_cupy(x)
    assert isinstance(array, cupy.ndarray) and array.data.ptr == x.data_ptr() and array.shape == (3, 4)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    back = bridge.from_cupy(array)
    assert back.data_ptr() == x.data_ptr() and back.dtype == dtype and torch.equal(back, x)
    x.zero_()
    assert not bool(back.any())


def test_strides_and_offsets():
    x = torch.arange(24.0, device=DEVICE).reshape(4, 6)[1:, 1::2].t()
    array = bridge.to_cupy(x)
    assert array.data.ptr == x.data_ptr() and array.shape == tuple(x.shape)
    assert array.strides == tuple(4 * stride for stride in x.stride())
    back = bridge.from_cupy(array)
    assert back.stride() == x.stride() and torch.equal(back, x)


def test_a_tensor_that_needs_a_gradient():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    assert bridge.to_cupy(x).data.ptr == x.data_ptr()
    assert bridge.to_cupy(x * 2).tolist() == [2.0, 2.0, 2.0]
    assert not bridge.from_cupy(bridge.to_cupy(x)).requires_grad


def test_a_conjugate_arrives_resolved():
    x = torch.tensor([1 + 2j], device=DEVICE).conj()
    assert bridge.to_cupy(x).tolist() == [1 - 2j]


def test_bfloat16_with_ml_dtypes():
    pytest.importorskip("ml_dtypes")
    x = torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16, device=DEVICE)
    array = bridge.to_cupy(x)
    assert array.dtype.name == "bfloat16" and array.data.ptr == x.data_ptr()
    back = bridge.from_cupy(array)
    assert back.dtype == torch.bfloat16 and back.data_ptr() == x.data_ptr() and torch.equal(back, x)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=DEVICE)
    array = bridge.to_cupy(x)
    assert array.dtype.name == "int16" and array.data.ptr == x.data_ptr()
    back = bridge.from_cupy(array, torch.bfloat16)
    assert back.dtype == torch.bfloat16 and torch.equal(back, x)


def test_the_bridge_keeps_the_order_of_streams():
    """CuPy's stream waits for what torch's current stream has queued before the exchange."""
    import cupy

    x = torch.zeros(1000, device=DEVICE)
    stream, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(3.0)
        with other:
            total = bridge.to_cupy(x).sum()
            other.synchronize()
    assert float(total) == 3000.0


def test_empty_tensors_cross():
    x = torch.empty(0, 4, device=DEVICE)
    assert bridge.to_cupy(x).shape == (0, 4)
    assert bridge.from_cupy(bridge.to_cupy(x)).shape == (0, 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_of_a_device_that_is_not_current():
    x = torch.ones(3, device="cuda:1")
    with torch.cuda.device(0):
        array = bridge.to_cupy(x)
        assert array.device.id == 1 and array.data.ptr == x.data_ptr()
        assert torch.cuda.current_device() == 0
        assert bridge.from_cupy(array).device == x.device
