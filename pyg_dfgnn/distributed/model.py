"""Models on several processes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as upstream

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.distributed.partition import PartitionedGraph
from pyg_dfgnn.errors import check_shape

# Convs on a pair of node sets, and one that takes a single set. Others may read more of a source than its features,
# such as its degree in the whole graph.
PAIR = (upstream.GATConv, upstream.GATv2Conv, upstream.TransformerConv)
SINGLE = (upstream.AGNNConv,)


def wrap(model: nn.Module, group: Group) -> nn.Module:
    """Make a model train on several processes: gradients are averaged, batch statistics are those of all nodes.

    The model may be called with a :class:`PartitionedGraph` in place of `edge_index`; each conv then fetches the halo
    of its input first. Parameter names, checkpoints and calls with a tensor `edge_index` stay as they are. The same
    parameters have to take part in each step.

    Args:
        model: On the group's device; changed in place.
        group: The processes.

    Returns:
        The module to call in training: `model` under DistributedDataParallel, or `model` itself in a group of one.

    Raises:
        TypeError: In a call with a partitioned graph, a conv is not among those that can take one.
    """
    for module in model.modules():
        if isinstance(module, MessagePassing) and not hasattr(module, "halo"):
            halo = module.halo = _Halo()
            module.register_forward_pre_hook(halo.fetch, with_kwargs=True)
            module.register_forward_hook(halo.drop)
    if group.size == 1:
        return model
    if group.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    else:
        for module in model.modules():
            if type(module) is nn.BatchNorm1d:
                module.__class__ = _SyncBatchNorm
    ids = [group.device] if group.device.type == "cuda" else None
    # Static: the first step finds the parameters that take no part, such as PyG's `lin_skip` without a root weight.
    parallel = DistributedDataParallel(model, device_ids=ids, static_graph=True)
    # The statistics are equal already. As an argument it has another name in each version of torch.
    parallel.broadcast_buffers = False
    return parallel


class _Halo:
    """Hooks of a conv that is called with a partitioned graph."""

    targets: int | None = None

    def fetch(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(given, PartitionedGraph) for given in (*args, *kwargs.values())):
            return None
        if not isinstance(conv, (*PAIR, *SINGLE)):
            known = ", ".join(each.__name__ for each in (*PAIR, *SINGLE))
            raise TypeError(f"'model' needs convs among {known} on a partitioned graph (got {type(conv).__name__})")
        call = inspect.signature(conv.forward).bind(*args, **kwargs)
        x, graph = call.arguments["x"], call.arguments["edge_index"]
        sources = graph.exchange(x)
        if isinstance(conv, SINGLE):
            # The halo is a target too, without in-edges: its rows of the result are dropped.
            self.targets = graph.num_nodes
        call.arguments["x"] = sources if isinstance(conv, SINGLE) else (sources, x)
        call.arguments["edge_index"] = graph.edge_index
        return call.args, call.kwargs

    def drop(self, conv: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        targets, self.targets = self.targets, None
        return out if targets is None else out[:targets]


class _Sum(torch.autograd.Function):
    """The sum over all processes; each gets the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Sum.forward(ctx, grad.contiguous())


class _SyncBatchNorm(nn.BatchNorm1d):
    """What torch's SyncBatchNorm computes, which needs a GPU, on a CPU; inputs `[N, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        check_shape("x", x, ("N", self.num_features), f"[N, num_features={self.num_features}]")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = _Sum.apply(wide.new_tensor([float(x.size(0))]))
        mean = _Sum.apply(wide.sum(dim=0)) / count
        centred = wide - mean
        variance = _Sum.apply(centred.square().sum(dim=0)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = variance * count / (count - 1)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        normal = centred * (variance + self.eps).rsqrt()
        return (normal * self.weight + self.bias if self.affine else normal).to(x.dtype)
