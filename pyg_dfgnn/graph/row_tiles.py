"""The rows of a side dealt into tiles of equal work, one for each thread block, with the edges of each side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency

ROUNDS = 8
"""The most turns that a tile with a long row leaves out."""


@dataclass(frozen=True)
class RowTiles:
    """Tiles of rows, and the items that their rows are worked on in: a row, or a chunk of a long one.

    Attributes:
        order: The rows of each tile, those with many edges first, -1 where there is none, int32 [num_tiles, rows].
        ptr: Where the items and the edges of each tile begin, int32 [num_tiles + 1, 2].
        items: (row, first edge, end, slot + 2^8 state + 2^16 first state + 2^24 chunks) of each, int32 [items, 4]:
            edges counted from the first of the tile, `slot` the row's place in it, the rest 0 unless the row has
            chunks, which have a state each.
        index: The other end of each edge by tile and item, of each tile from a multiple of four on, int32.
        filled: Bit i % 32 of word i / 32: whether row i has edges, int32 [ceil(num_rows / 32)].
        num_tiles: Their number.
        rows: The most of any tile.
        most_items: Likewise, as the next two.
        most_edges: See there.
        most_states: Chunks of long rows.
    """

    order: Tensor
    ptr: Tensor
    items: Tensor
    index: Tensor
    filled: Tensor
    num_tiles: int
    rows: int
    most_items: int
    most_edges: int
    most_states: int

    def tensors(self) -> list[Tensor]:
        """All arrays."""
        return [self.order, self.ptr, self.items, self.index, self.filled]


def make_row_tiles(side: Adjacency, rows: int, chunk: int) -> RowTiles:
    """Deal the rows among as few tiles as hold `rows` each, the longest first, so that all have about as many edges.

    Args:
        side: Which rows.
        rows: Of a tile, on average at most; a tile may have up to `ROUNDS` more. Together at most 256.
        chunk: The most edges of an item: longer rows become several, up to 255.
    """
    count, device = side.num_rows, side.ptr.device
    num_tiles = max(1, -(-count // rows))
    row, ptr = side.row_order.long(), side.ptr.long()
    degree = ptr.diff()
    length = degree[row]
    tile, by_tile = _deal(length, num_tiles).sort(stable=True)
    row, length = row[by_tile], length[by_tile]
    bounds = torch.searchsorted(tile, torch.arange(num_tiles + 1, device=device))
    slot = torch.arange(count, device=device) - bounds[tile]

    chunks = ((length + chunk - 1) // chunk).clamp(min=1)
    is_long = chunks > 1
    # Items, edges and states of the rows before, in all, and of each tile.
    before = F.pad(torch.stack([chunks, length, chunks * is_long]).cumsum(1), (1, 0))
    of_tiles = before[:, bounds]
    most = of_tiles.diff(dim=1)
    edge_ptr = F.pad(((most[1] + 3) // 4 * 4).cumsum(0), (1, 0))
    sizes = torch.cat([of_tiles[0, -1:], edge_ptr[-1:], bounds.diff().amax(0, keepdim=True), most.amax(1)]).tolist()
    num_items, num_places, most_rows, most_items, most_edges, most_states = sizes
    of_tile = of_tiles[:, tile]
    first_item = before[0, :-1]
    _, first_edge, first_state = before[:, :-1] - of_tile

    word = slot + is_long * ((first_state << 8) + (first_state << 16) + (chunks << 24))
    of_rows = torch.stack([row, first_item, first_edge, first_edge + length, word])
    owner, number, begin, limit, word = of_rows.repeat_interleave(chunks, dim=1, output_size=num_items)
    turn = torch.arange(num_items, device=device) - number
    begin = begin + turn * chunk
    items = torch.stack([owner, begin, torch.minimum(begin + chunk, limit), _signed(word + (turn << 8))], 1)

    # From where in the side to where in the tiles each edge goes.
    moves = torch.stack([ptr[row], edge_ptr[tile] + first_edge]) - before[1, :-1]
    source, place = moves.repeat_interleave(length, dim=1, output_size=side.num_edges) + torch.arange(
        side.num_edges, device=device
    )
    index = side.index.new_zeros(num_places)
    index[place] = side.index[source]

    order = side.row_order.new_full((num_tiles, most_rows), -1)
    order[tile, slot] = row.to(torch.int32)
    bits = F.pad(degree > 0, (0, -count % 32)).view(-1, 32).long() << torch.arange(32, device=device)
    filled = _signed(bits.sum(1)).to(torch.int32)
    pointers = torch.stack([of_tiles[0], edge_ptr], 1).to(torch.int32)
    items = items.to(torch.int32)
    return RowTiles(order, pointers, items, index, filled, num_tiles, most_rows, most_items, most_edges, most_states)


def _deal(length: Tensor, num_tiles: int) -> Tensor:
    """The tile of each row, of rows by descending length.

    In each turn all tiles take a row, to and fro. One whose first row has more edges than that of the last tile skips
    the next turns, up to `ROUNDS`, until the others have taken about as many edges as it has more.
    """
    count, device = length.numel(), length.device
    padded = F.pad(length, (0, num_tiles * (ROUNDS + 1)))
    step = padded[num_tiles : num_tiles * (ROUNDS + 1) : num_tiles]
    begin = torch.searchsorted(step.cumsum(0) - step // 2, padded[:num_tiles] - padded[num_tiles - 1])
    turn = torch.arange(-(-count // num_tiles) + ROUNDS, device=device)[:, None]
    rank = torch.arange(num_tiles, device=device)
    tiles = torch.where(turn % 2 == 1, num_tiles - 1 - rank, rank)
    takes = (turn == 0) | (turn > begin[tiles])
    # One more for what no row takes.
    place = torch.where(takes, takes.flatten().cumsum(0).view(takes.shape) - 1, count).clamp(max=count)
    found = length.new_empty(count + 1)
    found[place] = tiles
    return found[:count]


def _signed(words: Tensor) -> Tensor:
    """Numbers of 32 bits as signed ones."""
    return torch.where(words < 1 << 31, words, words - (1 << 32))
