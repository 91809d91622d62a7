"""What people try first with a graph: its class, data of PyG, and moves between devices."""

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

import pyg_dfgnn.nn as ours
from pyg_dfgnn import Graph
from pyg_dfgnn.graph import StaticGroups
from pyg_dfgnn.graph import graph as graph_module
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import random
from tests.graph.brute import check_graph, members, with_loops

NODES = 12
EDGES = random(NODES, NODES, 40).edge_index
X = torch.randn(NODES, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((EDGES,), {}), ((EDGES, NODES), {}), ((Data(edge_index=EDGES),), {}), ((), {}), ((EDGES,), {"num_nodes": 3})],
)
def test_the_class_says_how_to_make_one(args, kwargs):
    with pytest.raises(TypeError, match=r"'Graph' needs to be made by Graph.of\(edge_index, num_nodes\)"):
        Graph(*args, **kwargs)


def same(graph, other):
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (other.num_src, other.num_dst, other.num_edges)
    return torch.equal(graph.edge_index, other.edge_index)


FORMS = {
    "Data": lambda: Data(x=X, edge_index=EDGES),
    "Data without features": lambda: Data(edge_index=EDGES, num_nodes=NODES),
    "Data with an EdgeIndex": lambda: Data(x=X, edge_index=EdgeIndex(EDGES, sparse_size=(NODES, NODES))),
    "EdgeIndex": lambda: EdgeIndex(EDGES, sparse_size=(NODES, NODES)),
}


@pytest.mark.parametrize("form", FORMS)
def test_edges_that_tell_their_sizes(form):
    want = Graph.of(EDGES, NODES, self_loops=True)
    assert same(Graph.of(FORMS[form](), self_loops=True), want)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_edges_between_two_node_sets(flow):
    edge_index = EdgeIndex(torch.tensor([[0, 1, 2], [4, 0, 4]]), sparse_size=(3, 5))
    graph = Graph.of(edge_index, flow=flow)
    assert (graph.num_src, graph.num_dst) == ((3, 5) if flow == "source_to_target" else (5, 3))
    matrix = torch.eye(5, 3).to_sparse_csr()
    assert (Graph.of(matrix).num_src, Graph.of(matrix).num_dst) == (3, 5)
    adj_t = Data(x=torch.randn(4, 2), adj_t=torch.eye(4).to_sparse_csr())
    assert Graph.of(adj_t).num_src == 4


def test_data_and_its_batch_share_the_cache_with_their_edges():
    data = Data(x=X, edge_index=EDGES)
    assert Graph.of(data) is Graph.of(data.edge_index, NODES)
    batch = Batch.from_data_list([data, data])
    assert Graph.of(batch) is Graph.of(batch.edge_index, 2 * NODES)
    typed = Graph.of(data, edge_type=torch.zeros(EDGES.size(1), dtype=torch.long), num_relations=1)
    assert typed.num_relations == 1 and Graph.of(data, 20, 30).num_dst == 30


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (EDGES, r"'num_src' needs the number of nodes, .* \(got None\)"),
        (EdgeIndex(EDGES), r"'num_src' needs the number of nodes"),
        (HeteroData({"a": {"x": X}}), r"'edge_index' needs data with one edge type, .* \(got HeteroData\)"),
        (Data(x=X), r"'edge_index' needs data with an 'edge_index' or 'adj_t' \(got Data\(x=\[12, 3\]\)\)"),
        (None, r"'num_src' needs the number of nodes"),
    ],
)
def test_edges_that_do_not(edges, message):
    with pytest.raises(TypeError, match=message):
        Graph.of(edges)


def graphs():
    members = [Data(edge_index=random(n, n, 3 * n).edge_index, num_nodes=n) for n in (3, 7, 5)]
    batch = Batch.from_data_list(members)
    by_source = Graph.of(EDGES.clone(), NODES)
    by_source.csc  # noqa: B018
    return {
        "plain": Graph.of(EDGES, NODES),
        "by source": by_source,
        "loops": Graph.of(EDGES, NODES, self_loops=True),
        "relations": Graph.of(EDGES, NODES, edge_type=torch.arange(40) % 3, num_relations=3),
        "batch": Graph.of(batch),
        "groups": Graph.of_index(torch.arange(9) // 3, 3),
    }


@pytest.mark.parametrize("name", graphs())
def test_moves(name):
    graph = graphs()[name]
    assert graph.to("cpu") is graph.to(torch.device("cpu")) is graph.cpu() is graph
    moved = graph.to("meta", non_blocking=True)
    assert moved.device.type == "meta" and moved.csr.rowptr.shape == graph.csr.rowptr.shape
    assert moved.csc.col.device.type == "meta" if name == "by source" else True
    assert (moved.num_src, moved.num_relations, moved.self_loops) == (
        graph.num_src,
        graph.num_relations,
        graph.self_loops,
    )


def test_data_moves_the_graphs_in_it():
    data = Data(x=X, edge_index=EDGES)
    data.graph, data.several = Graph.of(data), {"looped": Graph.of(data, self_loops=True)}
    same_place, moved = data.clone().to("cpu"), data.clone().to("meta")
    assert same_place.graph is data.graph
    assert moved.graph.device.type == moved.several["looped"].device.type == moved.x.device.type == "meta"
    assert data.graph.device.type == "cpu"


def test_a_graph_that_batches_are_put_into_stays():
    groups = StaticGroups(torch.arange(9) // 3, 3)
    with pytest.raises(TypeError, match=r"'graph' needs edges that stay as they are to be moved \(got a StaticGroups"):
        groups.to("meta")


@pytest.mark.cuda
@pytest.mark.parametrize("name", graphs())
def test_moves_to_a_gpu(name):
    graph = graphs()[name]
    x, want = torch.randn(graph.num_src, 4), None
    for move in ("cuda", "cuda:0", torch.device("cuda"), 0):
        moved = graph.to(move)
        assert moved.device == torch.device("cuda", 0) and moved.to(move) is moved and moved.cuda() is moved
        assert torch.equal(moved.edge_index.cpu(), graph.edge_index) and same(moved.cpu(), graph)
    pinned = graph.pin_memory()
    assert pinned.csr.col.is_pinned() and same(pinned.cuda(non_blocking=True).cpu(), graph)
    if name in ("plain", "by source", "batch"):
        conv = ours.SAGEConv(4, 2)
        want = conv(x, graph)
        torch.testing.assert_close(conv.cuda()(x.cuda(), moved).cpu(), want, **elementwise("float32"))


@pytest.mark.cuda
def test_data_on_a_gpu_runs_on_its_graph():
    data = Data(x=X, edge_index=EDGES)
    data.graph = Graph.of(data)
    conv = ours.GATConv(3, 4)
    want = conv(data.x, data.graph)
    for moved in (
        data.clone().to("cuda"),
        data.clone().cuda(),
        data.clone().pin_memory().to("cuda", non_blocking=True),
    ):
        assert moved.graph.device.type == "cuda"
        torch.testing.assert_close(conv.cuda()(moved.x, moved.graph).cpu(), want, **elementwise("float32"))


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_batch(self_loops):
    batch = Batch.from_data_list(members())
    graph = Graph.of(batch, self_loops=self_loops)
    want = with_loops(batch.edge_index, batch.num_nodes, batch.num_nodes) if self_loops else batch.edge_index
    check_graph(graph, want, batch.num_nodes, batch.num_nodes)
    # Convs only see batch.edge_index.
    assert Graph.of(batch.edge_index, batch.num_nodes, self_loops=self_loops) is graph


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
