"""The attention family as data: which tensors each score takes, and how the fused op and the reference are called.

A *side* says what the first axis of a tensor is: ``src`` and ``dst`` nodes, ``edge``, or ``param``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn import ops
from pyg_dfgnn.bench.graphs import BenchGraph
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference import attention as reference

Inputs = dict[str, Tensor]

SCORES = ("dot", "cosine", "add", "gatv2")
LAYERS = {"dot": "GT", "cosine": "AGNN", "add": "GAT", "gatv2": "GATv2"}
NEGATIVE_SLOPE = 0.2


@dataclass(frozen=True)
class AttentionCase:
    """One point of the grid; ``str()`` is its readable id."""

    score: str
    heads: int
    channels: int
    edge: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        edge = "-edge" if self.edge else ""
        dropout = f"-p{self.dropout}" if self.dropout else ""
        return f"{self.score}-H{self.heads}-C{self.channels}{edge}{dropout}"

    def sides(self, bipartite: bool) -> dict[str, str]:
        """Name -> side of every differentiable input, in the order of the op's arguments."""
        sides = {
            "dot": {"query": "dst", "key": "src", "value": "src"},
            "cosine": {"x_src": "src", **({"x_dst": "dst"} if bipartite else {}), "beta": "param"},
            "add": {"value": "src", "alpha_src": "src", "alpha_dst": "dst"},
            "gatv2": {"x_src": "src", "x_dst": "dst", "att": "param"},
        }[self.score]
        if self.edge:
            sides["alpha_edge" if self.score == "add" else "edge"] = "edge"
        return sides

    def shape(self, name: str, side: str, graph: BenchGraph) -> tuple[int, ...]:
        rows = {"src": graph.num_src, "dst": graph.num_dst, "edge": graph.num_edges}
        if name == "beta":
            return (1,)
        if name == "att":
            return (self.heads, self.channels)
        if name.startswith("alpha"):
            return (rows[side], self.heads)
        return (rows[side], self.heads, self.channels)


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def make_inputs(case: AttentionCase, graph: BenchGraph, seed: int = 0) -> Inputs:
    """Standard normal float32 inputs of ``case`` on the graph's device, all of them differentiable.

    Three adjustments keep the comparison with float64 about the kernels and not about the conditioning of the formula:
    the attention vector is scaled by C^-0.5 so that logits stay moderate; inputs of the leaky scores are multiples of
    2^-16 so that the sign of their sum is exact in every precision; cosine inputs stay 0.25 away from zero, because the
    gradient of x / |x| grows like 1 / |x|.
    """
    generator = _generator(seed, graph.device)
    inputs: Inputs = {}
    for name, side in case.sides(graph.num_src != graph.num_dst).items():
        tensor = torch.randn(case.shape(name, side, graph), generator=generator, device=graph.device)
        if name == "att":
            tensor *= case.channels**-0.5
        elif name == "beta":
            tensor.fill_(1.25)
        elif case.score == "cosine":
            tensor += torch.copysign(torch.tensor(0.25, device=tensor.device), tensor)
        elif case.score in ("add", "gatv2"):
            tensor.mul_(2.0**16).round_().mul_(2.0**-16)
        inputs[name] = tensor
    return inputs


def make_grad_out(case: AttentionCase, graph: BenchGraph, inputs: Inputs, seed: int = 1) -> Tensor:
    """The gradient of the output [N_dst, H, C], float32: standard normal, plus a part that follows the values.

    The added part (the target's own features for cosine, 1 for gatv2) gives every edge's share of the gradient of beta
    or of the attention vector the same sign on average; without it they are sums that cancel to rounding noise.
    """
    shape = (graph.num_dst, case.heads, case.channels)
    grad_out = torch.randn(shape, generator=_generator(seed, graph.device), device=graph.device)
    if case.score == "cosine":
        grad_out += inputs.get("x_dst", inputs["x_src"])
    elif case.score == "gatv2":
        grad_out += 1.0
    return grad_out


def fused(case: AttentionCase, graph: Graph, inputs: Inputs) -> Tensor:
    """The package's op on ``inputs`` -> [N_dst, H, C]."""
    p = case.dropout
    tensors: Mapping[str, Tensor] = inputs
    if case.score == "dot":
        query, key, value = tensors["query"], tensors["key"], tensors["value"]
        return ops.dot_attention(graph, query, key, value, edge=tensors.get("edge"), dropout_p=p)
    if case.score == "cosine":
        x_src, x_dst = tensors["x_src"], tensors.get("x_dst")
        return ops.cosine_attention(graph, x_src, x_dst, beta=tensors["beta"], dropout_p=p)
    if case.score == "add":
        value, alpha_src, alpha_dst = tensors["value"], tensors["alpha_src"], tensors["alpha_dst"]
        return ops.add_attention(
            graph,
            value,
            alpha_src,
            alpha_dst,
            alpha_edge=tensors.get("alpha_edge"),
            negative_slope=NEGATIVE_SLOPE,
            dropout_p=p,
        )
    x_src, x_dst, att = tensors["x_src"], tensors["x_dst"], tensors["att"]
    return ops.gatv2_attention(
        graph, x_src, x_dst, att, edge=tensors.get("edge"), negative_slope=NEGATIVE_SLOPE, dropout_p=p
    )


def plain(case: AttentionCase, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None) -> Tensor:
    """The reference in plain torch on ``inputs`` -> [num_dst, H, C]; ``keep`` [E, H] holds the dropout factors."""
    if case.score == "dot":
        arguments = [inputs["query"], inputs["key"], inputs["value"]]
        out, _ = reference.dot_attention(edge_index, num_dst, *arguments, edge=inputs.get("edge"), keep=keep)
    elif case.score == "cosine":
        arguments = [inputs["x_src"], inputs["x_dst"]]
        out, _ = reference.cosine_attention(edge_index, num_dst, *arguments, beta=inputs["beta"], keep=keep)
    elif case.score == "add":
        arguments = [inputs["value"], inputs["alpha_src"], inputs["alpha_dst"]]
        out, _ = reference.add_attention(
            edge_index,
            num_dst,
            *arguments,
            alpha_edge=inputs.get("alpha_edge"),
            negative_slope=NEGATIVE_SLOPE,
            keep=keep,
        )
    else:
        arguments = [inputs["x_src"], inputs["x_dst"], inputs["att"]]
        out, _ = reference.gatv2_attention(
            edge_index, num_dst, *arguments, edge=inputs.get("edge"), negative_slope=NEGATIVE_SLOPE, keep=keep
        )
    return out


def forward_backward(out: Tensor, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """``out`` and the gradient of every input, under the names 'out' and 'grad_<input>'."""
    gradients = torch.autograd.grad(out, list(inputs.values()), grad_out)
    return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(inputs, gradients, strict=True)}}
