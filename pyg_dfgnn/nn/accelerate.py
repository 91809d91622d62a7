"""Swap the convs of an existing model, and ask which kernels a conv would run."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch_geometric.nn import MessagePassing, dense
from torch_geometric.nn import conv as upstream

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import AttentionProblem, LaunchPlan, plan
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.agnn_conv import AGNNConv
from pyg_dfgnn.nn.conv.gat_conv import GATConv
from pyg_dfgnn.nn.conv.gatv2_conv import GATv2Conv
from pyg_dfgnn.nn.conv.transformer_conv import TransformerConv
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.gate import FusedConv

Model = TypeVar("Model", bound=torch.nn.Module)

DROP_INS: dict[type, type[FusedConv]] = {
    upstream.GATConv: GATConv,
    upstream.GATv2Conv: GATv2Conv,
    upstream.TransformerConv: TransformerConv,
    upstream.AGNNConv: AGNNConv,
}


def accelerate(model: Model) -> Model:
    """Turn the PyG convs and linear layers of a model into drop-ins, in place.

    Parameters, buffers, hooks and settings stay as they are.

    Only modules of exactly PyG's classes change; a subclass may mean something else. Compile the model afterwards.

    Args:
        model: Any module, also a single conv.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"'model' needs a torch.nn.Module (got {type(model).__name__})")
    for module in model.modules():
        drop_in = DROP_INS.get(type(module))
        if drop_in is not None:
            module.__class__ = drop_in
            # As in a constructor: generate the propagation of the class where no instance has done so yet.
            MessagePassing._set_jittable_templates(module)
        elif type(module) is dense.Linear:
            module.__class__ = Linear
    return model


@dataclass(frozen=True)
class Description:
    """What a conv would do with a call; `str()` is made for reading.

    Attributes:
        conv: The conv, as it prints itself.
        reasons: Why PyG's own path would take the call; empty when the fused kernels would.
        problem: What dispatch was asked.
        plan: What it answered; None with reasons.
        graph: Sizes and degrees of the graph; None with reasons.
    """

    conv: str
    reasons: tuple[str, ...]
    problem: AttentionProblem | None = None
    plan: LaunchPlan | None = None
    graph: str | None = None

    @property
    def fused(self) -> bool:
        """Whether the fused kernels would run."""
        return not self.reasons

    def __str__(self) -> str:
        if self.reasons:
            return "\n".join([f"{self.conv}: PyG's own path, because", *(f"  - {reason}" for reason in self.reasons)])
        return f"{self.conv}: fused kernels\n  problem: {self.problem}\n  graph: {self.graph}\n  plan: {self.plan}"


def describe_plan(conv: torch.nn.Module, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Description:
    """Say which kernels a conv would run on these inputs, or every reason why it would not.

    Args:
        conv: A drop-in conv.
        x: As in the conv's forward.
        edge_index: As in the conv's forward.
        *args: Further arguments of the forward.
        **kwargs: Further arguments of the forward.

    Returns:
        A description with the fields `fused`, `reasons`, `problem`, `plan` and `graph`.

    Raises:
        TypeError: `conv` is not a module.
    """
    if not isinstance(conv, torch.nn.Module):
        raise TypeError(f"'conv' needs a torch.nn.Module (got {type(conv).__name__})")
    if not isinstance(conv, FusedConv):
        if type(conv) in DROP_INS:
            return Description(str(conv), (f"this is PyG's {type(conv).__name__}: pyg_dfgnn.accelerate turns it over",))
        inner = [name for name, module in conv.named_modules() if isinstance(module, FusedConv)]
        name = type(conv).__name__
        return Description(
            str(conv), (f"{name} is no conv; its own are {', '.join(inner)}" if inner else f"{name} has no drop-in",)
        )
    call = conv._call(x, edge_index, *args, **kwargs)
    problem = AttentionProblem(*call.problem) if call.problem else None
    if problem is not None:
        problem = replace(problem, tf32=tf32_allowed(problem.dtype))
    if call.reasons or problem is None:
        return Description(str(conv), tuple(call.reasons), problem)
    graph, _, _ = conv._edges(call, getattr(conv, "fill_value", None), getattr(conv, "edge_dim", None))
    assert isinstance(graph, Graph)
    size = f"{graph.num_src} sources, {graph.num_dst} targets, {graph.num_edges} edges"
    return Description(str(conv), (), problem, plan(problem, graph), size)
