"""Kernel launch on torch's current stream.

Tensors cross as raw addresses and the call goes to the driver through CuPy's low-level binding: on the per-call path
that costs a small part of a DLPack exchange or of CuPy's own argument handling. The lifetime of every buffer stays with
torch's allocator, and no CuPy memory is allocated, so a launch can be captured in a CUDA graph.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.runtime.compiler import module
from pyg_dfgnn.statements.spec import Spec
from pyg_dfgnn.torch_private import cuda_device, cuda_stream

Argument = Tensor | int | float | None
Grid = tuple[int, int, int]
Launch = Callable[[Spec, str, Grid, Grid, Sequence[Argument], int], None]

_DEFAULT_SHARED_BYTES = 48 * 1024
_MAX_PARAMETERS = 64
_override: Launch | None = None
_compile: Callable[[Sequence[Spec]], None] | None = None
# Held while a limit on dynamic shared memory is read and raised.
_limits = threading.Lock()


class Kernel:
    """One entry point of a specialised module, ready to launch on any device."""

    __slots__ = ("spec", "entry", "_loaded", "_packer")

    def __init__(self, spec: Spec, entry: str) -> None:
        self.spec = spec
        self.entry = entry
        # By device: the handle, the dynamic shared memory that it has room for, and the module, which must outlive it.
        self._loaded: dict[int, tuple[int, int, Any]] = {}
        self._packer: struct.Struct | None = None

    def function(self, device_index: int, shared_bytes: int) -> int:
        """Handle of the loaded function on a device, with room for that much dynamic shared memory."""
        loaded = self._loaded.get(device_index)
        if loaded is None or loaded[1] < shared_bytes:
            loaded = self._load(device_index, shared_bytes)
        return loaded[0]

    def _load(self, device_index: int, shared_bytes: int) -> tuple[int, int, Any]:
        kernel = module(self.spec, device_index).get_function(self.spec.symbol(self.entry))
        with _limits:
            room = _DEFAULT_SHARED_BYTES - kernel.shared_size_bytes
            if shared_bytes > room:
                # One limit for all handles of the function, so it must not fall.
                room = kernel.max_dynamic_shared_size_bytes = max(shared_bytes, kernel.max_dynamic_shared_size_bytes)
            loaded = self._loaded[device_index] = (kernel.kernel.ptr, room, kernel)
        return loaded

    def packer(self, arguments: Sequence[int | float]) -> struct.Struct:
        """How the arguments lie in memory: 8 bytes each, the kernels' ABI."""
        if self._packer is None:
            if len(arguments) > _MAX_PARAMETERS:
                raise ValueError(f"'arguments' needs at most {_MAX_PARAMETERS} entries (got {len(arguments)})")
            self._packer = struct.Struct("=" + "".join("d" if isinstance(a, float) else "q" for a in arguments))
        return self._packer


class _OfThread(threading.local):
    parameters: "_ParameterBuffer | None" = None
    asked: list[Spec] | None = None
    """Modules of the kernels that were asked for, while they are to be compiled together."""


_of_thread = _OfThread()


@cache
def _kernel_of(spec: Spec, entry: str) -> Kernel:
    return Kernel(spec, entry)


def kernel_of(spec: Spec, entry: str) -> Kernel:
    """The one :class:`Kernel` of an entry point, so that a module is loaded once per process and device."""
    if _of_thread.asked is not None:
        _of_thread.asked.append(spec)
    return _kernel_of(spec, entry)


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Compile the modules of all kernels that are asked for inside at once, each on a thread of its own.

    Outside of this each is compiled when it is first launched. The compiler does not hold Python's lock.

    Raises:
        CompileError: A module does not compile.
    """
    before, asked = _of_thread.asked, list[Spec]()
    _of_thread.asked = asked
    try:
        yield
    finally:
        _of_thread.asked = before
    specs = list(dict.fromkeys(asked))
    if len(specs) < 2:
        return
    if _override is not None:
        if _compile is not None:
            _compile(specs)
    elif device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        with ThreadPoolExecutor(len(specs)) as pool:
            list(pool.map(module, specs, repeat(index)))


class _ParameterBuffer:
    """Where a thread lays out the arguments of its next launch; the driver copies them before it returns."""

    __slots__ = ("launch", "values", "pointers", "_pointers")

    def __init__(self) -> None:
        from cupy_backends.cuda.api import driver, runtime

        # Binds the device's primary context to a thread that has not used CUDA yet.
        runtime.setDevice(torch.cuda.current_device())
        self.launch = driver.launchKernel
        self.values = ctypes.create_string_buffer(8 * _MAX_PARAMETERS)
        first = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * _MAX_PARAMETERS)(*(first + 8 * i for i in range(_MAX_PARAMETERS)))
        self.pointers = ctypes.addressof(self._pointers)


def addresses(arguments: Sequence[Argument]) -> tuple[Any, ...]:
    """Kernel arguments with CUDA tensors turned into addresses; the caller keeps the tensors alive until the launch.

    Arguments with a CPU tensor among them stay as they are, for :func:`override`.
    """
    raw: list[Any] = []
    for a in arguments:
        if a is None:
            raw.append(0)
        elif not isinstance(a, Tensor):
            raw.append(a)
        elif a.is_cuda:
            raw.append(a.data_ptr())
        else:
            return tuple(arguments)
    return tuple(raw)


def launch(
    kernel: Kernel,
    grid: Grid,
    block: Grid,
    arguments: Sequence[Any],
    device: torch.device,
    shared_bytes: int = 0,
) -> None:
    """Launch one kernel on torch's current stream of ``device``.

    Args:
        kernel: What to launch.
        grid: Blocks in x, y, z. Nothing is launched when one of them is 0.
        block: Threads in x, y, z.
        arguments: In the order of the kernel's parameters, from :func:`addresses`: an address for a pointer (0 for
            null), int for ``long long``, float for ``double``. What is pointed to is contiguous and on ``device``.
        device: Where to run.
        shared_bytes: Dynamic shared memory; above 48 KB the kernel opts in.

    Raises:
        CompileError: The module does not compile (first launch only).
    """
    if 0 in grid:
        return
    if _override is not None:
        _override(kernel.spec, kernel.entry, grid, block, arguments, shared_bytes)
        return
    # torch.cuda.current_device() without its check that CUDA has been initialised: there are arguments on the device.
    current = cuda_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(index):
            launch(kernel, grid, block, arguments, device, shared_bytes)
        return
    function = kernel.function(index, shared_bytes)
    parameters = _of_thread.parameters
    if parameters is None:
        parameters = _of_thread.parameters = _ParameterBuffer()
    kernel.packer(arguments).pack_into(parameters.values, 0, *arguments)
    stream = cuda_stream(index)
    parameters.launch(function, *grid, *block, shared_bytes, stream, parameters.pointers, 0)


def is_overridden() -> bool:
    """Whether launches go elsewhere than to a GPU, see :func:`override`."""
    return _override is not None


@contextmanager
def override(run: Launch | None, compile_: Callable[[Sequence[Spec]], None] | None = None) -> Iterator[Launch | None]:
    """Send every launch to ``run(spec, entry, grid, block, arguments, shared_bytes)`` instead of a GPU.

    ``compile_`` is told of modules that are to be compiled together, before one of them is launched. Yields what
    launches were sent to before, None for a GPU, so that ``run`` can pass a launch on.
    """
    global _override, _compile
    before, before_compile = _override, _compile
    _override, _compile = run, compile_
    try:
        yield before
    finally:
        _override, _compile = before, before_compile
