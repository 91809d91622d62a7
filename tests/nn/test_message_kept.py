"""What a forward computes from its edges alone: computed once while these live unedited, and PyG's numbers always."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, dropout_edge

from pyg_dfgnn import accelerate, restore
from pyg_dfgnn.frontend.derived import EdgeDerived
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from tests.nn.message_cases import twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")
FEATURES = 4
X = torch.randn(6, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Tutorial(MessagePassing):
    """The GCN of PyG's tutorial, scaled by a sum over as many nodes as the edges have."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(FEATURES, 3)

    def forward(self, x, edge_index):
        scale = degree(edge_index[1]).square().mean()
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg_inv_sqrt = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=self.lin(x), norm=norm) * scale

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Weighted(MessagePassing):
    """Sums with the weights that `of_edges` makes, which `edit` may change, and returns what that gave."""

    def __init__(self, of_edges=gcn_norm, edit=None):
        super().__init__(aggr="add")
        self.of_edges, self.edit = of_edges, edit

    def forward(self, x, edge_index, edge_weight=None, **options):
        edges, weight = self.of_edges(edge_index, edge_weight, x.size(0), **options)
        if self.edit is not None:
            self.edit(weight)
        return self.propagate(edges, x=x, weight=weight), edges, weight

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


ARMA = partial(pyg.ARMAConv, FEATURES, 3, num_stacks=2, num_layers=2)


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """One for each time that something was computed from edges alone to be kept."""
    messages.clear()
    torch._dynamo.reset()
    calls, compute = [], EdgeDerived._made
    monkeypatch.setattr(EdgeDerived, "_made", lambda self, args: calls.append(1) or compute(self, args))
    with messages.interpreted():
        yield calls


@pytest.fixture
def edge_index():
    return torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(1))


def run(layer, edge_index):
    """The outputs of a call and the gradients of the features and the parameters."""
    x = X.clone().requires_grad_()
    out = layer(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def assert_same(layers, *args, **kwargs):
    torch.testing.assert_close(*(layer(*args, **kwargs) for layer in reversed(layers)))


@pytest.mark.parametrize("make", [ARMA, partial(pyg.EGConv, 4, 4, ["symnorm", "max"], num_heads=2), Tutorial])
def test_what_is_of_edges_is_computed_once_and_after_each_edit(make, edge_index, computed, monkeypatch):
    built, resolve = [], Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    (plain, layer), counts = twins(make), []
    with watched() as graphs:
        for call in range(6):
            torch.testing.assert_close(run(layer, edge_index), run(plain, edge_index))
            counts.append((len(computed), len(built)))
            if call >= 3:
                edge_index[call % 2, call] = (edge_index[call % 2, call] + 1) % 6
    assert graphs.is_fused and counts == [(1, 1)] * 4 + [(2, 2), (3, 3)]


@pytest.mark.parametrize("edit", [lambda weight: weight.mul_(2), lambda weight: weight.view(-1, 1)[1:].zero_()])
def test_an_edit_of_a_result_is_not_kept(edit, edge_index):
    layers = plain, layer = twins(lambda: Weighted(edit=edit))
    for _ in range(3):
        assert_same(layers, X, edge_index)
    layer.edit = plain.edit = None
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            first = layer(X, edge_index)
            torch.testing.assert_close(first, plain(X, edge_index))
            edit(first[2]), first[1].zero_()
            assert_same(layers, X, edge_index)
    layer(X, edge_index)[2].requires_grad_()
    assert not layer(X, edge_index)[2].requires_grad


def test_other_arguments_make_other_edges(edge_index):
    layers, weight = twins(Weighted), torch.rand(9)
    options = {"improved": True}, {"add_self_loops": False}, {"dtype": torch.float32}, {"flow": "target_to_source"}
    for _ in range(2):
        for args in ((X, edge_index), (X[:5].repeat(2, 1), edge_index), (X, edge_index, weight)):
            assert_same(layers, *args)
        for each in options:
            assert_same(layers, X, edge_index, **each)
        weight[2] += 1
    torch.set_default_dtype(torch.float32)
    assert_same(layers, X, edge_index)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_loops_are_found_once_for_learnt_weights(flow, edge_index, computed):
    """Norms of the weights have both derivatives of PyG's."""
    # Two self-loops of one node: PyG takes the weight of one, and gives both its gradient. Node 5 has no others.
    edge_index = edge_index.clamp(max=4)
    edge_index[1, :3] = edge_index[0, :3] = torch.tensor([2, 5, 2])
    plain, layer = twins(Weighted)
    for loops in (True, True, True, False):
        weight, found = torch.rand(9, requires_grad=True), []
        for each in (layer, plain):
            out, made, norm = each(X, edge_index, weight, add_self_loops=loops, flow=flow)
            (first,) = torch.autograd.grad(norm.square().sum() + out.sin().sum(), weight, create_graph=True)
            found.append((out, made, norm, first, torch.autograd.grad(first.square().sum(), weight)[0]))
        torch.testing.assert_close(*found)
    assert len(computed) == 1


def test_wrong_arguments_raise_what_pyg_raises_and_spoil_nothing(edge_index):
    layer = accelerate(Weighted())
    with watched() as graphs:
        for learnt in (True, False):
            with pytest.raises(IndexError, match="mask"):
                layer(X, edge_index, torch.rand(8, requires_grad=learnt))
        graphs.clear()
        layer(X, edge_index, torch.rand(9))
    assert graphs.is_fused and graphs[0].derived


def test_inference_mode(edge_index, computed):
    """Edges from outside of it are kept, also for calls outside; its own have no version."""
    plain, layer = layers = twins(Tutorial)
    with torch.inference_mode():
        own = edge_index.clone()
        for _ in range(3):
            assert_same(layers, X, edge_index)
            assert_same(layers, X, own)
            own[0, 4] = (own[0, 4] + 1) % 6
    assert len(computed) == 1
    torch.testing.assert_close(run(layer, edge_index), run(plain, edge_index))


def test_layers_of_a_class_and_copies_share_what_is_kept(edge_index, monkeypatch):
    made, own = [], EdgeDerived._made
    monkeypatch.setattr(EdgeDerived, "_made", lambda self, args: made.append(args) or own(self, args))
    layer = accelerate(Weighted())
    _, edges, weight = layer(X, edge_index)
    for twin in (accelerate(Weighted()), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(twin(X, edge_index)[1:], (edges, weight))
    assert len(made) == 1
    torch.testing.assert_close(restore(layer)(X, edge_index)[1:], (edges, weight))


def lists(edge_index, edge_weight, num_nodes):
    last = edge_index.size(1) - 1
    return edge_index[:, :last].contiguous(), (1 / degree(edge_index[0], num_nodes).clamp(min=1))[edge_index[0, :last]]


@pytest.mark.parametrize("of_edges", [gcn_norm, lists, lambda e, w, n: (e.long()[:, :8], w.view(-1, 1)[:8].double())])
def test_what_is_kept_dies_with_the_edges(of_edges):
    layers, edge_index, weight = twins(lambda: Weighted(of_edges)), torch.randint(6, (2, 9)), torch.rand(9)
    assert_same(layers, X, edge_index, weight)
    alive = [edge_index, weight, *layers[1](X, edge_index, weight)[1:]]
    alive = [weakref.ref(alive.pop(0)) for _ in range(4)]
    del edge_index, weight
    gc.collect()
    assert all(reference() is None for reference in alive)


def edited(edge_index, edge_weight, num_nodes):
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 6
    edge_weight *= 2
    return add_self_loops(edge_index, edge_weight)


EACH_TIME = [
    edited,
    lambda e, w, n: (dropout_edge(e, 0.3)[0], torch.ones(1)),
    lambda e, w, n: (e, torch.empty(e.size(1)).exponential_()),
    lambda e, w, n: (e, torch.zeros_like(e[0]).double().geometric_(0.5)),
    lambda e, w, n: (e, torch.binomial(degree(e[0], n)[e[0]], torch.rand(e.size(1)))),
]


@pytest.mark.parametrize("of_edges", EACH_TIME)
def test_what_edits_or_draws_does_so_in_each_call(of_edges, edge_index):
    results = []
    for layer in twins(lambda: Weighted(of_edges)):
        torch.manual_seed(0)
        edges, weight = edge_index.clone(), torch.rand(9)
        results.append([(*map(torch.clone, layer(X, edges, weight)), edges.clone(), weight.clone()) for _ in range(3)])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore")
def test_scripts_traces_compiled_models_modes_and_transforms_compute_all(edge_index, computed):
    plain, layer = twins(lambda: pyg.MixHopConv(FEATURES, 3))
    traced = torch.jit.trace(layer, (X, edge_index), check_trace=False)
    others = [traced, torch.jit.script(layer), torch.compile(layer, backend="eager")]
    others.append(lambda x, edges: torch.func.vmap(lambda v: layer(v, edges))(x[None])[0])
    for edges in (torch.randint(6, (2, 7)), edge_index, torch.randint(6, (2, 9))):
        with FlopCounterMode(display=False):
            torch.testing.assert_close(layer(X, edges), plain(X, edges))
        torch.testing.assert_close([each(X, edges) for each in others], [plain(X, edges)] * 4)
        assert not computed
    torch.testing.assert_close(layer(X, edges), plain(X, edges))
    assert len(computed) == 1


def test_threads():
    plain, layer = twins(Weighted)
    edges = [torch.randint(6, (2, 9)) for _ in range(6)]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda turn: layer(X, edges[turn % 6]), range(120))
    torch.testing.assert_close(list(results), [plain(X, edge_index) for edge_index in edges] * 20)
