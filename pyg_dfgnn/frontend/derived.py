"""What a layer computes from its edges alone, such as self-loops, degrees and norms: once for edges that stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pyg_dfgnn.frontend.functional import Effects, memory_of, name_of, value_of
from pyg_dfgnn.frontend.importer import CONSTANTS, FILLS, REDUCTIONS, VIEWS, Ends, expression_of
from pyg_dfgnn.graph.cache import GraphCache
from pyg_dfgnn.graph.derived import Derived

_CHECKS = ("_assert", "sym_size")
_COMPUTED = ("item", "add", "sym_sum")
"""Functions that give sizes computed from numbers of a tensor."""
_MOST_ENTRIES = 4
_RESULTS = "results"


def derived_nodes(graph: Graph, effects: Effects, ends: dict[Node, Ends]) -> set[Node]:
    """Return what depends on edges, their weights without a gradient and sizes alone, if any of it is worth keeping."""
    roots = _roots(graph) - effects.pinned
    members = _members(graph, effects, roots, ends, set())
    if not effects.pinned <= members:
        members = _members(graph, effects, roots, ends, effects.pinned)
    cheap = {x for x in members if x in ends or _is_constant(x) or not isinstance(value_of(x), Tensor)}
    cheap |= _views(members, ends)
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


def _views(group: set[Node], ends: dict[Node, Ends]) -> set[Node]:
    """Return what is made again in each call: ids, and views of the arguments, which would keep these alive."""
    memory = {key for x in group for y in x.all_input_nodes if y.op == "placeholder" for key in memory_of(y)}
    own = {x for x in group if memory.intersection(memory_of(x))}
    return own | {x for x in group if x in ends or (name_of(x) == "unbind" and all(user in ends for user in x.users))}


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


class _Capture(threading.local):
    """The CUDA graph that this thread captures of edges that stay.

    Attributes:
        read: What it reads of what is kept; None outside of such a capture.
    """

    read: list[Tensor] | None = None


_capture = _Capture()


@contextmanager
def edges_stay(do_they: bool) -> Iterator[list[Tensor]]:
    """Say whether the edges stay of what this thread captures in the block: no replay follows an edit of them.

    Yields:
        Edges of which the capture reads what is kept, and that: to live as long, and not to be edited.
    """
    before, read = _capture.read, list[Tensor]()
    _capture.read = read if do_they else None
    try:
        yield read
    finally:
        _capture.read = before


class EdgeDerived:
    """A function of edges whose results are kept for as long as these live and nobody edits them.

    Args:
        compute: The function: tensors and numbers to a list of tensors and numbers.
    """

    def __init__(self, compute: Callable[..., Sequence[Any]]) -> None:
        self.compute = compute
        self._kept: GraphCache[Derived] = GraphCache(_MOST_ENTRIES)

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Return the results, from an earlier call with these arguments if there was one."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors or any([tensor.is_inference() for tensor in tensors]):
            return self.compute(*args)
        # Between replays all but edges may be written anew.
        is_captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured and (_capture.read is None or len(tensors) > 1):
            return self.compute(*args)
        key = tuple([id(arg) if isinstance(arg, Tensor) else arg for arg in args])
        versions = [tensor._version for tensor in tensors]
        kept = self._kept.get(key, tensors, versions)
        results, made = ([], []) if kept is None else kept.derived(_RESULTS, lambda: self._made(args))
        if kept is None or made != _states(results):
            if is_captured:
                return self.compute(*args)
            kept = Derived(tensors[0].device)
            results, _ = kept.derived(_RESULTS, lambda: self._made(args))
            self._kept.put(key, tensors, versions, kept)
        if _capture.read is not None:
            _capture.read += [*tensors, *(result for result in results if isinstance(result, Tensor))]
        return results

    def _made(self, args: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        """Return the results, and what shows that nobody has changed them."""
        results = self.compute(*args)
        return results, _states(results)


def _states(values: Sequence[Any]) -> list[Any]:
    return [(value._version, value.requires_grad) for value in values if isinstance(value, Tensor)]


def written_group(
    graph: Graph, group: set[Node], ends: dict[Node, Ends]
) -> tuple[EdgeDerived, list[Node], list[Node], set[Node]]:
    """Return what computes a group, the nodes that it is called with and returns, and those that are made again."""
    views = _views(group, ends)
    own, copies = Graph(), dict[Node, Node]()
    arguments = [x for x in graph.nodes if x not in group and any(user in group for user in x.users)]
    outputs = [x for x in graph.nodes if x in group - views and any(user not in group - views for user in x.users)]
    for k, node in enumerate(arguments):
        copies[node] = own.placeholder(f"argument_{k}")
    for node in graph.nodes:
        if node in group:
            copies[node] = own.node_copy(node, lambda x: copies[x])
    own.output([copies[node] for node in outputs])
    return EdgeDerived(GraphModule({}, own).forward), arguments, outputs, views
