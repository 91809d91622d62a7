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
