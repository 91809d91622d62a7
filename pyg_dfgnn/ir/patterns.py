"""Parts of a softmax that one pass over the rows computes: its maximum and sum, and the sum that it weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyg_dfgnn.ir.program import Value, skip_views


class Statistic(NamedTuple):
    """A sum of exp(x - m) over the rows of the maximum m of x: the ids of exp, x and m."""

    exp: int
    x: int
    most: int


class Weighted(NamedTuple):
    """A sum of softmax(x) v over the rows of the softmax.

    Attributes:
        most: The maximum of x.
        total: The sum of exp(x - m).
        inverse: 1 / (total + epsilon).
        alpha: The softmax.
        place: Which operand of the product v is.
        vector: v.
    """

    most: int
    total: int
    inverse: int
    alpha: int
    place: int
    vector: int


def statistic(values: Sequence[Value], i: int) -> Statistic | None:
    """Return the parts of a sum of exp(x - max x); None if a value is something else."""
    value = values[i]
    if value.op != "sum" or values[value.args[0]].op != "exp":
        return None
    exp = value.args[0]
    sub = values[values[exp].args[0]]
    if sub.op != "sub":
        return None
    x, most = sub.args
    is_statistic = values[most].op == "max" and values[most].attrs == value.attrs and values[most].args == (x,)
    return Statistic(exp, x, most) if is_statistic else None


def weighted(values: Sequence[Value], i: int) -> Weighted | None:
    """Return the parts of a sum of softmax(x) v; None if a value is something else."""
    value = values[i]
    if value.op != "sum" or values[value.args[0]].op != "mul":
        return None
    factors = values[value.args[0]].args
    for place, vector in enumerate(factors):
        alpha = skip_views(values, factors[1 - place])
        parts = _softmax(values, alpha)
        if parts is not None and values[parts[1]].attrs == value.attrs:
            return Weighted(*parts, alpha, place, vector)
    return None


def _softmax(values: Sequence[Value], i: int) -> tuple[int, int, int] | None:
    """Return the maximum, the sum and the inverse of a softmax."""
    if values[i].op != "mul":
        return None
    exp, inverse = values[i].args
    if values[inverse].op != "div" or not values[values[inverse].args[1]].args:
        return None
    total = values[values[inverse].args[1]].args[0]
    parts = statistic(values, total)
    return (parts.most, total, inverse) if parts is not None and parts.exp == exp else None
