"""Linear layers of one input in the forward of a compiled layer: the first that is called computes all of them.

Which layers a forward calls with one tensor its first call tells. From then on the first of them asks for the product
with all weights (:func:`pyg_dfgnn.ops.gemm.project`), and each other finds its result there: one node of autograd, one
launch for the results, and one for each kind of gradients. A result is taken only by the call that would compute it
from the same tensors, unedited, in the same state of torch. Layers whose code might edit a tensor behind the back of
its version counter, or differentiate in parts, are left as they are: all but PyG's and those that name what is known.
"""

from __future__ import annotations

import dis
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.gemm import MAX_LAYERS
from pyg_dfgnn.ir.torch_front import is_of_libraries
from pyg_dfgnn.nn.dense.linear import KernelLinear, watch
from pyg_dfgnn.nn.gate import hooks_of
from pyg_dfgnn.nn.messages.spec import STEPS, original
from pyg_dfgnn.nn.owned import OfLayers
from pyg_dfgnn.nn.projection import parameters_of
from pyg_dfgnn.nn.reads import codes_in
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import is_eager, is_plain
from pyg_dfgnn.settings import current

_SAFE = frozenset(
    "Tensor torch F nn functional math isinstance len range int float bool tuple list zip size dim shape dtype device "
    "view reshape flatten unflatten unsqueeze squeeze transpose permute t chunk split unbind cat stack "
    "expand sum mean sqrt exp log abs clamp softmax relu gelu silu elu leaky_relu sigmoid tanh softplus dropout "
    "layer_norm normalize training to add sub mul div matmul".split()
)
"""Names that a user's forward may have besides those of its numbers, tensors and layers of torch and PyG."""
_PLAIN = (int, float, bool, str, type(None), Tensor, torch.nn.Parameter)
_LIBRARIES = ("torch", "torch_geometric", "pyg_dfgnn")
_REFUSED = (
    "STORE_ATTR STORE_SUBSCR STORE_GLOBAL DELETE_ATTR DELETE_SUBSCR YIELD_VALUE LOAD_DEREF LIST_EXTEND LIST_APPEND "
    "DICT_MERGE DICT_UPDATE MAP_ADD".split()
)
"""Steps of code that store into objects, read other scopes, or may return several values."""
Group = list["weakref.ref[KernelLinear]"]


@dataclass
class _Known:
    """What is known of a layer's forward, in training or in evaluation.

    Attributes:
        is_learnt: Whether a call of it has been watched.
        groups: Number of a linear layer -> it, and those that are called after it with the same tensor.
    """

    is_learnt: bool = False
    groups: dict[int, Group] = field(default_factory=dict)


@dataclass
class _Layer:
    """What is kept for a layer.

    Attributes:
        shows_all: Whether its forward does nothing unseen; None before anybody has asked.
        known: What is known of its forward, by whether it trains.
    """

    shows_all: bool | None = None
    known: dict[bool, _Known] = field(default_factory=lambda: {True: _Known(), False: _Known()})


_of_layers = OfLayers(_Layer)


class _Ready(NamedTuple):
    """A result that no layer has asked for yet, and what it was made of."""

    result: Tensor
    linear: KernelLinear
    x: Tensor
    state: tuple[Any, ...]
    tensors: tuple[Tensor | None, ...]
    facts: list[tuple[Any, ...]]

    @staticmethod
    def of(result: Tensor, linear: KernelLinear, x: Tensor) -> _Ready:
        tensors = _tensors(linear, x)
        return _Ready(result, linear, x, _state(x), tensors, _facts(tensors))

    @property
    def is_current(self) -> bool:
        tensors = _tensors(self.linear, self.x)
        same = len(tensors) == len(self.tensors) and all(new is old for new, old in zip(tensors, self.tensors))
        return same and _facts(tensors) == self.facts and _state(self.x) == self.state and _may_join(self.x)


def _tensors(linear: KernelLinear, x: Tensor) -> tuple[Tensor | None, ...]:
    return x, *linear._parameters.values()


def _facts(tensors: Sequence[Tensor | None]) -> list[tuple[Any, ...]]:
    return [(t._version, t.data_ptr(), t.requires_grad, t.dtype, t.shape) for t in tensors if t is not None]


def _state(x: Tensor) -> tuple[Any, ...]:
    """Return the state of torch that a product depends on."""
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stream


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
            if ready.is_current:
                return ready.result
            self._leave_out(linear)
            return None
        if not self.known.is_learnt:
            if is_plain(x) and not x.is_inference() and not x.is_meta:
                self.calls.append((linear, x, x._version))
            return None
        layers = self._group(linear)
        if len(layers) < 2 or not _may_join(x):
            return None
        parameters = parameters_of(x, layers)
        if parameters is None or not _are_alike(parameters[0], parameters[1]):
            return None
        first, *others = gemm.project(x, parameters[0], parameters[1], twice=True)
        for layer, result in zip(layers[1:], others, strict=True):
            self.ready[id(layer), id(x)] = _Ready.of(result, layer, x)
        return first

    def _group(self, linear: KernelLinear) -> list[KernelLinear]:
        """Return the layers that are called with the input of this one, it first; none where there are no others."""
        group = self.known.groups.get(id(linear), ())
        layers = [layer for reference in group if (layer := reference()) is not None]
        return layers if layers and layers[0] is linear else []

    def close(self, returned: Any) -> None:
        """Learn from a forward that has returned this; the parts of a tuple may be differentiated one by one."""
        if not self.known.is_learnt and self.calls:
            self.known.is_learnt = True
            self.known.groups = _groups(self.calls)
        if not isinstance(returned, Tensor):
            self.known.groups = {}
        # Another branch was taken: its layers compute their own from now on.
        for ready in self.ready.values():
            self._leave_out(ready.linear)

    def _leave_out(self, linear: KernelLinear) -> None:
        for group in self.known.groups.values():
            group[:] = [reference for reference in group if reference() is not linear]


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
    if (
        not is_plain(x)
        or x.dim() != 2
        or not x.is_floating_point()
        or not (x.is_cuda or x.device.type in fused_device_types)
    ):
        return False
    # A checkpoint counts what is saved, in the first call as in later ones. A mode may change what a product is.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch._C._is_tracing():
        return False
    if not is_eager() or torch._C._len_torch_function_stack():
        return False
    return not (x.is_inference() or x.is_neg() or torch.is_autocast_enabled(x.device.type))


def _are_alike(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Return whether all parameters get gradients, if any does, which nothing looks at before they are added up."""
    tensors = (*weights, *biases)
    if any(t.is_inference() or t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors):
        return False
    return not torch.is_grad_enabled() or all(t.requires_grad for t in tensors)


def _shows_all(layer: Any) -> bool:
    """Return whether nothing in a forward could edit tensors unseen, keep results, or differentiate in parts.

    That is so of the forwards of PyG, and of those that name nothing but what is known; their layers are of torch, PyG
    and this package.
    """
    forward = original(type(layer).forward)
    if type(forward) is not FunctionType or "forward" in layer.__dict__:
        return False
    modules = [module for module in layer.modules() if module is not layer]
    if any(_library(type(module)) not in _LIBRARIES or "forward" in module.__dict__ for module in modules):
        return False
    if forward.__module__.partition(".")[0] == "torch_geometric":
        return is_of_libraries(forward.__code__.co_filename)
    return all(_is_known(layer, name) for code in codes_in(forward.__code__) for name in code.co_names) and not any(
        map(_is_open, codes_in(forward.__code__))
    )


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_known(layer: Any, name: str) -> bool:
    if name in layer._modules or name in STEPS:
        return True
    own = [vars(kind) for kind in type(layer).__mro__ if _library(kind) not in (*_LIBRARIES, "builtins")]
    named = original(type(layer).forward).__globals__
    tables = (layer.__dict__, layer._parameters, layer._buffers, *own, named)
    values = [table[name] for table in tables if name in table]
    return all(map(_is_harmless, values)) and (bool(values) or name in _SAFE)


def _is_harmless(value: Any) -> bool:
    """Return whether a value is a number, a tensor, or a module or a class of torch and PyG."""
    if type(value) is ModuleType:
        return value.__name__.partition(".")[0] in ("torch", "math")
    return type(value) in _PLAIN or (isinstance(value, type) and _library(value) in _LIBRARIES)


def _is_open(code: CodeType) -> bool:
    """Return whether code stores into objects, edits in place, reads other scopes, or may return several values."""
    steps = [step.opname for step in dis.get_instructions(code)]
    after = [steps[place + 1] for place, name in enumerate(steps) if name in ("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP")]
    is_named = any(name.startswith(("RETURN_VALUE", "STORE_FAST", "JUMP")) for name in after)
    edits = any(isinstance(constant, tuple) and "inplace" in constant for constant in code.co_consts)
    return is_named or edits or not set(steps).isdisjoint(_REFUSED)


def run_watched(layer: torch.nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a compiled layer; linear layers that it calls with one tensor share their product."""
    kept = _of_layers.of(layer)
    if kept.shows_all is None:
        kept.shows_all = _shows_all(layer)
    is_watched = kept.shows_all and current().compile_messages and not any(hooks_of(layer.__dict__))
    forward = _Forward(kept.known[layer.training]) if is_watched else None
    # What is not watched asks no forward around it either.
    before, watch.result = watch.result, None if forward is None else forward.result
    try:
        returned = run(*args, **kwargs)
        if forward is not None:
            forward.close(returned)
        return returned
    finally:
        watch.result = before
