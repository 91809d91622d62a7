"""Table of values that are kept for layers, each for as long as the layer lives."""

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

    def get(self, layer: torch.nn.Module) -> T | None:
        """Return what is kept for a layer; None if nothing is."""
        known = self._kept.get(id(layer))
        return known[1] if known is not None and known[0]() is layer else None

    def drop(self, layer: torch.nn.Module) -> None:
        """Forget what is kept for a layer."""
        self._kept.pop(id(layer), None)

    def clear(self) -> None:
        """Forget all layers."""
        self._kept.clear()

    def of(self, layer: torch.nn.Module) -> T:
        """Return what is kept for a layer."""
        known = self._kept.get(id(layer))
        return known[1] if known is not None and known[0]() is layer else self.put(layer, self._make())

    def put(self, layer: torch.nn.Module, value: T) -> T:
        """Keep a value for a layer, and return it."""
        number, kept = id(layer), self._kept
        kept[number] = weakref.ref(layer, lambda _: kept.pop(number, None)), value
        return value
