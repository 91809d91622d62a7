"""The gradients of the attention: launched at once, through the registered operators, and of the weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.launch import Inputs, Kernels, run_backward, run_forward
from pyg_dfgnn.ops.attention.operators import Operands
from pyg_dfgnn.ops.eager import apply_of, once_differentiable
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor


def is_rounded(value: Tensor) -> bool:
    """Whether backward needs the output in float32: the terms of dS cancel, and 16 bits of it would show."""
    return value.dtype.itemsize == 2


def _input_grads(score: str, same: bool, edge_grad: bool, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of ``Inputs`` from those of ``run_backward``."""
    target, key, value, source, parameter, edge = grads
    add, dot = score == "add", score == "dot"
    return (
        None if add or same else target,
        key if dot else None,
        value,
        target if add else None,
        source if add else None,
        parameter if score in ("cosine", "gatv2") else None,
        edge if edge_grad else None,
        None,
    )


class _Attention(torch.autograd.Function):
    """Fused attention on a graph at hand; with ``same`` the value doubles as target and takes its gradient.

    Takes the inputs as they are and their tensors once more, which autograd has to see; with ``same`` those of the
    targets may be None there. Returns the output, with ``concat`` of the shape [N_dst, H * C], and with ``weights``
    also the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, rest: tuple[Kernels, Graph, bool, bool, bool], inputs: Inputs, *tensors: Tensor | None
    ) -> Any:
        kernels, graph, same, weights, concat = rest
        ctx.rest = kernels, graph, same, inputs[8:]
        walk = kernels.tangent(graph) if kernels.wants_tangent(graph) else None
        exact = is_rounded(inputs.value)
        out, softmax, copy, derivative = run_forward(
            kernels, inputs, graph.num_dst, exact=exact, concat=concat, tangent=walk
        )
        # Not saved: autograd would then forbid to edit it in place, as one may with PyG's, and a copy costs every call.
        ctx.out = (out.detach(), out._version) if copy is None else None
        ctx.save_for_backward(*tensors, copy, softmax, derivative)
        ctx.set_materialize_grads(False)
        if not weights:
            return out
        ctx.mark_non_differentiable(softmax)
        return out, softmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad_out is None:
            ctx.out = None
            return (None,) * 10
        kernels, graph, same, numbers = ctx.rest
        *tensors, out, softmax, tangent = ctx.saved_tensors
        if same:
            tensors[0], tensors[3] = tensors[2], tensors[4]
        inputs = Inputs(*tensors, *numbers)
        if out is None:
            out = unedited(ctx)
        if out is None:
            out = run_forward(kernels, inputs, graph.num_dst, saved=False)[0]
        edge_grad = ctx.needs_input_grad[8]
        grads = run_backward(kernels, graph, inputs, out, softmax, grad_out, same, edge_grad, tangent)
        return None, None, *_input_grads(kernels.problem.score, same, edge_grad, grads)


def unedited(ctx: Any) -> Tensor | None:
    """The output of the forward pass; None if it was edited since or a backward pass has let it go."""
    # Let go as saved tensors are: the graph of autograd may live as long as a loss does.
    known, ctx.out = ctx.out, None
    if known is not None:
        out: Tensor = known[0]
        if out._version == known[1]:
            return out
    return None


apply_attention = apply_of(_Attention)


class TracedAttention(torch.autograd.Function):
    """The same through the registered operators, for tracing."""

    @staticmethod
    def forward(ctx: Any, same: bool, exact: bool, tangent: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
        o = Operands(*arguments)
        out, softmax, copy, derivative = torch.ops.pyg_dfgnn.attention_forward(*arguments, exact, tangent)
        given = (a for a in arguments if isinstance(a, Tensor))
        ctx.save_for_backward(*given, copy if exact else out, softmax, derivative)
        ctx.layout = tuple(None if isinstance(a, Tensor) else (a,) for a in arguments)
        ctx.same = same
        ctx.edge_grad = o.edge is not None and ctx.needs_input_grad[3 + Operands._fields.index("edge")]
        ctx.mark_non_differentiable(softmax)
        return out, softmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        *saved, out, softmax, tangent = ctx.saved_tensors
        tensors = iter(saved)
        arguments = [next(tensors) if entry is None else entry[0] for entry in ctx.layout]
        rest = (out, softmax, grad_out, ctx.same, ctx.edge_grad, tangent)
        grads = torch.ops.pyg_dfgnn.attention_backward(*arguments, *rest)
        return (*(None,) * 9, *_input_grads(arguments[5], ctx.same, ctx.edge_grad, grads), None, None, None)


class AttentionWeights(torch.autograd.Function):
    """What `weigh` gives for the inputs; a gradient, rarely asked for, takes the reference's composite path."""

    @staticmethod
    def forward(
        ctx: Any, weigh: Callable[[], Tensor], score: str, graph: Graph, same: bool, numbers: Any, *tensors: Any
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rest = (score, graph, same, numbers)
        return weigh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        score, graph, same, numbers = ctx.rest
        needed = ctx.needs_input_grad[5:]
        with torch.enable_grad():
            leaves: list[Any] = [
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            wide: list[Any] = [
                leaf.float() if leaf is not None and leaf.is_floating_point() else leaf for leaf in leaves
            ]
            weights = _reference_weights(score, graph, Inputs(*wide, *numbers), same)
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(weights, wanted, grad, allow_unused=True))
        return *(None,) * 5, *(next(grads) if need else None for need in needed)


def _reference_weights(score: str, graph: Graph, inputs: Inputs, same: bool) -> Tensor:
    """The weights [E, H] of the inputs, in plain torch."""
    given: dict[str, Any] = inputs._asdict()
    value, edge, slope = given["value"], given["edge"], given["slope"]
    keep = None
    if inputs.seed is not None:
        edge_ids = torch.arange(graph.num_edges, device=value.device)
        keep = dropout_factor(edge_ids, value.shape[1], inputs.dropout, inputs.seed).float()
    edges = graph.edge_index, graph.num_dst
    if score == "dot":
        query, key, scale = given["target"], given["key"], given["scale"]
        return reference.dot_attention(*edges, query, key, value, edge=edge, scale=scale, keep=keep)[1]
    if score == "cosine":
        x_dst = None if same else given["target"]
        return reference.cosine_attention(*edges, value, x_dst, beta=given["parameter"], keep=keep)[1]
    if score == "add":
        terms = given["source_scalars"], given["target_scalars"]
        nothing = value[..., :0]
        return reference.add_attention(*edges, nothing, *terms, alpha_edge=edge, negative_slope=slope, keep=keep)[1]
    nodes = value, given["target"], given["parameter"]
    return reference.gatv2_attention(*edges, *nodes, edge=edge, negative_slope=slope, keep=keep)[1]
