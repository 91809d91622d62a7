"""How the products of linear layers of one input are divided among thread blocks."""

from dataclasses import dataclass
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
SHARE_ROWS = 1 << 12
"""The most rows of one sum over nodes, if there is memory for so many sums: longer ones round more."""
_FEW_ROWS, _MANY_ROWS = 1 << 13, 1 << 16
"""Up to, and from how many rows on other tiles were the fastest on an H200."""
_WARPGROUP_ROWS = _FEW_ROWS
"""Above so many rows warpgroups take over: of 8,192 they were as fast as tiles or faster, of 19,717 and more at least
1.15 times as fast."""
_WARPGROUP_WIDTHS = range(64, 513, 4)
"""Features and channels that they take: below 64 half of their work or more would be on zeros."""
_ROUNDED_WIDTHS = range(68, 129, 4)
"""The same where they round to TF32."""
_GROUP = 128
"""The most places of one section, and the most features and channels that a thread block sums gradients of."""
_MAX_HELD = 1 << 15
"""The most numbers that a thread block holds: in its registers at first."""
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

    @property
    def fits(self) -> bool:
        """Whether a block has room for what it holds, and for two sections of the rows."""
        return self._places_of_all * self.columns <= _MAX_HELD and self.ring > 1

    def constants(self, side_by_side: bool) -> tuple[tuple[str, int], ...]:
        """Those of `kernels/gemm/forward_strips.cu`."""
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
    """How two warpgroups sum the gradients of parameters over a share of the rows: of up to 128 features and channels.

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
    def groups(self) -> int:
        """Thread blocks for one share."""
        return self.layers * -(-self.channels // _GROUP) * -(-self.features // _GROUP)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two sections of 32 rows of the input, of each number one part or two."""
        return 2 * (1 + self.split) * 4 * 32 * 128

    def constants(self, side_by_side: bool) -> tuple[tuple[str, int], ...]:
        """Those of `kernels/gemm/weight_grad.cu`."""
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


def _by_warpgroups(rows: int, features: int, channels: int, split: bool, device: torch.device) -> bool:
    widths = _WARPGROUP_WIDTHS if split else _ROUNDED_WIDTHS
    fits = features in widths and channels in widths
    return rows > _WARPGROUP_ROWS and fits and gpu_of(device).capability == (9, 0)


# For one, three and four layers the layouts are the fastest that do not spill, or near them, as timed on an H200 (80
# features and channels, three layers, backward: 21 % slower than the fastest). Sections of 48, and two layers, follow
# the same rule and were not timed.
def forward_strips(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> Strips | None:
    """The strips for the results of linear layers, where they are faster than tiles."""
    if not _by_warpgroups(rows, features, channels, split, device):
        return None
    if split:
        return _split_strips(False, layers, features, channels)
    return Strips(False, split, layers, features, channels, 128, _whole(features), warpgroups=3)


def backward_strips(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> Strips | None:
    """The strips for the gradient of the input of linear layers, where they fit and are faster than tiles."""
    if not _by_warpgroups(rows, features, channels, split, device):
        return None
    if split:
        return _split_strips(True, layers, features, channels)
    if layers < MAX_LAYERS:
        return Strips(True, split, layers, features, channels, 128, _whole(channels))
    return Strips(True, split, layers, features, channels, 64, section=64, warpgroups=3)


def _split_strips(backward: bool, layers: int, features: int, channels: int) -> Strips | None:
    """Those of float32, if any fit."""
    sizes = layers, features, channels
    width, places = (features, channels) if backward else (channels, features)
    if places <= _GROUP and (layers == 1 or not backward):
        # One section: fewer sums round more, but the tensor cores do not wait for them.
        columns = 64 if width <= 64 or (layers == 1 and width <= 128) else 128
        return Strips(backward, True, *sizes, columns, _whole(places))
    section = min((80, 64, 48), key=lambda section: -(-places // section) * section)
    # Of 128 columns sections of 80 are faster too, but would spill registers.
    layouts = ((128, 2), (64, 3), (64, 2))[section == 80 :]
    found = (Strips(backward, True, *sizes, columns, section, warpgroups) for columns, warpgroups in layouts)
    return next((strips for strips in found if strips.fits), None)


def _whole(places: int) -> int:
    """A section for so many, the last places empty."""
    return -(-places // 16) * 16


def weight_sums(
    layers: int, rows: int, features: int, channels: int, split: bool, device: torch.device
) -> WeightSums | None:
    """The sums for the gradients of the parameters, where they are faster than tiles."""
    if not _by_warpgroups(rows, features, channels, split, device):
        return None
    return WeightSums(split, layers, features, channels)


def shares_of(
    tile: Tile,
    layers: int,
    rows: int,
    features: int,
    channels: int,
    device: torch.device,
    sums: WeightSums | None = None,
    whole: bool = False,
) -> Shares:
    """The shares of a backward pass: so many that they fill the device, or a multiple of that; `whole`: only one."""
    x_blocks = -(-rows // tile.rows) * -(-features // tile.columns)
    tiles, per_multiprocessor = layers * -(-channels // tile.rows) * -(-features // tile.columns), tile.min_blocks
    if sums is not None:
        tiles, per_multiprocessor = sums.groups, 1
    filling = max(1, gpu_of(device).multiprocessors * per_multiprocessor // tiles)
    wanted = filling * -(-rows // (filling * SHARE_ROWS))
    room = _PARTIAL_BYTES // (4 * layers * channels * (features + 1))
    splits = 1 if whole else max(1, min(wanted, rows // (2 * DEPTH), room))
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
