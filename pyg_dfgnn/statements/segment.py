"""The statement of aggregations over the edges of a graph, made from a message and the statistics that are asked for.

.. math::
    O_{is} = t_i \\, \\mathrm{stat}_s \\{ m_{ij} : j \\in N(i) \\}

A message :math:`m_{ij}` is one record here and one struct in CUDA. All statistics of a call come from one gather.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.statements.op import FEATURES, Gradient, Pass, Statement, TensorSpec

STATS = ("sum", "mean", "max", "min", "var", "std", "mul")
"""Statistics that kernels compute; those of ``SUMS`` are scaled, the others are not."""
SUMS, EXTREMES, MOMENTS = STATS[:2], STATS[2:4], STATS[4:6]
AVERAGES = ("mean", *MOMENTS)
"""Statistics that divide by the degree."""
LEAST_VARIANCE = 1e-5
"""Variance up to which PyG's standard deviation is 0."""


@dataclass(frozen=True, eq=False)
class Message:
    """Message of an edge, channel by channel.

    Attributes:
        name: Name in :data:`MESSAGES`, and stem of its CUDA struct in ``kernels/segment/messages``.
        reference: The messages [E, F] in plain torch of (value, edge, key, target) at every edge, and of weight and
            bias of the linear layer.
        edge: What it reads of an edge: a "vector" [E, F], a "scalar" [E], a "row" [E, D] that a linear layer maps to F
            channels, or None.
        key: Whether it reads a vector of the source other than the value.
        target: Whether it reads a vector of the target.
    """

    name: str
    reference: Callable[..., Tensor]
    edge: str | None = None
    key: bool = False
    target: bool = False


def _copy(value: Tensor, *_: Tensor | None) -> Tensor:
    return value


def _weight(value: Tensor, edge: Tensor, *_: Tensor | None) -> Tensor:
    return value * edge.view(-1, *(1,) * (value.dim() - 1))


def _add(value: Tensor, edge: Tensor, *_: Tensor | None) -> Tensor:
    return value + edge


def _relu_add(value: Tensor, edge: Tensor, *_: Tensor | None) -> Tensor:
    return (value + edge).relu()


def _relu_linear(value: Tensor, edge: Tensor, _: None, __: None, weight: Tensor, bias: Tensor) -> Tensor:
    dtype = torch.promote_types(edge.dtype, weight.dtype)
    return (value + (edge.to(dtype) @ weight.to(dtype) + bias)).relu()


def _gate(value: Tensor, _: None, key: Tensor, target: Tensor, *__: None) -> Tensor:
    return torch.sigmoid(target + key) * value


COPY = Message("copy", _copy)
"""``m_ij = v_j``."""
WEIGHT = Message("weight", _weight, edge="scalar")
"""``m_ij = e_ij v_j`` with one number per edge."""
ADD = Message("add", _add, edge="vector")
"""``m_ij = v_j + e_ij``."""
RELU_ADD = Message("relu_add", _relu_add, edge="vector")
"""``m_ij = max(v_j + e_ij, 0)``."""
RELU_LINEAR = Message("relu_linear", _relu_linear, edge="row")
"""``m_ij = max(v_j + W e_ij + b, 0)`` with few numbers per edge."""
GATE = Message("gate", _gate, key=True, target=True)
"""``m_ij = sigmoid(t_i + k_j) v_j``."""
MESSAGES = MappingProxyType({message.name: message for message in (COPY, WEIGHT, ADD, RELU_ADD, RELU_LINEAR, GATE)})
"""Every message by its name."""

_LAYER = ("lin_weight", "lin_bias")
_INPUTS = ("target", "key", "value", "edge", "source_scale", "target_scale", "inverse_degree", *_LAYER)
EDGE_SHAPES = MappingProxyType({"vector": ("C",), "scalar": (), "row": ("D",), None: ()})
"""Shape of the data that a message reads of each edge, by the kind of data."""
_KEPT = ("arg_max", "arg_min", "num_max", "num_min", "center", "others")
FORWARD = Pass("forward", "targets", "sources", (*_INPUTS, "out", *_KEPT))


def reads_messages(message: Message, stats: Sequence[str]) -> bool:
    """Return whether backward needs the messages: the gradient of a plain sum of them does not depend on them."""
    return not set(stats) <= set(SUMS) or message not in (COPY, ADD)


def statement_of(message: Message, stats: Sequence[str], self_loops: bool = False) -> Statement:
    """Return the statement of the aggregation of messages.

    Args:
        message: What an edge sends.
        stats: Some of ``STATS``, in the order of the outputs.
        self_loops: Whether each node has one more edge, to itself, that no array holds; of sums of copies.
    """
    has = set(stats).intersection
    extremes, has_moments = [stat for stat in EXTREMES if stat in stats], bool(has(MOMENTS))
    reads = reads_messages(message, stats)
    read = tuple(name if reads or name not in ("value", "edge") else "" for name in _INPUTS)
    known = (*read, "out" if has((*EXTREMES, "std", "mul")) else "", *_KEPT, "grad_out", "slope", "offset")
    targets = Pass("targets", "targets", "sources", (*known, "grad_target"))
    sources = Pass(
        "sources", "sources", "targets", (*known, "grad_key", "grad_value", "grad_edge", "weight_sums", "bias_sums")
    )
    edge_shape, edge_dtype = EDGE_SHAPES[message.edge], "float32" if message.edge == "scalar" else FEATURES
    has_layer = message.edge == "row"
    inputs = (
        TensorSpec("target", "targets", ("C",), needed=message.target),
        TensorSpec("key", "sources", ("C",), needed=message.key),
        TensorSpec("value", "sources", ("C",), label="x", needed=True),
        TensorSpec("edge", "edges", edge_shape, edge_dtype, needed=message.edge is not None),
        TensorSpec("source_scale", "sources", (), "float32"),
        TensorSpec("target_scale", "targets", (), "float32"),
        TensorSpec("inverse_degree", "targets", (), "float32", needed=bool(has(AVERAGES))),
        TensorSpec("lin_weight", "whole", ("D", "C"), "float32", needed=has_layer),
        TensorSpec("lin_bias", "whole", ("C",), "float32", needed=has_layer),
    )
    gradients = [Gradient("value", TensorSpec("grad_value", "sources", ("C",)))]
    if message.target:
        gradients.append(Gradient("target", TensorSpec("grad_target", "targets", like="target")))
    if message.key:
        gradients.append(Gradient("key", TensorSpec("grad_key", "sources", like="key")))
    if message.edge is not None:
        gradients.append(Gradient("edge", TensorSpec("grad_edge", "edges", edge_shape, edge_dtype), when="edge_grad"))
    if has_layer:
        gradients.append(Gradient("lin_weight", TensorSpec("weight_sums", "blocks", ("D", "C"), "float32"), "rows"))
        gradients.append(Gradient("lin_bias", TensorSpec("bias_sums", "blocks", ("C",), "float32"), "rows"))
    saved = [TensorSpec(f"arg_{stat}", "targets", ("C",), "int16", when="args") for stat in extremes]
    wide = [f"num_{stat}" for stat in extremes] + ["center"] * has_moments + ["others"] * ("mul" in stats)
    saved += [TensorSpec(name, "targets", ("C",), "float32", when="args") for name in wide]
    return Statement(
        name=f"segment/{message.name}/{'+'.join(stats)}{'/self_loops' * self_loops}",
        inputs=inputs,
        numbers=(),
        output=TensorSpec("out", "targets", ("C",) if len(stats) == 1 else (len(stats), "C")),
        saved=tuple(saved),
        forward=(FORWARD,),
        backward=(targets, sources) if message.target or has_moments else (sources,),
        gradients=tuple(gradients),
        reference=partial(_reference, message, stats, self_loops),
        scratch=tuple(TensorSpec(name, "targets", ("C",), "float32") for name in ("slope", "offset") if has_moments),
    )


def _reference(
    message: Message,
    stats: Sequence[str],
    self_loops: bool,
    edge_index: Tensor,
    num_dst: int,
    inputs: dict[str, Any],
    *_: Any,
) -> tuple[Tensor, None]:
    """Return the statistics [N_dst, S, C], or the only one [N_dst, C], in plain torch."""
    source, target = edge_index
    if self_loops:
        nodes = torch.arange(num_dst, device=target.device)
        source, target = torch.cat([source, nodes]), torch.cat([target, nodes])

    def at(name: str, nodes: Tensor) -> Tensor | None:
        tensor = inputs.get(name)
        return None if tensor is None else tensor.index_select(0, nodes)

    scale = at("source_scale", source)
    value, key, query = at("value", source), at("key", source), at("target", target)
    messages = message.reference(value, inputs.get("edge"), key, query, *map(inputs.get, _LAYER))
    # Kernels sum in float32 whatever the features are.
    messages = messages.to(torch.promote_types(messages.dtype, torch.float32))
    if scale is not None:
        messages = messages * scale.unsqueeze(1)
    outputs = [_statistic(stat, messages, target, num_dst, inputs) for stat in stats]
    out = outputs[0] if len(outputs) == 1 else torch.stack(outputs, dim=1)
    return out.to(inputs["value"].dtype), None


def _statistic(stat: str, messages: Tensor, target: Tensor, num_dst: int, inputs: dict[str, Any]) -> Tensor:
    """Return a statistic [N_dst, C] of the messages [E, C]."""
    zeros = messages.new_zeros((num_dst, *messages.shape[1:]))
    index = target.unsqueeze(1).expand_as(messages)
    if stat == "mul":
        return torch.ones_like(zeros).scatter_reduce(0, index, messages, "prod")
    if stat in EXTREMES:
        return zeros.scatter_reduce(0, index, messages, f"a{stat}", include_self=False)

    def mean(terms: Tensor) -> Tensor:
        return zeros.index_add(0, target, terms) * inputs["inverse_degree"].unsqueeze(1)

    if stat in SUMS:
        out = mean(messages) if stat == "mean" else zeros.index_add(0, target, messages)
        factor = inputs.get("target_scale")
        return out if factor is None else out * factor.unsqueeze(1)
    variance = mean((messages - mean(messages)[target]).square())
    if stat == "var":
        return variance
    deviation = variance.clamp(min=LEAST_VARIANCE).sqrt()
    return deviation.masked_fill(deviation <= LEAST_VARIANCE**0.5, 0.0)
