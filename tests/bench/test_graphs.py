"""The generators follow their recipes; the check graphs are what their names say."""

import pytest
import torch

from pyg_dfgnn.bench import graphs
from pyg_dfgnn.bench.graphs import CHECK_GRAPHS, RECIPES, BenchGraph, benchmark_graph, check_graph, compare_with_recipe


def edge_set(graph):
    return set(map(tuple, graph.edge_index.t().tolist()))


@pytest.mark.parametrize("name", RECIPES)
def test_small_recipe_is_seeded_sorted_and_free_of_loops_and_duplicates(name):
    graph, again = (benchmark_graph(name, "cpu", small=True) for _ in range(2))
    assert torch.equal(graph.edge_index, again.edge_index)
    source, target = graph.edge_index
    assert (source != target).all()
    key = target * graph.num_src + source
    assert (key[1:] > key[:-1]).all()
    assert int(graph.edge_index.max()) < graph.num_dst == graph.num_src


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_both_directions_are_present(name):
    edges = edge_set(benchmark_graph(name, "cpu", small=True))
    assert edges == {(v, u) for u, v in edges}


def test_random_graph_batch_keeps_pairs_at_its_rate_inside_its_graphs():
    edge_index, num_nodes = graphs.random_graph_batch(64, 20, 30, 0.43, seed=0, device="cpu")
    possible = 64 * 25 * 24
    assert 64 * 20 <= num_nodes <= 64 * 30
    assert edge_index.size(1) / possible == pytest.approx(0.43, rel=0.15)
    assert int((edge_index[0] - edge_index[1]).abs().max()) < 30


def test_chung_lu_at_full_size_is_equivalent_to_the_recorded_graph():
    graph = benchmark_graph("b", "cpu")
    assert compare_with_recipe(graph, RECIPES["b"]).endswith(("identical", "equivalent"))


def test_nearest_neighbours_are_the_nearest():
    edge_index, num_nodes = graphs.nearest_neighbour_batch(2, 10, 3, seed=5, device="cpu")
    point = torch.rand(2, 10, 2, generator=torch.Generator().manual_seed(5)).reshape(-1, 2)
    assert num_nodes == 20
    assert torch.equal(torch.bincount(edge_index[1]), torch.full((20,), 3))
    for node in range(20):
        others = [v for v in range(20) if v // 10 == node // 10 and v != node]
        distance = {v: float((point[v] - point[node]).norm()) for v in others}
        mine = edge_index[0, edge_index[1] == node].tolist()
        assert set(mine) == set(sorted(others, key=distance.get)[:3])


@pytest.mark.parametrize("change", ["nodes", "edges", "degree"])
def test_another_graph_is_refused(change):
    graph = benchmark_graph("e", "cpu")
    edges, nodes = graph.edge_index, graph.num_src
    assert compare_with_recipe(graph, RECIPES["e"]).endswith("identical")
    if change == "nodes":
        nodes += 1
    elif change == "edges":
        edges = edges[:, : int(0.99 * edges.size(1))]
    else:
        edges = torch.cat([edges[:, 10:], torch.zeros(2, 10, dtype=torch.long)], 1)
    with pytest.raises(RuntimeError, match="another graph"):
        compare_with_recipe(BenchGraph("e", edges, nodes, nodes), RECIPES["e"])


GENERATED = [name for name in CHECK_GRAPHS if name not in ("cora", "cornell5")]


@pytest.mark.parametrize("name", GENERATED)
def test_check_graph_ids_are_in_range(name):
    graph = check_graph(name, "cpu", small=True)
    assert graph.edge_index.dtype == torch.long and graph.edge_index.shape == (2, graph.num_edges)
    if graph.num_edges:
        assert int(graph.edge_index[0].max()) < graph.num_src and int(graph.edge_index[1].max()) < graph.num_dst


def test_check_graphs_are_what_they_are_called():
    small = {name: check_graph(name, "cpu", small=True) for name in GENERATED}
    assert small["empty"].num_src == 0 and small["no_edges"].num_src > 0 == small["no_edges"].num_edges
    assert (small["isolated"].in_degree == 0).sum() >= small["isolated"].num_dst / 2
    assert len(edge_set(small["duplicates"])) <= small["duplicates"].num_edges / 3
    assert (small["self_loops"].edge_index[0] == small["self_loops"].edge_index[1]).sum() >= 15
    assert small["bipartite_wide"].num_src > small["bipartite_wide"].num_dst
    assert small["bipartite_tall"].num_src < small["bipartite_tall"].num_dst


def test_the_full_hub_has_100_000_neighbours():
    hub = check_graph("hub", "cpu")
    assert hub.hubs["dst"] == (0, 100_000) and hub.hubs["src"] == (0, 100_000)


def test_a_missing_data_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DFGNN_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cora.*PYG_DFGNN_DATA"):
        check_graph("cora", "cpu")


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "degree"), [("cora", 2708, 10556, 168), ("cornell5", 18660, 1581554, 3156)]
)
def test_real_graphs(name, nodes, edges, degree):
    try:
        graph = check_graph(name, "cpu")
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))
    assert (graph.num_src, graph.num_edges, graph.max_degree) == (nodes, edges, degree)
