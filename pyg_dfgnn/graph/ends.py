"""Edges of a part of a graph as a tensor: rows of remote sources are fetched, and what is reduced by them is sent back.

PyG's layers, and those that users write, read edges by a few functions: the ids of an end are selected, nodes are
gathered by ids, and edges are reduced by ids. Here these functions know that sources may belong to other processes, so
that a layer computes on a part what it computes on the whole graph. A function that is not known raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.torch_private import DisableTorchFunctionSubclass


class PartRefusedError(UnsupportedError):
    """A layer calls something on its edges that the edges of a part do not know."""


class Part(Protocol):
    """A process's part of a graph; see :class:`pyg_dfgnn.distributed.PartitionedGraph`."""

    @property
    def kept(self) -> dict[Any, Any]:
        """Values that are computed once for the part, by name."""

    @property
    def edge_index(self) -> Tensor:
        """The own edges [2, E], as a plain tensor."""

    @property
    def num_nodes(self) -> int:
        """Number of own nodes, which are targets."""

    @property
    def num_own_sources(self) -> int:
        """Number of own sources: of the own nodes, or of those of another type."""

    @property
    def num_sources(self) -> int:
        """Number of own sources and halo nodes."""

    def exchange(self, x: Tensor) -> Tensor:
        """Return rows of own sources and halo, of rows of own sources."""

    def collect(self, rows: Tensor, reduce: str = "sum") -> Tensor:
        """Return rows of own sources, of rows of own sources and halo: those of all processes reduced."""


class PartitionedEdges(Tensor):
    """Edges [2, E] of a part, or ids of their sources, of any shape.

    Attributes:
        part: The part.
        row: The row that holds the sources; None: all ids are of sources.
        is_whole: Whether these are all edges of the part, as they are.
    """

    part: Part
    row: int | None
    is_whole: bool

    @staticmethod
    def of(ids: Tensor, part: Part, row: int | None = 0, is_whole: bool = False) -> PartitionedEdges:
        """Return ids as edges of a part, or as sources."""
        edges = ids.as_subclass(PartitionedEdges)
        edges.part, edges.row, edges.is_whole = part, row, is_whole
        return edges

    @property
    def ids(self) -> Tensor:
        """The ids as a plain tensor."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return _called(func, tuple(args), dict(kwargs or {}))


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _FUNCTIONS.get(func)
    if kwargs.get("out") is not None:
        _refuse(func)
    if known is not None:
        return known(func, args, kwargs)
    is_property = getattr(func, "__name__", "") == "__get__"
    if func not in _PLAIN and not is_property:
        # Before it may write anywhere.
        _refuse(func)
    result = func(*_plain(args), **_plain(kwargs))
    if is_property and isinstance(result, Tensor):
        _refuse(func)
    return result


def _refuse(func: Callable[..., Any]) -> NoReturn:
    name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    raise PartRefusedError([f"a layer calls {name} on its edges, which needs a whole graph"], "the partitioned graph")


def _plain(value: Any) -> Any:
    """Return arguments with plain tensors of ids."""
    if isinstance(value, PartitionedEdges):
        return value.ids
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _find(values: Sequence[Any]) -> PartitionedEdges:
    return next(each for each in values if isinstance(each, PartitionedEdges))


def _like(value: PartitionedEdges, ids: Tensor) -> PartitionedEdges:
    return PartitionedEdges.of(ids, value.part, value.row)


def _bound(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args)) | kwargs


# What ids are selected ------------------------------------------------------------------------------------------------


def _end(edges: PartitionedEdges, ids: Tensor, row: int) -> Tensor:
    """Return the ids of an end."""
    return PartitionedEdges.of(ids, edges.part, None) if row % 2 == edges.row else ids


def _getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    edges, index = args
    if not isinstance(edges, PartitionedEdges):
        return _gathered(edges, index)
    ids, found = edges.ids[_plain(index)], index[0] if isinstance(index, tuple) and index else index
    if edges.row is None or (isinstance(found, slice) and found == slice(None)) or found is Ellipsis:
        return _like(edges, ids)
    if isinstance(found, int):
        return _end(edges, ids, found)
    if found == [1, 0]:
        return PartitionedEdges.of(ids, edges.part, 1 - edges.row)
    _refuse(func)


def _select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bound(("input", "dim", "index"), args, kwargs)
    edges, ids = bound["input"], func(*_plain(args), **kwargs)
    if edges.row is None or bound["dim"] % 2 == 1:
        return _like(edges, ids)
    return _end(edges, ids, bound["index"])


def _parted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    edges, parts = _find(args), func(*_plain(args), **kwargs)
    dim = kwargs.get("dim", args[-1] if func in _DIM_LAST and len(args) > 1 else args[2] if len(args) > 2 else 0)
    if edges.row is None or dim % 2 == 1:
        return tuple(_like(edges, part) for part in parts)
    if len(parts) != 2:
        _refuse(func)
    return tuple(_end(edges, part, row) for row, part in enumerate(parts))


def _kept(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ids in another form."""
    given = _plain(args)
    ids = func(*given, **_plain(kwargs))
    if not isinstance(args[0], PartitionedEdges) or not isinstance(ids, Tensor):
        return ids
    if ids is given[0]:
        return args[0]
    return _like(args[0], ids) if ids.dtype in (torch.int64, torch.int32) else ids


def _reshaped(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sources in another shape; edges have one."""
    edges, ids = args[0], func(*_plain(args), **_plain(kwargs))
    if not isinstance(edges, PartitionedEdges):
        # Such as `values.expand_as(index)`.
        return ids
    if edges.row is not None and ids.shape != edges.shape:
        _refuse(func)
    return _like(edges, ids)


def _iterated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(_parted(Tensor.unbind, args, {}))


def _flip(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    edges, ids = args[0], func(*_plain(args), **kwargs)
    dims = kwargs.get("dims", args[1:])
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    is_turned = edges.row is not None and any(dim % edges.dim() == 0 for dim in dims)
    return PartitionedEdges.of(ids, edges.part, 1 - edges.row) if is_turned else _like(edges, ids)


def _joined(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Edges, or sources, behind each other; plain ones are of own nodes, such as self-loops."""
    parts = args[0] if args else kwargs["tensors"]
    edges = _find(parts)
    if any(isinstance(each, PartitionedEdges) and each.row != edges.row for each in parts):
        _refuse(func)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if edges.row is not None and dim % 2 == 0:
        _refuse(func)
    return _like(edges, torch.cat(_plain(list(parts)), dim=dim))


def _stacked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = list(args[0] if args else kwargs["tensors"])
    rows = [row for row, each in enumerate(parts) if isinstance(each, PartitionedEdges)]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    source = parts[rows[0]]
    if len(parts) != 2 or len(rows) != 1 or source.row is not None or dim != 0:
        _refuse(func)
    return PartitionedEdges.of(torch.stack(_plain(parts)), source.part, rows[0])


def _compared(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether ends of edges are equal; a number is an id of the whole graph, and these ids are not."""
    if kwargs or not all(isinstance(each, Tensor) and not each.is_floating_point() for each in args):
        _refuse(func)
    return func(*_plain(args))


def _smallest(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 or kwargs:
        _refuse(func)
    return args[0].ids.min()


def _set(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of own nodes, such as those of self-loops, are set; those of the halo belong to others."""
    into, index, value = args
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(into, PartitionedEdges) or isinstance(value, PartitionedEdges):
        _refuse(func)
    for each in parts:
        if isinstance(each, PartitionedEdges) and each.ids.numel() and int(each.ids.max()) >= each.part.num_own_sources:
            _refuse(func)
    return func(*_plain(args))


def _put(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set rows of a copy, as :func:`_set` does."""
    bound = _bound(("input", "indices", "values", "accumulate"), args, kwargs)
    out = bound["input"].clone()
    if bound.get("accumulate", False) or isinstance(out, PartitionedEdges):
        _refuse(func)
    places = tuple(slice(None) if each is None else each for each in bound["indices"])
    _set(Tensor.__setitem__, (out, places, bound["values"]), {})
    return out


def _largest(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest id, from which layers tell the number of nodes."""
    if len(args) > 1 or kwargs:
        _refuse(func)
    edges, own = args[0], args[0].part.num_own_sources
    return edges.ids.new_tensor((own if edges.row is None else max(own, edges.part.num_nodes)) - 1)


# Nodes by ids ---------------------------------------------------------------------------------------------------------


def _fetched(part: Part, x: Tensor, dim: int) -> Tensor:
    """Return rows of own nodes and halo along a dimension."""
    return part.exchange(x.movedim(dim, 0)).movedim(0, dim) if dim else part.exchange(x)


def _gathered(x: Tensor, index: Any) -> Tensor:
    """Return rows of nodes by sources."""
    parts = index if isinstance(index, tuple) else (index,)
    dim = next(k for k, each in enumerate(parts) if isinstance(each, PartitionedEdges))
    if any(not isinstance(each, slice) or each != slice(None) for each in parts[:dim]):
        _refuse(Tensor.__getitem__)
    return _fetched(parts[dim].part, x, dim)[_plain(index)]


def _index_select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bound(("input", "dim", "index"), args, kwargs)
    x, dim, index = bound["input"], bound["dim"], bound["index"]
    if isinstance(x, PartitionedEdges):
        if x.row is not None and dim % 2 == 0:
            _refuse(func)
        return _like(x, x.ids.index_select(dim, _plain(index)))
    dim %= x.dim()
    return _fetched(index.part, x, dim).index_select(dim, index.ids)


def _gather(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _bound(("input", "dim", "index"), args, kwargs)
    x, dim, index = bound["input"], bound["dim"], bound["index"]
    if isinstance(x, PartitionedEdges):
        _refuse(func)
    return _fetched(index.part, x, dim % x.dim()).gather(dim, index.ids)


# Reductions by ids ----------------------------------------------------------------------------------------------------

_BOUNDS = {"amax": -torch.inf, "amin": torch.inf}
_OF_BOTH = {"amax": torch.maximum, "amin": torch.minimum}


def _reduced(names: Sequence[str], is_scatter: bool, in_place: bool) -> Callable[..., Any]:
    """Return what reduces rows of edges by their sources: each process what it has, and owners all of it."""

    def reduce(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = _bound(names, args, kwargs)
        into, index, rows = bound["input"], bound["index"], bound[names[3]]
        how, dim = bound.get("reduce", "sum"), bound["dim"] % into.dim()
        if not isinstance(index, PartitionedEdges) or not isinstance(rows, Tensor) or bound.get("alpha", 1) != 1:
            _refuse(func)
        part, shape = index.part, [*into.shape]
        is_untold = shape[dim] == 0 and not index.ids.numel()
        if is_untold:
            # Of no edges layers tell no number of nodes, while other processes do.
            shape[dim] = part.num_own_sources
            into = into.new_zeros(shape)
        shape[dim] = part.num_sources
        apply = Tensor.scatter_add if is_scatter else Tensor.index_add
        if how == "sum" and bound.get("include_self", True):
            total = apply(into.new_zeros(shape), dim, index.ids, rows)
            out = into + part.collect(total.movedim(dim, 0)).movedim(0, dim)
        elif how in _BOUNDS and into.is_floating_point() and not (rows.requires_grad and torch.is_grad_enabled()):
            most = into.new_full(shape, _BOUNDS[how]).scatter_reduce(dim, index.ids, rows, how)
            most = part.collect(most.movedim(dim, 0), how).movedim(0, dim)
            found = most if not bound.get("include_self", True) else _OF_BOTH[how](most, into)
            out = torch.where(most == _BOUNDS[how], into, found)
        else:
            _refuse(func)
        return into.copy_(out) if in_place and not is_untold else out

    return reduce


_SCATTER, _INDEX = ("input", "dim", "index", "src"), ("input", "dim", "index", "source")
_DIM_LAST = {Tensor.unbind, torch.unbind}
_PLAIN = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor, torch.zeros_like),
    *(torch.ones_like, torch.empty_like, torch.full_like, torch.numel, torch.is_floating_point, torch.is_complex),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_contiguous, Tensor.is_inference),
    *(Tensor.data_ptr, Tensor.get_device, Tensor.storage_offset, Tensor.untyped_storage, Tensor.record_stream),
    torch.ops.aten.sym_size.int,
    *(Tensor.__len__, Tensor.__hash__, Tensor.__repr__, Tensor.__format__, Tensor.is_shared, Tensor.is_pinned),
}
"""Functions that make nothing of where nodes are."""
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__iter__: _iterated,
    **dict.fromkeys((Tensor.select, torch.select), _select),
    **dict.fromkeys((Tensor.unbind, torch.unbind, Tensor.chunk, torch.chunk, Tensor.split, torch.split), _parted),
    **dict.fromkeys(
        (
            *(Tensor.to, Tensor.long, Tensor.int, Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.cpu),
            *(Tensor.cuda, torch.clone, torch.detach, Tensor.type, Tensor.requires_grad_),
        ),
        _kept,
    ),
    **dict.fromkeys(
        (
            *(Tensor.view, Tensor.reshape, Tensor.expand, Tensor.expand_as, Tensor.unsqueeze, Tensor.squeeze),
            *(torch.unsqueeze, torch.squeeze, Tensor.flatten, torch.flatten, torch.reshape, torch.broadcast_to),
            *(Tensor.broadcast_to, Tensor.view_as, Tensor.repeat, Tensor.ravel),
        ),
        _reshaped,
    ),
    **dict.fromkeys((Tensor.flip, torch.flip), _flip),
    **dict.fromkeys((torch.cat, torch.concat), _joined),
    torch.stack: _stacked,
    **dict.fromkeys((Tensor.max, torch.max, Tensor.amax, torch.amax), _largest),
    **dict.fromkeys((Tensor.min, torch.min, Tensor.amin, torch.amin), _smallest),
    **dict.fromkeys((Tensor.eq, Tensor.ne, torch.eq, torch.ne, Tensor.__eq__, Tensor.__ne__), _compared),
    Tensor.__setitem__: _set,
    **dict.fromkeys((Tensor.index_put, torch.index_put), _put),
    **dict.fromkeys((Tensor.index_select, torch.index_select), _index_select),
    **dict.fromkeys((Tensor.gather, torch.gather), _gather),
    **dict.fromkeys((Tensor.scatter_add, torch.scatter_add), _reduced(_SCATTER, True, False)),
    Tensor.scatter_add_: _reduced(_SCATTER, True, True),
    **dict.fromkeys((Tensor.index_add, torch.index_add), _reduced(_INDEX, False, False)),
    Tensor.index_add_: _reduced(_INDEX, False, True),
    **dict.fromkeys((Tensor.scatter_reduce, torch.scatter_reduce), _reduced((*_SCATTER, "reduce"), True, False)),
    Tensor.scatter_reduce_: _reduced((*_SCATTER, "reduce"), True, True),
}
