"""Graphs sorted one by one make a batch that needs no sort."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from pyg_dfgnn.graph import BatchFacts, Graph, SortEdges
from pyg_dfgnn.graph import graph as graph_module
from pyg_dfgnn.graph.facts import FACTS
from pyg_dfgnn.reference.zoo import random, zoo
from tests.graph.brute import check_graph, with_loops


def members(num=6):
    """Graphs of all sizes, empty ones among them, with features that name each edge."""
    found = [case for case in zoo() if case.num_src == case.num_dst and case.num_src > 0][:9]
    found += [random(4 + seed, 4 + seed, 5 * seed, seed=seed) for seed in range(num)]
    return [
        Data(
            x=torch.randn(case.num_src, 3),
            edge_index=case.edge_index,
            edge_attr=(case.edge_index[0] * 100 + case.edge_index[1]).float().view(-1, 1),
            y=torch.zeros(1),
            num_nodes=case.num_src,
        )
        for case in found
    ]


def test_transform_sorts_edges_and_their_features():
    for before in members():
        after = SortEdges()(before)
        source, target = after.edge_index
        assert (target.diff() >= 0).all()
        assert (source.diff()[target.diff() == 0] >= 0).all()
        assert torch.equal(after.edge_attr.view(-1), (source * 100 + target).float())
        assert torch.equal(after.edge_attr.sort(0)[0], before.edge_attr.sort(0)[0])
        assert torch.equal(after.x, before.x)
        assert "csr_in_degree" not in before


def test_all_that_is_along_edges_is_sorted_alike():
    ids = [10, 11, 12]
    forms = {
        "edge_array": np.array(ids),
        "edge_list": list(ids),
        "edge_tuple": tuple(ids),
        "edge_tensor": torch.tensor(ids),
    }
    data = SortEdges()(Data(x=torch.randn(3, 2), edge_index=torch.tensor([[2, 0, 1], [2, 1, 0]]), **forms))
    for name, form in forms.items():
        assert type(data[name]) is type(form) and list(map(int, data[name])) == [12, 11, 10], name


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_batch_without_a_sort(self_loops, sorts):
    data = [SortEdges()(member) for member in members()]
    batch = Batch.from_data_list(data)
    graph = Graph.of_batch(batch, self_loops=self_loops)
    assert graph.csc.num_edges == graph.num_edges and sorts == []
    want = with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes) if self_loops else batch.edge_index
    check_graph(graph, want, batch.num_nodes, batch.num_nodes)
    assert graph.graph_ptr.dtype == torch.int32 and torch.equal(graph.graph_ptr.long(), batch.ptr)
    assert graph.max_graph_nodes == max(member.num_nodes for member in data)
    # Convs only see batch.edge_index.
    assert Graph.of(batch.edge_index, batch.num_nodes, self_loops=self_loops) is graph
    assert Graph.of_batch(batch, self_loops=self_loops) is graph


def test_batch_costs_one_host_sync(host_syncs):
    batch = Batch.from_data_list([SortEdges()(member) for member in members()])
    del host_syncs[:]
    assert Graph.of_batch(batch).csc.max_degree > 0
    assert len(host_syncs) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers):
    data = [SortEdges()(member) for member in members()]
    count = 0
    for batch in DataLoader(data, batch_size=4, shuffle=True, num_workers=workers):
        graph = Graph.of_batch(batch)
        check_graph(graph, batch.edge_index, batch.num_nodes, batch.num_nodes)
        source, target = batch.edge_index - batch.ptr[batch.batch[batch.edge_index[0]]]
        assert torch.equal(batch.edge_attr.view(-1), (source * 100 + target).float())
        count += graph.graph_ptr.numel() - 1
    assert count == len(data)


def test_batch_of_unsorted_graphs_has_segments():
    batch = Batch.from_data_list(members())
    plain = Graph.of(batch.edge_index, batch.num_nodes, self_loops=True)
    assert plain.graph_ptr is None
    graph = Graph.of_batch(batch, self_loops=True)
    assert torch.equal(graph.graph_ptr.long(), batch.ptr)
    check_graph(graph, with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes), *[batch.num_nodes] * 2)


def test_single_graph_is_a_batch_of_one():
    data = SortEdges()(members()[-1])
    graph = Graph.of_batch(data)
    check_graph(graph, data.edge_index, data.num_nodes, data.num_nodes)
    assert graph.graph_ptr.tolist() == [0, data.num_nodes] and graph.max_graph_nodes == data.num_nodes


@pytest.mark.parametrize("change", ["permute", "replace", "fewer", "degree", "order", "twice"])
def test_edges_changed_after_the_transform(change):
    batch = Batch.from_data_list([SortEdges()(member) for member in members()])
    if change == "permute":
        batch.edge_index = batch.edge_index.flip(1)
    elif change == "replace":
        batch.edge_index[0, 5] = (batch.edge_index[0, 5] + 1) % batch.num_nodes
    elif change == "fewer":
        batch.edge_index = batch.edge_index[:, :-1]
    elif change == "degree":
        batch.csr_in_degree = batch.csr_in_degree[:-1]
    elif change == "order":
        batch.csr_by_source = torch.zeros_like(batch.csr_by_source)
    else:
        # Two edges leave the same source; one of them is listed twice, the other never.
        first = int((batch.edge_index[0].sort()[0].diff() == 0).nonzero()[0])
        batch.csr_by_source[first] = batch.csr_by_source[first + 1]
    with pytest.raises(ValueError, match="the edges that SortEdges saw"):
        Graph.of_batch(batch)


def test_facts_of_graphs_that_were_not_sorted():
    facts = BatchFacts.of(Batch.from_data_list([SortEdges()(member) for member in members()]))
    for batch in (Batch.from_data_list(members()), Batch.from_data_list(members()[1:])):
        with pytest.raises(ValueError, match="needs the edges that SortEdges saw"):
            Graph.of_batch(batch, facts=facts)


def test_edge_between_graphs():
    batch = Batch.from_data_list(members())
    batch.edge_index = torch.cat([batch.edge_index, torch.tensor([[0], [batch.num_nodes - 1]])], dim=1)
    with pytest.raises(ValueError, match="edge between two graphs"):
        Graph.of_batch(batch)


def test_inference_batch():
    with torch.inference_mode():
        batch = Batch.from_data_list([SortEdges()(member) for member in members()])
        graph = Graph.of_batch(batch, self_loops=True)
        want = with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes)
        check_graph(graph, want, batch.num_nodes, batch.num_nodes)


def test_sampled_subgraphs():
    """As a neighbour loader gives them: a new small bipartite edge_index per step, targets first among the sources."""
    for seed in range(40):
        case = random(60, 12, 45, seed=seed)
        for loops in (False, True):
            graph = Graph.of(case.edge_index, 60, 12, self_loops=loops)
            want = with_loops(case.edge_index, 60, 12) if loops else case.edge_index
            check_graph(graph, want, 60, 12)
        del case, graph
    assert len(graph_module._cache.entries) == 0


def test_facts_of_another_version_are_refused():
    graph = SortEdges()(Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2))
    batch = Batch.from_data_list([graph, graph])
    batch[FACTS] = batch[FACTS][:, :6]
    with pytest.raises(ValueError, match=r"'batch' needs the 7 facts .* \(got 6 stored by another version\)"):
        BatchFacts.of(batch)
