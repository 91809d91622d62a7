"""Numbers of rows that traced code may decide by: what it asks is a condition on the graphs that a trace is for."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

Asked = Callable[["Sizes"], Any]
Note = Callable[[Any, Asked | None, bool], None]
"""Called with the frame that compares, the comparison and its outcome; None where it makes a plain number of it."""


class Sizes(NamedTuple):
    """Numbers of edges, of nodes that are read as sources and of nodes that are aggregated to."""

    edges: int
    sources: int
    targets: int


class Guard(NamedTuple):
    """A comparison of numbers of rows that code has made.

    Attributes:
        ask: The comparison.
        answer: What it was.
        line: Where it was made.
    """

    ask: Asked
    answer: bool
    line: Any


class Count(int):
    """A number of rows, or one computed from such numbers, that tells when it is compared.

    Attributes:
        formula: The same for other numbers of rows.
        key: What is computed, to be compared with what another number is.
        sizes: The numbers of rows.
        note: Called with the frame that compares, the comparison and its outcome.
    """

    formula: Asked
    key: Any
    sizes: Sizes
    note: Note
    __class__ = property(lambda self: int)  # type: ignore[assignment]

    @staticmethod
    def of(number: int, formula: Asked, key: Any, sizes: Sizes, note: Note) -> Count:
        """Return a number that tells `note` of comparisons."""
        count = Count(number)
        count.formula, count.key, count.sizes, count.note = formula, key, sizes, note
        return count

    @staticmethod
    def rows(place: int, sizes: Sizes, note: Note) -> Count:
        """Return one of the numbers of rows."""
        return Count.of(sizes[place], lambda sizes: sizes[place], f"rows {place}", sizes, note)

    def as_count(self, other: Any) -> Count:
        """Return another number as one that may differ; one that equals a number of rows is taken for it."""
        if isinstance(other, Count):
            return other
        place = next((place for place, size in enumerate(self.sizes) if size == other), None)
        if place is not None:
            return Count.rows(place, self.sizes, self.note)
        return Count.of(int(other), lambda sizes: other, other, self.sizes, self.note)

    def escape(self, frame: Any) -> None:
        """Tell `note` that code makes a plain number of it, which tells nothing of what it decides."""
        self.note(frame, None, True)

    def __hash__(self) -> int:
        self.escape(sys._getframe(1))
        return int.__hash__(self)

    def __bool__(self) -> bool:
        answer, formula = int(self) != 0, self.formula
        self.note(sys._getframe(1), lambda sizes: formula(sizes) != 0, answer)
        return answer


def _computed(name: str, is_swapped: bool) -> Callable[[Count, Any], Any]:
    function = getattr(operator, name)
    compute = (lambda a, b: function(b, a)) if is_swapped else function

    def method(self: Count, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        second, key = self.as_count(other), (name, is_swapped, self.key, self.as_count(other).key)
        left, right, number = self.formula, second.formula, compute(int(self), int(other))
        return Count.of(number, lambda sizes: compute(left(sizes), right(sizes)), key, self.sizes, self.note)

    return method


def _compared(name: str) -> Callable[[Count, Any], bool]:
    compare = getattr(operator, name)

    def method(self: Count, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        answer, second = compare(int(self), int(other) if isinstance(other, int) else other), self.as_count(other)
        if second.key != self.key:
            left, right = self.formula, second.formula
            self.note(sys._getframe(1), lambda sizes: compare(left(sizes), right(sizes)), answer)
        return answer

    return method


def _escaping(name: str) -> Callable[..., Any]:
    function = getattr(int, name)

    def method(self: Count, *args: Any) -> Any:
        self.escape(sys._getframe(1))
        return function(self, *args)

    return method


class Shape(tuple[int, ...]):
    """A shape some of whose sizes are numbers of rows, which its text would give away; `torch.Size` to whoever asks."""

    __class__ = property(lambda self: torch.Size)  # type: ignore[assignment]

    def numel(self) -> int:
        """Return the product of the sizes."""
        return prod(self)

    def __repr__(self) -> str:
        for size in self:
            if isinstance(size, Count):
                size.escape(sys._getframe(1))
        return repr(torch.Size(self))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Count, f"__{_name.strip('_')}__", _computed(_name, False))
    setattr(Count, f"__r{_name.strip('_')}__", _computed(_name, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _compared(_name))
_ESCAPES = (
    "truediv rtruediv pow rpow divmod rdivmod neg pos abs invert int float round trunc floor ceil repr str format"
)
for _name in (*(f"__{name}__" for name in _ESCAPES.split()), "bit_length", "bit_count", "as_integer_ratio", "to_bytes"):
    setattr(Count, _name, _escaping(_name))
