"""Parts of rows, sliced and joined: values of parts take the place of values of whole rows.

A lane of a kernel holds some numbers of a row, and none moves along the row of an edge. So a slice of what is computed
number by number is computed of slices, and what is computed of joined rows is joined afterwards. What remains are
slices of stored rows, which kernels load where they lie, and rows of parts, which kernels store where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

from pyg_dfgnn.ir.domains import FEW, Domain, E, One
from pyg_dfgnn.ir.materialize import ADD
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Builder, Program, Shape, Value, rewrite
from pyg_dfgnn.ir.register_layout import MAX_SHORT
from pyg_dfgnn.ir.register_matmul import is_wide, widest

_JOINED = ("concat", "pad")
"""Operators that make a row of parts."""
_LINEAR = ("add", "sub", "mul", "neg", "sum")
"""Operators of zeros that give zeros."""


_Slices = dict[tuple[int, int, int], int]
"""Value, and the range of its last size that another value has: begin and end."""


class _Place(NamedTuple):
    """A value as the part of a row from one number to before another; a row has zeros where it has no part."""

    begin: int
    end: int
    value: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def push_slices(program: Program) -> Program:
    """Return the program in which slices of what is computed number by number are computed of slices."""

    known: _Slices = {}

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op != "slice" or value.domain in FEW:
            return None
        part = _sliced(builder, known, ids[value.args[0]], *value.attrs)
        return builder.emit("gather", part, attrs=(value.domain,))

    return rewrite(program, rule, share=True)


def split_concats(program: Program) -> Program:
    """Return the program in which what is computed of joined rows number by number is joined afterwards.

    Rows that are joined for a sum over edges are then joined per node. On edges other operands are sliced.
    """
    known: _Slices = {}

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op not in ("sum", "max") and value.op not in POINTWISE:
            return None
        args, last = [ids[arg] for arg in value.args], value.shape[-1:]
        rows = {arg: _places(builder.values, arg) for arg in args if builder.values[arg].op in _JOINED}
        if not rows or any(builder.values[arg].shape[-1:] != last for arg in rows):
            return None
        (size,) = last
        is_alike = len({tuple(place[:2] for place in places) for places in rows.values()}) == 1
        is_full = all(sum(place.size for place in places) == size for places in rows.values())
        has_others = any(arg not in rows and builder.values[arg].shape[-1:] not in ((), (1,)) for arg in args)
        if value.op in POINTWISE and (has_others or not is_alike or not is_full):
            # Numbers that every lane holds are rather computed with as a row.
            if value.domain is not E or all(place.size == 1 for places in rows.values() for place in places):
                return None
        elif value.op == "max" and not is_full:
            return None
        joined = []
        for begin, end, parts in _aligned(builder, known, args, size):
            if value.op in _LINEAR and all(part is None for part in parts):
                continue
            operands = [builder.emit("const", attrs=(0.0,)) if part is None else part for part in parts]
            part = builder.emit(value.op, *operands, attrs=value.attrs)
            joined.append(_Place(begin, end, builder.emit("expand", part, attrs=((*value.shape[:-1], end - begin),))))
        return _row_of(builder, joined, value.shape, value.domain)

    return rewrite(program, rule, share=True)


def join_pads(program: Program) -> Program:
    """Return the program in which rows between zeros that are added, as gradients of slices are, are joined.

    On edges other rows may be added to them too, and rows may overlap: they are added part by part.
    """
    known: _Slices = {}

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op != ADD:
            return None
        values, is_of_edges = builder.values, value.domain is E
        args = [ids[arg] for arg in value.args]
        args = args if is_of_edges else [term for arg in args for term in _terms(values, arg)]
        pads = [arg for arg in args if values[arg].op == "pad"]
        if not pads or any(values[arg].shape != value.shape for arg in args):
            return None
        if not is_of_edges and (pads != args or {values[arg].domain for arg in args} != {value.domain}):
            return None
        size = value.shape[-1]
        placed = sorted(place for arg in args for place in _places(values, arg))
        gaps = [after.begin - place.end for place, after in zip(placed, placed[1:])]
        if min(gaps, default=0) >= 0:
            return _row_of(builder, placed, value.shape, value.domain) if is_of_edges or not any(gaps) else None
        if not is_of_edges:
            return None
        joined = []
        for begin, end, parts in _aligned(builder, known, args, size):
            terms = [part for part in parts if part is not None]
            if terms:
                joined.append(_Place(begin, end, reduce(partial(builder.emit, ADD), terms)))
        return _row_of(builder, joined, value.shape, value.domain)

    return rewrite(program, rule)


def _terms(values: Sequence[Value], i: int) -> list[int]:
    """The terms of a sum of rows between zeros; a value that is no such sum is its only term."""
    value = values[i]
    if value.op != ADD or any(values[arg].op not in (ADD, "pad") for arg in value.args):
        return [i]
    return [term for arg in value.args for term in _terms(values, arg)]


def _places(values: Sequence[Value], i: int, begin: int = 0) -> list[_Place]:
    """The parts of a row that begins at a number; one that is not made of parts is its only part."""
    value = values[i]
    if value.op == "pad":
        return _places(values, value.args[0], begin + value.attrs[0])
    if value.op != "concat":
        return [_Place(begin, begin + value.shape[-1], i)]
    places = []
    for arg in value.args:
        places += _places(values, arg, begin)
        begin += values[arg].shape[-1]
    return places


def _row_of(builder: Builder, places: Sequence[_Place], shape: Shape, domain: Domain) -> int:
    """Write a row of parts in their order, with zeros between them."""
    if not places:
        return builder.emit("expand", builder.emit("const", attrs=(0.0,)), attrs=(shape,))
    ends = [*(place.begin for place in places[1:]), places[-1].end]
    parts = [
        builder.emit("pad", place.value, attrs=(0, end - place.end)) for place, end in zip(places, ends, strict=True)
    ]
    joined = parts[0] if len(parts) == 1 else builder.emit("concat", *parts, domain=domain)
    return builder.emit("pad", joined, attrs=(places[0].begin, shape[-1] - places[-1].end))


def _aligned(
    builder: Builder, known: _Slices, rows: Sequence[int], size: int
) -> Iterator[tuple[int, int, list[int | None]]]:
    """Yield the parts of rows, cut where a part of any of them ends: begin, end and the part of each, None for zeros.

    Of values with one number in the last place each part is the value.
    """
    values = builder.values
    is_row = [values[row].shape[-1:] == (size,) for row in rows]
    places = [_places(values, row) if row_is else [] for row, row_is in zip(rows, is_row)]
    cuts = sorted({0, size}.union(*({place.begin, place.end} for each in places for place in each)))
    for begin, end in zip(cuts, cuts[1:]):
        parts: list[int | None] = []
        for row, row_is, each in zip(rows, is_row, places):
            own = next((place for place in each if place.begin <= begin < place.end), None)
            if own is None:
                parts.append(None if row_is else row)
            else:
                parts.append(_sliced(builder, known, own.value, begin - own.begin, end - own.begin))
        yield begin, end, parts


def _sliced(builder: Builder, known: _Slices, i: int, begin: int, end: int) -> int:
    """Write a range of the last size of a value, made of ranges of what the value is computed from, or find it."""
    key = i, begin, end
    if key not in known:
        known[key] = _written(builder, known, *key)
    return known[key]


def _written(builder: Builder, known: _Slices, i: int, begin: int, end: int) -> int:
    value = builder.values[i]
    args, shape = value.args, (*value.shape[:-1], end - begin)
    if shape == value.shape:
        return i
    # Operands with one number in the last place are read whole.
    ranged = [
        _sliced(builder, known, arg, begin, end) if builder.values[arg].shape[-1:] == value.shape[-1:] else arg
        for arg in (args if value.op in (*POINTWISE, "view", "gather", "expand") else ())
    ]
    if value.op in POINTWISE and value.domain not in FEW:
        return builder.emit(value.op, *ranged, attrs=value.attrs, domain=value.domain)
    if value.op == "gather":
        return builder.emit("gather", *ranged, attrs=value.attrs)
    if value.op == "expand" or (value.op == "view" and ranged != list(args)):
        return builder.emit(value.op, *ranged, attrs=(shape,), domain=value.domain)
    if value.op == "slice":
        return _sliced(builder, known, args[0], value.attrs[0] + begin, value.attrs[0] + end)
    if value.op in _JOINED:
        kept = []
        for place in _places(builder.values, i):
            low, high = max(place.begin, begin), min(place.end, end)
            if low < high:
                part = _sliced(builder, known, place.value, low - place.begin, high - place.begin)
                kept.append(_Place(low - begin, high - begin, part))
        return _row_of(builder, kept, shape, value.domain)
    if value.op == "linear" and _is_spread(builder.values, value, shape):
        return builder.emit("linear", args[0], builder.emit("slice", args[1], attrs=(begin, end)), domain=value.domain)
    return builder.emit("slice", i, attrs=(begin, end))


def _is_spread(values: Sequence[Value], value: Value, shape: Shape) -> bool:
    """Whether lanes compute a part of a linear map of short rows of edges rather than read it where it is stored."""
    x, weight = (values[arg] for arg in value.args)
    is_short = x.domain is E and weight.domain is One and len(x.shape) == 1 and x.shape[0] <= MAX_SHORT
    return is_short and is_wide(shape, widest(values))
