"""Compilation of assembled source with CuPy's RawModule, cached per process and device, and on disk by content."""

import multiprocessing
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from pyg_dfgnn.statements.spec import Spec

OPTIONS = ("-std=c++17",)
"""NVRTC options of every module. CuPy adds the architecture of the device."""


class CompileError(RuntimeError):
    """A kernel that NVRTC rejects. The message holds the compiler's log and the numbered source."""


def _numbered(source: str) -> str:
    """The text with the line numbers that the compiler's log refers to: each ``#line`` starts to count anew."""
    numbered, number = [], 1
    for line in source.splitlines():
        directive = re.match(r"#line (\d+) ", line)
        if directive is None:
            numbered.append(f"{number:5d} | {line}")
            number += 1
        else:
            numbered.append(f"      | {line}")
            number = int(directive.group(1))
    return "\n".join(numbered)


@cache
def module(spec: Spec, device_index: int) -> Any:
    """Return the loaded ``cupy.RawModule`` of ``spec`` on a device.

    CuPy keeps the binary on disk under a key of source text, options, architecture and compiler version; the text has
    its includes inlined, so the key covers them.

    Raises:
        CompileError: The source does not compile.
    """
    import cupy

    with cupy.cuda.Device(device_index):
        try:
            raw = cupy.RawModule(code=spec.compiled_source, options=OPTIONS + spec.options, backend="nvrtc")
            raw.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(f"{spec.name}\n{error}\n{_numbered(spec.compiled_source)}") from error
    return raw


def _compile_one(spec: Spec) -> str | None:
    try:
        module(spec, 0)
    except CompileError as error:
        return str(error)
    return None


def precompile(specs: Iterable[Spec], workers: int) -> None:
    """Compile many modules for the first device in parallel processes; the disk cache hands them to this one.

    Args:
        specs: Modules to build.
        workers: Number of processes.

    Raises:
        CompileError: The first module that does not compile.
    """
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for failure in pool.imap_unordered(_compile_one, dict.fromkeys(specs), chunksize=4):
            if failure is not None:
                pool.terminate()
                raise CompileError(failure)


def nvrtc_version() -> tuple[str, str]:
    """Return the version of NVRTC, and why it is not known where it is empty."""
    try:
        from cupy.cuda import nvrtc

        return ".".join(map(str, nvrtc.getVersion())), ""
    except Exception as error:
        return "", str(error).splitlines()[0] if str(error) else type(error).__name__
