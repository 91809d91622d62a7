"""Models on several processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn import conv as upstream

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.norm import SyncBatchNorm
from pyg_dfgnn.distributed.partition import PartitionedGraph
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.torch_private import BatchNormBase, OptimizedModule

PAIR = (
    *(upstream.GATConv, upstream.GATv2Conv, upstream.TransformerConv, upstream.SAGEConv, upstream.GINConv),
    *(upstream.GINEConv, upstream.GraphConv, upstream.ResGatedGraphConv, upstream.RGCNConv, upstream.FastRGCNConv),
    upstream.FiLMConv,
)
"""Convs that read of a source its features alone, and take a pair of node sets: the halo comes with the sources."""
SINGLE = (upstream.AGNNConv,)
"""Convs that read of a source its features alone, of one set of nodes, whose rows of the halo are dropped again."""
_WHOLE: tuple[type, ...] = (
    *(pyg.GraphNorm, pyg.InstanceNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm, pyg.GraphSizeNorm),
    *(pyg.HeteroBatchNorm, pyg.GPSConv, pyg.TopKPooling, pyg.SAGPooling, pyg.ASAPooling, pyg.DeepGraphInfomax),
    *(aggr.LSTMAggregation, aggr.GRUAggregation, aggr.LCMAggregation, aggr.SortAggregation),
    *(aggr.SetTransformerAggregation, aggr.GraphMultisetTransformer),
)
"""Modules that reduce over all nodes of a graph, or whose results depend on its largest degree."""


def _reads_whole_graph(module: nn.Module) -> bool:
    """Return whether a module needs all nodes or edges of a graph."""
    is_layer = isinstance(module, pyg.LayerNorm) and module.mode == "graph"
    # The default of its largest eigenvalue is that of the largest weight.
    return (
        isinstance(module, _WHOLE) or is_layer or (isinstance(module, pyg.ChebConv) and module.normalization == "sym")
    )


def wrap(model: nn.Module, group: Group, stream: torch.cuda.Stream | None = None) -> nn.Module:
    """Make a model train on several processes: gradients are averaged, batch statistics are those of all nodes.

    The model may be called with a :class:`PartitionedGraph` in place of `edge_index`. Convs that take a pair of node
    sets then fetch the halo of their input first, and run on kernels; the code of all others gets
    :class:`~pyg_dfgnn.graph.ends.PartitionedEdges`, with which it fetches whatever it gathers from sources. Parameter
    names, checkpoints and calls with a tensor `edge_index` do not change. The same parameters must take part in each
    step.

    Args:
        model: Model on the group's device, changed in place.
        group: Processes of the run.
        stream: Stream on which the steps will be captured as CUDA graphs; None: they will not be captured.

    Returns:
        The module to call in training: `model` under DistributedDataParallel, or `model` itself in a group of one and
        where nothing is trained.

    Raises:
        TypeError: The model has another batch norm than BatchNorm1d, or has a module that reduces over all nodes or
            edges and a conv of it is called with a partitioned graph.
    """
    if _opened not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_opened, with_kwargs=True)
    whole = [module for module in model.modules() if _reads_whole_graph(module)]
    for module in model.modules():
        if isinstance(module, MessagePassing) and not hasattr(module, "halo"):
            halo = module.halo = _Halo(module, type(whole[0]).__name__ if whole else "")
            module.register_forward_pre_hook(halo.fetch, with_kwargs=True)
            module.register_forward_hook(halo.drop)
    if group.size == 1:
        return model
    for module in model.modules():
        if type(module) is nn.BatchNorm1d:
            module.__class__ = SyncBatchNorm
        elif isinstance(module, BatchNormBase) and not isinstance(module, SyncBatchNorm):
            raise TypeError(f"'model' needs BatchNorm1d on several processes (got {type(module).__name__})")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [group.device] if group.device.type == "cuda" else None
    # With static_graph, the first step finds unused parameters, such as PyG's `lin_skip` without root weight.
    # Gradients are copied to the buckets on the current stream of this call.
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(group.device))
    with torch.cuda.stream(stream):
        parallel = DistributedDataParallel(model, device_ids=ids, static_graph=True, gradient_as_bucket_view=True)
    if stream is not None:
        torch.cuda.current_stream(group.device).wait_stream(stream)
    # The statistics are equal already; the argument of this attribute changes its name between versions of torch.
    parallel.broadcast_buffers = False
    return parallel


def _opened(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the code of a model the edges of a partitioned graph as a tensor."""
    values = (*args, *kwargs.values())
    if not any(isinstance(each, PartitionedGraph) for each in values):
        return None
    if _group_size(values) > 1 and (torch.compiler.is_compiling() or isinstance(model, OptimizedModule)):
        # Convs that take pairs compile as they are.
        return None

    def edges(value: Any) -> Any:
        return value.edges if isinstance(value, PartitionedGraph) else value

    return tuple(map(edges, args)), {name: edges(value) for name, value in kwargs.items()}


def _part_of(value: Any) -> PartitionedGraph | None:
    """Return the graph whose edges a value is, as they are."""
    if isinstance(value, PartitionedEdges):
        return value.part if value.is_whole else None  # type: ignore[return-value]
    return value if isinstance(value, PartitionedGraph) else None


def _group_size(values: Iterable[Any]) -> int:
    """Return the number of processes that have the graph among some arguments."""
    graphs = [each.part if isinstance(each, PartitionedEdges) else each for each in values]
    return next((each.group.size for each in graphs if isinstance(each, PartitionedGraph)), 1)


class _Halo:
    """Hooks of a conv that is called with a partitioned graph."""

    def __init__(self, conv: MessagePassing, whole: str) -> None:
        kind = type(conv)
        self.whole = whole
        self.signature = inspect.signature(kind.forward)
        # A class of a user's own may read more of a source than its features.
        is_known = kind.__module__.split(".")[0] in ("torch_geometric", "pyg_dfgnn") and conv.flow == "source_to_target"
        self.is_pair, self.is_single = (is_known and isinstance(conv, kinds) for kinds in (PAIR, SINGLE))
        self.targets: int | None = None

    def fetch(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(each, (PartitionedGraph, PartitionedEdges)) for each in (*args, *kwargs.values())):
            return None
        call = self.signature.bind(conv, *args, **kwargs)
        if self.whole and _group_size((*args, *kwargs.values())) > 1:
            raise TypeError(f"'model' needs modules that read no whole graph on a part of one (got {self.whole})")
        graph, x = _part_of(call.arguments.get("edge_index")), call.arguments.get("x")
        if graph is None or not isinstance(x, Tensor) or not (self.is_pair or self.is_single):
            if torch.compiler.is_compiling() and _group_size((*args, *kwargs.values())) > 1:
                raise TypeError(f"'model' needs layers that torch.compile takes a part for (got {type(conv).__name__})")
            return _opened(conv, args, kwargs)
        sources = graph.exchange(x)
        if self.is_single:
            # The halo is a target without in-edges.
            self.targets = graph.num_nodes
        call.arguments["x"] = (sources, x) if self.is_pair else sources
        call.arguments["edge_index"] = graph.edge_index
        return call.args[1:], call.kwargs

    def drop(self, conv: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        targets, self.targets = self.targets, None
        return out if targets is None else out[:targets]
