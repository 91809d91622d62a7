"""Drop-in for PyG's DegreeScalerAggregation: all statistics in one gather, scaled by degrees that the graph keeps."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from pyg_dfgnn.nn import segment
from pyg_dfgnn.nn.aggr.base import FusedAggregation
from pyg_dfgnn.ops.segment import degree
from pyg_dfgnn.ops.visits import is_left


def factors_of(scaler: aggr.DegreeScalerAggregation, degrees: Tensor) -> list[Tensor]:
    """Return what each scaler multiplies the statistics of a group by.

    Args:
        scaler: The aggregation, whose scalers and average degrees are read.
        degrees: Number of elements of each group, float32 [G].

    Returns:
        Shape [G] per scaler.

    Raises:
        ValueError: A scaler has an unknown name.
    """
    linear, log = scaler.avg_deg_lin, scaler.avg_deg_log
    # A group without elements divides by the factor of one element.
    filled = degrees.clamp(min=1)
    factors = {
        "identity": lambda: torch.ones_like(degrees),
        "amplification": lambda: torch.log(degrees + 1) / log,
        "attenuation": lambda: log / torch.log(filled + 1),
        "linear": lambda: degrees / linear,
        "inverse_linear": lambda: linear / filled,
    }
    for name in scaler.scaler:
        if name not in factors:
            raise ValueError(f"Unknown scaler '{name}'")
    return [factors[name]() for name in scaler.scaler]


class DegreeScalerAggregation(FusedAggregation, aggr.DegreeScalerAggregation):
    """PyG's `DegreeScalerAggregation` with all its statistics in one gather."""

    @property
    def _stats(self) -> tuple[str, ...]:  # type: ignore[override]
        return getattr(self.aggr, "_stats", ())

    def _inner(self) -> Iterable[nn.Module]:
        return (self.aggr,)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """PyG's forward; see `torch_geometric.nn.aggr.DegreeScalerAggregation.forward`."""
        if is_left():
            return super().forward(x, index, ptr, dim_size, dim)
        self.assert_index_present(index)
        if not self._takes(x, index, ptr, dim_size, dim, ()):
            return super().forward(x, index, ptr, dim_size, dim)
        out = self.aggr(x, index, ptr, dim_size, dim)
        size = [1] * out.dim()
        size[dim] = -1
        factors = factors_of(self, degree(segment.graph_of(index, ptr, dim_size)))
        return torch.cat([out * factor.to(out.dtype).view(size) for factor in factors], dim=-1)
