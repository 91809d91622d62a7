"""The rows of a side dealt into tiles of equal work, one for each thread block, with the edges of each side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, from_degree, pull

ROUNDS = 8
"""In which long rows are dealt, before all tiles take rows in turn."""


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
    row = side.row_order.long()
    ptr = side.ptr.long()
    length = ptr[1:][row] - ptr[:-1][row]
    tile, by_tile = _deal(length, num_tiles).sort(stable=True)
    row, length = row[by_tile], length[by_tile]
    bounds = torch.searchsorted(tile, torch.arange(num_tiles + 1, device=device))
    place = torch.arange(count, device=device)
    slot = place - bounds[tile]

    chunks = (-(-length // chunk)).clamp(min=1)
    states = torch.where(length > chunk, chunks, 0)
    # What the rows before have, in all, and of each tile.
    before = [torch.cat([each.new_zeros(1), each.cumsum(0)]) for each in (chunks, length, states)]
    of_tile = [each[bounds].diff() for each in before]
    item_ptr, edge_ptr = from_degree(of_tile[0]), from_degree(-(-of_tile[1] // 4) * 4)
    sizes = pull(item_ptr[-1], edge_ptr[-1], bounds.diff().max(), *(each.max() for each in of_tile))
    num_items, num_places, most_rows, most_items, most_edges, most_states = sizes
    first_edge, first_state = (each[:-1] - each[bounds][tile] for each in before[1:])

    owner, turn = _spread(place, chunks, num_items)
    first = first_state[owner]
    which = ((turn + first) << 8) + (first << 16) + (chunks[owner] << 24)
    which = torch.where(states[owner] > 0, which, 0) + slot[owner]
    begin = first_edge[owner] + turn * chunk
    end = torch.minimum(begin + chunk, (first_edge + length)[owner])
    items = torch.stack([row[owner], begin, end, _signed(which)], 1).to(torch.int32)

    owner, turn = _spread(place, length, side.num_edges)
    index = side.index.new_zeros(num_places)
    index[(edge_ptr.long()[tile] + first_edge)[owner] + turn] = side.index[ptr[row][owner] + turn]

    order = side.row_order.new_full((num_tiles, most_rows), -1)
    order[tile, slot] = row.to(torch.int32)
    bits = torch.zeros(-(-count // 32) * 32, dtype=torch.int64, device=device)
    bits[:count] = side.ptr.diff() > 0
    filled = _signed((bits.view(-1, 32) << torch.arange(32, device=device)).sum(1)).to(torch.int32)
    pointers = torch.stack([item_ptr, edge_ptr], 1)
    return RowTiles(order, pointers, items, index, filled, num_tiles, most_rows, most_items, most_edges, most_states)


def _deal(length: Tensor, num_tiles: int) -> Tensor:
    """The tile of each row, of rows by descending length.

    In each of the first rounds the tiles that have the fewest edges take a row each, as long as that leaves them with
    no more than the one with the fewest gets; then all take one in turn, to and fro.
    """
    count, device = length.numel(), length.device
    # One more for what no row takes.
    tile = length.new_zeros(count + 1)
    sums, taken = length.new_zeros(num_tiles), length.new_zeros(())
    rank = torch.arange(num_tiles, device=device)
    padded = torch.cat([length, length.new_zeros(1)])
    for _ in range(ROUNDS):
        ascending, tiles = sums.sort(stable=True)
        place = (taken + rank).clamp(max=count)
        takes = (ascending < ascending[0] + padded[place[0]]).long()
        tile[torch.where(takes > 0, place, count)] = tiles
        sums[tiles] += takes * padded[place]
        taken = (taken + takes.sum()).clamp(max=count)
    rest = torch.arange(count, device=device) - taken
    turn, place = rest // num_tiles, rest % num_tiles
    place = torch.where(turn % 2 == 1, num_tiles - 1 - place, place)
    return torch.where(rest >= 0, sums.argsort(stable=True)[place], tile[:count])


def _signed(words: Tensor) -> Tensor:
    """Numbers of 32 bits as signed ones."""
    return torch.where(words < 1 << 31, words, words - (1 << 32))


def _spread(place: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Each place as often as its count says, and which of its times it is."""
    owner = torch.repeat_interleave(place, counts, output_size=total)
    return owner, torch.arange(total, device=place.device) - (counts.cumsum(0) - counts)[owner]
