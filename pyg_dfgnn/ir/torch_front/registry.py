"""The table of torch functions that have a meaning in a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.ir.domains import D
from pyg_dfgnn.ir.program import broadcast
from pyg_dfgnn.ir.torch_front.symbols import Symbol, Tracer

Handler = Callable[..., Any]
FUNCTIONS: dict[str, Handler] = {}
"""Name of a torch function, without the marks of in-place and operator forms -> what it does: it takes the tracer, the
function and its arguments with symbols for tensors.
"""


def names(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler under names."""

    def register(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(names, handler))
        return handler

    return register


def values(t: Tracer, *operands: Any, any_axis: bool = False) -> list[Symbol]:
    """Return operands as symbols with values.

    Args:
        t: The tracer.
        operands: Symbols, numbers, tensors of the module.
        any_axis: Whether rows may be another dimension than the first.

    Raises:
        Refusal: One has no value: the ids of nodes or edges, or integers.
    """
    symbols = [t.symbol(x) for x in operands]
    for x in symbols:
        if x.lift is not None:
            x.number, x.rows = x.lift(D), D
        if x.number is None:
            raise t.stop("reads ids or integers as numbers")
        if x.lead and not any_axis:
            raise t.stop("nodes along another dimension than the first")
    return symbols


def require(holds: bool, what: str) -> None:
    """Refuse a function with these arguments unless a condition holds.

    Raises:
        ValueError: It does not; the tracer adds the function and the line.
    """
    if not holds:
        raise ValueError(what)


def size_and_dtype(func: Any, *operands: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a meta tensor like the result of a pointwise function, which torch asks slow functions of Python for.

    Args:
        func: The function.
        operands: Its operands.
        dtype: Of the result; by default the operands'.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    first = tensors[0]
    if not first.is_floating_point() or any(x.dtype is not first.dtype for x in tensors):
        result: Tensor = func(*operands)
        return result
    shape = broadcast("operands", *(tuple(x.shape) for x in tensors))
    if dtype is None and shape == tuple(first.shape):
        return first
    return torch.empty(shape, dtype=dtype or first.dtype, device="meta")


def pointwise(t: Tracer, meta: Tensor, op: str, *operands: Any, attrs: Sequence[Any] = ()) -> Symbol:
    """Return a pointwise function of operands that broadcast to the size of `meta`."""
    numbers, rows, lead = t.aligned(*values(t, *operands, any_axis=True))
    return t.result(meta, t.emit(op, *numbers, attrs=attrs), rows, lead=lead)
