"""Views, slices and joins of the numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.program import broadcast, skip_views
from pyg_dfgnn.ir.torch_front.pointwise import filled, size_of
from pyg_dfgnn.ir.torch_front.reductions import index_select, stacked_parts
from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS, names, require, values
from pyg_dfgnn.ir.torch_front.symbols import Symbol, Tracer

_MOVED = "the rows are no longer one dimension"
_BY_POSITION = "some rows are taken by their position"


def _reshaped(t: Tracer, x: Symbol, meta: Tensor) -> Symbol:
    """Return what any function returns that keeps the order of numbers."""
    x.shared = True
    if x.ids is not None and x.ids is not E and meta.numel() == x.numel():
        return t.result(meta, None, x.rows, ids=x.ids, shared=True)
    (x,) = values(t, x, any_axis=True)
    lead, row = 0, tuple(meta.shape)
    if x.rows is not None:
        size, before = x.size(x.lead), prod(x.shape[: x.lead])
        leads = [k for k, n in enumerate(row) if n == size and prod(row[:k]) == before]
        if not leads:
            raise t.stop(_MOVED)
        lead = leads[0]
        row = (*row[:lead], *row[lead + 1 :])
    parts = stacked_parts(t, t.full(x), 0) if len(x.sizes) > 1 == len(row) else None
    if prod(t.shape(t.id(x))) == 1:
        # One number, however often it is repeated.
        number = t.emit("view", t.id(x), attrs=((1,) * len(row),))
    elif parts is not None:
        number = t.emit("concat", *(t.emit("view", part, attrs=((prod(t.shape(part)),),)) for part in parts))
    else:
        number = t.emit("view", t.full(x), attrs=(row,))
    return t.result(meta, number, x.rows, lead=lead, shared=True)


@names("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
def _reshape(t: Tracer, func: Any, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    if args and isinstance(args[0], torch.dtype):
        raise t.stop("a view of another dtype")
    return _reshaped(t, x, func(x, *args, **kwargs))


def _expanded(func: Any, x: Symbol, *args: Any, **kwargs: Any) -> Tensor:
    """Return a meta tensor like the result, which torch asks slow functions of Python for."""
    size = args[0].shape if func.__name__ == "expand_as" and args else size_of(args)
    is_plain = not kwargs and all(type(n) is int and n > 0 for n in size)
    if is_plain and broadcast("expand", tuple(x.shape), tuple(size)) == tuple(size):
        return torch.empty(size, dtype=x.dtype, device="meta")
    result: Tensor = func(x, *args, **kwargs)
    return result


@names("expand", "expand_as", "broadcast_to")
def _expand(t: Tracer, func: Any, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    meta = _expanded(func, x, *args, **kwargs)
    x.shared = True
    if x.ids is not None:
        return t.result(meta, None, x.rows, ids=x.ids, shared=True)
    (x,) = values(t, x, any_axis=True)
    number, rows, shape = t.id(x), x.rows, t.shape(t.id(x))
    lead = x.lead + meta.dim() - x.dim()
    if rows is None:
        leads = [k for k, n in enumerate(meta.shape) if t.domain_of_size(n) is not None]
        if len(leads) > 1:
            raise t.stop("rows meet another dimension")
        lead = leads[0] if leads else 0
        rows = t.domain_of_size(meta.size(lead)) if leads else None
        at = lead - meta.dim() + len(shape)
        if leads and at >= 0:
            number = t.emit("view", number, attrs=((*shape[:at], *shape[at + 1 :]),))
    return t.result(meta, number, rows, lead=lead, shared=True)


@names("permute", "transpose", "movedim", "swapaxes", "t", "T", "mT", "swapdims")
def _permute(t: Tracer, func: Any, x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    meta = func(x, *args, **kwargs)
    (x,) = values(t, x, any_axis=True)
    x.shared, lead = True, 0
    # The order is read off a small tensor whose sizes all differ.
    order = [size - 2 for size in func(torch.empty(tuple(range(2, 2 + x.dim())), device="meta"), *args, **kwargs).shape]
    if x.rows is not None:
        lead = order.index(x.lead)
        order = [i - (i > x.lead) for i in order if i != x.lead]
    return t.result(meta, t.emit("permute", t.full(x), attrs=(tuple(order),)), x.rows, lead=lead, shared=True)


FUNCTIONS[".T"] = lambda t, x: _permute(t, lambda y: y.T, t.symbol(x))
FUNCTIONS[".mT"] = lambda t, x: _permute(t, lambda y: y.mT, t.symbol(x))


@names("repeat", "tile")
def _repeat(t: Tracer, func: Any, x: Symbol, *args: Any) -> Any:
    times, want = size_of(args), tuple(func(x, *args).shape)
    have = (1,) * (len(want) - x.dim()) + tuple(x.shape)
    pairs = [k for n, size in zip(times, have) for k in ((n, size) if n != 1 != size else (n * size,))]
    ones = [k for n, size in zip(times, have) for k in ((1, size) if n != 1 != size else (size,))]
    with t:
        return x.view(ones).expand(pairs).reshape(want).clone()


@names("repeat_interleave")
def _repeat_interleave(t: Tracer, func: Any, x: Symbol, repeats: int, dim: int) -> Any:
    require(isinstance(repeats, int), "counts that are a tensor")
    dim %= x.dim()
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    with t:
        wide = x.unsqueeze(dim + 1).expand(*before, size, repeats, *after)
        return wide.reshape(*before, size * repeats, *after)


def _last(dim: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the order of dimensions that puts one last, and the order back."""
    order = (*(i for i in range(rank) if i != dim), dim)
    return order, tuple(order.index(i) for i in range(rank))


def _joined(func: Any, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return a meta tensor like the result, which torch asks slow functions of Python for."""
    first = tensors[0]
    shapes = [list(x.shape) for x in tensors]
    sizes = [shape.pop(dim) for shape in shapes if len(shape) == first.dim() > 0]
    if (
        len(sizes) < len(shapes)
        or any(x.dtype is not first.dtype for x in tensors)
        or shapes.count(shapes[0]) < len(shapes)
    ):
        result: Tensor = func(tensors, dim)
        return result
    shape = shapes[0]
    shape.insert(dim % first.dim(), sum(sizes))
    return torch.empty(shape, dtype=first.dtype, device="meta")


@names("cat", "concat", "concatenate")
def _cat(t: Tracer, func: Any, tensors: Sequence[Any], dim: int = 0) -> Symbol:
    meta, symbols = _joined(func, tensors, dim), values(t, *tensors, any_axis=True)
    like = next((x for x in symbols if x.rows is not None), symbols[0])
    dim %= meta.dim()
    if like.rows is not None and dim == like.lead:
        raise t.stop("rows are joined, not their numbers")
    axis = like.axis(dim)
    order, back = _last(axis, len(like.sizes))
    numbers = []
    for x in symbols:
        number = t.emit("expand", t.aligned(x, like)[0][0], attrs=(like.row(x.shape),))
        numbers.append(t.emit("permute", number, attrs=(order,)))
    return t.result(meta, t.emit("permute", t.emit("concat", *numbers), attrs=(back,)), like.rows, lead=like.lead)


@names("stack")
def _stack(t: Tracer, func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    symbols = values(t, *tensors, any_axis=True)
    dim %= symbols[0].dim() + 1
    with t:
        return torch.cat([x.unsqueeze(dim) for x in symbols], dim)


def _sliced(t: Tracer, x: Symbol, dim: int, begin: int, end: int) -> Symbol:
    """Return a range of a dimension that is not that of rows."""
    if x.rows is not None and dim == x.lead:
        raise t.stop(_BY_POSITION)
    x.shared = True
    number, axis, value = t.full(x), x.axis(dim), t.value(x)
    if value.op == "concat" and axis != len(x.sizes) - 1:
        # The parts keep apart, so that maps of them may be those of nodes.
        parts = [_ranged(t, arg, axis, begin, end) for arg in value.args]
        number = t.emit("concat", *parts)
    else:
        number = _ranged(t, number, axis, begin, end)
    return t.result(x.narrow(dim, begin, end - begin), number, x.rows, lead=x.lead, shared=True)


def _ranged(t: Tracer, number: int, axis: int, begin: int, end: int) -> int:
    value, shape = t.builder.values[number], t.shape(number)
    parts = stacked_parts(t, number, axis) if end == begin + 1 else None
    if parts is not None:
        return t.emit("view", parts[begin], attrs=((*shape[:axis], 1, *shape[axis + 1 :]),))
    if value.op == "expand" and ((1,) * len(shape) + t.shape(value.args[0]))[axis - len(shape)] == 1:
        return t.emit("expand", value.args[0], attrs=((*shape[:axis], end - begin, *shape[axis + 1 :]),))
    flat = skip_views(t.builder.values, number)
    if axis + 1 < len(shape) and prod(shape[:axis]) == 1 and t.shape(flat) == (prod(shape),):
        # One range of the numbers of a row, as it was before it got these sizes.
        inner = prod(shape[axis + 1 :])
        part = t.emit("slice", flat, attrs=(begin * inner, end * inner))
        return t.emit("view", part, attrs=((*shape[:axis], end - begin, *shape[axis + 1 :]),))
    order, back = _last(axis, len(t.shape(number)))
    part = t.emit("slice", t.emit("permute", number, attrs=(order,)), attrs=(begin, end))
    return t.emit("permute", part, attrs=(back,))


@names("narrow", "select")
def _narrow(t: Tracer, func: Any, x: Symbol, dim: int, start: int, length: int | None = None) -> Symbol:
    meta, (x,) = func(x, dim, start, *(() if length is None else (length,))), values(t, x, any_axis=True)
    dim %= x.dim()
    start = start + x.size(dim) if start < 0 else start
    return _reshaped(t, _sliced(t, x, dim, start, start + (1 if length is None else length)), meta)


@names("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk")
def _split(t: Tracer, func: Any, x: Symbol, parts: Any, dim: int = 0) -> tuple[Symbol, ...]:
    metas, (x,) = func(x, parts, dim=dim), values(t, x, any_axis=True)
    dim %= x.dim()
    ends = [sum(m.size(dim) for m in metas[: k + 1]) for k in range(len(metas))]
    return tuple(_sliced(t, x, dim, end - m.size(dim), end) for m, end in zip(metas, ends))


@names("unbind")
def _unbind(t: Tracer, func: Any, x: Symbol, dim: int = 0) -> tuple[Symbol, ...]:
    if x.ids is E:
        return tuple(t.ends_of(x, row) for row in (0, 1))
    metas, (x,) = func(x, dim), values(t, x, any_axis=True)
    dim %= x.dim()
    return tuple(_reshaped(t, _sliced(t, x, dim, k, k + 1), meta) for k, meta in enumerate(metas))


@names("getitem")
def _getitem(t: Tracer, func: Any, x: Symbol, key: Any) -> Any:
    if x.ids is E:
        if not isinstance(key, int):
            raise t.stop("some edges are taken by their position")
        return t.ends_of(x, key)
    keys = key if isinstance(key, tuple) else (key,)
    if isinstance(keys[-1], Symbol) and all(type(k) is slice and k == slice(None) for k in keys[:-1]):
        return index_select(t, torch.index_select, x, len(keys) - 1, keys[-1])
    ranges = _ranges(x, keys)
    meta, (x,) = func(x, key), values(t, x, any_axis=True)
    for dim, (begin, end) in enumerate(ranges):
        if (begin, end) != (0, x.size(dim)):
            x = _sliced(t, x, dim, begin, end)
    return _reshaped(t, x, meta)


def _ranges(x: Symbol, keys: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return the range of each dimension that an index takes."""
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    at, taken = keys.index(Ellipsis), sum(k is not None and k is not Ellipsis for k in keys)
    keys = (*keys[:at], *(slice(None),) * (x.dim() - taken), *keys[at + 1 :])
    require(all(k is None or type(k) in (slice, int) for k in keys), "an index that is no number or range")
    ranges = []
    for size, k in zip(x.shape, (k for k in keys if k is not None)):
        begin, end, step = k.indices(size) if isinstance(k, slice) else (k % size, k % size + 1, 1)
        require(step == 1, "a step other than 1")
        ranges.append((begin, max(begin, end)))
    return ranges


@names("setitem")
def _setitem(t: Tracer, func: Any, x: Symbol, key: Any, rows: Any) -> None:
    """Let a part of x be other numbers: x is joined of what is before, in and after the part."""
    keys = key if isinstance(key, tuple) else (key,)
    ranges, (own,) = _ranges(x, keys), values(t, x, any_axis=True)
    part = x.size(own.lead)
    if x.shared or (own.rows is not None and ranges[own.lead] != (0, part)):
        raise t.stop(
            "some rows are edited by their position" if not x.shared else "edits a tensor that is read elsewhere"
        )
    shape = [end - begin for begin, end in ranges]
    number = None if isinstance(rows, Tensor) else filled(t, shape, rows, x.dtype)
    if isinstance(rows, Tensor):
        require(rows.dtype is x.dtype, "numbers of another dtype")
        taken = Tensor.__getitem__(x, key).shape
        require(rows.dim() <= len(taken), "numbers with more dimensions than the part")

    def assigned(value: Any, dims: list[int]) -> Any:
        if not dims:
            return rows.expand(taken).reshape(shape) if number is None else number
        dim, *others = dims
        begin, end = ranges[dim]
        new = assigned(value.narrow(dim, begin, end - begin), others)
        before, after = value.narrow(dim, 0, begin), value.narrow(dim, end, value.shape[dim] - end)
        return torch.cat([each for each in (before, new, after) if each.shape[dim]], dim)

    with t:
        result = assigned(x, [dim for dim, each in enumerate(ranges) if each != (0, x.shape[dim])])
    x.number, x.rows, x.lead, x.shared = result.number, result.rows, result.lead, False
