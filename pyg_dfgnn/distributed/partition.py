"""One graph whose nodes are spread over processes, for graphs that exceed one GPU."""

from __future__ import annotations

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

    Attributes:
        group: Processes of the graph.
        bounds: Process r owns the nodes `bounds[r]` to `bounds[r + 1]` (excluded).
        edge_index: Own in-edges [2, E_own] on `group.device`, row 0 sources (own, then halo), row 1 own targets.
        edge_ids: Positions of the own edges in the edges of the whole graph, int64 [E_own].
        num_halo: Number of remote sources.
        send_index: Own nodes that other processes need, int64, by receiving process.
        send_counts: Number of rows sent to each process.
        receive_counts: Number of rows received from each process.
        kept: What is computed once for the part, by name.
    """

    group: Group
    bounds: list[int]
    edge_index: Tensor
    edge_ids: Tensor
    num_halo: int
    send_index: Tensor
    send_counts: list[int]
    receive_counts: list[int]
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
    def num_sources(self) -> int:
        """Number of own nodes and halo nodes."""
        return self.num_nodes + self.num_halo

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
            x: Features of the own nodes `[num_nodes, ...]`.

        Returns:
            Features of own nodes and halo, `[num_sources, ...]`.

        Raises:
            ValueError: `x` does not have one row per own node.
        """
        check_shape("x", x, (self.num_nodes, *x.shape[1:]), f"[num_nodes={self.num_nodes}, ...]")
        return x if self.group.size == 1 else _Exchange.apply(self, x)

    def collect(self, rows: Tensor, reduce: str = "sum") -> Tensor:
        """Return to each process what all have for its nodes: the opposite of :meth:`exchange`, and its gradient.

        Every process of the group must make the call.

        Args:
            rows: Rows of own nodes and halo, `[num_sources, ...]`.
            reduce: What is made of the rows of a node: "sum", or "amax" and "amin", which have no gradient.

        Returns:
            Rows of the own nodes, `[num_nodes, ...]`.

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
        return self.edge_index if self.group.size == 1 else PartitionedEdges.of(self.edge_index, self)


class _Exchange(torch.autograd.Function):
    """Rows of own nodes to rows of own nodes and halo."""

    @staticmethod
    def forward(ctx: Any, graph: PartitionedGraph, x: Tensor) -> Tensor:
        ctx.graph = graph
        sources = x.new_empty((graph.num_sources, *x.shape[1:]))
        sources[: graph.num_nodes] = x
        rows = x.index_select(0, graph.send_index)
        dist.all_to_all_single(sources[graph.num_nodes :], rows, graph.receive_counts, graph.send_counts)
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
        dist.all_to_all_single(parts, rows[graph.num_nodes :].contiguous(), graph.send_counts, graph.receive_counts)
        own = rows[: graph.num_nodes].clone()
        # No node repeats within the rows of a process, so that sums have one order and equal bits in each run.
        for index, part in zip(graph.send_index.split(graph.send_counts), parts.split(graph.send_counts)):
            if reduce == "sum":
                own.index_add_(0, index, part)
            else:
                own.index_reduce_(0, index, part, reduce)
        return own

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
    if edge_index.numel() and not (0 <= int(edge_index.min()) and int(edge_index.max()) < num_nodes):
        span = f"{int(edge_index.min())} to {int(edge_index.max())}"
        raise ValueError(f"'edge_index' needs ids in [0, num_nodes={num_nodes}) (got {span})")
    total = int(edge_index.sum())
    for name, what, count in (
        ("num_nodes", "sizes", num_nodes),
        ("edge_index", "sizes", edge_index.size(1)),
        ("edge_index", "sums of ids", total),
    ):
        if len(set(counts := group.counts(count))) > 1:
            raise ValueError(f"'{name}' needs the whole graph, equal on every process (got {what} {counts})")
    bounds = edge_cuts(edge_index[1], num_nodes, group.size)
    first, last = bounds[group.rank], bounds[group.rank + 1]
    edge_ids = ((edge_index[1] >= first) & (edge_index[1] < last)).nonzero().view(-1)
    source, target = edge_index.index_select(1, edge_ids).long()
    remote = (source < first) | (source >= last)
    halo, place = source[remote].unique(return_inverse=True)
    source -= first
    source[remote] = place + (last - first)

    # Halo and ranges ascend, so that the part of the halo that one process owns is contiguous.
    cuts = torch.searchsorted(halo, torch.tensor(bounds, device=halo.device))
    received = cuts.diff().to(group.device)
    sent, wanted = received.clone(), halo.to(group.device)
    if group.size > 1:
        dist.all_to_all_single(sent, received)
    send_counts, receive_counts = sent.tolist(), received.tolist()
    send_index = wanted.new_empty(sum(send_counts))
    if group.size > 1:
        dist.all_to_all_single(send_index, wanted, send_counts, receive_counts)
    return PartitionedGraph(
        group,
        bounds,
        torch.stack([source, target - first]).to(group.device),
        edge_ids,
        halo.numel(),
        send_index - first,
        send_counts,
        receive_counts,
    )


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
