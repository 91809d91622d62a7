"""How calls of marked layers are caught: a wrapper around two methods of their class, which unpickling restores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch_geometric import EdgeIndex
from torch_geometric.inspector import Inspector
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.fallback import report_fallback
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.drop_ins import MARK
from pyg_dfgnn.nn.edges import edges_in_flow
from pyg_dfgnn.nn.messages.call import call_layer, is_pygs, is_settled
from pyg_dfgnn.nn.messages.kept import keeping
from pyg_dfgnn.nn.messages.lazy import run_forward
from pyg_dfgnn.nn.messages.spec import STEPS, WRAPPER, Call, original
from pyg_dfgnn.nn.messages.terms import METHOD, with_terms
from pyg_dfgnn.nn.messages.traced import METHODS, call_traced
from pyg_dfgnn.ops.visits import is_new, step
from pyg_dfgnn.settings import current, quiet

NOT_STRICT = "torch.export with strict=False, its default, records PyG's code: strict=True exports the program"


class Mark:
    """The mark of a compiled layer; unpickling it wraps the class again, in whatever process.

    Args:
        kind: Class of the layer.

    Attributes:
        is_left: Whether the last messages were left to PyG's code, since the edges were few.
        forwards: How many forwards of the layer there were.
    """

    def __init__(self, kind: type) -> None:
        self.kind, self.is_left, self.forwards = kind, False, 0
        intercept(kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mark, (self.kind,)


def intercept(kind: type) -> None:
    """Wrap `propagate`, `edge_updater` and `forward` of a class, once, so that marked instances are compiled."""
    if "_jinja_propagate" not in kind.__dict__:
        _generate(kind)
    for method in STEPS:
        own = getattr(kind, method)
        if getattr(own, WRAPPER, None) is not kind:
            wrapper = _wrapped(method, own, kind)
            setattr(kind, method, wrapper)
            if getattr(kind, f"_jinja_{method}", None) is own:
                setattr(kind, f"_jinja_{method}", wrapper)
    for function in (*METHODS, METHOD):
        setattr(kind, function.__name__, function)
    forward = kind.forward  # type: ignore[attr-defined]
    if getattr(forward, WRAPPER, None) is not kind:
        kind.forward = _watched(forward, kind)  # type: ignore[attr-defined]


def _in_front(own: Callable[..., Any], kind: type, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a class that calls `run` in place of `own`, with its signature, source and globals, which
    TorchScript reads.
    """

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    # Code of its own: torch.compile counts by code how often it has compiled something anew, and then gives up.
    code = wrapper.__code__.replace()
    function = FunctionType(code, own.__globals__, own.__name__, None, wrapper.__closure__)
    functools.update_wrapper(function, own)
    setattr(function, WRAPPER, kind)
    return function


def _watched(own: Callable[..., Any], kind: type) -> Callable[..., Any]:
    forward = keeping(with_terms(own), kind)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = self.__dict__.get(MARK)
        if mark is None or torch.compiler.is_compiling() or torch.jit.is_scripting():
            return own(self, *args, **kwargs)
        mark.forwards += 1
        if (forward is own and mark.is_left) or is_pygs(self):
            for value in (*args, *kwargs.values()):
                if isinstance(value, Graph):
                    break
            else:
                return own(self, *args, **kwargs)
        args = tuple(_plain(self, value) for value in args)
        kwargs = {name: _plain(self, value) for name, value in kwargs.items()}
        return run_forward(forward, self, *args, **kwargs)

    return _in_front(own, kind, run)


def _plain(layer: Any, value: Any) -> Any:
    """Return an argument of a forward: in place of a `Graph` its edges, by which programs find it again."""
    return edges_in_flow(value, layer.flow) if isinstance(value, Graph) else value


def _generate(kind: type) -> None:
    """Let PyG generate the class's own functions, as the constructor of its first instance does."""
    probe: Any = object.__new__(kind)
    torch.nn.Module.__init__(probe)
    probe.inspector = Inspector(kind)
    probe.inspector.inspect_signature(kind.message)  # type: ignore[attr-defined]
    probe.inspector.inspect_signature(kind.aggregate, exclude=[0, "aggr"])  # type: ignore[attr-defined]
    probe.inspector.inspect_signature(kind.message_and_aggregate, [0])  # type: ignore[attr-defined]
    probe.inspector.inspect_signature(kind.update, exclude=[0])  # type: ignore[attr-defined]
    probe.inspector.inspect_signature(kind.edge_update)  # type: ignore[attr-defined]
    probe.fuse = probe.inspector.implements("message_and_aggregate")
    MessagePassing._set_jittable_templates(probe)


def _wrapped(method: str, own: Callable[..., Any], kind: type) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = self.__dict__.get(MARK)
        if mark is None or torch.jit.is_scripting():
            return own(self, *args, **kwargs)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling and torch.compiler.is_dynamo_compiling():
            return call_traced(self, own, method, args, kwargs)
        if not current().compile_messages or len(args) > 1:
            return own(self, *args, **kwargs)
        if is_compiling:
            report_fallback(type(self).__name__, [NOT_STRICT])
            with quiet():
                return own(self, *args, **kwargs)
        mark.is_left = is_new(self, args[0] if args else kwargs["edge_index"], method, mark.forwards)
        if mark.is_left:
            before, step.is_left = step.is_left, True
            try:
                return own(self, *args, **kwargs)
            finally:
                step.is_left = before
        edges = args[0] if args else kwargs.pop("edge_index")
        declared = {"size": kwargs.pop("size")} if "size" in kwargs else {}
        if is_settled(self, method, kwargs, edges):
            return own(self, edges, **kwargs, **declared)
        edge_index, size = edges, declared.get("size")
        if isinstance(edges, EdgeIndex):
            edge_index, size = edges.as_tensor(), edges.sparse_size()
        return call_layer(self, Call(method, own, edges, declared, kwargs, edge_index, size))

    return _in_front(own, kind, run)


def compilable(layer: Any) -> str:
    """Return why the messages of a layer cannot be compiled whatever the call, empty if they may be."""
    for base in type(layer).__mro__[: type(layer).__mro__.index(MessagePassing)]:
        for name in ("propagate", "edge_updater", "_collect", "_lift", "_index_select", "_set_size", "_check_input"):
            own = original(base.__dict__.get(name, getattr(MessagePassing, name)))
            if own is not getattr(MessagePassing, name) and "CollectArgs" not in own.__globals__:
                return f"{base.__name__} defines '{name}' itself"
    return ""
