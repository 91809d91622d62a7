"""Batches that cost the device a few kernels: of trusted graphs, and gathered from graphs that stay on the device."""

from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_dfgnn.graph import BatchFacts, DeviceDataset, Graph, SortEdges, block_sparse
from pyg_dfgnn.graph.chunks import most_edges
from pyg_dfgnn.graph.node_ranges import DiagonalBlocks, diagonal_blocks, node_ranges, pack_blocks
from tests.graph.brute import assert_same, check_graph
from tests.graph.test_batch import members

PICKS = ([0, 1, 2], [5, 3, 3, 0, 9], list(range(15)), [4])


def simple(member):
    """Without repeated edges."""
    edge_index, place = member.edge_index.unique(dim=1, return_inverse=True)
    edge_attr = torch.zeros(edge_index.size(1), 1).index_copy_(0, place, member.edge_attr)
    return Data(x=member.x, edge_index=edge_index, edge_attr=edge_attr, y=member.y, num_nodes=member.num_nodes)


def test_facts_are_those_of_the_batch():
    data = [SortEdges()(member) for member in members()]
    batch = Batch.from_data_list(data)
    facts, graph = BatchFacts.of(batch), Graph.of_batch(batch)
    assert torch.equal(facts.nodes, batch.ptr.diff()) and facts.num_edges == graph.num_edges
    assert (facts.max_in_degree, facts.max_out_degree) == (graph.csr.max_degree, graph.csc.max_degree)
    assert facts.is_simple == (batch.edge_index.unique(dim=1).size(1) == graph.num_edges)
    assert BatchFacts.of(Batch.from_data_list([SortEdges()(simple(member)) for member in members()])).is_simple


def test_trusted_batch_equals_the_checked_one(host_syncs):
    data = [SortEdges()(member) for member in members()]
    checked = Graph.of_batch(Batch.from_data_list(data))
    most = most_edges(checked, checked.csr, 8)
    batch = Batch.from_data_list(data)
    del host_syncs[:]
    graph = Graph.of_batch(batch, facts=BatchFacts.of(batch))
    assert_same(graph, checked)
    assert Graph.of(batch.edge_index, batch.num_nodes) is graph
    assert diagonal_blocks(graph).longest == graph.max_graph_nodes
    assert graph.csr.num_edges >= most_edges(graph, graph.csr, 8) >= most
    assert host_syncs == []


@pytest.mark.parametrize("made_by", ["trusted", "resident"])
def test_self_loops_without_a_sync(made_by, host_syncs):
    data = [SortEdges()(member) for member in members()]
    plain = Batch.from_data_list(data)
    want = Graph.of_batch(plain, self_loops=True)
    assert want.num_edges < plain.num_edges + plain.num_nodes and want.csc.max_degree > 0
    batch = Batch.from_data_list(data) if made_by == "trusted" else DeviceDataset(data).batch(torch.arange(len(data)))
    del host_syncs[:]
    if made_by == "trusted":
        Graph.of_batch(batch, facts=BatchFacts.of(batch))
    graph = Graph.of(batch.edge_index, batch.num_nodes, self_loops=True)
    assert_same(graph, want)
    assert diagonal_blocks(graph).longest == want.max_graph_nodes and graph.num_edges == want.num_edges
    assert host_syncs == []


def test_facts_need_sorted_edges():
    with pytest.raises(ValueError, match="'batch' needs graphs that went through SortEdges"):
        BatchFacts.of(Batch.from_data_list(members()))


@pytest.mark.parametrize("ids", PICKS, ids=str)
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "plain"])
def test_resident_batch_equals_pygs(ids, is_sorted, host_syncs):
    data = [SortEdges()(member) if is_sorted else member for member in members()]
    picked = [data[i] for i in ids]
    want = Batch.from_data_list(picked)
    resident = DeviceDataset(data)
    assert len(resident) == len(data)
    checked = Graph.of_batch(want)
    del host_syncs[:]
    batch = resident.batch(torch.tensor(ids))
    graph = Graph.of_batch(batch) if is_sorted else None
    assert batch.num_graphs == want.num_graphs and batch.num_nodes == want.num_nodes
    for name in ("x", "y", "edge_index", "edge_attr", "batch", "ptr"):
        assert torch.equal(batch[name], want[name]) and batch[name].dtype == want[name].dtype, name
    if is_sorted:
        assert_same(graph, checked)
    assert host_syncs == []


def test_resident_batch_is_a_whole_graph():
    resident = DeviceDataset([SortEdges()(member) for member in members()])
    batch = resident.batch(torch.tensor([7, 2, 11, 3]))
    check_graph(Graph.of_batch(batch), batch.edge_index, batch.num_nodes, batch.num_nodes)


@pytest.mark.parametrize("rows", [32, 64, 80])
@pytest.mark.parametrize("domain", ["targets", "sources"])
def test_dense_blocks_without_a_sync(rows, domain, host_syncs):
    data = [SortEdges()(simple(member)) for member in members()]
    ids = torch.tensor([7, 2, 11, 3, 14, 3])
    plain = Batch.from_data_list([data[i] for i in ids])
    facts = BatchFacts.of(plain)
    trusted, resident = Graph.of_batch(plain, facts=facts), DeviceDataset(data)
    graph = Graph.of_batch(resident.batch(ids))
    side = graph.csr if domain == "targets" else graph.csc
    counted = DiagonalBlocks.of_sizes(graph.graph_ptr, facts.nodes, facts.edges)
    want = block_sparse.make_blocks(side, rows, replace(counted, sizes=None))
    del host_syncs[:]
    for each in (graph, trusted):
        found = block_sparse.of(each, domain, rows, compact=False)
        assert torch.equal(found.windows, want.windows) and torch.equal(found.bits, want.bits)
        assert (found.num_windows, found.num_blocks) == (want.num_windows, want.num_blocks)
        assert found.max_columns == want.max_columns
    assert host_syncs == []


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_ranges_without_a_sync(self_loops, host_syncs):
    data = [SortEdges()(member) for member in members()]
    ids = torch.tensor([7, 2, 11, 3, 14, 3])
    plain = Batch.from_data_list([data[i] for i in ids])
    trusted = Graph.of_batch(plain, self_loops=self_loops, facts=BatchFacts.of(plain))
    graph = Graph.of_batch(DeviceDataset(data).batch(ids), self_loops=self_loops)
    unknown, longest = replace(diagonal_blocks(graph), edges=None), diagonal_blocks(graph).longest
    bounds = (longest, longest + 3, 4 * longest)
    asked = [pack_blocks(graph.csr, unknown, most) for most in bounds]
    del host_syncs[:]
    for most, want in zip(bounds, asked, strict=True):
        for each in (graph, trusted):
            found = node_ranges(each, most)
            assert torch.equal(found.ptr, want.ptr) and found.num_ranges == want.num_ranges
            assert (found.most_nodes, found.most_edges) == (want.most_nodes, want.most_edges)
    assert host_syncs == []


def test_repeated_edges_are_told():
    data = [SortEdges()(member) for member in members()]
    resident = DeviceDataset(data)
    batch = resident.batch(torch.arange(len(data)))
    assert batch.edge_index.unique(dim=1).size(1) < batch.num_edges
    assert not block_sparse.is_simple(Graph.of_batch(batch))


def test_what_cannot_be_gathered():
    data = [Data(x=torch.zeros(3, 1), edge_index=torch.zeros(2, 1, dtype=torch.long), name="a") for _ in range(2)]
    with pytest.raises(ValueError, match=r"'graphs' needs tensors along nodes, edges or graphs \(got 'name'\)"):
        DeviceDataset(data)
    many = [Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=1 << 30) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'num_nodes' needs a value in \[0, 2147483647\] \(got 2147483648\)"):
        DeviceDataset(many)
    with pytest.raises(ValueError, match=r"'len\(graphs\)' needs a value >= 1 \(got 0\)"):
        DeviceDataset([])


@pytest.mark.parametrize("name", ["root_index", "sub_batch", "face"])
def test_attributes_that_collation_shifts_are_refused(name):
    graphs = members()
    for graph in graphs:
        graph[name] = torch.zeros(graph.num_nodes, dtype=torch.int64) + (name == "sub_batch")
    with pytest.raises(ValueError, match=f"'graphs' needs attributes that a batch joins row by row .* [(]got '{name}'"):
        DeviceDataset(graphs)


def test_wrong_ids():
    resident = DeviceDataset(members())
    with pytest.raises(ValueError, match=r"'len\(ids\)' needs a value >= 1 \(got 0\)"):
        resident.batch(torch.tensor([], dtype=torch.int64))
    with pytest.raises(TypeError, match="'ids' needs dtype torch.int64"):
        resident.batch(torch.ones(len(resident), dtype=torch.bool))
