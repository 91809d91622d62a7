"""Edge sets between several node types as one graph with a relation per edge set."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import pull
from pyg_dfgnn.graph.build import bounds_of, refuse_ids
from pyg_dfgnn.graph.derived import version_of
from pyg_dfgnn.graph.graph import Graph, _cache

_layout, _version = attrgetter("layout"), attrgetter("_version")


def known_joint(edge_sets: Sequence[Any], numbers: tuple[int, ...]) -> Graph | None:
    """Return what :func:`joint_graph` has kept of these edges, None if they are others or have been edited.

    Nothing is asked of the edges one by one: that costs the host more than all launches where there are many relations.
    """
    anchors, versions = _anchors(edge_sets)
    graph = _cache.get(_key(anchors, numbers), anchors, versions)
    return None if graph is None else graph.on_this_stream()


def joint_graph(edge_sets: Sequence[Any], numbers: tuple[int, ...]) -> Graph:
    """The graph of all edge sets in their order, cached for as long as the edges of each live and stay unchanged.

    Args:
        edge_sets: At least one, all on one device: edges of a relation in any form that PyG takes, or a `Graph`. Ids
            count within their node types.
        numbers: Nodes of all types; relations, also those without edges; then of each edge set its relation, and first
            node and number of nodes of its sources and its targets.

    Raises:
        TypeError: Edges of another form, or ids of another dtype.
        ValueError: Another shape, or an id out of range.
    """
    anchors, versions = _anchors(edge_sets)
    key = _key(anchors, numbers)
    graph = _cache.get(key, anchors, versions)
    if graph is not None:
        return graph.on_this_stream()
    with torch.inference_mode(False), torch.no_grad():
        edge_index, relation = joined(edge_sets, numbers)
        graph = Graph.of(edge_index, numbers[0], edge_type=relation, num_relations=numbers[1])
    _cache.put(key, anchors, versions, graph)
    return graph


def joined(edge_sets: Sequence[Any], numbers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the edges of all sets between the nodes of all types, int64 [2, E], and the relation of each, int64 [E].

    Arguments and errors are those of :func:`joint_graph`.
    """
    rest = numbers[2:]
    relations, *ends = (rest[place::5] for place in range(5))
    edges = [_read(part, *sizes) for part, *sizes in zip(edge_sets, ends[1], ends[3], strict=True)]
    bounds = pull(*(bound for source, target in edges for bound in bounds_of(source, target)))
    width = len(bounds) // len(edges)
    for i, (source, _) in enumerate(edges):
        refuse_ids(bounds[i * width : (i + 1) * width], ends[1][i], ends[3][i], source.numel())
    edge_index = torch.cat(
        [torch.stack([s + first, t + second]) for (s, t), first, second in zip(edges, ends[0], ends[2])], dim=1
    )
    types = [source.new_full(source.shape, relation) for (source, _), relation in zip(edges, relations)]
    return edge_index, torch.cat(types)


def _key(anchors: Sequence[Any], numbers: tuple[int, ...]) -> tuple[Hashable, ...]:
    return "joint", tuple(map(id, anchors)), numbers


def _anchors(edge_sets: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Hashable]]:
    """Return the anchors and versions of edge sets, as :func:`pyg_dfgnn.graph.forms.adjacency_anchor` does of one."""
    if {*map(type, edge_sets)} == {Tensor} and {*map(_layout, edge_sets)} == {torch.strided}:
        is_tracked = not any(map(Tensor.is_inference, edge_sets))
        return edge_sets, tuple(map(_version, edge_sets)) if is_tracked else (None,)
    pairs = [_anchor(edge_index) for edge_index in edge_sets]
    return [anchor for anchor, _ in pairs], [version for _, version in pairs]


def _anchor(edge_index: Any) -> tuple[Any, Hashable]:
    if isinstance(edge_index, Graph):
        return edge_index, 0
    if forms.is_adjacency(edge_index):
        return forms.adjacency_anchor(edge_index)
    tensor = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    return tensor, version_of(tensor) if isinstance(tensor, Tensor) else None


def _read(edge_index: Any, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    if isinstance(edge_index, Graph):
        edge_index = edge_index.edge_index
    if forms.is_adjacency(edge_index):
        edges = forms.read_adjacency(edge_index, num_src, num_dst, False)
    else:
        edges = forms.read_tensor(edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index, False)
    return edges.source.long(), edges.target.long()
