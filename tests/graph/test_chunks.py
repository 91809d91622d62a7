"""What kernels read of a graph beyond CSR and CSC: chunks, column blocks, ranges of nodes, positions."""

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import (
    column_blocks,
    group_heavy_rows,
    heavy_rows,
    most_edges,
    positions,
    row_index,
    row_order,
)
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.graph.node_ranges import node_ranges
from pyg_dfgnn.reference.zoo import hub, random, zoo


def graph_of(case):
    return Graph.of(case.edge_index, case.num_src, case.num_dst)


def edges_of(chunks, edges):
    """Edges of each row that has chunks, in the order of the chunks; checks that no chunk is longer."""
    found = {}
    for row, begin, end in zip(chunks.row.tolist(), chunks.begin.tolist(), chunks.end.tolist(), strict=True):
        assert end - begin <= edges
        found.setdefault(row, []).extend(range(begin, end))
    return {row: found[row] for row in found if found[row]}


@pytest.mark.parametrize("degrees", [[0, 9, 3, 40, 12, 8, 31, 7], [33] * 9, [64, 9], list(range(65))])
@pytest.mark.parametrize(("edges", "group"), [(8, 8), (4, 16), (16, 4)])
def test_groups_hold_whole_rows(degrees, edges, group):
    ptr = torch.tensor([0, *degrees]).cumsum(0).to(torch.int32)
    chunks = group_heavy_rows(ptr, edges, group)
    heavy = {row: list(range(ptr[row], ptr[row + 1])) for row, degree in enumerate(degrees) if degree > edges}
    assert edges_of(chunks, edges) == heavy
    assert chunks.num_chunks % group == 0
    join = chunks.join.tolist()
    assert sum(join) <= chunks.num_chunks and sum(count > 0 for count in join) == len(heavy)
    for first, count in enumerate(join):
        if count:
            row = int(chunks.row[first])
            assert first // group == (first + count - 1) // group
            assert set(chunks.row[first : first + count].tolist()) == {row}
            assert int(chunks.begin[first]) == int(ptr[row]) and max(join[first + 1 : first + count], default=0) == 0


def test_rows_by_descending_length():
    case = hub(300)
    graph = graph_of(case)
    side, degree = graph.csr, graph.csr.rowptr.diff()
    assert torch.equal(degree[row_order(graph, side)], degree.sort(descending=True).values)
    ascending, ordered = heavy_rows(graph, side, 4), heavy_rows(graph, side, 4, ordered=True)
    assert edges_of(ascending, 4) == edges_of(ordered, 4)
    assert degree[ordered.heavy_row].tolist() == degree[ascending.heavy_row].sort(descending=True).values.tolist()
    swept = column_blocks(graph, side, 3, 2, ordered=True)
    for block, chunks in enumerate(swept.chunks):
        expected = {row: swept.rowptr[3 * row + block :][:2].tolist() for row in range(case.num_dst)}
        expected = {row: list(range(*ends)) for row, ends in expected.items() if ends[1] - ends[0] > 2}
        assert (edges_of(chunks, 2) if chunks else {}) == expected


def batch(sizes):
    """Complete graphs side by side."""
    first = torch.tensor([0, *sizes]).cumsum(0)
    return Graph.of(
        torch.cat([torch.ones(n, n).nonzero().t() + f for n, f in zip(sizes, first, strict=False)], 1), sum(sizes)
    )


@pytest.mark.parametrize("sizes", [[5, 1, 9, 3, 3, 12, 2, 7, 4], [12], [1] * 30, [12, 12, 12]])
@pytest.mark.parametrize("most", [12, 13, 20, 100])
def test_ranges_hold_whole_segments(sizes, most):
    graph = batch(sizes)
    ranges = node_ranges(graph, most)
    ptr = ranges.ptr.tolist()
    assert ptr[0] == 0 and ptr[-1] == sum(sizes) and ranges.num_ranges == len(ptr) - 1
    assert set(ptr) <= {0, *torch.tensor(sizes).cumsum(0).tolist()}
    lengths = [end - begin for begin, end in zip(ptr, ptr[1:], strict=False)]
    assert 0 < min(lengths) and max(lengths) == ranges.most_nodes <= most
    edges = [int(graph.csr.rowptr[end] - graph.csr.rowptr[begin]) for begin, end in zip(ptr, ptr[1:], strict=False)]
    out_edges = [int(graph.csc.rowptr[end] - graph.csc.rowptr[begin]) for begin, end in zip(ptr, ptr[1:], strict=False)]
    assert max(edges) == ranges.most_edges and edges == out_edges
    assert node_ranges(graph, most) is ranges and node_ranges(graph, max(sizes) - 1) is None


def test_ranges_of_all_graphs():
    for case in zoo():
        graph = graph_of(case)
        ranges = node_ranges(graph, 1 << 20)
        assert (ranges is None) == (case.num_src != case.num_dst or case.num_src == 0)
        if ranges is not None:
            assert ranges.most_nodes == case.num_src and ranges.most_edges == graph.num_edges
    assert node_ranges(Graph.of(random(20, 10, 30).edge_index, 20, 10), 100) is None


@pytest.mark.parametrize("max_edges", [1, 2, 7, 64, 299, 301])
def test_chunks(case, max_edges):
    graph = graph_of(case)
    for side in (graph.csr, graph.csc):
        degree = side.rowptr.diff().tolist()
        heavy = [row for row, length in enumerate(degree) if length > max_edges]
        chunks = heavy_rows(graph, side, max_edges)
        if not heavy:
            assert chunks is None
            continue
        assert chunks is heavy_rows(graph, side, max_edges)
        want, heavy_ptr = [], [0]
        for row in heavy:
            end = int(side.rowptr[row + 1])
            want += [(row, b, min(b + max_edges, end)) for b in range(int(side.rowptr[row]), end, max_edges)]
            heavy_ptr.append(len(want))
        assert list(zip(chunks.row.tolist(), chunks.begin.tolist(), chunks.end.tolist())) == want
        assert (chunks.heavy_row.tolist(), chunks.heavy_ptr.tolist()) == (heavy, heavy_ptr)
        assert (chunks.num_chunks, chunks.num_heavy) == (len(want), len(heavy))
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors_of(chunks))


def test_chunks_of_a_large_hub():
    case = hub(100_003)
    graph = graph_of(case)
    chunks = heavy_rows(graph, graph.csr, 256)
    assert chunks.num_heavy == 1 and chunks.num_chunks == -(-100_004 // 256)
    assert (chunks.end - chunks.begin).sum() == 100_004


@pytest.mark.parametrize("is_sorted", [False, True], ids=["shuffled", "sorted"])
def test_blocks_of_columns(is_sorted):
    """Each block of a row holds the row's edges with the other end in one range; all counts share one order."""
    torch.manual_seed(0)
    num_src, num_dst = 17, 9
    edge_index = torch.stack([torch.randint(num_src, (200,)), torch.randint(num_dst, (200,))])
    if is_sorted:
        edge_index = edge_index[:, (edge_index[1] * num_src + edge_index[0]).argsort()]
    graph = Graph.of(edge_index, num_src, num_dst)
    side = graph.csr
    found = {count: column_blocks(graph, side, count, 4) for count in (2, 3, 5)}
    for count, blocks in found.items():
        assert blocks.col is found[2].col and blocks.perm is found[2].perm
        assert torch.equal(edge_index[0, blocks.perm.long()].int(), blocks.col)
        assert torch.equal(blocks.rowptr[::count], side.rowptr)
        row_of_edge = torch.repeat_interleave(torch.arange(num_dst), side.rowptr.diff())
        assert torch.equal(edge_index[1, blocks.perm.long()], row_of_edge)
        block_of_edge = torch.repeat_interleave(torch.arange(num_dst * count), blocks.rowptr.diff()) % count
        assert torch.equal(blocks.col.long() * count // num_src, block_of_edge)
        for block, chunks in enumerate(blocks.chunks):
            lengths = blocks.rowptr.diff()[block::count]
            heavy = [] if chunks is None else chunks.heavy_row.tolist()
            assert heavy == (lengths > 4).nonzero().flatten().tolist()
    assert (found[2].col.data_ptr() == side.col.data_ptr()) == is_sorted


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_most_edges_of_a_block_of_rows(case, rows, host_syncs):
    graph = graph_of(case)
    for side in (graph.csr, graph.csc):
        blocks = torch.bincount(row_index(graph, side).long() // rows)
        most = int(blocks.max()) if blocks.numel() else 0
        assert most_edges(graph, side, rows) == most
        count = len(host_syncs)
        assert most_edges(graph, side, rows) == most and len(host_syncs) == count


def test_positions_lead_to_the_same_edge(case):
    graph = graph_of(case)
    position = positions(graph, graph.csc, graph.csr)
    assert position.dtype == torch.int32
    assert torch.equal(graph.csr.perm[position.long()], graph.csc.perm)
    assert torch.equal(row_index(graph, graph.csr)[position.long()], graph.csc.col)
    assert torch.equal(graph.csr.col[position.long()], row_index(graph, graph.csc))
    assert positions(graph, graph.csc, graph.csr) is position
