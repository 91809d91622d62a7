"""Drop-ins for PyG's quantiles, which sort their values: PyG's code runs, and reports that."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import aggr

from pyg_dfgnn.fallback import report_fallback
from pyg_dfgnn.nn.aggr.base import FusedAggregation


class QuantileAggregation(FusedAggregation, aggr.QuantileAggregation):
    """PyG's `QuantileAggregation`."""

    _stats = ("quantile",)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.aggr.QuantileAggregation.forward`."""
        report_fallback(type(self).__name__, self._standing_reasons())
        return super().forward(*args, **kwargs)


class MedianAggregation(QuantileAggregation, aggr.MedianAggregation):
    """PyG's `MedianAggregation`."""
