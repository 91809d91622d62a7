"""Lists of chunks and ranges of nodes: what kernels rely on."""

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.adjacency import group_heavy_rows
from pyg_dfgnn.reference.zoo import hub, random, zoo


def rows_of(chunks, edges):
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
    assert rows_of(chunks, edges) == heavy
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
    side = Graph.of(case.edge_index, case.num_src, case.num_dst).csr
    degree = side.rowptr.diff()
    assert torch.equal(degree[side.row_order], degree.sort(descending=True).values)
    ascending, ordered = side.chunks(4), side.chunks(4, ordered=True)
    assert rows_of(ascending, 4) == rows_of(ordered, 4)
    assert degree[ordered.heavy_row].tolist() == degree[ascending.heavy_row].sort(descending=True).values.tolist()
    swept = side.column_blocks(3, 2, case.num_src, ordered=True)
    for block, chunks in enumerate(swept.chunks):
        expected = {row: swept.rowptr[3 * row + block :][:2].tolist() for row in range(case.num_dst)}
        expected = {row: list(range(*ends)) for row, ends in expected.items() if ends[1] - ends[0] > 2}
        assert (rows_of(chunks, 2) if chunks else {}) == expected


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
    ranges = graph.node_ranges(most)
    ptr = ranges.ptr.tolist()
    assert ptr[0] == 0 and ptr[-1] == sum(sizes) and ranges.num_ranges == len(ptr) - 1
    assert set(ptr) <= {0, *torch.tensor(sizes).cumsum(0).tolist()}
    lengths = [end - begin for begin, end in zip(ptr, ptr[1:], strict=False)]
    assert 0 < min(lengths) and max(lengths) == ranges.most_nodes <= most
    edges = [int(graph.csr.rowptr[end] - graph.csr.rowptr[begin]) for begin, end in zip(ptr, ptr[1:], strict=False)]
    out_edges = [int(graph.csc.rowptr[end] - graph.csc.rowptr[begin]) for begin, end in zip(ptr, ptr[1:], strict=False)]
    assert max(edges) == ranges.most_edges and edges == out_edges
    assert graph.node_ranges(most) is ranges and graph.node_ranges(max(sizes) - 1) is None


def test_ranges_of_all_graphs():
    for case in zoo():
        graph = Graph.of(case.edge_index, case.num_src, case.num_dst)
        ranges = graph.node_ranges(1 << 20)
        assert (ranges is None) == (case.num_src != case.num_dst or case.num_src == 0)
        if ranges is not None:
            assert ranges.most_nodes == case.num_src and ranges.most_edges == graph.num_edges
    assert Graph.of(random(20, 10, 30).edge_index, 20, 10).node_ranges(100) is None
