"""Which kernels aggregate over edges: the problem, what no kernel can run, and the schedule `row_split`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from pyg_dfgnn.dispatch.core import Family, device_reasons
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import (
    ORDERED_EDGES,
    STORAGE,
    RowSplitPlan,
    lane_constants,
    max_edges_of,
    side_of,
)
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.statements.segment import EXTREMES, MESSAGES, STATS, SUMS
from pyg_dfgnn.statements.spec import Spec

MAX_CHANNELS = 512
"""Channels of one launch; wider features are cut."""


@dataclass(frozen=True)
class SegmentProblem:
    """What decides the kernels of one aggregation, apart from the graph.

    Attributes:
        message: Name of a record in ``MESSAGES``.
        stats: Some of ``STATS``, in their order.
        channels: Features F.
        dtype: Dtype of the features.
        device: Where they live.
    """

    message: str
    stats: tuple[str, ...]
    channels: int
    dtype: torch.dtype
    device: torch.device

    is_current = True

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one node."""
        return self.channels * self.dtype.itemsize

    @property
    def constants(self) -> dict[str, int]:
        """What every kernel of the family is specialised by."""
        message = MESSAGES[self.message]
        return {
            "STORAGE": STORAGE[self.dtype],
            **{stat.upper(): int(stat in self.stats) for stat in STATS},
            "EDGE": (None, "vector", "scalar").index(message.edge),
            "HAS_KEY": int(message.key),
            "HAS_TARGET": int(message.target),
            "OUT_FP32": int("squares" in self.stats),
        }

    def gathered_bytes(self, direction: str) -> int:
        """Bytes of the rows that a pass gathers for one edge."""
        message = MESSAGES[self.message]
        if direction != "sources":
            return self.row_bytes * (1 + message.key)
        sums = len(set(self.stats) & set(SUMS)) * (4 if "squares" in self.stats else self.dtype.itemsize)
        extremes = 2 * len(set(self.stats) & set(EXTREMES))
        return self.channels * (sums + extremes) + self.row_bytes * message.target

    def fragments(self, direction: str) -> int:
        """Numbers per channel of the state of a row."""
        if direction == "sources":
            return 1 + MESSAGES[self.message].key
        if direction == "targets":
            return 1
        extremes = len(set(self.stats) & set(EXTREMES))
        return len(self.stats) + (2 * extremes if direction == "args" else 0)


def unsupported_reasons(problem: SegmentProblem) -> list[str]:
    """Return every reason why no fused kernel can run ``problem``; empty when one can."""
    reasons = device_reasons(problem.device)
    if problem.dtype not in STORAGE:
        reasons.append(f"{problem.dtype} has no fused kernel (float32, float16, bfloat16)")
    if not 1 <= problem.channels <= MAX_CHANNELS:
        reasons.append(f"{problem.channels} channels in one launch, the kernels take 1 to {MAX_CHANNELS}")
    if MESSAGES[problem.message].target and problem.stats != ("sum",):
        reasons.append(f"the message {problem.message!r} is only summed or averaged")
    return reasons


STEMS: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "args": "forward", "targets": "backward_targets", "sources": "backward_sources"}
)
"""Stem of the kernel source of each pass; "args" is the forward pass that leaves where extremes come from."""

_LANE_ELEMENTS = 4
"""Numbers of a row that a lane holds for each unit of its state, and edges in flight that they leave registers for."""
_CACHE_SHARE = 0.8
"""What a sweep should gather, as a share of the cache."""
_SWEPT_EDGES = 32
"""Edges that the average row needs in each block of columns: each sweep reads and writes the state of every row."""


def constants_of(problem: SegmentProblem, direction: str, wide: bool) -> dict[str, int]:
    """Return the constants of a pass.

    Args:
        problem: What is computed.
        direction: "forward", "args", "targets" or "sources".
        wide: Whether lanes to spare go to edges of the same row rather than to further rows.
    """
    lanes = lane_constants(1, problem.channels, problem.dtype.itemsize, wide)
    elements = lanes["LANE_VECS"] * lanes["VEC"] * max(1, problem.fragments(direction) // 2)
    return {
        **problem.constants,
        **lanes,
        "ARGS": int(direction == "args"),
        "UNROLL": max(1, min(4, 32 // elements)),
        "MIN_BLOCKS": 1,
        "ORDERED": 0,
        "JOINED": 0,
        "SMEM": 0,
        "IN_SHARED": 0,
    }


def _plan_pass(problem: SegmentProblem, direction: str, graph: Graph) -> RowSplitPlan:
    rows, num_columns = side_of(direction, graph)
    constants = constants_of(problem, direction, wide=True)
    if graph.is_static:
        # A list of long rows, or of blocks of columns, would not fit the edges to come.
        return RowSplitPlan(constants, rows.max_degree, 1)
    if rows.num_edges <= 2 * constants["UNROLL"] * constants["EDGE_SLOTS"] * rows.num_rows:
        constants = constants_of(problem, direction, wide=False)
    gathered = num_columns * problem.gathered_bytes(direction)
    blocks = -(-gathered // int(_CACHE_SHARE * gpu_of(problem.device).cache_bytes))
    if rows.num_edges < _SWEPT_EDGES * blocks * rows.num_rows:
        blocks = 1
    max_edges = max_edges_of(rows.num_edges, rows.max_degree)
    if blocks > 1 or rows.max_degree > max_edges:
        longest = ORDERED_EDGES if blocks > 1 else min(2 * max_edges, ORDERED_EDGES)
        return RowSplitPlan({**constants, "ORDERED": 1}, longest, max(1, blocks))
    return RowSplitPlan(constants, max_edges, 1)


def specs_of(problem: SegmentProblem, direction: str, plan: Any) -> list[Spec]:
    """Return what is compiled for a planned pass."""
    texts = (("message.cuh", f'#include "segment/messages/{problem.message}.cuh"'),)
    return [Spec(f"segment/{STEMS[direction]}.cu", tuple(plan.constants.items()), texts=texts)]


def _cost(problem: SegmentProblem, direction: str, graph: Graph, plan: RowSplitPlan, gpu: Gpu) -> Cost:
    """Estimated time of the pass: nodes travel once, gathered rows come from the last-level cache."""
    rows, num_columns = side_of(direction, graph)
    edge_bytes = {0: 4, 1: 8 + problem.row_bytes, 2: 12}[plan.constants["EDGE"]]
    moved = rows.num_rows * problem.row_bytes * len(problem.stats) + num_columns * problem.gathered_bytes(direction)
    return Cost(
        {
            "memory": (moved + rows.num_edges * edge_bytes) / gpu.memory_bytes_per_s,
            "gathers": rows.num_edges * problem.gathered_bytes(direction) / gpu.cache_bytes_per_s,
        },
        {"launches": plan.blocks * gpu.launch_s},
    )


ROW_SPLIT = SimpleNamespace(
    hands_over=False,
    deterministic=True,
    refillable=True,
    reasons_against=lambda problem, direction, graph: [],
    plan_pass=_plan_pass,
    cost=_cost,
    specs=specs_of,
)

FAMILY = Family(
    name="segment",
    candidates=MappingProxyType({"row_split": ROW_SPLIT}),
    others=MappingProxyType({}),
    rules=MappingProxyType({}),
    unsupported=unsupported_reasons,
)
