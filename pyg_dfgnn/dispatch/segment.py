"""Which kernels aggregate over edges: the problem, what no kernel can run, and the schedule `row_split`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from pyg_dfgnn.dispatch.core import Family
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import (
    ORDERED_EDGES,
    STORAGE,
    RowSplitPlan,
    has_few_edges,
    is_local,
    lane_constants,
    max_edges_of,
    storage_reasons,
)
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.adjacency import INT32_MAX
from pyg_dfgnn.statements.segment import COPY, EXTREMES, MESSAGES, MOMENTS, STATS, SUMS, reads_messages
from pyg_dfgnn.statements.spec import Spec


def max_channels(stats: Sequence[str]) -> int:
    """Return the channels of one launch, whose sums of several statistics have to fit in registers; more are cut."""
    return 512 if len(stats) == 1 and stats[0] not in MOMENTS else 256


@dataclass(frozen=True)
class SegmentProblem:
    """Facts of one aggregation that decide its kernels, apart from the graph.

    Attributes:
        message: Name of a record in ``MESSAGES``.
        stats: Some of ``STATS``, in the order of the outputs.
        channels: Features F.
        dtype: Dtype of the features.
        device: Where they live.
        source_scaled: Whether messages are scaled by a number of their source.
        target_scaled: Whether sums are scaled by a number of their target beside the degree.
        self_loops: Whether each node has one more edge, to itself, that no array holds.
        edge_channels: Numbers per edge that a linear layer maps to F, where the message reads such; else 0.
    """

    message: str
    stats: tuple[str, ...]
    channels: int
    dtype: torch.dtype
    device: torch.device
    source_scaled: bool = False
    target_scaled: bool = False
    self_loops: bool = False
    edge_channels: int = 0

    is_current = True

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one node."""
        return self.channels * self.dtype.itemsize

    @property
    def has_moments(self) -> bool:
        """Whether there are variances or deviations, whose gradient a pass over the targets restates."""
        return not set(self.stats).isdisjoint(MOMENTS)

    def count(self, stats: Sequence[str]) -> int:
        """Return how many of `stats` are asked for."""
        return len(set(self.stats).intersection(stats))

    @property
    def constants(self) -> dict[str, int]:
        """Constants that every kernel of the family is specialised by."""
        message = MESSAGES[self.message]
        is_copy = message is COPY and not self.source_scaled
        return {
            "STORAGE": STORAGE[self.dtype],
            **{stat.upper(): int(stat in self.stats) for stat in STATS},
            **{f"AT_{stat.upper()}": self.stats.index(stat) if stat in self.stats else 0 for stat in STATS},
            "EDGE": (None, "vector", "scalar", "row").index(message.edge),
            **({"EDGE_NUMBERS": self.edge_channels} if message.edge == "row" else {}),
            "HAS_KEY": int(message.key),
            "HAS_TARGET": int(message.target),
            "SOURCE_SCALED": int(self.source_scaled),
            "TARGET_SCALED": int(self.target_scaled),
            "SELF_LOOPS": int(self.self_loops),
            "ROUNDS": int(self.dtype.itemsize == 2 and not is_copy and self.count(EXTREMES) > 0),
            "READS_MESSAGES": int(reads_messages(message, self.stats)),
        }

    def gathered_bytes(self, direction: str) -> int:
        """Bytes of the rows that a pass gathers for one edge."""
        message = MESSAGES[self.message]
        if direction != "sources":
            return self.row_bytes * (1 + message.key)
        numbers = self.dtype.itemsize * (self.count(SUMS) + 2 * self.count(("mul",)))
        if self.has_moments:
            numbers = 8 + 2 * self.dtype.itemsize * self.count(("mul",))
        return self.channels * (numbers + 2 * self.count(EXTREMES)) + self.row_bytes * message.target

    def fragments(self, direction: str) -> int:
        """Numbers per channel of the state of a row."""
        if direction == "sources":
            return 1 + MESSAGES[self.message].key
        if direction == "targets":
            return 1
        sums = 2 if self.has_moments else min(1, self.count(SUMS))
        return sums + (2 if direction == "args" else 1) * self.count(EXTREMES) + 2 * self.count(("mul",))


LAYER_NUMBERS = 32
"""Weights of a linear layer of the edges that a lane holds in registers, beside as many sums for their gradient."""


@torch.compiler.assume_constant_result
def lane_numbers(channels: int, itemsize: int) -> int:
    """Return how many channels of a row a lane holds."""
    lanes = lane_constants(1, channels, itemsize, True)
    return lanes["LANE_VECS"] * lanes["VEC"]


def holds_layer(problem: SegmentProblem) -> bool:
    """Return whether the lanes hold a linear layer of the edges."""
    numbers = lane_numbers(problem.channels, problem.dtype.itemsize)
    return 1 <= problem.edge_channels and problem.edge_channels * numbers <= LAYER_NUMBERS


def unsupported_reasons(problem: SegmentProblem) -> list[str]:
    """Return every reason why no fused kernel can run ``problem``; empty when one can."""
    reasons = storage_reasons(problem.dtype, problem.device)
    most = max_channels(problem.stats)
    if not 1 <= problem.channels <= most:
        reasons.append(f"{problem.channels} channels in one launch, the kernels take 1 to {most}")
    if MESSAGES[problem.message].edge == "row" and not holds_layer(problem):
        most = LAYER_NUMBERS // lane_numbers(problem.channels, problem.dtype.itemsize)
        reasons.append(f"{problem.edge_channels} numbers per edge, the kernels map 1 to {most} to so many channels")
    if MESSAGES[problem.message].target and not set(problem.stats) <= set(SUMS):
        reasons.append(f"the message {problem.message!r} is only summed or averaged")
    return reasons


_STEMS: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "args": "forward", "targets": "backward_targets", "sources": "backward_sources"}
)
"""Stem of the kernel source of each pass over edges; "args" is the forward pass that leaves what backward reads."""

_CACHE_SHARE = 0.8
"""Bytes that a sweep should gather, as a share of the cache."""
_SWEPT_EDGES = 32
"""Edges that the average row needs in each block of columns: each sweep reads and writes the state of every row."""


class FeatureParallelPlan(RowSplitPlan):
    """A pass whose lanes take the features of one edge of a row at a time; lanes to spare take further rows."""

    schedule = "feature_parallel"


class NeighbourParallelPlan(RowSplitPlan):
    """A pass whose lanes to spare take further edges of the same row, however short rows are."""

    schedule = "neighbour_parallel"


@cache
def constants_of(problem: SegmentProblem, direction: str, wide: bool) -> Mapping[str, int]:
    """Return the constants of a pass.

    Args:
        problem: What is computed.
        direction: "forward", "args", "targets" or "sources".
        wide: Whether lanes to spare go to edges of the same row rather than to further rows.
    """
    lanes = lane_constants(1, problem.channels, problem.dtype.itemsize, wide)
    elements = lanes["LANE_VECS"] * lanes["VEC"]
    # Who looks up extremes waits for memory: more warps are better then than more edges of one.
    looks_up = direction == "sources" and problem.count(EXTREMES) > 0
    in_flight = (16 if looks_up else 32) // (elements * max(1, problem.fragments(direction) // 2))
    # The rows of the edges in flight, and the layer that maps them, take registers too.
    most = 2 if looks_up or problem.edge_channels > 4 else 4
    unroll = max(1, min(most, in_flight))
    constants = {
        **problem.constants,
        **lanes,
        "ARGS": int(direction == "args"),
        # A power of two, so that moments take their centers after as many edges in all passes.
        "UNROLL": 1 << (unroll.bit_length() - 1),
        "MIN_BLOCKS": 1,
        "ORDERED": 0,
        "JOINED": 0,
        "SMEM": 0,
        "IN_SHARED": 0,
    }
    return MappingProxyType(constants)


def reads_no_edge(problem: SegmentProblem, direction: str) -> bool:
    """Return whether a pass restates the gradient of moments, target by target."""
    return direction == "targets" and problem.has_moments


def _plan_pass(
    problem: SegmentProblem, direction: str, graph: Graph, kind: type[RowSplitPlan] = RowSplitPlan
) -> RowSplitPlan:
    if reads_no_edge(problem, direction):
        return RowSplitPlan(constants_of(problem, direction, wide=False), INT32_MAX, 1)
    rows = graph.side(direction)
    constants = constants_of(problem, direction, wide=kind is not FeatureParallelPlan)
    if graph.is_bare:
        few = has_few_edges(graph.mean_degree(direction), 1, constants)  # type: ignore[attr-defined]
        return kind(constants_of(problem, direction, wide=False) if few else constants, INT32_MAX, 1)
    if graph.is_static:
        # A list of long rows, or of blocks of columns, would not fit the edges to come.
        return kind(constants, rows.max_degree, 1)
    few = has_few_edges(rows.num_edges, rows.num_rows, constants)
    if few and kind is not NeighbourParallelPlan:
        constants = constants_of(problem, direction, wide=False)
    cache_bytes = int(_CACHE_SHARE * gpu_of(problem.device).cache_bytes)
    column_bytes = problem.gathered_bytes(direction)
    blocks = -(-rows.num_cols * column_bytes // cache_bytes)
    if rows.num_edges < _SWEPT_EDGES * blocks * rows.num_rows:
        blocks = 1
    max_edges = max_edges_of(rows.num_edges, rows.max_degree)
    if blocks > 1 and is_local(graph, direction, cache_bytes // column_bytes):
        return kind(constants, max_edges, 1, ascending=True)
    if blocks > 1 or rows.max_degree > max_edges:
        longest = ORDERED_EDGES if blocks > 1 else max_edges
        return kind({**constants, "ORDERED": 1}, longest, max(1, blocks))
    return kind(constants, max_edges, 1)


def specs_of(problem: SegmentProblem, direction: str, plan: Any) -> list[Spec]:
    """Return what is compiled for a planned pass."""
    texts = (("message.cuh", f'#include "segment/messages/{problem.message}.cuh"'),)
    stem = "backward_nodes" if reads_no_edge(problem, direction) else _STEMS[direction]
    return [Spec(f"segment/{stem}.cu", tuple(plan.constants.items()), texts=texts)]


def _cost(problem: SegmentProblem, direction: str, graph: Graph, plan: RowSplitPlan, gpu: Gpu) -> Cost:
    """Estimated time of the pass: nodes travel once, gathered rows come from the last-level cache."""
    rows = graph.side(direction)
    if reads_no_edge(problem, direction):
        return Cost({"memory": rows.num_rows * (problem.row_bytes * 5 + 12) / gpu.memory_bytes_per_s})
    row_bytes = problem.edge_channels * problem.dtype.itemsize
    edge_bytes = {0: 4, 1: 8 + problem.row_bytes, 2: 12, 3: 8 + row_bytes}[plan.constants["EDGE"]]
    traffic_bytes = rows.num_rows * problem.row_bytes * len(problem.stats)
    traffic_bytes += rows.num_cols * problem.gathered_bytes(direction)
    return Cost(
        {
            "memory": (traffic_bytes + rows.num_edges * edge_bytes) / gpu.memory_bytes_per_s,
            "gathers": rows.num_edges * problem.gathered_bytes(direction) / gpu.cache_bytes_per_s,
        },
        {"launches": plan.blocks * gpu.launch_s},
    )


def _row_split(kind: type[RowSplitPlan]) -> SimpleNamespace:
    """Return the schedule whose plans are of a kind."""
    return SimpleNamespace(
        passes_share_buffers=False,
        deterministic=True,
        refillable=True,
        reasons_against=lambda problem, direction, graph: [],
        plan_pass=partial(_plan_pass, kind=kind),
        cost=_cost,
        specs=specs_of,
    )


@dataclass(frozen=True)
class CusparsePlan:
    """One product of the adjacency and the features by cuSPARSE.

    Attributes:
        algorithm: Its algorithm.
    """

    algorithm: str

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return _SCHEDULES[self.algorithm]

    def __str__(self) -> str:
        return f"cuSPARSE, algorithm {self.algorithm}"


_SCHEDULES = MappingProxyType({"default": "cusparse", "csr_alg3": "cusparse_alg3"})
_CUSPARSE_TIME = 1.3
"""Time of cuSPARSE's faster algorithm over that of `row_split`, about as on large graphs on an H200."""


def _cusparse(algorithm: str) -> SimpleNamespace:
    """Return the candidate of an algorithm of cuSPARSE."""

    def reasons_against(problem: SegmentProblem, direction: str, graph: Graph) -> list[str]:
        reasons = []
        if problem.device.type != "cuda" or not torch.cuda.is_available():
            reasons.append("cuSPARSE needs a GPU")
        if MESSAGES[problem.message] is not COPY or problem.stats != ("sum",) or problem.self_loops:
            reasons.append("cuSPARSE sums the features of the sources and nothing else")
        if problem.source_scaled or problem.target_scaled:
            reasons.append("scales would be values of the matrix, which it keeps")
        if algorithm == "default" and problem.dtype.itemsize == 2:
            reasons.append("the default algorithm of cuSPARSE adds up parts of a row in 16 bits")
        return reasons

    def cost(problem: SegmentProblem, direction: str, graph: Graph, plan: Any, gpu: Gpu) -> Cost:
        rows = _cost(problem, direction, graph, _plan_pass(problem, direction, graph), gpu)
        return Cost({"like row_split": _CUSPARSE_TIME * rows.seconds})

    return SimpleNamespace(
        passes_share_buffers=False,
        deterministic=algorithm == "csr_alg3",
        refillable=False,
        reasons_against=reasons_against,
        plan_pass=lambda problem, direction, graph: CusparsePlan(algorithm),
        cost=cost,
        specs=lambda problem, direction, plan: [],
    )


FAMILY = Family(
    name="segment",
    candidates=MappingProxyType(
        {
            "row_split": _row_split(RowSplitPlan),
            **{name: _cusparse(algorithm) for algorithm, name in _SCHEDULES.items()},
        }
    ),
    others=MappingProxyType({kind.schedule: _row_split(kind) for kind in (FeatureParallelPlan, NeighbourParallelPlan)}),
    rules=MappingProxyType({}),
    unsupported=unsupported_reasons,
)
