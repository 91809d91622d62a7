"""The graph of a call, found again by what the edges are where a layer makes them anew in each forward.

Graphs are kept with the tensor that they were built from. A layer that adds self-loops in its forward passes another
tensor each time: from the third call on, edges equal to those of an earlier call have that call's graph.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph

MOST_GRAPHS = 4
"""Graphs that are kept with a layer."""


class _Made(NamedTuple):
    """Edges that a forward has made, at a version, and their graph."""

    edge_index: Tensor
    version: int
    graph: Graph


_made: dict[int, tuple[weakref.ref[torch.nn.Module], dict[Any, Any]]] = {}
"""Number of a layer -> the layer, and by the sizes of a graph the last edges, weakly, or edges with their graph."""


def _entries_of(layer: torch.nn.Module) -> dict[Any, Any]:
    """Return what is kept for a layer, for as long as it lives; layers need not be hashable."""
    number = id(layer)
    known = _made.get(number)
    if known is None or known[0]() is not layer:
        known = _made[number] = weakref.ref(layer, lambda _: _made.pop(number, None)), {}
    return known[1]


def graph_of(layer: torch.nn.Module, edge_index: Tensor, num_src: int, num_dst: int, transposed: bool) -> Graph | None:
    """Return the graph of a call's edges; None if only a look at them, for which the host waits, could tell.

    Args:
        layer: The layer that is called.
        edge_index: The edges, int64 or int32 [2, E].
        num_src: Number of sources.
        num_dst: Number of targets.
        transposed: Whether row 0 holds the targets.
    """
    key = edge_index, num_src, num_dst, False, transposed
    graph = Graph.known(*key)
    if graph is not None:
        return graph
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    sizes = edge_index.shape, edge_index.dtype, edge_index.device, *key[1:]
    entries = _entries_of(layer)
    entry = entries.get(sizes)
    if isinstance(entry, _Made):
        # As a number of the host: it waits for the device here.
        if entry.edge_index._version == entry.version and torch.equal(entry.edge_index, edge_index):
            return entry.graph.on_this_stream()
        entry = None
    graph = Graph.resolve(*key)
    # Edges of the same sizes as others that are gone: the forward makes them. Others live with their owner.
    is_made = entry is not None and entry() is None
    if sizes not in entries and len(entries) >= MOST_GRAPHS:
        entries.pop(next(iter(entries)))
    entries[sizes] = _Made(edge_index, edge_index._version, graph) if is_made else weakref.ref(edge_index)
    return graph
