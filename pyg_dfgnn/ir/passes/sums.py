"""Sums over edges that follow from other sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from pyg_dfgnn.ir.domains import Domain, E, determines
from pyg_dfgnn.ir.program import Builder, Program, Shape, Value, rewrite, skip_views

_MOVED = ("view", "gather")
"""Operators that leave numbers as they are, in another shape or on other rows."""


class _Weighted(NamedTuple):
    """A sum of a y: over which rows, y, the factors of a, and the sum's id and domain."""

    over: Domain
    y: int
    factors: Counter[int]
    total: int
    domain: Domain


def share_sums(program: Program) -> Program:
    """Return the program with sum(a <x, y>) as <x, sum(a y)> where the inner sum is there, summed on if x is constant
    on less than the outer sum's rows.

    The gradient of a softmax sums its weights times their gradients over each row, which is the row's output times its
    gradient: no pass over the edges is needed for it. Where gradients of logits are added up over a row again, as for
    what a target adds to all of them, they cancel only if that sum is made of the very terms: it stays then.
    """
    sums = list(_weighted_sums(program))
    cancelled = _cancelled(program)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op != "sum" or i in cancelled:
            return None
        domain, over = value.attrs
        factors = _factors(program, value.args[0])
        for inner in factors:
            product = program.values[inner]
            if product.op != "inner" or prod(product.shape) != prod(value.shape):
                continue
            for x, y in (product.args, product.args[::-1]):
                row, bare = (skip_views(program.values, j, *_MOVED) for j in (x, y))
                for known in sums:
                    is_same = (known.over, known.y) == (over, bare) and known.factors == factors - Counter([inner])
                    is_row = determines(known.domain, domain)
                    is_row &= determines(known.domain, program.values[row].domain)
                    shape = program.values[known.total].shape
                    is_row &= _sizes(shape) == _sizes(program.values[x].shape) == _sizes(program.values[y].shape)
                    # A sum that comes later is not yet written.
                    if not is_same or not is_row or known.total not in ids:
                        continue
                    operand = builder.emit("view", ids[row], attrs=(shape,))
                    dots = builder.emit("inner", operand, ids[known.total], domain=known.domain)
                    if known.domain is not domain:
                        dots = builder.emit("sum", dots, attrs=(domain, known.domain))
                    return builder.emit("view", dots, attrs=(value.shape,))
        return None

    return rewrite(program, rule)


def _cancelled(program: Program) -> set[int]:
    """The sums of numbers over edges that sums of such numbers on the same targets depend on by a difference."""
    sums = {i for i in program.live if program.values[i].op == "sum" and program.values[i].attrs[1] is E}
    cancelled: set[int] = set()
    for i in sums:
        factors = _factors(program, program.values[i].args[0])
        differences = [j for j in factors if program.values[j].op == "sub"]
        others = {program.values[j].op for j in factors} - {"sub"}
        if len(differences) == 1 and others <= {"where", "heaviside", "const"}:
            terms = [_factors(program, arg) for arg in program.values[differences[0]].args]
            domain = program.values[i].attrs[0]
            cancelled |= {
                j for term in terms for j in term if j in sums and determines(domain, program.values[j].domain)
            }
    return cancelled


def _weighted_sums(program: Program) -> Iterator[_Weighted]:
    for i, value in enumerate(program.values):
        if value.op == "sum" and program.values[value.args[0]].op == "mul":
            factors = _factors(program, value.args[0])
            for y in factors:
                if prod(program.values[y].shape) == prod(value.shape) > 1:
                    yield _Weighted(value.attrs[1], y, factors - Counter([y]), i, value.attrs[0])


def _sizes(shape: Shape) -> Shape:
    return tuple(size for size in shape if size > 1)


def _factors(program: Program, i: int) -> Counter[int]:
    """Return the factors of a product with their counts; a value that is no product is its only factor."""
    i = skip_views(program.values, i, *_MOVED)
    value = program.values[i]
    return sum((_factors(program, arg) for arg in value.args), Counter()) if value.op == "mul" else Counter([i])
