"""Each graph of the zoo is what it is called."""

import pytest
import torch

from pyg_dfgnn.reference.zoo import ZOO, zoo


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
@pytest.mark.parametrize("name", ZOO)
def test_ids_are_in_range(name, full):
    graph = ZOO[name](full)
    assert graph.name == name and graph.edge_index.shape == (2, graph.num_edges) and graph.num_edges < 600_000
    for ids, size in zip(graph.edge_index, (graph.num_src, graph.num_dst)):
        assert not ids.numel() or (0 <= int(ids.min()) and int(ids.max()) < size)
    torch.testing.assert_close(graph.in_degree.cumsum(0), graph.row_ptr[1:])
    assert bool((graph.edge_index[1, graph.by_target].diff() >= 0).all())


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
def test_kinds(full):
    graphs = {name: build(full) for name, build in ZOO.items()}
    assert [graphs[name].num_edges for name in ("no-nodes", "no-edges", "no-sources", "no-targets", "one-node")] == [
        0
    ] * 5
    assert (graphs["isolated"].in_degree == 0).sum() >= graphs["isolated"].num_dst / 2
    distinct = graphs["duplicates"].edge_index.unique(dim=1)
    assert distinct.size(1) <= graphs["duplicates"].num_edges / 2
    source, target = graphs["self-loops"].edge_index
    assert 3 <= (source == target).sum() < len(source)
    assert graphs["bipartite-wide"].num_src > 2 * graphs["bipartite-wide"].num_dst
    assert 2 * graphs["bipartite-tall"].num_src < graphs["bipartite-tall"].num_dst
    assert graphs["hub"].max_degree >= (100_000 if full else 300)
    degree = graphs["skewed"].in_degree.sort(descending=True).values
    assert degree[0] > 3 * degree[len(degree) // 2]
    batch = graphs["batch"]
    assert batch.ptr[-1] == batch.num_src and len(batch.ptr) > 4
    owner = torch.bucketize(batch.edge_index, batch.ptr[1:], right=True)
    assert torch.equal(owner[0], owner[1])


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
def test_relations_of_all_sizes(full):
    graph = ZOO["many-relations"](full)
    count = torch.bincount(graph.edge_type, minlength=graph.num_relations)
    assert len(count) == graph.num_relations and count[0] > graph.num_edges / 4
    assert count[-2:].tolist() == [1, 0]


def test_a_shuffled_graph_has_the_same_edges():
    graph = ZOO["many-relations"]()
    other = graph.shuffled()
    rows = [torch.cat([g.edge_index, g.edge_type[None]]).t().tolist() for g in (graph, other)]
    assert rows[0] != rows[1] and sorted(rows[0]) == sorted(rows[1])


def test_small_graphs_suit_brute_force():
    assert len({graph.name for graph in zoo()}) == len(zoo()) and all(graph.num_edges <= 500 for graph in zoo())
