"""Layers captured by TorchDynamo: one code object for each class and size, and settings of Dynamo while it compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.fx.experimental import _config as shapes_config
from torch.nn import Module

from pyg_dfgnn.frontend.backend import backend

MARK = "_pyg_dfgnn_captured"
"""Attribute of a layer that is captured."""
_WRAPPER = "_pyg_dfgnn_captures"
"""Attribute of our wrapper around the forward of a class: the class."""
_HOOKS = tuple(
    f"_{method}_forward_{kind}"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_hooks", "hooks")
)
"""Hooks of PyG, which its own code leaves out while it is compiled."""
DYNAMO: dict[str, Any] = {
    "assume_static_by_default": False,
    "automatic_dynamic_shapes": True,
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "skip_nnmodule_hook_guards": False,
    "specialize_float": True,
    "suppress_errors": True,
}
"""Settings of TorchDynamo while a layer is compiled; users' own graphs are compiled by theirs."""
Layer = TypeVar("Layer", bound=Module)


class _Configured:
    """A callback of TorchDynamo that compiles by our settings; a warm call does not come here."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # By this name Dynamo finds the backend behind a callback, whose cache a call looks in.
        self._torchdynamo_orig_backend = callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as settings:
            settings.enter_context(torch._dynamo.config.patch(DYNAMO))
            settings.enter_context(shapes_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
            return self.callback(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.callback, name)


_functions: dict[Any, Callable[..., Any]] = {}
"""Class and sizes -> the compiled forward of such layers."""


def _key(layer: Module) -> tuple[Any, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return type(layer), tuple((name, getattr(x, "shape", None) if not _is_lazy(x) else None) for name, x in tensors)


def _is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def _function(layer: Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled forward of a layer's class and size."""
    key = _key(layer)
    if key not in _functions:
        # Dynamo keeps at most 8 graphs for one code object.
        code = own.__code__.replace()  # type: ignore[attr-defined]
        forward = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)  # type: ignore[attr-defined]
        forward.__kwdefaults__ = own.__kwdefaults__  # type: ignore[attr-defined]
        context = torch._dynamo.optimize(backend=backend)
        context.callback = _Configured(context.callback)  # type: ignore[union-attr]
        _functions[key] = context(forward)
    return _functions[key]


class Mark:
    """The mark of a captured layer; unpickling it wraps the class again, in whatever process.

    Args:
        kind: Class of the layer.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.forward: Callable[..., Any] | None = None
        self.parts: list[dict[str, Any]] = []
        forward = kind.forward  # type: ignore[attr-defined]
        if getattr(forward, _WRAPPER, None) is not kind:
            kind.forward = _wrapped(forward, kind)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Mark, (self.kind,)


def _wrapped(own: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = self.__dict__.get(MARK)
        if mark is None or torch.compiler.is_compiling() or torch.jit.is_scripting():
            return own(self, *args, **kwargs)
        if mark.forward is None:
            mark.forward = _function(self, own)
            mark.parts = [part.__dict__ for part in self.modules() if _HOOKS[0] in part.__dict__]
        for part in mark.parts:
            if part["_explain"] or any([part[name] for name in _HOOKS]):
                return own(self, *args, **kwargs)
        return mark.forward(self, *args, **kwargs)

    setattr(forward, _WRAPPER, kind)
    return forward


def compile_layer(layer: Layer) -> Layer:
    """Capture the forward of a layer at its next call: what is on edges runs as programs, all else by torch.

    Args:
        layer: A layer, such as a `MessagePassing`.

    Returns:
        The layer itself.
    """
    layer.__dict__[MARK] = Mark(type(layer))
    return layer


def release_layer(layer: Layer) -> Layer:
    """Let a layer run as it was written."""
    layer.__dict__.pop(MARK, None)
    return layer


def clear() -> None:
    """Forget all compiled forwards."""
    _functions.clear()
