"""Linear layers of one input in the forward of a compiled layer: the first that is called computes all of them.

Which layers a forward calls with one tensor its first call tells. From then on the first of them asks for the product
with all weights (:func:`pyg_dfgnn.ops.gemm.project`), and each other finds its result there: one node of autograd, one
launch for the results, and one for each kind of gradients. What is there is used only if the layer's input, parameters
and the state of torch are what they were; else the layer computes its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.gemm import MAX_LAYERS
from pyg_dfgnn.nn.dense.linear import KernelLinear, watch
from pyg_dfgnn.nn.messages.owned import OfLayers
from pyg_dfgnn.nn.projection import parameters_of
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import is_plain
from pyg_dfgnn.settings import current

Group = list["weakref.ref[KernelLinear]"]


@dataclass
class _Known:
    """What is known of a layer's forward.

    Attributes:
        is_learnt: Whether a call of it has been watched.
        groups: Number of a linear layer -> it, and those that are called after it with the same tensor.
    """

    is_learnt: bool = False
    groups: dict[int, Group] = field(default_factory=dict)


class _Ready(NamedTuple):
    """A result that no layer has asked for yet, and what it was made of."""

    result: Tensor
    linear: KernelLinear
    x: Tensor
    made_of: tuple[Any, ...]

    @property
    def is_current(self) -> bool:
        return _made_of(self.linear, self.x) == self.made_of


def _made_of(linear: KernelLinear, x: Tensor) -> tuple[Any, ...]:
    """Return what the result of a layer depends on, as numbers that a change changes."""
    tensors = (x, *linear._parameters.values())
    return torch.is_grad_enabled(), *((id(t), t._version) for t in tensors if t is not None)


_of_layers = OfLayers(_Known)


class _Forward:
    """A forward that runs: what its linear layers were called with, and the results that are there already."""

    def __init__(self, known: _Known) -> None:
        self.known = known
        self.calls: list[tuple[KernelLinear, Tensor, int]] = []
        self.ready: dict[tuple[int, int], _Ready] = {}

    def result(self, linear: KernelLinear, x: Any) -> Tensor | None:
        """Return the result of a linear layer; None where it is to compute its own."""
        ready = self.ready.pop((id(linear), id(x)), None)
        if ready is not None:
            return ready.result if ready.is_current else None
        if not self.known.is_learnt:
            if is_plain(x) and not x.is_inference():
                self.calls.append((linear, x, x._version))
            return None
        layers = self._group(linear)
        if len(layers) < 2 or not _may_join(x):
            return None
        parameters = parameters_of(x, layers)
        if parameters is None:
            return None
        weights, biases, _ = parameters
        if any(tensor.is_inference() for tensor in (*weights, *biases)):
            return None
        first, *others = gemm.project(x, weights, biases, twice=True)
        for layer, result in zip(layers[1:], others, strict=True):
            self.ready[id(layer), id(x)] = _Ready(result, layer, x, _made_of(layer, x))
        return first

    def _group(self, linear: KernelLinear) -> list[KernelLinear]:
        """Return the layers that are called with the input of this one, it first; none where there are no others."""
        group = self.known.groups.get(id(linear), ())
        layers = [layer for reference in group if (layer := reference()) is not None]
        return layers if layers and layers[0] is linear else []

    def close(self) -> None:
        """Learn from a forward that has returned."""
        if not self.known.is_learnt:
            self.known.is_learnt, self.known.groups = True, _groups(self.calls)
        for ready in self.ready.values():
            # Another branch was taken: its layers compute their own from now on.
            for group in self.known.groups.values():
                group[:] = [reference for reference in group if reference() is not ready.linear]


def _groups(calls: list[tuple[KernelLinear, Tensor, int]]) -> dict[int, Group]:
    """Return the groups of layers that were called once, with one tensor, and have parameters of one shape."""
    times = Counter(id(linear) for linear, _, _ in calls)
    kinds: dict[tuple[Any, ...], list[KernelLinear]] = {}
    for linear, x, version in calls:
        weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
        if weight is not None and times[id(linear)] == 1:
            kinds.setdefault((id(x), version, weight.shape, bias is None), []).append(linear)
    groups: dict[int, Group] = {}
    for layers in kinds.values():
        for start in range(0, len(layers), MAX_LAYERS):
            group = layers[start : start + MAX_LAYERS]
            if len(group) > 1:
                groups[id(group[0])] = [weakref.ref(linear) for linear in group]
    return groups


def _may_join(x: Any) -> bool:
    """Return whether one product for several layers takes their place unseen, and is faster."""
    if not is_plain(x) or x.dim() != 2 or not (x.is_cuda or x.device.type in fused_device_types):
        return False
    # A checkpoint counts what is saved, in the first call as in later ones.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch._C._is_tracing():
        return False
    return not (x.is_inference() or x.is_neg() or torch.is_autocast_enabled(x.device.type))


@contextmanager
def watching(layer: torch.nn.Module) -> Iterator[None]:
    """Let linear layers that the forward of a compiled layer calls with one tensor share their product."""
    if not current().compile_messages:
        yield
        return
    before, forward = watch.result, _Forward(_of_layers.of(layer))
    watch.result = forward.result
    try:
        yield
        forward.close()
    finally:
        watch.result = before
