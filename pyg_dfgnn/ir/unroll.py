"""Short sizes of edges' values beside the heads and channels of lanes: each number of one becomes a value of its own.

Lanes hold rows [H, C]. A value [K, D] or [H, C, K] of an edge, such as K functions of D coordinates, has one size more.
Where a sum joins the last one, that sum is written out: D values [K], one for `mu[:, d]`, stand for [K, D]. What is
given per edge is a short row, which every lane holds, and of which such a value takes one number; of weights it takes
one row of their transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from pyg_dfgnn.ir.domains import FEW, E, One
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Builder, Program, Shape, Value, rewrite, skip_views
from pyg_dfgnn.ir.register_layout import MAX_SHORT, lane_numbers, stored_row
from pyg_dfgnn.ir.simplify import common_subexpressions, remove_dead

_KEEPING = ("view", "gather", "expand", "fold")
"""Operators, beside pointwise ones, that may leave the last size as it is."""


def unrolled(program: Program) -> Iterator[Program]:
    """Yield a decomposed program with one more of the sums over a last size written out, those of most sizes first.

    It ends where a lane would hold more numbers of such values than of a short row.
    """
    program, count = _trimmed(program), 1
    while (start := _start(program)) is not None:
        *others, size = program.values[start].shape
        count *= size
        if count * lane_numbers(tuple(others)) > MAX_SHORT:
            return
        program = _trimmed(_Unrolled(program, start).program)
        yield program


def _trimmed(program: Program) -> Program:
    """Return the program in which pointwise functions on edges are of rows without sizes of 1 at their end."""

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op == "view":
            return builder.emit("view", skip_views(builder.values, ids[value.args[0]]), attrs=value.attrs)
        if value.op not in POINTWISE or value.domain is not E or value.shape[-1:] != (1,):
            return None
        ones = 1
        while value.shape[-ones - 1 : -ones] == (1,):
            ones += 1
        parts = []
        for arg in value.args:
            shape = program.values[arg].shape
            bare = skip_views(builder.values, ids[arg])
            parts.append(builder.emit("view", bare, attrs=(shape[:-ones],)) if shape else ids[arg])
        trimmed = builder.emit(value.op, *parts, attrs=value.attrs, domain=E)
        return builder.emit("view", trimmed, attrs=(value.shape,))

    return remove_dead(common_subexpressions(rewrite(program, rule)))


def _start(program: Program) -> int | None:
    """The value of most sizes, then of the shortest last one, that is summed over it; None if there is none."""
    values, found = program.values, dict[int, tuple[int, int]]()
    for i in program.live:
        for arg in values[i].args if _is_join(program, i) else ():
            value = values[arg]
            if value.domain is E and value.op in POINTWISE and value.shape and 1 < value.shape[-1] <= MAX_SHORT:
                found[arg] = -sum(size > 1 for size in value.shape), value.shape[-1]
    return min(found, key=lambda i: (found[i], i), default=None)


def _is_join(program: Program, i: int) -> bool:
    """Whether a value of edges is a sum over the last size of its operands, and maybe over others."""
    value = program.values[i]
    if value.op == "fold":
        return value.domain is E and program.values[value.args[0]].shape[-1] > 1 and value.shape[-1:] in ((), (1,))
    return value.domain is E and value.op == "inner"


class _Unrolled:
    """A program in which what is connected with a value through its last size is written once per number of that.

    Args:
        program: The program.
        start: The value.
    """

    def __init__(self, program: Program, start: int) -> None:
        self.old, self.values, self.size = program, program.values, program.values[start].shape[-1]
        self.members = self._connected(start)
        self.terms: dict[int, list[int]] = {}
        """Member -> the values for each number of its last size, which they lack."""
        self.program = rewrite(program, self._rule)

    def _connected(self, start: int) -> set[int]:
        """Return a value, its operands, readers and values joined with it, and so on, while the last size is kept."""
        readers: dict[int, list[int]] = {}
        for i in self.old.live:
            for arg in self.values[i].args:
                readers.setdefault(arg, []).append(i)
        members, waiting = set[int](), [start]
        while waiting:
            i = waiting.pop()
            if i not in members and self._is_split(i):
                members.add(i)
                reading = readers.get(i, [])
                joined = [arg for reader in reading if _is_join(self.old, reader) for arg in self.values[reader].args]
                waiting += [*self.values[i].args, *reading, *joined]
        return members

    def _is_split(self, i: int) -> bool:
        value = self.values[i]
        if value.shape[-1:] != (self.size,):
            return False
        if value.op in ("sum", "max"):
            return value.attrs[1] is E
        if value.op in POINTWISE:
            return value.domain is E
        if value.op not in _KEEPING or value.domain in FEW:
            return False
        last = self.values[value.args[0]].shape[-1:]
        return last == (self.size,) or (last == (1,) and value.op == "expand")

    def _rule(self, builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if i in self.members:
            self.terms[i] = [self._term(builder, value, k, ids) for k in range(self.size)]
            return self._row_of(builder, self.terms[i], value.shape)
        if not self.members & set(value.args) or not _is_join(self.old, i):
            return None
        terms = []
        for k in range(self.size):
            parts = [self._part(builder, arg, k, ids) for arg in value.args]
            op, attrs = ("mul", ()) if value.op == "inner" else ("fold", (value.shape[:-1],))
            terms.append(builder.emit(op, *parts, attrs=attrs, domain=E))
        total = terms[0]
        for term in terms[1:]:
            total = builder.emit("add", total, term)
        return builder.emit("view", total, attrs=(value.shape,))

    def _row_of(self, builder: Builder, terms: list[int], shape: Shape) -> int:
        """Write the row of the values for each number of its last size, for what reads it whole."""
        kept = (1,) if prod(shape) == self.size else (*shape[:-1], 1)
        parts = [builder.emit("view", term, attrs=(kept,)) for term in terms]
        return builder.emit("view", builder.emit("concat", *parts), attrs=(shape,))

    def _term(self, builder: Builder, value: Value, k: int, ids: dict[int, int]) -> int:
        """Write number k of the last size of a member."""
        parts = [self._part(builder, arg, k, ids) for arg in value.args]
        attrs = (value.shape[:-1],) if value.op in ("view", "expand", "fold") else value.attrs
        return builder.emit(value.op, *parts, attrs=attrs, domain=value.domain)

    def _part(self, builder: Builder, i: int, k: int, ids: dict[int, int]) -> int:
        """Write number k of the last size of an operand, which may have one number for all."""
        value, whole = self.values[i], ids[i]
        shape, domain = value.shape, value.domain
        if i in self.terms:
            return self.terms[i][k]
        if not shape or shape[-1] == 1:
            return builder.emit("view", whole, attrs=(shape[:-1],)) if shape else whole
        others = prod(shape[:-1])
        if domain is One:
            matrix = builder.emit("view", whole, attrs=((others, self.size),))
            return _stored(builder, builder.emit("permute", matrix, attrs=((1, 0),)), k, shape[:-1])
        stored = stored_row(builder.values, skip_views(builder.values, whole))
        if stored is not None:
            # One of stored rows, of which one number is asked for: the numbers of all rows become rows.
            rows, number = stored
            count = builder.values[rows].shape[0]
            numbers = builder.emit("view", rows, attrs=((count, others, self.size),))
            turned = builder.emit("permute", numbers, attrs=((2, 0, 1),))
            rows = builder.emit("view", turned, attrs=((self.size * count, others),))
            return _stored(builder, rows, k * count + number, shape[:-1])
        if others == 1 and domain not in FEW:
            # Every lane holds the whole row.
            whole, domain = builder.emit("view", whole, attrs=((self.size,),)), E
        part = builder.emit("slice", whole, attrs=(k, k + 1), domain=domain)
        return builder.emit("view", part, attrs=(shape[:-1],))


def _stored(builder: Builder, rows: int, k: int, shape: Shape) -> int:
    """Write row k of stored rows as a value of edges, as :func:`~pyg_dfgnn.ir.register_layout.stored_row` finds it."""
    turned = builder.emit("permute", rows, attrs=((1, 0),))
    return builder.emit("view", builder.emit("slice", turned, attrs=(k, k + 1), domain=E), attrs=(shape,))
