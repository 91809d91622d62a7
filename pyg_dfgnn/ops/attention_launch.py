"""The launches behind the attention operators: what runs on one graph, prepared once and kept with it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import AttentionProblem, Pass, norm_constants, plan
from pyg_dfgnn.graph import Adjacency, Chunks, Graph
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Argument, Kernel, addresses, launch
from pyg_dfgnn.settings import Settings, current


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


def _aligned_all(inputs: Inputs) -> list[Any]:
    return [aligned(a) if isinstance(a, Tensor) else a for a in inputs]


def empty_as(tensor: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the same shape, dtype and device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _states(count: int, elements: int, device: torch.device) -> Tensor | None:
    return torch.empty(count * elements, dtype=torch.float32, device=device) if count else None


@cache
def _kernel(spec: Spec, entry: str) -> Kernel:
    return Kernel(spec, entry)


class Walk:
    """The kernels of one pass over one side of a graph, with the arguments that all its launches share."""

    def __init__(self, entry: str, chosen: Pass, side: Adjacency, num_columns: int) -> None:
        self.chosen = chosen
        self.num_rows = side.num_rows
        constants = chosen.constants
        spec = Spec(f"attention/{entry.removeprefix('attention_')}.cu", tuple(constants.items()))
        self.kernel = _kernel(spec, entry)
        self.merge = _kernel(spec, f"{entry}_merge")
        self.items_per_block = constants["WARPS"] * constants["WARP_ROWS"]
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)
        self.chunks: Sequence[Chunks | None]
        if chosen.blocks == 1:
            self.chunks = [side.chunks(chosen.max_edges)]
            self.arrays = (side.ptr, side.index, side.edge_id)
        else:
            swept = side.column_blocks(chosen.blocks, chosen.max_edges, num_columns)
            self.chunks = swept.chunks
            self.arrays = (swept.ptr, swept.index, swept.edge_id)
        self.max_chunks = max((c.num_chunks for c in self.chunks if c is not None), default=0)
        self.sweeps = [self._arguments(block, chunks) for block, chunks in enumerate(self.chunks)]
        # Thread blocks of one sweep, the same for all so that per-block results have a fixed place.
        self.grid = (-(-(self.num_rows + self.max_chunks) // self.items_per_block), self.head_groups, 1)

    def _arguments(self, block: int, chunks: Chunks | None) -> tuple[Any, ...]:
        listed = (None, None, None) if chunks is None else (chunks.row, chunks.begin, chunks.end)
        count = 0 if chunks is None else chunks.num_chunks
        return addresses(
            (*self.arrays, *listed, self.num_rows, count, self.chosen.max_edges, block, self.chosen.blocks)
        )

    def run(
        self,
        device: torch.device,
        elements: int,
        inputs: Sequence[Argument],
        outputs: Sequence[Argument],
        merge_inputs: Sequence[Argument],
        merge_outputs: Sequence[Argument],
    ) -> None:
        """Sweep all column blocks; heavy rows are merged after each.

        Args:
            device: Where to run.
            elements: fp32 numbers of the state of one row or chunk.
            inputs: What the kernel reads, after the adjacency.
            outputs: What it writes, before the two state buffers.
            merge_inputs: What the merge kernel reads, after the chunks' states.
            merge_outputs: What it writes, before the rows' states.
        """
        partial = _states(self.max_chunks, elements, device)
        carry = _states(self.num_rows, elements, device) if self.chosen.blocks > 1 else None
        arguments = addresses((*inputs, *outputs, partial, carry))
        for block, (sweep, chunks) in enumerate(zip(self.sweeps, self.chunks, strict=True)):
            launch(self.kernel, self.grid, self.threads, sweep + arguments, device)
            if chunks is not None:
                grid = (-(-chunks.num_heavy // self.items_per_block), self.head_groups, 1)
                sizes = (chunks.num_heavy, chunks.num_chunks, self.num_rows, block, self.chosen.blocks)
                merge = (chunks.heavy_row, chunks.heavy_ptr, *sizes, partial, *merge_inputs, *merge_outputs, carry)
                launch(self.merge, grid, self.threads, addresses(merge), device)


class Kernels:
    """The attention kernels for one problem on one graph. Backward passes are prepared when first needed."""

    def __init__(self, problem: AttentionProblem, graph: Graph, settings: Settings) -> None:
        self.problem = problem
        self.settings = settings
        self.forward = Walk("attention_forward", plan(problem, graph).forward, graph.csr, graph.num_src)
        self._backward: tuple[Walk, Walk] | None = None
        self._weights: Walk | None = None

    @staticmethod
    def of(problem: AttentionProblem, graph: Graph) -> "Kernels":
        """The kernels kept with the graph, planned on first use."""
        settings = current()
        key = (problem, settings)
        found = graph.plans.get(key)
        if found is None:
            found = graph.plans[key] = Kernels(problem, graph, settings)
            graph.reset_streams()
        return found

    def backward(self, graph: Graph) -> tuple[Walk, Walk]:
        """The passes over targets and over sources."""
        if self._backward is None:
            chosen = plan(replace(self.problem, needs_grad=True), graph)
            assert chosen.targets is not None and chosen.sources is not None
            self._backward = (
                Walk("attention_backward_targets", chosen.targets, graph.csr, graph.num_src),
                Walk("attention_backward_sources", chosen.sources, graph.csc, graph.num_dst),
            )
            graph.reset_streams()
        return self._backward

    def weights(self, graph: Graph) -> Walk:
        """The pass that writes the weights of all edges; it gathers once, so it is never swept in blocks."""
        if self._weights is None:
            chosen = replace(self.forward.chosen, blocks=1)
            self._weights = Walk("attention_weights", chosen, graph.csr, graph.num_src)
            graph.reset_streams()
        return self._weights


def problem_of(score: str, inputs: Inputs) -> AttentionProblem:
    """The problem that the inputs pose; whether gradients follow does not change the forward pass."""
    value = inputs.value
    _, heads, channels = value.shape
    edge, dropout = inputs.edge is not None, inputs.dropout > 0.0
    return AttentionProblem(score, heads, channels, value.dtype, value.device, edge, dropout, False)


def run_forward(kernels: Kernels, inputs: Inputs, num_dst: int, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output [N_dst, H, C], softmax of the rows [N_dst, H, 2], and with ``exact`` the output in float32 (else empty).

    The softmax holds the maximum of the base-2 logits and the inverse of the sum: ``P = exp2(S2 - max) * inverse``.
    """
    problem, device = kernels.problem, kernels.problem.device
    heads, channels = problem.heads, problem.channels
    out = torch.empty((num_dst, heads, channels), dtype=problem.dtype, device=device)
    softmax = torch.empty((num_dst, heads, 2), dtype=torch.float32, device=device)
    copy = torch.empty((num_dst if exact else 0, heads, channels), dtype=torch.float32, device=device)
    results = (out, softmax, copy if exact else None)
    kernels.forward.run(device, heads * (channels + 2), _aligned_all(inputs), results, (), results)
    return out, softmax, copy


def run_backward(
    kernels: Kernels,
    graph: Graph,
    inputs: Inputs,
    out: Tensor,
    softmax: Tensor,
    grad_out: Tensor,
    same: bool,
    edge_grad: bool,
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
    """
    problem, device = kernels.problem, kernels.problem.device
    score, heads, channels = problem.score, problem.heads, problem.channels
    targets, sources = kernels.backward(graph)
    ready = _aligned_all(inputs)
    target, _, value, target_scalars, source_scalars, parameter = ready[:6]
    out, softmax, grad_out = aligned(out), aligned(softmax), aligned(grad_out)

    def rows(count: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty((count, heads, channels), dtype=dtype, device=device)

    def scalars(count: int) -> Tensor:
        return torch.empty((count, heads), dtype=torch.float32, device=device)

    records = torch.empty((graph.num_dst, heads, 4), dtype=torch.float32, device=device)
    grad_target = scalars(graph.num_dst) if score == "add" else rows(graph.num_dst)
    grad_edge = empty_as(inputs.edge) if edge_grad and inputs.edge is not None else None
    grad_beta = scalars(graph.num_dst) if score == "cosine" else None
    parameter_sums = rows(targets.grid[0] * targets.chosen.blocks, torch.float32) if score == "gatv2" else None
    targets.run(
        device,
        heads * (1 if score == "add" else channels),
        ready,
        (out, softmax, grad_out, records, grad_target, grad_beta, grad_edge, parameter_sums),
        (target, target_scalars, parameter, inputs.scale),
        (grad_target, grad_beta),
    )

    grad_value = rows(graph.num_src)
    grad_key = rows(graph.num_src) if score == "dot" else None
    grad_source = scalars(graph.num_src) if score == "add" else None
    results = (grad_key, grad_value, grad_source, grad_target if same else None)
    sources.run(
        device,
        heads * {"dot": 2 * channels, "cosine": 2 * channels, "add": channels + 1, "gatv2": channels}[score],
        ready,
        (records, grad_out, *results),
        (value, source_scalars, parameter, inputs.scale),
        results,
    )

    grad_parameter = None
    if grad_beta is not None:
        grad_parameter = grad_beta.sum().reshape(1)
    elif parameter_sums is not None:
        grad_parameter = parameter_sums.sum(0)
    return None if same else grad_target, grad_key, grad_value, grad_source, grad_parameter, grad_edge


def run_weights(kernels: Kernels, graph: Graph, inputs: Inputs, softmax: Tensor) -> Tensor:
    """Weights after dropout [E, H] in the order of ``graph.edge_index``."""
    walk = kernels.weights(graph)
    device = kernels.problem.device
    weights = torch.empty((graph.num_edges, kernels.problem.heads), dtype=torch.float32, device=device)
    ready = _aligned_all(inputs)
    launch(walk.kernel, walk.grid, walk.threads, walk.sweeps[0] + addresses((*ready, softmax, weights)), device)
    return weights


@cache
def _norm_kernel(heads: int, channels: int, dtype: torch.dtype) -> tuple[Kernel, dict[str, int]]:
    constants = dict(norm_constants(heads, channels, dtype))
    return _kernel(Spec("attention/norm.cu", tuple(constants.items())), "attention_inverse_norm"), constants


def inverse_norm(x: Tensor) -> Tensor:
    """``1 / max(||x||, 1e-12)`` per row and head, [N, H] in float32, of x [N, H, C]."""
    rows, heads, channels = x.shape
    kernel, constants = _norm_kernel(heads, channels, x.dtype)
    norms = torch.empty((rows, heads), dtype=torch.float32, device=x.device)
    blocks = -(-rows // (constants["WARPS"] * constants["WARP_ROWS"]))
    groups = -(-heads // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
    x = aligned(x)
    launch(kernel, (blocks, groups, 1), (32 * constants["WARPS"], 1, 1), addresses((x, rows, norms)), x.device)
    return norms
