"""Graphs of reductions whose index is a view, as the rows of an `edge_index` are."""

from torch import Tensor

from pyg_dfgnn.errors import as_integer
from pyg_dfgnn.graph.cache import CacheKey
from pyg_dfgnn.graph.derived import version_of
from pyg_dfgnn.graph.graph import Graph, _cache


def graph_of_index(index: Tensor, num_groups: int) -> Graph:
    """The graph of :meth:`Graph.of_index`; that of a view is cached for as long as the tensor that it views.

    PyG's convs reduce by ``edge_index[1]``, which is a new tensor in every call.

    Args:
        index: Group of each position, int64 or int32 [E], in any order.
        num_groups: Number of groups.

    Raises:
        TypeError: `index` is no integer tensor.
        ValueError: It has another shape, or a group out of range.
    """
    base = index._base
    if base is None or index.dim() != 1:
        return Graph.of_index(index, num_groups)
    num_groups = as_integer("num_groups", num_groups)
    graph = _of_view(base, index, num_groups)
    if graph is None:
        graph = Graph.of_index(index, num_groups)
        _cache.put(_key(base, index, num_groups), (base,), (version_of(base),), graph)
    return graph.on_this_stream()


def known_graph(index: Tensor | None, ptr: Tensor | None, num_groups: int | None) -> Graph | None:
    """Return the cached graph of an index, or of offsets where there is none; None if there is nothing in the cache."""
    if index is None:
        return Graph.known(ptr)
    if num_groups is None:
        return None
    graph = Graph.known(index, num_groups)
    base = index._base
    return graph if graph is not None or base is None else _of_view(base, index, num_groups)


def _of_view(base: Tensor, index: Tensor, num_groups: int) -> Graph | None:
    return _cache.get(_key(base, index, num_groups), (base,), (version_of(base),)) if index.dim() == 1 else None


def _key(base: Tensor, index: Tensor, num_groups: int) -> CacheKey:
    return id(base), index.dtype, index.storage_offset(), index.size(0), index.stride(0), num_groups
