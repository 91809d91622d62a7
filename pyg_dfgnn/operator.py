"""The one registered operator that tracers see, defined as soon as the package is imported.

An exported program names it: the process that loads one needs `import pyg_dfgnn` and no more.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@cache
def _runners() -> Any:
    """Return the module that finds what runs a program, with all families of ops."""
    import_module("pyg_dfgnn.ops")
    return import_module("pyg_dfgnn.ops.function")


def _run(
    name: str,
    anchors: Sequence[Tensor],
    sizes: Sequence[int],
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Run a program on tensors."""
    results: list[Tensor] = _runners().runner_of(name).run(name, anchors, sizes, inputs, numbers)
    return results


def _run_fake(
    name: str,
    anchors: Sequence[Tensor],
    sizes: Sequence[Any],
    inputs: Sequence[Tensor | None],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Return empty results of the shapes and dtypes that the program gives."""
    results: list[Tensor] = _runners().runner_of(name).empty_results(name, anchors, sizes, inputs)
    return results


_library = torch.library.Library("pyg_dfgnn", "DEF")
# Inductor's CUDA graphs copy edge_index into a buffer of theirs: a replay would launch on the recorded graph.
_library.define(
    "run(str program, Tensor[] anchors, SymInt[] sizes, Tensor?[] inputs, float[] numbers) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake("pyg_dfgnn::run", _run_fake, lib=_library)
