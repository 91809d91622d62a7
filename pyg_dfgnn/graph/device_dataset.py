"""Graphs that stay on the device: a batch is gathered from what all of them are made of, without a sort or a sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.collate import collate

from pyg_dfgnn.errors import check_dtype, check_range
from pyg_dfgnn.graph.adjacency import INT32_MAX, Arrays, from_degree, push
from pyg_dfgnn.graph.batch import trusted
from pyg_dfgnn.graph.block_sparse import block_count, make_blocks, stored_bits
from pyg_dfgnn.graph.build import check_edges
from pyg_dfgnn.graph.facts import BY_SOURCE, FACTS, IN_DEGREE, OUT_DEGREE, BatchFacts
from pyg_dfgnn.graph.graph import Graph, keep
from pyg_dfgnn.graph.node_ranges import diagonal_blocks

# Graphs whose dense blocks are made at a time.
_GROUP = 1024


class _Bits(NamedTuple):
    """The bits of all dense blocks, how many blocks each graph has, and what another stream has to wait for."""

    bits: Tensor
    counts: Tensor
    made: torch.cuda.Event | None


class DeviceDataset:
    """Graphs concatenated on a device, from which batches are gathered.

    `batch` gives what PyG's `Batch.from_data_list` gives for the same graphs. If they went through
    :class:`~pyg_dfgnn.graph.SortEdges`, the batch comes with its :class:`~pyg_dfgnn.graph.Graph`, which the convs find
    by `batch.edge_index`. Node ids are kept as int32; all sizes and facts of the graphs stay on the host.

    Args:
        graphs: With tensors along nodes, edges or one row per graph; at least one.
        device: Where they are kept.

    Raises:
        ValueError: There is no graph, int32 cannot count the nodes or edges of all, or an attribute is of another kind.
    """

    def __init__(self, graphs: Sequence[Data], device: torch.device | str = "cpu") -> None:
        check_range("len(graphs)", len(graphs), 1)
        self.device = torch.device(device)
        stored, slices, _ = collate(Data, list(graphs), increment=False, add_batch=False)
        self.nodes = torch.tensor([graph.num_nodes for graph in graphs])
        self.edges = torch.tensor([graph.num_edges for graph in graphs])
        check_range("num_nodes", int(self.nodes.sum()), 0, INT32_MAX)
        check_edges(int(self.edges.sum()))
        self._first_node, self._first_edge = first(self.nodes), first(self.edges)
        self.facts: Tensor | None = stored.get(FACTS)
        self._bits: dict[tuple[str, int], _Bits] = {}

        def kept(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, torch.int32)

        source, target = stored.edge_index
        self._ends = [kept(source), kept(target)]
        if self.facts is not None:
            # The targets in the order of the sources, whose positions count from the first edge of each graph.
            by_source = stored[BY_SOURCE].long() + self._first_edge.repeat_interleave(self.edges)
            self._ends += [kept(stored[BY_SOURCE]), kept(target[by_source])]
            self._degrees = [kept(stored[IN_DEGREE]), kept(stored[OUT_DEGREE])]
        # Along nodes, along edges or one row per graph: told by where each graph begins.
        self._along: dict[str, list[tuple[str, Tensor]]] = {"node": [], "edge": [], "graph": []}
        lengths = {"node": self.nodes, "edge": self.edges, "graph": torch.ones_like(self.nodes)}
        largest = graphs[int(self.nodes.argmax())]
        for name, starts in slices.items():
            value = stored[name]
            if name in ("edge_index", "num_nodes", BY_SOURCE, FACTS, IN_DEGREE, OUT_DEGREE):
                continue
            kind = next((k for k, n in lengths.items() if torch.equal(torch.as_tensor(starts).diff(), n)), None)
            if not isinstance(value, Tensor) or kind is None:
                raise ValueError(f"'graphs' needs tensors along nodes, edges or graphs (got {name!r})")
            shift, dim = largest.__inc__(name, largest[name]), largest.__cat_dim__(name, largest[name])
            if dim != 0 or torch.as_tensor(shift).any():
                need = "attributes that a batch joins row by row as they are"
                raise ValueError(f"'graphs' needs {need} (got {name!r}, which PyG shifts or joins otherwise)")
            self._along[kind].append((name, value.to(self.device)))

    def __len__(self) -> int:
        return len(self.nodes)

    def batch(self, ids: Tensor) -> Batch:
        """Gather a batch.

        Args:
            ids: Which graphs, int64 [G] on the CPU, at least one.

        Returns:
            The batch on the device, `edge_index` as int64.

        Raises:
            TypeError: `ids` is no tensor of int64.
            ValueError: There are no ids.
        """
        check_dtype("ids", ids, torch.int64)
        check_range("len(ids)", len(ids), 1)
        nodes, edges = self.nodes[ids], self.edges[ids]
        num_nodes, num_edges = int(nodes.sum()), int(edges.sum())
        check_edges(num_edges)
        first_node, first_edge = first(nodes), first(edges)
        shifts = [first_node, first_edge, self._first_node[ids] - first_node, self._first_edge[ids] - first_edge]
        table = push(torch.stack([nodes, edges, *shifts]).to(torch.int32), self.device)
        where = push(torch.cat([first_node, torch.tensor([num_nodes]), ids]), self.device)
        ptr, graph_ids = where[: len(ids) + 1], where[len(ids) + 1 :]
        graph_of_node = torch.repeat_interleave(table[0], output_size=num_nodes)
        graph_of_edge = torch.repeat_interleave(table[1], output_size=num_edges)
        edge_id = torch.arange(num_edges, dtype=torch.int32, device=self.device)
        node = table[4].index_select(0, graph_of_node)
        node += torch.arange(num_nodes, dtype=torch.int32, device=self.device)
        edge = table[5].index_select(0, graph_of_edge).add_(edge_id)

        batch = Batch(_base_cls=Data)
        for kind, place in (("node", node), ("edge", edge), ("graph", graph_ids)):
            for name, value in self._along[kind]:
                batch[name] = value.index_select(0, place)
        shift = table[2].index_select(0, graph_of_edge)
        source = self._ends[0].index_select(0, edge).add_(shift)
        batch.edge_index = torch.empty(2, num_edges, dtype=torch.int64, device=self.device)
        batch.edge_index[0] = source
        torch.add(self._ends[1].index_select(0, edge), shift, out=batch.edge_index[1])
        batch.batch = graph_of_node.long()
        batch.ptr = ptr
        batch.num_nodes = num_nodes
        batch._num_graphs = len(ids)
        if self.facts is None:
            return batch
        by_source = self._ends[2].index_select(0, edge).add_(table[3].index_select(0, graph_of_edge))
        target = self._ends[3].index_select(0, edge).add_(shift)
        in_ptr, out_ptr = (from_degree(degree.index_select(0, node)) for degree in self._degrees)
        facts = BatchFacts.merge(nodes, self.facts[ids])
        csr, csc = Arrays(in_ptr, source, edge_id), Arrays(out_ptr, target, by_source)
        anchors, sizes = (batch.edge_index,), (num_nodes, num_nodes, False, False)
        graph = Graph(trusted(csr, csc, ptr.to(torch.int32), facts), anchors, sizes)
        if facts.is_simple:
            stored_bits(graph, lambda domain, rows: self._gather_bits(ids, domain, rows))
        keep(graph, anchors, sizes)
        return batch

    def _gather_bits(self, ids: Tensor, domain: str, rows: int) -> Tensor:
        """The bits of the dense blocks of a batch, gathered from those of all graphs, which are made once."""
        found = self._bits.get((domain, rows))
        if found is None:
            parts = [self._make_bits(part, domain, rows) for part in torch.arange(len(self)).split(_GROUP)]
            bits, counts = torch.cat(parts), block_count(self.nodes, rows)
            made = torch.cuda.current_stream(self.device).record_event() if bits.is_cuda else None
            self._bits[domain, rows] = _Bits(bits, counts, made)
        else:
            bits, counts, made = found
            if made is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(made)
                bits.record_stream(stream)
        here = counts[ids]
        shift = push(torch.stack([first(counts)[ids] - first(here), here]), self.device)
        total = int(here.sum())
        place = shift[0].repeat_interleave(shift[1], output_size=total).add_(torch.arange(total, device=self.device))
        return bits.index_select(0, place)

    def _make_bits(self, ids: Tensor, domain: str, rows: int) -> Tensor:
        batch = self.batch(ids)
        graph = Graph.of_batch(batch)
        return make_blocks(graph.side(domain), rows, diagonal_blocks(graph)).bits


def first(lengths: Tensor) -> Tensor:
    """Where each of the parts of these lengths begins."""
    return lengths.cumsum(0) - lengths
