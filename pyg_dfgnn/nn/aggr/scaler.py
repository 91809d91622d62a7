"""Drop-in for PyG's DegreeScalerAggregation: all statistics in one gather, scaled by degrees that the graph keeps."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from pyg_dfgnn.nn import segment
from pyg_dfgnn.nn.aggr.base import FusedAggregation
from pyg_dfgnn.nn.on_cpu import is_pygs
from pyg_dfgnn.ops.core import GraphLike
from pyg_dfgnn.ops.segment import of_degrees

_OF_DEGREES = {
    "identity": torch.ones_like,
    "amplification": lambda degrees: torch.log(degrees + 1),
    # A group without elements divides by the factor of one element.
    "attenuation": lambda degrees: torch.log(degrees.clamp(min=1) + 1).reciprocal(),
    "linear": lambda degrees: degrees,
    "inverse_linear": lambda degrees: degrees.clamp(min=1).reciprocal(),
}
"""Scaler -> its part that degrees decide; the other one is of the average."""


def factors_of(scaler: aggr.DegreeScalerAggregation, graph: GraphLike) -> Tensor:
    """Return what each scaler multiplies the statistics of a group by, [G, S]; the graph keeps what is of degrees.

    Args:
        scaler: The aggregation, whose scalers and average degrees are read.
        graph: The groups, as its targets.

    Raises:
        ValueError: A scaler has an unknown name.
    """
    names = tuple(scaler.scaler)
    for name in names:
        if name not in _OF_DEGREES:
            raise ValueError(f"Unknown scaler '{name}'")

    def of_degrees_alone(degrees: Tensor) -> Tensor:
        return torch.stack([_OF_DEGREES[name](degrees) for name in names], dim=1)

    linear, log = scaler.avg_deg_lin.view(()), scaler.avg_deg_log.view(())
    averages = {
        "identity": lambda: torch.ones_like(log),
        "amplification": log.reciprocal,
        "attenuation": lambda: log,
        "linear": linear.reciprocal,
        "inverse_linear": lambda: linear,
    }
    return of_degrees(graph, f"scalers {names}", "targets", of_degrees_alone) * torch.stack(
        [averages[name]() for name in names]
    )


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
        if is_pygs(x):
            return super().forward(x, index, ptr, dim_size, dim)
        self.assert_index_present(index)
        if not self._takes(x, index, ptr, dim_size, dim, ()):
            return super().forward(x, index, ptr, dim_size, dim)
        out = self.aggr(x, index, ptr, dim_size, dim)
        size = [1] * out.dim()
        size[dim] = -1
        factors = factors_of(self, segment.graph_of(index, ptr, dim_size)).to(out.dtype)
        return torch.cat([out * factor.view(size) for factor in factors.unbind(1)], dim=-1)
