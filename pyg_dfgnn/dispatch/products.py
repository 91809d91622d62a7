"""How the products of linear layers of one input are divided among thread blocks."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pyg_dfgnn.dispatch.gpu import gpu_of

MAX_LAYERS = 4
"""That one launch takes."""
DEPTH = 32
"""Places of a sum that a thread block reads at a time."""
SUM_THREADS = 128
"""Threads of a block that adds partial sums, four numbers each."""
_SHARE_ROWS = 1 << 12
"""The most rows of one sum over nodes, if there is memory for so many sums: longer ones round more."""
_FEW_ROWS, _MANY_ROWS = 1 << 13, 1 << 16
"""Up to, and from how many rows on other tiles were the fastest on an H200 (`results/tuning/products.csv`)."""
_PARTIAL_BYTES = 128 << 20
"""The most memory for sums over shares of the rows, unless one share takes more."""


@dataclass(frozen=True)
class Tile:
    """What a thread block computes at a time.

    Attributes:
        rows: Of the result.
        columns: Of the result.
        row_warps: Warps that share the rows.
        column_warps: Warps that share the columns.
        stages: Steps of the sum in shared memory, one of which is worked on.
        min_blocks: Blocks per multiprocessor that the compiler leaves registers for.
    """

    rows: int
    columns: int
    row_warps: int
    column_warps: int
    stages: int
    min_blocks: int

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return (32 * self.row_warps * self.column_warps, 1, 1)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 4 * self.stages * (self.rows + self.columns) * DEPTH

    def constants(self, layers: int, side_by_side: bool) -> tuple[tuple[str, int], ...]:
        """Those of the kernels in `kernels/products`."""
        return (
            ("STORAGE", 0),
            ("SPLIT", 1),
            ("DEPTH", DEPTH),
            ("MAX_LAYERS", MAX_LAYERS),
            ("LAYERS", layers),
            ("BESIDE", int(side_by_side)),
            ("TILE_M", self.rows),
            ("TILE_N", self.columns),
            ("WARPS_M", self.row_warps),
            ("WARPS_N", self.column_warps),
            ("STAGES", self.stages),
            ("MIN_BLOCKS", self.min_blocks),
        )


@dataclass(frozen=True)
class Shares:
    """How backward divides its work.

    Attributes:
        x_blocks: Thread blocks for the gradient of the input.
        weight_blocks: Thread blocks for those of weights and biases.
        rows: Of the input, in one share of the sums over them.
        splits: Shares.
    """

    x_blocks: int
    weight_blocks: int
    rows: int
    splits: int


def forward_tile(rows: int, channels: int) -> Tile:
    """The tile for results of so many rows, [rows, channels] for each layer."""
    if rows >= _MANY_ROWS and channels > 64:
        return Tile(rows=64, columns=128, row_warps=2, column_warps=2, stages=3, min_blocks=2)
    return Tile(rows=64, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=3)


def backward_tile(rows: int) -> Tile:
    """The tile for the gradients of an input of so many rows, and of the weights."""
    if rows <= _FEW_ROWS:
        return Tile(rows=32, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=4)
    if rows < _MANY_ROWS:
        return Tile(rows=64, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=3)
    return Tile(rows=128, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=2)


def shares_of(tile: Tile, layers: int, rows: int, features: int, channels: int, device: torch.device) -> Shares:
    """The shares of a backward pass: so many that they fill the device, or a multiple of that."""
    x_blocks = -(-rows // tile.rows) * -(-features // tile.columns)
    tiles = layers * -(-channels // tile.rows) * -(-features // tile.columns)
    filling = max(1, gpu_of(device).multiprocessors * tile.min_blocks // tiles)
    wanted = filling * -(-rows // (filling * _SHARE_ROWS))
    room = _PARTIAL_BYTES // (4 * layers * channels * (features + 1))
    splits = max(1, min(wanted, rows // (2 * DEPTH), room))
    share = -(-rows // splits // DEPTH) * DEPTH
    splits = -(-rows // share)
    return Shares(x_blocks, tiles * splits, share, splits)
