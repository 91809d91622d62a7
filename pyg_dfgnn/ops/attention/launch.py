"""The launches behind the attention operators: what runs on one graph, prepared once and kept with it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.attention.paper import ABLATIONS
from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import (
    BACKWARD,
    FORWARD,
    AttentionProblem,
    Option,
    Pass,
    choose,
    leaves_tangent,
    options,
    with_tangent,
)
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import tuning
from pyg_dfgnn.ops.attention.block_mma import TilesWalk
from pyg_dfgnn.ops.attention.paper import PaperWalk
from pyg_dfgnn.ops.attention.row_split import RowsWalk, node_kernel
from pyg_dfgnn.ops.attention.smem import ResidentWalk
from pyg_dfgnn.settings import Settings, current

_logger = logging.getLogger("pyg_dfgnn")


class Inputs(NamedTuple):
    """What every attention kernel reads, in the order of its parameters.

    ``target`` [N_dst, H, C], ``key`` [N_src, H, C] (dot only) and ``value`` [N_src, H, C] share a dtype; node scalars
    [N, H], ``parameter`` (beta [1] or the attention vector [H, C]) and scalar ``edge`` [E, H] are float32; a vector
    ``edge`` is [E, H, C]; ``seed`` is int64 [1] and present when ``dropout`` > 0.
    """

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


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy whose address allows 16-byte loads."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _ready(inputs: Inputs) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """The tensors contiguous and aligned, and all inputs as the kernels take them.

    The latter are what :func:`~pyg_dfgnn.runtime.launcher.addresses` gives, but no tensor is looked at twice.
    """
    tensors: list[Any] = []
    raw: list[Any] = []
    for tensor in inputs[:8]:
        address = 0
        if tensor is not None:
            address = tensor.data_ptr()
            if address % 16 or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                address = tensor.data_ptr()
        tensors.append(tensor)
        raw.append(address)
    return tensors, (*(raw if inputs.value.is_cuda else tensors), *inputs[8:])


class Walk(Protocol):
    """One pass of a schedule over one graph, ready to launch: made as ``Walk(walk, chosen, graph)``.

    `ready` are the :class:`Inputs` as kernels take them (see :func:`~pyg_dfgnn.runtime.launcher.addresses`), contiguous
    and aligned; the other arguments are named and shaped as in :func:`run_forward` and :func:`run_backward`, and all
    results are written whole, rows without edges as zeros.
    """

    chosen: Any
    """What it runs."""
    parameter_blocks: int
    """Rows that the pass over targets writes of `parameter_sums`."""
    finds_norms: str | None
    """Of which nodes the forward pass computes the inverse norms and writes them to the source scalars (cosine):
    "sources", or "targets" where these share theirs with the sources, or to nothing where there are no scalars; None:
    it reads them."""

    def forward(self, ready: Sequence[Any], out: Tensor, softmax: Tensor | None, exact: Tensor | None) -> None:
        """Write the output and, if given, the softmax of its rows and the output in float32."""

    def targets(
        self,
        ready: Sequence[Any],
        out: Tensor,
        softmax: Tensor,
        grad_out: Tensor,
        records: Tensor,
        grad_target: Tensor,
        grad_beta: Tensor | None,
        grad_edge: Tensor | None,
        parameter_sums: Tensor | None,
    ) -> Tensor | None:
        """Write the gradients of targets and edges, and the records for the pass over sources.

        Args:
            ready: The inputs.
            out: Output of the forward pass, in float32 for 16-bit inputs.
            softmax: The softmax of its rows.
            grad_out: Gradient of the output.
            records: [N_dst, H, 4] in float32: maximum, inverse and delta of each row, and 0.
            grad_target: Gradient of the target, or of its scalars (add).
            grad_beta: Summands [N_dst, H] of the gradient of beta (cosine).
            grad_edge: Gradient of the edge features, if wanted.
            parameter_sums: Summands [parameter_blocks, H, C] of the gradient of the vector (gatv2).

        Returns:
            What the pass over sources of the same schedule needs beside the records.
        """

    def sources(
        self,
        ready: Sequence[Any],
        records: Tensor,
        grad_out: Tensor,
        grad_key: Tensor | None,
        grad_value: Tensor,
        grad_source: Tensor | None,
        grad_target: Tensor | None,
        state: Tensor | None,
    ) -> None:
        """Write the gradients of sources.

        Args:
            ready: The inputs.
            records: From the pass over targets.
            grad_out: Gradient of the output.
            grad_key: Gradient of the key (dot).
            grad_value: Gradient of the value.
            grad_source: Gradient of the source scalars (add).
            grad_target: To add to the gradient of the value, where target and value are one tensor (cosine).
            state: What the pass over targets returned.
        """


SCHEDULES: Mapping[str, Callable[[str, Any, Graph], Walk]] = MappingProxyType(
    {
        "row_split": RowsWalk,
        "smem": ResidentWalk,
        "block_mma": TilesWalk,
        **dict.fromkeys(("smmf", "pmf", *ABLATIONS), PaperWalk),
    }
)
"""The class of each schedule in :data:`pyg_dfgnn.dispatch.attention.CANDIDATES`."""


def walk_of(walk: str, chosen: Pass, graph: Graph) -> Walk:
    """The launches of a pass."""
    return SCHEDULES[chosen.schedule](walk, chosen, graph)


class Kernels:
    """The attention kernels for one problem on one graph. Backward passes are prepared when first needed.

    Attributes:
        projections: Features of a node are this many rows [H, C] apart in memory.
    """

    projections = 1

    def __init__(self, problem: AttentionProblem, graph: Graph, settings: Settings) -> None:
        self.problem = problem
        self.settings = settings
        self.device_type = problem.device.type
        (self.forward,), self.final = self._walks(FORWARD, graph)
        self._backward: tuple[Walk, ...] | None = None
        self._wants_tangent: bool | None = None
        self._tangent: RowsWalk | None = None
        self._weights: RowsWalk | None = None

    def _walks(self, walks: Sequence[str], graph: Graph) -> tuple[tuple[Walk, ...], bool]:
        """The passes of ``walks``, and whether the next call would take the same."""
        problem = self.problem
        if walks == BACKWARD:
            problem = replace(problem, tangent=self.wants_tangent(graph))
        if self.settings.schedule == "autotune":
            tune(problem, graph, walks, self.settings)
        choices = choose(problem, graph, walks, self.settings)
        made = tuple(walk_of(choice.walk, choice.chosen, graph) for choice in choices)
        return made, all(choice.final for choice in choices)

    @staticmethod
    def of(problem: AttentionProblem, graph: Graph) -> "Kernels":
        """The kernels kept with the graph, planned on first use."""
        settings = current()
        key = (problem, settings)
        plans: dict[Any, Any] = graph.derived("plans", dict)
        found = plans.get(key)
        if found is None:
            found = Kernels(problem, graph, settings)
            if found.final:
                plans[key] = found
        return found

    def backward(self, graph: Graph) -> tuple[Walk, ...]:
        """The passes over targets and over sources."""
        found = self._backward
        if found is None:
            found, final = self._walks(BACKWARD, graph)
            if final:
                self._backward = found
        return found

    def side_by_side(self, projections: int, graph: Graph, trained: bool) -> tuple["Kernels", bool]:
        """The same for features that are so many rows apart, but for the weights; these where a pass is none of
        `row_split`.

        Args:
            projections: How many.
            graph: The edges.
            trained: Whether a backward pass may follow.

        Returns:
            The kernels, and whether the next call would take the same.
        """
        passes: list[Any] = [self.forward, *(self.backward(graph) if trained else ())]
        final = self.final and (self._backward is not None or not trained)
        if any(each.chosen.schedule != "row_split" for each in passes):
            return self, final
        made = copy(self)
        made.projections = projections
        made.forward, *backward = [
            RowsWalk(walk, replace(each.chosen, constants={**each.chosen.constants, "PROJECTIONS": projections}), graph)
            for walk, each in zip((*FORWARD, *BACKWARD), passes)
        ]
        made._backward = tuple(backward)
        return made, final

    def weights(self, graph: Graph) -> RowsWalk:
        """The pass that writes the weights of all edges."""
        if self._weights is None:
            self._weights = self._rows_walk("weights", graph)
        return self._weights

    def wants_tangent(self, graph: Graph) -> bool:
        """Whether a forward pass that gradients follow should leave the tangent."""
        if self._wants_tangent is None:
            self._wants_tangent = leaves_tangent(self.problem, graph, self.settings)
        return self._wants_tangent

    def tangent(self, graph: Graph) -> RowsWalk:
        """The forward pass that leaves the tangent."""
        if self._tangent is None:
            self._tangent = self._rows_walk("tangent", graph)
        return self._tangent

    def _rows_walk(self, walk: str, graph: Graph) -> RowsWalk:
        made = RowsWalk(walk, row_split.plan_pass(self.problem, walk, graph), graph)
        return made


def problem_of(score: str, inputs: Inputs) -> AttentionProblem:
    """The problem that the inputs pose; whether gradients follow does not change the forward pass."""
    value = inputs.value
    _, heads, channels = value.shape
    edge, dropout = inputs.edge is not None, inputs.dropout > 0.0
    tf32 = tf32_allowed(value.dtype)
    return AttentionProblem(score, heads, channels, value.dtype, value.device, edge, dropout, False, tf32)


def run_forward(
    kernels: Kernels,
    inputs: Inputs,
    num_dst: int,
    *,
    saved: bool = True,
    exact: bool = False,
    concat: bool = False,
    tangent: RowsWalk | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Output [N_dst, H, C] and what the backward pass needs beside it.

    Args:
        kernels: From the same inputs.
        inputs: What to compute.
        num_dst: Number of targets.
        saved: As :func:`launch_forward` has it, like the others and the result.
        exact: See there.
        concat: Whether the heads of the output are to be side by side, [N_dst, H * C].
        tangent: See there.
    """
    # new_empty costs the host less than torch.empty, and empty_like less than that.
    tensors, ready = _ready(inputs)
    target, heads, channels = tensors[0], kernels.problem.heads, kernels.problem.channels
    if concat:
        out = inputs.value.new_empty((num_dst, heads * channels))
    else:
        out = inputs.value.new_empty((num_dst, heads, channels)) if target is None else torch.empty_like(target)
    return launch_forward(kernels, ready, out, num_dst, saved=saved, exact=exact, tangent=tangent)


def launch_forward(
    kernels: Kernels,
    ready: Sequence[Any],
    out: Tensor,
    num_dst: int,
    *,
    saved: bool = True,
    exact: bool = False,
    tangent: RowsWalk | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Write the output, and make what the backward pass needs beside it.

    Args:
        kernels: From the same inputs.
        ready: The :class:`Inputs` as kernels take them, see :class:`Walk`.
        out: Where the output goes, [N_dst, H, C] or [N_dst, H * C].
        num_dst: Number of targets.
        saved: Whether to give the softmax, which backward and the weights need.
        exact: Whether to give the output in float32 too.
        tangent: The pass to run instead of the planned one, if the derivative is to be given too.

    Returns:
        The output; the softmax of its rows [N_dst, H, 2] in float32, that is the maximum of the base-2 logits and the
        inverse of the sum, ``P = exp2(S2 - max) * inverse``; the output in float32, of its shape, and its derivative in
        the target scalars [N_dst, H, C] in float32. None for what is not asked for.
    """
    heads = kernels.problem.heads
    softmax = out.new_empty((num_dst, heads, 2), dtype=torch.float32) if saved else None
    if tangent is None and not exact:
        kernels.forward.forward(ready, out, softmax, None)
        return out, softmax, None, None
    shape = (num_dst, heads, kernels.problem.channels)
    copy = torch.empty_like(out, dtype=torch.float32) if exact else None
    if tangent is None:
        kernels.forward.forward(ready, out, softmax, copy)
        return out, softmax, copy, None
    derivative = out.new_empty(shape, dtype=torch.float32)
    tangent.forward(ready, out, softmax, copy, derivative)
    return out, softmax, copy, derivative


def run_backward(
    kernels: Kernels,
    graph: Graph,
    inputs: Inputs,
    out: Tensor,
    softmax: Tensor,
    grad_out: Tensor,
    same: bool,
    edge_grad: bool,
    tangent: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (target or its scalars, key, value, source scalars, parameter, edge); None where there is none.

    Args:
        kernels: From the same inputs.
        graph: The edges.
        inputs: As in the forward pass.
        out: Its output; in float32 for 16-bit inputs.
        softmax: The softmax of its rows.
        grad_out: Gradient of the output.
        same: Whether target and value are one tensor, whose gradient is then returned for the value alone.
        edge_grad: Whether the edge features need a gradient.
        tangent: Derivative of the output in the target scalars, if the forward pass left it.
    """
    score = kernels.problem.score
    tensors, ready = _ready(inputs)
    target, key, value, target_scalars, source_scalars, parameter, edge, _ = tensors
    grad_target = torch.empty_like(target_scalars if score == "add" else target)
    # A fixed graph has room for more edges than there are.
    room = torch.zeros_like if graph.is_static else torch.empty_like
    grad_edge = room(edge) if edge_grad and edge is not None else None
    grad_value = torch.empty_like(value)
    grad_key = torch.empty_like(key) if score == "dot" else None
    grad_source = torch.empty_like(source_scalars) if score == "add" else None
    grad_parameter = launch_backward(
        kernels,
        graph,
        ready,
        out,
        softmax,
        grad_out,
        (grad_target, grad_key, grad_value, grad_source, grad_edge),
        same=same,
        parameter=parameter,
        tangent=tangent,
    )
    return None if same else grad_target, grad_key, grad_value, grad_source, grad_parameter, grad_edge


def launch_backward(
    kernels: Kernels,
    graph: Graph,
    ready: Sequence[Any],
    out: Tensor,
    softmax: Tensor,
    grad_out: Tensor,
    grads: Sequence[Any],
    *,
    same: bool = False,
    parameter: Tensor | None = None,
    tangent: Tensor | None = None,
) -> Tensor | None:
    """Write the gradients, and return that of the parameter, which the kernels leave as summands; None where none is.

    Args:
        kernels: From the same inputs.
        graph: The edges.
        ready: The :class:`Inputs` as kernels take them, see :class:`Walk`.
        out: As in :func:`run_backward`, like the softmax and the gradient of the output.
        softmax: See there.
        grad_out: See there.
        grads: Where those of (target or its scalars, key, value, source scalars, edge) go: tensors or addresses.
        same: Whether that of the target is to be added to that of the value.
        parameter: That of the inputs.
        tangent: As in :func:`run_backward`.
    """
    score, heads = kernels.problem.score, kernels.problem.heads
    targets: Any
    targets, sources = kernels.backward(graph)
    out, softmax, grad_out = aligned(out), aligned(softmax), aligned(grad_out)
    grad_target, grad_key, grad_value, grad_source, grad_edge = grads
    records = softmax.new_empty((graph.num_dst, heads, 4))
    grad_beta = softmax.new_empty((graph.num_dst, heads)) if score == "cosine" else None
    sums = None
    if score == "gatv2":
        assert parameter is not None
        sums = parameter.new_empty((targets.parameter_blocks, *parameter.shape))
    state = None
    if tangent is not None and tangent.numel() and targets.chosen.schedule == "row_split":
        targets.nodes(out, aligned(tangent), softmax, grad_out, records, grad_target)
    else:
        state = targets.targets(ready, out, softmax, grad_out, records, grad_target, grad_beta, grad_edge, sums)
    added = grad_target if same else None
    sources.sources(ready, records, grad_out, grad_key, grad_value, grad_source, added, state)
    if grad_beta is not None:
        return grad_beta.sum().reshape(1)
    return None if sums is None else sums.sum(0)


def example(problem: AttentionProblem, graph: Graph) -> Inputs:
    """Random inputs of a problem on a graph, drawn from a generator of their own."""
    device, score, heads = problem.device, problem.score, problem.heads
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def rows(count: int) -> Tensor:
        return normal(count, heads, problem.channels, dtype=problem.dtype)

    has_scalars = score in ("add", "cosine")
    parameter = {"cosine": (1,), "gatv2": (heads, problem.channels)}.get(score)
    edge = normal(graph.num_edges, heads) if score == "add" else rows(graph.num_edges) if problem.edge else None
    return Inputs(
        target=None if score == "add" else rows(graph.num_dst),
        key=rows(graph.num_src) if score == "dot" else None,
        value=rows(graph.num_src),
        target_scalars=normal(graph.num_dst, heads) if has_scalars else None,
        source_scalars=normal(graph.num_src, heads) if has_scalars else None,
        parameter=None if parameter is None else normal(*parameter),
        edge=edge if problem.edge else None,
        seed=torch.zeros(1, dtype=torch.int64, device=device) if problem.dropout else None,
        scale=problem.channels**-0.5,
        slope=0.2,
        dropout=0.5 if problem.dropout else 0.0,
    )


class _Trial:
    """Stands for :class:`Kernels` where one team of walks is timed."""

    def __init__(self, problem: AttentionProblem, walks: Sequence[Any]) -> None:
        self.problem = problem
        self.forward = walks[0]
        self._walks = walks

    def backward(self, graph: Graph) -> Sequence[Any]:
        return self._walks


def measure(
    problem: AttentionProblem, graph: Graph, walks: Sequence[str], found: Sequence[Mapping[str, Option]]
) -> dict[str, dict[str, float]]:
    """Seconds of each walk by each schedule that can run it, on random inputs.

    Args:
        problem: What to compute.
        graph: On which graph.
        walks: ``FORWARD`` or ``BACKWARD``.
        found: The options of each of them.
    """
    seconds: dict[str, dict[str, float]] = {walk: {} for walk in walks}
    inputs = example(problem, graph)
    shape = (graph.num_dst, problem.heads, problem.channels)
    same = problem.score == "cosine" and graph.num_src == graph.num_dst
    for name in dict.fromkeys(name for offers in found for name, option in offers.items() if not option.reasons):
        team = [offers["row_split"] if offers[name].reasons else offers[name] for offers in found]
        timed = [
            tuning.Timed(walk_of(walk, option.chosen, graph), problem.device)
            for walk, option in zip(walks, team, strict=True)
        ]
        try:
            trial: Any = _Trial(problem, timed)
            if walks == FORWARD:
                run_forward(trial, inputs, graph.num_dst)
            else:
                out = torch.zeros(shape, dtype=torch.float32, device=problem.device)
                softmax = torch.zeros((*shape[:2], 2), dtype=torch.float32, device=problem.device)
                grad_out = torch.ones(shape, dtype=problem.dtype, device=problem.device)
                tangent = out if problem.tangent else None
                run_backward(trial, graph, inputs, out, softmax, grad_out, same, problem.edge, tangent)
        except torch.OutOfMemoryError as error:
            _logger.warning("schedule %r is left out of a choice by autotune: %s", name, error)
        for walk, option, result in zip(walks, team, timed, strict=True):
            if option.schedule == name:
                seconds[walk][name] = result.seconds
    return seconds


def tune(problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings) -> None:
    """Time every candidate that can run ``walks``, unless that is remembered or impossible now."""
    problem = with_tangent(problem, graph, walks, settings)
    found = options(problem, graph, walks, settings)
    key = store.key_of(problem, graph, walks, found)
    if key is None or store.recall(key) is not None or not tuning.can_time(graph.device):
        return
    try:
        with torch.inference_mode(False), torch.no_grad():
            seconds = measure(problem, graph, walks, found)
    except torch.OutOfMemoryError as error:
        _logger.warning("nothing is timed for a choice by autotune: %s", error)
        seconds = {walk: {} for walk in walks}
    store.remember(key, seconds)


def run_weights(kernels: Kernels, graph: Graph, inputs: Inputs, softmax: Tensor) -> Tensor:
    """Weights after dropout [E, H] in the order of ``graph.edge_index``."""
    make = softmax.new_zeros if graph.is_static else softmax.new_empty
    weights = make((graph.num_edges, kernels.problem.heads))
    # Named so that copies live until the launch.
    _tensors, ready = _ready(inputs)
    kernels.weights(graph).weights(ready, softmax, weights)
    return weights


def room_for_norms(x: Tensor) -> Tensor:
    """Where a forward pass that finds norms writes those of x [N, H, C], or [N, C] of one head: [N, H], unset."""
    # A part of a shape is another shape, which takes the host half a microsecond.
    return x.new_empty((x.size(0), x.size(1) if x.dim() == 3 else 1), dtype=torch.float32)


def inverse_norm(x: Tensor) -> Tensor:
    """``1 / max(||x||, 1e-12)`` per row and head, [N, H] in float32, of x [N, H, C]."""
    rows, heads, channels = x.shape
    norms = room_for_norms(x)
    kernel = node_kernel("attention/norm.cu", "attention_inverse_norm", heads, channels, x.dtype)
    kernel(rows, x.device, aligned(x), norms)
    return norms
