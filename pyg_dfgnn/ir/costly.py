"""Numbers of edges that are computed once for each, rather than in every lane of every traversal that reads them."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from pyg_dfgnn.ir.domains import FEW, E
from pyg_dfgnn.ir.narrow import is_wide
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Program, through

MOST_OPERATORS = 16
"""Operators on features of edges that a lane rather computes than reads what they make."""


def costly(program: Program, inline: Collection[int], width: int) -> set[int]:
    """Return the numbers per head that much arithmetic makes of features of edges and of values with few rows.

    Of those that follow from each other it is the last, whose readers read more than such features.

    Args:
        program: A decomposed program.
        inline: Values that registers could hold.
        width: Numbers of the widest row of nodes.
    """
    values, arithmetic, found = program.values, dict[int, set[int]](), set[int]()
    last: set[int] = set()
    for i in sorted(program.live):
        value = values[i]
        args = [j for j in value.args if values[j].domain not in FEW]
        cost = 0
        is_made = i in inline and value.domain is E
        if is_made and all(j in arithmetic or (values[j].domain, values[j].op) == (E, "input") for j in args):
            own = {i} if value.op in POINTWISE else set[int]()
            arithmetic[i] = own.union(*(arithmetic[j] for j in args if j in arithmetic))
            cost = sum(prod(values[j].shape) for j in arithmetic[i])
        is_narrow = prod(value.shape) == max(value.shape, default=1) and not is_wide(value.shape, width)
        if is_narrow and cost > MOST_OPERATORS * prod(value.shape):
            found.add(i)
        else:
            last |= found.intersection(value.args)
    return {through(values, i) for i in last}
