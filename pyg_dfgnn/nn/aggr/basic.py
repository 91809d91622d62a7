"""Drop-ins for PyG's basic aggregations. Sum, mean, max, min, product and power mean are PyG's on a fused `reduce`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_dfgnn.nn import segment
from pyg_dfgnn.nn.aggr.base import FusedAggregation
from pyg_dfgnn.nn.on_cpu import is_pygs


class SumAggregation(FusedAggregation, aggr.SumAggregation):
    """PyG's `SumAggregation`: `sum_j x_j`."""


class MeanAggregation(FusedAggregation, aggr.MeanAggregation):
    """PyG's `MeanAggregation`: `sum_j x_j / n`, 0 for an empty group."""

    _stats = ("mean",)


class MaxAggregation(FusedAggregation, aggr.MaxAggregation):
    """PyG's `MaxAggregation`: `max_j x_j`, 0 for an empty group."""

    _stats = ("max",)


class MinAggregation(FusedAggregation, aggr.MinAggregation):
    """PyG's `MinAggregation`: `min_j x_j`, 0 for an empty group."""

    _stats = ("min",)


class MulAggregation(FusedAggregation, aggr.MulAggregation):
    """PyG's `MulAggregation`: `prod_j x_j`, 1 for an empty group."""

    _stats = ("mul",)


class _Deviation(FusedAggregation):
    """The variance or its root; two gathers with `semi_grad`."""

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """PyG's forward; see that of the class of this name in `torch_geometric.nn.aggr`."""
        variance: Any = getattr(self, "var_aggr", self)
        if is_pygs(x) or variance.semi_grad or not self._takes(x, index, ptr, dim_size, dim, self._stats):
            return super().forward(x, index, ptr, dim_size, dim)
        return segment.reduce(x, index, ptr, dim_size, dim, self._stats)[0]


class VarAggregation(_Deviation, aggr.VarAggregation):
    """PyG's `VarAggregation` in one gather: `mean_j (x_j - mean_j x_j)^2`; two gathers with `semi_grad`."""

    _stats = ("var",)


class StdAggregation(_Deviation, aggr.StdAggregation):
    """PyG's `StdAggregation` in one gather: `sqrt(max(var, 1e-5))`, or 0 where the variance is at most 1e-5."""

    _stats = ("std",)


class SoftmaxAggregation(FusedAggregation, aggr.SoftmaxAggregation):
    """PyG's `SoftmaxAggregation` in three gathers: `sum_j softmax_j(t x_j) x_j`."""

    _is_whole = False

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.aggr.SoftmaxAggregation.forward`."""
        if is_pygs(x) or not self._takes(x, index, ptr, dim_size, dim, ("sum",)):
            return super().forward(x, index, ptr, dim_size, dim)
        t: Any = self.t
        if self.channels != 1:
            self.assert_two_dimensional_input(x, dim)
            t = t.view(-1, self.channels)
        alpha = x if isinstance(t, (int, float)) and t == 1 else x * t
        with torch.no_grad() if self.semi_grad else nullcontext():
            alpha = segment.softmax(alpha, index, ptr, dim_size, dim)
        return self.reduce(x * alpha, index, ptr, dim_size, dim, "sum")


class PowerMeanAggregation(FusedAggregation, aggr.PowerMeanAggregation):
    """PyG's `PowerMeanAggregation`: `(mean_j x_j^p)^(1/p)` of clamped values."""

    _stats = ("mean",)
