"""NVRTC without a GPU: compiles a kernel text to a cubin and reads what each entry uses from ptxas's log."""

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyg_dfgnn.runtime.compiler import OPTIONS
from pyg_dfgnn.statements.spec import Spec
from tests.emu.loader import cache_folder, digest

ARCHS = ("sm_80", "sm_90")


def archs_of(spec: Spec) -> tuple[str, ...]:
    """The architectures that a module is for."""
    own = tuple(option.removeprefix("-arch=") for option in spec.options if option.startswith("-arch="))
    return own or ARCHS


_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """What ptxas reports for one entry."""

    entry: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    """The size of a cubin with the compiler's log, warnings apart, and the usage of each entry."""

    cubin_bytes: int
    log: str

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.log.splitlines() if "warning" in line.lower()]

    @property
    def usage(self) -> list[Usage]:
        return [_usage(*match.groups()) for match in _ENTRY.finditer(self.log)]


@functools.cache
def missing() -> str | None:
    """Why NVRTC cannot be used here, or None."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"needs CuPy and nvidia-cuda-nvrtc ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None


def compile_cubin(source: str, arch: str) -> Compiled:
    """Compiles with the options that a RawModule of the package gets, and asks ptxas to report.

    What has compiled is kept on disk by the hash of all that goes into it, as the emulator keeps its libraries.

    Raises:
        RuntimeError: The text does not compile; the message is the log.
    """
    from cupy_backends.cuda.libs import nvrtc

    options = (*OPTIONS, f"-arch={arch}", "--device-as-default-execution-space", "--ptxas-options=-v")
    kept = cache_folder() / f"{digest(source, *options, str(nvrtc.getVersion()))}.nvrtc"
    if kept.exists():
        size, _, log = kept.read_text().partition("\n")
        return Compiled(int(size), log)
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
        compiled = Compiled(len(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program).rstrip("\0\n"))
    finally:
        nvrtc.destroyProgram(program)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        written = Path(scratch, "out")
        written.write_text(f"{compiled.cubin_bytes}\n{compiled.log}")
        written.replace(kept)
    return compiled


def _usage(entry: str, text: str) -> Usage:
    stack, used, shared = _STACK.search(text), _USED.search(text), _SHARED.search(text)
    if stack is None or used is None:
        raise RuntimeError(f"ptxas reports nothing about {entry}:\n{text}")
    stack_bytes, *spills = map(int, stack.groups())
    return Usage(entry, int(used.group(1)), int(shared.group(1)) if shared else 0, stack_bytes, sum(spills))
