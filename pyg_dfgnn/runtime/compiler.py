"""Compilation of assembled source with CuPy's RawModule, cached per process and device, and on disk by content."""

import multiprocessing
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pyg_dfgnn.statements.spec import Spec

OPTIONS = ("-std=c++17",)
"""NVRTC options of every module. CuPy adds the architecture of the device."""


class CompileError(RuntimeError):
    """A kernel that NVRTC rejects. The message holds the compiler's log and the numbered source."""


@dataclass(frozen=True)
class Resources:
    """What one compiled entry point uses."""

    entry: str
    registers: int
    shared_bytes: int
    local_bytes: int
    max_threads: int


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
            raw = cupy.RawModule(code=spec.source, options=OPTIONS + spec.options, backend="nvrtc")
            raw.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(f"{spec.name}\n{error}\n{_numbered(spec.source)}") from error
    return raw


def entry_points(source: str) -> list[str]:
    """Return the names of the kernels in a source text."""
    return re.findall(r'extern "C" __global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\s*\(', source)


def resources(spec: Spec, device_index: int = 0) -> list[Resources]:
    """Return registers, static shared memory and spilled bytes of each entry point of ``spec``."""
    raw = module(spec, device_index)
    rows = []
    for entry in entry_points(spec.source):
        kernel = raw.get_function(entry)
        rows.append(
            Resources(
                entry,
                kernel.num_regs,
                kernel.shared_size_bytes,
                kernel.local_size_bytes,
                kernel.max_threads_per_block,
            )
        )
    return rows


def _compile_one(job: tuple[Spec, int]) -> str | None:
    try:
        module(*job)
    except CompileError as error:
        return str(error)
    return None


def precompile(
    specs: Iterable[Spec],
    workers: int,
    device_index: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile many modules in parallel processes; the disk cache hands them to this one.

    Args:
        specs: Modules to build.
        workers: Number of processes.
        device_index: CUDA device whose architecture is built for.
        progress: Called with (done, total) after each module.

    Raises:
        CompileError: The first module that does not compile.
    """
    jobs = [(spec, device_index) for spec in dict.fromkeys(specs)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, failure in enumerate(pool.imap_unordered(_compile_one, jobs, chunksize=4), start=1):
            if failure is not None:
                pool.terminate()
                raise CompileError(failure)
            if progress is not None:
                progress(done, len(jobs))
