"""Rewrites that rest on linearity: the order of products, and aggregation before transformation.

A rewrite is taken where it multiplies, or moves, fewer numbers; a value that something else needs is not saved.

Source: linear operator reordering of Hector (https://arxiv.org/abs/2301.06284), for any number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from pyg_dfgnn.ir.domains import Domain, One, R, Td, Ts, determines, join
from pyg_dfgnn.ir.program import Builder, Program, Value, broadcast, rewrite

WEIGHTS = (One, R, Ts, Td)
"""Domains with few rows, on which weights are multiplied beforehand."""
Sizes = Mapping[Domain, int]
"""Number of rows of each domain."""


def reorder(program: Program, sizes: Sizes) -> Program:
    """Return the program with (x A) B as x (A B), and x W dotted with a weight a as x (W a), where that is cheaper."""
    while (changed := _reordered(program, sizes)) != program:
        program = changed
    return program


def aggregate_first(program: Program, sizes: Sizes) -> Program:
    """Return the program with sum(c (x W)) as sum(sum(c x) W), the inner sum by (target, relation), where cheaper.

    c has one number per row or per head; x W may be used by nothing else.
    """
    uses, values = program.uses, program.values

    def is_scaled_map(inner: int, scale: int | None) -> bool:
        factor = () if scale is None else values[scale].shape
        is_only_use = all(uses[i] == 1 for i in _chain(program, inner))
        return _is_map(program, inner) and is_only_use and (not factor or factor[-1] == 1)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op != "sum" or uses[value.args[0]] > 1:
            return None
        operand = values[value.args[0]]
        choices = [operand.args, operand.args[::-1]] if operand.op == "mul" else [(value.args[0], None)]
        inner, scale = next((choice for choice in choices if is_scaled_map(*choice)), (None, None))
        if inner is None:
            return None
        domain, over = value.attrs
        x, w = _map_operands(program, inner)
        middle = join(domain, w.domain)
        factor = () if scale is None else values[scale].shape
        rows_before, rows_after = sizes[values[inner].domain], sizes[middle]
        moved_before, moved_after = (
            rows_before * prod(value.shape),
            rows_after * prod(broadcast("mul", factor, x.shape)),
        )
        if not determines(over, middle) or middle is over or moved_after > moved_before:
            return None
        new_x, new_w = _emit_map(builder, program, inner, ids)
        scaled = new_x if scale is None else builder.emit("mul", ids[scale], new_x)
        first = builder.emit("sum", scaled, attrs=(middle, over))
        mapped = builder.emit("linear", first, new_w)
        return mapped if middle is domain else builder.emit("sum", mapped, attrs=(domain, middle))

    return rewrite(program, rule)


def multiplications(values: tuple[Value, ...], value: Value, sizes: Sizes) -> int:
    """Return the multiplications of a linear map, a product of weights or a dot product."""
    inner = 1 if value.op == "inner" else values[value.args[1]].shape[-2]
    size = prod(values[value.args[0]].shape) if value.op == "inner" else prod(value.shape)
    return sizes[value.domain] * size * inner


def _reordered(program: Program, sizes: Sizes) -> Program:
    uses, values = program.uses, program.values

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op not in ("linear", "inner"):
            return None
        for inner, other in (value.args, value.args[::-1]) if value.op == "inner" else (value.args,):
            weight = values[other]
            if weight.domain not in WEIGHTS or not _is_map(program, inner):
                continue
            x, w = _map_operands(program, inner)
            if w.domain not in WEIGHTS or not _combine(w.domain, weight.domain):
                continue
            # The product of weights has the heads of both, a map with one operand without heads has the other's.
            is_dot = value.op == "inner"
            shape = weight.shape + (1,) if is_dot else weight.shape
            if len(shape) < 2 or (is_dot and weight.shape != values[inner].shape):
                continue
            trial = Builder(values=list(builder.values))
            new_x, new_w = _emit_map(trial, program, inner, ids)
            column = trial.emit("view", ids[other], attrs=(shape,))
            product = trial.emit("matmul", new_w, column)
            mapped = trial.emit("linear", new_x, product)
            result = trial.emit("view", mapped, attrs=(value.shape,))
            if not determines(value.domain, trial.values[result].domain):
                continue
            before = multiplications(values, value, sizes)
            if all(uses[v] == 1 for v in _chain(program, inner)):
                before += multiplications(values, values[_chain(program, inner)[-1]], sizes)
            after = sum(multiplications(tuple(trial.values), trial.values[v], sizes) for v in (product, mapped))
            if after < before:
                builder.values[:] = trial.values
                return result
        return None

    return rewrite(program, rule)


def _combine(first: Domain, second: Domain) -> bool:
    return join(first, second) in WEIGHTS


def _chain(program: Program, i: int) -> list[int]:
    """A map and, in front of it, the view of it."""
    value = program.values[i]
    return [i, value.args[0]] if value.op == "view" else [i]


def _is_map(program: Program, i: int) -> bool:
    """Whether a value is x W, or x W of one head split into heads."""
    value = program.values[i]
    if value.op == "view":
        inner = program.values[value.args[0]]
        return inner.op == "linear" and len(inner.shape) == 1 and len(value.shape) > 1
    return value.op == "linear"


def _map_operands(program: Program, i: int) -> tuple[Value, Value]:
    """x and W of x W."""
    x, w = program.values[_chain(program, i)[-1]].args
    return program.values[x], program.values[w]


def _emit_map(builder: Builder, program: Program, i: int, ids: dict[int, int]) -> tuple[int, int]:
    """Write x and W so that x W is the value, with heads in front of W where the value is split into heads."""
    x, w = program.values[_chain(program, i)[-1]].args
    value, new_w = program.values[i], ids[w]
    if value.op == "view":
        heads, size = value.shape[:-1], program.values[w].shape[-2]
        new_w = builder.emit("view", new_w, attrs=((size, *heads, value.shape[-1]),))
        rank = len(heads)
        new_w = builder.emit("permute", new_w, attrs=((*range(1, rank + 1), 0, rank + 1),))
    return ids[x], new_w
