"""Rewrites that rest on linearity: the order of products, and aggregation before transformation.

A rewrite is taken where it multiplies, or moves, fewer numbers; a value that something else needs is not saved.

Source: linear operator reordering of Hector (https://arxiv.org/abs/2301.06284), for any number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from pyg_dfgnn.ir.domains import FEW, Domain, One, determines, join
from pyg_dfgnn.ir.materialize import ADD
from pyg_dfgnn.ir.program import RANGED, Builder, Program, Value, broadcast, rewrite

DomainSizes = Mapping[Domain, int]
"""Number of rows of each domain."""


def reorder(program: Program, sizes: DomainSizes) -> Program:
    """Return the program with (x A) B as x (A B), and x W dotted with a weight a as x (W a), where that is cheaper."""
    while (changed := _reordered(program, sizes)) != program:
        program = changed
    return program


def scale_first(program: Program) -> Program:
    """Return the program with c (x W) as (c x) W where x is a sum that nothing else reads and c one number per row.

    The sum is stored with its factor, such as a mean's, which no other reduction gives; the gradient of W then reads
    rows without one.
    """
    values, uses = program.values, program.uses

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op not in ("mul", "div"):
            return None
        inner, scale = value.args
        if value.op == "mul" and values[inner].op != "linear":
            inner, scale = scale, inner
        if values[inner].op != "linear" or uses[inner] > 1 or prod(values[scale].shape) > 1:
            return None
        ancestors = Program("", values, (("", scale),)).live
        if any(values[j].op in RANGED and values[j].op not in ("count", "is_used") for j in ancestors):
            return None
        x, w = values[inner].args
        is_sum = values[x].op == "sum" and uses[x] == 1 and values[x].domain is value.domain
        if not is_sum or values[inner].domain is not value.domain or value.shape != values[inner].shape:
            return None
        factor = builder.emit("view", ids[scale], attrs=((1,) * len(values[x].shape),))
        return builder.emit("linear", builder.emit(value.op, ids[x], factor), ids[w])

    return rewrite(program, rule)


def aggregate_first(program: Program, sizes: DomainSizes) -> Program:
    """Return the program with sum(c (x W)) as sum(sum(c x) W), the inner sum by (target, relation), where cheaper.

    So has sum(x W + b), to which b is added as often as there are rows. c has one number per row or per head, such as
    attention. Other readers of x W must be products with weights, such as logits: x (W A) takes their place, so that
    x W is no value at all.
    """
    pushed: dict[int, _Scaled] = {}
    products: dict[int, tuple[int, int]] = {}
    for i in sorted(program.live):
        scaled = _scaled_map(program, i)
        others = None if scaled is None else _other_products(program, i, scaled)
        if scaled is not None and others is not None and _saves(program, scaled, others, sizes):
            pushed[i] = scaled
            products |= others

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if i in products:
            return _emit_product(builder, program, i, *products[i], ids)[0]
        if i not in pushed:
            return None
        inner, scale, bias, middle = pushed[i]
        domain, over = value.attrs
        x, w = _emit_map(builder, program, inner, ids)
        x = x if scale is None else builder.emit("mul", ids[scale], x)
        mapped = builder.emit("linear", builder.emit("sum", x, attrs=(middle, over)), w)
        mapped = mapped if middle is domain else builder.emit("sum", mapped, attrs=(domain, middle))
        if bias is None:
            return mapped
        # Not the number of rows that a mean divides by, which is at least 1.
        rows = builder.emit("sum", builder.emit("const", attrs=(1.0,)), attrs=(domain, over))
        return builder.emit("add", mapped, builder.emit("mul", ids[bias], rows))

    return rewrite(program, rule)


class _Scaled(NamedTuple):
    """The map x W that a sum reads, its factor c or the bias that is added to it, and the domain of the inner sum."""

    inner: int
    scale: int | None
    bias: int | None
    middle: Domain


def _scaled_map(program: Program, i: int) -> _Scaled | None:
    """Return the operands of a sum of c (x W), or of x W + b; None if a value is something else."""
    value, values = program.values[i], program.values
    if value.op != "sum" or program.uses[value.args[0]] > 1:
        return None
    operand = values[value.args[0]]
    pairs = (operand.args, operand.args[::-1]) if operand.op in ("mul", ADD) else ((value.args[0], None),)
    for inner, other in pairs:
        scale, bias = (None, other) if operand.op == ADD else (other, None)
        factor = () if scale is None else values[scale].shape
        # On few rows the number of edges would be stored, which 16 bits do not count.
        is_bias = bias is None or (values[bias].domain is One and values[bias].shape == value.shape)
        is_bias &= bias is None or value.domain not in FEW
        if _is_map(program, inner) and factor[-1:] in ((), (1,)) and is_bias:
            domain, over = value.attrs
            middle = join(domain, _map_operands(program, inner)[1].domain)
            return _Scaled(inner, scale, bias, middle) if determines(over, middle) and middle is not over else None
    return None


def _other_products(program: Program, i: int, scaled: _Scaled) -> dict[int, tuple[int, int]] | None:
    """The other readers of x W with their operands, None if one of them is no product with a weight."""
    root = _chain(program, scaled.inner)[-1]
    names = {root} | {j for j in program.live if program.values[j].op == "view" and program.values[j].args[0] == root}
    own = i if scaled.scale is None and scaled.bias is None else program.values[i].args[0]
    readers = {j for j in program.live if names & set(program.values[j].args)} - names - {own}
    operands_of = {j: _product(program, j) for j in readers}
    if names & {j for _, j in program.outputs}:
        return None
    products = {j: operands for j, operands in operands_of.items() if operands is not None}
    return products if len(products) == len(readers) else None


def _saves(program: Program, scaled: _Scaled, others: dict[int, tuple[int, int]], sizes: DomainSizes) -> bool:
    """Whether fewer numbers are written: the rows of the inner sum and products of weights instead of x W."""
    x, _ = _map_operands(program, scaled.inner)
    inner = program.values[scaled.inner]
    factor = () if scaled.scale is None else program.values[scaled.scale].shape
    after = sizes[scaled.middle] * prod(broadcast("mul", factor, x.shape))
    trial, same = Builder(values=list(program.values)), {j: j for j in range(len(program.values))}
    for j, operands in others.items():
        product = trial.values[_emit_product(trial, program, j, *operands, same)[1]]
        after += sizes[product.domain] * prod(product.shape)
    return after <= sizes[inner.domain] * prod(inner.shape)


def _multiplications(values: Sequence[Value], value: Value, sizes: DomainSizes) -> int:
    """Return the multiplications of a linear map, a product of weights or an inner product."""
    is_inner = value.op == "inner"
    columns = 1 if is_inner else values[value.args[1]].shape[-2]
    return sizes[value.domain] * columns * prod(values[value.args[0]].shape if is_inner else value.shape)


def _reordered(program: Program, sizes: DomainSizes) -> Program:
    uses, values = program.uses, program.values

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        operands = _product(program, i)
        if operands is None:
            return None
        trial, chain = Builder(values=list(builder.values)), _chain(program, operands[0])
        result, product, mapped = _emit_product(trial, program, i, *operands, ids)
        before = _multiplications(values, value, sizes)
        if all(uses[j] == 1 for j in chain):
            before += _multiplications(values, values[chain[-1]], sizes)
        after = sum(_multiplications(trial.values, trial.values[j], sizes) for j in (product, mapped))
        if after >= before:
            return None
        builder.values[:] = trial.values
        return result

    return rewrite(program, rule)


def _product(program: Program, i: int) -> tuple[int, int] | None:
    """The map x W and the weight A of (x W) A, or of x W dotted with A; None if a value is something else."""
    value, values = program.values[i], program.values
    is_inner = value.op == "inner"
    if not is_inner and value.op != "linear":
        return None
    for inner, other in (value.args, value.args[::-1]) if is_inner else (value.args,):
        if not _is_map(program, inner) or (is_inner and values[other].shape != values[inner].shape):
            continue
        if join(_map_operands(program, inner)[1].domain, values[other].domain) in FEW:
            return inner, other
    return None


def _emit_product(
    builder: Builder, program: Program, i: int, inner: int, other: int, ids: dict[int, int]
) -> tuple[int, int, int]:
    """Write x (W A) and return the ids of the result, of W A and of the map by it."""
    value, shape = program.values[i], program.values[other].shape
    x, w = _emit_map(builder, program, inner, ids)
    column = builder.emit("view", ids[other], attrs=(shape + (1,) if value.op == "inner" else shape,))
    product = builder.emit("matmul", w, column)
    mapped = builder.emit("linear", x, product)
    return builder.emit("view", mapped, attrs=(value.shape,)), product, mapped


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
