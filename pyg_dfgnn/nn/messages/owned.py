"""What is kept for layers, each for as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class OfLayers(Generic[T]):
    """A table from layers, which need not be hashable, to what is kept for them.

    Args:
        make: () -> what is kept for a layer at first.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: dict[int, tuple[weakref.ref[torch.nn.Module], T]] = {}

    def of(self, layer: torch.nn.Module) -> T:
        """Return what is kept for a layer."""
        number, kept = id(layer), self._kept
        known = kept.get(number)
        if known is None or known[0]() is not layer:
            known = kept[number] = weakref.ref(layer, lambda _: kept.pop(number, None)), self._make()
        return known[1]
