"""How products of rows that are sorted by type with the weights of their types are divided among thread blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import torch

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import device_reasons
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.statements.spec import Spec

PRODUCTS = ("linear", "transposed", "outer")
"""`X W`, `X W^T`, and `X^T G` summed over the rows of a type."""
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
_SPLIT_PRODUCTS = 3
"""Products of TF32 numbers that one product of split numbers takes."""


@dataclass(frozen=True)
class SegmentGemmProblem:
    """What decides the kernel of a product by type, apart from the rows.

    Attributes:
        product: One of ``PRODUCTS``.
        features: Features K of a weight [T, H, K, N].
        channels: Channels N of it.
        heads: Heads H of it.
        summed: Whether a linear map adds up its heads.
        dtype: Dtype of rows and weights.
        device: Where they live.
        tf32: Whether factors may be rounded to TF32.
    """

    product: str
    features: int
    channels: int
    heads: int
    summed: bool
    dtype: torch.dtype
    device: torch.device
    tf32: bool = False

    @property
    def is_current(self) -> bool:
        """Whether torch still lets products be rounded as the problem says."""
        return self.tf32 == tf32_allowed(self.dtype)

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
    schedule: ClassVar[str] = "tiles"

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        c = self.constants
        return (32 * c["WARPS_M"] * c["WARPS_N"] * c.get("WARPS_K", 1), 1, 1)

    def __str__(self) -> str:
        c = self.constants
        return f"tiles of {c['TILE_M']} x {c['TILE_N']}, items of {self.length} rows in {self.groups} groups"


def unsupported_reasons(problem: SegmentGemmProblem) -> list[str]:
    """Return every reason why no kernel can run ``problem``; empty when one can."""
    reasons = device_reasons(problem.device)
    if problem.dtype not in STORAGE:
        reasons.append(f"{problem.dtype} has no fused kernel (float32, float16, bfloat16)")
    if not problem.features * problem.channels * problem.heads:
        reasons.append("a weight without numbers, which no kernel multiplies")
    return reasons


def plan_of(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    """Return how a product of so many rows and types runs."""
    plan = _plan_outer if problem.product == "outer" else _plan_linear
    return plan(problem, num_rows, num_types)


def specs_of(problem: SegmentGemmProblem, plan: SegmentGemmPlan) -> list[Spec]:
    """Return what is compiled for a plan; no GPU is needed."""
    stem = "outer" if problem.product == "outer" else "gemm"
    return [Spec(f"relational/{stem}.cu", tuple(plan.constants.items()))]


def cost_of(problem: SegmentGemmProblem, plan: SegmentGemmPlan, num_rows: int, num_types: int, gpu: Gpu) -> Cost:
    """Return the estimated time: rows and weights travel once, zeros that fill up tiles are multiplied too."""
    c, heads = plan.constants, problem.heads
    weights = num_types * heads * problem.features * problem.channels * problem.dtype.itemsize
    moved = num_rows * heads * (problem.features + problem.channels) * problem.dtype.itemsize + weights
    places = c.get("PLACES", c["TILE_M"])
    products = 2 * plan.groups * places * c["TILE_N"] * (num_rows + c["TILE_M"] * num_types / 2)
    rate = gpu.tensor_flops * (2 if problem.dtype.itemsize == 2 else 1 / (_SPLIT_PRODUCTS if problem.split else 1))
    launches = 1 + (problem.product == "outer")
    return Cost(
        {"memory": moved / gpu.memory_bytes_per_s, "products": products / rate}, {"launches": launches * gpu.launch_s}
    )


def _tile(size: int, sizes: tuple[int, ...]) -> int:
    """Return the size of tiles that waste little and are few."""
    return min(sizes, key=lambda tile: -(-size // tile) * (tile + 16))


def _column_tile(columns: int) -> int:
    return _tile(columns, (64, 32, 16, 8))


def _tiles_outer(problem: SegmentGemmProblem) -> tuple[int, int]:
    return _tile(problem.features, (64, 32, 16)), _column_tile(problem.channels)


def _groups(problem: SegmentGemmProblem) -> int:
    if problem.product == "outer":
        rows, columns = _tiles_outer(problem)
        return problem.heads * -(-problem.features // rows) * -(-problem.channels // columns)
    width = problem.features if problem.product == "transposed" else problem.channels
    return (1 if problem.summed else problem.heads) * -(-width // _column_tile(width))


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n, and 1 below that."""
    return 1 << max(n, 1).bit_length() - 1


def _plan_linear(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    places, columns = problem.features, problem.channels
    if problem.product == "transposed":
        places, columns = columns, places
    tile_n = _column_tile(columns)
    tile_m, warps_m, warps_n = (64, 2, 2) if tile_n == 64 else (128, 4, 1)
    summed = problem.heads if problem.summed else 1
    chunks = summed * -(-places * problem.dtype.itemsize // 64)
    held = chunks * tile_n * 64 <= _HELD_BYTES
    stage = min(chunks, 2) * 64 * (tile_m + (0 if held else tile_n))
    groups = _groups(problem)
    items = max(1, _LINEAR_ITEMS * gpu_of(problem.device).multiprocessors // groups)
    constants = {
        "STORAGE": STORAGE[problem.dtype],
        "SPLIT": int(problem.split),
        "PLACES": places,
        "COLUMNS": columns,
        "SUMMED": summed,
        "TRANSPOSED": int(problem.product == "transposed"),
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "STAGES": _STAGES,
        "HELD": int(held),
        "ITEM_ROWS": LINEAR_ROWS,
        # Three where split numbers and sums, or what is read of a weight, fill the registers.
        "MIN_BLOCKS": 3 if tile_n >= 32 and (problem.split or not held) else 4,
    }
    length = max(_FEWEST_ROWS, min(LINEAR_ROWS, _power_of_two(num_rows // items)))
    shared_bytes = (chunks * tile_n * 64 if held else 0) + _STAGES * stage
    return SegmentGemmPlan(MappingProxyType(constants), length, groups, shared_bytes)


def _plan_outer(problem: SegmentGemmProblem, num_rows: int, num_types: int) -> SegmentGemmPlan:
    tile_m, tile_n = _tiles_outer(problem)
    warps_n = max(1, min(_WARPS if tile_m == 16 else 2, tile_n // 16))
    warps_m = min(_WARPS // warps_n, tile_m // 16)
    constants = {
        "STORAGE": STORAGE[problem.dtype],
        "SPLIT": int(problem.split),
        "FEATURES": problem.features,
        "CHANNELS": problem.channels,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "WARPS_K": _WARPS // (warps_m * warps_n),
        "MIN_BLOCKS": 3 if tile_m * tile_n == 4096 else 4,
    }
    groups = _groups(problem)
    # Each type has an item that is not full.
    wanted = max(1, _SUMMED_ITEMS * gpu_of(problem.device).multiprocessors // groups)
    balanced = num_rows // max(wanted // 4, wanted - num_types // 2, 1)
    partial = 4 * problem.heads * problem.features * problem.channels
    least = max(_FEWEST_SUMMED_ROWS, -(-num_rows * partial // _PARTIAL_BYTES))
    length = max(least, min(_MOST_SUMMED_ROWS, _power_of_two(balanced)))
    shared_bytes = 2 * 4 * _STAGE_LINES * (_line(tile_m) + _line(tile_n))
    return SegmentGemmPlan(MappingProxyType(constants), length, groups, shared_bytes)


def _line(tile: int) -> int:
    """Words from line to line of a tile in shared memory, as the kernel lays them out."""
    return tile if tile % 16 == 8 else tile + 8
