"""The backend of TorchDynamo: a captured graph becomes one callable whose regions on edges are programs."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.frontend.derived import written_group
from pyg_dfgnn.frontend.functional import memory_of, name_of, value_of
from pyg_dfgnn.frontend.importer import WIDE, Draft, expression_of, line_of
from pyg_dfgnn.frontend.regions import Partition
from pyg_dfgnn.frontend.run import Place, Region
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.ir.domains import One
from pyg_dfgnn.ir.torch_front import TraceError, tidy

_logger = logging.getLogger("pyg_dfgnn")


class Captured(NamedTuple):
    """Result of compiling one captured graph.

    Attributes:
        regions: Its programs.
        counts: Numbers of gathers and reductions by the ends of edges: all but those that depend on the edges alone,
            and those in programs.
        reasons: What of the edges stays torch's, with the line that asks for it.
        nodes: Number of nodes of the graph.
        derived: Number of nodes that depend on the edges alone, which are computed once for edges that stay.
        is_of_one: Whether it is for calls with no edge or one, in which no sizes can be told apart.
        name: Of the compiler.
    """

    regions: tuple[Region, ...]
    counts: tuple[int, int]
    reasons: tuple[str, ...]
    nodes: int
    derived: int = 0
    is_of_one: bool = False
    name: str = ""


watchers: list[Callable[[Captured], None]] = []
"""Called with what became of each graph that is captured."""


class _PartOfThread(threading.local):
    """The call of this thread.

    Attributes:
        edges: Its edges of a part; None without.
    """

    edges: PartitionedEdges | None = None


class Compiler:
    """A backend of TorchDynamo: runs programs for the regions on edges of a graph, and torch's operators for all else.

    Args:
        name: What the graphs are of, in what users are told.
        on_parts: Whether they are called with edges of parts of graphs, which TorchDynamo is to see as plain tensors.

    Attributes:
        breaks: Lines of users' code at which TorchDynamo has ended a graph.
        graphs: What became of the graphs.
        layer: The layer that is being called.
        edges: The edges among the arguments of the call.
        of_thread: Edges of a part in this thread's call, which the graph gets in the place of the plain ones.
        turn: Number of its call.
        visited: Number of the last call that was a visit of edges that are not measured.
    """

    def __init__(self, name: str, on_parts: bool = False) -> None:
        self.name, self.on_parts = name, on_parts
        self.of_thread = _PartOfThread()
        self.breaks: list[str] = []
        self.graphs: list[Captured] = []
        self.layer: Module | None = None
        self.edges: Tensor | None = None
        self.turn, self.visited = 0, -1

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph."""
        try:
            captured, module = compiled(module, self.name, derives=not self.on_parts)
        except Exception as error:
            # A user's layer runs as it would have without us.
            _logger.warning("a captured graph of %s stays PyTorch's (%s: %s)", self.name, type(error).__name__, error)
            reason = f"{type(error).__name__}: {error}"
            captured = Captured((), (0, 0), (reason,), len(module.graph.nodes), name=self.name)
        for region in captured.regions:
            region.caller = self
        self.graphs.append(captured)
        for watcher in watchers:
            watcher(captured)
        return self._with_edges(module.forward) if self.on_parts else module.forward

    def _with_edges(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            edges = self.of_thread.edges
            if edges is None:
                raise UnsupportedError(["its captured forward is called by itself"], "the partitioned graph")
            plain = edges.part.edge_index
            return run(*(edges if each is plain else each for each in args))

        return call


MakeRegion = Callable[[Region], Callable[..., Any]]
"""Returns what is called for a region; may raise a refusal."""


def compiled(
    module: GraphModule, name: str, make: MakeRegion | None = None, *, derives: bool = True
) -> tuple[Captured, GraphModule]:
    """Return what becomes of a graph, and the graph in which each region is one call.

    Args:
        module: The graph.
        name: What it is of.
        make: What is called for a region; by default the region.
        derives: Whether what depends on the edges alone is kept.
    """
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    tensors = [value for value in map(value_of, graph.nodes) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    is_cast = torch.is_autocast_enabled(device.type)
    autocast = (device.type, torch.get_autocast_dtype(device.type)) if is_cast else None
    partition = Partition(graph, autocast, device, derives)
    regions: dict[Draft, tuple[Region, list[Node]]] = {}
    calls: dict[Draft, Callable[..., Any]] = {}
    while True:
        regions.clear()
        try:
            for draft in partition.outputs:
                current = draft
                regions[draft] = _region(partition, draft, name)
                calls[draft] = regions[draft][0] if make is None else make(regions[draft][0])
            break
        except TraceError as refusal:
            partition.refuse(current, "; ".join(refusal.reasons))
    count = sum(node.op not in ("placeholder", "output") for node in graph.nodes)
    programs, reasons = tuple(region for region, _ in regions.values()), tuple(partition.against())
    is_of_one = any(_is_of_one(value_of(node)) for node in graph.nodes if node.op == "placeholder")
    captured = Captured(programs, partition.counts(), reasons, count, len(partition.derived), is_of_one, name)
    if not regions and not partition.derived and not (derives and partition.is_less):
        return captured, module
    return captured, GraphModule(module, _written(partition, regions, calls))


def _is_of_one(value: Any) -> bool:
    """Return whether a tensor looks like edges whose number is fixed."""
    is_list = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    return is_list and isinstance(expression_of(value.shape[1]), int)


def _region(partition: Partition, draft: Draft, name: str) -> tuple[Region, list[Node]]:
    """Return a region, and the nodes that it is called with.

    Raises:
        Refusal: Its program has no common dtype.
    """
    tracer, results, outputs = draft.tracer, list[tuple[torch.dtype, int]](), dict[str, int]()
    for k, node in enumerate(partition.outputs[draft]):
        symbol = draft.symbols[node]
        outputs[str(k)] = tracer.emit("gather", tracer.full(symbol), attrs=(symbol.rows or One,))
        results.append((value_of(node).dtype, symbol.lead))
    program = tidy(tracer.builder.build(name, outputs))
    arguments = partition.needed(draft)
    inputs = {name: draft.sources[name] for name in program.features}
    floats = [value for value in (value_of(node) for node, _ in inputs.values()) if value.is_floating_point()]
    # A single number, such as one of NumPy, takes the dtype of what has dimensions.
    kinds = {value.dtype for value in floats if value.dim()} or {value.dtype for value in floats}
    if not kinds:
        raise TraceError("no features are read on edges")
    dtype = reduce(torch.promote_types, kinds)
    if (
        partition.autocast is None
        and tracer.widest is not None
        and torch.promote_types(tracer.widest, dtype) is not dtype
    ):
        raise TraceError(f"{tracer.widest} is computed with, of inputs of {dtype}")
    for node in dict.fromkeys(node for node, _ in inputs.values()):
        if node not in arguments:
            arguments.append(node)
    target = draft.mesh.target
    sizes = [_size(partition, draft, arguments, draft.mesh.nodes[row]) for row in (1 - target, target)]
    types = None
    if tracer.types is not None:
        node, _ = draft.sources[tracer.types[0]]
        arguments += [node] if node not in arguments else []
        types = Place(arguments.index(node), 0), tracer.types[1]
    for node in partition.outputs[draft]:
        _cuts(draft, node, arguments)
    places = {name: Place(arguments.index(node), axis) for name, (node, axis) in inputs.items()}
    by_torch = _by_torch(partition, draft, arguments)
    region = Region(
        program,
        arguments.index(draft.edges),
        places,
        (sizes[0], sizes[1]),
        target == 0,
        types,
        dtype,
        results,
        "" if partition.autocast is None else partition.autocast[0],
        by_torch,
        line_of(next((node for node in partition.kept[draft] if name_of(node) in WIDE), partition.outputs[draft][0])),
    )
    return region, arguments


def _size(partition: Partition, draft: Draft, arguments: list[Node], size: Any) -> Place:
    """Return where a call has a number of nodes, as an argument that may be added.

    Raises:
        Refusal: Nothing that is there before the region has it.
    """
    others = [node for node in partition.graph.nodes if partition.after.get(node, draft.level + 1) <= draft.level]
    for node in (*arguments, *others):
        value = value_of(node)
        if partition.is_kept(node) or (node in partition.derived and partition.derived.issuperset(node.users)):
            continue
        axis = None
        if isinstance(value, Tensor):
            axes = [axis for axis, each in enumerate(value.shape) if expression_of(each) == size]
            if not axes:
                continue
            axis = axes[0]
        elif not isinstance(value, torch.SymInt) or expression_of(value) != size:
            continue
        if node not in arguments:
            arguments.append(node)
        return Place(arguments.index(node), axis)
    raise TraceError("the number of nodes is not known before the edges are read")


def _cuts(draft: Draft, output: Node, arguments: Sequence[Node]) -> list[tuple[int, Node]]:
    """Return the dimensions of an output that end before the last node, with the arguments that are their sizes.

    Raises:
        Refusal: No argument is such a size.
    """
    cuts = []
    for axis, size in enumerate(map(expression_of, value_of(output).shape)):
        if size in draft.mesh.largest:
            known = [node for node in arguments if isinstance(value_of(node), torch.SymInt)]
            known = [node for node in known if expression_of(value_of(node)) == size]
            if not known:
                raise TraceError("a number of nodes that is computed from ids")
            cuts.append((axis, known[0]))
    return cuts


def _by_torch(partition: Partition, draft: Draft, arguments: Sequence[Node]) -> Callable[..., Any]:
    """Return the nodes of a region as a function of its arguments."""
    graph, copies = Graph(), dict[Node, Node]()
    for k, node in enumerate(arguments):
        copies[node] = graph.placeholder(f"argument_{k}")

    def copy(node: Node) -> Node:
        if node not in copies:
            for operand in node.all_input_nodes:
                copy(operand)
            copies[node] = graph.node_copy(node, lambda x: copies[x])
        return copies[node]

    graph.output([copy(node) for node in partition.outputs[draft]])
    return GraphModule({}, graph).forward


def _written(
    partition: Partition, regions: dict[Draft, tuple[Region, list[Node]]], calls: dict[Draft, Callable[..., Any]]
) -> Graph:
    """Return the graph in which each region is one call."""
    graph, copies, done = Graph(), dict[Node, Any](), set[Draft]()
    groups = [written_group(partition.graph, group, partition.ends) for group in partition.groups]
    views = set[Node]().union(*(group.views for group in groups))

    def copy(node: Node) -> None:
        if node in copies:
            return
        if node in partition.derived and node not in views:
            derive()
            return
        if partition.is_kept(node) and node not in partition.torch:
            place(partition.place[node])
            return
        previous = partition.effects.before.get(node)
        for operand in (*([previous] if previous is not None else ()), *node.all_input_nodes):
            copy(operand)
        copies[node] = graph.node_copy(node, lambda x: copies[x])

    def derive() -> None:
        for group in groups:
            for node in group.arguments:
                copy(node)
            arguments = tuple(copies[node] for node in group.arguments)
            called = graph.call_function(_named(group.compute, "of_edges"), arguments)
            for k, node in enumerate(group.outputs):
                copies[node] = graph.call_function(operator.getitem, (called, k))
        # What only the groups read has no copy.
        for node in partition.derived - views:
            copies.setdefault(node, None)

    def place(draft: Draft) -> None:
        if draft in done:
            return
        done.add(draft)
        _, arguments = regions[draft]
        for node in arguments:
            copy(node)
        call = _named(calls[draft], f"region_{len(done)}")
        called = graph.call_function(call, tuple(copies[node] for node in arguments))
        for k, node in enumerate(partition.outputs[draft]):
            copies[node] = graph.call_function(operator.getitem, (called, k))
            for axis, size in _cuts(draft, node, arguments):
                copies[node] = graph.call_method("narrow", (copies[node], axis, 0, copies[size]))

    for node in partition.graph.nodes:
        if node.op == "output":
            # What is kept must not be edited by who gets it.
            for kept in [each for each in node.all_input_nodes if _is_kept(each, partition.derived)]:
                copy(kept)
                copies[kept] = graph.call_method("clone", (copies[kept],))
        if node.op == "placeholder" or node in partition.torch or node in partition.effects.before:
            copy(node)
    graph.lint()
    return graph


def _is_kept(node: Node, derived: set[Node]) -> bool:
    """Return whether a tensor is, or shares memory with, one that is kept for the edges."""
    if not isinstance(value_of(node), Tensor):
        return False
    kept = {key for each in derived for key in memory_of(each)}
    return any(key in kept for key in memory_of(node))


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that a graph can call by a name."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call
