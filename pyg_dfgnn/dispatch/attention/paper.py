"""The schedules of DF-GNN, `smmf` and `pmf`, their ablations, and the rule by which the paper chooses.

Both take three steps with a mapping of threads of its own each: edge scores (warps share the edges evenly, lanes over
features), softmax (a warp per row, lanes over edges), and the sum of the values (a warp per row, lanes over features).
`smmf`, shared-memory maximisation, fuses all in one kernel whose blocks own :data:`BLOCK_ROWS` rows and keep their
scores in shared memory. `pmf`, parallelism maximisation, has a kernel of its own for the scores of all edges.

Source: Liu et al., "DF-GNN: Dynamic fusion framework for attention graph neural networks on GPUs", LoG 2024, sections 3
and 4, appendix B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import (
    CONVERT,
    LOAD,
    MULTIPLY_ADD,
    ROW,
    SHUFFLE,
    STEP,
    STEP_S,
    stays_near,
)
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import counted, lane_constants, lane_layout
from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.chunks import most_edges
from pyg_dfgnn.statements.spec import Spec

BLOCK_ROWS = 8
"""Consecutive rows of a block of `smmf`, and its warps."""
WARPS = 4
"""Warps of a block of the other kernels: each has a row to itself, or all share one."""
SCORE_BYTES = 4

_GROUP_HEADS = 32
# Edges of the average row from which all warps of a block share it, which keeps super nodes short.
_SHARED_ROW_EDGES = 128
_WARP_EDGES = 128
# Blocks of `smmf` that should fit on a multiprocessor at once before heads are spread over blocks.
_RESIDENT_BLOCKS = 4


@dataclass(frozen=True)
class PaperPlan:
    """One pass of `smmf`, `pmf` or an ablation.

    Attributes:
        schedule: Its name.
        one_kernel: Whether scores stay in shared memory.
        constants: What the kernels are specialised by.
        shared_bytes: Dynamic shared memory of a block.
        warp_edges: Edges of a warp in the kernel that writes scores (`pmf`).
    """

    schedule: str
    one_kernel: bool
    constants: Mapping[str, int] = field(hash=False)
    shared_bytes: int = 0
    warp_edges: int = 0

    def __str__(self) -> str:
        c = self.constants
        lanes = lane_layout(c)
        if self.shared_bytes:
            return f"{lanes}, {counted(c['BLOCK_ROWS'], 'row')} per block, {self.shared_bytes} bytes of shared memory"
        rows = "a warp per row" if c["ROW_WARPS"] == 1 else f"{c['ROW_WARPS']} warps per row"
        return f"{lanes}, {self.warp_edges} edges per warp, then {rows}" if self.warp_edges else f"{lanes}, {rows}"


def _lanes(problem: AttentionProblem, max_heads: int) -> dict[str, int]:
    """Lanes of a feature row with at most `max_heads` heads in a block; the lanes that frees take further edges."""
    lanes = dict(lane_constants(problem.heads, problem.channels, problem.dtype.itemsize, wide=True))
    while lanes["HEAD_SLOTS"] * lanes["LANE_HEADS"] > max_heads:
        if lanes["LANE_HEADS"] > 1:
            lanes["LANE_HEADS"] //= 2
        else:
            lanes["HEAD_SLOTS"] //= 2
            lanes["EDGE_SLOTS"] *= 2
    return lanes


def _constants(problem: AttentionProblem, direction: str, lanes: Mapping[str, int], warps: int) -> dict[str, int]:
    """Constants of the kernels of one pass."""
    lane_bytes = lanes["LANE_HEADS"] * lanes["LANE_VECS"] * lanes["VEC"] * problem.dtype.itemsize
    return {
        **problem.constants,
        **lanes,
        "WARPS": warps,
        "UNROLL": 4 if lane_bytes <= 16 else 2 if lane_bytes <= 32 else 1,
        "MIN_BLOCKS": max(1, _resident_warps(problem, direction, lanes) // warps),
    }


def _resident_warps(problem: AttentionProblem, direction: str, lanes: Mapping[str, int]) -> int:
    """Warps of a multiprocessor that the compiler makes room for, as many as cost no spill; 0 leaves it to itself."""
    if problem.edge or problem.dropout or lanes["LANE_HEADS"] * lanes["LANE_VECS"] > 1:
        return 0
    if direction == "forward":
        return 32
    # 80 registers do not hold two products of 16-bit rows, or of several heads at once.
    is_large = problem.dtype.itemsize == 2 or (problem.record.key and lanes["HEAD_SLOTS"] > 1)
    return 20 if direction == "targets" and is_large else 24


def _score_planes(problem: AttentionProblem, direction: str) -> int:
    """Numbers that `smmf` keeps in shared memory per edge and head: logits, and dP in the pass over targets."""
    return 2 if direction == "targets" and _is_dot(problem) else 1


def _is_dot(problem: AttentionProblem) -> bool:
    """Whether a score is an inner product of two vectors, as the paper's rule asks."""
    return bool(problem.record.target and problem.record.paper)


def _reasons(problem: AttentionProblem) -> list[str]:
    if not problem.record.paper:
        name = problem.score
        return [f"the schedules of the paper keep one number per edge and head, the {name} score takes C in backward"]
    if problem.edge_channels:
        return ["the schedules of the paper have no place for edge features that all heads share"]
    return []


# Warp instructions per edge and head of the lanes over edges.
_SOFTMAX = {"forward": 30.0, "targets": 40.0, "sources": 0.0}
# Share of the instructions' time on top where steps wait for each other, a guess that errs on the slow side.
_WAITING = 0.3
# Warps of a multiprocessor that keep it busy.
_BUSY_WARPS = 24


def _cost(
    problem: AttentionProblem,
    direction: str,
    graph: Graph,
    chosen: PaperPlan,
    gpu: Gpu,
    warps: int,
    share: int,
    scores: int,
) -> Cost:
    """Estimated time of a pass; the terms are those of `row_split`, without sweeps: what the cache misses comes from
    memory.

    Args:
        problem: What is computed.
        direction: Which pass.
        graph: On which graph.
        chosen: How.
        gpu: On which device.
        warps: Warps that fit on a multiprocessor at once.
        share: Edges of a warp in the step of the scores.
        scores: Numbers per edge and head that go to memory or come from it.
    """
    side = graph.side(direction)
    c = chosen.constants
    tuning = problem.record.paper[direction]
    gathers, products, sums, scans = tuning.gathers, tuning.work, tuning.sums, tuning.scans
    kernels = 2 if chosen.warp_edges else 1
    nodes = (2 * side.num_rows + gathers * side.num_cols) * problem.row_bytes
    edges = side.num_edges * (8 * scans + scores * SCORE_BYTES * problem.heads)
    is_near = stays_near(graph, min(gathers, 2) * problem.row_bytes, gpu)
    gathered = 0 if is_near else side.num_edges * gathers * problem.row_bytes
    missed = max(0.0, 1.0 - gpu.cache_bytes / max(1, side.num_cols * problem.row_bytes))
    gather_s = gathered * ((1.0 - missed) / gpu.cache_bytes_per_s + missed / gpu.memory_bytes_per_s)

    heads = c["LANE_HEADS"]
    elements = heads * c["LANE_VECS"] * c["VEC"]
    step = (
        STEP * scans
        + LOAD * gathers * heads * c["LANE_VECS"]
        + CONVERT * (gathers * elements if problem.dtype.itemsize == 2 else 0)
        + MULTIPLY_ADD * products * elements
        + SHUFFLE * sums * heads * (c["HEAD_LANES"].bit_length() - 1)
    )
    groups = -(-c["HEADS"] // (c["HEAD_SLOTS"] * heads))
    issued = groups * (side.num_edges / c["EDGE_SLOTS"] * step + side.num_rows * ROW[direction] * scans)
    issued += side.num_edges * problem.heads / 32 * _SOFTMAX[direction]
    # The scores, the two scans of the softmax, the sum.
    in_flight = c["UNROLL"] * c["EDGE_SLOTS"]
    chain = -(-share // in_flight) + (2 if share else 0) - (-side.max_degree // (c["ROW_WARPS"] * in_flight))
    if share:
        issued *= 1.0 + _WAITING
    # Few warps leave everything waiting.
    idle = max(1.0, _BUSY_WARPS / warps)
    return Cost(
        {
            "memory": idle * (nodes + edges) / gpu.memory_bytes_per_s,
            "gathers": idle * gather_s,
            "instructions": idle * issued / gpu.instructions_per_s,
            "longest row": chain * STEP_S,
        },
        {"launches": kernels * gpu.launch_s},
    )


def stem_of(direction: str, plan: PaperPlan) -> str:
    """Return the stem of the kernel source of a pass; its main entry is called the same."""
    if direction == "sources":
        return "paper_sources"
    return f"{'smmf' if plan.one_kernel else 'pmf'}_{direction}"


def _specs(problem: AttentionProblem, direction: str, plan: PaperPlan) -> list[Spec]:
    """Return what is compiled for a planned pass."""
    constants = tuple(plan.constants.items())
    return [Spec(f"attention/{stem_of(direction, plan)}.cu", constants, texts=problem.record.texts)]


@dataclass(frozen=True)
class Smmf:
    """All steps in one kernel, scores in shared memory; an ablation where the forward pass lacks an optimisation.

    Attributes:
        name: Name of the schedule.
        balanced_scores: The warps of a block share its edges evenly; else each scores its own row, feature-parallel.
        edge_softmax: Lanes over edges, each exponential computed once; else every lane computes all.
        vector_gather: 16-byte loads with several edges in flight; else scalar loads, an edge at a time.
    """

    name: str = "smmf"
    balanced_scores: bool = True
    edge_softmax: bool = True
    vector_gather: bool = True
    passes_share_buffers = True
    deterministic = True
    refillable = False
    specs = staticmethod(_specs)

    def reasons_against(self, problem: AttentionProblem, direction: str, graph: Graph) -> list[str]:
        """Every reason why it cannot run a pass: the scores of one head must fit in shared memory."""
        reasons = _reasons(problem)
        if direction != "sources":
            needed = most_edges(graph, graph.csr, BLOCK_ROWS) * _score_planes(problem, direction) * SCORE_BYTES
            room = gpu_of(problem.device).shared_bytes
            if needed > room:
                reasons.append(
                    f"the scores of {BLOCK_ROWS} rows take up to {needed} bytes of shared memory, the device has {room}"
                )
        return reasons

    def plan_pass(self, problem: AttentionProblem, direction: str, graph: Graph) -> PaperPlan:
        """The pass of one direction, with as many heads in a block as leave room for several blocks."""
        if direction == "sources":
            return _sources(self.name, problem, graph)
        head_bytes = most_edges(graph, graph.csr, BLOCK_ROWS) * _score_planes(problem, direction) * SCORE_BYTES
        comfortable = gpu_of(problem.device).shared_bytes // _RESIDENT_BLOCKS
        lanes = _lanes(problem, max(1, min(_GROUP_HEADS, comfortable // max(1, head_bytes))))
        constants = {**_constants(problem, direction, lanes, BLOCK_ROWS), "BLOCK_ROWS": BLOCK_ROWS, "ROW_WARPS": 1}
        if direction == "forward":
            constants |= _switches(self.balanced_scores, self.edge_softmax, self.vector_gather)
        shared_bytes = head_bytes * lanes["HEAD_SLOTS"] * lanes["LANE_HEADS"]
        return PaperPlan(self.name, True, MappingProxyType(constants), shared_bytes)

    def cost(self, problem: AttentionProblem, direction: str, graph: Graph, chosen: PaperPlan, gpu: Gpu) -> Cost:
        """Estimated time of the pass; shared memory decides how many warps run at once."""
        if direction == "sources":
            return _cost(problem, direction, graph, chosen, gpu, _BUSY_WARPS, 0, 2)
        warps = BLOCK_ROWS * max(1, min(64 // BLOCK_ROWS, gpu.shared_bytes // max(1, chosen.shared_bytes)))
        share = -(-most_edges(graph, graph.csr, BLOCK_ROWS) // BLOCK_ROWS)
        return _cost(problem, direction, graph, chosen, gpu, warps, share, 2 if direction == "targets" else 0)


@dataclass(frozen=True)
class Pmf:
    """Scores of all edges in one kernel, softmax and sum in another: any degree, more memory traffic."""

    name: str = "pmf"
    passes_share_buffers = True
    deterministic = True
    refillable = False
    specs = staticmethod(_specs)

    def reasons_against(self, problem: AttentionProblem, direction: str, graph: Graph) -> list[str]:
        """Every reason why it cannot run a pass; no graph is too large."""
        return _reasons(problem)

    def plan_pass(self, problem: AttentionProblem, direction: str, graph: Graph) -> PaperPlan:
        """The pass of one direction."""
        if direction == "sources":
            return _sources(self.name, problem, graph)
        constants = _constants(problem, direction, _lanes(problem, _GROUP_HEADS), WARPS) | _row_warps(graph.csr)
        step = constants["UNROLL"] * constants["EDGE_SLOTS"]
        # A share that still fills the device, in whole steps.
        share = graph.num_edges // (64 * gpu_of(problem.device).multiprocessors)
        warp_edges = -(-max(step, min(_WARP_EDGES, share)) // step) * step
        if direction == "forward":
            constants |= _switches(True, True, True)
        return PaperPlan(self.name, False, MappingProxyType(constants), warp_edges=warp_edges)

    def cost(self, problem: AttentionProblem, direction: str, graph: Graph, chosen: PaperPlan, gpu: Gpu) -> Cost:
        """Estimated time of the pass: scores are written, replaced and read."""
        scores = 2 if direction == "sources" else 4 * _score_planes(problem, direction)
        return _cost(problem, direction, graph, chosen, gpu, _BUSY_WARPS, chosen.warp_edges, scores)


def _row_warps(side: Adjacency) -> dict[str, int]:
    return {"ROW_WARPS": WARPS if side.num_edges >= _SHARED_ROW_EDGES * side.num_rows > 0 else 1}


def _sources(schedule: str, problem: AttentionProblem, graph: Graph) -> PaperPlan:
    constants = _constants(problem, "sources", _lanes(problem, _GROUP_HEADS), WARPS) | _row_warps(graph.csc)
    return PaperPlan(schedule, False, MappingProxyType(constants))


def _switches(balanced_scores: bool, edge_softmax: bool, vector_gather: bool) -> dict[str, int]:
    return {"BALANCED": int(balanced_scores), "EDGE_SOFTMAX": int(edge_softmax), "VECTOR_GATHER": int(vector_gather)}


smmf = Smmf()
pmf = Pmf()


_ABLATIONS = (
    Smmf("feature_parallel", False, False, False),
    Smmf("feature_parallel+scores", True, False, False),
    Smmf("feature_parallel+scores+softmax", True, True, False),
)
ABLATIONS: Mapping[str, Smmf] = MappingProxyType({each.name: each for each in _ABLATIONS})
"""`smmf` with optimisations of its forward pass off, by name: `feature_parallel` has none of them (Figure 11)."""


def rule(
    problem: AttentionProblem, graph: Graph, directions: Sequence[str] = ("forward",), capacity_bytes: int | None = None
) -> tuple[str, str]:
    """The paper's choice between `smmf` and `pmf`, and why.

    `pmf` if and only if the score is a dot and the largest degree is at least ``capacity / bytes per element``;
    `smmf` otherwise, but for scores that do not fit in shared memory, which take `pmf` too.

    Args:
        problem: What is computed.
        graph: On which graph.
        directions: The passes that are chosen for.
        capacity_bytes: Shared memory that a row may fill, of which the paper does not say how much that is; by default
            what a block may opt in to, divided by its rows.

    Source: section 4.3 of the paper.
    """
    if capacity_bytes is None:
        capacity_bytes = gpu_of(problem.device).shared_bytes // BLOCK_ROWS
    degree, threshold = graph.csr.max_degree, capacity_bytes // SCORE_BYTES
    facts = f"largest degree {degree}, super nodes from {threshold} = {capacity_bytes} / {SCORE_BYTES} bytes"
    if _is_dot(problem) and degree >= threshold:
        return pmf.name, f"super nodes and a dot score: {facts}"
    for direction in directions:
        for reason in smmf.reasons_against(problem, direction, graph):
            return pmf.name, f"not smmf: {reason}"
    return smmf.name, f"no super nodes: {facts}" if degree < threshold else f"super nodes, but no dot score: {facts}"
