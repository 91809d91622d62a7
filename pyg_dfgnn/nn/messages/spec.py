"""What a call of `propagate` or `edge_updater` looks like: all that a trace of it depends on but the layer's state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.nn.edges import as_sizes
from pyg_dfgnn.nn.messages.lazy import EdgeValue

STEPS = {"propagate": ("message", "aggregate"), "edge_updater": ("edge_update",)}
"""The methods of a layer that are traced for each method that is caught."""
WRAPPER = "_pyg_dfgnn_of"
"""Attribute of our wrappers around functions of a class: the class."""
_SPECIAL = MessagePassing.special_args


def original(function: Any) -> Any:
    """Return the function of a class that a wrapper of ours stands in front of."""
    while hasattr(function, WRAPPER):
        function = function.__wrapped__
    return function


class Call(NamedTuple):
    """One call of `propagate` or `edge_updater`.

    Attributes:
        method: Which of the two.
        own: PyG's function.
        edges: The edges as they were passed.
        declared: The argument `size`, if it was passed.
        kwargs: The other arguments.
        edge_index: The edges as a tensor.
        size: Declared numbers of nodes.
    """

    method: str
    own: Callable[..., Any]
    edges: Any
    declared: dict[str, Any]
    kwargs: dict[str, Any]
    edge_index: Tensor
    size: Sequence[int | None] | None


class Spec(NamedTuple):
    """A kind of call.

    Attributes:
        key: All that tracing depends on but the layer's state.
        roles: Argument -> what its rows are, nested as it is.
        lifted: Argument with features of nodes -> the rows of the edges by which they are gathered.
        sizes: Numbers of nodes that row 0 and row 1 of the edges point to.
        is_square: Whether sources and targets are one set of nodes to the code.
        autocast: Device type and dtype of autocast; None without it.
    """

    key: tuple[Any, ...]
    roles: dict[str, Any]
    lifted: dict[str, set[int]]
    sizes: tuple[int, int]
    is_square: bool
    autocast: tuple[str, torch.dtype] | None


class Signature(NamedTuple):
    """What a layer's methods ask for: arguments that are lifted (with the row of the edges), others, and those of edges
    that update asks for.
    """

    lifted: tuple[tuple[str, int], ...]
    direct: frozenset[str]
    late: tuple[str, ...]


_signatures: weakref.WeakKeyDictionary[type, dict[Any, Signature]] = weakref.WeakKeyDictionary()


def signature_of(layer: Any, method: str) -> Signature:
    table = _signatures.get(type(layer))
    if table is None:
        table = _signatures[type(layer)] = {}
    key = method, layer.flow
    known = table.get(key)
    if known is None:
        own = layer.__dict__
        wanted = own["_user_args"] if method == "propagate" else own["_edge_user_args"]
        inspector = own["inspector"]
        names = {name for step in STEPS[method] for name in inspector.get_param_names(step)} - _SPECIAL
        late = [n for n in inspector.get_param_names("update")] if method == "propagate" else []
        late = [n for n in late if n[-2:] in ("_i", "_j") and n != "size_i"]
        row_j = 0 if layer.flow == "source_to_target" else 1
        lifted = [(n[:-2], row_j if n.endswith("_j") else 1 - row_j) for n in wanted if n[-2:] in ("_i", "_j")]
        direct = {n for n in names if n[-2:] not in ("_i", "_j")}
        known = table[key] = Signature(tuple(lifted), frozenset(direct), tuple(late))
    return known


_TENSORS = frozenset({Tensor, torch.nn.Parameter, EdgeValue})
_NUMBERS = frozenset({type(None), bool, int, float, str, torch.dtype})
_INTEGERS = frozenset({type(None), int})


def facts_of(layer: Any, call: Call) -> tuple[Any, ...] | None:
    """Return what the kind of a call and the numbers of its rows follow from; None for arguments that are rare."""
    edge_index, size = call.edge_index, call.size
    device = edge_index.device
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    facts: list[Any] = [call.method, layer.flow, layer.node_dim, edge_index.shape, device, autocast]
    if size is not None:
        if not _INTEGERS.issuperset(map(type, size)):
            return None
        facts += size
    for name, value in call.kwargs.items():
        kind = type(value)
        if kind in _TENSORS:
            facts += name, kind, value.shape, value.dtype
        elif kind in _NUMBERS:
            facts += name, kind, value
        elif kind is tuple or kind is list:
            facts += name, kind, len(value)
            for part in value:
                if type(part) in _TENSORS:
                    facts += type(part), part.shape, part.dtype
                elif part is None:
                    facts.append(None)
                else:
                    return None
        else:
            return None
    return tuple(facts)


def spec_of(layer: Any, call: Call, reasons: list[str]) -> Spec | None:
    """Return the kind of a call; None, having added to `reasons`, if its arguments are not understood."""
    signature, kwargs = signature_of(layer, call.method), call.kwargs
    node_names: dict[str, set[int]] = {}
    is_square = False
    try:
        sizes: list[int | None] = [None, None] if call.size is None else as_sizes(call.size)
        declared = tuple(n is not None for n in sizes)
        for name, row in signature.lifted:
            data = kwargs.get(name)
            if isinstance(data, (tuple, list)):
                for k, part in ((1 - row, data[1 - row]), (row, data[row])):
                    if isinstance(part, Tensor):
                        # Against the edges, PyG's generated code gathers the first of a pair along the second row.
                        is_square |= layer.flow != "source_to_target"
                        _agree(sizes, k, part.size(layer.node_dim))
            elif isinstance(data, Tensor):
                _agree(sizes, row, data.size(layer.node_dim))
                is_square |= bool(node_names.get(name, {row}) - {row})
            node_names.setdefault(name, set()).add(row)
    except (TypeError, ValueError, IndexError):
        reasons.append("features and sizes of nodes do not agree")
        return None
    if sizes[0] is None and sizes[1] is None:
        reasons.append("the number of nodes is not known")
        return None
    is_square |= None in sizes
    first, second = (n if n is not None else m for n, m in (sizes, sizes[::-1]))
    assert first is not None and second is not None
    if is_square and first != second:
        reasons.append("features and sizes of nodes do not agree")
        return None
    targets = second if layer.flow == "source_to_target" else first
    counts = call.edge_index.size(1), targets
    roles: dict[str, Any] = {}
    device = call.edge_index.device.type
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    key: list[Any] = [call.method, layer.flow, layer.node_dim, declared, is_square, device, autocast]
    for name, value in kwargs.items():
        if name in node_names or name in signature.direct:
            roles[name], part = _role(value, counts, layer.node_dim if name in node_names else None)
            key.append((name, part))
            if roles[name] is _UNKNOWN:
                reasons.append(f"'{name}' is a {type(value).__name__}")
    return None if reasons else Spec(tuple(key), roles, node_names, (first, second), is_square, autocast)


def _agree(sizes: list[int | None], row: int, size: int) -> None:
    if sizes[row] is None:
        sizes[row] = size
    elif sizes[row] != size:
        raise ValueError


_UNKNOWN = object()


def _role(value: Any, counts: tuple[int, int], node_dim: int | None) -> tuple[Any, Any]:
    """Return what the rows of an argument are, "E", "D", "1" or the dimension of nodes, and what its key is."""
    if isinstance(value, Tensor):
        if type(value) not in _TENSORS:
            return _UNKNOWN, None
        shape, is_parameter = value.shape, type(value) is torch.nn.Parameter
        if node_dim is not None:
            axis = node_dim % len(shape)
            return axis, (axis, shape[:axis], shape[axis + 1 :], value.dtype, is_parameter)
        size = shape[0] if shape else -1
        role = "E" if size == counts[0] else "D" if size == counts[1] else "1"
        return role, (role, shape if role == "1" else shape[1:], value.dtype, is_parameter)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return None, (type(value), value)
    if isinstance(value, (tuple, list)):
        parts = [_role(part, counts, node_dim) for part in value]
        if any(role is _UNKNOWN for role, _ in parts):
            return _UNKNOWN, None
        return [role for role, _ in parts], (type(value), *(part for _, part in parts))
    return _UNKNOWN, None
