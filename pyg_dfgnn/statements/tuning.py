"""How fast each schedule runs a score, as data: what was measured, with defaults for a score that never was.

A direction is "forward", "targets" or "sources". A layout depends on the bytes of an element (4 or 2) and on the
number of features that a lane holds of a row.
"""

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple


def read_only(table: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    """Return a table that nobody may edit."""
    return MappingProxyType(table)


# Records and plans hold such tables, which Python copies and pickles no more than modules.
copyreg.pickle(MappingProxyType, lambda table: (read_only, (dict(table),)))  # type: ignore[arg-type]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def _nothing() -> Mapping[Any, Any]:
    return _NOTHING


class Unroll(NamedTuple):
    """Edges that a slot of a warp keeps in flight, by the features that a lane holds of a row."""

    up_to_4: int
    of_8_float: int
    """Eight features in float32."""
    of_8_half: int
    """Eight features in 16 bits."""
    of_16: int


class Sweep(NamedTuple):
    """How a pass in sweeps over blocks of columns differs from other passes."""

    loads: int
    """Loads of a lane per row."""
    packed: bool
    """Whether lanes to spare take further rows: rows of like length then read like columns at a time, so that some of
    what they gather is in the L1 cache, and more of them are in flight."""
    unroll: int
    """Edges that a slot keeps in flight."""
    min_blocks: int
    """Blocks per multiprocessor that the compiler makes room for."""
    share: float
    """Bytes that one sweep should gather, as a share of the cache."""
    pieces: float
    """Longest piece of a row over that of other swept passes."""


@dataclass(frozen=True)
class RowSplitTuning:
    """How `row_split` runs one pass of a score, from timings on an H200.

    Attributes:
        work: Multiply-adds per feature of an edge; None for the default of the score's kind.
        loads: Loads of a lane per row, in float32 and in 16 bits.
        packed_loads: The number of loads in 16 bits where lanes to spare take further rows; None for ``loads``.
        unroll: Edges in flight; None for the default of the direction.
        min_blocks: Blocks per multiprocessor that the compiler makes room for, by bytes and features of a lane: 8 leave
            64 registers, 6 leave 80, 5 leave 96. An entry that is missing stands for 1.
        paired_min_blocks: Entries that differ for two edges side by side of heads that two lanes share.
        edge_rows_min_blocks: ``min_blocks`` with rows of edges of which a lane holds up to four numbers: as many as
            cost no spill.
        saved_min_blocks: ``min_blocks`` of the forward pass that leaves dout_dlogit.
        four_loads: Whether a lane takes four loads in float32, one edge at a time, where packed rows come in order.
        whole_heads: Where a lane takes a whole head of two loads in 16 bits: in passes that are "swept" or "packed".
        few_rows_half_heads: Whether 8 heads of 16 are split over two blocks where there are few rows.
        swept: How sweeps differ, by bytes of an element.
    """

    work: int | None = None
    loads: tuple[int, int] = (1, 1)
    packed_loads: int | None = None
    unroll: Unroll | None = None
    min_blocks: Mapping[tuple[int, int], int] = field(default_factory=_nothing)
    paired_min_blocks: Mapping[tuple[int, int], int] = field(default_factory=_nothing)
    edge_rows_min_blocks: Mapping[tuple[int, int], int] = field(default_factory=_nothing)
    saved_min_blocks: Mapping[tuple[int, int], int] = field(default_factory=_nothing)
    four_loads: bool = False
    whole_heads: str | None = None
    few_rows_half_heads: bool = False
    swept: Mapping[int, Sweep] = field(default_factory=_nothing)


class SmemLayout(NamedTuple):
    """Layout of a pass of `smem`."""

    loads: int
    """Loads of a lane per row."""
    unroll: int
    """Edges that a slot keeps in flight."""
    warps: int
    """Warps of a block."""
    min_blocks: int
    """Blocks per multiprocessor: 24 warps leave 80 registers for each thread, 18 leave 96."""


@dataclass(frozen=True)
class SmemTuning:
    """How `smem` runs one pass of a score, from timings on an H200 and else from the registers that the kernel needs.

    Attributes:
        layouts: In float32 and in 16 bits.
        head_layouts: Layouts that differ with several heads, by bytes: two loads of a head would lie in the banks of
            those of the next head but one.
        narrow_layout: Layout of 8 heads of 16 in float32, where lanes with two loads exchange fewer sums.
        through_l1: Whether one head in float32 is read through the L1 cache rather than copied.
        lazy: Whether several heads in 16 bits are scaled to a maximum only when it has grown by several powers of two.
        instructions: Time of the instructions over that of `row_split`.
        two_loads: The same ratio where `row_split` has heads of two loads in 16 bits; None where it was not timed.
        timed: Bytes of an element with which one head was timed; what was not takes longer by an estimate.
        timed_heads: Bytes of an element with which several heads were timed.
        timed_narrow: Whether 8 heads of 16 in float32 were timed.
    """

    layouts: tuple[SmemLayout, SmemLayout] = (SmemLayout(1, 1, 8, 1), SmemLayout(1, 1, 8, 1))
    head_layouts: Mapping[int, SmemLayout] = field(default_factory=_nothing)
    narrow_layout: SmemLayout | None = None
    through_l1: bool = False
    lazy: bool = False
    instructions: float = 1.0
    two_loads: float | None = None
    timed: tuple[int, ...] = ()
    timed_heads: tuple[int, ...] = ()
    timed_narrow: bool = False


@dataclass(frozen=True)
class BlockMmaTuning:
    """How `block_mma` runs one pass of a score.

    Attributes:
        products: Matrix products, each of the area of the blocks times the channels.
        node_tensors: Tensors of the nodes that a pass reads and writes, for one [N, H, C].
        in_pairs: Whether two heads of 16 with TF32 products are faster than four.
    """

    products: int
    node_tensors: int
    in_pairs: bool = False


@dataclass(frozen=True)
class PaperTuning:
    """Work of the lanes of `smmf` and `pmf` per edge in one pass, over all steps.

    Attributes:
        gathers: Feature rows read.
        work: Multiply-adds per feature.
        sums: Sums over the lanes of a head.
        scans: Traversals of the edges.
    """

    gathers: int
    work: int
    sums: int
    scans: int
