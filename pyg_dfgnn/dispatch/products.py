"""How the products of linear layers of one input are divided among thread blocks."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pyg_dfgnn.dispatch.gpu import H200, gpu_of

MAX_LAYERS = 4
"""That one launch takes."""
DEPTH = 32
"""Places of a sum that a thread block reads at a time."""
SUM_THREADS = 256
"""Threads of a block that sums rows."""
_SUM_BYTES = 256
"""Of each row, that such a block takes."""
_SUM_BLOCKS = 4
"""Such blocks per multiprocessor."""
_SUM_ROWS = 1 << 7
"""The fewest rows of a share of theirs: as many as a block reads at a time."""
_SHARE_ROWS = 1 << 12
"""The most rows of one sum over nodes, if there is memory for so many sums: longer ones round more."""
_FEW_ROWS, _MANY_ROWS = 1 << 13, 1 << 16
"""Up to, and from how many rows on other tiles were the fastest on an H200 (`results/tuning/products.csv`)."""
_WARPGROUP_ROWS = _FEW_ROWS
"""Above so many rows warpgroups take over: of 8,192 they were as fast as tiles or faster, of 19,717 and more at least
1.15 times as fast (`results/tuning/products_warpgroups.csv`)."""
_WARPGROUP_WIDTHS = range(68, 129, 4)
"""Features and channels that they take: below 68 half of their work would be on zeros."""
_SCALES_BYTES = 1 << 12
"""Shared memory that is left for scales and biases."""
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

    def constants(self, layers: int, side_by_side: bool, split: bool) -> tuple[tuple[str, int], ...]:
        """Those of the kernels in `kernels/products`."""
        return (
            ("STORAGE", 0),
            ("SPLIT", int(split)),
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
class Strips:
    """What the warpgroups of a thread block compute, in strips of 64 rows; it holds what they are multiplied by.

    Attributes:
        backward: Whether it is the gradient of the input.
        split: Whether a number has two halves in fp16, else one, which has as many bits as TF32.
        layers: Of the results, or of the gradients.
        features: Of the input.
        channels: Of each layer.
        columns: Of the result, in one block: 64 or 128.
        section: Places of the sum that a warpgroup reads at a time.
        warpgroups: Of a block.
    """

    backward: bool
    split: bool
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
        """Of the sum over one matrix, filled up to whole sections."""
        return -(-(self.channels if self.backward else self.features) // self.section) * self.section

    @property
    def _places_of_all(self) -> int:
        """Of the sums over all matrices that a block holds columns of."""
        return self.places * (self.layers if self.backward else 1)

    @cached_property
    def _held_bytes(self) -> int:
        """Memory for what a block holds."""
        return 2 * (1 + self.split) * self._places_of_all * self.columns

    @cached_property
    def _section_bytes(self) -> int:
        """Memory for a section of the rows of all warpgroups."""
        return 4 * 64 * self.warpgroups * self.section

    @cached_property
    def ring(self) -> int:
        """Sections that are copied ahead; 0 where there is no room."""
        room = (H200.shared_bytes - _SCALES_BYTES - self._held_bytes) // self._section_bytes
        return max(0, min(room, 2 * self._places_of_all // self.section))

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._held_bytes + self.ring * self._section_bytes

    def blocks(self, rows: int, device: torch.device) -> int:
        """Thread blocks: one for each multiprocessor, as far as there are strips for all of its warpgroups."""
        groups = -(-(self.features if self.backward else self.channels) // self.columns)
        groups *= 1 if self.backward else self.layers
        return groups * max(1, min(gpu_of(device).multiprocessors // groups, -(-rows // (64 * self.warpgroups))))

    def constants(self, side_by_side: bool) -> tuple[tuple[str, int], ...]:
        """Those of `kernels/products/rows.cu`."""
        return (
            *_sizes(self.layers, self.features, self.channels, side_by_side, self.split),
            ("BACKWARD", int(self.backward)),
            ("COLUMNS", self.columns),
            ("PLACES", self.places),
            ("SECTION", self.section),
            ("RING", self.ring),
            ("WARPGROUPS", self.warpgroups),
        )


@dataclass(frozen=True)
class WeightSums:
    """How two warpgroups sum the gradients of the parameters of one layer over a share of the rows.

    Attributes:
        split: Whether a number is the sum of two of TF32, else it is rounded to one.
        layers: Of the gradients.
        features: Of the input.
        channels: Of each layer.
    """

    split: bool
    layers: int
    features: int
    channels: int

    block = (256, 1, 1)
    """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two sections of 32 rows of the input, of each number one part or two."""
        return 2 * (1 + self.split) * 4 * 32 * 128

    def constants(self, side_by_side: bool) -> tuple[tuple[str, int], ...]:
        """Those of `kernels/products/weights.cu`."""
        return _sizes(self.layers, self.features, self.channels, side_by_side, self.split)


def _sizes(layers: int, features: int, channels: int, side_by_side: bool, split: bool) -> tuple[tuple[str, int], ...]:
    return (
        ("STORAGE", 0),
        ("SPLIT", int(split)),
        ("MAX_LAYERS", MAX_LAYERS),
        ("LAYERS", layers),
        ("BESIDE", int(side_by_side)),
        ("FEATURES", features),
        ("CHANNELS", channels),
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


def _by_warpgroups(rows: int, features: int, channels: int, device: torch.device) -> bool:
    fits = features in _WARPGROUP_WIDTHS and channels in _WARPGROUP_WIDTHS
    return rows > _WARPGROUP_ROWS and fits and gpu_of(device).capability == (9, 0)


def forward_strips(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> Strips | None:
    """The strips for the results of linear layers, where they are faster than tiles."""
    if not _by_warpgroups(rows, features, channels, device):
        return None
    # The fastest of `results/tuning/products_halves.csv`, or within 10 % of it, as in backward. One section: fewer
    # sums round more, but the tensor cores do not wait for them.
    section = -(-features // 16) * 16
    if not split:
        return Strips(False, split, layers, features, channels, 128, section, warpgroups=3)
    return Strips(False, split, layers, features, channels, 64 if layers == 1 else 128, section)


def backward_strips(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> Strips | None:
    """The strips for the gradient of the input of linear layers, where they are faster than tiles."""
    if not _by_warpgroups(rows, features, channels, device):
        return None
    sizes, section = (layers, features, channels), -(-channels // 16) * 16
    if not split and layers < MAX_LAYERS:
        return Strips(True, split, *sizes, 128, section)
    if layers == 1:
        return Strips(True, split, *sizes, 64, section)
    found = Strips(True, split, *sizes, 64, section=64, warpgroups=3)
    return found if found.ring > 1 else replace(found, warpgroups=2)


def weight_sums(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> WeightSums | None:
    """The sums for the gradients of the parameters, where they are faster than tiles."""
    return WeightSums(split, layers, features, channels) if _by_warpgroups(rows, features, channels, device) else None


def shares_of(
    tile: Tile, layers: int, rows: int, features: int, channels: int, device: torch.device, by_warpgroups: bool = False
) -> Shares:
    """The shares of a backward pass: so many that they fill the device, or a multiple of that."""
    x_blocks = -(-rows // tile.rows) * -(-features // tile.columns)
    tiles, per_multiprocessor = layers * -(-channels // tile.rows) * -(-features // tile.columns), tile.min_blocks
    if by_warpgroups:
        tiles, per_multiprocessor = layers, 1
    filling = max(1, gpu_of(device).multiprocessors * per_multiprocessor // tiles)
    wanted = filling * -(-rows // (filling * _SHARE_ROWS))
    room = _PARTIAL_BYTES // (4 * layers * channels * (features + 1))
    splits = max(1, min(wanted, rows // (2 * DEPTH), room))
    share = -(-rows // splits // DEPTH) * DEPTH
    splits = -(-rows // share)
    return Shares(x_blocks, tiles * splits, share, splits)


def sum_shares(rows: int, groups: int, device: torch.device) -> tuple[int, int]:
    """The shares of a sum over rows in so many groups of columns, and the rows of one."""
    wanted = max(1, min(rows // _SUM_ROWS, _SUM_BLOCKS * gpu_of(device).multiprocessors // groups))
    share = -(-rows // wanted)
    return -(-rows // share), share


def sum_groups(columns: int, itemsize: int) -> int:
    """The groups of columns that blocks which sum rows take."""
    return -(-columns * itemsize // _SUM_BYTES)
