r"""When attention of one head absorbs its linear layers, and how its kernels are specialised.

With :math:`M = W_k^T W_q` and :math:`m = W_k^T b_q`

.. math::
    q_i = M x_i + m, \quad S_{ij} = s \langle q_i, x_j \rangle, \quad
    z_i = \sum_j \mathrm{softmax}_j(S_{ij}) x_j, \quad O_i = W_v z_i + b_v

are the scores, but for what is the same for all edges of a row, and the output of graph transformer attention. An edge
gathers one row in place of two, and a thread block multiplies the rows that it owns before and after it gathers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from pyg_dfgnn.dispatch import attention_rows
from pyg_dfgnn.dispatch.attention_problem import SCORES, AttentionProblem
from pyg_dfgnn.dispatch.gpu import gpu_of
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.row_tiles import ROUNDS, RowTiles

LAYERS = 3
"""Query, key and value."""
CHUNK = 16
"""The most edges of an item."""
WARPS = 12
"""Of a thread block, in warpgroups that multiply 64 rows each."""
WIDTHS = (64, 96, 128)
"""Features of the input, as many as channels."""
MIN_ROWS = {64: 8193, 96: 4000, 128: 4000}
"""From how many rows on forward and backward together are faster, by features; with TF32 timed for 128
(`results/tuning/absorbed_small.csv`)."""
MAX_ROWS = 1 << 16
"""Up to how many rows it takes: timed on 50,000."""
_MAX_ITEMS, _MAX_EDGES, _MAX_STATES = 256, 2048, 64
"""What a tile has room for in shared memory."""


@dataclass(frozen=True)
class AbsorbedPass:
    """The kernels of all passes, over tiles of targets.

    Attributes:
        constants: What those over tiles are specialised by.
        channels: Features and channels.
        split: Whether products are those of float32, else their factors may be rounded as for TF32.
        rows: Rows of a tile, on average at most.
        sources: The pass over sources.
    """

    constants: Mapping[str, int] = field(hash=False)
    channels: int
    split: bool
    rows: int
    sources: attention_rows.RowsPass

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block over a tile."""
        return (32 * WARPS, 1, 1)

    @cached_property
    def columns(self) -> int:
        """Of a matrix as kernels hold it."""
        return 64 if self.channels <= 64 else 128

    @cached_property
    def image_words(self) -> int:
        """Four bytes each, of such a matrix: halves, what undoes their scales, and a bias."""
        return (1 + self.split) * self.channels * self.columns // 2 + 2 * self.columns

    def __str__(self) -> str:
        return (
            f"linear layers absorbed; tiles of {self.rows} targets on average, chunks of {CHUNK} edges; "
            f"backward over sources: {self.sources}"
        )

    def shared_bytes(self, tiles: RowTiles) -> int:
        """Dynamic shared memory of a block: a matrix, the features of a tile, and the states of chunks."""
        return 4 * (self.image_words + tiles.rows * self.channels + tiles.most_states * (self.channels + 4))


def plan(problem: AttentionProblem, graph: Graph, features: int, layers: int) -> AbsorbedPass | None:
    """The passes of this attention among `layers` projections of nodes with so many features; None where others are.

    That is where they were not measured to be faster (see also `results/tuning/absorbed.csv`), where a tile does not
    fit, and with dropout or edge features, whose kernels need values of their own.
    """
    channels, count = problem.channels, graph.num_dst
    if problem.score != "dot" or problem.heads != 1 or problem.dtype is not torch.float32 or layers != LAYERS:
        return None
    if problem.dropout or problem.edge or features != channels or channels not in WIDTHS:
        return None
    # Tiles ask the device for their sizes, which a batch that came without a sync should not.
    if (
        not MIN_ROWS[channels] <= count <= MAX_ROWS
        or graph.num_src != count
        or graph.num_edges == 0
        or graph.is_fixed
        or graph.facts is not None
    ):
        return None
    gpu = gpu_of(problem.device)
    if gpu.capability != (9, 0):
        return None
    most = 16 * WARPS - ROUNDS
    waves = -(-count // (most * gpu.multiprocessors))
    rows = -(-count // (waves * gpu.multiprocessors))
    if graph.num_edges * rows > _MAX_EDGES * count:
        return None
    tiles = graph.row_tiles(rows, CHUNK)
    if tiles.most_items > _MAX_ITEMS or tiles.most_edges > _MAX_EDGES or tiles.most_states > _MAX_STATES:
        return None
    return AbsorbedPass(
        tile_constants(channels, not problem.tf32),
        channels,
        not problem.tf32,
        rows,
        sources_pass(problem, graph),
    )


def sources_pass(problem: AttentionProblem, graph: Graph) -> attention_rows.RowsPass:
    """The pass over sources, in the layout of the other score that gathers one row for key and value."""
    found = attention_rows.plan_pass(replace(problem, score="cosine"), "sources", graph)
    return replace(found, constants={**found.constants, "SCORE": SCORES.index("dot"), "KEY_IS_VALUE": 1})


def tile_constants(channels: int, split: bool) -> Mapping[str, int]:
    """Those of the kernels over tiles."""
    return {
        "STORAGE": 0,
        "SPLIT": int(split),
        "HEADS": 1,
        "CHANNELS": channels,
        "VEC": 4,
        "HEAD_LANES": 8,
        "LANE_VECS": channels // 32,
        "HEAD_SLOTS": 1,
        "LANE_HEADS": 1,
        "EDGE_SLOTS": 1,
        "WARP_ROWS": 4,
        "UNROLL": 2,
        "WARPS": WARPS,
        "CHUNK": CHUNK,
        "MAX_ITEMS": _MAX_ITEMS,
        "MAX_EDGES": _MAX_EDGES,
    }
