"""Copies of a graph share it, pickles give the same results, and both leave out what is derived."""

import copy
import io
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data

import pyg_dfgnn
from pyg_dfgnn.graph import Graph, RefilledGraph, StaticGroups
from pyg_dfgnn.ops.graph import refill
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import random
from tests.kernels.emulated import emulated_device

NODES = 20


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved,
}


def batch():
    graphs = [Data(edge_index=random(n, n, 3 * n).edge_index, num_nodes=n) for n in (3, 7, 5)]
    return Graph.of(Batch.from_data_list(graphs))


def edges():
    return random(NODES, NODES, 90).edge_index


def typed():
    return Graph.of(edges(), NODES, edge_type=torch.arange(90) % 3, num_relations=4)


GRAPHS = {
    "edges": lambda: Graph.of(edges(), NODES),
    "loops": lambda: Graph.of(edges(), NODES, self_loops=True),
    "bipartite": lambda: Graph.of(random(7, 20, 40).edge_index, 7, 20),
    "flow": lambda: Graph.of(edges(), NODES, flow="target_to_source"),
    "matrix": lambda: Graph.of(torch.eye(NODES).to_sparse_csr(), NODES),
    "pieces": lambda: Graph.of_pieces([edges()], 90, NODES, self_loops=True),
    "typed": typed,
    "index": lambda: Graph.of_index(torch.tensor([2, 0, 2]), 3),
    "ptr": lambda: Graph.of_ptr(torch.tensor([0, 2, 2, 5])),
    "batch": batch,
    "batch_loops": lambda: batch().looped_twin(),
}


def lists(graph):
    """All that a graph says of its edges; None for what it has not."""
    ours = (*graph.csr.arrays, *graph.csc.arrays, graph.edge_index, graph.kept, graph.relation)
    return [None if each is None else each.tolist() for each in ours]


def numbers(graph):
    sizes = graph.num_src, graph.num_dst, graph.num_edges, graph.num_relations
    return *sizes, graph.self_loops, graph.has_loops, graph.device, graph.csr.max_degree


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_copy_says_the_same(kind, way, is_used):
    graph = GRAPHS[kind]()
    if is_used:
        lists(graph)
        graph.derived("own", lambda: lambda: "cannot be pickled")
    other = WAYS[way](graph)
    assert other is graph or not is_used or other.get("own") is None
    assert lists(other) == lists(graph) and numbers(other) == numbers(graph)
    assert Graph.resolve(*other.key) is other
    assert lists(other.looped_twin())[:6] == lists(graph.looped_twin())[:6]


def test_a_deep_copy_shares_the_graph_and_a_pickle_does_not():
    graph = GRAPHS["edges"]()
    assert copy.deepcopy([graph])[0] is graph
    loaded = pickle.loads(pickle.dumps(graph))
    assert loaded is not graph and loaded.csr.col.data_ptr() != graph.csr.col.data_ptr()


def test_a_worker_sends_a_graph():
    graph = GRAPHS["loops"]()
    (sent,) = DataLoader([graph], batch_size=None, num_workers=1)
    assert sent is not graph and lists(sent) == lists(graph)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_batches_are_put_into_is_not_copied(way):
    room, sizes = torch.zeros(2, 100, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    refilled = RefilledGraph(room, sizes, 20, False, False, refill)
    for graph in (refilled, StaticGroups(torch.tensor([0, 0, 1]), 2)):
        with pytest.raises(
            TypeError, match=f"'graph' needs edges that stay as they are .*got a {type(graph).__name__}"
        ):
            WAYS[way](graph)


class Net(torch.nn.Module):
    def __init__(self, kind, graph):
        super().__init__()
        self.conv, self.graph = kind(4, 2), graph

    def forward(self, x):
        return self.conv(x, self.graph)


def results(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", [pyg.GCNConv, pyg.GATConv, pyg.SAGEConv])
def test_a_model_with_a_graph(kind, is_used):
    x = torch.randn(NODES, 4)
    model = pyg_dfgnn.accelerate(Net(kind, GRAPHS["edges"]()))
    with emulated_device() as launches:
        expected = results(model, x) if is_used else None
        twins = {way: make(model) for way, make in WAYS.items()}
        twins["average"] = torch.optim.swa_utils.AveragedModel(model).module
        expected = results(model, x) if expected is None else expected
        for twin in twins.values():
            launches.clear()
            for got, want in zip(results(twin, x), expected, strict=True):
                torch.testing.assert_close(got, want, **elementwise("float32/one_formula"))
            assert launches
        assert pyg_dfgnn.describe_plan(model, x).layers["conv"].plan


def test_a_typed_graph_in_a_model():
    x, graph = torch.randn(NODES, 4), typed()
    conv = pyg_dfgnn.nn.RGCNConv(4, 2, 4)
    want = conv(x, graph)
    for way in WAYS.values():
        torch.testing.assert_close(conv(x, way(graph)), want)
