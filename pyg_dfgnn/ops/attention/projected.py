"""Attention among linear projections of one node set, which lie side by side: few launches for small graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD
from pyg_dfgnn.errors import check_dtype, check_range
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.attention.functional import op_by_role
from pyg_dfgnn.ops.compile import Text
from pyg_dfgnn.ops.core import FEATURE_DTYPES, Edges, Op, PreparedOp, draw_seed, is_eager_on, recall, remember
from pyg_dfgnn.ops.eager import apply_of, is_plain, needs_grad, once_differentiable
from pyg_dfgnn.ops.function import INFER, TRAIN, unedited
from pyg_dfgnn.statements.scores import SCORES

PLACES: Mapping[str, Mapping[str, int]] = {
    "dot": {"target": 0, "key": 1, "value": 2},
    "gatv2": {"target": 1, "value": 0},
}
"""Which projections of the nodes are target, key and value, by score."""
USED = {score: len(places) for score, places in PLACES.items()}
"""How many projections of the nodes each score reads."""


@dataclass(frozen=True)
class Interleaved:
    """Target, key and value as projections that lie side by side in one buffer, rows [N, projections * H * C].

    Attributes:
        projections: Number of projections.
        places: Which of them is what.
        heads: Number of heads.
        channels: Channels per head.
        itemsize: Bytes of a number.
    """

    projections: int
    places: tuple[tuple[str, int], ...]
    heads: int
    channels: int
    itemsize: int
    buffer = "rows"

    def adapt(self, plan: Any) -> Any:
        """Return a plan whose kernels read rows that are so far apart."""
        return replace(plan, constants={**plan.constants, "PROJECTIONS": self.projections})

    def bring(self, text: Text, inputs: Sequence[str]) -> list[str]:
        """Bring the buffer, and return the inputs with it in place of the projections."""
        text.bring("rows")
        self._place(text, "rows", "")
        return ["rows", *(name for name in inputs if name not in ("target", "key", "value"))]

    def allocate_gradients(self, text: Text) -> None:
        """Allocate one buffer for the gradients of all projections."""
        text.fresh("grads", "torch.empty_like(rows)")
        self._place(text, "grads", "grad_")

    def results(self, results: Mapping[str, str], inputs: Sequence[str]) -> list[str]:
        """Return the gradient of the buffer, then those of the other inputs."""
        return ["grads", *(results.get(name, "None") for name in inputs if name != "rows")]

    def _place(self, text: Text, buffer: str, prefix: str) -> None:
        if not text.is_cuda:
            sizes = f"{buffer}.shape[0], {self.projections}, {self.heads}, {self.channels}"
            text.lines.append(f"{buffer}_apart = {buffer}.view({sizes}).unbind(1)")
        for name, place in self.places:
            offset = place * self.heads * self.channels * self.itemsize
            text.arguments[prefix + name] = f"{buffer}_at + {offset}" if text.is_cuda else f"{buffer}_apart[{place}]"


def _others(prepared: PreparedOp, rows: Tensor) -> Sequence[Tensor]:
    """Return the projections that are neither target nor key nor value, [N, H * C]."""
    layout = prepared.shape.interleaved
    used = len(layout.places)
    return rows.chunk(layout.projections, 1)[used:] if layout.projections > used else ()


Projected = tuple[PreparedOp, Graph, bool, tuple[float, float, float], bool]
"""Prepared op, edges, whether heads are to be side by side; scale, slope and dropout; whether the attention is to be in
float32 where the projections are not."""


class _ProjectedAttention(torch.autograd.Function):
    """Linear layers of x side by side, and fused attention among their results where they lie.

    Takes the weights and biases of the layers. Returns the output, with ``concat`` of the shape [N, H * C], and what
    the layers beyond those of the attention give, [N, H * C].
    """

    @staticmethod
    def forward(
        ctx: Any, rest: Projected, seed: Tensor | None, x: Tensor, parameter: Tensor | None, *layers: Tensor
    ) -> tuple[Tensor, ...]:
        prepared, graph, concat, numbers, is_wide = rest
        count = prepared.shape.interleaved.projections
        ctx.rest, ctx.x_dtype = rest, x.dtype
        dtype = prepared.problem.dtype
        if x.dtype is not dtype:
            if x.requires_grad:
                ctx.cast_from = ref(x)
            x = x.to(dtype)
        rows, weights = gemm.interleaved(x, layers[:count], layers[count:])
        run = prepared.forward(TRAIN, concat, False, graph)
        out, *kept = run(graph, rows, None, None, parameter, None, seed, *numbers)
        row_stats, exact = kept if prepared.keeps_exact else (*kept, None)
        if is_wide:
            out, exact = exact, None
        # As in `Fused`.
        ctx.out = [(out.detach(), out._version)] if exact is None else None
        ctx.save_for_backward(x, parameter, seed, exact, row_stats, rows, *weights)
        ctx.layers = layers
        ctx.set_materialize_grads(False)
        return out, *_others(prepared, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *grad_others: Tensor | None) -> tuple[Any, ...]:
        prepared, graph, concat, numbers, is_wide = ctx.rest
        count = prepared.shape.interleaved.projections
        x, parameter, seed, exact, row_stats, rows, *weights = ctx.saved_tensors
        grad_parameter = None
        if grad_out is None:
            ctx.out = None
            grads = torch.zeros_like(rows)
        else:
            inputs = (rows, None, None, parameter, None, seed)
            if exact is None:
                outs = unedited(ctx)
                if outs is not None:
                    (exact,) = outs
                else:
                    mode = TRAIN if is_wide else INFER
                    exact = prepared.forward(mode, concat, False, graph)(graph, *inputs, *numbers)[2 if is_wide else 0]
            if grad_out.dtype is not rows.dtype:
                grad_out = grad_out.to(rows.dtype)
            kept = (row_stats, exact) if prepared.keeps_exact else (row_stats,)
            run = prepared.backward(False, False, graph)
            grads, _, _, grad_parameter, *_ = run(graph, *inputs, *kept, exact, grad_out, *numbers)
        for other, grad in zip(_others(prepared, grads), grad_others, strict=True):
            if grad is None:
                other.zero_()
            else:
                other.copy_(grad)
        _, _, needs_x, _, *needed = ctx.needs_input_grad
        wanted = needs_x, any(needed[:count]), any(needed[count:])
        grad_x, of_layers = gemm.gradients(x, count, weights, ctx.layers, (grads,), wanted, ctx.x_dtype)
        return None, None, grad_x, grad_parameter, *of_layers


_apply = apply_of(_ProjectedAttention)


def projected_attention(
    graph: Edges,
    score: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    heads: int,
    *,
    parameter: Tensor | None = None,
    scale: float = 1.0,
    negative_slope: float = 0.0,
    dropout_p: float = 0.0,
    concat: bool = False,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...] | None:
    r"""Attention among linear projections of one node set, under one node of autograd.

    With :math:`Y_l = X W_l^T + b_l`: for "dot" the first three are query, key and value of :func:`dot_attention`, for
    "gatv2" the first two are source and target rows of :func:`gatv2_attention`. One product makes them side by side,
    and kernels read them and write their gradients there, so that a small graph takes few launches.

    Args:
        graph: The edges, among N nodes.
        score: "dot" or "gatv2".
        x: Shape [N, F].
        weights: Each [H * C, F], all of one dtype: that of ``x`` unless ``dtype`` is given.
        biases: As many, each [H * C], or none.
        heads: The number H of heads.
        parameter: The vector of "gatv2", as there.
        scale: The factor of "dot".
        negative_slope: As in :func:`gatv2_attention`.
        dropout_p: Probability that an attention weight becomes 0.
        concat: Return the heads side by side.
        dtype: That of the projections, to which ``x``, weights and biases are cast; None for their own.
        out_dtype: That of the attention, float32 or that of the projections; None for the latter.

    Returns:
        The attention [N, H, C], with ``concat`` [N, H * C], then of each further layer [N, H * C]. None where the
        projections are better made apart: rows are many, a tensor is traced or a subclass, no kernel takes them, or a
        pass is none of `row_split`.

    Raises:
        TypeError: ``parameter`` has the wrong dtype.
        ValueError: A range, or the shape or device of ``parameter``, does not fit.
    """
    vectors = () if parameter is None else (parameter,)
    if x.shape[0] > gemm.MAX_ROWS or not is_eager_on(graph):
        return None
    numbers = scale, negative_slope, dropout_p
    trained = needs_grad((x, *vectors, *weights, *biases))
    known = (x, weights[0], *vectors)
    if not all(map(is_plain, known)) or (dtype is None and x.dtype is not weights[0].dtype):
        return None
    described = [part for tensor in known for part in (tensor.shape, tensor.dtype, tensor.device)]
    signature = ("projected", score, numbers, heads, len(weights), trained, dtype, *described)
    prepared = recall(graph, signature)
    if prepared is None:
        prepared = _prepared(graph, score, x, weights, parameter, heads, numbers, trained, dtype or x.dtype)
        if prepared is None:
            return None
        if prepared.final:
            remember(graph, signature, prepared)
    if prepared.shape.interleaved is None:
        return None
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    vector = parameter if parameter is None or parameter.dtype is torch.float32 else parameter.float()
    is_wide = out_dtype is not None and out_dtype is not prepared.problem.dtype
    if trained:
        results: tuple[Tensor, ...] = _apply(
            (prepared, graph, concat, numbers, is_wide), seed, x, vector, *weights, *biases
        )
        return results
    x = x if x.dtype is prepared.problem.dtype else x.to(prepared.problem.dtype)
    rows, _ = gemm.interleaved(x, weights, biases)
    out, *kept = prepared.forward(TRAIN if is_wide else INFER, concat, False, graph)(
        graph, rows, None, None, vector, None, seed, *numbers
    )
    if is_wide:
        out = kept[1]
    return out, *_others(prepared, rows)


def _prepared(
    graph: Graph,
    score: str,
    x: Tensor,
    weights: Sequence[Tensor],
    parameter: Tensor | None,
    heads: int,
    numbers: tuple[float, float, float],
    trained: bool,
    dtype: torch.dtype,
) -> PreparedOp | None:
    """Return the prepared op of checked arguments of :func:`projected_attention`; without a layout where a pass is none
    of the fallback's schedule.
    """
    scale, slope, dropout = numbers
    channels, rest = divmod(weights[0].shape[0], heads)
    op: Op = op_by_role(SCORES[score])
    value = x.new_empty((0, heads, channels), dtype=dtype)
    by_name = {"value": value}
    problem = op.problem(by_name, {"dropout": dropout}, heads, channels)
    if rest or FAMILY.unsupported(problem) or not graph.num_src == graph.num_dst == x.shape[0] > 0:
        return None
    check_range("scale", scale)
    check_range("negative_slope", slope)
    check_range("dropout_p", dropout, 0.0, 1.0)
    present = frozenset(PLACES[score])
    if parameter is not None:
        vector = parameter.squeeze(0) if parameter.dim() == 3 else parameter
        check_dtype("att", vector, FEATURE_DTYPES)
        if list(vector.shape) != [heads, channels]:
            raise ValueError(f"'att' needs shape [H={heads}, C={channels}] (got {list(vector.shape)})")
        if vector.device != graph.device:
            raise ValueError(f"'att' needs device {graph.device} (got {vector.device})")
        present |= {"parameter"}
    prepared = op.prepared(problem, graph, heads, channels, present)
    passes, is_final = prepared.passes(FORWARD, frozenset(), graph)
    if trained:
        backward, backward_is_final = prepared.passes(BACKWARD, frozenset(), graph)
        passes, is_final = (*passes, *backward), is_final and backward_is_final
    if any(each.plan.schedule != FAMILY.fallback for each in passes):
        return prepared
    places = tuple(PLACES[score].items())
    layout = Interleaved(len(weights), places, heads, channels, dtype.itemsize)
    projected = PreparedOp(op, problem, graph, heads, channels, present, (), layout)
    projected.final = projected.final and is_final
    return projected
