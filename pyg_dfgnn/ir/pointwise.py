"""The pointwise functions of the IR: what each computes and its derivative as pointwise functions again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Emit = Callable[..., int]
"""emit(op, *operands, attrs=()) adds a value; a float among the operands stands for a constant."""


class Pointwise(NamedTuple):
    """A function of single numbers.

    Attributes:
        compute: The function on tensors, then its attributes.
        derivatives: For each operand (emit, operands, attributes, result) -> the derivative of the result in it, an id
            or a constant; None where the derivative is zero everywhere.
        attributes: How many numbers the function takes besides its operands.
    """

    compute: Callable[..., Any]
    derivatives: tuple[Callable[[Any, Sequence[int], Sequence[Any], int], int | float] | None, ...]
    attributes: int = 0


def _one(
    compute: Callable[..., Any], derivative: Callable[[Any, int, Sequence[Any], int], int | float], attributes: int = 0
) -> Pointwise:
    return Pointwise(compute, (lambda emit, args, attrs, y: derivative(emit, args[0], attrs, y),), attributes)


def _heaviside(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def _normal(emit: Emit, x: int) -> int:
    """The standard normal density and, from it, the derivative x density(x) + distribution(x) of GELU."""
    density = emit("mul", emit("exp", emit("mul", emit("mul", x, x), -0.5)), 1 / sqrt(2 * pi))
    distribution = emit("mul", emit("add", emit("erf", emit("mul", x, sqrt(0.5))), 1.0), 0.5)
    return emit("add", emit("mul", x, density), distribution)


def _in_range(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ((x >= low) & (x <= high)).to(x.dtype)


def _logistic_slope(emit: Emit, s: int) -> int:
    return emit("mul", s, emit("sub", 1.0, s))


def _silu_slope(emit: Emit, x: int, y: int) -> int:
    s = emit("sigmoid", x)
    return emit("add", s, emit("mul", y, emit("sub", 1.0, s)))


def _inverse_root(emit: Emit, x: int) -> int:
    return emit("pow", x, attrs=(-0.5,))


def _sum_of_squares(emit: Emit, x: int, y: int) -> int:
    return emit("add", emit("mul", x, x), emit("mul", y, y))


def _larger(emit: Emit, x: int, y: int) -> int:
    return emit("add", emit("greater", x, y), emit("mul", emit("eq", x, y), 0.5))


def _pow_slope(emit: Emit, x: int, exponent: float) -> float | int:
    # No negative power of a 0 where the slope is a constant, as that of a slope may be.
    return exponent if exponent in (0.0, 1.0) else emit("mul", emit("pow", x, attrs=(exponent - 1.0,)), exponent)


POINTWISE: dict[str, Pointwise] = {
    "add": Pointwise(torch.add, (lambda e, a, k, y: 1.0, lambda e, a, k, y: 1.0)),
    "sub": Pointwise(torch.sub, (lambda e, a, k, y: 1.0, lambda e, a, k, y: -1.0)),
    "mul": Pointwise(torch.mul, (lambda e, a, k, y: a[1], lambda e, a, k, y: a[0])),
    "div": Pointwise(
        torch.div,
        (lambda e, a, k, y: e("div", 1.0, a[1]), lambda e, a, k, y: e("neg", e("div", y, a[1]))),
    ),
    # The condition is a number that is zero or not.
    "where": Pointwise(
        lambda c, a, b: torch.where(c != 0, a, b),
        (None, lambda e, a, k, y: e("where", a[0], 1.0, 0.0), lambda e, a, k, y: e("where", a[0], 0.0, 1.0)),
    ),
    # The gradient of equal operands is shared equally, as torch has it.
    "maximum": Pointwise(
        torch.maximum,
        (lambda e, a, k, y: _larger(e, a[0], a[1]), lambda e, a, k, y: _larger(e, a[1], a[0])),
    ),
    "eq": Pointwise(lambda a, b: (a == b).to(a.dtype), (None, None)),
    "greater": Pointwise(lambda a, b: (a > b).to(a.dtype), (None, None)),
    "heaviside": Pointwise(_heaviside, (None,)),
    "in_range": Pointwise(_in_range, (None,), 2),
    "sign": Pointwise(torch.sign, (None,)),
    "floor": Pointwise(torch.floor, (None,)),
    "round": Pointwise(torch.round, (None,)),
    # The rest of a division, with the sign of the divisor.
    "remainder": Pointwise(
        torch.remainder, (lambda e, a, k, y: 1.0, lambda e, a, k, y: e("neg", e("floor", e("div", a[0], a[1]))))
    ),
    # Of two zeros the derivative is no number, as torch has it.
    "atan2": Pointwise(
        torch.atan2,
        (
            lambda e, a, k, y: e("div", a[1], _sum_of_squares(e, *a)),
            lambda e, a, k, y: e("neg", e("div", a[0], _sum_of_squares(e, *a))),
        ),
    ),
    "neg": _one(torch.neg, lambda e, x, k, y: -1.0),
    "abs": _one(torch.abs, lambda e, x, k, y: e("sign", x)),
    "exp": _one(torch.exp, lambda e, x, k, y: y),
    "log": _one(torch.log, lambda e, x, k, y: e("div", 1.0, x)),
    "sqrt": _one(torch.sqrt, lambda e, x, k, y: e("div", 0.5, y)),
    "pow": _one(torch.pow, lambda e, x, k, y: _pow_slope(e, x, float(k[0])), 1),
    "sin": _one(torch.sin, lambda e, x, k, y: e("cos", x)),
    "cos": _one(torch.cos, lambda e, x, k, y: e("neg", e("sin", x))),
    "erf": _one(torch.erf, lambda e, x, k, y: e("mul", e("exp", e("neg", e("mul", x, x))), 2 / sqrt(pi))),
    "sinh": _one(torch.sinh, lambda e, x, k, y: e("cosh", x)),
    "cosh": _one(torch.cosh, lambda e, x, k, y: e("sinh", x)),
    "asin": _one(torch.asin, lambda e, x, k, y: _inverse_root(e, e("sub", 1.0, e("mul", x, x)))),
    "acos": _one(torch.acos, lambda e, x, k, y: e("neg", _inverse_root(e, e("sub", 1.0, e("mul", x, x))))),
    "atan": _one(torch.atan, lambda e, x, k, y: e("div", 1.0, e("add", e("mul", x, x), 1.0))),
    "asinh": _one(torch.asinh, lambda e, x, k, y: _inverse_root(e, e("add", e("mul", x, x), 1.0))),
    "acosh": _one(torch.acosh, lambda e, x, k, y: _inverse_root(e, e("sub", e("mul", x, x), 1.0))),
    "atanh": _one(torch.atanh, lambda e, x, k, y: e("div", 1.0, e("sub", 1.0, e("mul", x, x)))),
    "expm1": _one(torch.expm1, lambda e, x, k, y: e("add", y, 1.0)),
    "log1p": _one(torch.log1p, lambda e, x, k, y: e("div", 1.0, e("add", x, 1.0))),
    "clamp": _one(torch.clamp, lambda e, x, k, y: e("in_range", x, attrs=k), 2),
    "relu": _one(F.relu, lambda e, x, k, y: e("heaviside", x)),
    "leaky_relu": _one(F.leaky_relu, lambda e, x, k, y: e("where", e("heaviside", x), 1.0, float(k[0])), 1),
    # With the alpha of 1 that PyG's layers use.
    "elu": _one(F.elu, lambda e, x, k, y: e("where", e("heaviside", x), 1.0, e("add", y, 1.0))),
    "gelu": _one(F.gelu, lambda e, x, k, y: _normal(e, x)),
    "silu": _one(F.silu, lambda e, x, k, y: _silu_slope(e, x, y)),
    "sigmoid": _one(torch.sigmoid, lambda e, x, k, y: _logistic_slope(e, y)),
    "tanh": _one(torch.tanh, lambda e, x, k, y: e("sub", 1.0, e("mul", y, y))),
    "softplus": _one(F.softplus, lambda e, x, k, y: e("sigmoid", x)),
}
"""Name -> pointwise function."""
COMPARISONS = ("in_range", "eq", "greater", "sign", "heaviside", "floor", "round", "remainder")
"""Pointwise functions that jump, with which gradients choose their branch."""
