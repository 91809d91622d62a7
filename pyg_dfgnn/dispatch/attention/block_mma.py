"""The schedule `block_mma`: dense blocks of the adjacency on tensor cores, for batches of small or locally dense
graphs.

A thread block owns a window of rows and passes over the columns that these rows meet, whose features it copies to
shared memory once for all of them. Scores of missing edges are computed and masked, so it pays where blocks are filled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch

from pyg_dfgnn.dispatch.attention import row_split as rows
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.graph import Graph, block_sparse
from pyg_dfgnn.graph.block_sparse import BLOCK
from pyg_dfgnn.graph.node_ranges import TILE_ROWS, diagonal_blocks
from pyg_dfgnn.statements.spec import Spec

passes_share_buffers = False
deterministic = True
refillable = False

MAX_CHANNELS = 128
"""Channels per head whose sums fit in the registers of a warp."""
MIN_FILL = 0.02
"""Share of the possible edges of the blocks below which they are not built."""
MAX_SEGMENT = 2048
"""Longest segment whose nodes are taken as columns whole."""
_MAX_UNFOLDED = 192
_MAX_FACTORED = 512
"""Columns of a window whose factors of the add score are kept in shared memory."""


@dataclass(frozen=True)
class BlockMmaPlan:
    """One pass over the dense blocks of a side.

    Attributes:
        constants: What the kernel is specialised by.
        compact: Whether the columns of a window are those that occur, or all nodes of its segment.
        shared_bytes: Dynamic shared memory of a block.
        fill: Edges over the area of the blocks.
    """

    constants: Mapping[str, int] = field(hash=False)
    compact: bool
    shared_bytes: int
    fill: float
    schedule: ClassVar[str] = "block_mma"

    @property
    def rows(self) -> int:
        """Rows of a window."""
        return TILE_ROWS * self.constants["WARPS"]

    def __str__(self) -> str:
        c = self.constants
        columns = "columns that occur" if self.compact else "nodes of the segment"
        product = "" if c["STORAGE"] else ", three tf32 products each" if c["SPLIT"] else ", tf32 products"
        return (
            f"windows of {self.rows} rows over the {columns}, {c['STEP']} at a time, {self.fill:.1%} of the bits set, "
            f"{self.shared_bytes} bytes of shared memory{product}"
        )


def _splits(problem: AttentionProblem) -> bool:
    """Whether a product takes three: float32 that must not be rounded."""
    return problem.dtype == torch.float32 and not problem.tf32


@cache
def _window_warps(histogram: tuple[tuple[int, int], ...], choices: tuple[int, ...]) -> int:
    """Warps of a block: those that idle least when segments are cut in windows of their rows."""

    def taken(warps: int) -> int:
        return sum(count * -(-units // warps) * warps * units for units, count in histogram)

    return min(choices, key=taken)


def _window(problem: AttentionProblem, graph: Graph) -> tuple[int, bool]:
    """Warps of a window, and whether its columns are listed one by one."""
    # Split products and several heads fill the registers: small blocks fit more evenly. From timings of 2, 3, 4, 5, 8
    # on an H200.
    choices = (2,) if _splits(problem) or block_heads(problem, "forward") > 1 else (4, 5)
    # A row with more edges lies in a longer segment: then the edges need no scan.
    segments = diagonal_blocks(graph) if graph.csr.max_degree <= MAX_SEGMENT else None
    if segments is None or segments.longest > MAX_SEGMENT:
        return choices[0], True
    return _window_warps(segments.histogram, choices), False


def reasons_against(problem: AttentionProblem, direction: str, graph: Graph) -> list[str]:
    """Every reason why the schedule cannot run a pass."""
    reasons = []
    if direction not in problem.record.block_mma:
        reasons.append(f"the {problem.score} score is no matrix product")
    if problem.edge:
        reasons.append("blocks of bits have no place for edge features")
    if problem.dropout:
        reasons.append("blocks of bits have no edge ids to draw the dropout mask by")
    if problem.channels > MAX_CHANNELS:
        reasons.append(f"{problem.channels} channels per head, blocks take up to {MAX_CHANNELS}")
    if problem.channels * problem.dtype.itemsize % 16:
        reasons.append(f"{problem.channels} channels of {problem.dtype} are no multiple of 16 bytes")
    if graph.num_edges == 0:
        reasons.append("the graph has no edges")
    if reasons:
        return reasons
    warps, compact = _window(problem, graph)
    if compact and _splits(problem):
        # On an H200 at best a little faster in forward, slower in backward, and less accurate on a hub of many columns.
        return ["listed columns do not pay in full float32: it takes segments of nodes, 16 bits or TF32"]
    fill = block_sparse.fill(graph, TILE_ROWS * warps, compact)
    if fill < MIN_FILL:
        return [f"{fill:.2%} of the bits of its blocks would be set, at least {MIN_FILL:.0%} are needed"]
    if not block_sparse.is_simple(graph):
        return ["some edge occurs twice, which a bit cannot tell"]
    needed = shared_bytes(problem, direction, graph, _constants(problem, direction, graph, warps, compact))
    limit = gpu_of(problem.device).shared_bytes
    if needed > limit:
        return [f"a block needs {needed} bytes of shared memory, the device has {limit}"]
    return []


def _step(problem: AttentionProblem, direction: str) -> int:
    """Columns at a time, from timings of 16 and 32 on an H200: 32 unless shared memory or registers run out."""
    several = block_heads(problem, direction) > 1
    if direction == "forward" and several and not _splits(problem):
        return 16
    record = problem.record
    scaled = record.node_scalars == "inverse_norm"
    if problem.dtype.itemsize == 2:
        crowded = scaled and (direction == "sources" or (direction == "targets" and several))
        return 16 if crowded else 32
    if record.key:
        return (
            32 if problem.tf32 and (direction == "forward" or (direction == "targets" and _is_sixteen(problem))) else 16
        )
    crowded = direction == "targets" and several and (_splits(problem) or scaled)
    return 16 if direction == "sources" or crowded else 32


def _constants(problem: AttentionProblem, direction: str, graph: Graph, warps: int, compact: bool) -> dict[str, int]:
    segments = None if compact else diagonal_blocks(graph)
    longest = math.inf if segments is None else segments.longest
    factored = (
        {"FACTORED": int(problem.record.has_factors and longest <= _MAX_FACTORED)} if direction == "forward" else {}
    )
    return {
        **problem.constants,
        "SPLIT": int(_splits(problem)),
        "HEADS": problem.heads,
        "BLOCK_HEADS": block_heads(problem, direction),
        "CHANNELS": problem.channels,
        "WARPS": warps,
        "STEP": _step(problem, direction),
        "LISTED": int(compact),
        # What tensor cores cut off stays within the bounds of float32 for some ten steps.
        "FOLD": int(_splits(problem) and segments is not None and longest > _MAX_UNFOLDED),
        **factored,
        "MIN_BLOCKS": max(1, _resident_warps(problem, direction, compact) // warps),
    }


def _resident_warps(problem: AttentionProblem, direction: str, compact: bool) -> int:
    """Warps per multiprocessor that the compiler leaves registers for: as many as cost next to no spills."""
    scalar, several = not problem.record.target, block_heads(problem, direction) > 1
    half, split = problem.dtype.itemsize == 2, _splits(problem)
    if direction == "forward" and problem.record.key and _is_sixteen(problem):
        return 14
    if direction == "forward":
        return 16 if (half and (scalar or several)) or (scalar and several and not split) else 12
    if direction == "targets":
        more = 4 if several and (half or split) else 0
        return more + (12 if scalar and several else 16 if scalar else 8)
    if several:
        return 12 if split else 8
    return 12 if scalar and not (compact or split) else 8


def _is_sixteen(problem: AttentionProblem) -> bool:
    """Whether products are TF32 and heads come in fours of 16 channels, for which more was timed than for others."""
    rounded = problem.dtype == torch.float32 and problem.tf32
    return rounded and problem.channels == 16 and problem.heads % 4 == 0


def block_heads(problem: AttentionProblem, direction: str) -> int:
    """Heads side by side in a thread block. More share the bits, but leave fewer registers; timed 1, 2, 4, 8 of 16."""
    room = 32 if not problem.record.key and _splits(problem) else 64
    if _is_sixteen(problem) and problem.record.block_mma[direction].in_pairs:
        room = 32
    most = max(1, min(4, room // problem.channels))
    return max(heads for heads in range(1, problem.heads + 1) if problem.heads % heads == 0 and heads <= most)


def shared_bytes(problem: AttentionProblem, direction: str, graph: Graph, constants: Mapping[str, int]) -> int:
    """Dynamic shared memory of the kernel of a pass: its own rows, two steps of what it gathers, and factors."""
    itemsize, step, heads = problem.dtype.itemsize, constants["STEP"], constants["BLOCK_HEADS"]
    product = 32 // itemsize
    padded = -(-problem.channels // product) * product
    own_row = heads * padded * itemsize
    row = (-(-((heads - 1) * problem.channels + padded) // 16) * 16 + 8) * itemsize
    target, key = int(problem.record.target), int(problem.record.key)
    own = {"forward": target, "targets": 1 + target, "sources": 1 + key}[direction]
    gathered = 1 + (target if direction == "sources" else key)
    scalars = heads * (4 + (16 if direction == "sources" else 0))
    factors = 0
    if constants.get("FACTORED"):
        diagonal = diagonal_blocks(graph)
        assert diagonal is not None
        columns = -(-diagonal.longest // step) * step
        factors = -(-8 * constants["WARPS"] // 16) * 16 + 8 * heads * columns
    return own * TILE_ROWS * constants["WARPS"] * own_row + 2 * step * (gathered * row + scalars) + factors


def plan_pass(problem: AttentionProblem, direction: str, graph: Graph) -> BlockMmaPlan:
    """The pass of one direction."""
    warps, compact = _window(problem, graph)
    constants = _constants(problem, direction, graph, warps, compact)
    fill = block_sparse.fill(graph, TILE_ROWS * warps, compact)
    return BlockMmaPlan(constants, compact, shared_bytes(problem, direction, graph, constants), fill)


# Constants of the cost model, fitted to passes over two batches of 1,024 graphs on an H200.
SHARE = {"split": 0.72, "tf32": 0.64, "half": 0.61}
"""Share of the tensor cores' rate that products of each kind reach."""
NUMBER = {"forward": 4.8, "targets": 3.4, "sources": 5.7}
"""Warp instructions per number of the blocks beside the products: mask, exponential, dS, operands."""
MEMORY = 1.28
"""Time of the bytes of the node tensors over that of a plain copy."""
WAVE_S = 5.2e-6
"""Until a thread block has what its first step needs, and after its last."""
LISTED = 1.3
"""Time of the products over columns that are listed over that of columns that follow each other."""
STEP_S = 0.5e-6
"""A step of a window without its products."""
CHAIN = {"split": 1.0, "tf32": 0.5, "half": 0.4}
"""Each product of a step of 16 columns and 128 channels, in the time of a step without."""


def stem_of(direction: str) -> str:
    """Return the stem of the kernel source of a pass; its entry is called the same."""
    return f"block_mma_{rows.STEMS[direction]}"


def specs(problem: AttentionProblem, direction: str, plan: Any) -> list[Spec]:
    """Return what is compiled for a planned pass."""
    constants = tuple(plan.constants.items())
    return [Spec(f"attention/{stem_of(direction)}.cu", constants, texts=problem.record.texts)]


def cost(problem: AttentionProblem, direction: str, graph: Graph, chosen: BlockMmaPlan, gpu: Gpu) -> Cost:
    """Estimated time of the pass.

    A thread block takes node tensors, products and what surrounds them in turn, and few blocks share a multiprocessor:
    these add up. The window with most columns takes its steps in turn too.
    """
    c = chosen.constants
    sparse = block_sparse.counts(graph, direction, chosen.rows, chosen.compact)
    area = sparse.num_blocks * BLOCK * chosen.rows * problem.heads
    kind = "half" if problem.dtype.itemsize == 2 else "split" if c["SPLIT"] else "tf32"
    tuning = problem.record.block_mma[direction]
    products = tuning.products
    flops = 2 * area * problem.channels * products * (3 if c["SPLIT"] else 1)
    nodes = tuning.node_tensors * graph.num_dst * problem.row_bytes
    waves = sparse.num_windows * c["HEADS"] // c["BLOCK_HEADS"] / (gpu.multiprocessors * c["MIN_BLOCKS"])
    rate = SHARE[kind] * gpu.tensor_flops * (2 if kind == "half" else 1)
    overlapped = {"products": flops / rate * (LISTED if chosen.compact else 1.0)}
    added = {
        "numbers": area / 32 * NUMBER[direction] / gpu.instructions_per_s,
        "memory": MEMORY * nodes / gpu.memory_bytes_per_s,
        "waves": max(1.0, waves) * WAVE_S,
    }
    width = c["BLOCK_HEADS"] * problem.channels * c["STEP"] / (MAX_CHANNELS * 16)
    step = STEP_S * (1.0 + products * width * CHAIN[kind])
    chain = WAVE_S + -(-sparse.max_columns // c["STEP"]) * step
    waiting = max(0.0, chain - overlapped["products"] - sum(added.values()))
    return Cost(overlapped, {**added, "longest window": waiting, "launch": gpu.launch_s})
