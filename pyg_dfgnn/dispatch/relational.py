"""Which kernels run the steps of a program: the problem of a generated kernel, how it runs, what is compiled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pyg_dfgnn.dispatch.traversal import (
    ORDERED_EDGES,
    STORAGE,
    SUMMED_EDGES,
    RowSplitPlan,
    has_few_edges,
    items_per_block,
    joined_edges,
    lane_constants,
    max_edges_of,
    power_of_two,
)
from pyg_dfgnn.graph import Adjacency
from pyg_dfgnn.statements.spec import Spec


@dataclass(frozen=True)
class StepProblem:
    """Facts of a step that decide its kernel, apart from the graph.

    Attributes:
        kind: "traversal" or "map".
        text: What is generated for it.
        heads: H.
        channels: C.
        indices: Domains that are looked up by position.
        fragments: Vectors of the state of a row.
        head_values: Numbers per head of the state of a row.
        gathered: Vectors that a lane gathers for a position.
        short: Numbers of the short rows that a lane gathers for a position.
        is_outer: Whether it sums outer products of pieces of the edges.
        unit: Numbers that every vector in a row begins at a multiple of.
        is_exact: Whether results are compared between kernels, so that all round alike.
        dtype: Dtype of the features.
        device: Where they live.
    """

    kind: str
    text: str
    heads: int
    channels: int
    indices: int
    fragments: int
    head_values: int
    gathered: int
    short: int
    is_outer: bool
    unit: int
    is_exact: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def state_elements(self) -> int:
        """Numbers, in float32, of the state of a row."""
        return self.heads * (self.fragments * self.channels + self.head_values)


_JOINED_WARPS = 8
_JOINED_BYTES = 48 << 10
"""Shared memory for the states of a block's chunks, which are then joined without another launch."""


def piece_of(num_edges: int) -> int:
    """Edges of a piece whose outer products one group of lanes sums: pieces for all of a GPU, and short enough sums."""
    return min(4096, max(SUMMED_EDGES, power_of_two(-(-num_edges // 2048))))


def holds_heads(problem: StepProblem) -> bool:
    """Whether one group of lanes holds all heads of a row."""
    lanes = constants_of(problem, wide=False)
    return lanes["HEAD_SLOTS"] * lanes["LANE_HEADS"] >= problem.heads


def constants_of(problem: StepProblem, wide: bool) -> dict[str, int]:
    """Return what the kernel of a step is specialised by.

    Args:
        problem: The step.
        wide: Whether lanes to spare go to edges of the same row rather than to further rows.
    """
    # A lane reads weights, or holds sums, for each number of a short row: its share of the wide row should be small.
    itemsize = 8 if problem.is_outer else 4 if problem.short > 8 else problem.dtype.itemsize
    # No load is wider than what vectors begin at a multiple of.
    itemsize = max(itemsize, 16 // min(16, problem.unit & -problem.unit))
    lanes = lane_constants(problem.heads, problem.channels, itemsize, wide)
    if problem.kind == "map":
        return {"STORAGE": STORAGE[problem.dtype], **lanes, "UNROLL": 1}
    elements = lanes["LANE_HEADS"] * lanes["LANE_VECS"] * lanes["VEC"]
    in_flight = 32 // (elements * max(1, problem.gathered, problem.fragments) + problem.short)
    return {
        "STORAGE": STORAGE[problem.dtype],
        **lanes,
        "INDICES": max(1, problem.indices),
        "STATE_FRAGMENTS": problem.fragments,
        "UNROLL": max(1, min(4, in_flight)),
        "MIN_BLOCKS": 1,
        "ORDERED": 0,
        "JOINED": 0,
        "SMEM": 0,
        "IN_SHARED": 0,
    }


def plan_step(problem: StepProblem, side: Adjacency | None) -> RowSplitPlan:
    """Return how a step runs.

    Args:
        problem: The step.
        side: The rows that a traversal takes; None for a map.
    """
    if side is None:
        return RowSplitPlan({**constants_of(problem, wide=False), "JOINED": 0}, 0, 1)
    constants = constants_of(problem, wide=True)
    if problem.is_outer:
        return RowSplitPlan(constants, side.max_degree, 1)
    if has_few_edges(side.num_edges, side.num_rows, constants):
        constants = constants_of(problem, wide=False)
    max_edges = max_edges_of(side.num_edges, side.max_degree)
    if side.max_degree > max_edges:
        longest = min(2 * max_edges, ORDERED_EDGES)
        joined = {**constants, "WARPS": _JOINED_WARPS, "JOINED": 1}
        items = items_per_block(joined)
        length = joined_edges(side, items)
        if length <= longest and 4 * items * problem.state_elements <= _JOINED_BYTES:
            return RowSplitPlan(joined, length, 1)
        return RowSplitPlan({**constants, "ORDERED": 1}, longest, 1)
    return RowSplitPlan(constants, max_edges, 1)


def spec_of(problem: StepProblem, constants: Mapping[str, int]) -> Spec:
    """Return what is compiled for a planned step."""
    # A maximum is found again by its value, which another kernel computes: no product may be fused with a sum.
    options = ("-fmad=false",) if problem.is_exact else ()
    return Spec(f"relational/{problem.kind}.cu", tuple(constants.items()), options, (("step.cuh", problem.text),))
