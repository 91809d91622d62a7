"""Compilation of assembled source with CuPy's RawModule, cached per process and device, and on disk by content."""

import atexit
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.paths import kernel_cache_dir
from pyg_dfgnn.statements.spec import Spec

OPTIONS = ("-std=c++17",)
"""NVRTC options of every module. CuPy adds the architecture of the device."""

_logger = logging.getLogger("pyg_dfgnn")
# Held while CuPy is told to keep a module in memory only.
_memory_only = threading.Lock()
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"


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
def import_cupy() -> Any:
    """Import CuPy, and look whether its compiler is there.

    CuPy makes the folder of compiled kernels as it is imported. Where that folder cannot be made, this process has a
    temporary one.

    Raises:
        UnsupportedError: CuPy is of another version of CUDA, or not whole.
    """
    try:
        kernel_cache_dir().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="pyg_dfgnn-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _logger.warning("compiled kernels are kept in %s until this process ends: %s", folder, error)
        os.environ["CUPY_CACHE_DIR"] = folder
    try:
        import cupy

        cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        failure = f"CuPy or its compiler does not load: {' '.join(str(error).split())}"
        needed = 'CuPy must be of the CUDA version of PyTorch (pip install ".[cuda13]" or ".[cuda12]" in a clone)'
        raise UnsupportedError([failure, needed], what="a kernel") from error
    return cupy


@cache
def module(spec: Spec, device_index: int) -> Any:
    """Return the loaded ``cupy.RawModule`` of ``spec`` on a device.

    CuPy keeps the binary on disk under a key of source text, options, architecture and compiler version; the text has
    its includes inlined, so the key covers them. Where the disk takes no file, the module is in memory alone.

    Raises:
        CompileError: The source does not compile.
        UnsupportedError: CuPy is of another version of CUDA, or not whole.
    """
    cupy = import_cupy()
    with cupy.cuda.Device(device_index):
        try:
            return _compiled(cupy, spec)
        except OSError as error:
            _tell_of_disk(error.strerror or str(error))
        with _memory_only:
            # A module that another thread compiles meanwhile is not kept on disk either.
            before = os.environ.get(_IN_MEMORY)
            os.environ[_IN_MEMORY] = "1"
            try:
                return _compiled(cupy, spec)
            finally:
                os.environ.pop(_IN_MEMORY)
                if before is not None:
                    os.environ[_IN_MEMORY] = before


@cache
def _tell_of_disk(reason: str) -> None:
    _logger.warning("kernels that %s lacks are compiled in each process anew: %s", kernel_cache_dir(), reason)


def _compiled(cupy: Any, spec: Spec) -> Any:
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
        import cupy

        return ".".join(map(str, cupy.cuda.nvrtc.getVersion())), ""
    except ModuleNotFoundError as error:
        return "", f"{error.name} is not installed"
    except Exception as error:
        return "", str(error).splitlines()[0] if str(error) else type(error).__name__
