"""One graph of several node types and relations whose nodes are spread over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.typing import EdgeType, NodeType

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.partition import (
    PartitionedGraph,
    check_alike,
    check_ends,
    edge_cuts,
    own_edges,
    parts_of,
)
from pyg_dfgnn.errors import as_integer, check_range, check_shape
from pyg_dfgnn.graph.forms import check_edge_index


@dataclass(frozen=True, eq=False)
class PartitionedHeteroGraph(Mapping[EdgeType, PartitionedGraph]):
    """A process's part of a graph of several types, in place of `edge_index_dict`: a range of the nodes of each type.

    All relations with sources of one type share a halo, so that a layer that reads all relations, such as `HGTConv`,
    fetches a remote node once. It is no dict, because DistributedDataParallel makes dicts among its arguments anew.

    Attributes:
        parts: Edge type -> part.
        bounds: Node type -> process r owns the nodes `bounds[r]` to `bounds[r + 1]` (excluded).
        group: Processes of the graph.
    """

    parts: dict[EdgeType, PartitionedGraph]
    bounds: dict[NodeType, list[int]]
    group: Group

    def __getitem__(self, edge_type: EdgeType) -> PartitionedGraph:
        return self.parts[edge_type]

    def __iter__(self) -> Iterator[EdgeType]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def num_nodes(self) -> dict[NodeType, int]:
        """Number of own nodes of each type."""
        rank = self.group.rank
        return {name: bounds[rank + 1] - bounds[rank] for name, bounds in self.bounds.items()}

    def local(self, nodes: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """Return the own rows of tensors `[N, ...]` of the whole graph by node type, on the group's device.

        Raises:
            ValueError: A type is unknown, or its tensor does not have one row per node of the whole graph.
        """
        own = {}
        for name, rows in nodes.items():
            if name not in self.bounds:
                raise ValueError(f"'nodes' needs node types of {list(self.bounds)} (got {name!r})")
            bounds = self.bounds[name]
            check_shape(f"nodes[{name!r}]", rows, (bounds[-1], *rows.shape[1:]), f"[N={bounds[-1]}, ...]")
            own[name] = rows[bounds[self.group.rank] : bounds[self.group.rank + 1]].to(self.group.device)
        return own

    def remote_share(self) -> float:
        """Return the share of the halo in the rows that a layer reads, over all processes, which must make the call."""
        return remote_share(self, self.group)


def remote_share(parts: Mapping[EdgeType, PartitionedGraph], group: Group) -> float:
    """Return the share of the halo in the rows that a layer reads, over all processes, which must make the call."""
    by_type = {edge_type[0]: part for edge_type, part in parts.items()}
    counts = [sum(part.num_halo for part in by_type.values()), sum(part.num_sources for part in by_type.values())]
    halo, sources = group.sum(torch.tensor(counts, device=group.device)).tolist()
    return halo / max(sources, 1)  # type: ignore[no-any-return]


def partition_hetero(
    edge_index_dict: Mapping[EdgeType, Tensor], num_nodes_dict: Mapping[NodeType, int], group: Group
) -> PartitionedHeteroGraph:
    """Cut a graph of several types as :func:`pyg_dfgnn.distributed.partition` does one of one type.

    Args:
        edge_index_dict: Edges [2, E] of the whole graph by edge type, equal on every process.
        num_nodes_dict: Number of nodes of each type.
        group: Processes, all of which must make the call.

    Raises:
        TypeError: Edges are no integer tensors, or `group` no :class:`Group`.
        ValueError: A shape is not [2, E], an id is out of range, an end has no known type, or processes have other
            graphs.
    """
    if not isinstance(group, Group):
        raise TypeError(f"'group' needs a Group, such as Group.of_environment() (got {type(group).__name__})")
    sizes = {name: as_integer("num_nodes_dict", size) for name, size in num_nodes_dict.items()}
    for name, size in sizes.items():
        check_range(f"num_nodes_dict[{name!r}]", size, 0)
    check_alike(group, {f"num_nodes_dict[{name!r}]": size for name, size in sizes.items()})
    check_alike(group, {"edge_index_dict": len(edge_index_dict)})
    for edge_type, edge_index in edge_index_dict.items():
        label = f"edge_index_dict[{edge_type!r}]"
        check_edge_index(edge_index, label)
        unknown = [name for name in (edge_type[0], edge_type[-1]) if name not in sizes]
        if unknown:
            raise ValueError(f"'edge_index_dict' needs node types of {list(sizes)} (got {edge_type!r})")
        check_ends(label, edge_index, (sizes[edge_type[0]], sizes[edge_type[-1]]), group)
    bounds = {
        name: edge_cuts(_targets(edge_index_dict, name), size, group.size) if size else [0] * (group.size + 1)
        for name, size in sizes.items()
    }
    parts: dict[EdgeType, PartitionedGraph] = {}
    for name in sizes:
        edge_types = [edge_type for edge_type in edge_index_dict if edge_type[0] == name]
        if not edge_types:
            continue
        targets = [bounds[edge_type[-1]] for edge_type in edge_types]
        own = [
            own_edges(edge_index_dict[edge_type], ranges[group.rank : group.rank + 2])
            for edge_type, ranges in zip(edge_types, targets)
        ]
        ends, edge_ids = zip(*own)
        parts.update(zip(edge_types, parts_of(ends, edge_ids, bounds[name], targets, group)))
    return PartitionedHeteroGraph({edge_type: parts[edge_type] for edge_type in edge_index_dict}, bounds, group)


def own_hetero_part(graph: HeteroData, group: Group) -> HeteroData:
    """Return a process's part of a graph of several types: its own rows of all attributes, on the group's device.

    Args:
        graph: Whole graph, equal on every process; labels and masks as in :class:`pyg_dfgnn.datasets.Task`.
        group: Processes, all of which must make the call.

    Returns:
        Data whose edge types hold a :class:`PartitionedGraph` each, for models that went through :func:`wrap`.
    """
    sizes = {name: int(graph[name].num_nodes) for name in graph.node_types}
    parts = partition_hetero(graph.edge_index_dict, sizes, group)
    own, first = HeteroData(), graph.node_types[0]
    for name in graph.node_types:
        own[name].num_nodes = parts.num_nodes[name]
        for key, value in graph[name].items():
            if graph[name].is_node_attr(key) and isinstance(value, Tensor):
                own[name][key] = parts.local({name: value})[name]
    for edge_type, part in parts.items():
        own[edge_type].edge_index = part
        for key, value in graph[edge_type].items():
            if key != "edge_index" and graph[edge_type].is_edge_attr(key) and isinstance(value, Tensor):
                own[edge_type][key] = value.index_select(0, part.edge_ids).to(group.device)
    # Attributes of the whole graph are of the nodes of its first type.
    for key, value in graph.stores[0].items():
        own[key] = parts.local({first: value})[first] if isinstance(value, Tensor) else value
    return own


def _targets(edge_index_dict: Mapping[EdgeType, Tensor], name: NodeType) -> Tensor:
    """Return the targets of all edges into a node type."""
    found = [edge_index[1] for edge_type, edge_index in edge_index_dict.items() if edge_type[-1] == name]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def exchange_all(parts: Mapping[EdgeType, Any], x_dict: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor]:
    """Fetch the halo of every node type, once for all relations that share it.

    Args:
        parts: Edge type -> :class:`PartitionedGraph`.
        x_dict: Features of the own nodes by node type.

    Returns:
        Features of own nodes and halo by node type; of types that send nothing, of the own nodes.
    """
    part_of = {edge_type[0]: part for edge_type, part in parts.items()}
    return {name: part_of[name].exchange(x) if name in part_of else x for name, x in x_dict.items()}
