"""Sums of the messages of :mod:`pyg_dfgnn.statements.segment` as programs, whose gradients have derivatives."""

# Domains stand where types do.
# mypy: disable-error-code="valid-type,operator,attr-defined"

from types import MappingProxyType

from pyg_dfgnn.ir.domains import D, E, One, S
from pyg_dfgnn.ir.trace import relational, sum_to


@relational
def _copy(value: S):
    return sum_to(D, value)


@relational
def _weight(value: S, edge: E):
    return sum_to(D, value * edge)


@relational
def _add(value: S, edge: E):
    return sum_to(D, value + edge)


@relational
def _relu_add(value: S, edge: E):
    return sum_to(D, (value + edge).apply("relu"))


@relational
def _relu_linear(value: S, edge: E, lin_weight: One, lin_bias: One):
    return sum_to(D, (value + (edge @ lin_weight + lin_bias)).apply("relu"))


@relational
def _gate(target: D, key: S, value: S):
    return sum_to(D, (target + key).apply("sigmoid") * value)


SUM_OF = MappingProxyType(
    {
        **{"copy": _copy, "weight": _weight, "add": _add},
        **{"relu_add": _relu_add, "relu_linear": _relu_linear, "gate": _gate},
    }
)
"""Name of a message -> the program of its sum; a weight of an edge is a row of one number."""
