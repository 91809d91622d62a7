"""The general schedule, `row_split`: a warp, or part of one, takes the edges of a row with all heads side by side.

Online softmax, light rows packed, heavy rows split in chunks that are merged in order, dense graphs swept by blocks of
columns that fit the last-level cache.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import (
    JOINED_EDGES,
    ORDERED_EDGES,
    STORAGE,
    SUMMED_EDGES,
    WARPS,
    RowSplitPlan,
    has_few_edges,
    is_local,
    items_per_block,
    joined_edges,
    lane_constants,
    max_edges_of,
)
from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.adjacency import INT32_MAX
from pyg_dfgnn.graph.node_ranges import diagonal_blocks
from pyg_dfgnn.statements.scores import SCORES
from pyg_dfgnn.statements.spec import Spec
from pyg_dfgnn.statements.tuning import RowSplitTuning, Sweep

passes_share_buffers = False
deterministic = True
refillable = True
_MIN_ROW_LANES = 8


def _base_direction(direction: str) -> str:
    """The forward pass for "dout_dlogit", which takes its layout, so that both add in the same order."""
    return "forward" if direction == "dout_dlogit" else direction


def _tuning(problem: AttentionProblem, direction: str) -> RowSplitTuning:
    return problem.record.row_split_tuning(_base_direction(direction))


def _lanes(problem: AttentionProblem, direction: str, wide: bool) -> MappingProxyType[str, int]:
    """The layout of a pass: the loads of a lane that were fastest."""
    tuning, half = _tuning(problem, direction), problem.dtype.itemsize == 2
    loads = tuning.loads[half]
    if half and not wide and tuning.packed_loads is not None:
        loads = tuning.packed_loads
    return fitting_lanes(problem, loads, wide)


def fitting_lanes(problem: AttentionProblem, loads: int, wide: bool) -> MappingProxyType[str, int]:
    """The layout with at most so many loads of a lane per row: fewer where the row would keep few lanes busy."""
    while True:
        sizes = problem.heads, problem.channels, problem.dtype.itemsize
        lanes = lane_constants(*sizes, wide, loads, problem.edge_channels)
        if loads == 1 or (lanes["HEAD_LANES"] > 1 and lanes["HEAD_LANES"] * lanes["HEAD_SLOTS"] >= _MIN_ROW_LANES):
            return lanes
        loads //= 2


def _unroll(direction: str, problem: AttentionProblem, elements: int) -> int:
    """Edges a slot keeps in flight: more hides latency until registers run out."""
    unroll = problem.record.unroll(_base_direction(direction))
    if elements <= 4:
        return unroll.up_to_4
    if elements == 8:
        return unroll.of_8_float if problem.dtype.itemsize == 4 else unroll.of_8_half
    return unroll.of_16 if elements == 16 else 1


def _elements(c: Mapping[str, int]) -> int:
    """Features that a lane holds of a row."""
    return c["LANE_HEADS"] * c["LANE_VECS"] * c["VEC"]


def _min_blocks(direction: str, problem: AttentionProblem, lanes: Mapping[str, int]) -> int:
    """Blocks per multiprocessor: as many as cost no spill in the loops, without edge features and dropout."""
    elements, tuning = _elements(lanes), _tuning(problem, direction)
    key = (problem.dtype.itemsize, elements)
    if problem.edge_channels and not problem.dropout:
        has_few = lanes["EDGE_VECS"] * lanes["EDGE_VEC"] <= 4
        return tuning.edge_rows_min_blocks.get(key, 1) if has_few else 1
    if problem.edge or problem.dropout:
        return 1
    blocks = (tuning.saved_min_blocks if direction == "dout_dlogit" else tuning.min_blocks).get(key, 1)
    if lanes["HEAD_LANES"] == lanes["EDGE_SLOTS"] == 2:
        blocks = tuning.paired_min_blocks.get(key, blocks)
    # Each head has a record of its own.
    return max(1, blocks - 1) if direction == "sources" and problem.heads > 1 and elements > 4 else blocks


def saves_dout_dlogit(score: str, edge: bool) -> bool:
    """Whether the forward pass of a score, with edge features or not, can leave dout_dlogit.

    That is the derivative of the output in the target scalars, [N_dst, H, C] in float32 kept until the backward pass,
    whose part over targets is then a dot product per node. It gives no gradient of edge scalars.
    """
    return SCORES[score].saves_dout_dlogit and not edge


@cache
def pass_constants(problem: AttentionProblem, direction: str, wide: bool) -> Mapping[str, int]:
    """Constants of the kernel of one pass.

    Args:
        problem: What is computed.
        direction: "forward", "dout_dlogit", "targets" or "sources".
        wide: Whether lanes to spare go to edges of the same row rather than to further rows.
    """
    sums = {"forward": {"DOUT_DLOGIT": 0, "LAZY": 0}, "dout_dlogit": {"DOUT_DLOGIT": 1, "LAZY": 0}}.get(direction, {})
    lanes = _lanes(problem, direction, wide)
    constants = {
        **problem.constants,
        **sums,
        **lanes,
        "UNROLL": _unroll(direction, problem, _elements(lanes)),
        "MIN_BLOCKS": _min_blocks(direction, problem, lanes),
        "ORDERED": 0,
        "JOINED": 0,
        "SMEM": 0,
        "IN_SHARED": 0,
        "NORMS": 0,
    }
    return MappingProxyType(constants)


def fits_whole_heads(problem: AttentionProblem) -> bool:
    """Whether a head is two loads in 16 bits and there are heads for enough lanes; others take other registers."""
    has_two_loads = problem.dtype.itemsize == 2 and problem.row_bytes == 32 * problem.heads
    return has_two_loads and problem.heads >= _MIN_ROW_LANES and not problem.edge and not problem.dropout


def with_whole_heads(
    problem: AttentionProblem, direction: str, constants: Mapping[str, int], kind: str
) -> Mapping[str, int]:
    """The constants with a lane for each head, where that is faster.

    Nothing is summed over lanes then, what a head has one of is computed once, and a step takes twice the edges. A pass
    that leaves dout_dlogit keeps its layout, which was faster with its sums on an H200.

    Args:
        problem: What is computed.
        direction: "forward", "dout_dlogit", "targets" or "sources".
        constants: With two lanes for each head.
        kind: "swept" or "packed".
    """
    if not fits_whole_heads(problem) or direction == "dout_dlogit" or _tuning(problem, direction).whole_heads != kind:
        return constants
    wide = constants["WARP_ROWS"] == 1
    lanes = lane_constants(problem.heads, problem.channels, problem.dtype.itemsize, wide, loads=2)
    return {**constants, **lanes, "UNROLL": 2, "MIN_BLOCKS": 1}


def gathers(problem: AttentionProblem, direction: str) -> int:
    """Feature rows gathered per edge in a pass."""
    return problem.record.gathers(_base_direction(direction))


# What a sweep should gather, as a share of the cache, from timings on an H200, by bytes of an element.
_CACHE_SHARE = {
    4: {"forward": 0.8, "targets": 0.8, "sources": 0.6},
    2: {"forward": 0.8, "targets": 0.5, "sources": 0.5},
}
_MIN_BLOCK_EDGES = 32


def _blocks(
    problem: AttentionProblem, direction: str, rows: Adjacency, num_columns: int, heads: int, share: float | None = None
) -> int:
    """Number of column blocks: as few as make the gathered rows of one sweep fit in a share of the cache.

    Groups of ``heads`` heads run one after the other, so only one group's share of the rows counts.
    Each sweep reads and writes the state of every row, so the average row must have enough edges in each block.
    """
    gathered = num_columns * _column_bytes(problem, direction, heads)
    blocks = -(-gathered // _cache_bytes(problem, direction, share))
    return int(blocks) if 1 < blocks and rows.num_edges >= _MIN_BLOCK_EDGES * blocks * rows.num_rows else 1


def _cache_bytes(problem: AttentionProblem, direction: str, share: float | None = None) -> int:
    """Bytes of the cache for gathered rows."""
    share = _CACHE_SHARE[problem.dtype.itemsize][_base_direction(direction)] if share is None else share
    return max(1, int(share * gpu_of(problem.device).cache_bytes))


def _column_bytes(problem: AttentionProblem, direction: str, heads: int) -> int:
    """Bytes that a pass gathers of a column for so many heads."""
    # What each target has for the rows of its edges, in itself and in the gradient.
    edges = 2 * problem.edge_channels if direction == "sources" else 0
    return heads * problem.dtype.itemsize * (problem.channels * gathers(problem, direction) + edges)


def swept_constants(problem: AttentionProblem, direction: str) -> tuple[dict[str, int], Sweep | None]:
    """Constants of the kernel of a pass in sweeps over blocks of columns, and what was measured of it, if it was."""
    tuning = _tuning(problem, direction).swept.get(problem.dtype.itemsize)
    if tuning is not None:
        lanes = fitting_lanes(problem, tuning.loads, wide=not tuning.packed)
        # Others take other registers.
        if lanes["LANE_HEADS"] * lanes["LANE_VECS"] == tuning.loads and not problem.edge and not problem.dropout:
            packed = {**pass_constants(problem, direction, wide=not tuning.packed), **lanes, "UNROLL": tuning.unroll}
            # Each head has a record of its own.
            blocks = tuning.min_blocks - int(direction == "sources" and problem.heads > 1)
            return {**packed, "MIN_BLOCKS": blocks, "ORDERED": 1}, tuning
    constants = with_whole_heads(problem, direction, pass_constants(problem, direction, wide=True), "swept")
    return {**constants, "ORDERED": 1}, None


def reasons_against(problem: AttentionProblem, direction: str, graph: Graph) -> list[str]:
    """None: this schedule runs whatever has fused kernels."""
    return []


def plan_pass(problem: AttentionProblem, direction: str, graph: Graph) -> RowSplitPlan:
    """The pass of one direction, or of two more.

    "weights", which writes the weights of all edges, gathers once and is never swept; "dout_dlogit" is a forward pass
    that leaves this derivative, see :func:`saves_dout_dlogit`.
    """
    if direction == "weights":
        return replace(_plan_pass(problem, "forward", graph), blocks=1)
    return _with_norms(_plan_pass(problem, direction, graph), problem, direction, graph)


def _with_norms(plan: RowSplitPlan, problem: AttentionProblem, direction: str, graph: Graph) -> RowSplitPlan:
    """The pass, which finds the norms of the cosine score itself where that takes less than a kernel before it.

    So it does on a small graph, from every row that it reads, and writes down those of its targets: these have to be
    the sources too, and none of them may be left to a merge.
    """
    if (
        direction != "forward"
        or problem.record.node_scalars != "inverse_norm"
        or not graph.is_measured
        or graph.num_src != graph.num_dst
        or plan.blocks > 1
    ):
        return plan
    in_order = plan.constants["JOINED"] and plan.constants["ORDERED"] and problem.dtype.itemsize == 4
    most = _NORM_NUMBERS_IN_ORDER if in_order else _NORM_NUMBERS
    is_small = graph.num_edges * problem.heads * problem.channels <= most
    if is_small and (plan.constants["JOINED"] or graph.csr.max_degree <= plan.max_edges):
        # More registers than were timed.
        return replace(plan, constants={**plan.constants, "NORMS": 1, "MIN_BLOCKS": 1})
    return plan


def _plan_pass(problem: AttentionProblem, direction: str, graph: Graph) -> RowSplitPlan:
    """The pass of a direction other than "weights", which reads norms."""
    if graph.is_bare:
        constants = pass_constants(problem, direction, wide=True)
        if has_few_edges(graph.mean_degree(direction), 1, constants):  # type: ignore[attr-defined]
            constants = pass_constants(problem, direction, wide=False)
            constants = with_whole_heads(problem, direction, constants, "packed")
        return RowSplitPlan(constants, INT32_MAX, 1)
    rows = graph.side(direction)
    constants = pass_constants(problem, direction, wide=True)
    if has_few_edges(rows.num_edges, rows.num_rows, constants):
        constants = pass_constants(problem, direction, wide=False)
    heads = min(problem.heads, constants["HEAD_SLOTS"] * constants["LANE_HEADS"])
    blocks = _blocks(problem, direction, rows, rows.num_cols, heads) if constants["WARP_ROWS"] == 1 else 1
    if blocks > 1 and is_local(
        graph, direction, _cache_bytes(problem, direction) // _column_bytes(problem, direction, heads)
    ):
        return RowSplitPlan(constants, max_edges_of(rows.num_edges, rows.max_degree), 1, ascending=True)
    if blocks > 1:
        constants, sweep = swept_constants(problem, direction)
        if sweep is None:
            return RowSplitPlan(constants, ORDERED_EDGES, blocks)
        # More sweeps only where rows are long enough for them.
        counted = _blocks(problem, direction, rows, rows.num_cols, heads, sweep.share)
        smaller = sweep.share < _CACHE_SHARE[problem.dtype.itemsize][_base_direction(direction)]
        longest = max(1, int(sweep.pieces * ORDERED_EDGES))
        return RowSplitPlan(constants, longest, max(counted, blocks) if smaller else counted)
    max_edges = max_edges_of(rows.num_edges, rows.max_degree)
    joined = _joined(problem, constants, direction, rows, max_edges)
    if joined is not None:
        return joined
    if rows.max_degree > max_edges:
        longest = min(max(max_edges, SUMMED_EDGES), ORDERED_EDGES)
        return RowSplitPlan({**constants, "ORDERED": 1}, min(2 * max_edges, longest), 1)
    if constants["WARP_ROWS"] > 1:
        constants = with_whole_heads(problem, direction, constants, "packed")
    return RowSplitPlan(constants, max_edges, 1)


_NORM_NUMBERS = 1 << 21
"""Gathered numbers up to which to find norms from them takes no longer than a launch before, as timed on an H200."""
_NORM_NUMBERS_IN_ORDER = 1 << 24
"""The same for packed rows in order."""
_JOINED_WARPS = 8
_JOINED_BYTES = 48 << 10
"""Shared memory for the states of a block's chunks."""
_FEW_BLOCKS = 264
"""Thread blocks that a device runs at once even if each takes many registers."""


def _joined(
    problem: AttentionProblem, constants: Mapping[str, int], direction: str, rows: Adjacency, max_edges: int
) -> RowSplitPlan | None:
    """The pass with the chunks of a row joined in its thread block, which spares the merge launch.

    None where one block cannot take the longest row in chunks of `max_edges` or hold the states of its chunks, and
    where no row is too long.
    """
    constants = {**constants, "WARPS": _JOINED_WARPS, "MIN_BLOCKS": 1, "JOINED": 1}
    items = items_per_block(constants)
    is_small = rows.num_rows <= items * _FEW_BLOCKS
    # At most two sums of a row's width and three numbers per head.
    if 4 * items * constants["HEADS"] * (2 * constants["CHANNELS"] + problem.edge_channels + 3) > _JOINED_BYTES:
        return None
    length = joined_edges(rows, items)
    if length > max_edges or length >= rows.max_degree:
        return None
    if constants["WARP_ROWS"] > 1 and not is_small:
        return _in_order(problem, constants, direction, rows, max_edges)
    if problem.edge and not is_small and rows.max_degree <= min(max_edges, 2 * length):
        # Two pieces are not worth a block for each row, whose warps all wait while edge features arrive: on a mesh of
        # short rows a warp per row is faster on an H200.
        return None
    # Fewer steps, as each waits for the one before: on small graphs nothing else is there to run meanwhile.
    if _elements(constants) == 8 and (direction == "targets" or (direction == "forward" and is_small)):
        constants["UNROLL"] = max(4, constants["UNROLL"])
    if is_small and direction == "forward" and problem.dtype.itemsize == 4 and not problem.edge and not problem.dropout:
        constants.update(_of_few_rows(problem, constants, length))
        length = joined_edges(rows, items_per_block(constants))
    return RowSplitPlan(constants, length, 1)


def _in_order(
    problem: AttentionProblem, constants: dict[str, int], direction: str, rows: Adjacency, max_edges: int
) -> RowSplitPlan:
    """The pass over packed rows with chunks joined in a block and the longest rows first, which few rows do not need.

    The rows of a warp are as long as each other then. Blocks have half the warps, as far as these can take the longest
    row. On an H200 that is faster than rows as they come; the layouts were chosen by times of 1 head of 128 on PubMed.
    """
    fewer = {**constants, "ORDERED": 1, "WARPS": WARPS, "MIN_BLOCKS": _min_blocks(direction, problem, constants)}
    itemsize, tuning = problem.dtype.itemsize, _tuning(problem, direction)
    plain = not problem.edge and not problem.dropout
    if plain and itemsize == 4 and tuning.four_loads:
        lanes = fitting_lanes(problem, 4, wide=False)
        if lanes["LANE_VECS"] == 4:
            fewer.update({**lanes, "UNROLL": 1, "MIN_BLOCKS": 1})
    length = joined_edges(rows, items_per_block(fewer))
    if length <= max_edges:
        return RowSplitPlan(fewer, length, 1)
    return RowSplitPlan({**constants, "ORDERED": 1}, joined_edges(rows, items_per_block(constants)), 1)


def _of_few_rows(problem: AttentionProblem, constants: Mapping[str, int], length: int) -> Mapping[str, int]:
    """Return the constants that change in the forward pass over few rows.

    This pass waits for its longest row with a device half empty.

    From timings of captured layers on an H200, float32, 1 head of 128 and 8 of 16, so for
    rows of as many bytes: half of the heads in a warp, the others in other blocks, where the score's record says so;
    else twice the warps with half as many edges each, unless the pass that leaves dout_dlogit would add in another
    order then: training and inference give the same bits.
    """
    record = problem.record
    narrow = (problem.heads, problem.channels) == (8, 16)
    if narrow and record.row_split_tuning("forward").few_rows_half_heads and constants["WARP_ROWS"] == 2:
        lanes = lane_constants(problem.heads, problem.channels, problem.dtype.itemsize, wide=False)
        return {**lanes, "HEAD_SLOTS": 4, "WARP_ROWS": 2, "UNROLL": 4, "WARPS": constants["WARPS"]}
    loads = constants["LANE_HEADS"] * constants["LANE_VECS"]
    if not record.saves_dout_dlogit and (loads, constants["WARP_ROWS"]) == (2, 2) and length > JOINED_EDGES:
        return {"WARPS": 2 * constants["WARPS"], "UNROLL": 2}
    return {}


STEP, LOAD, CONVERT, MULTIPLY_ADD, SHUFFLE = 15.8, 6.7, 2.2, 2.05, 1.1
"""Warp instructions of a step over an edge: for itself, and for what it does how often."""
ROW = {"forward": 390.0, "targets": 630.0, "sources": 630.0}
"""Warp instructions around the steps of a row, for each load of a lane."""
STEP_S = 0.43e-6
"""Time from one step of a row to the next, which depends on it."""


EDGE_S = 0.785e-6
"""Time that a step waits for its edge features, from the forward pass of `smem` with 8 warps on a multiprocessor."""
_RESIDENT_BLOCKS = 4
"""Thread blocks on a multiprocessor where nothing is asked of the compiler."""


def waits_for_edges(
    problem: AttentionProblem, num_edges: int, c: Mapping[str, int], blocks: int, gpu: Gpu
) -> dict[str, float]:
    """Return how long a pass waits for edge features, if it has any, with so many thread blocks on a multiprocessor.

    They come from memory, each read once, so that only other edges in flight hide the wait.
    """
    if not problem.edge:
        return {}
    in_flight = blocks * c["WARPS"] * c["WARP_ROWS"] * c["EDGE_SLOTS"] * c["UNROLL"]
    return {"edges": num_edges / (gpu.multiprocessors * in_flight) * EDGE_S}


def issued(direction: str, problem: AttentionProblem, rows: Adjacency, c: Mapping[str, int], sweeps: int = 1) -> float:
    """Warp instructions of a pass with the constants ``c``."""
    read, heads = gathers(problem, direction), c["LANE_HEADS"]
    elements = heads * c["LANE_VECS"] * c["VEC"]
    converted = elements * read if problem.dtype.itemsize == 2 else 0
    # Norms of what is read.
    own = int(bool(c["NORMS"]) and not c["SMEM"])
    step = (
        STEP
        + LOAD * read * heads * c["LANE_VECS"]
        + CONVERT * converted
        + MULTIPLY_ADD * elements * (problem.record.work(direction) + own)
        + SHUFFLE * heads * (c["HEAD_LANES"].bit_length() - 1) * (problem.record.head_sums(direction) + own)
    )
    groups = -(-c["HEADS"] // (c["HEAD_SLOTS"] * heads))
    steps = rows.num_edges / (c["EDGE_SLOTS"] * c["WARP_ROWS"])
    return groups * (steps * step + sweeps * rows.num_rows / c["WARP_ROWS"] * c["LANE_VECS"] * ROW[direction])


def stays_near(graph: Graph, node_bytes: int, gpu: Gpu) -> bool:
    """Whether what is gathered of the nodes of a segment, such as a graph of a batch, fits on a multiprocessor."""
    blocks = diagonal_blocks(graph)
    return blocks is not None and blocks.longest * node_bytes <= gpu.shared_bytes


STEMS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "forward",
        "dout_dlogit": "forward",
        "targets": "backward_targets",
        "sources": "backward_sources",
        "weights": "weights",
    }
)
"""Stem of the kernel source of each pass; its main entry is called the same."""


def specs(problem: AttentionProblem, direction: str, plan: Any) -> list[Spec]:
    """Return what is compiled for a planned pass."""
    constants = tuple(plan.constants.items())
    return [Spec(f"attention/{STEMS[direction]}.cu", constants, texts=problem.record.texts)]


def cost(problem: AttentionProblem, direction: str, graph: Graph, chosen: RowSplitPlan, gpu: Gpu) -> Cost:
    """Estimated time of the pass.

    Each tensor of the nodes travels once, each gathered row comes from the last-level cache, each step is issued, and
    the longest row takes its steps in turn. Gathers among the few nodes of a small segment stay within a multiprocessor
    and count as instructions alone. With dout_dlogit at hand the pass over targets reads nodes only.
    """
    rows = graph.side(direction)
    if direction == "targets" and problem.dout_dlogit:
        read = rows.num_rows * problem.heads * problem.channels * (8 + problem.dtype.itemsize)
        return Cost({"memory": read / gpu.memory_bytes_per_s}, {"launch": gpu.launch_s})
    tensors = gathers(problem, direction)
    traffic_bytes = (rows.num_rows * (tensors + 1) + rows.num_cols * tensors) * problem.row_bytes + 4 * rows.num_edges
    # The state of all rows, written and read between sweeps.
    carried = 8 * (chosen.blocks - 1) * rows.num_rows * problem.heads * problem.channels
    node_bytes = tensors * problem.row_bytes
    gathered = 0 if stays_near(graph, node_bytes, gpu) else rows.num_edges * node_bytes
    c = chosen.constants
    chain = -(-min(rows.max_degree, chosen.max_edges) // (c["UNROLL"] * c["EDGE_SLOTS"]))
    return Cost(
        {
            "memory": (traffic_bytes + carried) / gpu.memory_bytes_per_s,
            "gathers": gathered / gpu.cache_bytes_per_s,
            "instructions": issued(direction, problem, rows, chosen.constants, chosen.blocks) / gpu.instructions_per_s,
            "longest row": chain * STEP_S,
            **waits_for_edges(problem, rows.num_edges, c, max(c["MIN_BLOCKS"], _RESIDENT_BLOCKS), gpu),
        },
        {"launches": chosen.blocks * gpu.launch_s},
    )


@cache
def node_constants(
    heads: int, channels: int, dtype: torch.dtype, float_loads: bool = False
) -> MappingProxyType[str, int]:
    """Constants of the kernels that read nodes and no edges.

    Two loads per lane and eight warps per block are faster than one load and four on an H200: a warp lives as long as
    its loads. One is faster where two would be a head in 16 bits and the same features are read in float32 too
    (``float_loads``), 64 bytes by each lane.
    """
    is_head = dtype.itemsize == 2 and channels * dtype.itemsize == 32
    loads = 1 if float_loads and is_head else 2
    lanes = lane_constants(heads, channels, dtype.itemsize, wide=False, loads=loads)
    return MappingProxyType({"STORAGE": STORAGE[dtype], **lanes, "WARPS": 8})
