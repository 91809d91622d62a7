"""The schedule `smem`: the kernels of `row_split` on batches of small graphs, which stay on one multiprocessor.

A thread block owns a range of nodes that no edge leaves, copies what its rows gather to shared memory, and takes its
rows as `row_split` does: a row of features travels once, however many edges read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import ClassVar

from pyg_dfgnn.dispatch.attention import row_split as rows
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import counted, layout
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import NodeRanges, diagonal_blocks, node_ranges
from pyg_dfgnn.statements.tuning import SmemLayout

passes_share_buffers = False
deterministic = True
refillable = False
specs = rows.specs

MAX_DEGREE = 512
"""Longest row that one group of lanes may take alone."""
_RESERVED = 1024
"""Shared memory that the system takes of each block."""


@dataclass(frozen=True)
class SmemPlan:
    """One pass over ranges of nodes, a thread block each.

    Attributes:
        constants: What the kernel is specialised by.
        bound: What the ranges are packed for (see :class:`~pyg_dfgnn.graph.node_ranges.NodeRanges`).
        most_nodes: Nodes of the longest range.
        shared_bytes: Dynamic shared memory of a block.
    """

    constants: Mapping[str, int] = field(hash=False)
    bound: int
    most_nodes: int
    shared_bytes: int
    schedule: ClassVar[str] = "smem"

    @property
    def max_edges(self) -> int:
        """Longest row: none is split."""
        return MAX_DEGREE

    def __str__(self) -> str:
        place = "through the L1 cache"
        if self.constants["IN_SHARED"]:
            place = f"in {self.shared_bytes} bytes of shared memory"
        warps = counted(self.constants["WARPS"], "warp")
        return f"{layout(self.constants)}, {warps} for up to {self.most_nodes} nodes {place}"


def node_bytes(problem: AttentionProblem, direction: str) -> int:
    """Shared memory per node: the gathered rows of features, numbers and records per head, and where its row ends."""
    scalars = 4 * problem.heads if problem.record.node_scalars else 0
    records = 16 * problem.heads if direction == "sources" else 0
    return rows.gathers(problem, direction) * problem.row_bytes + scalars + records + 4


def shared_bytes(problem: AttentionProblem, direction: str, ranges: NodeRanges) -> int:
    """Dynamic shared memory of a block with copies; each of up to six arrays starts at a multiple of 16 bytes."""
    return ranges.most_nodes * node_bytes(problem, direction) + 4 * ranges.most_edges + 4 + 6 * 16


def _static_bytes(problem: AttentionProblem, direction: str, c: Mapping[str, int]) -> int:
    """Shared memory that the kernel takes whatever the ranges: sums of the gradient of a vector parameter."""
    if not problem.record.parameter or direction != "targets":
        return 0
    return 4 * c["WARPS"] * c["HEAD_LANES"] * c["HEAD_SLOTS"] * c["LANE_HEADS"] * c["LANE_VECS"] * c["VEC"]


def _ranges(problem: AttentionProblem, direction: str, graph: Graph) -> NodeRanges | None:
    """The ranges of the pass: as long as lets the planned number of blocks share a multiprocessor, if any do."""
    capacity = gpu_of(problem.device).shared_bytes + _RESERVED
    constants, per_node = constants_of(problem, direction), node_bytes(problem, direction)
    for blocks in range(constants["MIN_BLOCKS"], 0, -1):
        room = capacity // blocks - _RESERVED - _static_bytes(problem, direction, constants)
        ranges = node_ranges(graph, room // per_node)
        # What the edges take is known only now.
        while ranges is not None and (excess := shared_bytes(problem, direction, ranges) - room) > 0:
            ranges = node_ranges(graph, ranges.most_nodes - -(-excess // per_node))
        if ranges is not None:
            return ranges
    return None


def reasons_against(problem: AttentionProblem, direction: str, graph: Graph) -> list[str]:
    """Every reason why the schedule cannot run a pass."""
    reasons = []
    if problem.row_bytes % 4:
        reasons.append(f"rows of {problem.row_bytes} bytes are no multiple of 4")
    lanes = constants_of(problem, direction)
    heads = lanes["HEAD_SLOTS"] * lanes["LANE_HEADS"]
    if problem.heads > heads:
        reasons.append(f"a warp takes {heads} heads at once, not {problem.heads}")
    if graph.num_edges == 0:
        reasons.append("the graph has no edges")
    longest = max(graph.csr.max_degree, graph.csc.max_degree if direction == "sources" else 0)
    if longest > MAX_DEGREE:
        reasons.append(f"a row has {longest} edges, a warp takes up to {MAX_DEGREE}")
    if reasons:
        return reasons
    segments = diagonal_blocks(graph)
    if segments is None:
        return ["sources and targets are not the same nodes"]
    if _ranges(problem, direction, graph) is None:
        needed = segments.longest * node_bytes(problem, direction)
        limit = gpu_of(problem.device).shared_bytes
        return [f"{segments.longest} nodes with edges between them need {needed} bytes and more, a block has {limit}"]
    return []


# By how many powers of two a maximum may grow before sums are scaled to it: that spares multiplications, but won only
# for dot products of several heads in 16 bits.
_LAZY = 8


def _layout(problem: AttentionProblem, direction: str) -> SmemLayout:
    tuning, itemsize = problem.record.smem_tuning(direction), problem.dtype.itemsize
    if itemsize == 4 and tuning.narrow_layout is not None and _is_narrow(problem):
        return tuning.narrow_layout
    layout = tuning.layouts[itemsize == 2]
    return tuning.head_layouts.get(itemsize, layout) if problem.heads > 1 else layout


def _is_narrow(problem: AttentionProblem) -> bool:
    """Whether heads of four loads fill a warp, as 8 of 16 channels do in float32."""
    return problem.heads == 8 and problem.row_bytes == 32 * 16 and not problem.edge and not problem.dropout


@cache
def constants_of(problem: AttentionProblem, direction: str) -> Mapping[str, int]:
    """Return the constants that the kernel of a pass is specialised by."""
    loads, unroll, warps, blocks = _layout(problem, direction)
    lanes = rows.fitting_lanes(problem, loads, wide=False)
    whole = problem.channels == lanes["HEAD_LANES"] * lanes["LANE_VECS"] * lanes["VEC"]
    if lanes["LANE_HEADS"] * lanes["LANE_VECS"] > loads or not whole or problem.edge or problem.dropout:
        # More registers than were timed.
        warps, blocks = 8, 1
    # As timed, these are faster through the L1 cache, and all others slower.
    full = direction == "forward" and problem.dtype.itemsize == 4 and problem.heads == 1
    record, tuning = problem.record, problem.record.smem_tuning(direction)
    near = full and tuning.through_l1
    norms = direction == "forward" and record.node_scalars == "inverse_norm"
    lazy = direction == "forward" and problem.dtype.itemsize == 2 and problem.heads > 1 and tuning.lazy
    constants = {
        **rows.pass_constants(problem, direction, wide=False),
        **lanes,
        "UNROLL": unroll,
        "WARPS": warps,
        "MIN_BLOCKS": blocks,
        "SMEM": 1,
        "IN_SHARED": int(not near),
        "NORMS": int(norms),
        **({"LAZY": _LAZY} if lazy else {}),
    }
    return MappingProxyType(constants)


def plan_pass(problem: AttentionProblem, direction: str, graph: Graph) -> SmemPlan:
    """The pass of one direction."""
    ranges = _ranges(problem, direction, graph)
    assert ranges is not None
    constants = constants_of(problem, direction)
    shared = 0
    if constants["IN_SHARED"]:
        shared = shared_bytes(problem, direction, ranges)
    elif constants["NORMS"]:
        shared = 4 * problem.heads * ranges.most_nodes
    return SmemPlan(constants, ranges.bound, ranges.most_nodes, shared)


SHARED_BYTES_PER_S = 25e12
NEAR_BYTES_PER_S = 12e12
"""Rates at which all multiprocessors read shared memory, and their L1 caches."""
UNTIMED = 1.25
"""The same over that of the dot score where layouts follow from registers, not from timings."""


def _is_timed(problem: AttentionProblem, direction: str) -> bool:
    """Whether the layouts come from timings of the score."""
    tuning, itemsize = problem.record.smem_tuning(direction), problem.dtype.itemsize
    if problem.heads == 1:
        return itemsize in tuning.timed
    return itemsize in tuning.timed_heads or (itemsize == 4 and tuning.timed_narrow and _is_narrow(problem))


def _untimed(problem: AttentionProblem, direction: str, c: Mapping[str, int]) -> float:
    """Return the factor of instructions where their ratio to `row_split` is from timings of other layouts, else 1."""
    if _is_timed(problem, direction):
        return 1.0
    known = (
        problem.record.smem_tuning(direction).two_loads
        if rows.fits_whole_heads(problem) and c["WARP_ROWS"] > 1
        else None
    )
    return UNTIMED if known is None else known


def cost(problem: AttentionProblem, direction: str, graph: Graph, chosen: SmemPlan, gpu: Gpu) -> Cost:
    """Estimated time of the pass: as `row_split`, but gathers come from shared memory.

    Fewer blocks on a multiprocessor than the registers allow hide less of what each of them waits for.
    """
    side = graph.side(direction)
    c = chosen.constants
    fitting = (gpu.shared_bytes + _RESERVED) // (chosen.shared_bytes + _RESERVED)
    waiting = max(1.0, c["MIN_BLOCKS"] / fitting) ** (1 / 3)
    gathered = side.num_edges * rows.gathers(problem, direction) * problem.row_bytes
    traffic_bytes = problem.record.node_tensors(direction) * side.num_rows * problem.row_bytes + 4 * side.num_edges
    issued = rows.issued(direction, problem, side, c) * _untimed(problem, direction, c)
    return Cost(
        {
            "memory": traffic_bytes / gpu.memory_bytes_per_s,
            "gathers": gathered / (SHARED_BYTES_PER_S if c["IN_SHARED"] else NEAR_BYTES_PER_S),
            "instructions": problem.record.smem_tuning(direction).instructions
            * waiting
            * issued
            / gpu.instructions_per_s,
            **rows.waits_for_edges(problem, side.num_edges, c, min(c["MIN_BLOCKS"], fitting), gpu),
        },
        {"launch": gpu.launch_s},
    )
