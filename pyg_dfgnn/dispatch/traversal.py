"""Common parts of the plans of all traversals: how a feature row maps to lanes, and how long rows are cut."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import ClassVar

import torch

from pyg_dfgnn.dispatch.core import device_reasons
from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.reorder import gather_misses

STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The constant of each dtype that kernels store."""
WARPS = 4
"""Warps of a block."""


SUMMED_EDGES = 256
"""Edges of a piece whose sums lose little: the relative error of a chain of n equal float32 terms grows with n."""
ORDERED_EDGES = 1024
"""Edges of a chunk of a large graph whose longest rows come first, so that none is left to the end."""
JOINED_EDGES = 8
"""Edges that a chunk should have at least to be worth its part in joining."""


def storage_reasons(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return every reason why no kernel can run on features of a dtype and a device; empty when one can."""
    reasons = device_reasons(device)
    if dtype not in STORAGE:
        reasons.append(f"{dtype} has no fused kernel (float32, float16, bfloat16)")
    return reasons


@dataclass(frozen=True)
class RowSplitPlan:
    """One pass over a compressed side of the graph, a warp or part of one per row.

    Attributes:
        constants: What the kernel is specialised by.
        max_edges: Rows with more edges are split in chunks of at most this many.
        blocks: Number of launches, each over the edges of one block of columns.
        ascending: Whether the edges of each row are taken in ascending order of their columns.
    """

    constants: Mapping[str, int] = field(hash=False)
    max_edges: int
    blocks: int
    ascending: bool = False
    schedule: ClassVar[str] = "row_split"

    def __str__(self) -> str:
        sweep = f", {self.blocks} sweeps over blocks of columns" if self.blocks > 1 else ""
        sweep += ", columns ascending for a cache that holds most of them" if self.ascending else ""
        joined = " joined in a block" if self.constants["JOINED"] else ""
        return f"{layout(self.constants)}, chunks of {self.max_edges} edges{joined}{sweep}"


def counted(number: int, noun: str) -> str:
    """A number of things in words."""
    return f"{number} {noun}{'s' * (number != 1)}"


def lane_layout(c: Mapping[str, int]) -> str:
    """The lanes of a pass in words."""
    return (
        f"{counted(c['HEAD_LANES'], 'lane')} per head, {c['HEAD_SLOTS']} x {counted(c['LANE_HEADS'], 'head')}, "
        f"{counted(c['VEC'], 'element')} per load, "
        f"{counted(c['EDGE_SLOTS'], 'edge slot')} x {counted(c['UNROLL'], 'edge')} in flight"
    )


def layout(c: Mapping[str, int]) -> str:
    """The constants of a pass over rows in words."""
    return f"{lane_layout(c)}, {counted(c['WARP_ROWS'], 'row')} per warp"


def items_per_block(constants: Mapping[str, int]) -> int:
    """Work items of a thread block."""
    return constants["WARPS"] * constants["WARP_ROWS"]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


# Registers decide how many elements of a row a lane may hold.
_LANE_ELEMENTS = 16


@cache
def lane_constants(
    heads: int, channels: int, itemsize: int, wide: bool, loads: int = 1, edge_channels: int = 0
) -> MappingProxyType[str, int]:
    """Map a feature row [H, C] to the lanes of a warp.

    A head takes a lane for every ``loads`` of its 16-byte loads (a power of two, at most 32 lanes); heads sit side by
    side while lanes are left, then a lane takes several heads in turn while its registers allow; the rest are groups of
    heads in other blocks. Lanes still left hold further edges of the same row (``wide``) or further rows. The lanes of
    a head share the ``edge_channels`` of an edge's row, and are as many as its registers ask for.
    """
    vec = next(v for v in (8, 4, 2, 1) if v * itemsize <= 16 and channels % v == 0)
    vecs = channels // vec
    least = power_of_two(-(-edge_channels // _LANE_ELEMENTS)) if edge_channels else 1
    head_lanes = min(32, max(least, power_of_two(vecs) // loads))
    lane_vecs = -(-vecs // head_lanes)
    head_slots = min(power_of_two(heads), 32 // head_lanes)
    lane_heads = 1
    lane_edge = power_of_two(-(-edge_channels // head_lanes)) if edge_channels else 0
    most = max(lane_vecs * vec, lane_edge)
    while lane_heads * head_slots < heads and 2 * lane_heads * most <= _LANE_ELEMENTS:
        lane_heads *= 2
    spare = 32 // (head_lanes * head_slots)
    edge = {}
    if edge_channels:
        width = next(v for v in (8, 4, 2, 1) if v * itemsize <= 16 and edge_channels % v == 0 and v <= lane_edge)
        loaded = -(-edge_channels // (width * head_lanes))
        edge = {"EDGE_CHANNELS": edge_channels, "EDGE_VEC": width, "EDGE_VECS": loaded}
    return MappingProxyType(
        {
            **edge,
            "HEADS": heads,
            "CHANNELS": channels,
            "VEC": vec,
            "HEAD_LANES": head_lanes,
            "LANE_VECS": lane_vecs,
            "HEAD_SLOTS": head_slots,
            "LANE_HEADS": lane_heads,
            "EDGE_SLOTS": spare if wide else 1,
            "WARP_ROWS": 1 if wide else spare,
            "WARPS": WARPS,
        }
    )


def has_few_edges(num_edges: int, num_rows: int, constants: Mapping[str, int]) -> bool:
    """Return whether the average row does not keep its slots busy for two steps, so that rows are better packed."""
    return num_edges <= 2 * constants["UNROLL"] * constants["EDGE_SLOTS"] * num_rows


def max_edges_of(num_edges: int, max_degree: int) -> int:
    """Longest piece of a row that one group of lanes takes.

    Long enough that a graph is not spread over more than some 16,000 warps; beyond that, so that going through a piece
    of the longest row takes about as long as merging all its pieces. Merging takes another launch, so short rows stay
    whole. Not longer than it is good for the sums, which a piece adds up one after the other.
    """
    length = 128 if max_degree <= 128 else min(SUMMED_EDGES, 1.5 * math.sqrt(max_degree))
    return max(32, min(1024, power_of_two(max(_balanced(num_edges), round(length)))))


def _balanced(num_edges: int) -> int:
    """Edges of a chunk that spread a graph over some 16,000 warps."""
    return power_of_two(max(1, num_edges // 16384))


LOCAL_MISSES = 1 / 8
"""Share of gathers that may miss the cache where rows one after the other need no sweeps. On large graphs on an H200
sweeps are mostly slower with less, and faster with more."""
LOCAL_SHARE = 1 / 4
"""Share of the cache that counts for it: thousands of rows are gone through at once."""
_STRETCH = 1 << 23
"""Gathers that tell the share of all."""


def is_local(graph: Graph, direction: str, cache_rows: int) -> bool:
    """Return whether rows one after the other gather from few enough columns for the cache to hold most of these.

    Nodes in a good order do so (:class:`~pyg_dfgnn.transforms.Reorder`), and batches of graphs that are small.

    Args:
        graph: The edges.
        direction: The pass that takes the rows.
        cache_rows: Columns that the cache holds.
    """
    cache_rows = max(1, int(LOCAL_SHARE * cache_rows))
    rows = graph.side(direction)

    def build() -> float:
        count = min(_STRETCH, rows.num_edges // 4)
        first = (rows.num_edges - count) // 2
        return gather_misses(rows.col[first : first + count], cache_rows, count_first=False)

    return graph.derived(("misses", rows.rows, rows.cols, cache_rows), build) <= LOCAL_MISSES


def joined_edges(rows: Adjacency, items: int) -> int:
    """Edges of a chunk where a thread block takes so many items."""
    return max(JOINED_EDGES, power_of_two(-(-rows.max_degree // items)), _balanced(rows.num_edges))
