"""Drop-ins for layers of `torch_geometric.nn`: same names, arguments, parameters, results."""

from typing import TYPE_CHECKING, Any

import torch_geometric.nn as _pyg
from torch_geometric.nn import Linear

from pyg_dfgnn.nn.accelerate import accelerate, describe_plan, report, restore
from pyg_dfgnn.nn.aggr import (
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MedianAggregation,
    MinAggregation,
    MulAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    QuantileAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from pyg_dfgnn.nn.calls import stats
from pyg_dfgnn.nn.conv import (
    APPNP,
    AGNNConv,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    FastRGCNConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    HANConv,
    HEATConv,
    HeteroConv,
    HGTConv,
    LGConv,
    PNAConv,
    ResGatedGraphConv,
    RGATConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    SuperGATConv,
    TAGConv,
    TransformerConv,
)
from pyg_dfgnn.nn.dense import HeteroDictLinear, HeteroLinear
from pyg_dfgnn.nn.pool import global_add_pool, global_max_pool, global_mean_pool
from pyg_dfgnn.nn.registry import DROP_INS

__all__ = [
    "DROP_INS",
    "AGNNConv",
    "APPNP",
    "ARMAConv",
    "ChebConv",
    "ClusterGCNConv",
    "DegreeScalerAggregation",
    "FastRGCNConv",
    "FiLMConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "GraphConv",
    "HANConv",
    "HEATConv",
    "HGTConv",
    "HeteroConv",
    "HeteroDictLinear",
    "HeteroLinear",
    "LGConv",
    "Linear",
    "MaxAggregation",
    "MeanAggregation",
    "MedianAggregation",
    "MinAggregation",
    "MulAggregation",
    "MultiAggregation",
    "PNAConv",
    "PowerMeanAggregation",
    "QuantileAggregation",
    "RGATConv",
    "RGCNConv",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "SSGConv",
    "SoftmaxAggregation",
    "StdAggregation",
    "SumAggregation",
    "SuperGATConv",
    "TAGConv",
    "TransformerConv",
    "VarAggregation",
    "accelerate",
    "describe_plan",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "report",
    "restore",
    "stats",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say of a name that only PyG has where it is.

        Raises:
            AttributeError: This package has no such name.
        """
        text = f"module {__name__!r} has no attribute {name!r}"
        if not name.startswith("_") and hasattr(_pyg, name):
            text += f"; torch_geometric.nn.{name} has no drop-in"
            if isinstance(getattr(_pyg, name), type) and issubclass(getattr(_pyg, name), _pyg.MessagePassing):
                text += ", and pyg_dfgnn.accelerate(model) compiles it"
        raise AttributeError(text, name=name)
