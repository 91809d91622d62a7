"""Gathers by an end of the edges, however they are written, as rows taken along one dimension."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pyg_dfgnn.frontend.functional import name_of, value_of
from pyg_dfgnn.frontend.importer import VIEWS, Ends, expression_of

_EVERY = slice(None)


def unify_gathers(graph: Graph, ends: dict[Node, Ends], pinned: set[Node]) -> None:
    """Write gathers of `x[ids, :3]`, `x[:, ids]`, `x.gather(0, ids)`, `embedding(ids, x)` and `x[edges]` in one form.

    Args:
        graph: The graph, in which nothing is edited in place but what is pinned.
        ends: Nodes that are ids of an end of edges; those of the pairs of `x[edges]` are added.
        pinned: Nodes that keep their place among edits.
    """
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or pinned.intersection((node, *node.all_input_nodes)):
            continue
        name = name_of(node)
        if name == "getitem" and len(node.args) == 2 and isinstance(value_of(node.args[0]), Tensor):
            _unify_index(graph, node, ends)
        elif name == "gather":
            _unify_gather(node, ends)
        elif name == "embedding":
            _unify_embedding(node, ends)


def _take(node: Node, x: Node, dim: int, ids: Node) -> None:
    """Let a node take rows of x along a dimension by ids."""
    node.op, node.target, node.kwargs = "call_function", operator.getitem, {}
    node.args = x, ids if dim == 0 else (*(_EVERY,) * dim, ids)


def _unify_index(graph: Graph, node: Node, ends: dict[Node, Ends]) -> None:
    x, key = node.args
    if not isinstance(x, Node) or x in ends:
        return
    if isinstance(key, Node):
        _unify_pair(graph, node, x, key, ends)
        return
    keys: tuple[Any, ...] = key if isinstance(key, tuple) else ()
    places = [place for place, k in enumerate(keys) if isinstance(k, Node)]
    if len(places) != 1 or keys[places[0]] not in ends or value_of(keys[places[0]]).dim() != 1:
        return
    if any(k is not None and k is not Ellipsis and type(k) not in (int, slice, Node) for k in keys):
        return
    if any(isinstance(bound, Node) for k in keys if isinstance(k, slice) for bound in (k.start, k.stop, k.step)):
        return
    ids, value = keys[places[0]], value_of(x)
    rest = tuple(_EVERY if isinstance(k, Node) else k for k in keys)
    if Ellipsis in rest:
        at, taken = rest.index(Ellipsis), sum(k is not None and k is not Ellipsis for k in rest)
        places[0] += (value.dim() - taken - 1) * (places[0] > at)
        rest = (*rest[:at], *(_EVERY,) * (value.dim() - taken), *rest[at + 1 :])
    # Numbers take a dimension away.
    dim = sum(not isinstance(k, int) for k in rest[: places[0]])
    if any(k != _EVERY for k in rest):
        with graph.inserting_before(node):
            part = graph.call_function(operator.getitem, (x, rest))
        part.meta["example_value"], part.stack_trace = value[rest], node.stack_trace
        x = part
    _take(node, x, dim, ids)


def _unify_pair(graph: Graph, node: Node, x: Node, edges: Node, ends: dict[Node, Ends]) -> None:
    """Let what reads the rows of both ends, `x[edges]`, read those of one."""
    rows = {end.row: ids for ids, end in ends.items() if end.edges is edges and value_of(ids).dim() == 1}
    if not rows:
        return
    parts: list[tuple[Node, Any]] = []
    for user in node.users:
        if name_of(user) == "unbind" and len(user.args) == 1 and not user.kwargs:
            parts += [(part, part.args[1]) for part in user.users]
        elif user.target is operator.getitem and user.args[0] is node:
            parts.append((user, user.args[1]))
        else:
            return
    if any(part.target is not operator.getitem or type(row) is not int or not -2 <= row < 2 for part, row in parts):
        return
    for part, row in parts:
        ids = rows.get(row % 2)
        if ids is None or ids not in _before(part):
            with graph.inserting_before(part):
                ids = graph.call_function(operator.getitem, (edges, row % 2))
            ids.meta["example_value"], ids.stack_trace = value_of(edges)[row % 2], part.stack_trace
            ends[ids] = Ends(edges, row % 2)
        _take(part, x, 0, ids)


def _before(node: Node) -> set[Node]:
    """Return the nodes before a node of its graph."""
    found = set[Node]()
    for each in node.graph.nodes:
        if each is node:
            break
        found.add(each)
    return found


def _unify_gather(node: Node, ends: dict[Node, Ends]) -> None:
    bound: dict[str, Any] = dict(zip(("input", "dim", "index"), node.args)) | dict(node.kwargs)
    x, dim, index = bound.get("input"), bound.get("dim"), bound.get("index")
    if not isinstance(x, Node) or x in ends or type(dim) is not int or not isinstance(index, Node):
        return
    ids, value, like = _repeated(index, ends), value_of(x), value_of(index)
    if ids is None or bound.keys() - {"input", "dim", "index"} or value.dim() != like.dim():
        return
    axis, dim = ids[1], dim % value.dim()
    sizes = [(expression_of(a), expression_of(b)) for k, (a, b) in enumerate(zip(value.shape, like.shape)) if k != dim]
    if axis == dim and all(a == b for a, b in sizes):
        _take(node, x, dim, ids[0])


def _repeated(node: Node, ends: dict[Node, Ends]) -> tuple[Node, int] | None:
    """Return the ids that a node repeats along its other dimensions, and their dimension; None if it does not."""
    if node not in ends:
        return None
    value = value_of(node)
    if value.dim() == 1:
        return node, 0
    before: Any = node.args[0]
    found = _repeated(before, ends) if name_of(node) in VIEWS else None
    if found is None:
        return None
    if name_of(node) in ("expand", "expand_as"):
        return found[0], found[1] + value.dim() - value_of(before).dim()
    count = expression_of(value_of(found[0]).shape[0])
    sizes = [expression_of(size) for size in value.shape]
    if any(expression_of(size) not in (1, count) for size in (*value_of(before).shape, *sizes)) or count == 1:
        return None
    return (found[0], sizes.index(count)) if sizes.count(count) == 1 else None


def _unify_embedding(node: Node, ends: dict[Node, Ends]) -> None:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    if node.target is not torch.nn.functional.embedding:
        return
    bound: dict[str, Any] = dict(zip(names, node.args)) | dict(node.kwargs)
    ids, x = bound.get("input"), bound.get("weight")
    is_plain = all(bound.get(name) in (None, False) for name in names if name not in ("input", "weight", "norm_type"))
    if is_plain and ids in ends and isinstance(x, Node) and value_of(ids).dim() == 1:
        _take(node, x, 0, ids)
