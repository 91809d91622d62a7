"""The linear map of typed rows, with gradients."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.graph.typed_rows import TypedRows
from pyg_dfgnn.ops.eager import aligned, differentiable
from pyg_dfgnn.ops.relational.segment_gemm import SegmentLinear, SegmentOuter


class _TypedLinear(Function):
    """(rows, transposed, x, weight) to the products."""

    @staticmethod
    def forward(ctx: Any, rows: TypedRows, transposed: bool, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rows, ctx.transposed = rows, transposed
        ctx.save_for_backward(x, weight)
        out: Tensor = _kept(SegmentLinear, rows, weight, transposed=transposed)(x, weight)
        return out

    @staticmethod
    @differentiable()
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, transposed = ctx.rows, ctx.transposed
        x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight = ctx.needs_input_grad
        left, right = (grad, x) if transposed else (x, grad)
        grad_x = typed_linear(rows, grad, weight, transposed=not transposed) if needs_x else None
        return None, None, grad_x, _TypedOuter.apply(rows, left, aligned(right), weight) if needs_weight else None


class _TypedOuter(Function):
    """(rows, left, right, a weight) to the outer products of rows, summed by type, in the shape of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: TypedRows, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(left, right)
        out: Tensor = _kept(SegmentOuter, rows, like)(left, right)
        return out

    @staticmethod
    @differentiable()
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        left, right = ctx.saved_tensors
        return None, typed_linear(ctx.rows, right, grad, transposed=True), typed_linear(ctx.rows, left, grad), None


def typed_linear(rows: TypedRows, x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the product of each row with the weight of its type, `x W`, or `x W^T` with `transposed`.

    Args:
        rows: The rows, sorted by type.
        x: Shape [rows, H, K]; with `transposed` [rows, H, N].
        weight: Shape [T, H, K, N].
        transposed: Whether weights are transposed.

    Returns:
        Shape [rows, H, N]; with `transposed` [rows, H, K].

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor has another shape, or lives on another device.
    """
    out: Tensor = _TypedLinear.apply(rows, transposed, aligned(x), aligned(weight))  # type: ignore[no-untyped-call]
    return out


def _kept(kind: Any, rows: TypedRows, weight: Tensor, **options: Any) -> Any:
    """Return a product for weights like these, which what holds the rows keeps."""
    _, heads, *sizes = weight.shape
    key = "product", kind, rows.name, heads, *sizes, weight.dtype, *options.items()
    return rows.holder.derived(key, lambda: kind(rows, *sizes, weight.dtype, heads=heads, **options))
