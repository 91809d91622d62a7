"""Several threads call one layer, each with edges and types of its own, and get PyG's results."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.equal_edges import MOST_GRAPHS, graph_of
from pyg_dfgnn.ir import IndexSpace
from pyg_dfgnn.reference.tolerances import elementwise

NODES, TYPES, WIDTH, THREADS, ROUNDS = 9, 3, 4, 4, 12
KEYS = [f"t{i}" for i in range(12)]
METADATA = ["u", "v"], [("u", "to", "v"), ("v", "to", "u")]


class Own(pyg.MessagePassing):
    """A layer whose messages are compiled, and whose forward makes its edges."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        loops = torch.arange(x.size(0)).repeat(2, 1)
        return self.propagate(torch.cat([edge_index, loops], 1), x=self.lin(x))

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)


def edges(generator, count=20, num_src=NODES):
    return torch.stack([torch.randint(num_src, (count,), generator=generator) for _ in range(2)])


def types(generator, count, number=TYPES):
    return torch.randint(number, (count,), generator=generator)


def rows(generator, count=NODES):
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


LAYERS = {
    "HeteroLinear": (lambda p: p.HeteroLinear(WIDTH, 5, TYPES), lambda g: (rows(g), types(g, NODES))),
    "HeteroDictLinear": (
        lambda p: p.HeteroDictLinear(WIDTH, 5, KEYS),
        lambda g: ({key: rows(g, 1 + int(types(g, 1, 20))) for key in KEYS},),
    ),
    "HEATConv": (
        lambda p: p.HEATConv(WIDTH, 4, TYPES, 2, 3, 3, 4, heads=2),
        lambda g: (rows(g), edges(g), types(g, NODES), types(g, 20, 2), torch.randn(20, 3, generator=g).double()),
    ),
    "RGCNConv": (lambda p: p.RGCNConv(WIDTH, 4, TYPES), lambda g: (rows(g), edges(g), types(g, 20))),
    "HGTConv": (
        lambda p: p.HGTConv(WIDTH, 4, METADATA, 2),
        lambda g: ({k: rows(g) for k in METADATA[0]}, {k: edges(g) for k in METADATA[1]}),
    ),
    "GATConv": (lambda p: p.GATConv(WIDTH, 4, heads=2), lambda g: (rows(g), edges(g))),
    "SAGEConv": (lambda p: p.SAGEConv(WIDTH, 4, aggr="sum"), lambda g: (rows(g), edges(g))),
    "own": (lambda p: Own() if p is pyg else pyg_dfgnn.accelerate(Own()), lambda g: (rows(g), edges(g))),
}


def results(layer, arguments):
    """Outputs and the gradients of parameters."""
    out = layer(*arguments)
    parts = list(out.values()) if isinstance(out, dict) else [out]
    parameters = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad(sum(part.sin().sum() for part in parts), parameters, allow_unused=True)
    return [*(part.detach() for part in parts), *(grad for grad in grads if grad is not None)]


@pytest.fixture
def switching():
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work):
    start = Barrier(THREADS)

    def run(number):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(run, range(THREADS)))


@pytest.mark.parametrize("clears", [False, True], ids=["", "another-clears-the-cache"])
@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_in_several_threads(name, clears, fused_on_cpu, in_float64, switching):
    make, draw = LAYERS[name]
    torch.manual_seed(0)
    layer, plain = make(ours if name != "own" else None), make(pyg)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    plain.load_state_dict(layer.state_dict())

    done = []

    def work(number):
        generator, pairs = torch.Generator().manual_seed(number), []
        if clears and number == 0:
            while len(done) < THREADS - 1:
                Graph.clear_cache()
            return pairs
        try:
            for _ in range(ROUNDS):
                arguments = draw(generator)
                pairs.append((arguments, results(layer, arguments)))
        finally:
            done.append(number)
        return pairs

    for arguments, got in (pair for pairs in in_threads(work) for pair in pairs):
        for left, right in zip(got, results(plain, arguments), strict=True):
            torch.testing.assert_close(left, right, **elementwise("float64/programs"))


@pytest.mark.parametrize("name", ["HeteroLinear", "HeteroDictLinear", "HEATConv"])
def test_nothing_needs_the_cache(name, fused_on_cpu, in_float64, monkeypatch):
    """A graph that no cache keeps lives as long as the call, and as its backward pass."""
    make, draw = LAYERS[name]
    layer, arguments = make(ours), draw(torch.Generator().manual_seed(0))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    want = results(layer, arguments)
    monkeypatch.setattr("pyg_dfgnn.graph.graph.keep", lambda *_: None)
    Graph.clear_cache()
    with torch.inference_mode():
        inside = layer(*copy.deepcopy(arguments))
    inside = list(inside.values()) if isinstance(inside, dict) else [inside]
    for left, right in zip([*inside, *results(layer, arguments)], [*want[: len(inside)], *want], strict=True):
        torch.testing.assert_close(left, right)


def test_edges_that_a_forward_makes_in_several_threads(switching):
    """All threads make room for graphs of other sizes at once."""
    seen = {}

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for count in range(4 * MOST_GRAPHS, 80):
            edge_index = edges(generator, count + number)
            assert graph_of(seen, edge_index, NODES, NODES, False).num_edges == count + number

    in_threads(work)


def test_an_edited_list_of_edges_in_several_threads(switching):
    graph = Graph.of_pieces([edges(torch.Generator().manual_seed(0))], 20, NODES)
    want = graph.edge_index.clone()

    def work(number):
        for _ in range(100):
            graph.edge_index.zero_()
            assert graph.edge_index.shape == want.shape

    in_threads(work)
    graph._derived["edge_index"].zero_()
    assert torch.equal(graph.edge_index, want)


def test_one_graph_with_types_of_each_thread(switching):
    graph = Graph.of(edges(torch.Generator().manual_seed(0)), NODES)

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(50):
            source_type = types(generator, NODES)
            lists = IndexSpace(graph, source_type=source_type, num_types=TYPES, kept=True).lists
            assert torch.equal(*lists.types.values(), source_type)

    in_threads(work)
