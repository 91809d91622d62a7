"""Covering sets: few rows of a parameter table in which every pair of values of any two axes occurs."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def covering(axes: dict[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Picks rows greedily, each the one with most pairs not seen yet.

    Args:
        axes: The values of each parameter.
        allowed: Whether a row makes sense; pairs that no allowed row has are left out.
    """
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = [row for row in rows if allowed(row)]
    parts = [frozenset(itertools.combinations(row.items(), 2)) for row in rows]
    left = set().union(*parts)
    chosen = []
    while left:
        best = max(range(len(rows)), key=lambda i: len(parts[i] & left))
        chosen.append(rows[best])
        left -= parts[best]
    return chosen


def covering_calls(axes: dict[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Picks rows as :func:`covering` does, with or without edge features and dropout.

    The two are one axis: calls with neither have kernels of their own, capped at fewer registers, and are covered too.
    The cosine score takes no edge features.

    Args:
        axes: The values of each parameter, with those of "score".
        allowed: Whether a row makes sense, which also has "edge" and "dropout".
    """

    def named(row: Row) -> Row:
        edge, dropout = row["call"]
        return {**row, "edge": edge, "dropout": dropout}

    def fits(row: Row) -> bool:
        return not (row["call"][0] and row["score"] == "cosine") and allowed(named(row))

    return list(map(named, covering({**axes, "call": tuple(itertools.product((False, True), repeat=2))}, fits)))
