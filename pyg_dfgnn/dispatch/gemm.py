"""How GEMMs of linear layers of one input are divided among thread blocks."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pyg_dfgnn.dispatch.gpu import H200, gpu_of
from pyg_dfgnn.graph.node_ranges import ceil_div

MAX_LAYERS = 4
"""Most linear layers that one launch takes."""
DEPTH = 32
"""Places of the sum that a thread block reads at a time."""
SPLIT_ROWS = 1 << 12
"""Most rows of one partial sum over nodes, if there is memory for so many partial sums: longer sums round more."""
COLUMN_SUM_THREADS = 256
"""Threads of a block that sums rows."""
_COLUMN_SUM_BYTES = 256
"""Bytes of each row that such a block reads."""
_COLUMN_SUM_BLOCKS = 4
"""Such blocks per multiprocessor."""
_COLUMN_SUM_ROWS = 1 << 7
"""Fewest rows of a partial sum of such a block: it reads as many at a time."""
_PARTIAL_BYTES = 128 << 20
"""Most memory for partial sums, unless one of them takes more."""
_FEW_ROWS, _MANY_ROWS = 1 << 13, 1 << 16
"""Bounds of the number of rows between which tiles have another size."""
_WARPGROUP_ROWS = _FEW_ROWS
"""Most rows that tiles take where there are warpgroups."""
_WARPGROUP_WIDTHS = range(64, 513, 4)
"""Features and channels that warpgroups take: below 64, half of their work or more would be on zeros."""
_GROUP = 128
"""Most places of one section, and most features and channels of which a thread block sums weight gradients."""
_MAX_HELD = 1 << 15
"""Most numbers that a thread block holds, at first in its registers."""
_SCALES_BYTES = 1 << 12
"""Shared memory that is left for scales and biases."""


@dataclass(frozen=True)
class GemmTile:
    """The part of a result that a thread block computes at a time.

    Attributes:
        rows: Rows of the result.
        columns: Columns of the result.
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

    def constants(self, layers: int, interleaved: bool, split: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants of `kernels/gemm/forward.cu` and `backward.cu`."""
        return (
            *_layer_constants(layers, interleaved),
            ("SPLIT", int(split)),
            ("DEPTH", DEPTH),
            ("TILE_M", self.rows),
            ("TILE_N", self.columns),
            ("WARPS_M", self.row_warps),
            ("WARPS_N", self.column_warps),
            ("STAGES", self.stages),
            ("MIN_BLOCKS", self.min_blocks),
        )


@dataclass(frozen=True)
class Strips:
    """Strips of 64 rows that the warpgroups of a thread block compute; the block holds the matrix of the other side.

    Attributes:
        backward: Whether the result is the gradient of the input.
        layers: Number of linear layers.
        features: Features of the input.
        channels: Channels of each layer.
        columns: Columns of the result in one block, 64 or 128.
        section: Places of the sum that a warpgroup reads at a time.
        warpgroups: Warpgroups of a block.
    """

    backward: bool
    layers: int
    features: int
    channels: int
    columns: int
    section: int
    warpgroups: int = 2

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return (128 * self.warpgroups, 1, 1)

    @cached_property
    def places(self) -> int:
        """Places of the sum over one matrix, filled up to whole sections."""
        return ceil_div((self.channels if self.backward else self.features), self.section) * self.section

    @cached_property
    def _held(self) -> int:
        """Numbers that a block holds."""
        return self.places * self.columns * (self.layers if self.backward else 1)

    @cached_property
    def _held_bytes(self) -> int:
        """A number is two fp16 numbers."""
        return 4 * self._held

    @cached_property
    def _section_bytes(self) -> int:
        """Memory for a section of the rows of all warpgroups."""
        return 4 * 64 * self.warpgroups * self.section

    @cached_property
    def ring(self) -> int:
        """Sections that are copied ahead; 0 where there is no room."""
        room = (H200.shared_bytes - _SCALES_BYTES - self._held_bytes) // self._section_bytes
        return max(0, min(room, 2 * self._held // self.columns // self.section))

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._held_bytes + self.ring * self._section_bytes

    @property
    def fits(self) -> bool:
        """Whether a block has room for what it holds, and for two sections of the rows."""
        return self._held <= _MAX_HELD and self.ring > 1

    def blocks(self, rows: int, device: torch.device) -> int:
        """Return the number of blocks: one per multiprocessor, as far as all warpgroups of a block have a strip."""
        width, layers = (self.features, 1) if self.backward else (self.channels, self.layers)
        groups = layers * ceil_div(width, self.columns)
        return groups * max(1, min(gpu_of(device).multiprocessors // groups, ceil_div(rows, 64 * self.warpgroups)))

    def constants(self, interleaved: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants of `kernels/gemm/forward_strips.cu`."""
        return (
            *_layer_constants(self.layers, interleaved),
            ("FEATURES", self.features),
            ("CHANNELS", self.channels),
            ("BACKWARD", int(self.backward)),
            ("COLUMNS", self.columns),
            ("PLACES", self.places),
            ("SECTION", self.section),
            ("RING", self.ring),
            ("WARPGROUPS", self.warpgroups),
        )


@dataclass(frozen=True)
class WeightGrad:
    """How the two warpgroups of a thread block sum weight gradients of up to 128 features and channels over rows.

    Attributes:
        layers: Number of linear layers.
        features: Features of the input.
        channels: Channels of each layer.
    """

    layers: int
    features: int
    channels: int

    block = (256, 1, 1)
    """Threads of a block."""
    shared_bytes = 2 * 2 * 4 * 32 * _GROUP
    """Dynamic shared memory: two sections of 32 rows of the input, of which a number is two TF32 numbers."""

    @property
    def groups(self) -> int:
        """Thread blocks for one partial sum."""
        return self.layers * ceil_div(self.channels, _GROUP) * ceil_div(self.features, _GROUP)

    def constants(self, interleaved: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants of `kernels/gemm/weight_grad.cu`."""
        sizes = ("FEATURES", self.features), ("CHANNELS", self.channels)
        return *_layer_constants(self.layers, interleaved), *sizes


def _layer_constants(layers: int, interleaved: bool) -> tuple[tuple[str, int], ...]:
    return (
        ("STORAGE", 0),
        ("MAX_LAYERS", MAX_LAYERS),
        ("LAYERS", layers),
        ("INTERLEAVED", int(interleaved)),
    )


@dataclass(frozen=True)
class SplitK:
    """How a backward pass divides its work.

    Attributes:
        x_blocks: Thread blocks for the gradient of the input.
        weight_blocks: Thread blocks for the gradients of weights and biases.
        rows: Rows of the input in one partial sum.
        splits: Number of partial sums.
    """

    x_blocks: int
    weight_blocks: int
    rows: int
    splits: int


def forward_tile(rows: int, channels: int) -> GemmTile:
    """Return the tile for results [rows, channels] of each layer."""
    if rows >= _MANY_ROWS and channels > 64:
        return GemmTile(rows=64, columns=128, row_warps=2, column_warps=2, stages=3, min_blocks=2)
    return GemmTile(rows=64, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=3)


def backward_tile(rows: int) -> GemmTile:
    """Return the tile for the gradients of an input of so many rows and of the weights."""
    if rows <= _FEW_ROWS:
        return GemmTile(rows=32, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=4)
    if rows < _MANY_ROWS:
        return GemmTile(rows=64, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=3)
    return GemmTile(rows=128, columns=64, row_warps=2, column_warps=2, stages=3, min_blocks=2)


def _takes_warpgroups(rows: int, features: int, channels: int, split: bool, device: torch.device) -> bool:
    fits = features in _WARPGROUP_WIDTHS and channels in _WARPGROUP_WIDTHS
    return split and rows > _WARPGROUP_ROWS and fits and gpu_of(device).capability == (9, 0)


def strips_of(
    backward: bool, layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> Strips | None:
    """Return the strips for the results of linear layers, or for the gradient of their input.

    The strips are fast and spill no register. None: tiles are faster, the strips do not fit, or numbers are not `split`
    but may be rounded to TF32.
    """
    if not _takes_warpgroups(rows, features, channels, split, device):
        return None
    sizes = layers, features, channels
    width, places = (features, channels) if backward else (channels, features)
    if places <= _GROUP and (layers == 1 or not backward):
        # One section: fewer sums round more, but the tensor cores do not wait for them.
        columns = 64 if width <= 64 or (layers == 1 and width <= 128) else 128
        return Strips(backward, *sizes, columns, ceil_div(places, 16) * 16)
    section = min((80, 64, 48), key=lambda section: ceil_div(places, section) * section)
    # With 128 columns, sections of 80 are faster too, but would spill registers.
    layouts = ((128, 2), (64, 3), (64, 2))[section == 80 :]
    strips = (Strips(backward, *sizes, columns, section, warpgroups) for columns, warpgroups in layouts)
    return next((candidate for candidate in strips if candidate.fits), None)


def weight_grad(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> WeightGrad | None:
    """Return how warpgroups sum the gradients of parameters; None as of :func:`strips_of`."""
    if not _takes_warpgroups(rows, features, channels, split, device):
        return None
    return WeightGrad(layers, features, channels)


def split_k(
    tile: GemmTile,
    layers: int,
    rows: int,
    features: int,
    channels: int,
    device: torch.device,
    by_warpgroups: WeightGrad | None = None,
    one_split: bool = False,
) -> SplitK:
    """Return how a backward pass divides its work: its partial sums fill the device, or a multiple of it.

    Args:
        tile: The tile of the pass.
        layers: Number of linear layers.
        rows: Rows of the input.
        features: Features of the input.
        channels: Channels of each layer.
        device: Where the pass runs.
        by_warpgroups: How warpgroups sum the weight gradients; None if tiles do.
        one_split: Whether all rows are one sum.
    """
    x_blocks = ceil_div(rows, tile.rows) * ceil_div(features, tile.columns)
    if by_warpgroups is None:
        tiles = layers * ceil_div(channels, tile.rows) * ceil_div(features, tile.columns)
        per_multiprocessor = tile.min_blocks
    else:
        tiles, per_multiprocessor = by_warpgroups.groups, 1
    filling = max(1, gpu_of(device).multiprocessors * per_multiprocessor // tiles)
    wanted = filling * ceil_div(rows, filling * SPLIT_ROWS)
    room = _PARTIAL_BYTES // (4 * layers * channels * (features + 1))
    splits = 1 if one_split else max(1, min(wanted, rows // (2 * DEPTH), room))
    rows_per_split = ceil_div(rows, splits * DEPTH) * DEPTH
    splits = ceil_div(rows, rows_per_split)
    return SplitK(x_blocks, tiles * splits, rows_per_split, splits)


def column_sum_splits(rows: int, groups: int, device: torch.device) -> tuple[int, int]:
    """Return the number of partial sums over rows in so many groups of columns, and the rows of one."""
    wanted = max(1, min(rows // _COLUMN_SUM_ROWS, _COLUMN_SUM_BLOCKS * gpu_of(device).multiprocessors // groups))
    rows_per_split = ceil_div(rows, wanted)
    return ceil_div(rows, rows_per_split), rows_per_split


def column_groups(columns: int, itemsize: int) -> int:
    """Return the number of groups of columns that blocks which sum rows take."""
    return ceil_div(columns * itemsize, _COLUMN_SUM_BYTES)
