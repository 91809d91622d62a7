"""Edges grouped by blocks of columns, for sweeps."""

import pytest
import torch

from pyg_dfgnn.graph import Graph


@pytest.mark.parametrize("is_sorted", [False, True], ids=["shuffled", "sorted"])
def test_blocks_of_columns(is_sorted):
    """Each block of a row holds the row's edges with the other end in one range; all counts share one order."""
    torch.manual_seed(0)
    num_src, num_dst = 17, 9
    edge_index = torch.stack([torch.randint(num_src, (200,)), torch.randint(num_dst, (200,))])
    if is_sorted:
        edge_index = edge_index[:, (edge_index[1] * num_src + edge_index[0]).argsort()]
    side = Graph.of(edge_index, num_src, num_dst).csr
    found = {count: side.column_blocks(count, 4, num_src) for count in (2, 3, 5)}
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
