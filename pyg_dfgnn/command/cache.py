"""The cache of compiled kernels on disk."""

from __future__ import annotations

import shutil
import time

import torch

import pyg_dfgnn
from pyg_dfgnn.command.layers import NO_GPU, Case, UserError, builtin_cases, loss_of, users_case
from pyg_dfgnn.graph.derived import in_units
from pyg_dfgnn.paths import kernel_cache_dir

_CALLS = 5
"""Calls after which edges are no longer new."""


def cached() -> tuple[int, int]:
    """Return the number of files in the cache and their bytes."""
    files = [path for path in kernel_cache_dir().rglob("*") if path.is_file()] if kernel_cache_dir().is_dir() else []
    return len(files), sum(path.stat().st_size for path in files)


def clear() -> int:
    """Delete the kernels that CuPy keeps on disk, those of other packages too."""
    count, size = cached()
    shutil.rmtree(kernel_cache_dir(), ignore_errors=True)
    print(f"deleted {count} files, {in_units(size)}, in {kernel_cache_dir()}")
    return 0


def run_all(case: Case) -> None:
    """Run a model on kernels, with and without gradients, while its edges are new and once they are measured."""
    model = pyg_dfgnn.accelerate(case.model)
    for check_ids in ("later", "now"):
        with pyg_dfgnn.local_settings(check_ids=check_ids):
            for _ in range(_CALLS):
                with torch.no_grad():
                    model(*case.arguments)
                loss_of(model(*case.arguments)).backward()


def warm(source: str | None = None) -> int:
    """Compile the kernels of the doctor's layers, or of a model of yours, for the GPU of this machine.

    Args:
        source: "module:function" of the model; None for the layers.

    Returns:
        1 without a GPU, 0 otherwise.
    """
    cases = builtin_cases(300, 2_000, 32) if source is None else [users_case(source)]
    if not torch.cuda.is_available():
        raise UserError(f"{NO_GPU}: for which one to compile cannot be told")
    before, (count, size) = time.perf_counter(), cached()
    for case in cases:
        run_all(case.to(torch.device("cuda")))
    torch.cuda.synchronize()
    more, bytes_now = cached()
    seconds = time.perf_counter() - before
    print(
        f"compiled {more - count} files, {in_units(max(bytes_now - size, 0))}, "
        f"in {seconds:.0f} s to {kernel_cache_dir()}"
    )
    return 0
