"""Products of short rows of edges by one weight, which a traversal computes in registers.

Every lane of a group holds such a row [K] whole, while the channels of wide rows lie on the lanes. So there are maps of
a short row to a wide one, of a wide row to a short one, and sums of outer products of both; weights and sums are K wide
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from pyg_dfgnn.ir.domains import D, E, One, S, U, V
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Builder, Program, Value, rewrite, skip_views
from pyg_dfgnn.ir.register_layout import MAX_JOINED, MAX_SHORT

MAX_WEIGHTS = 4096
"""Numbers of a weight: of more, what lanes have in flight does not fit their registers."""
MAX_OUTER = 2048
"""Numbers of the sums of outer products of a kernel: 64 registers of each of 32 lanes."""
_SWAPPED = ((1, 0),)


class Narrow(NamedTuple):
    """The products that registers hold, by id.

    Attributes:
        spread: Maps of short rows to wide ones.
        project: Maps of wide rows to short ones, by a weight that is stored transposed.
        outer: Sums of outer products of a short and a wide row.
        rows: Short rows that have to be stored for them.
        parts: Parts of short rows that every lane holds.
    """

    spread: frozenset[int]
    project: frozenset[int]
    outer: frozenset[int]
    rows: frozenset[int]
    parts: frozenset[int]


def width_of(program: Program) -> int:
    """Return the numbers of the widest row of nodes."""
    return widest(program.values[i] for i in program.live)


def widest(values: Iterable[Value]) -> int:
    """Return the numbers of the widest row of nodes among some values."""
    return max([1, *(prod(value.shape) for value in values if value.domain in (S, D, U, V))])


def is_wide(shape: tuple[int, ...], width: int) -> bool:
    """Whether rows of edges are too wide to be stored beside rows of nodes."""
    return 2 * prod(shape) > width


def find(program: Program) -> Narrow:
    """Return the products of a decomposed program that registers hold."""
    values, width, rows = program.values, width_of(program), set[int]()
    parts = set[int]()
    kinds: dict[str, set[int]] = {"spread": set(), "project": set(), "outer": set()}
    for i in sorted(program.live):
        kind = _kind(values, i, width)
        if kind is not None:
            kinds[kind].add(i)
            short = values[i].args[0]
            if kind == "project":
                continue
            if _is_held(values, short):
                parts |= _parts(values, short)
            elif values[short].op == "slice":
                parts.add(short)
                rows.add(skip_views(values, values[short].args[0]))
            else:
                rows.add(skip_views(values, short))
    return Narrow(*(frozenset(ids) for ids in (*kinds.values(), rows, parts)))


def normalised(program: Program) -> Program:
    """Return the program in which weights and sums of such products are short row times wide row."""
    values, width = program.values, width_of(program)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        args = [ids[arg] for arg in value.args]
        if value.op == "outer" and i in program.live and _is_sum_of_outer(values, i):
            first, second = value.args
            is_swapped = not _is_short(values, first, width) or (
                _is_short(values, second, width) and values[second].shape < values[first].shape
            )
            short, wide = args[::-1] if is_swapped else args
            if prod(value.shape) > MAX_OUTER and _is_outer(values, value.args[:: -1 if is_swapped else 1], width):
                total = _in_parts(builder, short, wide, value.attrs)
                return total if is_swapped else builder.emit("permute", total, attrs=_SWAPPED)
            if is_swapped:
                return builder.emit("permute", builder.emit("outer", short, wide, attrs=value.attrs), attrs=_SWAPPED)
        if value.op == "linear" and i in program.live and _kind(values, i, width) == "project":
            weight = values[value.args[1]]
            is_swapped = weight.op == "permute" and weight.attrs == _SWAPPED
            stored = ids[weight.args[0]] if is_swapped else builder.emit("permute", args[1], attrs=_SWAPPED)
            return builder.emit("linear", args[0], builder.emit("permute", stored, attrs=_SWAPPED))
        return None

    return rewrite(program, rule)


def _in_parts(builder: Builder, short: int, wide: int, attrs: tuple[Any, ...]) -> int:
    """Write the sum of outer products of a wide and a short row, by parts of the short one that a kernel can take."""
    (size,), (columns,) = builder.values[short].shape, builder.values[wide].shape
    length, parts = max(1, MAX_OUTER // columns), []
    for begin in range(0, size, length):
        part = builder.emit("slice", short, attrs=(begin, min(begin + length, size)))
        parts.append(builder.emit("permute", builder.emit("outer", part, wide, attrs=attrs), attrs=_SWAPPED))
    return builder.emit("concat", *parts)


def _is_outer(values: Sequence[Value], rows: Sequence[int], width: int) -> bool:
    """Whether a short and a wide row are such that registers hold the sum of their outer products, or parts of it."""
    short, wide = rows
    numbers = prod(values[short].shape) * prod(values[wide].shape)
    fits = is_wide(values[wide].shape, width) and numbers <= MAX_WEIGHTS
    return fits and _is_short(values, short, width) and _is_computed(values, wide)


def is_of_numbers(values: Sequence[Value], i: int) -> bool:
    """Whether a value of edges is a number of a row that every lane holds, or such a row that is made of numbers."""
    value = values[i]
    shapes = [values[arg].shape for arg in value.args]
    if value.domain is not E or value.op not in ("slice", "concat"):
        return False
    if value.op == "slice":
        return value.shape == (1,) and shapes[0][0] <= MAX_SHORT and _is_held(values, value.args[0])
    return set(shapes) == {(1,)} and len(shapes) <= MAX_SHORT


def _kind(values: Sequence[Value], i: int, width: int) -> str | None:
    """Which product in registers a value is; None if it is none."""
    value = values[i]
    if value.op == "outer":
        is_sum = _is_sum_of_outer(values, i) and prod(value.shape) <= MAX_OUTER
        return "outer" if is_sum and _is_outer(values, value.args, width) else None
    if value.op != "linear" or value.domain is not E:
        return None
    x, w = (values[arg] for arg in value.args)
    is_matrix = (len(x.shape), len(w.shape)) == (1, 2) and prod(w.shape) <= MAX_WEIGHTS
    if x.domain is not E or w.domain is not One or not is_matrix:
        return None
    if is_wide(value.shape, width) and _is_short(values, value.args[0], width):
        return "spread"
    fits = value.shape[0] <= MAX_SHORT and x.shape[0] <= MAX_JOINED
    return "project" if fits and is_wide(x.shape, width) and _is_computed(values, value.args[0]) else None


def _is_sum_of_outer(values: Sequence[Value], i: int) -> bool:
    value = values[i]
    is_rows = all(values[arg].domain is E and len(values[arg].shape) == 1 for arg in value.args)
    return value.attrs == (One, E) and is_rows


def _is_computed(values: Sequence[Value], i: int) -> bool:
    """Whether a row is one that registers compute rather than one that is stored anyhow."""
    return values[skip_views(values, i)].op in (*POINTWISE, "expand", "fold")


def _is_short(values: Sequence[Value], i: int, width: int) -> bool:
    """Whether every lane can hold a row: what is computed otherwise may be stored only if it is not wide."""
    size = prod(values[i].shape)
    return size <= MAX_SHORT and (_is_held(values, i) or not is_wide(values[i].shape, width))


def _parts(values: Sequence[Value], i: int) -> set[int]:
    """The parts of rows that a row which every lane holds is made of."""
    own = {i} if values[i].op == "slice" else set[int]()
    return own.union(*(_parts(values, arg) for arg in values[i].args))


def _is_held(values: Sequence[Value], i: int) -> bool:
    """Whether a row is given, or pointwise made of given rows of its size and numbers."""
    value = values[i]
    if value.op == "slice":
        return (
            len(value.shape) == 1 and prod(values[value.args[0]].shape) <= MAX_SHORT and _is_held(values, value.args[0])
        )
    if value.op == "input" or (value.op == "const" and not value.shape):
        return True
    is_made = value.op in POINTWISE or value.op in ("view", "gather")
    sizes = {prod(values[arg].shape) for arg in value.args} | {prod(value.shape)}
    return is_made and sizes <= {1, prod(value.shape)} and all(_is_held(values, arg) for arg in value.args)
