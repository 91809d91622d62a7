"""Lookups by types of edges: rows of tables, and how many edges of a node have the type of an edge."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_dfgnn.ir.domains import D, Domain, E, R, S, U, V
from pyg_dfgnn.ir.torch_front.registry import names, require, values
from pyg_dfgnn.ir.torch_front.symbols import Symbol, Tracer, Types


def look_up(t: Tracer, meta: Tensor, table: Symbol, dim: int, index: Symbol) -> Symbol:
    """Return the row of a table, which all edges share, of the type of each edge."""
    (table,), types = values(t, table), index.ids
    assert isinstance(types, Types)
    if table.rows is not None or dim % table.dim() != 0 or types.counted is not None or index.dim() != 1:
        raise t.stop("types of edges look up something else than the rows of a table")
    t.look_up(types, table.size(0))
    return t.result(meta, t.emit("gather", t.emit("table_rows", t.full(table), attrs=(R,)), attrs=(E,)), E)


@names("embedding")
def _embedding(
    t: Tracer,
    func: Any,
    index: Symbol,
    weight: Symbol,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Symbol:
    require(padding_idx is None and max_norm is None, "a padding or a largest norm")
    require(not (scale_grad_by_freq or sparse), "gradients that are scaled or sparse")
    if not isinstance(index.ids, Types):
        raise t.stop("rows of an embedding are taken by ids that are no types of edges")
    return look_up(t, func(index, weight), weight, 0, index)


# How many edges of a node have a type: the way of PyG, by sums of a number for each type, of which one is read.


@names("one_hot")
def _one_hot(t: Tracer, func: Any, x: Symbol, num_classes: int = -1) -> Symbol:
    require(num_classes > 0, "a number of classes that the types decide")
    if not isinstance(x.ids, Types) or x.ids.counted is not None or x.dim() != 1:
        raise ValueError("ids that are no types of edges")
    t.look_up(x.ids, num_classes)
    return t.result(func(x, num_classes), None, E, ids=x.ids._replace(counted=E))


@names("scatter")
def _scatter(t: Tracer, func: Any, x: Symbol, dim: int, index: Symbol, src: Any, **options: Any) -> Symbol:
    """Write 1 where the type of each edge is, and 0 elsewhere."""
    types = index.ids
    is_marked = isinstance(types, Types) and types.counted is None and src == 1 and not options
    is_zero = x.rows is E and x.number is not None and (t.value(x).op, t.value(x).attrs) == ("const", (0.0,))
    if not (is_marked and is_zero and x.dim() == 2 and dim % 2 == 1 and tuple(index.shape) == (x.size(0), 1)):
        raise t.stop("assigns some entries of a tensor")
    assert isinstance(types, Types)
    t.look_up(types, x.size(1))
    return t.result(x, None, E, ids=types._replace(counted=E))


def count_types(t: Tracer, x: Symbol, dim: int, index: Symbol, marks: Symbol) -> Symbol:
    """Return the number of edges of each type at each node."""
    types = marks.ids
    assert isinstance(types, Types)
    (x,), ends = values(t, x), index.ids
    rows = t.sizes.sources if ends is S else t.sizes.targets
    is_zero = (t.value(x).op, t.value(x).attrs) == ("const", (0.0,)) and x.size(0) == rows
    is_whole = types.counted is E and marks.dim() == 2 and index.shape in (marks.shape[:1], marks.shape)
    if not isinstance(ends, Domain) or ends is E or dim % 2 or not (is_zero and is_whole):
        raise t.stop("types of edges are counted otherwise than by the edges' ends")
    return t.result(x, None, ends, ids=types._replace(counted=ends))


def gather_counts(t: Tracer, meta: Tensor, counts: Symbol, index: Symbol) -> Symbol:
    """Return the row of a node's counts at each of its edges."""
    assert isinstance(counts.ids, Types)
    if counts.rows is None or index.ids is not counts.rows or index.dim() != 1 or counts.ids.counted is E:
        raise t.stop("counts of types of edges are taken by ids that are not those of their nodes")
    return t.result(meta, None, E, ids=counts.ids)


@names("gather")
def _gather(t: Tracer, func: Any, x: Symbol, dim: int, index: Symbol) -> Symbol:
    """Read the count of each edge's own type, which is at least 1."""
    counts, types = x.ids, index.ids
    if not (
        isinstance(counts, Types) and isinstance(types, Types) and counts == types._replace(counted=counts.counted)
    ):
        raise t.stop("entries of rows are taken by their position")
    if x.rows is not E or counts.counted is E or x.dim() != 2 or dim % 2 != 1 or tuple(index.shape) != (x.size(0), 1):
        raise t.stop("counts of other types than the edge's are read")
    count = t.emit("count", attrs=(V if counts.counted is D else U, E))
    return t.result(func(x, dim, index), t.emit("gather", t.emit("view", count, attrs=((1,),)), attrs=(E,)), E)
