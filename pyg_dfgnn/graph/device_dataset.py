"""Graphs that stay on the device: a batch is gathered from what all of them are made of, without a sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.collate import collate

from pyg_dfgnn.errors import as_device, check_dtype, check_range
from pyg_dfgnn.graph.adjacency import INT32_MAX, push
from pyg_dfgnn.graph.build import check_edges


class DeviceDataset:
    """Graphs concatenated on a device, from which batches are gathered.

    `batch` gives what PyG's `Batch.from_data_list` gives for the same graphs. Node ids are kept as int32; the sizes of
    the graphs stay on the host.

    Args:
        graphs: With tensors along nodes, edges or one row per graph; at least one.
        device: Where they are kept.

    Raises:
        ValueError: There is no graph, PyTorch has no such device, int32 cannot count the nodes or edges of all, or an
            attribute is of another kind.
    """

    def __init__(self, graphs: Sequence[Data], device: torch.device | str = "cpu") -> None:
        check_range("len(graphs)", len(graphs), 1)
        self.device = as_device("device", device)
        stored, slices, _ = collate(Data, list(graphs), increment=False, add_batch=False)
        self.nodes = torch.tensor([graph.num_nodes for graph in graphs])
        self.edges = torch.tensor([graph.num_edges for graph in graphs])
        check_range("num_nodes", int(self.nodes.sum()), 0, INT32_MAX)
        check_edges(int(self.edges.sum()))
        self._first_node, self._first_edge = first(self.nodes), first(self.edges)
        self._edge_index = stored.edge_index.to(self.device, torch.int32)
        # Along nodes, along edges or one row per graph: told by where each graph begins.
        self._along: dict[str, list[tuple[str, Tensor]]] = {"node": [], "edge": [], "graph": []}
        lengths = {"node": self.nodes, "edge": self.edges, "graph": torch.ones_like(self.nodes)}
        largest = graphs[int(self.nodes.argmax())]
        for name, starts in slices.items():
            value = stored[name]
            if name in ("edge_index", "num_nodes"):
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
        shifts = [first_node, self._first_node[ids] - first_node, self._first_edge[ids] - first_edge]
        table = push(torch.stack([nodes, edges, *shifts]).to(torch.int32), self.device)
        where = push(torch.cat([first_node, torch.tensor([num_nodes]), ids]), self.device)
        ptr, graph_ids = where[: len(ids) + 1], where[len(ids) + 1 :]
        graph_of_node = torch.repeat_interleave(table[0], output_size=num_nodes)
        graph_of_edge = torch.repeat_interleave(table[1], output_size=num_edges)
        node, edge = _places(table[3], graph_of_node), _places(table[4], graph_of_edge)

        batch = Batch(_base_cls=Data)
        for kind, place in (("node", node), ("edge", edge), ("graph", graph_ids)):
            for name, value in self._along[kind]:
                batch[name] = value.index_select(0, place)
        shift = table[2].index_select(0, graph_of_edge)
        batch.edge_index = self._edge_index.index_select(1, edge).add_(shift).long()
        batch.batch = graph_of_node.long()
        batch.ptr = ptr
        batch.num_nodes = num_nodes
        batch._num_graphs = len(ids)
        return batch


def first(lengths: Tensor) -> Tensor:
    """Where each of the parts of these lengths begins."""
    return lengths.cumsum(0) - lengths


def _places(shift: Tensor, graph: Tensor) -> Tensor:
    """Where the nodes or edges of a batch lie among those of all graphs, from the graph of each, int32."""
    return shift.index_select(0, graph).add_(torch.arange(len(graph), dtype=torch.int32, device=graph.device))
