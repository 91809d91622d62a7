"""How GEMMs of linear layers of one input are divided among the warpgroups of compute capability 9.0."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pyg_dfgnn.dispatch.gpu import H200, gpu_of
from pyg_dfgnn.graph.node_ranges import ceil_div

MAX_LAYERS = 4
"""Most linear layers that one launch takes."""
_SECTION_ROWS = 32
"""Rows of a partial sum over nodes that a thread block reads at a time."""
_SPLIT_ROWS = 1 << 12
"""Most rows of one partial sum over nodes, if there is memory for so many partial sums: longer sums round more."""
_PARTIAL_BYTES = 128 << 20
"""Most memory for partial sums, unless one of them takes more."""
_FEW_ROWS = 1 << 13
"""Most rows of which torch's product is as fast."""
_WIDTHS = range(64, 513, 4)
"""Features and channels that warpgroups take: below 64, half of their work or more would be on zeros."""
_GROUP = 128
"""Most places of one section, and most features and channels of which a thread block sums weight gradients."""
_MAX_HELD = 1 << 15
"""Most numbers that a thread block holds, at first in its registers."""
_SCALES_BYTES = 1 << 12
"""Shared memory that is left for scales and biases."""


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

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """The constants of `kernels/gemm/forward_strips.cu`."""
        return (
            *_layer_constants(self.layers),
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

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """The constants of `kernels/gemm/weight_grad.cu`."""
        return *_layer_constants(self.layers), ("FEATURES", self.features), ("CHANNELS", self.channels)

    def splits(self, rows: int, device: torch.device) -> tuple[int, int]:
        """Return the number of partial sums, which fill the device or a multiple of it, and the rows of one."""
        filling = max(1, gpu_of(device).multiprocessors // self.groups)
        wanted = filling * ceil_div(rows, filling * _SPLIT_ROWS)
        room = _PARTIAL_BYTES // (4 * self.layers * self.channels * (self.features + 1))
        splits = max(1, min(wanted, rows // (2 * _SECTION_ROWS), room))
        rows_per_split = ceil_div(rows, splits * _SECTION_ROWS) * _SECTION_ROWS
        return ceil_div(rows, rows_per_split), rows_per_split


def _layer_constants(layers: int) -> tuple[tuple[str, int], ...]:
    return ("STORAGE", 0), ("MAX_LAYERS", MAX_LAYERS), ("LAYERS", layers)


def strips_of(
    backward: bool, layers: int, rows: int, features: int, channels: int, device: torch.device
) -> Strips | None:
    """Return the strips for the results of linear layers, or for the gradient of their input.

    The strips are fast and spill no register. None: torch is faster, or the strips do not fit.
    """
    fits = layers <= MAX_LAYERS and features in _WIDTHS and channels in _WIDTHS
    if not fits or rows <= _FEW_ROWS or gpu_of(device).capability != (9, 0):
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
