"""The graph of edges that are found again by what they are, where a forward makes them anew in each call.

Graphs are kept with the tensor that they were built from. A layer that adds self-loops in its forward passes another
tensor each time: from the third call on, edges equal to those of an earlier call have that call's graph.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph.graph import Graph, keep

MOST_GRAPHS = 4
"""Graphs that are kept with a layer, and for all compiled graphs together."""
Seen = dict[Any, Any]
"""By the sizes of a graph the last edges, weakly, or edges with their graph."""


class _EqualEdges(NamedTuple):
    """Edges that a forward has made, and their types, in copies that nobody edits, and their graph."""

    tensors: tuple[Tensor, ...]
    graph: Graph

    def has(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether other edges are these, as a number of the host, which waits for the device here."""
        return all(torch.equal(own, other) for own, other in zip(self.tensors, tensors))


def graph_of(
    seen: Seen,
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    transposed: bool,
    types: tuple[Tensor, int] | None = None,
) -> Graph | None:
    """Return the graph of a call's edges; None if only a look at them, for which the host waits, could tell.

    Args:
        seen: What earlier calls have left.
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
    if graph is not None and graph.is_measured:
        return graph
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    kind = *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors), *sizes
    entry = seen.get(kind)
    if isinstance(entry, _EqualEdges):
        if entry.has(tensors):
            # For the next `propagate` of this forward, which need not wait then.
            keep(entry.graph, tensors, sizes)
            return entry.graph.on_this_stream()
        entry = None
    # Edges of the same sizes as others that are gone: the forward makes them. Others live with their owner.
    is_remade = entry is not None and any(reference() is None for reference in entry)
    # A compiled graph writes to the memory of what it has made as soon as nothing in it reads that any more.
    kept = _copies(tensors) if is_remade else tensors
    graph = Graph.resolve(*kept, *sizes)
    if kind not in seen and len(seen) >= MOST_GRAPHS:
        # Another thread may take the oldest meanwhile.
        seen.pop(list(seen)[0], None)
    seen[kind] = _EqualEdges(kept, graph) if is_remade else tuple(map(weakref.ref, tensors))
    return graph


def _copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies whose edits would leave a trace, also of tensors of inference mode."""
    with torch.inference_mode(False):
        return tuple(tensor.clone() for tensor in tensors)
