"""Models on several processes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as upstream

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.norm import SyncBatchNorm
from pyg_dfgnn.distributed.partition import PartitionedGraph

# These convs take a pair of node sets or a single set. Others may read more of a source than its features, such as its
# degree in the whole graph.
PAIR = (upstream.GATConv, upstream.GATv2Conv, upstream.TransformerConv)
SINGLE = (upstream.AGNNConv,)


def wrap(model: nn.Module, group: Group, stream: torch.cuda.Stream | None = None) -> nn.Module:
    """Make a model train on several processes: gradients are averaged, batch statistics are those of all nodes.

    The model may be called with a :class:`PartitionedGraph` in place of `edge_index`; each conv then fetches the halo
    of its input first. Parameter names, checkpoints and calls with a tensor `edge_index` do not change. The same
    parameters must take part in each step.

    Args:
        model: Model on the group's device, changed in place.
        group: Processes of the run.
        stream: Stream on which the steps will be captured as CUDA graphs; None: they will not be captured.

    Returns:
        The module to call in training: `model` under DistributedDataParallel, or `model` itself in a group of one.

    Raises:
        TypeError: The model has another batch norm than BatchNorm1d, or a conv that cannot take a partitioned graph is
            called with one.
    """
    for module in model.modules():
        if isinstance(module, MessagePassing) and not hasattr(module, "halo"):
            halo = module.halo = _Halo(inspect.signature(type(module).forward))
            module.register_forward_pre_hook(halo.fetch, with_kwargs=True)
            module.register_forward_hook(halo.drop)
    if group.size == 1:
        return model
    for module in model.modules():
        if type(module) is nn.BatchNorm1d:
            module.__class__ = SyncBatchNorm
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
            raise TypeError(f"'model' needs BatchNorm1d on several processes (got {type(module).__name__})")
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


class _Halo:
    """Hooks of a conv that is called with a partitioned graph."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self.targets: int | None = None

    def fetch(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(argument, PartitionedGraph) for argument in (*args, *kwargs.values())):
            return None
        if not isinstance(conv, (*PAIR, *SINGLE)):
            known = ", ".join(kind.__name__ for kind in (*PAIR, *SINGLE))
            raise TypeError(f"'model' needs convs among {known} on a partitioned graph (got {type(conv).__name__})")
        call = self.signature.bind(conv, *args, **kwargs)
        x, graph = call.arguments["x"], call.arguments["edge_index"]
        sources = graph.exchange(x)
        if isinstance(conv, SINGLE):
            # The halo is a target without in-edges, whose rows of the result are dropped.
            self.targets = graph.num_nodes
        call.arguments["x"] = sources if isinstance(conv, SINGLE) else (sources, x)
        call.arguments["edge_index"] = graph.edge_index
        return call.args[1:], call.kwargs

    def drop(self, conv: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        targets, self.targets = self.targets, None
        return out if targets is None else out[:targets]
