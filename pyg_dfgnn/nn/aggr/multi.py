"""Drop-in for PyG's MultiAggregation: all statistics in one gather."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from pyg_dfgnn.fallback import report_fallback
from pyg_dfgnn.nn import segment
from pyg_dfgnn.nn.aggr.base import FusedAggregation
from pyg_dfgnn.nn.gate import is_multiple, repetition_reasons, statistics_of
from pyg_dfgnn.nn.on_cpu import is_pygs


def statistic_of(module: nn.Module) -> str | None:
    """Return the statistic that an aggregation of PyG's or ours is; None for several, and for any other module."""
    statistics = () if is_multiple(module) else statistics_of(module)
    return statistics[0] if statistics else None


class MultiAggregation(FusedAggregation, aggr.MultiAggregation):
    """PyG's `MultiAggregation` with all its sums, means, maxima, minima, variances and deviations in one gather."""

    @property
    def _stats(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(stat for stat in map(statistic_of, self.aggrs) if stat is not None)

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
        return [*repetition_reasons(self), *super()._standing_reasons(like)]

    def _inner(self) -> Iterable[nn.Module]:
        return self.aggrs

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.aggr.MultiAggregation.forward`."""
        if is_pygs(x):
            return super().forward(x, index, ptr, dim_size, dim)
        repetitions = repetition_reasons(self)
        if repetitions:
            report_fallback(type(self).__name__, repetitions)
            return super().forward(x, index, ptr, dim_size, dim)
        stats = () if torch.compiler.is_compiling() else self._stats
        if not self._takes(x, index, ptr, dim_size, dim, stats) or not stats:
            return super().forward(x, index, ptr, dim_size, dim)
        fused = iter(segment.reduce(x, index, ptr, dim_size, dim, stats))
        return self.combine(
            [next(fused) if statistic_of(module) else module(x, index, ptr, dim_size, dim) for module in self.aggrs]
        )
