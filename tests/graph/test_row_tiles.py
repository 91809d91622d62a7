"""Rows dealt into tiles: every row and every edge once, chunks in order, and nothing where there is nothing."""

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.row_tiles import ROUNDS, make_row_tiles
from tests.zoo import hub, random, star

GRAPHS = [random(50, 70, 400), hub(300, 40), star(90), star(90, inward=False), random(9, 9, 0), random(3, 1, 5)]


@pytest.mark.parametrize("rows", [1, 7, 248])
@pytest.mark.parametrize("case", GRAPHS, ids=str)
def test_rows_and_edges(case, rows):
    graph = Graph.of(case.edge_index, case.num_src, case.num_dst)
    side = graph.csr
    tiles = make_row_tiles(side, rows, chunk=16)
    order = tiles.order.tolist()
    assert len(order) == tiles.num_tiles == max(1, -(-case.num_dst // rows)) and tiles.rows <= rows + ROUNDS
    assert sorted(row for tile in order for row in tile if row >= 0) == list(range(case.num_dst))
    found = {row: [] for row in range(case.num_dst)}
    most = [0, 0, 0]
    for tile in range(tiles.num_tiles):
        (first, first_edge), (last, last_edge) = tiles.ptr[tile].tolist(), tiles.ptr[tile + 1].tolist()
        assert first_edge % 4 == 0
        states: list[int] = []
        edges = 0
        for row, begin, end, which in tiles.items[first:last].tolist():
            which &= 0xFFFFFFFF
            slot, state, first_state, chunks = (which >> shift & 255 for shift in (0, 8, 16, 24))
            assert order[tile][slot] == row and 0 <= end - begin <= 16
            assert first_edge + end <= last_edge
            if chunks:
                assert state - first_state == len(found[row]) // 16 < chunks
                states.append(state)
            else:
                assert which == slot and not found[row]
            found[row] += tiles.index[first_edge + begin : first_edge + end].tolist()
            edges += end - begin
        assert states == list(range(len(states)))
        most = [max(pair) for pair in zip(most, (last - first, edges, len(states)), strict=True)]
    assert most == [tiles.most_items, tiles.most_edges, tiles.most_states]
    ptr, index = side.ptr.tolist(), side.index.tolist()
    assert found == {row: index[ptr[row] : ptr[row + 1]] for row in found}
    filled = [tiles.filled[row // 32].item() >> row % 32 & 1 for row in range(case.num_dst)]
    assert filled == [int(ptr[row + 1] > ptr[row]) for row in range(case.num_dst)]


def test_tiles_are_kept_and_even():
    case = random(400, 400, 4000)
    graph = Graph.of(case.edge_index, case.num_src)
    tiles = graph.row_tiles(50, 16)
    assert graph.row_tiles(50, 16) is tiles and tiles.num_tiles == 8
    assert all(any(tensor is kept for kept in graph._tensors()) for tensor in tiles.tensors())
    assert tiles.most_edges <= 4000 / 8 * 1.02
    assert tiles.order.dtype is tiles.items.dtype is torch.int32


def test_hubs_leave_tiles_even():
    """A tile with a hub takes fewer of the other long rows."""
    source = torch.randint(500, (5650,), generator=torch.Generator().manual_seed(0))
    target = torch.cat(
        [torch.zeros(90, dtype=torch.int64), torch.ones(60, dtype=torch.int64), torch.arange(5500) % 500]
    )
    tiles = Graph.of(torch.stack([source, target]), 500).row_tiles(25, 16)
    assert tiles.num_tiles == 20 and tiles.most_edges <= 300
