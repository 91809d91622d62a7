"""Orders of nodes are permutations that depend on the graph alone, and the estimate of misses agrees with a cache."""

import sys
from collections import OrderedDict

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.reorder import METHODS, PART_NODES, check_method, gather_misses, inverse_of, node_order
from pyg_dfgnn.reference.zoo import edges, hub, random, star, two_way_hub, zoo

SQUARE = [*(graph for graph in zoo() if graph.num_src == graph.num_dst), two_way_hub(500), random(900, 900, 4000)]


def order_of(graph, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    return node_order(graph.edge_index, graph.num_src, method)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def communities(num_nodes=2000, size=50, inside=8, outside=1):
    """Random edges, most of them inside of communities whose members have random ids."""
    member = torch.randperm(num_nodes, generator=generator())
    place = inverse_of(member)
    source = torch.randint(num_nodes, (num_nodes * inside,), generator=generator(1))
    near = torch.randint(size, source.shape, generator=generator(2))
    pairs = [torch.stack([source, member[place[source] // size * size + near]])]
    pairs.append(torch.randint(num_nodes, (2, num_nodes * outside), generator=generator(3)))
    return torch.cat(pairs, dim=1), num_nodes


def grid(side=40):
    """A square lattice whose nodes have random ids."""
    node = torch.randperm(side * side, generator=generator()).view(side, side)
    right = torch.stack([node[:, 1:].flatten(), node[:, :-1].flatten()])
    down = torch.stack([node[1:].flatten(), node[:-1].flatten()])
    return torch.cat([right, down], dim=1), side * side


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_an_order_is_a_permutation_that_depends_on_the_graph_alone(graph, method):
    order = order_of(graph, method)
    assert order.dtype == torch.int64 and order.shape == (graph.num_src,)
    assert sorted(order.tolist()) == list(range(graph.num_src))
    assert torch.equal(order[inverse_of(order)], torch.arange(graph.num_src))
    shuffled = graph.shuffled(seed=3).edge_index.int()
    assert torch.equal(node_order(shuffled, graph.num_src, method), order)


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_without_edges_keeps_its_order(method):
    for num_nodes in (0, 1, 5):
        assert order_of(edges("", [], num_nodes), method).tolist() == list(range(num_nodes))


def test_degree_puts_most_edges_first_and_ties_by_id():
    graph = edges("", [(0, 3), (1, 3), (2, 3), (3, 1), (4, 4)], 6)
    assert order_of(graph, "degree").tolist() == [3, 1, 4, 0, 2, 5]


def test_rcm_makes_edges_short():
    edge_index, num_nodes = grid()
    place = inverse_of(node_order(edge_index, num_nodes, "rcm"))
    gap = (place[edge_index[0]] - place[edge_index[1]]).abs().max()
    # A lattice of side k has bandwidth k; the random ids leave it near k * k.
    assert gap <= 2 * 40 < (edge_index[0] - edge_index[1]).abs().max()


def test_rcm_of_a_path_is_the_path():
    node = torch.randperm(60, generator=generator())
    order = node_order(torch.stack([node[1:], node[:-1]]), 60, "rcm")
    assert order.tolist() in (node.tolist(), node.flip(0).tolist())


def test_communities_are_contiguous_and_isolated_nodes_last():
    """Cliques of three to nine nodes with random ids, and a few nodes without edges."""
    sizes = torch.arange(3, 10)
    clique = torch.repeat_interleave(sizes)[torch.randperm(int(sizes.sum()), generator=generator())]
    clique = torch.cat([torch.tensor([-1, -1]), clique, torch.tensor([-1])])
    same = (clique[:, None] == clique) & (clique >= 0)
    order = node_order(same.nonzero().t(), len(clique), "community")
    in_order = clique[order]
    assert in_order[-3:].tolist() == [-1, -1, -1]
    assert len(in_order.unique_consecutive()) == len(sizes) + 1


def test_communities_are_nested():
    """Two triangles joined by an edge lie beside each other, and their nodes are hardly ever mixed."""
    pairs, count = [], 12
    for pair in range(count):
        first, second = 6 * pair, 6 * pair + 3
        for triangle in (first, second):
            pairs += [(triangle, triangle + 1), (triangle + 1, triangle + 2), (triangle + 2, triangle)]
        pairs.append((first, second))
    label = torch.randperm(6 * count, generator=generator())
    order = node_order(label[torch.tensor(pairs).t()], 6 * count, "community")
    original = inverse_of(label)[order]
    assert len((original // 6).unique_consecutive()) == count
    assert len((original // 3).unique_consecutive()) <= 2.5 * count


@pytest.mark.parametrize("inward", [True, False])
def test_communities_of_a_large_star_take_few_levels(inward, monkeypatch):
    """The number of levels is logarithmic in the nodes, where one merge at a time would take 20,000."""
    levels, draw = [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *size, **options: levels.append(size) or draw(*size, **options))
    graph = star(20_000, inward)
    assert sorted(order_of(graph, "community").tolist()) == list(range(graph.num_src))
    path = torch.stack([torch.arange(20_000), torch.arange(1, 20_001)])
    node_order(path, 20_001, "community")
    assert len(levels) < 200


def test_metis_keeps_parts_together():
    pytest.importorskip("pymetis")
    member = torch.randperm(2 * PART_NODES, generator=generator())
    part = member.view(2, -1)
    source = torch.arange(2 * PART_NODES).repeat(10)
    near = torch.randint(PART_NODES, source.shape, generator=generator(1))
    order = node_order(torch.stack([member[source], part[source // PART_NODES, near]]), 2 * PART_NODES, "metis")
    assert {frozenset(half.tolist()) for half in order.view(2, -1)} == {frozenset(half.tolist()) for half in part}


@pytest.mark.parametrize("method", ["rcm", "community", "metis"])
@pytest.mark.parametrize("make", [communities, grid])
def test_fewer_gathers_miss_in_the_new_order(make, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    edge_index, num_nodes = make()
    place = inverse_of(node_order(edge_index, num_nodes, method))
    # RCM keeps neighbours within three levels of the lattice, of up to 40 nodes each, wherever they start.
    has_levels = method == "rcm" and make is grid
    cache_rows, most = (150, 0.6) if has_levels else (100, 0.8)
    before, after = (
        gather_misses(Graph.of(index, num_nodes).csr.col, cache_rows) for index in (edge_index, place[edge_index])
    )
    assert after < most * before


def misses_of_lru(col, cache_rows):
    """The share that a cache of the most recently used rows misses, row by row."""
    cache, misses = OrderedDict(), 0
    for row in col.tolist():
        misses += row not in cache
        cache[row] = True
        cache.move_to_end(row)
        if len(cache) > cache_rows:
            cache.popitem(last=False)
    return misses / len(col)


STREAMS = {
    "uniform": torch.randint(500, (5000,), generator=generator()),
    "skewed": (500 * torch.rand(5000, generator=generator()) ** 3).long(),
    "local": torch.arange(5000) // 20 + torch.randint(50, (5000,), generator=generator()),
    "cycle": torch.arange(5000) % 300,
    "one row": torch.zeros(100, dtype=torch.int32),
    "each row once": torch.arange(100, dtype=torch.int32).flip(0),
    "hub": hub(3000).edge_index[0],
}


@pytest.mark.parametrize("cache_rows", [1, 7, 100, 299, 300, 1000])
@pytest.mark.parametrize("stream", STREAMS)
def test_misses_are_those_of_a_cache(stream, cache_rows):
    col = STREAMS[stream]
    assert gather_misses(col, cache_rows) == pytest.approx(misses_of_lru(col, cache_rows), abs=0.01)


def test_misses_fall_with_the_cache_to_one_per_row():
    misses = [gather_misses(STREAMS["skewed"], rows) for rows in (1, 3, 10, 30, 100, 300, 1000)]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == STREAMS["skewed"].unique().numel() / 5000
    assert gather_misses(torch.empty(0, dtype=torch.int32), 1) == 0.0


def test_refused():
    edge_index = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"'method' needs one of 'degree', 'rcm', 'community', 'metis' \(got 'rcn'\)"):
        node_order(edge_index, 3, "rcn")
    with pytest.raises(ValueError, match=r"'edge_index' needs target ids in \[0, num_dst=2\) \(got 1 to 2\)"):
        node_order(edge_index, 2, "degree")
    with pytest.raises(TypeError, match="'edge_index' needs dtype"):
        node_order(edge_index.float(), 3, "degree")
    with pytest.raises(ValueError, match=r"'num_src' needs a value in .* \(got -1\)"):
        node_order(edge_index, -1, "degree")
    with pytest.raises(ValueError, match=r"'cache_rows' needs a value >= 1 \(got 0\)"):
        gather_misses(edge_index[0], 0)


@pytest.mark.parametrize(
    ("method", "module", "package"), [("rcm", "scipy.sparse.csgraph", "scipy"), ("metis", "pymetis", "pymetis")]
)
def test_a_missing_package_is_named(method, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"orders of nodes by '{method}' need {package}: pip install .\.\[reorder\]."
    for call in (check_method, lambda method: node_order(torch.tensor([[0], [1]]), 2, method)):
        with pytest.raises(ModuleNotFoundError, match=message):
            call(method)
