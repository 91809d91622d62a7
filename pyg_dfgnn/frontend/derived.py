"""Values of a layer from its edges alone, such as self-loops, degrees and norms: computed once for edges that stay."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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


def derived_nodes(graph: Graph, effects: Effects, ends: dict[Node, Ends]) -> list[set[Node]]:
    """Return what depends on edges and sizes alone, and then what also reads weights of edges without a gradient.

    Either is left out where nothing of it is worth keeping. Selections by masks of the first become selections by
    positions, for which the host does not wait.
    """
    edges, weights = _roots(graph)
    if not effects.pinned:
        _find_positions(graph, _members(graph, effects, edges, ends, set()))
    every = _worth_keeping(graph, effects, edges | weights, ends)
    if effects.pinned & every:
        # Edits keep their order.
        return [every]
    first = _worth_keeping(graph, effects, edges, ends) & every
    return [group for group in (first, every - first) if group]


def _worth_keeping(graph: Graph, effects: Effects, roots: set[Node], ends: dict[Node, Ends]) -> set[Node]:
    """Return what depends on roots alone and is more than views and constants, with all that it reads."""
    roots = roots - effects.pinned
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


def _find_positions(graph: Graph, members: set[Node]) -> None:
    """Let rows be selected by the positions of a mask of the edges, which are found once for edges that stay."""
    found: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.target is not operator.getitem or len(node.args) != 2:
            continue
        operand, index = node.args
        parts = index if isinstance(index, tuple) else (index,)
        nodes = [x for x in parts if isinstance(x, Node)]
        if len(nodes) != 1 or any(not isinstance(x, (slice, Node)) for x in parts):
            continue
        mask = nodes[0]
        if mask not in members or not _is_mask(mask):
            continue
        if mask not in found:
            with graph.inserting_after(mask):
                found[mask] = graph.call_function(_positions, (mask,))
            like = value_of(node)
            size = like.shape[parts.index(mask)]
            found[mask].meta["example_value"] = like.new_empty((size,), dtype=torch.int64)
            found[mask].stack_trace = mask.stack_trace
        places = tuple(found[mask] if x is mask else x for x in parts)
        node.args = operand, places if isinstance(index, tuple) else places[0]


def _is_mask(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() == 1


def _positions(mask: Tensor) -> Tensor:
    """Return where a mask is set."""
    return mask.nonzero().view(-1)


def _roots(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Return the arguments that are edges and sizes, and those that are numbers of each edge without a gradient."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    roots, weights, counts = set[Node](), set[Node](), set[Any]()
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
            weights.add(node)
    return roots, weights


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


class _EdgeCapture(threading.local):
    """The CUDA graph that this thread captures of edges that stay.

    Attributes:
        read: What it reads of what is kept; None outside of such a capture.
    """

    read: list[Tensor] | None = None


_capture = _EdgeCapture()


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
        most: Results that are kept.
        are_fixed: Whether any CUDA graph may read what is kept of edges alone, as kernels read their graph.
    """

    def __init__(
        self, compute: Callable[..., Sequence[Any]], most: int = _MOST_ENTRIES, are_fixed: bool = False
    ) -> None:
        self.compute, self.are_fixed = compute, are_fixed
        self._kept: GraphCache[Derived] = GraphCache(most)

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Return the results, from an earlier call with these arguments if there was one."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors or any([tensor.is_inference() for tensor in tensors]):
            return self.compute(*args)
        # Between replays all but edges may be written anew.
        is_captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured and (len(tensors) > 1 or (_capture.read is None and not self.are_fixed)):
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


class EdgeFunction(NamedTuple):
    """Function that computes the nodes of a graph that depend on the edges alone.

    Attributes:
        compute: The function.
        arguments: The nodes that it is called with.
        outputs: Those that it returns.
        views: Those of the group that are made again in each call.
    """

    compute: EdgeDerived
    arguments: list[Node]
    outputs: list[Node]
    views: set[Node]


def written_group(graph: Graph, group: set[Node], ends: dict[Node, Ends]) -> EdgeFunction:
    """Return what computes the nodes of a group."""
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
    return EdgeFunction(EdgeDerived(GraphModule({}, own).forward), arguments, outputs, views)
