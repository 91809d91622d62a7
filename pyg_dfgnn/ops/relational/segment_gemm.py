r"""Products of rows that are sorted by type with the weights of their types.

.. math::
    Y_{s(i) h} = X_{g(i) h} W_{t(i) h} + b_{t(i) h}, \quad
    \partial X_{ih} = \partial Y_{ih} W_{t(i) h}^T, \quad
    \partial W_{th} = \sum_{i : t(i) = t} X_{g(i) h}^T \partial Y_{k(i) h}

A product is prepared on its rows and sizes, and then called with tensors. A linear map is one launch whatever the
number of types; a sum over rows is one, and another one where a type has so many rows that several thread blocks sum
them. No call waits for the device. Whoever calls on another stream than before asks the graph first
(:meth:`~pyg_dfgnn.graph.derived.Derived.on_this_stream`).

Sums are in float32 and in a fixed order. In float32 each factor is the sum of two TF32 numbers, with about the error of
float32; where torch may round factors to TF32, the kernels do. Factors that are infinite, or 3.402e38 and more, give
NaN. Without a kernel, plain torch computes the same (:mod:`pyg_dfgnn.reference.segment_gemm`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.segment_gemm import (
    SegmentGemmPlan,
    SegmentGemmProblem,
    plan_of,
    specs_of,
    unsupported_reasons,
)
from pyg_dfgnn.errors import check_device, check_dtype, check_shape
from pyg_dfgnn.graph.typed_rows import RowItems, TypedRows, row_items
from pyg_dfgnn.reference import segment_gemm as reference
from pyg_dfgnn.runtime.launcher import Kernel, addresses, kernel_of, launch

_SUM_LANES, _SUM_THREADS = 32, 256


class _Prepared(NamedTuple):
    """Plan and kernels of a product in one precision."""

    plan: SegmentGemmPlan
    kernel: Kernel
    kernel_of_sums: Kernel | None
    heads: int


class _Product:
    """Common base of the products: sizes, lists of rows, and the launches of each precision.

    The graph may keep a product, so a product does not keep the graph.
    """

    def __init__(
        self,
        product: str,
        rows: TypedRows,
        features: int,
        channels: int,
        heads: int,
        dtype: torch.dtype,
        fold: str,
        is_exact: bool = False,
    ) -> None:
        check_dtype("type_ptr", rows.type_ptr, torch.int32)
        self.features, self.channels, self.heads = features, channels, heads
        self.type_ptr, self.num_rows, self.num_types = rows.type_ptr, rows.num_rows, rows.num_types
        self.device, self.dtype, self.is_exact = rows.type_ptr.device, dtype, is_exact
        self._sizes = product, features, channels, heads, fold if heads > 1 else "none", dtype, self.device
        self._prepared: dict[bool, _Prepared] = {}
        self.reasons = unsupported_reasons(self.problem)
        """Why no kernel runs the product; empty when one does."""
        if not self.reasons:
            # The same in each precision.
            length = self.prepared().plan.length
            self.items: RowItems = row_items(rows, length, every_type=product == "outer")

    @property
    def problem(self) -> SegmentGemmProblem:
        """The problem under torch's present settings."""
        return SegmentGemmProblem(*self._sizes, tf32_allowed(self.dtype), self.is_exact)

    def prepared(self) -> _Prepared:
        """Return the launches under torch's present settings, made on first use."""
        key = tf32_allowed(self.dtype)
        known = self._prepared.get(key)
        if known is None:
            known = self._prepared[key] = self._prepare(self.problem)
        return known

    def _prepare(self, problem: SegmentGemmProblem) -> _Prepared:
        plan = plan_of(problem, self.num_rows, self.num_types)
        (spec,) = specs_of(problem, plan)
        if problem.product == "outer":
            kernels = kernel_of(spec, "segment_outer"), kernel_of(spec, "segment_outer_sum")
            return _Prepared(plan, *kernels, problem.launch_heads)
        return _Prepared(plan, kernel_of(spec, "segment_gemm"), None, problem.launch_heads)

    def _launch(self, prepared: _Prepared, heads: tuple[int, ...], tensors: tuple[Tensor | None, ...]) -> None:
        plan, kernel, _, launch_heads = prepared
        grid = (self.items.items.shape[0] * plan.groups, 1, 1)
        arguments = (launch_heads, *heads, *addresses((self.items.items, *tensors)))
        launch(kernel, grid, plan.block, arguments, self.device, plan.shared_bytes)

    def _list(self, name: str, rows: Tensor | None) -> Tensor | None:
        """Check a list of rows: one number for each."""
        if rows is None:
            return None
        check_dtype(name, rows, torch.int32)
        check_device(name, rows, self.device)
        check_shape(name, rows, [self.num_rows], f"[rows={self.num_rows}]")
        return rows.contiguous()

    def _rows(self, name: str, tensor: Tensor, listed: Tensor | None, heads: int, width: int) -> Tensor:
        """Check rows [M, heads, width]; M is the number of typed rows if none are listed."""
        size: int | str = "M" if listed is not None else self.num_rows
        spec = f"[{'M' if listed is not None else f'rows={size}'}, heads={heads}, {width}]"
        check_shape(name, tensor, [size, heads, width], spec)
        return self._checked(name, tensor)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in memory as kernels read it: whole vectors of 16 bytes."""
        check_dtype(name, tensor, self.dtype)
        check_device(name, tensor, self.device)
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class SegmentLinear(_Product):
    """Linear maps of rows by the weight of their type, `Y[s(i), h] = X[g(i), h] W[t(i), h] + b[t(i), h]`.

    Args:
        rows: Rows I sorted by type.
        features: Features K of a weight.
        channels: Channels N of a weight.
        dtype: Dtype of rows and weights.
        heads: Heads H of a weight.
        transposed: Whether the map is by :math:`W^T`, from N to K numbers.
        shared: Whether all heads read the same row, of one head.
        gather: Row of `x` of each row, int32 [I] within the rows of `x`; None for rows as they are.
        scatter: Row of the result of each row, int32 [I], each number once; None for rows as they are.
        is_exact: Whether results are float32 whatever the dtype.

    Attributes:
        result: Dtype of the results.

    Raises:
        TypeError: `type_ptr` or a list has another dtype than int32.
        ValueError: A list has another length.
    """

    def __init__(
        self,
        rows: TypedRows,
        features: int,
        channels: int,
        dtype: torch.dtype,
        *,
        heads: int = 1,
        transposed: bool = False,
        shared: bool = False,
        gather: Tensor | None = None,
        scatter: Tensor | None = None,
        is_exact: bool = False,
    ) -> None:
        product = "transposed" if transposed else "linear"
        super().__init__(product, rows, features, channels, heads, dtype, "columns" if shared else "none", is_exact)
        self.result = torch.float32 if is_exact else dtype
        self.transposed = transposed
        self.places, self.columns = (channels, features) if transposed else (features, channels)
        self.row_heads = 1 if shared else heads
        self.gather, self.scatter = self._list("gather", gather), self._list("scatter", scatter)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the results.

        Args:
            x: Shape [M, H, K], with `shared` [M, 1, K]; with `transposed` N numbers instead of K.
            weight: Shape [T, H, K, N], or [T, 1, K, N] for all heads.
            bias: Shape [T, H, N]; with `transposed` K.

        Returns:
            Shape [I, H, N]; with `transposed` K.

        Raises:
            TypeError: A tensor has another dtype.
            ValueError: A tensor has another shape, or lives on another device.
        """
        types, heads, columns = self.num_types, self.heads, self.columns
        x = self._rows("x", x, self.gather, self.row_heads, self.places)
        weight_heads = 1 if weight.dim() == 4 and weight.shape[1] == 1 else self.heads
        spec = f"[types={types}, heads={self.heads} or 1, {self.features}, {self.channels}]"
        check_shape("weight", weight, [types, weight_heads, self.features, self.channels], spec)
        weight = self._checked("weight", weight)
        if bias is not None:
            check_shape("bias", bias, [types, heads, columns], f"[types={types}, heads={heads}, {columns}]")
            bias = self._checked("bias", bias)
        out = x.new_empty((self.num_rows, heads, columns), dtype=self.result)
        self.run(weight_heads, x, weight, bias, out)
        return out

    def run(self, weight_heads: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write the results of tensors with the numbers of those that :meth:`__call__` takes, contiguous from 16 bytes
        on, of any shape.

        Args:
            weight_heads: Heads of the weight: 1 for all heads.
            x: The rows.
            weight: The weights.
            bias: The bias, None without.
            out: What is written.
        """
        if not self.reasons:
            self._launch(self.prepared(), (weight_heads,), (self.gather, self.scatter, x, weight, bias, out))
            return
        heads, columns = self.heads, self.columns
        x = x.view(-1, self.row_heads, self.places).to(self.result)
        weight = weight.view(-1, weight_heads, self.features, self.channels).to(self.result)
        bias = None if bias is None else bias.view(-1, heads, columns).to(self.result)
        y = reference.segment_linear(x, weight, heads, self.type_ptr, self.gather, bias, self.transposed)
        if self.scatter is None:
            out.view(-1, heads, columns).copy_(y)
        else:
            out.view(-1, heads, columns).index_copy_(0, self.scatter.long(), y)


class SegmentOuter(_Product):
    """Gradients of the weights of types, `dW[t, h] = sum over the rows i of type t of X[g(i), h]^T G[k(i), h]`.

    Args:
        rows: Rows I sorted by type; :func:`~pyg_dfgnn.graph.typed_rows.one_type` for a weight that all rows share.
        features: Features K.
        channels: Channels N.
        dtype: Dtype of rows and results.
        heads: Heads H of the result.
        x_shared: Whether all heads read the same row of `x`, of one head.
        grad_shared: Whether all heads read the same row of `grad`, of one head.
        gather_x: Row of `x` of each row, int32 [I] within the rows of `x`; None for rows as they are.
        gather_grad: Row of `grad` of each row, int32 [I]; None for rows as they are.

    Raises:
        TypeError: `type_ptr` or a list has another dtype than int32.
        ValueError: A list has another length, or the heads share both rows.
    """

    def __init__(
        self,
        rows: TypedRows,
        features: int,
        channels: int,
        dtype: torch.dtype,
        *,
        heads: int = 1,
        x_shared: bool = False,
        grad_shared: bool = False,
        gather_x: Tensor | None = None,
        gather_grad: Tensor | None = None,
    ) -> None:
        if x_shared and grad_shared and heads > 1:
            raise ValueError("'grad_shared' needs False where heads share x: all of them have one result (got True)")
        fold = "columns" if x_shared else "rows" if grad_shared else "none"
        super().__init__("outer", rows, features, channels, heads, dtype, fold)
        self.x_heads, self.grad_heads = 1 if x_shared else heads, 1 if grad_shared else heads
        self.gather_x, self.gather_grad = self._list("gather_x", gather_x), self._list("gather_grad", gather_grad)

    def __call__(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the sums.

        Args:
            x: Shape [M, H, K], with `x_shared` [M, 1, K].
            grad: Shape [L, H, N], with `grad_shared` [L, 1, N].

        Returns:
            Shape [T, H, K, N]; exact zeros for a type without rows.

        Raises:
            TypeError: A tensor has another dtype.
            ValueError: A tensor has another shape, or lives on another device.
        """
        x = self._rows("x", x, self.gather_x, self.x_heads, self.features)
        grad = self._rows("grad", grad, self.gather_grad, self.grad_heads, self.channels)
        out = x.new_empty((self.num_types, self.heads, self.features, self.channels))
        self.run(x, grad, out)
        return out

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        """Write the sums of tensors with the numbers of those that :meth:`__call__` takes, contiguous from 16 bytes on,
        of any shape.
        """
        if self.reasons:
            lists = self.type_ptr, self.gather_x, self.gather_grad
            x, grad = x.view(-1, self.x_heads, self.features), grad.view(-1, self.grad_heads, self.channels)
            out.copy_(reference.segment_outer(x, grad, self.heads, *lists).view_as(out))
            return
        prepared, items, partial = self.prepared(), self.items, None
        size = self.heads * self.features * self.channels
        if items.num_places:
            partial = x.new_empty((items.num_places, size), dtype=torch.float32)
        self._launch(prepared, (), (self.gather_x, self.gather_grad, x, grad, out, partial))
        if partial is not None:
            assert prepared.kernel_of_sums is not None
            blocks = items.split_types.numel() * -(-size // _SUM_LANES)
            arguments = size, *addresses((items.split_types, items.split_ptr, partial, out))
            launch(prepared.kernel_of_sums, (blocks, 1, 1), (_SUM_THREADS, 1, 1), arguments, self.device)
