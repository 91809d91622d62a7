"""Source assembly, compilation errors, launches and the bridge, as far as they need no GPU."""

import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyg_dfgnn.paths import kernels_dir
from pyg_dfgnn.runtime import bridge, compiler, launcher
from pyg_dfgnn.runtime.compiler import CompileError
from pyg_dfgnn.runtime.launcher import Kernel, addresses, launch, override
from pyg_dfgnn.statements.scores import DOT
from pyg_dfgnn.statements.spec import Spec, assemble
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.nvrtc import compile_cubin, missing
from tests.runtime.conftest import SCALE, forget

CPU = torch.device("cpu")


# Source ---------------------------------------------------------------------------------------------------------------


def test_constants_come_first_and_headers_once(kernels):
    text = assemble("scale.cu", (("FACTOR", 3), ("OTHER", -1)))
    assert text.startswith("#define FACTOR 3\n#define OTHER -1\n")
    assert text.count("#define TWO 2") == 1 and text.count("float twice") == 1
    assert "#include" not in text
    assert text.index("#define TWO 2") < text.index("float twice") < text.index("scale(float* x")


def test_kernels_of_a_label_have_its_name_on_a_device(kernels):
    labelled = Spec("scale.cu", (("FACTOR", 3),), label="Größe of x")
    assert SCALE.compiled_source == SCALE.source == labelled.source and SCALE.symbol("scale") == "scale"
    symbol = labelled.symbol("scale")
    assert symbol == "scale_of_Gr__e_of_x"
    assert labelled.compiled_source.replace(f"{symbol}(float* x", "scale(float* x") == labelled.source
    assert labelled != SCALE


def test_line_directives_give_each_line_its_file_and_number(kernels):
    """What a compiler reports about the assembled text is true of the files."""
    place, number = "", 0
    for line in assemble("scale.cu").splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, place = int(directive.group(1)), directive.group(2)
            continue
        original = (kernels / place).read_text().splitlines()[number - 1]
        # A header that was there before leaves an empty line.
        assert line == ("" if original.startswith("#include") else original)
        number += 1
    assert (place, number) == ("scale.cu", 9)


@pytest.mark.parametrize("path", sorted(path.name for path in (kernels_dir() / "attention").glob("*.cu")))
def test_line_directives_of_the_kernels(path):
    place, number = "", 0
    texts = dict(DOT.texts)
    for line in assemble(f"attention/{path}", texts=DOT.texts).splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, place = int(directive.group(1)), directive.group(2)
        else:
            text = texts[place] if place in texts else (kernels_dir() / place).read_text()
            assert line == text.splitlines()[number - 1], (place, number)
            number += 1


def test_an_injected_text_stands_for_its_name(kernels):
    """A text may include files, and others may include it; its lines keep their numbers."""
    (kernels / "user.cu").write_text('#include "mine.cuh"\nlast\n')
    texts = (("mine.cuh", 'first\n#include "b.cuh"\nthird'),)
    lines = assemble("user.cu", texts=texts).splitlines()
    assert lines[:4] == ['#line 1 "user.cu"', '#line 1 "mine.cuh"', "first", '#line 1 "b.cuh"']
    assert lines[-4:] == ['#line 3 "mine.cuh"', "third", '#line 2 "user.cu"', "last"]
    with pytest.raises(FileNotFoundError, match=r"mine.cuh"):
        assemble("user.cu")


def test_texts_are_part_of_a_module(kernels):
    (kernels / "user.cu").write_text('#include "mine.cuh"\n')
    one, other = (Spec("user.cu", (), texts=(("mine.cuh", text),)) for text in ("int a;", "int b;"))
    assert one != other and one.name != other.name and one.source != other.source


def test_text_changes_with_header_and_constants(kernels):
    """The text is the key of every cache of compiled kernels."""
    before = SCALE.source
    assert before == Spec("scale.cu", (("FACTOR", 3),)).source
    assert before != Spec("scale.cu", (("FACTOR", 4),)).source
    (kernels / "a.cuh").write_text("#define TWO 2.0f\n")
    forget()
    assert SCALE.source != before


def test_a_source_that_is_not_there(kernels):
    with pytest.raises(FileNotFoundError, match="nowhere.cu"):
        assemble("nowhere.cu")
    (kernels / "broken.cu").write_text('#include "nowhere.cuh"\n')
    with pytest.raises(FileNotFoundError, match="nowhere.cuh"):
        assemble("broken.cu")


def test_a_specialised_module_is_named_by_all_its_parameters():
    spec = Spec("attention/forward.cu", (("HEADS", 8), ("CHANNELS", 16)))
    assert spec.name == "attention/forward.cu-HEADS8-CHANNELS16"
    assert hash(spec) == hash(Spec("attention/forward.cu", (("HEADS", 8), ("CHANNELS", 16))))


# Compilation ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_compile_error_shows_the_log_and_the_numbered_source(kernels, monkeypatch):
    """NVRTC's own log, with the module that needs a GPU replaced by its compilation."""
    import cupy

    class Module:
        def __init__(self, code, options, backend):
            assert backend == "nvrtc" and options == compiler.OPTIONS
            self.code = code

        def compile(self):
            try:
                compile_cubin(self.code, "sm_90")
            except RuntimeError as error:
                raise cupy.cuda.compiler.CompileException(str(error), self.code, "kernel.cu", ()) from error

    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: nullcontext())
    assert isinstance(compiler.module(SCALE, 0), Module)

    (kernels / "b.cuh").write_text("__device__ float twice(float x) {\n    return TWO * y;\n}\n")
    forget()
    with pytest.raises(CompileError) as caught:
        compiler.module(SCALE, 0)
    message = str(caught.value)
    assert message.startswith("scale.cu-FACTOR3\n")
    assert 'b.cuh(2): error: identifier "y" is undefined' in message
    # The line that the log names, with the number that it has there; the constants are counted by themselves.
    assert "    2 |     return TWO * y;" in message
    assert "    1 | #define FACTOR 3" in message
    assert '      | #line 1 "b.cuh"' in message


# Launches -------------------------------------------------------------------------------------------------------------


def test_a_launch_goes_to_the_override():
    seen = []
    kernel, arguments = Kernel(SCALE, "scale"), (torch.ones(3), 3, None, 0.5)
    with override(lambda *launched: seen.append(launched)):
        launch(kernel, (2, 3, 1), (32, 1, 1), arguments, CPU, shared_bytes=64)
        launch(kernel, (1, 1, 1), (32, 1, 1), (), CPU)
    spec, entry, grid, block, passed, shared_bytes = seen[0]
    assert (spec, entry, grid, block, shared_bytes) == (SCALE, "scale", (2, 3, 1), (32, 1, 1), 64)
    assert all(a is b for a, b in zip(passed, arguments, strict=True))
    assert seen[1][5] == 0


class FakeModule:
    """Hands out one function, and keeps what was asked of it."""

    def __init__(self):
        self.asked, self.limits = 0, [48 << 10]

    def get_function(self, entry):
        self.asked += 1
        return self

    kernel = SimpleNamespace(ptr=7)
    shared_size_bytes = 1 << 10
    max_dynamic_shared_size_bytes = property(
        lambda self: self.limits[-1], lambda self, limit: self.limits.append(limit)
    )


def test_a_handle_serves_all_that_its_limit_has_room_for(monkeypatch):
    """Batches need another size of shared memory each: only a new maximum costs a call to the driver."""
    loaded = FakeModule()
    monkeypatch.setattr(launcher, "module", lambda spec, index: loaded)
    kernel = Kernel(SCALE, "scale")
    for kilobytes in (0, 1, 30, 47, 46, 47, 2):
        assert kernel.function(0, kilobytes << 10) == 7
    assert loaded.asked == 1 and loaded.limits == [48 << 10]
    for kilobytes in (60, 59, 48, 100, 60, 0):
        assert kernel.function(0, kilobytes << 10) == 7
    assert loaded.asked == 3 and loaded.limits == [48 << 10, 60 << 10, 100 << 10]
    # Another kernel object of the same function must not lower the limit.
    assert Kernel(SCALE, "scale").function(0, 80 << 10) == 7 and loaded.limits[-1] == 100 << 10


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (4, 2, 0)])
def test_an_empty_grid_is_not_launched(grid):
    seen = []
    with override(lambda *launched: seen.append(launched)):
        launch(Kernel(SCALE, "scale"), grid, (32, 1, 1), (), CPU)
    assert seen == []


def test_overrides_nest_and_end():
    seen = []
    with override(lambda *launched: seen.append("outer")):
        with override(lambda *launched: seen.append("inner")):
            launch(Kernel(SCALE, "scale"), (1, 1, 1), (32, 1, 1), (), CPU)
        launch(Kernel(SCALE, "scale"), (1, 1, 1), (32, 1, 1), (), CPU)
    assert seen == ["inner", "outer"]
    with pytest.raises(ZeroDivisionError), override(lambda *launched: 1 / 0):
        launch(Kernel(SCALE, "scale"), (1, 1, 1), (32, 1, 1), (), CPU)
    assert launcher._override is None


@needs_compiler
def test_a_launch_on_the_emulator(kernels):
    x = torch.arange(40.0)
    with emulated_device() as launched:
        launch(Kernel(SCALE, "scale"), (2, 1, 1), (32, 1, 1), addresses((x, 40)), CPU)
    assert launched == ["scale"]
    assert torch.equal(x, 6 * torch.arange(40.0))


def test_addresses_leave_cpu_tensors_and_numbers():
    x = torch.ones(3)
    with override(lambda *launched: None):
        passed = addresses((x, 7, 0.5, None))
    assert passed[0] is x and passed[1:] == (7, 0.5, None)


# Bridge ---------------------------------------------------------------------------------------------------------------


def test_a_cpu_tensor_is_refused():
    pytest.importorskip("cupy")
    with pytest.raises(ValueError, match=r"'tensor' needs to be on a CUDA device \(got cpu\)"):
        bridge.to_cupy(torch.ones(3))


def test_an_array_comes_back_with_its_bits():
    """The way back is DLPack alone: a numpy array stands for one of CuPy."""
    array = np.arange(6, dtype=np.int16)
    back = bridge.from_cupy(array)
    assert back.dtype == torch.int16 and back.data_ptr() == array.ctypes.data
    assert torch.equal(bridge.from_cupy(array, torch.bfloat16), back.view(torch.bfloat16))


def test_a_bfloat16_array_comes_back_as_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0, 3e38], dtype=ml_dtypes.bfloat16)
    back = bridge.from_cupy(array)
    assert back.dtype == torch.bfloat16 and back.data_ptr() == array.ctypes.data
    assert torch.equal(back, torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16))


def test_modules_are_compiled_together(monkeypatch):
    """Once, each on a thread of its own or by what takes the launches; nothing ahead on a CPU or outside."""
    met, compiled = threading.Barrier(3, timeout=30), []

    def compile_(spec, index):
        met.wait()
        compiled.append((spec.path, index))

    monkeypatch.setattr(launcher, "module", compile_)
    specs = [Spec(f"common{number}.cu", ()) for number in range(3)]
    launcher.kernel_of(specs[0], "before")
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        with launcher.compiled_together(device):
            for spec in (*specs, specs[0]):
                launcher.kernel_of(spec, "kernel")
            assert not compiled
    assert sorted(compiled) == [(spec.path, 1) for spec in specs]
    told = []
    with override(lambda *launched: None, told.append), launcher.compiled_together(torch.device("cpu")):
        for spec in (*specs, specs[0]):
            launcher.kernel_of(spec, "kernel")
    assert told == [specs]
