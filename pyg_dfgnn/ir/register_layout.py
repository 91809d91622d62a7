"""How the values of one kernel lie on its lanes: every row is [H, C], [H], [C] or one number of the same H and C, or a
short row [K] that every lane holds whole. Weights, of which one row may be read alone, and sums of outer products are K
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

from pyg_dfgnn.ir.domains import FEW, E, One
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import REDUCTIONS, Program, Shape, Value, skip_views

MAX_CHANNELS = 512
"""Channels that the lanes of a head hold."""
MAX_JOINED = 512
"""Numbers of a row whose heads one group of lanes may hold all, so that it can join them."""
MAX_SHORT = 32
"""Numbers of a row that every lane holds: with the weights for each, more would leave no registers for the rest."""
JOINS = ("inner", "fold", "amax")
"""Operators that join the numbers of a row: sums and the largest."""


class LoweringError(ValueError):
    """A value that no kernel computes; the message names it."""


class Lanes(NamedTuple):
    """The lanes of a kernel.

    Attributes:
        heads: H.
        channels: C.
        order: The values, as pairs of id and form: "HC", "H", "C" or "" for one number, "K" for a short row, "K*" and
            one of these for K rows; operands come first.
        args: Pair of id and form -> the forms of the operands.
        roots: Form of each output.
    """

    heads: int
    channels: int
    order: tuple[tuple[int, str], ...]
    args: dict[tuple[int, str], tuple[str, ...]]
    roots: dict[str, str]


def lane_numbers(shape: Shape) -> int:
    """Return how many float32 numbers of a row a lane holds: a load of up to four, or its share of a wide one."""
    numbers = prod(shape)
    return max(gcd(numbers, 4), -(-numbers // 32))


SHORT, ROWS, PARTS = "K", "K*", "+"
"""Forms of a short row, of what has a row for each of its numbers, and of a row that is stored part by part."""


def infer_layout(program: Program) -> Lanes:
    """Return lanes on which all outputs of a program fit.

    Raises:
        Refusal: There are none.
    """
    reasons, telling = [f"the program {program.name} has no values"], list[str]()
    for heads, channels in _candidates(program):
        try:
            return _Inference(program, heads, channels).lanes()
        except LoweringError as refusal:
            reasons.append(str(refusal))
            telling += reasons[-1:] if channels <= MAX_CHANNELS else []
    # Lanes of the widest of some parts tell why others do not fit beside it.
    has_parts = any(loaded_part(program.values, i) is not None for i in program.live)
    raise LoweringError(telling[0] if has_parts and telling else reasons[-1])


def _candidates(program: Program) -> Iterable[tuple[int, int]]:
    """The ways to split the widest rows in heads and channels, those of fewest heads first."""
    values, live = program.values, program.live
    products = [i for i in live if values[i].op in ("linear", "outer")]
    matrices = {j for i in products for j in ((i,) if values[i].op == "outer" else values[i].args[1:])}
    matrices |= {values[i].args[0] for i in live if stored_row(values, i) is not None}
    matrices |= {arg for i in matrices if values[i].op == "permute" for arg in values[i].args}
    parts = [i for i in live if values[i].op in ("slice", "concat", "pad")]
    short = {j for i in parts for j in (_with_views(values, values[i].args[0]) if values[i].op == "slice" else {i})}
    shapes = {_sizes(values[i].shape) for i in live - matrices - short} or {()}
    inner = {values[arg].shape[-1] for i in live for arg in values[i].args
             if values[i].op in JOINS and values[arg].shape}  # fmt: skip
    # Rows wider than the lanes may be short ones that every lane holds.
    for width in sorted({prod(shape) for shape in shapes}, reverse=True)[: None if products or parts else 1]:
        splits = {(prod(s[:k]), prod(s[k:])) for s in shapes if prod(s) == width for k in range(len(s) + 1)}
        yield from sorted(splits | {(width // channels, channels) for channels in inner if width % channels == 0})


def _with_views(values: Sequence[Value], i: int) -> set[int]:
    """A value and what it is a view of."""
    return {i} | (_with_views(values, values[i].args[0]) if values[i].op == "view" else set[int]())


def _sizes(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


class _Inference:
    """Labels the sizes of each value by what they run over: heads "H", channels "C", both "HC" or nothing ""."""

    def __init__(self, program: Program, heads: int, channels: int) -> None:
        self.program, self.heads, self.channels = program, heads, channels
        self.args: dict[tuple[int, str], tuple[str, ...]] = {}

    def lanes(self) -> Lanes:
        if self.channels > MAX_CHANNELS:
            raise LoweringError(
                f"rows of {self.channels} channels in the program {self.program.name} (at most {MAX_CHANNELS})"
            )
        roots = {name: self._root(i) for name, i in self.program.outputs}
        return Lanes(self.heads, self.channels, tuple(self.args), self.args, roots)

    def _refuse(self, i: int, why: str) -> LoweringError:
        value = self.program.values[i]
        return LoweringError(
            f"%{i} = {value} : {value.domain}{list(value.shape)} {why} (H={self.heads}, C={self.channels})"
        )

    def _root(self, i: int) -> str:
        refusals, before = [], dict(self.args)
        value = self.program.values[i]
        if is_of_parts(self.program.values, i):
            return self._parts(i)
        if value.op == "outer":
            short, wide = value.args
            row = self._root(wide)
            if row == SHORT:
                raise self._refuse(i, "multiplies two short rows")
            form = ROWS + row
            self.args[i, form] = self._short(short), row
            return form
        for letters in ("HC", "C", "H", ""):
            labels = self._spread(self.program.values[i].shape, letters)
            if labels is not None:
                try:
                    return self._demand(i, labels)
                except LoweringError as refusal:
                    refusals.append(refusal.with_traceback(None))
                    self.args = dict(before)
        try:
            return self._short(i)
        except LoweringError as refusal:
            refusals.append(refusal.with_traceback(None))
        # Not kept by a name: with its traceback it would keep the frames of all callers.
        raise refusals.pop(0)

    def _weight(self, i: int, form: str) -> str:
        """Return the form of a stored weight whose rows have a form."""
        if self.program.values[i].op != "input":
            raise self._refuse(i, "is no stored weight")
        self.args[i, ROWS + form] = ()
        return ROWS + form

    def _parts(self, i: int) -> str:
        """Demand the parts of a row that is stored part by part."""
        self.args[i, PARTS] = tuple(self._root(part) for _, part in stored_parts(self.program.values, i))
        return PARTS

    def _short(self, i: int) -> str:
        """Demand a value as a row that every lane holds."""
        value, values = self.program.values[i], self.program.values
        if (i, SHORT) in self.args:
            return SHORT
        if prod(value.shape) > MAX_SHORT:
            raise self._refuse(i, "has a row that does not fit the lanes")
        if value.op == "linear" and values[value.args[1]].op == "permute":
            x, weight = value.args
            form = self._root(x)
            if form not in ("HC", "C", "H"):
                raise self._refuse(i, "maps what is no row of heads or channels")
            self.args[i, SHORT] = form, self._weight(values[weight].args[0], form)
            return SHORT
        if loaded_part(values, i) is not None and prod(values[value.args[0]].shape) > MAX_SHORT:
            self.args[i, SHORT] = ()
            return SHORT
        if value.op == "slice" and len(value.shape) == 1:
            self.args[i, SHORT] = (self._short(value.args[0]),)
            return SHORT
        if value.op == "concat" and all(values[arg].shape == (1,) for arg in value.args):
            self.args[i, SHORT] = tuple(self._demand(arg, ("",)) for arg in value.args)
            return SHORT
        if value.op != "input" and value.op not in (*POINTWISE, "view", "gather"):
            raise self._refuse(i, "has a row that does not fit the lanes")
        forms = []
        for arg in value.args:
            size = prod(values[arg].shape)
            if size not in (1, prod(value.shape)):
                raise self._refuse(arg, "has a part of a row")
            forms.append(self._demand(arg, ("",) * len(values[arg].shape)) if size == 1 else self._short(arg))
        self.args[i, SHORT] = tuple(forms)
        return SHORT

    def _size(self, letters: str) -> int:
        return prod({"H": self.heads, "C": self.channels}[letter] for letter in letters)

    def _spread(self, shape: Shape, letters: str) -> tuple[str, ...] | None:
        """Label the sizes of a shape so that it runs over some letters; None if it does not."""
        letters = "".join(letter for letter in letters if self._size(letter) > 1)
        if prod(shape) != self._size(letters):
            return None
        labels, waiting, left = [], list(letters), 1
        current = ""
        for size in shape:
            if size == 1:
                labels.append("")
                continue
            if left == 1:
                current = ""
                while waiting and (not current or self._size(current) < size):
                    current += waiting.pop(0)
                left = self._size(current)
            if left % size or (len(current) > 1 and left != size):
                return None
            left //= size
            labels.append(current)
        return tuple(labels)

    def _form(self, i: int, labels: tuple[str, ...]) -> str:
        """Return what labels run over, having checked that it is all of it."""
        shape = self.program.values[i].shape
        form = ""
        for label in labels:
            form += "" if form.endswith(label) else label
        if form not in ("", "H", "C", "HC"):
            raise self._refuse(i, "has heads and channels in another order than others")
        if prod(shape) != self._size(form):
            raise self._refuse(i, "has a part of the heads or channels")
        return form

    def _demand(self, i: int, labels: tuple[str, ...]) -> str:
        form = self._form(i, labels)
        if (i, form) in self.args:
            return form
        value, values = self.program.values[i], self.program.values
        if value.op == "linear":
            x, weight = value.args
            rows = self._weight(weight, form)
            self.args[i, form] = self._short(x), rows
            return form
        if value.op == "slice" and (stored := stored_row(values, i)) is not None:
            self.args[i, form] = (self._weight(stored[0], form),)
            return form
        if loaded_part(values, i) is not None and (form or prod(values[value.args[0]].shape) > MAX_SHORT):
            self.args[i, form] = ()
            return form
        if value.op == "slice" and not form:
            self.args[i, form] = (self._short(value.args[0]),)
            return form
        ways = self._joined(i, labels, form) if value.op in JOINS else [list(self._operands(i, labels, form))]
        refusals = []
        for operands in ways:
            before = dict(self.args)
            try:
                forms = tuple(self._demand(arg, part) for arg, part in operands)
            except LoweringError as refusal:
                refusals.append(refusal.with_traceback(None))
                self.args = before
            else:
                self.args[i, form] = forms
                return form
        if refusals:
            raise refusals.pop(0)
        # Heads that no group of lanes holds are not joined, whatever they are of.
        is_wide = self.heads > 1 and self.heads * self.channels > MAX_JOINED
        what = f"heads of more than {MAX_JOINED} numbers" if is_wide else "what are not all channels or heads"
        raise self._refuse(i, f"joins {what}")

    def _operands(self, i: int, labels: tuple[str, ...], form: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The operands of a value with their labels."""
        value, values = self.program.values[i], self.program.values
        if value.op in ("input", "const", "count", "is_used", "dropout_mask"):
            return
        for arg in value.args:
            shape = values[arg].shape
            if value.op in POINTWISE or value.op in ("expand", "gather", *REDUCTIONS) and value.op != "outer":
                yield arg, _aligned(labels, shape)
            elif value.op == "view":
                part = self._spread(shape, form)
                if part is None:
                    raise self._refuse(arg, "has a row that does not fit the lanes")
                yield arg, part
            else:
                raise self._refuse(i, "is none of the operators that a kernel computes on lanes")

    def _joined(self, i: int, labels: tuple[str, ...], form: str) -> Iterator[list[tuple[int, tuple[str, ...]]]]:
        """The ways in which the numbers that a value joins can lie: its operands with their labels."""
        value, values = self.program.values[i], self.program.values
        shapes = [values[arg].shape for arg in value.args]
        for joined in ("C", "H", "HC"):
            if set(joined) & set(form) or ("H" in joined and self.heads * self.channels > MAX_JOINED):
                continue
            if value.op == "fold":
                kept = (1,) * (len(shapes[0]) - len(value.shape)) + value.shape
                places = [have if have != want else 1 for have, want in zip(shapes[0], kept)]
                own = ("",) * (len(shapes[0]) - len(labels)) + labels
                parts = self._spread(tuple(places), joined)
                if parts is not None:
                    yield [(value.args[0], tuple(a or b for a, b in zip(own, parts)))]
                continue
            size = max(shape[-1] for shape in shapes)
            if size == self._size(joined):
                yield [
                    (arg, (*_aligned(labels, shape[:-1]), joined if shape[-1] > 1 else ""))
                    for arg, shape in zip(value.args, shapes)
                ]


def stored_row(values: Sequence[Value], i: int) -> tuple[int, int] | None:
    """The stored rows of which a value is one that all edges share, and its number; None if it is no such row."""
    value = values[i]
    if value.op != "slice" or value.domain is not E or value.shape[1:] != (1,):
        return None
    turned = values[value.args[0]]
    is_row = turned.op == "permute" and turned.domain is One and len(turned.shape) == 2
    return (turned.args[0], value.attrs[0]) if is_row else None


def loaded_part(values: Sequence[Value], i: int) -> tuple[int, int] | None:
    """The stored row of which a value is a part, as it lies in memory, and the number at which the part begins; None if
    it is no such part.
    """
    value = values[i]
    if value.op != "slice" or prod(values[value.args[0]].shape[:-1]) > 1:
        return None
    row = skip_views(values, value.args[0])
    is_row = values[row].op == "input" and values[row].domain not in FEW
    return (row, value.attrs[0]) if is_row else None


def is_of_parts(values: Sequence[Value], i: int) -> bool:
    """Whether a value is a row of edges of parts that lie one after the other, of more than a number each, or zeros."""
    value = values[i]
    if value.op not in ("concat", "pad") or value.domain is not E or prod(value.shape[:-1]) > 1:
        return False
    return value.op == "pad" or len(value.args) > MAX_SHORT or any(values[arg].shape[-1] > 1 for arg in value.args)


def stored_parts(values: Sequence[Value], i: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the number at which each part of a row begins, and the part; numbers of no part are zeros."""
    value = values[i]
    if not is_of_parts(values, i):
        yield begin, i
    elif value.op == "pad":
        yield from stored_parts(values, value.args[0], begin + value.attrs[0])
    else:
        for arg in value.args:
            yield from stored_parts(values, arg, begin)
            begin += values[arg].shape[-1]


def _aligned(labels: tuple[str, ...], shape: Shape) -> tuple[str, ...]:
    """The labels of an operand whose sizes are broadcast to sizes with labels."""
    last = labels[max(len(labels) - len(shape), 0) :]
    padded = ("",) * (len(shape) - len(last)) + last
    return tuple("" if size == 1 else label for size, label in zip(shape, padded))


def folds_last(values: Sequence[Value], i: int) -> bool:
    """Whether a fold sums the last size and no other."""
    value = values[i]
    shape = values[value.args[0]].shape
    return value.shape in (shape[:-1] + (1,), shape[:-1]) and (len(value.shape) == len(shape) or not value.shape)


def folds_first(values: Sequence[Value], i: int) -> bool:
    """Whether a fold sums the first sizes and no others, of rows whose heads one group of lanes may hold."""
    value = values[i]
    shape = values[value.args[0]].shape
    kept = [size for size in value.shape if size != 1]
    return prod(shape) <= MAX_JOINED and [size for size in shape if size != 1][-len(kept) or len(shape) :] == kept


def folds(values: Sequence[Value], i: int) -> bool:
    """Whether lanes can add up what a fold sums."""
    return folds_last(values, i) or folds_first(values, i)


def is_of_heads(values: Sequence[Value], i: int) -> bool:
    """Whether a value joins the channels of each head."""
    return values[i].op == "inner" or (values[i].op == "fold" and folds_last(values, i))


def joins_few(values: Sequence[Value], i: int) -> bool:
    """Whether a value of an edge joins the channels of each head, to as many numbers as a short row has at most."""
    return values[i].domain is E and is_of_heads(values, i) and prod(values[i].shape) <= MAX_SHORT
