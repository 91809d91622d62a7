"""Row domains: what the rows of a value are, and their order.

A domain x is at most y if a row of y determines a row of x: an edge determines its source, its target and its relation.
A value is computed on the join (least upper bound) of its operands' domains. So a weight per relation times a source
row lands on the distinct (source, relation) pairs, which is compact materialisation, without a pass that says so.
"""

from __future__ import annotations

from enum import Enum
from functools import cache


class Domain(Enum):
    """Kind of thing that one row of a value stands for; the value of a member is its letter in dumps."""

    GLOBAL = "1"
    RELATION = "R"
    SOURCE_TYPE = "Ts"
    TARGET_TYPE = "Td"
    SOURCE = "S"
    TARGET = "D"
    SOURCE_RELATION = "U"
    TARGET_RELATION = "V"
    EDGE = "E"

    # Members are single objects; that of Enum is a function of Python.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__


One, R, Ts, Td, S, D, U, V, E = Domain
FEW = (One, R, Ts, Td)
"""Domains with few rows, on which weights are."""

_BELOW: dict[Domain, frozenset[Domain]] = {
    One: frozenset({One}),
    R: frozenset({One, R}),
    Ts: frozenset({One, Ts}),
    Td: frozenset({One, Td}),
    S: frozenset({One, Ts, S}),
    D: frozenset({One, Td, D}),
    U: frozenset({One, Ts, R, S, U}),
    V: frozenset({One, Td, R, D, V}),
    E: frozenset(Domain),
}


def determines(row: Domain, other: Domain) -> bool:
    """Whether a row of a domain determines a row of another."""
    return other in _BELOW[row]


@cache
def join(*domains: Domain) -> Domain:
    """Return the smallest domain whose rows determine a row of each of `domains`."""
    return next(d for d in sorted(_BELOW, key=lambda d: len(_BELOW[d])) if all(determines(d, o) for o in domains))
