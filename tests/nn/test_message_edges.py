"""The graph of compiled messages whose edges the caller keeps, or the forward makes."""

import gc
import weakref

import pytest
import torch
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import accelerate, local_settings
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.messages import call as calls
from pyg_dfgnn.ops.relational import traced
from tests.kernels.emulated import emulated_device


def with_loops(edge_index, num_nodes):
    """A user's own function of edges, whose results are not kept."""
    return torch.cat([edge_index, torch.arange(num_nodes).expand(2, -1)], dim=1)


class Looped(MessagePassing):
    """Adds self-loops in each forward."""

    def __init__(self):
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        return self.propagate(with_loops(edge_index, x.size(0)), x=x)

    def message(self, x_j):
        return x_j.relu()


class Summed(Looped):
    """Takes the edges as they are."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Halved(Summed):
    """Joins half of the rows of both ends for a softmax, which lanes do not hold."""

    def message(self, x_i, x_j):
        return torch.cat([x_i[:, 2:], x_j[:, :2]], dim=-1).softmax(dim=-1)


@pytest.mark.parametrize("bad", [-1, 6])
@pytest.mark.parametrize("row", [0, 1])
def test_ids_that_are_out_of_range_raise_an_index_error(row, bad):
    edge_index = torch.randint(6, (2, 9))
    edge_index[row, 4] = bad
    plain, layer = Summed(), accelerate(Summed())
    with messages.interpreted():
        with pytest.raises(IndexError, match="valid indices"):
            layer(torch.randn(6, 3), edge_index)
    if row == 0:
        with pytest.raises(IndexError, match="valid indices"):
            plain(torch.randn(6, 3), edge_index)


def test_edges_that_a_forward_makes_are_known_by_what_they_are(monkeypatch):
    built = []
    resolve = Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    plain, layer = Looped(), accelerate(Looped())
    x = torch.randn(6, 3)
    edges = [torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    counts = []
    with messages.interpreted():
        for edge_index in (edges[0], edges[0], edges[0], edges[0], edges[1], edges[0], edges[0][:, :5]):
            torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
            counts.append(len(built))
    # Edges of the same sizes are kept from the second call on, until others of these sizes come.
    assert counts == [1, 2, 2, 2, 3, 4, 5]
    number = id(layer)
    assert number in calls._seen._kept
    del layer
    gc.collect()
    assert number not in calls._seen._kept


class Twice(Looped):
    """Adds self-loops once and passes messages twice."""

    def forward(self, x, edge_index):
        edge_index = with_loops(edge_index, x.size(0))
        return self.propagate(edge_index, x=self.propagate(edge_index, x=x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_edges_are_compared_once_per_forward(mode, monkeypatch):
    compared, built = [], []
    equal, resolve = torch.equal, Graph.resolve
    monkeypatch.setattr(torch, "equal", lambda *tensors: compared.append(1) or equal(*tensors))
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    plain, layer, x, edge_index = Twice(), accelerate(Twice()), torch.randn(6, 3), torch.randint(6, (2, 9))
    with messages.interpreted(), mode():
        for call in range(4):
            torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
            if call == 2:
                compared.clear(), built.clear()
    # Tensors of inference mode have no version that tells whether they are as they were.
    assert (len(compared), len(built)) == ((1, 0) if mode is torch.enable_grad else (2, 0))


@pytest.mark.filterwarnings("ignore")
def test_edges_that_a_compiled_forward_makes_are_known_by_what_they_are(monkeypatch):
    built = []
    resolve = Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    monkeypatch.setattr(traced, "_seen", {})
    plain, layer, x = Looped(), accelerate(Looped()), torch.randn(6, 3, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    first, second = torch.randint(6, (2, 9)), torch.randint(6, (2, 9))
    counts = []
    with messages.interpreted():
        for edge_index in (first, first, first, first, second):
            results = compiled(x, edge_index), plain(x, edge_index)
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*(torch.autograd.grad(result.sum(), x) for result in results))
            del results
            counts.append(len(built))
    assert counts == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("run", [messages.interpreted, emulated_device])
def test_edges_of_inference_mode(run):
    plain, layer = Summed(), accelerate(Summed())
    with run(), torch.inference_mode():
        x, edge_index = torch.randn(6, 3), torch.randint(6, (2, 9))
        for _ in range(3):
            torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
            edge_index[0, 4] = (edge_index[0, 4] + 1) % 6


@pytest.mark.parametrize("run", [messages.interpreted, emulated_device])
def test_edges_of_the_caller_are_not_kept(run):
    layer, x = accelerate(Summed()), torch.randn(6, 3)
    edge_index = torch.randint(6, (2, 9))
    edges = weakref.ref(edge_index)
    with run():
        for _ in range(3):
            layer(x, edge_index)
        layer(x, torch.randint(6, (2, 9)))
    del edge_index
    gc.collect()
    assert edges() is None


def test_what_no_kernel_runs_is_refused_without_a_graph(monkeypatch):
    layer = accelerate(Halved())
    x, edge_index = torch.randn(6, 4), torch.randint(6, (2, 9))
    with emulated_device(), local_settings(fallback="silent"):
        first = layer(x, edge_index)
        monkeypatch.setattr(calls, "graph_of", lambda *_: pytest.fail("a graph was asked for"))
        assert torch.equal(layer(x, edge_index), first)
