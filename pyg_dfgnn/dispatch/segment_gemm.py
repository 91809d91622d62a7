"""How products of rows that are sorted by type with the weights of their types are divided among thread blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch

from pyg_dfgnn.dispatch.gpu import gpu_of
from pyg_dfgnn.dispatch.traversal import STORAGE, storage_reasons
from pyg_dfgnn.graph.node_ranges import ceil_div
from pyg_dfgnn.statements.spec import Spec

PRODUCTS = ("linear", "transposed", "outer")
"""`X W`, `X W^T`, and `X^T G` summed over the rows of a type."""
FOLDS = ("none", "columns", "rows")
"""How the H heads of a weight are taken together: not at all; as columns of a result, of rows that all heads share; as
features of outer products, of gradients that all share."""
LINEAR_ROWS = 512
"""Most rows of an item of a linear map: their places are in shared memory."""
_FEWEST_ROWS, _FEWEST_SUMMED_ROWS = 64, 128
"""Fewest rows of an item of a linear map, and of a sum over rows."""
_MOST_SUMMED_ROWS = 1 << 12
"""Most rows of an item of a sum, if there is memory for so many partial sums: longer sums round more."""
_PARTIAL_BYTES = 128 << 20
"""Most memory for partial sums, unless one of them takes more."""
_LINEAR_ITEMS, _SUMMED_ITEMS = 8, 4
"""Items per multiprocessor that keep it busy to the end."""
_HELD_BYTES = 64 << 10
"""Most shared memory for the part of a weight that a block holds."""
_STAGES = 3
_STAGE_LINES = 32
_WARPS = 4


@dataclass(frozen=True)
class SegmentGemmProblem:
    """Facts of a product by type that decide its kernel, apart from the rows.

    Attributes:
        product: One of ``PRODUCTS``.
        features: Features K of a weight [T, H, K, N].
        channels: Channels N of it.
        heads: Heads H of it.
        fold: One of ``FOLDS``: "none" and "columns" for any product, "rows" for "outer".
        dtype: Dtype of rows and weights.
        device: Where they live.
        tf32: Whether factors may be rounded to TF32.
        is_exact: Whether results of a linear map are float32 whatever the dtype.
    """

    product: str
    features: int
    channels: int
    heads: int
    fold: str
    dtype: torch.dtype
    device: torch.device
    tf32: bool = False
    is_exact: bool = False

    @property
    def launch_heads(self) -> int:
        """Heads that thread blocks of their own take."""
        return self.heads if self.fold == "none" else 1

    @cached_property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the matrix that a product by one type is made with, or sums up."""
        rows, columns = self.features, self.channels
        if self.product == "transposed":
            rows, columns = columns, rows
        if self.fold == "columns":
            return rows, columns * self.heads
        return (rows if self.fold == "none" else rows * self.heads), columns

    @property
    def split(self) -> bool:
        """Whether tensor cores multiply each number as two TF32 numbers."""
        return self.dtype is torch.float32 and not self.tf32


@dataclass(frozen=True)
class SegmentGemmPlan:
    """How thread blocks divide a product.

    Attributes:
        constants: What the kernel is specialised by.
        length: Most rows of an item.
        groups: Thread blocks of an item: heads and tiles.
        shared_bytes: Dynamic shared memory of a block.
    """

    constants: Mapping[str, int] = field(hash=False)
    length: int
    groups: int
    shared_bytes: int

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        c = self.constants
        return (32 * c["WARPS_M"] * c["WARPS_N"] * c.get("WARPS_K", 1), 1, 1)


def unsupported_reasons(problem: SegmentGemmProblem) -> list[str]:
    """Return every reason why no kernel can run ``problem``; empty when one can."""
    reasons = storage_reasons(problem.dtype, problem.device)
    if not problem.features * problem.channels * problem.heads:
        reasons.append("a weight without numbers, which no kernel multiplies")
    return reasons


def plan_of(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    """Return how a product of so many rows and types runs."""
    plan = _plan_outer if problem.product == "outer" else _plan_linear
    return plan(problem, num_rows, num_types)


def specs_of(problem: SegmentGemmProblem, plan: SegmentGemmPlan) -> list[Spec]:
    """Return what is compiled for a plan; no GPU is needed."""
    stem = "outer" if problem.product == "outer" else "segment_gemm"
    return [Spec(f"relational/{stem}.cu", tuple(plan.constants.items()))]


def _tile(size: int, sizes: tuple[int, ...]) -> int:
    """Return the size of tiles that waste little and are few."""
    return min(sizes, key=lambda tile: ceil_div(size, tile) * (tile + 16))


def _column_tile(columns: int) -> int:
    return _tile(columns, (64, 32, 16, 8))


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n, and 1 below that."""
    return 1 << max(n, 1).bit_length() - 1


def _plan_linear(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    places, columns = problem.extent
    is_transposed = problem.product == "transposed"
    tile_n = _column_tile(columns)
    tile_m, warps_m, warps_n = (64, 2, 2) if tile_n == 64 else (128, 4, 1)
    chunks = ceil_div(places * problem.dtype.itemsize, 64)
    is_held = chunks * tile_n * 64 <= _HELD_BYTES
    constants = {
        "STORAGE": STORAGE[problem.dtype],
        "SPLIT": int(problem.split),
        "EXACT": int(problem.is_exact),
        "PLACES": places,
        "COLUMNS": columns,
        "HEAD_COLUMNS": problem.features if is_transposed else problem.channels,
        "TRANSPOSED": int(is_transposed),
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "STAGES": _STAGES,
        "HELD": int(is_held),
        "ITEM_ROWS": LINEAR_ROWS,
        # Three where split numbers and sums, or what is read of a weight, fill the registers.
        "MIN_BLOCKS": 3 if tile_n >= 32 and (problem.split or not is_held) else 4,
    }
    groups = problem.launch_heads * ceil_div(columns, tile_n)
    items = max(1, _LINEAR_ITEMS * gpu_of(problem.device).multiprocessors // groups)
    length = max(_FEWEST_ROWS, min(LINEAR_ROWS, _power_of_two(num_rows // items)))
    stage = min(chunks, 2) * 64 * (tile_m + (0 if is_held else tile_n))
    shared_bytes = (chunks * tile_n * 64 if is_held else 0) + _STAGES * stage
    return SegmentGemmPlan(MappingProxyType(constants), length, groups, shared_bytes)


def _plan_outer(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    features, channels = problem.extent
    tile_m, tile_n = _tile(features, (64, 32, 16)), _column_tile(channels)
    warps_n = max(1, min(_WARPS if tile_m == 16 else 2, tile_n // 16))
    warps_m = min(_WARPS // warps_n, tile_m // 16)
    constants = {
        "STORAGE": STORAGE[problem.dtype],
        "SPLIT": int(problem.split),
        "FEATURES": features,
        "CHANNELS": channels,
        "HEAD_CHANNELS": problem.channels,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "WARPS_K": _WARPS // (warps_m * warps_n),
        # More would spill.
        "MIN_BLOCKS": 4 if tile_m * tile_n < 4096 else 2 if problem.split else 3,
    }
    groups = problem.launch_heads * ceil_div(features, tile_m) * ceil_div(channels, tile_n)
    # Each type has an item that is not full.
    wanted = max(1, _SUMMED_ITEMS * gpu_of(problem.device).multiprocessors // groups)
    balanced = num_rows // max(wanted // 4, wanted - num_types // 2, 1)
    partial = 4 * problem.heads * problem.features * problem.channels
    least = max(_FEWEST_SUMMED_ROWS, ceil_div(num_rows * partial, _PARTIAL_BYTES))
    length = max(least, min(_MOST_SUMMED_ROWS, _power_of_two(balanced)))
    shared_bytes = 2 * 4 * _STAGE_LINES * (_line(tile_m) + _line(tile_n))
    return SegmentGemmPlan(MappingProxyType(constants), length, groups, shared_bytes)


def _line(tile: int) -> int:
    """Words from line to line of a tile in shared memory, as the kernel lays them out."""
    return tile if tile % 16 == 8 else tile + 8
