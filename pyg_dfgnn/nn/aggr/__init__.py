"""Drop-ins for `torch_geometric.nn.aggr`."""

from torch_geometric.nn import aggr as upstream

from pyg_dfgnn.nn.aggr.basic import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MulAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from pyg_dfgnn.nn.aggr.multi import MultiAggregation
from pyg_dfgnn.nn.aggr.quantile import MedianAggregation, QuantileAggregation
from pyg_dfgnn.nn.aggr.scaler import DegreeScalerAggregation
from pyg_dfgnn.nn.registry import DROP_INS

__all__ = [
    "DegreeScalerAggregation",
    "MaxAggregation",
    "MeanAggregation",
    "MedianAggregation",
    "MinAggregation",
    "MulAggregation",
    "MultiAggregation",
    "PowerMeanAggregation",
    "QuantileAggregation",
    "SoftmaxAggregation",
    "StdAggregation",
    "SumAggregation",
    "VarAggregation",
]
DROP_INS.update({getattr(upstream, name): globals()[name] for name in __all__})
