"""Attention with scores of the package as programs, whose gradients have derivatives."""

# Domains stand where types do.
# mypy: disable-error-code="valid-type,no-untyped-def,arg-type,assignment,attr-defined"

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from pyg_dfgnn.ir.domains import D, E, One, S
from pyg_dfgnn.ir.trace import Relational, Var, dot, leaky_relu, relational, softmax, sum_to


def _plus(x: Var, *others: Var | None) -> Var:
    for other in others:
        x = x if other is None else x + other
    return x


def _unit(x: Var) -> Var:
    # The least norm is that of PyG; the greatest square is finite.
    return x / dot(x, x).apply("clamp", attrs=(1e-24, 3e38)).apply("sqrt").view(-1, 1)


def _cosine(slope: float, value: Var, target: Var, parameter: Var, **_: Var) -> Var:
    return dot(_unit(target), _unit(value)) * parameter


def _dot(slope: float, value: Var, target: Var, key: Var, edge: Var | None, **_: Var) -> Var:
    return dot(target, _plus(key, edge))


def _add(slope: float, value: Var, source_scalars: Var, target_scalars: Var, edge: Var | None, **_: Var) -> Var:
    return leaky_relu(_plus(source_scalars, target_scalars, edge), slope)


def _gatv2(slope: float, value: Var, target: Var, parameter: Var, edge: Var | None, **_: Var) -> Var:
    return dot(leaky_relu(_plus(target + value, edge), slope), parameter)


LOGITS: Mapping[str, Callable[..., Var]] = MappingProxyType(
    {"dot": _dot, "cosine": _cosine, "add": _add, "gatv2": _gatv2}
)
"""Name of a score -> its logits in a program; the scale, where a score has one, is 1."""


@cache
def attention(score: str, edge_in_value: bool, slope: float, dropout: float) -> Relational:
    """Return the program of attention over the heads of rows [H, C], by the roles of its inputs."""
    logits = LOGITS[score]

    @relational
    def attended(
        value: S,
        target: D = None,
        key: S = None,
        target_scalars: D = None,
        source_scalars: S = None,
        parameter: One = None,
        edge: E = None,
        edge_target: D = None,
    ):
        rows, edge = (None, edge) if edge_target is None else (edge.view(1, -1), None)
        operands = {"target": target, "key": key, "parameter": parameter, "edge": edge}
        scalars = {"target_scalars": target_scalars, "source_scalars": source_scalars}
        scores = logits(slope, value=value, **operands, **scalars)
        weights = softmax(scores if rows is None else scores + dot(edge_target, rows), among=D)
        if dropout:
            builder, shape = value._builder, value.shape[:1]
            weights = weights * Var(builder, builder.emit("dropout_mask", builder.seed(), attrs=(E, shape, dropout, 0)))
        content = _plus(value, edge) if edge_in_value else value
        weights = weights.view(-1, 1)
        outputs = {"out": sum_to(D, weights * content)}
        return outputs if rows is None else {**outputs, "edge_out": sum_to(D, weights * rows)}

    return attended
