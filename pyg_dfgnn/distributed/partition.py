"""One graph whose nodes are spread over processes, for graphs that exceed one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.errors import as_integer, check_range, check_shape
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.graph.forms import check_edge_index


@dataclass(frozen=True)
class PartitionedGraph:
    """A process's part of a graph: a range of nodes with all their in-edges.

    Sources are the own nodes, followed by the halo: the remote nodes with an edge to an own node. Own nodes thus have
    the same id as source and as target, which the self-loops of PyG's convs on a pair of node sets need. Before a layer
    :meth:`exchange` fetches the halo's features. It moves the input of the layer, F values per halo node, and each
    process projects its halo itself; projected keys and values would be 2HC values for dot-product attention.

    Of a relation between two node types, sources and targets are ranges of two types.

    Attributes:
        group: Processes of the graph.
        bounds: Process r owns the nodes `bounds[r]` to `bounds[r + 1]` (excluded), which are targets.
        source_bounds: The same of the sources.
        edge_index: Own in-edges [2, E_own] on `group.device`, row 0 sources (own, then halo), row 1 own targets.
        edge_ids: Positions of the own edges in the edges of the whole graph, int64 [E_own].
        num_halo: Number of remote sources.
        send_index: Own sources that other processes need, int64, by receiving process.
        send_counts: Number of rows sent to each process.
        receive_counts: Number of rows received from each process.
        compiles_alike: Whether captured code is the same on all processes: for sizes of 0 and 1 it is other code.
        kept: What is computed once for the part, by name.
    """

    group: Group
    bounds: list[int]
    source_bounds: list[int]
    edge_index: Tensor
    edge_ids: Tensor
    num_halo: int
    send_index: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    compiles_alike: bool
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> slice:
        """Own nodes in the whole graph."""
        return slice(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    @property
    def num_nodes(self) -> int:
        """Number of own nodes."""
        return self.nodes.stop - self.nodes.start

    @property
    def num_own_sources(self) -> int:
        """Number of own sources."""
        return self.source_bounds[self.group.rank + 1] - self.source_bounds[self.group.rank]

    @property
    def num_sources(self) -> int:
        """Number of own sources and halo nodes."""
        return self.num_own_sources + self.num_halo

    def __repr__(self) -> str:
        place = f"process {self.group.rank} of {self.group.size}"
        return f"PartitionedGraph({self.num_nodes} + {self.num_halo} nodes, {self.edge_index.size(1)} edges, {place})"

    def local(self, nodes: Tensor) -> Tensor:
        """Return the own rows of a tensor `[N, ...]` of the whole graph, on the group's device.

        Raises:
            ValueError: The tensor does not have one row per node of the whole graph.
        """
        check_shape("nodes", nodes, (self.bounds[-1], *nodes.shape[1:]), f"[N={self.bounds[-1]}, ...]")
        return nodes[self.nodes].to(self.group.device)

    def exchange(self, x: Tensor) -> Tensor:
        """Fetch the features of the halo; their gradients flow back to the processes that own the nodes.

        Every process of the group must make the call.

        Args:
            x: Features of the own sources `[num_own_sources, ...]`; of a graph of one node type, of the own nodes.

        Returns:
            Features of own sources and halo, `[num_sources, ...]`.

        Raises:
            ValueError: `x` does not have one row per own source.
        """
        name = "num_nodes" if self.source_bounds == self.bounds else "num_own_sources"
        check_shape("x", x, (self.num_own_sources, *x.shape[1:]), f"[{name}={self.num_own_sources}, ...]")
        return x if self.group.size == 1 else _Exchange.apply(self, x)

    def collect(self, rows: Tensor, reduce: str = "sum") -> Tensor:
        """Return to each process what all have for its nodes: the opposite of :meth:`exchange`, and its gradient.

        Every process of the group must make the call.

        Args:
            rows: Rows of own sources and halo, `[num_sources, ...]`.
            reduce: What is made of the rows of a node: "sum", or "amax" and "amin", which have no gradient.

        Returns:
            Rows of the own sources, `[num_own_sources, ...]`.

        Raises:
            ValueError: There are other numbers of rows.
        """
        check_shape("rows", rows, (self.num_sources, *rows.shape[1:]), f"[num_sources={self.num_sources}, ...]")
        return rows if self.group.size == 1 else _Collect.apply(self, rows, reduce)

    def remote_share(self) -> float:
        """Return the share of the halo in the rows that a layer reads, over all processes, which must make the call."""
        counts = torch.tensor([self.num_halo, self.num_sources], device=self.group.device)
        halo, sources = self.group.sum(counts).tolist()
        return halo / max(sources, 1)

    @property
    def edges(self) -> Tensor:
        """The own edges as a tensor with which any conv runs; see :class:`pyg_dfgnn.graph.ends.PartitionedEdges`."""
        return self.edge_index if self.group.size == 1 else PartitionedEdges.of(self.edge_index, self, is_whole=True)


class _Exchange(torch.autograd.Function):
    """Rows of own nodes to rows of own nodes and halo."""

    @staticmethod
    def forward(ctx: Any, graph: PartitionedGraph, x: Tensor) -> Tensor:
        ctx.graph = graph
        sources = x.new_empty((graph.num_sources, *x.shape[1:]))
        own = graph.num_own_sources
        sources[:own] = x
        rows = x.index_select(0, graph.send_index)
        dist.all_to_all_single(sources[own:], rows, graph.receive_counts, graph.send_counts)
        return sources

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Any]:
        return None, _Collect.apply(ctx.graph, grad)


class _Collect(torch.autograd.Function):
    """Rows of own nodes and halo to rows of own nodes, to which what other processes have is added."""

    @staticmethod
    def forward(ctx: Any, graph: PartitionedGraph, rows: Tensor, reduce: str = "sum") -> Tensor:
        ctx.graph = graph
        parts = rows.new_empty((graph.send_index.numel(), *rows.shape[1:]))
        own = graph.num_own_sources
        dist.all_to_all_single(parts, rows[own:].contiguous(), graph.send_counts, graph.receive_counts)
        kept = rows[:own].clone()
        # No node repeats within the rows of a process, so that sums have one order and equal bits in each run. On
        # billions of numbers index_add_ raised CUDA's "invalid argument".
        for index, part in zip(graph.send_index.split(graph.send_counts), parts.split(graph.send_counts)):
            if reduce == "sum":
                kept[index] += part
            else:
                kept.index_reduce_(0, index, part, reduce)
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Any, None]:
        return None, _Exchange.apply(ctx.graph, grad), None


def partition(edge_index: Tensor, num_nodes: int, group: Group) -> PartitionedGraph:
    """Cut a graph into contiguous ranges of nodes with similar numbers of in-edges and return this process's part.

    A conv then runs unchanged as `conv((graph.exchange(x), x), graph.edge_index)`, where `x` holds the own nodes;
    :func:`wrap` makes that call in every conv of a model. Edges between ranges cost communication, so that neighbours
    should have close ids.

    Args:
        edge_index: Edges of the whole graph on any device, int64 or int32 [2, E], equal on every process.
        num_nodes: N.
        group: Processes, all of which must make the call.

    Raises:
        TypeError: `edge_index` is no integer tensor, or `group` no :class:`Group`.
        ValueError: Its shape is not [2, E], an id is out of range, or processes have other graphs.
    """
    check_edge_index(edge_index)
    if not isinstance(group, Group):
        raise TypeError(f"'group' needs a Group, such as Group.of_environment() (got {type(group).__name__})")
    num_nodes = as_integer("num_nodes", num_nodes)
    check_range("num_nodes", num_nodes, 1)
    check_alike(group, {"num_nodes": num_nodes})
    check_ends("edge_index", edge_index, (num_nodes, num_nodes), group)
    bounds = edge_cuts(edge_index[1], num_nodes, group.size)
    ends, edge_ids = own_edges(edge_index, bounds[group.rank : group.rank + 2])
    return parts_of([ends], [edge_ids], bounds, [bounds], group)[0]


def check_alike(group: Group, sizes: Mapping[str, int], what: str = "sizes") -> None:
    """Check that numbers are equal on every process.

    Raises:
        ValueError: Other processes have other numbers.
    """
    for name, size in sizes.items():
        if len(set(counts := group.counts(size))) > 1:
            raise ValueError(f"'{name}' needs the whole graph, equal on every process (got {what} {counts})")


def check_ends(name: str, edge_index: Tensor, num_nodes: tuple[int, int], group: Group) -> None:
    """Check that edges are between so many sources and targets, and equal on every process.

    Raises:
        ValueError: An id is out of range, or processes have other edges.
    """
    rows = edge_index if num_nodes[0] != num_nodes[1] else edge_index.reshape(1, -1)
    for ids, count in zip(rows, num_nodes):
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < count):
            raise ValueError(f"'{name}' needs ids in [0, num_nodes={count}) (got {int(ids.min())} to {int(ids.max())})")
    check_alike(group, {name: edge_index.size(1)})
    check_alike(group, {name: int(edge_index.sum())}, "sums of ids")


def own_edges(edge_index: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the edges into a range of targets, int64 [2, E_own], and their positions."""
    first, last = bounds
    edge_ids = ((edge_index[1] >= first) & (edge_index[1] < last)).nonzero().view(-1)
    return edge_index.index_select(1, edge_ids).long(), edge_ids


def parts_of(
    ends: Sequence[Tensor],
    edge_ids: Sequence[Tensor],
    source_bounds: list[int],
    bounds: Sequence[list[int]],
    group: Group,
) -> list[PartitionedGraph]:
    """Return the parts of relations whose sources have one type, with one halo for all of them.

    Args:
        ends: Own in-edges of each relation, by ids of the whole graph.
        edge_ids: Their positions.
        source_bounds: Ranges of the sources.
        bounds: Ranges of the targets of each relation.
        group: Processes, all of which must make the call.
    """
    first, last = source_bounds[group.rank : group.rank + 2]
    source = torch.cat([each[0] for each in ends])
    remote = (source < first) | (source >= last)
    halo, place = source[remote].unique(return_inverse=True)
    source -= first
    source[remote] = place + (last - first)

    # Halo and ranges ascend, so that the part of the halo that one process owns is contiguous.
    cuts = torch.searchsorted(halo, torch.tensor(source_bounds, device=halo.device))
    received = cuts.diff().to(group.device)
    sent, wanted = received.clone(), halo.to(group.device)
    if group.size > 1:
        dist.all_to_all_single(sent, received)
    send_counts, receive_counts = sent.tolist(), received.tolist()
    send_index = wanted.new_empty(sum(send_counts))
    if group.size > 1:
        dist.all_to_all_single(send_index, wanted, send_counts, receive_counts)
    sources = source.split([each.size(1) for each in ends])
    sizes = [(last - first, own[group.rank + 1] - own[group.rank], each.size(1)) for each, own in zip(ends, bounds)]
    alike = [min(group.counts(min(each))) > 1 for each in sizes]
    return [
        PartitionedGraph(
            group,
            own,
            source_bounds,
            torch.stack([ids, each[1] - own[group.rank]]).to(group.device),
            positions,
            halo.numel(),
            send_index - first,
            send_counts,
            receive_counts,
            compiles_alike,
        )
        for ids, each, positions, own, compiles_alike in zip(sources, ends, edge_ids, bounds, alike, strict=True)
    ]


def own_part(graph: Data, group: Group) -> Data:
    """Return a process's part of a graph: its own rows of node and edge attributes, on the group's device.

    Args:
        graph: Whole graph, equal on every process.
        group: Processes, all of which must make the call.

    Returns:
        Data whose `edge_index` is a :class:`PartitionedGraph`, for models that went through :func:`wrap`.

    Raises:
        ValueError: The number of nodes of `graph` is not known.
    """
    if graph.num_nodes is None:
        raise ValueError("'graph' needs num_nodes (got None)")
    part = partition(graph.edge_index, graph.num_nodes, group)
    own = Data(edge_index=part, num_nodes=part.num_nodes)
    for name, value in graph:
        if graph.is_node_attr(name) and isinstance(value, Tensor):
            own[name] = part.local(value)
        elif name != "edge_index" and graph.is_edge_attr(name) and isinstance(value, Tensor):
            own[name] = value.index_select(0, part.edge_ids).to(group.device)
    return own


def edge_cuts(target: Tensor, num_nodes: int, parts: int) -> list[int]:
    """Return bounds of `parts` ranges of nodes with similar numbers of nodes plus in-edges."""
    weight = target.bincount(minlength=num_nodes) + 1
    ends = weight.cumsum(0)
    wanted = torch.arange(1, parts, device=ends.device) * ends[-1] / parts
    # A node belongs to the range that holds the middle of its weight.
    return [0, *torch.searchsorted(ends - weight / 2, wanted.double()).tolist(), num_nodes]
