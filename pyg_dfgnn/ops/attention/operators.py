"""The attention operators as torch.library knows them: what torch.compile and other tracers see of a call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.launch import (
    Inputs,
    Kernels,
    inverse_norm,
    problem_of,
    run_backward,
    run_forward,
    run_weights,
)


class Operands(NamedTuple):
    """Arguments of the registered operators, in schema order: the key of the graph, the score, then its inputs."""

    edge_index: Tensor
    num_src: int
    num_dst: int
    self_loops: bool
    transposed: bool
    score: str
    target: Tensor | None
    key: Tensor | None
    value: Tensor
    target_scalars: Tensor | None
    source_scalars: Tensor | None
    parameter: Tensor | None
    edge: Tensor | None
    seed: Tensor | None
    scale: float
    slope: float
    dropout: float

    def resolve(self) -> tuple[Kernels, Graph, Inputs]:
        """The prepared kernels, the graph, and the inputs."""
        graph = Graph.resolve(*self[:5])
        inputs = Inputs(*self[6:])
        if inputs.edge is not None:
            # Not known while torch.compile traces self-loops.
            sizes = graph.num_edges, *inputs.edge.shape[1:]
            check_shape("edge", inputs.edge, sizes, f"[E={graph.num_edges}, ...]")
        return Kernels.of(problem_of(self.score, inputs), graph), graph, inputs


_OPERANDS = (
    "Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops, bool transposed, str score, Tensor? target, "
    "Tensor? key, Tensor value, Tensor? target_scalars, Tensor? source_scalars, Tensor? parameter, Tensor? edge, "
    "Tensor? seed, float scale, float slope, float dropout"
)
_library = torch.library.Library("pyg_dfgnn", "DEF")
for _schema in (
    f"attention_forward({_OPERANDS}, bool exact, bool tangent) -> (Tensor, Tensor, Tensor, Tensor)",
    f"attention_backward({_OPERANDS}, Tensor out, Tensor softmax, Tensor grad_out, bool same, "
    "bool edge_grad, Tensor tangent) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"attention_weights({_OPERANDS}, Tensor softmax) -> Tensor",
):
    # Inductor's CUDA graphs copy edge_index into a buffer of theirs: a replay would launch on the recorded graph.
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
_library.define("attention_inverse_norm(Tensor x) -> Tensor")


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *operands, exact, tangent = arguments
    o = Operands(*operands)
    kernels, graph, inputs = o.resolve()
    if kernels.forward.finds_norms and inputs.source_scalars is not None:
        # It writes them, and an operator must not change its arguments.
        inputs = inputs._replace(source_scalars=torch.empty_like(inputs.source_scalars))
    walk = kernels.tangent(graph) if tangent else None
    out, softmax, *rest = run_forward(kernels, inputs, o.num_dst, exact=exact, tangent=walk)
    assert softmax is not None
    nothing = (0, *out.shape[1:])
    copy, derivative = (out.new_empty(nothing, dtype=torch.float32) if each is None else each for each in rest)
    return out, softmax, copy, derivative


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *operands, exact, tangent = arguments
    o = Operands(*operands)
    _, heads, channels = o.value.shape
    return (
        o.value.new_empty((o.num_dst, heads, channels)),
        o.value.new_empty((o.num_dst, heads, 2), dtype=torch.float32),
        o.value.new_empty((o.num_dst if exact else 0, heads, channels), dtype=torch.float32),
        o.value.new_empty((o.num_dst if tangent else 0, heads, channels), dtype=torch.float32),
    )


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    count = len(Operands._fields)
    kernels, graph, inputs = Operands(*arguments[:count]).resolve()
    grads = run_backward(kernels, graph, inputs, *arguments[count:])
    return tuple(inputs.value.new_empty(0) if grad is None else grad for grad in grads)


def _empty_as(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    count = len(Operands._fields)
    o = Operands(*arguments[:count])
    same, edge_grad = arguments[count + 3 : count + 5]
    value = o.value
    heads, channels = value.shape[1:]

    def rows(present: bool, count: int) -> Tensor:
        return value.new_empty((count, heads, channels)) if present else value.new_empty(0)

    def scalars(count: int) -> Tensor:
        return value.new_empty((count, heads), dtype=torch.float32)

    add, dot = o.score == "add", o.score == "dot"
    return (
        scalars(o.num_dst) if add else rows(not same, o.num_dst),
        rows(dot, o.num_src),
        rows(True, o.num_src),
        scalars(o.num_src) if add else rows(False, 0),
        rows(False, 0) if o.parameter is None else _empty_as(o.parameter),
        _empty_as(o.edge) if edge_grad and o.edge is not None else rows(False, 0),
    )


def _weights(*arguments: Any) -> Tensor:
    *operands, softmax = arguments
    return run_weights(*Operands(*operands).resolve(), softmax)


def _weights_fake(*arguments: Any) -> Tensor:
    o = Operands(*arguments[:-1])
    edges = torch.library.get_ctx().new_dynamic_size() if o.self_loops else o.edge_index.shape[1]
    return o.value.new_empty((edges, o.value.shape[1]), dtype=torch.float32)


def _inverse_norm_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


for _name, _implementation, _fake in (
    ("attention_forward", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
    ("attention_weights", _weights, _weights_fake),
    ("attention_inverse_norm", inverse_norm, _inverse_norm_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyg_dfgnn::{_name}", _fake, lib=_library)
