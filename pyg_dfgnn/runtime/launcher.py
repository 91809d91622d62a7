"""Kernel launch on torch's current stream.

Tensors cross as raw addresses: on the per-call path that costs a tenth of a DLPack exchange. The lifetime of every
buffer stays with torch's allocator, and no CuPy memory is allocated, so a launch can be captured in a CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.runtime.compiler import Spec, module

Argument = Tensor | int | float | None
Grid = tuple[int, int, int]
Launch = Callable[[Spec, str, Grid, Grid, Sequence[Argument], int], None]

_DEFAULT_SHARED_BYTES = 48 * 1024
_override: Launch | None = None


class Kernel:
    """One entry point of a specialised module, ready to launch on any device."""

    __slots__ = ("spec", "entry", "_functions")

    def __init__(self, spec: Spec, entry: str) -> None:
        self.spec = spec
        self.entry = entry
        self._functions: dict[tuple[int, int], Any] = {}

    def function(self, device_index: int, shared_bytes: int) -> Any:
        """The loaded function on a device, with room for that much dynamic shared memory."""
        found = self._functions.get((device_index, shared_bytes))
        if found is None:
            kernel = module(self.spec, device_index).get_function(self.entry)
            if shared_bytes > _DEFAULT_SHARED_BYTES:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            found = self._functions[device_index, shared_bytes] = kernel.kernel
        return found


def addresses(arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    """Arguments that many launches share, with CUDA tensors turned into addresses; the caller keeps them alive."""
    if any(isinstance(a, Tensor) and not a.is_cuda for a in arguments):
        return tuple(arguments)
    return tuple(0 if a is None else a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)


class _TorchStream:
    """A raw stream handle in the form of CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache(maxsize=1024)
def _stream(handle: int, device_index: int) -> Any:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_TorchStream(handle))
    return cupy.cuda.ExternalStream(handle, device_index)


def launch(
    kernel: Kernel,
    grid: Grid,
    block: Grid,
    arguments: Sequence[Argument],
    device: torch.device,
    shared_bytes: int = 0,
) -> None:
    """Launch one kernel on torch's current stream of ``device``.

    Args:
        kernel: What to launch.
        grid: Blocks in x, y, z. Nothing is launched when one of them is 0.
        block: Threads in x, y, z.
        arguments: In the order of the kernel's parameters; a tensor, an address or None for a pointer, int for
            ``long long``, float for ``double``. Tensors must be contiguous and live on ``device``.
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
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    raw = tuple([0 if a is None else a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
    if index == current:
        stream = _stream(torch._C._cuda_getCurrentRawStream(index), index)
        kernel.function(index, shared_bytes)(grid, block, raw, shared_bytes, stream)
        return
    with torch.cuda.device(index):
        stream = _stream(torch._C._cuda_getCurrentRawStream(index), index)
        kernel.function(index, shared_bytes)(grid, block, raw, shared_bytes, stream)


@contextmanager
def override(run: Launch) -> Iterator[None]:
    """Send every launch to ``run(spec, entry, grid, block, arguments, shared_bytes)`` instead of a GPU."""
    global _override
    before, _override = _override, run
    try:
        yield
    finally:
        _override = before
