"""Runs the package's own host code on the CPU: what it launches goes to the emulator."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch import gemm as gemm_rule
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.statements.spec import Spec
from tests.emu import Kernel, build

# The emulator keeps the state of a launch in globals.
_one_launch = Lock()


@cache
def _kernel(spec: Spec, entry: str) -> Kernel:
    return Kernel(spec.source, entry)


def build_together(specs: Iterable[Spec]) -> None:
    build([spec.source for spec in specs])


def _argument(value: Tensor | float | None) -> np.ndarray | float | None:
    """A numpy array that shares the memory of a tensor; 16-bit floats as their bits."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


@contextmanager
def emulated_device(order: str = "forward", seed: int = 0) -> Iterator[list[str]]:
    """Lets CPU tensors take the fused path, with each launch emulated.

    Args:
        order: Order of threads and blocks, see `tests.emu.Kernel.launch`.
        seed: Seed of the random order.

    Yields:
        The names of the kernels launched so far.
    """
    launched: list[str] = []

    def run(
        spec: Spec,
        entry: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Tensor | float | None],
        shared_bytes: int,
    ) -> None:
        launched.append(entry)
        given = [*map(_argument, arguments)]
        with _one_launch:
            _kernel(spec, entry).launch(grid, block, given, shared_bytes, order, seed)

    # Fills what torch.empty returns with NaN, so that an element no kernel writes is seen.
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    fused_device_types.add("cpu")
    try:
        with launcher.override(run, build_together):
            yield launched
    finally:
        fused_device_types.discard("cpu")
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def small_gemm() -> Iterator[None]:
    """Lets the kernels of linear layers take few rows and every size that fits, on four multiprocessors."""
    plans = gemm._has_kernels, gemm._forward_plan, gemm._backward_plans
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gemm, "SMALL_PRODUCT", 0)
        patched.setattr(gemm_rule, "_FEW_ROWS", 0)
        patched.setattr(gemm_rule, "_WIDTHS", range(4, 513, 4))
        patched.setitem(gpu.known, torch.device("cpu"), replace(gpu.H200, multiprocessors=4))
        for each in plans:
            each.cache_clear()
        yield
    for each in plans:
        each.cache_clear()
