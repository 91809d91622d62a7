"""Dense blocks of a graph: segments that no edge leaves, windows, listed columns and bits against the dense matrix."""

import pytest
import torch

from pyg_dfgnn.graph import Graph, block_sparse
from pyg_dfgnn.graph.block_sparse import BLOCK, area_of, make_blocks, most_columns, sample_fill
from pyg_dfgnn.graph.chunks import row_index
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.graph.node_ranges import TILE_ROWS, DiagonalBlocks, diagonal_blocks
from pyg_dfgnn.reference.zoo import EdgeList, hub, random, sbm, zoo

ROWS = (32, 64, 80)


def batch(sizes, density, name):
    """Random graphs of these sizes side by side, loops included, no edge twice."""
    generator = torch.Generator().manual_seed(len(sizes))
    parts, first = [], 0
    for size in sizes:
        parts.append((torch.rand(size, size, generator=generator) < density).nonzero().t() + first)
        first += size
    return EdgeList(name, torch.cat(parts, dim=1), first, first)


def without_duplicates(case):
    return EdgeList(case.name, case.edge_index.unique(dim=1), case.num_src, case.num_dst)


CASES = [
    *map(without_duplicates, zoo()),
    without_duplicates(random(150, 90, 1500, seed=5, name="bipartite-windows")),
    batch([20, 1, 70, 130, 33], 0.3, "batch"),
    batch([100], 0.05, "one-graph"),
    batch([3, 40, 3], 0.0, "batch-of-isolated"),
]


def graph_of(case):
    return Graph.of(case.edge_index.clone(), case.num_src, case.num_dst)


@pytest.fixture(params=CASES, ids=str)
def graph(request):
    return graph_of(request.param)


def brute_segments(graph):
    """Node offsets where no edge has one end before and one end after."""
    ends = [(min(edge), max(edge)) for edge in graph.edge_index.t().tolist()]
    return [b for b in range(graph.num_dst + 1) if not any(low < b <= high for low, high in ends)]


def dense_of(graph, side):
    dense = torch.zeros(side.num_rows, side.num_cols, dtype=torch.int32)
    for row, column in zip(row_index(graph, side).tolist(), side.col.tolist(), strict=True):
        dense[row, column] += 1
    return dense


def decode(tiles, num_rows, num_columns, rows):
    """The dense matrix that the tiles stand for, read bit by bit; checks windows and padding on the way."""
    dense = torch.zeros(num_rows, num_columns, dtype=torch.int32)
    seen = torch.zeros(num_rows, dtype=torch.int32)
    assert tiles.windows.shape == (tiles.num_windows, 8) and tiles.bits.shape == (tiles.num_blocks, rows)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors_of(tiles))
    next_block = 0
    for first, last, block, count, first_column, *zeros in tiles.windows.tolist():
        assert last - first <= rows and zeros == [0, 0, 0]
        seen[first:last] += 1
        assert block == next_block
        next_block += -(-count // BLOCK)
        for column in range(next_block * BLOCK - block * BLOCK):
            k, bit = block + column // BLOCK, column % BLOCK
            if tiles.columns is None:
                node = first_column + column
            else:
                node = int(tiles.columns[k, bit])
                # Past the end the last column again: its rows are read, and must exist.
                assert 0 <= node < num_columns
                assert column < count or node == int(tiles.columns[block + (count - 1) // BLOCK, (count - 1) % BLOCK])
            for row in (tiles.bits[k] >> bit & 1).nonzero().view(-1).tolist():
                assert first + row < last and column < count
                dense[first + row, node] += 1
    assert next_block == tiles.num_blocks and bool((seen == 1).all())
    return dense


# Diagonal blocks ------------------------------------------------------------------------------------------------------


def test_segments_against_every_boundary(graph):
    segments = diagonal_blocks(graph)
    if graph.num_src != graph.num_dst or graph.num_src == 0:
        assert segments is None
        return
    ptr = brute_segments(graph)
    sizes = [last - first for first, last in zip(ptr, ptr[1:], strict=False)]
    assert segments.ptr.dtype == torch.int32 and segments.ptr.tolist() == ptr
    assert segments.longest == max(sizes)
    units = [-(-size // TILE_ROWS) for size in sizes]
    assert segments.histogram == tuple((unit, units.count(unit)) for unit in sorted(set(units)))
    assert area_of(segments) == sum((TILE_ROWS * unit) ** 2 for unit in units)


@pytest.mark.parametrize("flip", [False, True], ids=["forth", "back"])
def test_an_edge_in_either_direction_joins(flip):
    edge_index = torch.tensor([[0, 3], [2, 4]])
    graph = Graph.of(edge_index.flip(0) if flip else edge_index, 6)
    assert diagonal_blocks(graph).ptr.tolist() == [0, 3, 5, 6]


def test_a_loop_joins_nothing():
    graph = Graph.of(torch.tensor([[0, 1, 2, 2], [0, 1, 2, 2]]), 4)
    assert diagonal_blocks(graph).ptr.tolist() == [0, 1, 2, 3, 4]


def test_segments_of_a_batch_are_its_connected_graphs():
    case = sbm(num_graphs=5, nodes=40)
    assert diagonal_blocks(graph_of(case)).ptr.tolist() == list(range(0, 201, 40))


def test_sources_that_are_not_the_targets_have_no_segments():
    assert diagonal_blocks(Graph.of(torch.tensor([[0], [0]]), 3, 2)) is None
    assert diagonal_blocks(Graph.of(torch.zeros(2, 0, dtype=torch.long), 0)) is None


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_tiles_decode_to_the_graph(graph, rows):
    """Both sides, with the columns that occur and, where there are segments, with all nodes of those."""
    found = diagonal_blocks(graph)
    for segments in (None, found) if found else (None,):
        for side, num_columns in ((graph.csr, graph.num_src), (graph.csc, graph.num_dst)):
            tiles = make_blocks(side, rows, segments)
            assert (tiles.columns is None) == (segments is not None)
            assert torch.equal(decode(tiles, side.num_rows, num_columns, rows), dense_of(graph, side))


def test_segments_can_be_coarser_than_needed():
    """The columns of a window are whatever range it is given, as long as no edge leaves it."""
    graph = graph_of(batch([20, 1, 70, 130, 33], 0.3, "batch"))
    ptr = torch.tensor([0, 91, 254], dtype=torch.int32)
    tiles = make_blocks(graph.csc, 64, DiagonalBlocks(ptr, 163, ((6, 1), (11, 1))))
    assert torch.equal(decode(tiles, 254, 254, 64), dense_of(graph, graph.csc))


def test_windows_share_a_segment_evenly():
    """130 rows in windows of up to 80 are 80 and 50, those of up to 64 are three of 48, 48 and 34."""
    graph = graph_of(batch([130], 0.3, "one"))
    spans = {
        rows: [last - first for first, last, *_ in block_sparse.of(graph, "targets", rows, False).windows.tolist()]
        for rows in (64, 80)
    }
    assert spans == {64: [48, 48, 34], 80: [80, 50]}


def test_listed_columns_are_those_that_occur():
    """In ascending order and once each, however many rows meet them."""
    edge_index = torch.tensor([[7, 3, 9, 3, 40, 2], [0, 0, 1, 31, 32, 39]])
    tiles = make_blocks(Graph.of(edge_index, 41, 40).csr, 32, None)
    assert tiles.windows[:, :4].tolist() == [[0, 32, 0, 3], [32, 40, 1, 2]]
    assert tiles.columns.tolist() == [[3, 7, *[9] * 30], [2, *[40] * 31]]
    assert tiles.bits[0, [0, 1, 31]].tolist() == [0b011, 0b100, 0b001] and tiles.bits[1, [0, 7]].tolist() == [2, 1]


@pytest.mark.parametrize("edge", [(0, 0), (31, 5), (32, 32)])
@pytest.mark.parametrize("order", ["target", "source", "none"])
@pytest.mark.parametrize("self_loops", [False, True])
def test_copies_of_an_edge_are_seen(edge, order, self_loops):
    """In whatever order the edges come, which decides the side whose columns ascend; replaced loops have no copies."""
    dense = torch.ones(33, 33, dtype=torch.bool).nonzero().t()
    for copies in (0, 1, 31):
        edge_index = torch.cat([dense, torch.tensor(edge)[:, None].expand(2, copies)], dim=1)
        keys = {"target": edge_index[1], "source": edge_index[0], "none": torch.randperm(edge_index.size(1))}
        edge_index = edge_index[:, keys[order].argsort(stable=True)]
        graph = Graph.of(edge_index, 33)
        if self_loops:
            # Of a graph that has its CSC: what was sorted by source stays so but for the loops.
            assert graph.csc is not None
            graph = Graph.of(edge_index, 33, self_loops=True)
        assert block_sparse.is_simple(graph) == (copies == 0 or (self_loops and edge[0] == edge[1]))


def test_the_zoo_with_its_duplicates(case):
    simple = case.edge_index.unique(dim=1).size(1) == case.edge_index.size(1)
    assert block_sparse.is_simple(graph_of(case)) == simple


# Counting without making ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("direction", ["targets", "sources"])
def test_counts_are_those_of_the_blocks(graph, direction, rows):
    """Of diagonal blocks exactly; of listed columns as the sample of all windows tells."""
    for compact in (False, True) if graph.num_edges else ():
        counts, blocks = (f(graph, direction, rows, compact) for f in (block_sparse.counts, block_sparse.of))
        assert counts.num_windows == blocks.num_windows
        if blocks.columns is None:
            assert (counts.num_blocks, counts.max_columns) == (blocks.num_blocks, blocks.max_columns)
        elif blocks.num_blocks:
            assert counts.num_blocks == pytest.approx(blocks.num_blocks, rel=0.35)
            # A window of a short side may be cut elsewhere.
            assert counts.max_columns <= blocks.max_columns or blocks.windows[0, 1] < rows


def test_most_columns_of_a_hub():
    """Columns that occur often count once."""
    graph = graph_of(hub(3000, num_nodes=200))
    assert most_columns(graph.csr, 32) == block_sparse.of(graph, "targets", 32, True).max_columns == 200


# Fill -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_fill_of_every_window(graph, rows):
    """With as many samples as windows it is the share of the bits that are set."""
    fill = sample_fill(graph.csr, rows)
    # Windows that the tiles cut in equal shares, the sample cuts at multiples of `rows`.
    area = 0
    for first in range(0, graph.num_dst, rows):
        begin, end = graph.csr.rowptr[[first, min(first + rows, graph.num_dst)]].tolist()
        area += -(-graph.csr.col[begin:end].unique().numel() // BLOCK) * BLOCK * rows
    assert fill == pytest.approx(graph.num_edges / max(1, area))


def test_sampled_fill_is_near_the_exact_one():
    graph = graph_of(without_duplicates(random(6000, 6000, 60_000, seed=7)))
    exact, sampled = (sample_fill(graph.csr, 32, samples) for samples in (1000, 40))
    assert sampled != exact and sampled == pytest.approx(exact, rel=0.05)
    tiles = block_sparse.of(graph, "targets", 32, True)
    assert exact == pytest.approx(graph.num_edges / (tiles.num_blocks * BLOCK * 32), rel=0.01)


def test_a_sample_of_long_windows_is_cut(monkeypatch):
    """Windows with most edges are left out; of one that is too long some edges are taken."""
    graph = graph_of(hub(3000, num_nodes=400))
    monkeypatch.setattr(block_sparse, "SAMPLED_EDGES", 1)
    # One block of 32 columns for the 16 edges of 16 rows, once the hub is left out.
    assert sample_fill(graph.csr, 16) == 1 / 32
    one_row = Graph.of(torch.stack([torch.arange(4000), torch.zeros(4000, dtype=torch.int64)]), 4000, 1)
    assert sample_fill(one_row.csr, 16) == pytest.approx(1 / 16, rel=0.05)


def test_fill_of_a_graph():
    graph = graph_of(batch([20, 1, 70, 130, 33], 0.3, "batch"))
    area = 32**2 + 16**2 + 80**2 + 144**2 + 48**2
    assert (
        block_sparse.fill(graph, 64, compact=False)
        == block_sparse.fill(graph, 32, compact=False)
        == graph.num_edges / area
    )
    assert block_sparse.fill(graph, 64, compact=True) == sample_fill(graph.csr, 64)
    # Without segments there are only listed columns.
    wide = graph_of(CASES[10])
    assert diagonal_blocks(wide) is None
    assert (
        block_sparse.fill(wide, 64, compact=False)
        == block_sparse.fill(wide, 64, compact=True)
        == sample_fill(wide.csr, 64)
    )


# Keeping --------------------------------------------------------------------------------------------------------------


def test_what_a_graph_keeps(host_syncs):
    graph = graph_of(batch([20, 1, 70], 0.3, "batch"))
    keys = [(domain, rows, compact) for domain in ("targets", "sources") for rows in ROWS for compact in (False, True)]
    made = {key: block_sparse.of(graph, *key) for key in keys}
    assert len({id(blocks) for blocks in made.values()}) == len(keys)
    diagonal, fills = diagonal_blocks(graph), [block_sparse.fill(graph, rows, True) for rows in ROWS]
    count = len(host_syncs)
    assert all(block_sparse.of(graph, *key) is blocks for key, blocks in made.items())
    assert block_sparse.of(graph, "forward", 64, True) is made["targets", 64, True]
    assert diagonal_blocks(graph) is diagonal
    assert [block_sparse.fill(graph, rows, True) for rows in ROWS] == fills
    assert len(host_syncs) == count


def test_made_in_inference_mode_serves_training():
    graph = graph_of(batch([20, 1, 70], 0.3, "batch"))
    with torch.inference_mode():
        tiles = block_sparse.of(graph, "targets", 64, False), block_sparse.of(graph, "sources", 64, True)
        block_sparse.fill(graph, 64, True)
    assert not any(tensor.is_inference() for each in tiles for tensor in tensors_of(each))
    assert not diagonal_blocks(graph).ptr.is_inference()
