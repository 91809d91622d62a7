"""Batches of small graphs: sort each graph once, on the host, and never a batch on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import Adjacency, Side, expand, from_degree, longest, pull
from pyg_dfgnn.graph.block_sparse import Segments
from pyg_dfgnn.graph.graph import Graph, batch_edge_index, build, check_edges, check_ids, refuse_ids

IN_DEGREE, OUT_DEGREE, BY_SOURCE, FACTS = "csr_in_degree", "csr_out_degree", "csr_by_source", "csr_facts"
_NUM_FACTS = 7


@dataclass(frozen=True)
class BatchFacts:
    """What the host knows of a batch whose graphs went through :class:`SortEdges`, so that nobody asks the device.

    Attributes:
        nodes: Nodes of each graph, int64 [G].
        edges: Edges of each graph, int64 [G].
        loops: Edges from a node to itself of each graph, int64 [G].
        num_edges: Edges of all graphs.
        max_in_degree: Most edges into a node.
        max_out_degree: Most edges out of a node.
        max_kept_in: As `max_in_degree`, loops left out.
        max_kept_out: As `max_out_degree`, loops left out.
        is_simple: Whether no edge occurs twice.
    """

    nodes: Tensor
    edges: Tensor
    loops: Tensor
    num_edges: int
    max_in_degree: int
    max_out_degree: int
    max_kept_in: int
    max_kept_out: int
    is_simple: bool

    @staticmethod
    def of(batch: Any) -> BatchFacts:
        """The facts of a batch that is still on the host.

        Raises:
            ValueError: Its graphs did not go through :class:`SortEdges`, or it has left the host.
        """
        facts = batch.get(FACTS)
        if not isinstance(facts, Tensor) or facts.device.type != "cpu":
            raise ValueError("'batch' needs graphs that went through SortEdges, and to be on the CPU still")
        ptr = batch.get("ptr")
        nodes = torch.tensor([batch.num_nodes]) if ptr is None else ptr.diff()
        return BatchFacts.merge(nodes, facts)

    @staticmethod
    def merge(nodes: Tensor, facts: Tensor) -> BatchFacts:
        """The facts of graphs with so many nodes [G] from the rows [G, 7] that `SortEdges` has stored.

        Raises:
            ValueError: The rows are of another version.
        """
        if facts.size(1) != _NUM_FACTS:
            given = f"(got {facts.size(1)} stored by another version)"
            raise ValueError(
                f"'batch' needs the {_NUM_FACTS} facts that SortEdges keeps of each graph {given}: sort again"
            )
        edges, loops = facts[:, 0].long(), facts[:, 1].long()
        max_in, max_out, kept_in, kept_out, repeated = facts[:, 2:].amax(0).tolist()
        return BatchFacts(nodes, edges, loops, int(edges.sum()), max_in, max_out, kept_in, kept_out, not repeated)

    def with_loops(self) -> BatchFacts:
        """The facts once loops are dropped and each node has got one."""
        edges = self.edges - self.loops + self.nodes
        most = (self.max_kept_in + 1, self.max_kept_out + 1) if int(self.nodes.sum()) else (0, 0)
        return replace(
            self,
            edges=edges,
            loops=self.nodes,
            num_edges=int(edges.sum()),
            max_in_degree=most[0],
            max_out_degree=most[1],
        )

    def segments(self, ptr: Tensor) -> Segments:
        """The graphs as segments, from their node offsets int32 [G + 1] on the device."""
        return Segments.of_sizes(ptr, self.nodes, self.edges, self.is_simple)


class SortEdges(BaseTransform):
    """Sort the edges of a graph by (target, source) and store what a batch needs to be compressed without a sort.

    Everything on edges (`edge_attr`, ...) is sorted alike. Stored are the in- and out-degree of each node, int32 [N],
    the positions of the edges in source order, int32 [E], and facts of the graph, int32 [1, 7]; collation concatenates
    them as they are, and `Graph.of_batch` turns them into the CSR and CSC of the batch. Apply it last: it holds for the
    edges it saw.

    Example:
        >>> dataset = TUDataset(root, "MUTAG", pre_transform=SortEdges())
        >>> for batch in DataLoader(dataset, batch_size=32):
        ...     batch = batch.to(device)
        ...     Graph.of_batch(batch)
        ...     out = model(batch.x, batch.edge_index)
    """

    def forward(self, data: Data) -> Data:
        """Sort the edges of one graph.

        Raises:
            TypeError: `data` is heterogeneous or has no integer tensor `edge_index`.
            ValueError: An id is out of range.
        """
        edge_index, num_nodes = batch_edge_index(data), data.num_nodes
        num_edges = edge_index.size(1)
        refuse_ids(pull(*check_ids(*edge_index)), num_nodes, num_nodes, num_edges)
        order = edge_index[0].argsort(stable=True)
        order = order[edge_index[1, order].argsort(stable=True)]
        for store in data.edge_stores:
            for name, value in list(store.items()):
                if name == "edge_index":
                    data.edge_index = edge_index[:, order]
                elif isinstance(value, Tensor) and store.is_edge_attr(name):
                    store[name] = value.index_select(data.__cat_dim__(name, value, store), order)
        source, target = data.edge_index
        data[IN_DEGREE] = target.bincount(minlength=num_nodes).int()
        data[OUT_DEGREE] = source.bincount(minlength=num_nodes).int()
        data[BY_SOURCE] = source.argsort(stable=True).int()
        is_loop = source == target
        loops = source[is_loop].bincount(minlength=num_nodes)
        degrees = (data[IN_DEGREE], data[OUT_DEGREE], data[IN_DEGREE] - loops, data[OUT_DEGREE] - loops)
        most = [int(degree.max()) if num_nodes else 0 for degree in degrees]
        repeated = ((source.diff() == 0) & (target.diff() == 0)).any()
        data[FACTS] = torch.tensor([[num_edges, int(is_loop.sum()), *most, int(repeated)]], dtype=torch.int32)
        return data


class BatchAdjacency(Adjacency):
    """A side of a batch with facts, where a bound does that needs no host sync."""

    def block_edges(self, rows: int) -> int:
        """At least the most edges of any block of `rows` consecutive rows."""
        return min(self.num_edges, rows * self.max_degree)


def trust_batch(batch: Any, edge_index: Tensor, facts: BatchFacts) -> Graph:
    """Build the graph of a batch as its graphs were stored by :class:`SortEdges`: no sort, no check, no host sync."""
    num_nodes, num_edges = batch.num_nodes, facts.num_edges
    if (edge_index.size(1), num_nodes) != (num_edges, int(facts.nodes.sum())):
        raise _changed("edge_index")
    check_edges(num_edges)
    in_degree, out_degree, by_source = _stored(batch, num_nodes, num_edges)
    segments = _segments(batch, edge_index.device)
    ptr, source_ptr = from_degree(in_degree), from_degree(out_degree)
    source, target = edge_index.to(torch.int32, copy=True)
    edge_ptr = ptr[segments.long()]
    by_source = by_source + edge_ptr[:-1].repeat_interleave(edge_ptr.diff(), output_size=num_edges)
    csr = Side(ptr, source, torch.arange(num_edges, dtype=torch.int32, device=ptr.device))
    csc = Side(source_ptr, target.index_select(0, by_source), by_source)
    return assemble(csr, csc, segments, facts, anchor=edge_index)


def assemble(csr: Side, csc: Side, segments: Tensor, facts: BatchFacts, **options: Any) -> Graph:
    """The graph of a batch from its finished sides, the node offsets of its graphs int32 [G + 1] and its facts."""
    found = facts.segments(segments)
    return Graph(
        BatchAdjacency(csr, facts.max_in_degree),
        csr.rowptr.numel() - 1,
        csc=BatchAdjacency(csc, facts.max_out_degree),
        graph_ptr=segments,
        max_graph_nodes=found.longest,
        node_segments=found,
        facts=facts,
        **options,
    )


def build_batch(batch: Any, edge_index: Tensor) -> Graph:
    """Build the graph of a batch with its segments: no sort if its members went through :class:`SortEdges`."""
    num_nodes, num_edges = batch.num_nodes, edge_index.size(1)
    segments = _segments(batch, edge_index.device)
    source, target = edge_index
    if BY_SOURCE not in batch:
        graph = build(forms.read_tensor(edge_index, False), num_nodes, num_nodes, anchor=edge_index)
        same_graph = (_owner(segments, source) == _owner(segments, target)).all()
        inside, graph.max_graph_nodes = pull(same_graph, longest(segments))
        _refuse_crossing(inside)
        graph.graph_ptr = segments
        return graph

    in_degree, out_degree, by_source = _stored(batch, num_nodes, num_edges)
    source, target = source.to(torch.int32, copy=True), target.to(torch.int32)
    ptr, source_ptr = from_degree(in_degree), from_degree(out_degree)
    # Positions count from the first edge of each graph; edges of a graph are contiguous in both orders.
    edge_ptr = ptr[segments.clamp(0, num_nodes).long()]
    graph_of_edge = expand(edge_ptr, num_edges).clamp(max=max(edge_ptr.numel() - 2, 0)).long()
    by_source = (by_source + edge_ptr[graph_of_edge]).clamp(0, max(num_edges - 1, 0))
    csr = Side(ptr, source, torch.arange(num_edges, dtype=torch.int32, device=ptr.device))
    csc = Side(source_ptr, target[by_source.long()], by_source)
    seen = torch.zeros(num_edges, dtype=torch.bool, device=ptr.device)
    seen[by_source.long()] = True
    unchanged = torch.stack(
        [
            (expand(ptr, num_edges) == target).all(),
            (expand(source_ptr, num_edges) == source[by_source.long()]).all(),
            seen.all(),
            ptr[-1] == num_edges,
            source_ptr[-1] == num_edges,
        ]
    ).all()
    same_graph = (_owner(segments, source) == _owner(segments, target)).all()
    *bounds, unchanged_, inside, max_in, max_out, max_graph_nodes = pull(
        *check_ids(*edge_index), unchanged, same_graph, longest(ptr), longest(source_ptr), longest(segments)
    )
    refuse_ids(bounds, num_nodes, num_nodes, num_edges)
    if not unchanged_:
        raise _changed("edge_index")
    _refuse_crossing(inside)
    return Graph(
        Adjacency(csr, max_in),
        num_nodes,
        csc=Adjacency(csc, max_out),
        anchor=edge_index,
        graph_ptr=segments,
        max_graph_nodes=max_graph_nodes,
    )


def _segments(batch: Any, device: torch.device) -> Tensor:
    """Node offsets of the graphs of a batch, int32 [G + 1]; a single graph has none."""
    ptr = batch.get("ptr")
    return (torch.tensor([0, batch.num_nodes], device=device) if ptr is None else ptr).to(torch.int32, copy=True)


def _stored(batch: Any, num_nodes: int, num_edges: int) -> list[Tensor]:
    """In-degrees, out-degrees and edges by source, as :class:`SortEdges` has stored them.

    Raises:
        ValueError: One is missing or of another size.
    """
    found = []
    for name, size in ((IN_DEGREE, num_nodes), (OUT_DEGREE, num_nodes), (BY_SOURCE, num_edges)):
        tensor = batch.get(name)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != [size]:
            raise _changed(name)
        found.append(tensor)
    return found


def _changed(name: str) -> ValueError:
    return ValueError(f"'{name}' needs the edges that SortEdges saw: they or the nodes were changed after it")


def _owner(segments: Tensor, nodes: Tensor) -> Tensor:
    # The graph of each node.
    return torch.bucketize(nodes.to(segments.dtype), segments[1:], right=True, out_int32=True)


def _refuse_crossing(inside: int) -> None:
    if not inside:
        raise ValueError("'batch' needs edges inside its graphs (got an edge between two graphs)")
