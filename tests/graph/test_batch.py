"""Batches of graphs: their edges, and which nodes belong to which graph."""

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph import graph as graph_module
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


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_batch(self_loops):
    data = members()
    batch = Batch.from_data_list(data)
    graph = Graph.of_batch(batch, self_loops=self_loops)
    want = with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes) if self_loops else batch.edge_index
    check_graph(graph, want, batch.num_nodes, batch.num_nodes)
    assert graph.graph_ptr.dtype == torch.int32 and torch.equal(graph.graph_ptr.long(), batch.ptr)
    assert graph.max_graph_nodes == max(member.num_nodes for member in data)
    # Convs only see batch.edge_index.
    assert Graph.of(batch.edge_index, batch.num_nodes, self_loops=self_loops) is graph
    assert Graph.of_batch(batch, self_loops=self_loops) is graph


def test_a_batch_is_built_once(host_syncs, sorts):
    batch = Batch.from_data_list(members())
    graph = Graph.of_batch(batch)
    # One wait each for the edges, for their graphs, and for the edges by source.
    assert graph.csc.max_degree > 0 and len(sorts) == 2 and len(host_syncs) == 3
    assert Graph.of_batch(batch) is graph and len(sorts) == 2 and len(host_syncs) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers):
    data = members()
    count = 0
    for batch in DataLoader(data, batch_size=4, shuffle=True, num_workers=workers):
        graph = Graph.of_batch(batch)
        check_graph(graph, batch.edge_index, batch.num_nodes, batch.num_nodes)
        source, target = batch.edge_index - batch.ptr[batch.batch[batch.edge_index[0]]]
        assert torch.equal(batch.edge_attr.view(-1), (source * 100 + target).float())
        count += graph.graph_ptr.numel() - 1
    assert count == len(data)


def test_a_graph_made_before_does_not_hide_the_batch():
    """Neither itself nor its variant with self-loops knows the graphs of the batch."""
    batch = Batch.from_data_list(members())
    plain = Graph.of(batch.edge_index, batch.num_nodes, self_loops=True)
    assert plain.graph_ptr is None
    graph = Graph.of_batch(batch, self_loops=True)
    assert torch.equal(graph.graph_ptr.long(), batch.ptr)
    check_graph(graph, with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes), *[batch.num_nodes] * 2)


def test_single_graph_is_a_batch_of_one():
    data = members()[-1]
    graph = Graph.of_batch(data)
    check_graph(graph, data.edge_index, data.num_nodes, data.num_nodes)
    assert graph.graph_ptr.tolist() == [0, data.num_nodes] and graph.max_graph_nodes == data.num_nodes


def test_edge_between_graphs():
    batch = Batch.from_data_list(members())
    batch.edge_index = torch.cat([batch.edge_index, torch.tensor([[0], [batch.num_nodes - 1]])], dim=1)
    with pytest.raises(ValueError, match="edge between two graphs"):
        Graph.of_batch(batch)


def test_inference_batch():
    with torch.inference_mode():
        batch = Batch.from_data_list(members())
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
