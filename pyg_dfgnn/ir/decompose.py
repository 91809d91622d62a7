"""Decomposition of operators without a kernel of their own, and fewer passes over edges where sums allow it."""

from __future__ import annotations

from math import prod

import torch

from pyg_dfgnn.ir.domains import D, Domain, E, One
from pyg_dfgnn.ir.interpreter import EPSILON
from pyg_dfgnn.ir.pointwise import POINTWISE
from pyg_dfgnn.ir.program import Builder, Program, Shape, Value, rewrite, skip_views
from pyg_dfgnn.ir.register_layout import folds_last
from pyg_dfgnn.ir.register_matmul import normalised
from pyg_dfgnn.ir.simplify import common_subexpressions, remove_dead


def decompose(program: Program) -> Program:
    """Return the program with softmax as its parts, sums before folds and maps, and numbers computed."""
    summed = _only_summed(program)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        args = [ids[arg] for arg in value.args]
        if value.op == "softmax":
            (x,), attrs = args, value.attrs
            exp = builder.emit("exp", builder.emit("sub", x, builder.emit("max", x, attrs=attrs)), domain=attrs[1])
            epsilon = builder.emit("const", attrs=(EPSILON,))
            return _divided(builder, exp, builder.emit("add", builder.emit("sum", exp, attrs=attrs), epsilon))
        if value.op == "detach":
            # Its gradient has been taken, or never will be.
            return args[0]
        if value.op == "sum" and value.attrs == (One, E):
            # The rows of targets share the work, and a sum over these may be wanted as well.
            return builder.emit("sum", builder.emit("sum", args[0], attrs=(D, E)), attrs=(One, D))
        if (collapsed := _collapsed(program, i)) is not None:
            x, scale, op, over = collapsed
            if scale is not None:
                x = _divided(builder, ids[x], ids[scale]) if op == "div" else builder.emit(op, ids[x], ids[scale])
            return builder.emit("sum", ids[x] if scale is None else x, attrs=(value.domain, over))
        if (weighted := _scaled_softmax(program, i)) is not None:
            alpha, scale, vector, shape = weighted
            softmax, factor = (builder.emit("view", ids[j], attrs=(shape,)) for j in (alpha, scale))
            total = builder.emit("mul", softmax, builder.emit("mul", factor, ids[vector]))
            return builder.emit("sum", total, attrs=value.attrs)
        if value.op == "fold":
            return _folded(builder, args[0], value.shape)
        if value.op in ("inner", "amax") and all(builder.values[arg].shape[-1:] == (1,) for arg in args):
            # Nothing is joined, and lanes that hold other rows would join their copies of the one number.
            number = args[0] if value.op == "amax" else builder.emit("mul", *args, domain=value.domain)
            return builder.emit("view", number, attrs=(value.shape,))
        if value.op == "sum" and (mapped := skip_views(program.values, value.args[0], "view", "neg")) in summed:
            return _mapped_sum(builder, program, i, mapped, ids)
        if value.op == "sum":
            folded = skip_views(builder.values, args[0])
            if builder.values[folded].op == "fold" and not folds_last(builder.values, folded):
                total = builder.emit("sum", builder.values[folded].args[0], attrs=value.attrs)
                total = builder.emit("fold", total, attrs=(builder.values[folded].shape,))
                return builder.emit("view", total, attrs=(value.shape,))
        operands = [builder.values[arg] for arg in args]
        if value.op in POINTWISE and all(operand.op == "const" for operand in operands):
            numbers = [torch.tensor(operand.attrs[0], dtype=torch.float64) for operand in operands]
            return builder.emit("const", attrs=(POINTWISE[value.op].compute(*numbers, *value.attrs).item(),))
        if value.op == "div" and operands[0].op != "const":
            rows, divisor = operands
            if divisor.op == "const" or (divisor.domain, prod(divisor.shape)) != (rows.domain, prod(rows.shape)):
                return _divided(builder, *args)
        return None

    return remove_dead(normalised(remove_dead(common_subexpressions(rewrite(program, rule)))))


def _only_summed(program: Program) -> set[int]:
    """Maps of computed rows of edges by one weight that are read by sums to nodes alone, as they are or negated."""
    values, live = program.values, program.live
    maps = {i for i in live if values[i].op == "linear" and values[i].domain is E}
    maps = {i for i in maps if values[values[i].args[1]].domain is One and values[values[i].args[0]].op in POINTWISE}
    others = {i for _, i in program.outputs}
    for i in live:
        if values[i].op not in ("view", "neg", "sum") or (values[i].op == "sum" and values[i].attrs[0] is One):
            others |= set(values[i].args)
    return maps - {skip_views(values, i, "view", "neg") for i in others}


def _mapped_sum(builder: Builder, program: Program, i: int, mapped: int, ids: dict[int, int]) -> int:
    """Write the sum of a map as the map of a sum."""
    value, (x, weight) = program.values[i], program.values[mapped].args
    total = builder.emit("linear", builder.emit("sum", ids[x], attrs=value.attrs), ids[weight])
    step = value.args[0]
    while step != mapped:
        total = builder.emit("neg", total) if program.values[step].op == "neg" else total
        step = program.values[step].args[0]
    return builder.emit("view", total, attrs=(value.shape,))


def _folded(builder: Builder, x: int, shape: Shape) -> int:
    """Write a fold; of a linear map of each head, by the weight of that head, as one map of all heads' numbers."""
    value = builder.values[x]
    if prod(value.shape) == prod(shape):
        return builder.emit("view", x, attrs=(shape,))
    product = builder.values[skip_views(builder.values, x)]
    if product.op == "linear" and value.shape == product.shape and len(product.shape) > 1:
        rows, weight = (builder.values[arg] for arg in product.args)
        size, columns = prod(rows.shape), weight.shape[-1]
        if prod(shape) == columns and rows.shape[:-1] == weight.shape[:-2] == product.shape[:-1]:
            joined = builder.emit("view", product.args[0], attrs=((size,),))
            matrix = builder.emit("view", product.args[1], attrs=((size, columns),))
            return builder.emit("view", builder.emit("linear", joined, matrix), attrs=(shape,))
    return builder.emit("fold", x, attrs=(shape,))


def _divided(builder: Builder, x: int, y: int) -> int:
    """Multiply by 1 / y, which is computed once for many x."""
    divisor = builder.values[y]
    if divisor.op == "const" and divisor.attrs[0]:
        return builder.emit("mul", x, builder.emit("const", attrs=(1.0 / divisor.attrs[0],)))
    return builder.emit("mul", x, builder.emit("div", builder.emit("const", attrs=(1.0,)), y))


def _scaled_softmax(program: Program, i: int) -> tuple[int, int, int, Shape] | None:
    """Return the parts of a sum of (softmax c) v over the rows of the softmax: softmax, c, v and the shape that v
    meets, or None. As a sum of softmax (c v) it takes no pass over the edges beside that of the softmax.
    """
    value, values = program.values[i], program.values
    if value.op != "sum" or values[value.args[0]].op != "mul":
        return None
    factors = values[value.args[0]].args
    for weight, vector in (factors, factors[::-1]):
        scaled = values[skip_views(values, weight)]
        for alpha, scale in (scaled.args, scaled.args[::-1]) if scaled.op == "mul" else ():
            softmax = values[skip_views(values, alpha)]
            fits = values[alpha].shape == values[scale].shape == scaled.shape
            if fits and softmax.op == "softmax" and softmax.attrs == value.attrs:
                return alpha, scale, vector, values[weight].shape
    return None


def _collapsed(program: Program, i: int) -> tuple[int, int | None, str, Domain] | None:
    """Return a sum of scaled sums as one sum over the rows of those: what is summed, its scale, how that is applied,
    and the rows; None if a value is no such sum. So the sum of means by relation takes one pass over the edges.
    """
    value, values = program.values[i], program.values
    if value.op != "sum" or value.domain is One:
        return None
    middle, scale, op = value.args[0], None, "mul"
    operand = values[middle]
    if operand.op in ("mul", "div") and program.uses[middle] == 1:
        op = operand.op
        for middle, scale in (operand.args, operand.args[::-1])[: 2 if op == "mul" else 1]:
            if values[middle].op == "sum" and prod(values[scale].shape) == 1:
                break
    inner = values[middle]
    is_sum = inner.op == "sum" and program.uses[middle] == 1 and inner.domain is value.attrs[1]
    is_number = scale is None or prod(values[scale].shape) == 1
    return (inner.args[0], scale, op, inner.attrs[1]) if is_sum and is_number else None
