"""Gathers, sums over edges, sums over the numbers of a row, and products."""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any

import torch

from pyg_dfgnn.ir.domains import D, Domain, E, One, S
from pyg_dfgnn.ir.register_layout import MAX_SHORT
from pyg_dfgnn.ir.torch_front.lookups import count_types, gather_counts, look_up
from pyg_dfgnn.ir.torch_front.registry import FUNCTIONS, names, pointwise, require, values
from pyg_dfgnn.ir.torch_front.symbols import Symbol, Tracer, Types


@names("index_select")
def index_select(t: Tracer, func: Any, x: Symbol, dim: int, index: Symbol) -> Symbol:
    """Gather rows by the ids of the edges' ends, or by the types of the edges."""
    if isinstance(index, Symbol) and isinstance(index.ids, Types):
        return look_up(t, func(x, dim, index), x, dim, index)
    if isinstance(x.ids, Types):
        return gather_counts(t, func(x, dim, index), x, index)
    if not isinstance(index, Symbol) or index.ids not in (S, D) or index.dim() != 1:
        raise t.stop("rows are taken by ids that are not those of the edges' ends")
    if dim % x.dim() != x.lead:
        raise t.stop(f"nodes along dimension {dim}")
    if x.lift is not None:
        if not x.dtype.is_floating_point:
            raise t.stop("integer features of nodes")
        number = x.lift(index.ids)
    elif x.rows is index.ids and x.number is not None:
        number = x.number
    else:
        raise t.stop(f"rows of {x.rows} are taken by ids of {index.ids}")
    is_shared = t.builder.values[number].domain is One
    return t.result(func(x, dim, index), number if is_shared else t.emit("gather", number, attrs=(E,)), E, lead=x.lead)


def _reduced(t: Tracer, name: str, x: Symbol, dim: int, index: Symbol, source: Any) -> tuple[int, Domain, int | None]:
    """Return what a scatter reads, where it adds to and the value that is there, None for zeros."""
    source, x = values(t, source, x, any_axis=True)
    if not isinstance(index, Symbol) or index.ids not in (S, D) or source.rows is not E:
        raise t.stop("a reduction by other ids than those of the edges' ends")
    dim %= x.dim()
    if dim != source.lead:
        raise t.stop(f"a reduction of dimension {dim}")
    if x.size(dim) != (t.sizes.sources if index.ids is S else t.sizes.targets) or x.dim() != source.dim():
        raise t.stop("a reduction to a number of rows that the graph does not give, as `dim_size` and `size_i` are")
    if source.row(x.shape) != source.sizes or (index.dim() != 1 and index.shape != source.shape):
        raise t.stop("ids or a result of another shape than what is reduced")
    if index.dim() == 1 != source.dim() and name.startswith("scatter"):
        raise t.stop("ids of another shape than what is reduced")
    value = t.value(x)
    return t.id(source), index.ids, None if value.op == "const" and value.attrs == (0.0,) else t.id(x)


@names("scatter_add", "index_add")
def _scatter_add(t: Tracer, func: Any, x: Symbol, dim: int, index: Symbol, src: Any, *, alpha: float = 1) -> Symbol:
    require(alpha == 1, "an alpha")
    if isinstance(src, Symbol) and isinstance(src.ids, Types):
        return count_types(t, x, dim, index, src)
    read, domain, present = _reduced(t, func.__name__, x, dim, index, src)
    number = t.emit("sum", read, attrs=(domain, E))
    return t.result(x, number if present is None else t.emit("add", present, number), domain, lead=dim % x.dim())


@names("scatter_reduce", "index_reduce")
def _scatter_reduce(
    t: Tracer, func: Any, x: Symbol, dim: int, index: Symbol, src: Any, reduce: str, *, include_self: bool = True
) -> Symbol:
    read, domain, present = _reduced(t, func.__name__, x, dim, index, src)
    if include_self or present is not None or reduce not in ("amax", "amin"):
        raise t.stop(f"a reduction by {reduce!r}, or onto what is there")
    if reduce == "amax":
        return t.result(x, t.emit("max", read, attrs=(domain, E)), domain, lead=dim % x.dim())
    number = t.emit("neg", t.emit("max", t.emit("neg", read), attrs=(domain, E)))
    return t.result(x, number, domain, lead=dim % x.dim())


# The numbers of a row -------------------------------------------------------------------------------------------------


def _dims(t: Tracer, x: Symbol, dim: Any) -> list[int]:
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    if x.rows is not None and any(d % x.dim() == x.lead for d in dims):
        raise t.stop("a reduction over all edges or nodes")
    return [d % x.dim() for d in dims]


def _row(x: Symbol, meta: torch.Tensor, dims: list[int]) -> tuple[tuple[int, ...], int]:
    """Return the sizes of a row of what is reduced to another shape, and the dimension of its rows."""
    lead = x.lead if meta.dim() == x.dim() else x.lead - sum(d < x.lead for d in dims)
    return tuple(n for d, n in enumerate(meta.shape) if x.rows is None or d != lead), lead


def _inner(t: Tracer, x: int, y: int) -> int:
    """Return <x, y>; of joined rows the sum of the parts' products, so that those of gathered rows are of nodes."""
    for joined, other in ((x, y), (y, x)):
        parts = t.builder.values[joined].args if t.builder.values[joined].op == "concat" else ()
        if any(_is_of_nodes(t, part) for part in parts):
            ends = list(accumulate(t.shape(part)[-1] for part in parts))
            pieces = [t.emit("slice", other, attrs=(a, b)) for a, b in zip([0, *ends], ends)]
            products = [_inner(t, part, piece) for part, piece in zip(parts, pieces)]
            return reduce(lambda total, product: t.emit("add", total, product), products)
    return t.emit("inner", x, y)


def stacked_parts(t: Tracer, number: int, axis: int) -> list[int] | None:
    """Return the values that are stacked along a size of a row, without that size; None if it is of something else."""
    value, shape = t.builder.values[number], t.shape(number)
    joined, last = value, len(shape) - 1
    if value.op == "permute":
        order = value.attrs[0]
        is_last = order[axis] == last and sorted(order[:axis] + order[axis + 1 :]) == [
            *order[:axis],
            *order[axis + 1 :],
        ]
    else:
        # A view, where other sizes are 1.
        is_last = prod(shape[axis + 1 :]) == 1
    if value.op in ("permute", "view"):
        joined = t.builder.values[value.args[0]]
    if joined.op != "concat" or not is_last or not len(joined.args) == shape[axis] == joined.shape[-1]:
        return None
    row = (*shape[:axis], *shape[axis + 1 :])
    return [t.emit("view", part, attrs=(row,)) for part in joined.args]


@names("sum")
def _sum(t: Tracer, func: Any, x: Symbol, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Symbol:
    require(dtype is None, "a dtype")
    meta, (x,) = func(x) if dim is None else func(x, dim, keepdim), values(t, x, any_axis=True)
    dims, value = _dims(t, x, dim), t.value(x)
    row, lead = _row(x, meta, dims)
    if dims == [x.dim() - 1] and value.op == "mul" and all(t.shape(a)[-1:] == (x.size(-1),) for a in value.args):
        # Sizes that only broadcast stay open: the value has fewer numbers than the symbol then.
        number = _inner(t, *value.args)
        number = t.emit("view", number, attrs=((*t.shape(number), 1),)) if keepdim else number
        return t.result(meta, number, x.rows, lead=lead)
    axes = {x.axis(d) for d in dims}
    parts = stacked_parts(t, t.full(x), *axes) if len(axes) == 1 else None
    if parts is not None:
        total = reduce(lambda one, other: t.emit("add", one, other), parts)
        return t.result(meta, t.emit("view", total, attrs=(row,)), x.rows, lead=lead)
    folded = tuple(1 if axis in axes else n for axis, n in enumerate(x.sizes))
    number = t.emit("fold", t.full(x), attrs=(folded,))
    return t.result(meta, t.emit("view", number, attrs=(row,)), x.rows, lead=lead)


@names("amax")
def _amax(t: Tracer, func: Any, x: Symbol, dim: Any = (), keepdim: bool = False) -> Symbol:
    (x,) = values(t, x, any_axis=True)
    dims, rank = _dims(t, x, dim), len(x.sizes)
    require(len(dims) == 1, "several dimensions")
    axis, meta = x.axis(dims[0]), func(x, dims[0], keepdim)
    row, lead = _row(x, meta, dims)
    order, parts = (*(i for i in range(rank) if i != axis), axis), stacked_parts(t, t.full(x), axis)
    if parts is not None and len(parts) == 2:
        number = t.emit("maximum", *parts)
    else:
        number = t.emit("amax", t.emit("permute", t.full(x), attrs=(order,)))
    return t.result(meta, t.emit("view", number, attrs=(row,)), x.rows, lead=lead)


# Products -------------------------------------------------------------------------------------------------------------


_SUMS = ("add", "sub")
"""Pointwise operators that a map may be moved over."""


def _is_of_nodes(t: Tracer, number: int) -> bool:
    """Whether a value on edges only moves numbers of one end."""
    value = t.builder.values[number]
    if value.op in ("view", "permute", "slice", "expand"):
        return _is_of_nodes(t, value.args[0])
    return value.op == "gather"


def _mapped(t: Tracer, x: int, weight: int) -> int:
    """Return x W; of joined rows the sum of the parts' maps, so that those of gathered rows are maps of nodes.

    The same goes for sums and differences of gathered rows, but where a kernel maps short rows to longer ones in
    registers.
    """
    value, shape = t.builder.values[x], t.shape(x)
    if value.op in _SUMS and all(t.shape(arg) == shape and _is_of_nodes(t, arg) for arg in value.args):
        if shape[-1] > MAX_SHORT or t.shape(weight)[-1] <= shape[-1]:
            return t.emit(value.op, *(_mapped(t, arg, weight) for arg in value.args))
    joined = t.builder.values[value.args[0]] if value.op == "view" else value
    rank, is_same = len(t.shape(weight)), shape == tuple(n for n in joined.shape if n != 1) or joined is value
    if joined.op != "concat" or not is_same or not any(_is_of_nodes(t, arg) for arg in joined.args):
        return t.emit("linear", x, weight)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    columns, begin, products = t.emit("permute", weight, attrs=(swap,)), 0, list[int]()
    for arg in joined.args:
        end = begin + t.shape(arg)[-1]
        piece = t.emit("permute", t.emit("slice", columns, attrs=(begin, end)), attrs=(swap,))
        rows = t.emit("view", arg, attrs=((*shape[:-1], end - begin),))
        products.append(_mapped(t, rows, piece))
        begin = end
    total = products[0]
    for product in products[1:]:
        total = t.emit("add", total, product)
    return total


def _of_one_dtype(t: Tracer, *factors: Symbol) -> None:
    """Refuse factors of several dtypes, which torch multiplies on meta tensors only."""
    dtypes = list(dict.fromkeys(x.dtype for x in factors))
    if len(dtypes) > 1 and not t.has_autocast:
        raise t.stop(f"a product of {' and '.join(map(str, dtypes))}")


@names("linear")
def _linear(t: Tracer, func: Any, x: Symbol, weight: Any, bias: Any = None) -> Symbol:
    x, w = values(t, x, weight, any_axis=True)
    _of_one_dtype(t, x, w, *(() if bias is None else (t.symbol(bias),)))
    if x.lead and x.lead == x.dim() - 1:
        raise t.stop("a product over the rows")
    require(w.rows is None and w.dim() == 2 and x.size(-1) == w.size(1), "a weight that is no matrix of that size")
    # Torch's meta function of a product with a bias is one of Python.
    is_alike = x.dtype is w.dtype and (bias is None or bias.dtype is x.dtype and bias.shape == w.shape[:1])
    meta = x.new_empty((*x.shape[:-1], w.size(0))) if is_alike else func(x, weight, bias)
    out = t.result(meta, _mapped(t, t.full(x), t.emit("permute", t.full(w), attrs=((1, 0),))), x.rows, lead=x.lead)
    return out if bias is None else pointwise(t, meta, "add", out, bias)


@names("matmul", "mm", "bmm")
def matmul(t: Tracer, func: Any, x: Any, y: Any) -> Symbol:
    """Multiply rows, or the vectors or matrices in each row."""
    meta, (x, y) = func(x, y), values(t, x, y, any_axis=True)
    _of_one_dtype(t, x, y)
    if x.lead or y.lead:
        if y.rows is not None or y.dim() != 2 or x.lead == x.dim() - 1:
            raise t.stop("a product of nodes along another dimension than the first")
        return t.result(meta, _mapped(t, t.full(x), t.full(y)), x.rows, lead=x.lead)
    rows, a, b = x.rows or y.rows, t.full(x), t.full(y)
    if rows is not None and (meta.dim() == 0 or t.domain_of_size(meta.size(0)) is not rows or y.dim() > x.dim() + 1):
        raise t.stop("a product over the rows")
    is_vector = x.dim() - (x.rows is not None) == 1
    if is_vector and (y.dim() > 2 or y.rows is not None):
        raise t.stop("a product in which the rows are a dimension of a matrix")
    if not is_vector and rows is not None and x.dim() == y.dim():
        # The rows are a dimension of the batch; what all share has 1 there.
        a = a if x.rows is not None else t.emit("view", a, attrs=(t.shape(a)[1:],))
        b = b if y.rows is not None else t.emit("view", b, attrs=(t.shape(b)[1:],))
    if len(t.shape(b)) == 1:
        b = t.emit("view", b, attrs=((*t.shape(b), 1),))
    left, right = t.shape(a), t.shape(b)
    if len(left) == 1:
        number = _mapped(t, a, b)
    elif rows is not None and left[-2] == 1:
        number = _mapped(t, t.emit("view", a, attrs=((*left[:-2], left[-1]),)), b)
    elif x.rows is not None and y.rows is None and len(right) == 2:
        number = _mapped(t, a, b)
    else:
        number = t.emit("matmul", a, b)
    row = tuple(meta.shape) if rows is None else tuple(meta.shape[1:])
    return t.result(meta, t.emit("view", number, attrs=(row,)), rows)


FUNCTIONS["rmatmul"] = lambda t, func, x, y: matmul(t, torch.matmul, y, x)
