"""Numbers of rows that traced code may decide by: what it asks is a condition on the graphs that a trace is for."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

Asked = Callable[["Sizes"], Any]


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
        sizes: The numbers of rows.
        note: Called with the frame that compares, the comparison and its outcome.
    """

    formula: Asked
    sizes: Sizes
    note: Callable[[Any, Asked, bool], None]

    @staticmethod
    def of(number: int, formula: Asked, sizes: Sizes, note: Callable[[Any, Asked, bool], None]) -> Count:
        """Return a number that tells `note` of comparisons."""
        count = Count(number)
        count.formula, count.sizes, count.note = formula, sizes, note
        return count

    def asked(self, other: Any) -> Asked:
        """Return what another number is for other numbers of rows; one that equals one of them is taken for it."""
        if isinstance(other, Count):
            return other.formula
        place = next((place for place, size in enumerate(self.sizes) if size == other), None)
        return (lambda sizes: other) if place is None else (lambda sizes: sizes[place])

    __hash__ = int.__hash__

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
        left, right, number = self.formula, self.asked(other), compute(int(self), int(other))
        return Count.of(number, lambda sizes: compute(left(sizes), right(sizes)), self.sizes, self.note)

    return method


def _compared(name: str) -> Callable[[Count, Any], bool]:
    compare = getattr(operator, name)

    def method(self: Count, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        plain = int(other) if isinstance(other, int) else other
        answer, left, right = compare(int(self), plain), self.formula, self.asked(other)
        self.note(sys._getframe(1), lambda sizes: compare(left(sizes), right(sizes)), answer)
        return answer

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Count, f"__{_name}__", _computed(_name, False))
    setattr(Count, f"__r{_name}__", _computed(_name, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _compared(_name))
