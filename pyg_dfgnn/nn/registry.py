"""Which class stands for which of PyG's, as data that every family of layers adds to, and what is said of a layer."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.settings import current, local_settings
from pyg_dfgnn.torch_private import tree_leaves

DROP_INS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
"""PyG's classes and ours in their place.

A drop-in has two methods: `_standing_reasons(like)` returns why every call will be PyG's own, and
`_describe(device, *args, **kwargs)` returns the :class:`Description` of one call.
"""
LINEAR_DROP_INS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
"""The linear layers of PyG and torch and ours in their place, for those who ask for them."""


CONTAINERS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
"""Modules of PyG that call several layers, each of which has a drop-in of its own, and ours in their place."""


_upstreams: dict[type, type] = {}
"""Drop-ins that have been asked about, and the classes that they stand for."""


MARK = "_pyg_dfgnn_compiled"
"""Attribute of layers whose messages are compiled: see :mod:`pyg_dfgnn.nn.messages`."""


def drop_ins() -> dict[type[torch.nn.Module], type[torch.nn.Module]]:
    """Return the classes that `accelerate` replaces under the settings in force, and ours in their place."""
    return DROP_INS | LINEAR_DROP_INS if current().linear == "kernels" else DROP_INS


def upstream_of(kind: type) -> type:
    """Return the class, PyG's or torch's, that a drop-in stands for; any other class itself."""
    known = _upstreams.get(kind)
    if known is not None or kind in DROP_INS:
        return known or kind
    for table in (DROP_INS, LINEAR_DROP_INS, CONTAINERS):
        for upstream, drop_in in table.items():
            if drop_in is kind:
                _upstreams[kind] = upstream
                return upstream
    return kind


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module, in which what a forward has left in attributes, on its own or in lists, is detached.

    torch copies no tensors that an operator has made under autograd.
    """
    left = (leaf for each in module.modules() for leaf in tree_leaves(dict(vars(each))))
    computed = (leaf for leaf in left if isinstance(leaf, torch.Tensor) and not leaf.is_leaf)
    return copy.deepcopy(module, {id(tensor): tensor.detach() for tensor in computed})


def set_propagate(module: torch.nn.Module) -> None:
    """Let a module, whose class has changed, propagate by the functions of its class.

    PyG binds a function of the class to the module at each change of `explain` and of `decomposed_layers`; while one is
    there, PyG takes it for the class's own as it generates functions into the class. A user's function stays.
    """
    if not isinstance(module, MessagePassing):
        return
    bound = vars(module).pop("propagate", None)
    # As in a constructor: generate the propagation of the class where no instance has done so yet.
    MessagePassing._set_jittable_templates(module)
    function = getattr(bound, "__func__", bound)
    is_pygs = function is MessagePassing.propagate or "CollectArgs" in getattr(function, "__globals__", ())
    if bound is not None and not is_pygs:
        vars(module)["propagate"] = bound
    elif module.explain or module.decomposed_layers != 1:
        vars(module)["propagate"] = type(module)._orig_propagate.__get__(module, MessagePassing)  # type: ignore[attr-defined]


def shown(module: torch.nn.Module) -> str:
    """Return a module as it prints itself; the name of its class where that fails, in it or in what it holds."""
    try:
        return str(module)
    except Exception:
        return type(module).__name__


def keep_signature(kind: type) -> None:
    """Let a class whose constructor takes any arguments show those of its last base, PyG's class of the same name.

    Subclasses of it with a constructor of their own show that one's.
    """
    upstream = kind.__bases__[-1]
    if "__init__" in vars(kind):
        own = signature(kind.__init__)  # type: ignore[misc]
        kind.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
    elif upstream.__name__ == kind.__name__:
        kind.__signature__ = signature(upstream)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Description:
    """Description of how a layer, or each layer of a model, would run a call; `str()` is made for reading.

    Attributes:
        layer: The layer, as it prints itself.
        reasons: Why PyG's own code would take the call, or a part of it; empty when the fused kernels would take all.
        problem: What dispatch was asked.
        plan: What it answered; None with reasons.
        graph: Sizes of the graph; None with reasons, and for layers without one.
        memory: What the graph keeps on its device once the plan is made, and its bytes; None without a graph.
        layers: Of a model, its layers by name.
        is_partial: Whether the fused kernels would take a part of the call.
    """

    layer: str
    reasons: tuple[str, ...] = ()
    problem: Any = None
    plan: Any = None
    graph: str | None = None
    memory: str | None = None
    layers: dict[str, "Description"] = field(default_factory=dict)
    is_partial: bool = False

    @property
    def fused(self) -> bool:
        """Whether the fused kernels would run, in every layer of a model."""
        return not self.reasons and all(layer.fused for layer in self.layers.values())

    def __str__(self) -> str:
        if self.layers:
            layers = self.layers.values()
            fused, partial = sum(layer.fused for layer in layers), sum(layer.is_partial for layer in layers)
            total = f"{len(layers)} layers: {fused} fused, {partial} in part, {len(layers) - fused - partial} PyG's"
            return "\n".join([*(f"{name}: {layer}" for name, layer in self.layers.items()), total])
        if self.reasons:
            what = "fused in part; not" if self.is_partial else "PyG's own path, because"
            lines = [f"{self.layer}: {what}", *(f"  - {reason}" for reason in self.reasons)]
            return "\n".join(lines if self.plan is None else [*lines, str(self.plan)])
        facts = {"problem": self.problem, "graph": self.graph, "kept": self.memory, "plan": self.plan}
        shown = [f"  {name}: {value}" for name, value in facts.items() if value is not None]
        return "\n".join([f"{self.layer}: fused kernels", *shown])


class LayerReport(NamedTuple):
    """One layer of a model.

    Attributes:
        name: Dotted name in the model; empty for the model itself.
        kind: Its class.
        drop_in: Whether the class is ours.
        why: Why it was left, or why its calls will still be PyG's own; empty when nothing is known against it.
        compiled: Whether its messages are compiled, unless its code is known to become no program.
    """

    name: str
    kind: str
    drop_in: bool
    why: str
    compiled: bool = False

    @property
    def state(self) -> str:
        """State of the layer: "drop-in", "compiled" or "left"."""
        return "drop-in" if self.drop_in else "compiled" if self.compiled else "left"


def floating(module: torch.nn.Module) -> Tensor | None:
    """Return the first parameter or buffer of a module that holds floating-point numbers."""
    return next((each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()), None)


def layer_rows(model: torch.nn.Module) -> Iterator[tuple[Any, LayerReport]]:
    """Yield every layer that passes messages or that is, or derives from, a class that :func:`drop_ins` has.

    The layers inside a layer that has a drop-in are part of it.
    """
    table = drop_ins()
    replaced, ours = tuple(table), (*DROP_INS.values(), *LINEAR_DROP_INS.values())
    inside: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        kind, layer = type(module), cast(Any, module)
        if module in inside:
            continue
        if isinstance(module, ours) or kind in table:
            inside.update(module.modules())
        if isinstance(module, ours):
            own = floating(module)
            reasons = layer._standing_reasons(floating(model) if own is None else own)
            yield layer, LayerReport(name, kind.__name__, True, "; ".join(reasons))
        elif MARK in module.__dict__:
            yield layer, LayerReport(name, kind.__name__, False, "", compiled=True)
        elif isinstance(module, torch.nn.Linear) and kind not in table:
            # Attention of torch's has one that it never calls.
            continue
        elif isinstance(module, (MessagePassing, *replaced)):
            if kind in table:
                why = f"this is {_of(kind)}; call pyg_dfgnn.accelerate(model) first"
            elif isinstance(module, replaced):
                base = next(base for base in kind.__mro__ if base in table)
                why = f"a subclass of {_of(base)} may mean something else"
            else:
                why = f"{kind.__name__} has no drop-in"
            yield layer, LayerReport(name, kind.__name__, False, why)


def _of(kind: type) -> str:
    return f"{'PyG' if kind.__module__.startswith('torch_geometric') else 'torch'}'s {kind.__name__}"


class _Description(threading.local):
    """Whether this thread describes calls, which wants every reason."""

    is_made = False


_description = _Description()


@contextmanager
def described() -> Iterator[None]:
    """Ask for every reason against the fused forward in the block, and measure edges at once."""
    before, _description.is_made = _description.is_made, True
    try:
        with local_settings(check_ids="now"):
            yield
    finally:
        _description.is_made = before


def is_described() -> bool:
    """Return whether every reason is asked for, and not only whether there is one."""
    return _description.is_made
