"""What a layer computes from its edges alone, such as self-loops, degrees and norms: once for edges that stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pyg_dfgnn.frontend.functional import Effects, name_of, value_of
from pyg_dfgnn.frontend.importer import CONSTANTS, FILLS, REDUCTIONS, VIEWS, Ends, expression_of

_CHECKS = ("_assert", "sym_size")
_COMPUTED = ("item", "add", "sym_sum")
"""Functions that give sizes computed from numbers of a tensor."""
_MOST_ENTRIES = 4


def derived_nodes(graph: Graph, effects: Effects, ends: dict[Node, Ends]) -> set[Node]:
    """Return what depends on edges, their weights without a gradient and sizes alone, if any of it is worth keeping."""
    roots = _roots(graph) - effects.pinned
    members = _members(graph, effects, roots, ends, set())
    if not effects.pinned <= members:
        members = _members(graph, effects, roots, ends, effects.pinned)
    cheap = {x for x in members if x in ends or _is_constant(x) or not isinstance(value_of(x), Tensor)}
    worthy = [x for x in members - cheap if any(user not in members or user in cheap for user in x.users)]
    # For the largest id the host waits.
    worthy += [x for x in cheap if isinstance(value_of(x), torch.SymInt) and name_of(x) in _COMPUTED]
    group = set[Node]()
    # Edits in place and checks have no readers.
    waiting = [*worthy, *(x for x in members if worthy and (x in effects.pinned or name_of(x).startswith("_assert")))]
    while waiting:
        node = waiting.pop()
        if node in members and node not in group:
            group.add(node)
            waiting += node.all_input_nodes
    return group


def _roots(graph: Graph) -> set[Node]:
    """Return the arguments that are edges, numbers for each edge without a gradient, and sizes."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    roots, counts = set[Node](), set[Any]()
    for node in arguments:
        value = value_of(node)
        is_list = isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
        if isinstance(value, torch.SymInt):
            roots.add(node)
        elif is_list and expression_of(value.shape[0]) == 2:
            roots.add(node)
            counts.add(expression_of(value.shape[1]))
    for node in arguments:
        value = value_of(node)
        is_weight = isinstance(value, Tensor) and 0 < value.dim() < 3 and not value.requires_grad
        if is_weight and expression_of(value.shape[0]) in counts:
            roots.add(node)
    return roots


def _is_constant(node: Node) -> bool:
    return name_of(node) in CONSTANTS or name_of(node) in FILLS


def _members(graph: Graph, effects: Effects, roots: set[Node], ends: dict[Node, Ends], left: set[Node]) -> set[Node]:
    members: set[Node] = set()
    for node in graph.nodes:
        is_check = any(part in name_of(node) for part in _CHECKS)
        is_pure = node not in effects.impure or is_check
        inputs = node.all_input_nodes
        if not node.op.startswith("call_") or not is_pure or node in left or not inputs:
            continue
        if all(x in members or x in roots for x in inputs) and not _is_count(node):
            members.add(node)
    return members


def _is_count(node: Node) -> bool:
    """Return whether a node counts the edges of means, which kernels know."""
    if name_of(node) not in REDUCTIONS or not any(
        _is_constant(x) and "ones" in name_of(x) for x in node.all_input_nodes
    ):
        return False
    readers = list(node.users)
    while readers and all(name_of(x) in VIEWS or name_of(x).startswith("clamp") for x in readers):
        readers = [user for x in readers for user in x.users]
    return bool(readers) and all(name_of(x) in ("truediv", "div") and len(x.all_input_nodes) == 2 for x in readers)


class EdgeDerived:
    """A function of edges whose results are kept for as long as these live and nobody edits them.

    Args:
        compute: The function: tensors and numbers to a list of tensors and numbers.
    """

    def __init__(self, compute: Callable[..., Sequence[Any]]) -> None:
        self.compute = compute
        self._entries: list[tuple[list[Any], list[int], Sequence[Any], list[int]]] = []

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Return the results, from an earlier call with these arguments if there was one."""
        for refs, versions, results, made in list(self._entries):
            if all([_is_alike(ref, arg) for ref, arg in zip(refs, args)]):
                if versions == _versions(args) and made == _versions(results):
                    return results
        return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Sequence[Any]:
        results = self.compute(*args)
        tensors = [x for x in (*args, *results) if isinstance(x, Tensor)]
        if not any(tensor.is_inference() for tensor in tensors):
            refs = [weakref.ref(arg) if isinstance(arg, Tensor) else arg for arg in args]
            alive = [
                entry for entry in self._entries if all(type(r) is not weakref.ref or r() is not None for r in entry[0])
            ]
            self._entries = [*alive[1 - _MOST_ENTRIES :], (refs, _versions(args), results, _versions(results))]
        return results


def _is_alike(ref: Any, arg: Any) -> bool:
    return ref() is arg if type(ref) is weakref.ref else bool(ref == arg)


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


def written_group(graph: Graph, group: set[Node]) -> tuple[EdgeDerived, list[Node], list[Node]]:
    """Return what computes a group, the nodes that it is called with, and those that it returns."""
    own, copies = Graph(), dict[Node, Node]()
    arguments = [x for x in graph.nodes if x not in group and any(user in group for user in x.users)]
    outputs = [x for x in graph.nodes if x in group and any(user not in group for user in x.users)]
    for k, node in enumerate(arguments):
        copies[node] = own.placeholder(f"argument_{k}")
    for node in graph.nodes:
        if node in group:
            copies[node] = own.node_copy(node, lambda x: copies[x])
    own.output([copies[node] for node in outputs])
    return EdgeDerived(GraphModule({}, own).forward), arguments, outputs
