"""Inputs of an attention call on a graph, drawn so that errors are the kernels' and not those of the formula.

Import ``roles`` for what the inputs of a score are, ``draw_inputs`` and ``draw_grad_out`` for numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList

_ROLES = {
    "dot": {"query": "dst", "key": "src", "value": "src"},
    "cosine": {"x_src": "src", "beta": "param"},
    "add": {"value": "src", "alpha_src": "src", "alpha_dst": "dst"},
    "gatv2": {"x_src": "src", "x_dst": "dst", "att": "param"},
}
OWN_TARGETS = {"cosine": {"x_dst": "dst"}}
"""Score -> name -> role of inputs that it takes besides where its targets are not its sources."""
EDGE_INPUTS = {"dot": "edge", "add": "alpha_edge", "gatv2": "edge"}
"""Name of the edge features of each score that takes them."""


def roles(score: str, edge: bool = False, own_targets: bool = True) -> dict[str, str]:
    """Return the role of every input, by name and in the order of the reference's arguments.

    Args:
        score: Name of a score.
        edge: Whether there are edge features.
        own_targets: Whether the targets have rows of their own, for a score whose targets may be its sources.
    """
    role_of = _ROLES[score] | (OWN_TARGETS.get(score, {}) if own_targets else {})
    return role_of | ({EDGE_INPUTS[score]: "edge"} if edge else {})


def shape(name: str, role: str, graph: EdgeList, heads: int, channels: int) -> tuple[int, ...]:
    """Return the shape of an input."""
    if role == "param":
        return {"beta": (1,), "att": (heads, channels)}[name]
    rows = {"src": graph.num_src, "dst": graph.num_dst, "edge": graph.edge_index.size(1)}[role]
    return (rows, heads) if name.startswith("alpha") else (rows, heads, channels)


def _away_from_zero(tensor: Tensor) -> Tensor:
    """Numbers that stay 0.25 away from zero, because the gradient of x / |x| grows like 1 / |x|."""
    return tensor + torch.copysign(torch.tensor(0.25, device=tensor.device), tensor)


def _multiples(tensor: Tensor) -> Tensor:
    """Multiples of 2^-16, so that the sign of their sum, which a leaky ReLU asks for, is exact in every precision."""
    return tensor.mul(2.0**16).round_().mul_(2.0**-16)


_ADJUSTED = {"cosine": _away_from_zero, "add": _multiples, "gatv2": _multiples}
_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "beta": lambda drawn: torch.full_like(drawn, 1.25),
    "att": lambda drawn: drawn * max(drawn.size(-1), 1) ** -0.5,
}
_GRADIENT_PARTS: dict[str, Callable[[Inputs], Tensor | float]] = {
    "cosine": lambda inputs: inputs.get("x_dst", inputs["x_src"]),
    "gatv2": lambda inputs: 1.0,
}


def draw_inputs(
    score: str,
    graph: EdgeList,
    heads: int,
    channels: int,
    edge: bool = False,
    own_targets: bool | None = None,
    generator: torch.Generator | None = None,
) -> Inputs:
    """Return standard normal inputs in float32 on the graph's device, adjusted to keep the formula well-conditioned.

    Args:
        score: Name of a score.
        graph: On which edges.
        heads: Heads H.
        channels: Channels C per head.
        edge: Whether there are edge features.
        own_targets: As for :func:`roles`; by default where numbers of sources and targets differ.
        generator: Where random numbers come from; torch's own, if None.
    """
    own_targets = graph.num_src != graph.num_dst if own_targets is None else own_targets
    adjust = _ADJUSTED.get(score, Tensor.clone)
    inputs: Inputs = {}
    for name, role in roles(score, edge, own_targets).items():
        drawn = torch.randn(shape(name, role, graph, heads, channels), generator=generator, device=graph.device)
        inputs[name] = _PARAMETERS[name](drawn) if role == "param" else adjust(drawn)
    if "att" in inputs:
        inputs["att"] = adjust(inputs["att"])
    return inputs


def draw_grad_out(
    score: str,
    graph: EdgeList,
    heads: int,
    channels: int,
    inputs: Inputs,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a standard normal gradient of the output [N_dst, H, C], plus a part that follows the values.

    The added part gives every edge's share of the gradient of a parameter the same sign on average; without it they are
    sums that cancel to rounding noise.
    """
    grad_out = torch.randn(graph.num_dst, heads, channels, generator=generator, device=graph.device)
    added = _GRADIENT_PARTS.get(score)
    return grad_out if added is None else grad_out + added(inputs)
