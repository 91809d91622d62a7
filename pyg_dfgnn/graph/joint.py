"""Edge sets between several node types as one graph with a relation per edge set."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import pull
from pyg_dfgnn.graph.build import bounds_of, refuse_ids
from pyg_dfgnn.graph.derived import version_of
from pyg_dfgnn.graph.graph import Graph, _cache


class Part(NamedTuple):
    """The edges of one relation.

    Attributes:
        edge_index: Edges in any form that PyG takes, or a `Graph`; ids count within their node types.
        relation: Number of the relation.
        sources: First node and number of nodes of the sources' type.
        targets: First node and number of nodes of the targets' type.
    """

    edge_index: Any
    relation: int
    sources: tuple[int, int]
    targets: tuple[int, int]


def joint_graph(parts: Sequence[Part], num_nodes: int, num_relations: int) -> Graph:
    """The graph of all parts in their order, cached for as long as the edges of each live and stay unchanged.

    Args:
        parts: At least one, all on one device.
        num_nodes: Nodes of all types.
        num_relations: Relations, also those without a part.

    Raises:
        TypeError: Edges of another form, or ids of another dtype.
        ValueError: Another shape, or an id out of range.
    """
    pairs = [_anchor(part.edge_index) for part in parts]
    anchors, versions = [anchor for anchor, _ in pairs], [version for _, version in pairs]
    key = ("joint", *map(id, anchors), *(part[1:] for part in parts), num_nodes, num_relations)
    graph = _cache.get(key, anchors, versions)
    if graph is not None:
        return graph.on_this_stream()
    with torch.inference_mode(False), torch.no_grad():
        edges = [_read(part) for part in parts]
        bounds = pull(*(bound for source, target in edges for bound in bounds_of(source, target)))
        width = len(bounds) // len(parts)
        for i, (part, (source, _)) in enumerate(zip(parts, edges)):
            refuse_ids(bounds[i * width : (i + 1) * width], part.sources[1], part.targets[1], source.numel())
        starts = [(part.sources[0], part.targets[0]) for part in parts]
        edge_index = torch.cat(
            [torch.stack([s + first, t + second]) for (s, t), (first, second) in zip(edges, starts)], dim=1
        )
        relations = [source.new_full(source.shape, part.relation) for part, (source, _) in zip(parts, edges)]
        graph = Graph.of(edge_index, num_nodes, edge_type=torch.cat(relations), num_relations=num_relations)
    _cache.put(key, anchors, versions, graph)
    return graph


def _anchor(edge_index: Any) -> tuple[Any, Hashable]:
    """What tells whether edges are still the same, as :func:`pyg_dfgnn.graph.forms.adjacency_anchor` does."""
    if isinstance(edge_index, Graph):
        return edge_index, 0
    if forms.is_adjacency(edge_index):
        return forms.adjacency_anchor(edge_index)
    tensor = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    return tensor, version_of(tensor)


def _read(part: Part) -> tuple[Tensor, Tensor]:
    edge_index = part.edge_index
    if isinstance(edge_index, Graph):
        edge_index = edge_index.edge_index
    if forms.is_adjacency(edge_index):
        edges = forms.read_adjacency(edge_index, part.sources[1], part.targets[1], False)
    else:
        edges = forms.read_tensor(edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index, False)
    return edges.source.long(), edges.target.long()
