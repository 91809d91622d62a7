"""Functions of `torch_scatter` that TorchDynamo does not see through, as what PyTorch's reductions compute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_known = set[Callable[..., Any]]()
"""Functions that TorchDynamo has been given a substitute for."""


def substitute() -> None:
    """Let TorchDynamo trace substitutes for the functions of `torch_scatter`, where that is imported."""
    package = sys.modules.get("torch_scatter")
    for name, function in _SUBSTITUTES.items() if package is not None else ():
        original = getattr(package, name, None)
        if original is None or original in _known:
            continue
        _known.add(original)
        try:
            torch.compiler.substitute_in_graph(original)(function)
        except (TypeError, ValueError):
            # Another version of the package, or a substitute of the user's.
            continue


def _ids(index: Tensor, src: Tensor, dim: int) -> Tensor:
    """Return ids with as many dimensions as what is reduced, and repeated like it."""
    if index.dim() == 1:
        index = index.view(*(1,) * (dim % src.dim()), -1)
    return index.view(*index.shape, *(1,) * (src.dim() - index.dim())).expand_as(src)


def _size(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> list[int]:
    size = list(src.shape)
    if dim_size is not None:
        size[dim] = dim_size
    elif index.numel() == 0:
        size[dim] = 0
    else:
        size[dim] = int(index.max()) + 1
    return size


def _extreme(
    src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str, none: float
) -> tuple[Tensor, Tensor]:
    """Return the largest or smallest of each group, and the place of the first number that is it.

    Args:
        src: Numbers.
        index: Group of each, along a dimension.
        dim: The dimension.
        dim_size: Number of groups; one more than the largest of them where it is None.
        reduce: Name of the reduction.
        none: The number that is never taken, of which alone a group counts as empty: its result is 0.
    """
    index, count = _ids(index, src, dim), src.size(dim)
    size = _size(src, index, dim, dim_size)
    found = src.new_zeros(size).scatter_reduce(dim, index, src, reduce, include_self=False)
    is_it = (src == found.gather(dim, index)) & (src != none)
    places = torch.arange(count, device=src.device).view(-1, *(1,) * (src.dim() - 1 - dim % src.dim())).expand_as(src)
    places = torch.where(is_it, places, count)
    first = index.new_full(size, count).scatter_reduce(dim, index, places, "amin", include_self=True)
    return found.masked_fill(found == none, 0), first


def scatter_max(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest number of each group and its place, of which the first counts; 0 for a group of none.

    Numbers that share a maximum share its gradient, as in :func:`torch.Tensor.scatter_reduce`.
    """
    if out is not None or not src.is_floating_point():
        return torch.ops.torch_scatter.scatter_max(src, index, dim, out, dim_size)  # type: ignore[no-any-return]
    return _extreme(src, index, dim, dim_size, "amax", -torch.inf)


def scatter_min(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the smallest number of each group and its place, as :func:`scatter_max` does the largest."""
    if out is not None or not src.is_floating_point():
        return torch.ops.torch_scatter.scatter_min(src, index, dim, out, dim_size)  # type: ignore[no-any-return]
    return _extreme(src, index, dim, dim_size, "amin", torch.inf)


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None) -> Tensor:
    """Return the softmax among the numbers of each group."""
    if not torch.is_floating_point(src):
        raise ValueError("`scatter_softmax` can only be computed over tensors with floating point data types.")
    index = _ids(index, src, dim)
    size = _size(src, index, dim, dim_size)
    most = src.new_zeros(size).scatter_reduce(dim, index, src.detach(), "amax", include_self=False)
    weight = (src - most.gather(dim, index)).exp()
    # A sum of at least 1, which this number leaves as it is: the softmax of PyG, which programs know.
    total = src.new_zeros(size).scatter_add(dim, index, weight) + 1e-16
    return weight / total.gather(dim, index)


_SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "scatter_max": scatter_max,
    "scatter_min": scatter_min,
    "scatter_softmax": scatter_softmax,
}
