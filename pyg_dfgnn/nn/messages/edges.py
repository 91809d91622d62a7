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
from pyg_dfgnn.graph.graph import keep

MOST_GRAPHS = 4
"""Graphs that are kept with a layer."""


class _Made(NamedTuple):
    """Edges that a forward has made, and their types, at some versions, and their graph."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    graph: Graph

    def has(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether other edges are these, as a number of the host, which waits for the device here."""
        if any(tensor._version != version for tensor, version in zip(self.tensors, self.versions)):
            return False
        return all(own is other or torch.equal(own, other) for own, other in zip(self.tensors, tensors))


_made: dict[int, tuple[weakref.ref[torch.nn.Module], dict[Any, Any]]] = {}
"""Number of a layer -> the layer, and by the sizes of a graph the last edges, weakly, or edges with their graph."""


def _entries_of(layer: torch.nn.Module) -> dict[Any, Any]:
    """Return what is kept for a layer, for as long as it lives; layers need not be hashable."""
    number = id(layer)
    known = _made.get(number)
    if known is None or known[0]() is not layer:
        known = _made[number] = weakref.ref(layer, lambda _: _made.pop(number, None)), {}
    return known[1]


def graph_of(
    layer: torch.nn.Module,
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    transposed: bool,
    types: tuple[Tensor, int] | None = None,
) -> Graph | None:
    """Return the graph of a call's edges; None if only a look at them, for which the host waits, could tell.

    Args:
        layer: The layer that is called.
        edge_index: The edges, int64 or int32 [2, E].
        num_src: Number of sources.
        num_dst: Number of targets.
        transposed: Whether row 0 holds the targets.
        types: Type of each edge, int64 or int32 [E], and the number of types; None without.

    Raises:
        ValueError: A type is out of range.
    """
    tensors: tuple[Tensor, ...] = (edge_index,) if types is None else (edge_index, types[0])
    sizes = num_src, num_dst, False, transposed, *([] if types is None else [types[1]])
    key = *tensors, *sizes
    graph = Graph.known(*key)
    if graph is not None:
        return graph
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    kind = *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors), *sizes
    entries = _entries_of(layer)
    entry = entries.get(kind)
    if isinstance(entry, _Made):
        if entry.has(tensors):
            # For the next `propagate` of this forward, which need not wait then.
            keep(entry.graph, tensors, sizes)
            return entry.graph.on_this_stream()
        entry = None
    # Edges of the same sizes as others that are gone: the forward makes them. Others live with their owner.
    is_made = entry is not None and any(reference() is None for reference in entry)
    kept = _with_versions(tensors) if is_made else tensors
    graph = Graph.resolve(*kept, *sizes)
    if kind not in entries and len(entries) >= MOST_GRAPHS:
        entries.pop(next(iter(entries)))
    if is_made:
        entries[kind] = _Made(kept, tuple(tensor._version for tensor in kept), graph)
    else:
        entries[kind] = tuple(map(weakref.ref, tensors))
    return graph


def _with_versions(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors whose edits leave a trace: copies of those of inference mode."""
    with torch.inference_mode(False):
        return tuple(tensor.clone() if tensor.is_inference() else tensor for tensor in tensors)
