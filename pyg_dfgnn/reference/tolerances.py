"""How far a result may be from its float64 reference: one table for tests and bench.

Import ``tolerance`` for one row, ``elementwise`` for bounds by element, ``assert_close`` and ``assert_all_close`` to
compare tensors, ``relative_error`` and ``largest_errors`` for the two measures, ``worst_beside`` where PyG's own error
decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD, BACKWARD = "forward", "backward"
BESIDE_PYG = 2.0
"""How many times as far from float64 as PyG's own layer, in the same dtype by the same measure, a result may be.

That counts only beyond the bound of the table. A gradient has no bound of its own where its terms cancel, or where a
value at a kink, as of ReLU, comes out of a sum: rounding decides on which side of the kink one of many values lies, and
a whole term is there or not. Which values these are differs from one order of additions to another.
"""


class Tolerance(NamedTuple):
    """One row of the table.

    Attributes:
        relative: Bound of :func:`relative_error`, the Frobenius norm of the difference over that of the reference.
        largest: Bound of :func:`largest_errors`, the largest difference over the largest number; None: not measured.
        reason: What the bound allows for, and what is expected.
    """

    relative: float
    largest: float | None
    reason: str


_FP32 = "fp32 products and sums: 5e-8 to 7e-7 expected, logits within about 100"
_TF32 = "fp32 storage and sums, factors of products rounded to 10-bit mantissas: 2e-4 to 6e-4 expected"
_BF16 = "bf16 storage, fp32 sums: one rounding of 2^-9 per stored value, 2e-3 to 4e-3 expected"
_FP16 = "fp16 storage, fp32 sums: one rounding of 2^-12 per stored value, 3e-4 to 4e-4 expected"
_FP64 = "reference path: only the order of sums differs, 1e-12 expected"
_TWO_PARTS = "; some gradients are the sum of two rounded parts"
_SPLIT = "; two TF32 numbers hold 22 of the 24 bits of a factor"
_TWO_TERMS = "; the terms of nodes and of edges, rounded each, are added"
_WEIGHTS = "; each weight is rounded too before it meets a value, half as much again is left of that in a sum"
_STEPS = "; rows of nodes and pairs that one step leaves for another are rounded, logits too"

TOLERANCES: dict[tuple[str, str, str], Tolerance] = {
    # (op, dtype, direction); "tf32" is float32 whose products may be rounded to TF32.
    ("attention", "float32", FORWARD): Tolerance(5e-6, 1e-6, _FP32),
    ("attention", "float32", BACKWARD): Tolerance(5e-6, 2e-6, _FP32 + _TWO_PARTS),
    ("attention", "tf32", FORWARD): Tolerance(2e-3, None, _TF32),
    ("attention", "tf32", BACKWARD): Tolerance(2e-3, None, _TF32),
    ("attention", "bfloat16", FORWARD): Tolerance(1e-2, 4e-3, _BF16),
    ("attention", "bfloat16", BACKWARD): Tolerance(1e-2, 6e-3, _BF16 + _TWO_PARTS),
    ("attention", "float16", FORWARD): Tolerance(2e-3, 5e-4, _FP16),
    ("attention", "float16", BACKWARD): Tolerance(2e-3, 8e-4, _FP16 + _TWO_PARTS),
    ("attention", "float64", FORWARD): Tolerance(1e-10, None, _FP64),
    ("attention", "float64", BACKWARD): Tolerance(1e-10, None, _FP64),
    ("attention/block_mma", "float32", FORWARD): Tolerance(5e-6, 2e-6, _FP32 + _SPLIT),
    ("attention/block_mma", "float32", BACKWARD): Tolerance(5e-6, 4e-6, _FP32 + _SPLIT),
    ("attention/block_mma", "bfloat16", FORWARD): Tolerance(1e-2, 6e-3, _BF16 + _WEIGHTS),
    ("attention/block_mma", "bfloat16", BACKWARD): Tolerance(1e-2, 9e-3, _BF16 + _WEIGHTS),
    ("attention/block_mma", "float16", FORWARD): Tolerance(2e-3, 7.5e-4, _FP16 + _WEIGHTS),
    ("attention/block_mma", "float16", BACKWARD): Tolerance(2e-3, 1.2e-3, _FP16 + _WEIGHTS),
    ("attention/edge_rows", "bfloat16", FORWARD): Tolerance(1e-2, 8e-3, _BF16 + _TWO_TERMS),
    ("attention/edge_rows", "bfloat16", BACKWARD): Tolerance(1e-2, 9e-3, _BF16 + _TWO_TERMS),
    ("attention/edge_rows", "float16", FORWARD): Tolerance(2e-3, 1e-3, _FP16 + _TWO_TERMS),
    ("attention/edge_rows", "float16", BACKWARD): Tolerance(2e-3, 1.2e-3, _FP16 + _TWO_TERMS),
    ("segment", "float32", FORWARD): Tolerance(5e-6, 1e-6, _FP32),
    ("segment", "float32", BACKWARD): Tolerance(5e-6, 2e-6, _FP32),
    ("segment", "bfloat16", FORWARD): Tolerance(1e-2, 4e-3, _BF16),
    ("segment", "bfloat16", BACKWARD): Tolerance(1e-2, 6e-3, _BF16),
    ("segment", "float16", FORWARD): Tolerance(2e-3, 5e-4, _FP16),
    ("segment", "float16", BACKWARD): Tolerance(2e-3, 8e-4, _FP16),
    ("segment", "float64", FORWARD): Tolerance(1e-10, None, _FP64),
    ("segment", "float64", BACKWARD): Tolerance(1e-10, None, _FP64),
    ("relational", "float32", FORWARD): Tolerance(5e-6, 2e-6, _FP32 + _SPLIT),
    ("relational", "float32", BACKWARD): Tolerance(5e-6, 2e-6, _FP32 + _SPLIT),
    ("relational", "bfloat16", FORWARD): Tolerance(1e-2, 1e-2, _BF16 + _STEPS),
    ("relational", "bfloat16", BACKWARD): Tolerance(1e-2, 1e-2, _BF16 + _STEPS),
    ("relational", "float16", FORWARD): Tolerance(2e-3, 1.5e-3, _FP16 + _STEPS),
    ("relational", "float16", BACKWARD): Tolerance(2e-3, 1.5e-3, _FP16 + _STEPS),
    ("relational", "float64", FORWARD): Tolerance(1e-10, None, _FP64),
    ("relational", "float64", BACKWARD): Tolerance(1e-10, None, _FP64),
    ("gemm", "float32", FORWARD): Tolerance(5e-6, None, _FP32),
    ("gemm", "float32", BACKWARD): Tolerance(5e-6, None, _FP32),
    ("gemm", "tf32", FORWARD): Tolerance(2e-3, None, _TF32),
    ("gemm", "tf32", BACKWARD): Tolerance(2e-3, None, _TF32),
    ("gemm", "bfloat16", FORWARD): Tolerance(1e-2, None, _BF16),
    ("gemm", "bfloat16", BACKWARD): Tolerance(1e-2, None, _BF16),
    ("gemm", "float16", FORWARD): Tolerance(2e-3, None, _FP16),
    ("gemm", "float16", BACKWARD): Tolerance(2e-3, None, _FP16),
    ("gemm", "float64", FORWARD): Tolerance(1e-10, None, _FP64),
    ("gemm", "float64", BACKWARD): Tolerance(1e-10, None, _FP64),
}


class Elementwise(NamedTuple):
    """Bounds of `torch.testing.assert_close`, which measures every element by itself.

    Attributes:
        rtol: Part that is relative to the element.
        atol: Part that is not, for elements whose terms cancel.
        reason: What the bounds allow for.
    """

    rtol: float
    atol: float
    reason: str


ELEMENTWISE: dict[str, Elementwise] = {
    # dtype, or dtype/what is compared.
    "float32": Elementwise(1e-4, 1e-5, "two orders of additions in fp32; an element may be a rest of large terms"),
    "float32/few_terms": Elementwise(1e-5, 1e-5, "sums of few terms in fp32 beside float64"),
    "float32/one_formula": Elementwise(1e-5, 1e-6, "one formula in fp32, whose steps are grouped in two ways"),
    "float32/rounding": Elementwise(1e-6, 1e-6, "a few roundings of fp32 in numbers of about 1"),
    "float32/gradients": Elementwise(1e-4, 1e-4, "gradients and logits in fp32 of about 10, whose large terms cancel"),
    "float32/steps": Elementwise(1e-3, 1e-4, "losses in fp32 after a few steps, each of which enlarges a difference"),
    "float32/many_steps": Elementwise(5e-3, 5e-4, "losses in fp32 after tens of steps on a GPU"),
    "16 bits": Elementwise(2e-2, 2e-2, "bf16 or fp16 storage: two to three roundings of 2^-9"),
    "float64": Elementwise(1e-10, 1e-10, "two orders of additions in float64"),
    "float64/programs": Elementwise(1e-9, 1e-9, "float64 through several layers or steps, added in two orders"),
    "float64/messages": Elementwise(1e-9, 1e-11, "messages and their gradients in float64, added in two orders"),
    "float64/rounding": Elementwise(1e-12, 1e-12, "a few roundings of float64 in numbers of about 1"),
}


def elementwise(name: str) -> dict[str, float]:
    """Return a row of the bounds by element as the arguments `rtol` and `atol`."""
    row = ELEMENTWISE[name]
    return {"rtol": row.rtol, "atol": row.atol}


def tolerance(dtype: torch.dtype | str, direction: str = FORWARD, op: str = "attention") -> Tolerance:
    """Return the row of an op, a dtype (or its name, or "tf32") and a direction.

    A schedule's own row is asked for as ``op/schedule``; where it has none, the row of the op holds.

    Raises:
        KeyError: The table has no such row.
    """
    name = str(dtype).removeprefix("torch.")
    row = TOLERANCES.get((op, name, direction))
    return TOLERANCES[op.partition("/")[0], name, direction] if row is None else row


def direction_of(name: str) -> str:
    """Return the direction that a tensor comes from: names of gradients start with "grad"."""
    return BACKWARD if name.startswith("grad") else FORWARD


def relative_error(got: Tensor, want: Tensor) -> float:
    """`||got - want|| / ||want||` in float64; the norm of `got` where `want` is all zero; infinite if not finite."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape:
        raise ValueError(f"the result needs shape {list(want.shape)} (got {list(got.shape)})")
    if not got.isfinite().all():
        return float("inf")
    norm = want.norm().item()
    return (got - want).norm().item() / (norm if norm > 0 else 1.0)


def largest_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """`max |got - want| / max |want|` of each tensor; all gradients are measured by the largest of them.

    The gradient of a score is a difference of two terms of that size. Where a row has one edge it vanishes, and their
    rounding is left over.
    """
    expected = {name: expected[name] for name in actual}
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    gradient = max((size for name, size in largest.items() if direction_of(name) == BACKWARD), default=0.0)
    errors = {}
    for name, want in expected.items():
        if actual[name].shape != want.shape:
            raise ValueError(f"{name!r} needs shape {list(want.shape)} (got {list(actual[name].shape)})")
        difference = (actual[name].double() - want).abs()
        scale = gradient if direction_of(name) == BACKWARD else largest[name]
        errors[name] = float(difference.max()) / (scale or 1.0) if difference.numel() else 0.0
    return errors


class Excess(NamedTuple):
    """The tensor that is furthest beyond what is allowed, its error and what is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether all tensors are within what is allowed."""
        return self.error <= self.allowed


def worst_beside(errors: Mapping[str, float], bound: float, pygs: Mapping[str, float] | None = None) -> Excess:
    """Return the tensor that is furthest beyond the bound or, where that is more, :data:`BESIDE_PYG` times PyG's error.

    Args:
        errors: Error of each tensor.
        bound: Bound of the table.
        pygs: Errors of PyG's own layer in the same dtype by the same measure; None: the bound alone counts.
    """
    own = {name: error for name, error in (pygs or {}).items() if isfinite(error)}
    allowed = {name: max(bound, BESIDE_PYG * own.get(name, 0.0)) for name in errors}
    known = {name: error if error == error else float("inf") for name, error in errors.items()}
    name = max(known, key=lambda name: known[name] / allowed[name])
    return Excess(name, known[name], allowed[name])


def assert_close(
    name: str, got: Tensor, want: Tensor, dtype: torch.dtype | str | None = None, op: str = "attention"
) -> None:
    """Compare a tensor with its reference at the bound of `dtype` (that of `got` if None)."""
    assert_all_close({name: (got, want)}, dtype, op)


def assert_all_close(
    pairs: dict[str, tuple[Tensor, Tensor]], dtype: torch.dtype | str | None = None, op: str = "attention"
) -> None:
    """Compare several named tensors (got, want) at once; the message names the worst and lists all.

    Args:
        pairs: Tensors by name; names that start with "grad" take the bounds of the backward direction.
        dtype: Whose bound holds; that of each tensor if None.
        op: An op of the table, or op/schedule.

    Raises:
        AssertionError: Some tensor is further from its reference than the bound.
    """
    errors = {name: relative_error(got, want) for name, (got, want) in pairs.items()}
    bounds = {
        name: tolerance(got.dtype if dtype is None else dtype, direction_of(name), op).relative
        for name, (got, _) in pairs.items()
    }
    if any(errors[name] > bounds[name] for name in errors):
        worst = max(errors, key=lambda name: errors[name] / bounds[name])
        lines = [f"  {name}: {errors[name]:.2e} (bound {bounds[name]:.0e})" for name in errors]
        raise AssertionError(f"worst is '{worst}', relative error {errors[worst]:.2e}\n" + "\n".join(lines))
