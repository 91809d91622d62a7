"""Models on several processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn import conv as upstream

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.hetero import exchange_all
from pyg_dfgnn.distributed.norm import SyncBatchNorm
from pyg_dfgnn.distributed.partition import PartitionedGraph
from pyg_dfgnn.errors import check_type
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
JOINT = (upstream.HGTConv,)
"""Convs of all relations of a graph, which read of a source its features alone; rows of the halo are dropped again."""
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

    The model may be called with a :class:`PartitionedGraph` in place of `edge_index`, or with a
    :class:`~pyg_dfgnn.distributed.PartitionedHeteroGraph` in place of `edge_index_dict`. Convs that take a pair of node
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
        TypeError: `model` is no module or `group` no Group; or the model has another batch norm than BatchNorm1d, or a
            module that reduces over all nodes or edges, and a conv of it is called with a partitioned graph.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_type("group", group, Group, "a Group, such as Group.of_environment()")
    if _opened not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_opened, with_kwargs=True)
    whole = [module for module in model.modules() if _reads_whole_graph(module)]
    for module in model.modules():
        if isinstance(module, (MessagePassing, pyg.HeteroConv)) and not hasattr(module, "halo"):
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
    """Give the code of a model the edges of a partitioned graph as tensors."""
    values = _edges_among((*args, *kwargs.values()))
    if not any(isinstance(each, PartitionedGraph) for each in values):
        return None
    if _group_size(values) > 1 and (torch.compiler.is_compiling() or isinstance(model, OptimizedModule)):
        # Convs that take pairs compile as they are.
        return None

    def edges(value: Any) -> Any:
        if _is_parts(value):
            return {edge_type: edges(each) for edge_type, each in value.items()}
        return value.edges if isinstance(value, PartitionedGraph) else value

    return tuple(map(edges, args)), {name: edges(value) for name, value in kwargs.items()}


def _is_parts(value: Any) -> bool:
    """Return whether a value holds partitioned edges by edge type."""
    return isinstance(value, Mapping) and any(
        isinstance(each, (PartitionedGraph, PartitionedEdges)) for each in value.values()
    )


def _edges_among(values: Iterable[Any]) -> list[Any]:
    """Return the partitioned edges among some arguments, and in dicts among them."""
    found: list[Any] = []
    for value in values:
        found += value.values() if _is_parts(value) else [value]
    return [each for each in found if isinstance(each, (PartitionedGraph, PartitionedEdges))]


def _part_of(value: Any) -> PartitionedGraph | None:
    """Return the graph whose edges a value is, as they are."""
    if isinstance(value, PartitionedEdges):
        return value.part if value.is_whole else None  # type: ignore[return-value]
    return value if isinstance(value, PartitionedGraph) else None


def _group_size(values: Iterable[Any]) -> int:
    """Return the number of processes that have the graph among some arguments."""
    graphs = [each.part if isinstance(each, PartitionedEdges) else each for each in _edges_among(values)]
    return next((each.group.size for each in graphs if isinstance(each, PartitionedGraph)), 1)


def _is_known(conv: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Return whether a conv is one of these layers; a class of a user's own may read more of a source."""
    is_own = type(conv).__module__.split(".")[0] in ("torch_geometric", "pyg_dfgnn")
    return is_own and isinstance(conv, kinds) and getattr(conv, "flow", "source_to_target") == "source_to_target"


class _Halo:
    """Hooks of a conv that is called with a partitioned graph."""

    def __init__(self, conv: nn.Module, whole: str) -> None:
        self.whole = whole
        self.signature = inspect.signature(type(conv).forward)
        self.is_pair, self.is_single = _is_known(conv, PAIR), _is_known(conv, SINGLE)
        # Convs of its own whose inner ones read other things are called one by one.
        inner = [each for each in conv.modules() if each is not conv and isinstance(each, MessagePassing)]
        reads_features = isinstance(conv, pyg.HeteroConv) and all(_is_known(each, PAIR + SINGLE) for each in inner)
        self.is_joint = _is_known(conv, JOINT) or reads_features
        self.targets: int | dict[str, int] | None = None

    def fetch(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = (*args, *kwargs.values())
        if not _edges_among(values):
            return None
        if self.whole and _group_size(values) > 1:
            raise TypeError(f"'model' needs modules that read no whole graph on a part of one (got {self.whole})")
        call = self.signature.bind(conv, *args, **kwargs)
        if self.is_joint and len(call.args) == 3 and not call.kwargs and _is_parts(call.args[2]):
            _, x_dict, edges = call.args
            parts = {edge_type: _part_of(each) for edge_type, each in edges.items()}
            if all(isinstance(x, Tensor) for x in x_dict.values()) and None not in parts.values():
                self.targets = {name: x.size(0) for name, x in x_dict.items()}
                edges = {edge_type: part.edge_index for edge_type, part in parts.items() if part is not None}
                return (exchange_all(parts, x_dict), edges), {}
        graph, x = _part_of(call.arguments.get("edge_index")), call.arguments.get("x")
        is_pair = self.is_pair and isinstance(x, tuple) and all(isinstance(each, Tensor) for each in x)
        if graph is None or not (is_pair or isinstance(x, Tensor)) or not (self.is_pair or self.is_single):
            if torch.compiler.is_compiling() and _group_size(values) > 1:
                raise TypeError(f"'model' needs layers that torch.compile takes a part for (got {type(conv).__name__})")
            return _opened(conv, args, kwargs)
        first, second = x if isinstance(x, tuple) else (x, x)
        sources = graph.exchange(first)  # type: ignore[arg-type]
        if self.is_single:
            # The halo is a target without in-edges.
            self.targets = graph.num_nodes
        call.arguments["x"] = (sources, second) if self.is_pair else sources
        call.arguments["edge_index"] = graph.edge_index
        return call.args[1:], call.kwargs

    def drop(self, conv: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        targets, self.targets = self.targets, None
        if isinstance(targets, dict):
            return {name: rows if rows is None else rows[: targets[name]] for name, rows in out.items()}
        return out if targets is None else out[:targets]
