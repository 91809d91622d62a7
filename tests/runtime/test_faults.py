"""Faults around the compiler: a folder that takes no file, damaged files, processes that meet or end, another CUDA."""

import signal
import subprocess
import sys

import pytest

from tests.kernels.nvrtc import missing
from tests.processes import CONTEXT
from tests.runtime.compiling import (
    Compiling,
    kill_while_writing,
    limit_files,
    lose_nvrtc,
    no_user,
    signal_while_compiling,
    take_cupy,
)

needs_nvrtc = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# Folders of the system in which nobody, not even root, can make a file.
READ_ONLY, ABSENT = "/proc/self", "/proc/absent/kernels"


def binaries(cache):
    return {path.name: path.read_bytes() for path in cache.glob("*.cubin")}


@needs_nvrtc
@pytest.mark.fault("the cache of kernels takes no file")
@pytest.mark.parametrize("kind", ["read-only", "full disk"])
def test_cache_that_takes_no_file(kind, tmp_path):
    plant, cache = {"read-only": (None, READ_ONLY), "full disk": ((limit_files, 64), tmp_path)}[kind]
    outcome, told = Compiling(plant, CUPY_CACHE_DIR=cache).result()
    assert outcome == "compiled" and any(f"kernels that {cache} lacks are compiled in each" in line for line in told)
    assert not binaries(tmp_path)
    if kind == "full disk":
        assert Compiling(CUPY_CACHE_DIR=tmp_path).result() == ("compiled", [])
        assert binaries(tmp_path)


@needs_nvrtc
@pytest.mark.fault("the cache of kernels cannot be made")
@pytest.mark.parametrize("variables", [{"CUPY_CACHE_DIR": ABSENT}, {"CUPY_CACHE_DIR": None, "HOME": ABSENT}], ids=len)
def test_folder_that_cannot_be_made(variables):
    outcome, told = Compiling(**variables).result()
    assert outcome == "compiled" and any("are kept in " in line and "until this process ends" in line for line in told)


@needs_nvrtc
@pytest.mark.fault("the user has no home")
def test_user_without_a_home(tmp_path):
    compiling = Compiling((no_user,), folder=tmp_path, CUPY_CACHE_DIR=None, HOME=None)
    assert compiling.result() == ("compiled", []) and binaries(tmp_path / "~" / ".cupy" / "kernel_cache")


@needs_nvrtc
@pytest.mark.fault("a file in the cache of kernels is damaged")
def test_damaged_files_are_compiled_again(tmp_path):
    assert Compiling(CUPY_CACHE_DIR=tmp_path).result() == ("compiled", [])
    whole = binaries(tmp_path)
    damages = (lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    for number, name in enumerate(whole):
        (tmp_path / name).write_bytes(damages[number % 3](whole[name]))
    for damage in damages[1:] if len(whole) == 1 else ():
        assert Compiling(CUPY_CACHE_DIR=tmp_path).result() == ("compiled", []) and binaries(tmp_path) == whole
        (tmp_path / name).write_bytes(damage(whole[name]))
    assert Compiling(CUPY_CACHE_DIR=tmp_path).result() == ("compiled", []) and binaries(tmp_path) == whole


@needs_nvrtc
@pytest.mark.fault("processes compile one kernel at once")
def test_processes_compile_at_once(tmp_path):
    barrier = CONTEXT.Barrier(3)
    processes = [Compiling(barrier=barrier, CUPY_CACHE_DIR=tmp_path) for _ in range(3)]
    assert [process.result() for process in processes] == [("compiled", [])] * 3
    assert binaries(tmp_path) and len(list(tmp_path.iterdir())) == len(binaries(tmp_path))


@needs_nvrtc
@pytest.mark.fault("a process is killed while it compiles")
@pytest.mark.parametrize(
    "plant", [(signal_while_compiling, signal.SIGKILL), (kill_while_writing,)], ids=["compiles", "writes"]
)
def test_process_killed_while_it_compiles(plant, tmp_path):
    assert Compiling(plant, CUPY_CACHE_DIR=tmp_path).result() == (signal.SIGKILL, [])
    assert not binaries(tmp_path)
    assert Compiling(CUPY_CACHE_DIR=tmp_path).result() == ("compiled", [])
    assert binaries(tmp_path)


@needs_nvrtc
@pytest.mark.fault("a compilation is interrupted from the keyboard")
def test_interrupted_compilation_can_be_called_again(tmp_path):
    plant = signal_while_compiling, signal.SIGINT
    assert Compiling(plant, again=True, CUPY_CACHE_DIR=tmp_path).result() == ("compiled", ["interrupted"])


@pytest.mark.fault("CuPy is of another CUDA")
@pytest.mark.parametrize("kind", ["import", pytest.param("compiler", marks=needs_nvrtc)])
def test_cupy_of_another_cuda_is_told(kind, tmp_path):
    (tmp_path / "cupy").mkdir()
    text = 'raise ImportError("libcudart.so.12: cannot open\\n shared object file")\n'
    (tmp_path / "cupy" / "__init__.py").write_text(text)
    plant = (take_cupy, tmp_path) if kind == "import" else (lose_nvrtc,)
    outcome, _ = Compiling(plant, CUPY_CACHE_DIR=tmp_path).result()
    assert outcome.startswith("UnsupportedError: a kernel cannot run here: CuPy or its compiler does not load: ")
    assert "cannot open shared object file; CuPy must be of the CUDA version of PyTorch" in outcome


WITHOUT_DRIVER = """
import torch, torch_geometric.nn as pyg
import pyg_dfgnn
from pyg_dfgnn import command

layers = []
for library in (pyg, pyg_dfgnn.nn):
    torch.manual_seed(0)
    layers.append(library.GATConv(8, 4, heads=2))
x, edge_index = torch.randn(20, 8), torch.randint(20, (2, 60))
results = []
for layer in layers:
    layer(x, edge_index).sin().sum().backward()
    results.append([layer(x, edge_index), *(parameter.grad for parameter in layer.parameters())])
assert all(map(torch.equal, *results)) and not torch.cuda.is_available()
assert command.main(["info"]) == 0 and command.main(["doctor"]) == (torch.version.cuda is not None)
"""


@pytest.mark.fault("the driver or the GPU is not there")
def test_without_a_driver(tmp_path):
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_DRIVER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch finds no GPU; pyg_dfgnn.describe_plan(" in done.stdout


WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None
import torch, torch_geometric.nn as pyg
import pyg_dfgnn

layers = []
for library in (pyg, pyg_dfgnn.nn):
    torch.manual_seed(0)
    layers.append(library.GATConv(8, 4, heads=2).cuda())
x, edge_index = torch.randn(20, 8, device="cuda"), torch.randint(20, (2, 60), device="cuda")
torch.testing.assert_close(layers[0](x, edge_index), layers[1](x, edge_index))
"""


@pytest.mark.cuda
@pytest.mark.fault("CuPy is not there")
def test_without_cupy():
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUPY], capture_output=True, text=True)
    assert done.returncode == 0 and "CuPy is not installed" in done.stderr, done.stderr
