"""Edges that a forward makes of others by PyG's functions: made once, and anew whenever they could differ."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv import fa_conv, gcn_conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, loop, remove_self_loops

from pyg_dfgnn import accelerate, describe_plan, local_settings, restore
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.messages import kept
from pyg_dfgnn.nn.messages.spec import original

FEATURES = 4
LAYERS = {
    "OwnARMA": lambda: OwnARMA(FEATURES, 3, num_stacks=2, num_layers=2),
    "OwnClusterGCN": lambda: OwnClusterGCN(FEATURES, 3, diag_lambda=0.5),
    "EGConv": lambda: pyg.EGConv(FEATURES, 4, aggregators=["symnorm", "max"], num_heads=2),
    "EGConv-loops": lambda: pyg.EGConv(FEATURES, 4, aggregators=["sum"], num_heads=2),
    "FAConv": lambda: pyg.FAConv(FEATURES),
    "MixHopConv": lambda: pyg.MixHopConv(FEATURES, 3),
    "Tutorial": lambda: Tutorial(FEATURES, 3),
}


class OwnARMA(pyg.ARMAConv):
    """A class of the user's own, which has no drop-in."""


class OwnClusterGCN(pyg.ClusterGCNConv):
    """Another."""


class Tutorial(MessagePassing):
    """The GCN of PyG's tutorial."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Weighted(MessagePassing):
    """Sums with the weights of `gcn_norm`, which `edit` may change, and returns what the function gave."""

    def __init__(self, edit=None):
        super().__init__(aggr="add")
        self.edit = edit

    def forward(self, x, edge_index, edge_weight=None, **options):
        edges, weight = gcn_norm(edge_index, edge_weight, x.size(0), **options)
        if self.edit is not None:
            self.edit(weight)
        return self.propagate(edges, x=x, weight=weight), edges, weight

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


class Another(Weighted):
    """Another class with a forward of its own."""

    def forward(self, x, edge_index):
        edges, weight = gcn_norm(edge_index, None, x.size(0))
        return self.propagate(edges, x=x, weight=weight.mul_(2)), edges, weight


class Closed(Weighted):
    """Calls the forward of its base."""

    def forward(self, x, edge_index, *, scale=2.0):
        edges, _ = remove_self_loops(edge_index)
        loops = [add_remaining_self_loops(edges, num_nodes=n)[0] for n in (x.size(0),)][0]
        out, _, weight = super().forward(scale * x, loops)
        return out, loops, weight


count = 0


class Counting(Weighted):
    """A forward that sets a global."""

    def forward(self, x, edge_index):
        global count
        count += 1
        return super().forward(x, *add_self_loops(edge_index))


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    kept._kept.clear()
    with messages.interpreted(), local_settings(fallback="silent"):
        yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def x():
    return torch.randn(6, FEATURES)


@pytest.fixture
def edge_index():
    return torch.randint(6, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def made(monkeypatch):
    """A list that is not empty once PyG's functions have computed something: each calls one of these helpers."""
    calls = []
    for module, name in ((loop, "is_torch_sparse_tensor"), (loop, "maybe_num_nodes"), (gcn_conv, "maybe_num_nodes")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own: calls.append(args) or own(*args))
    return calls


def run(layer, x, *args):
    """The outputs of a call and the gradients of the features and the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x, *([x] if isinstance(layer, pyg.FAConv) else []), *args)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_pyg_and_make_their_edges_once(name, x, edge_index, made, monkeypatch):
    built, resolve = [], Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    equal = torch.equal
    plain = LAYERS[name]()
    layer = accelerate(copy.deepcopy(plain))
    counts = []
    for _ in range(4):
        expected = run(plain, x, edge_index)
        made.clear()
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("edges were compared"))
        result = run(layer, x, edge_index)
        monkeypatch.setattr(torch, "equal", equal)
        torch.testing.assert_close(result, expected)
        counts.append((len(made) > 0, len(built)))
    assert counts == [(True, 1)] + [(False, 1)] * 3


@pytest.mark.parametrize("name", LAYERS)
def test_an_edit_of_the_edges_is_seen(name, x, edge_index):
    plain = LAYERS[name]()
    layer = accelerate(copy.deepcopy(plain))
    for k in range(4):
        torch.testing.assert_close(run(layer, x, edge_index), run(plain, x, edge_index))
        edge_index[k % 2, k] = (edge_index[k % 2, k] + 1) % 6


@pytest.mark.parametrize("edit", [lambda weight: weight.mul_(2), lambda weight: weight.view(-1, 1)[1:].zero_()])
def test_an_edit_of_a_result_is_not_kept(edit, x, edge_index):
    plain, layer = Weighted(edit), accelerate(Weighted(edit))
    for _ in range(3):
        torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
    layer.edit = plain.edit = None
    for _ in range(2):
        first, second = layer(x, edge_index), plain(x, edge_index)
        torch.testing.assert_close(first, second)
        edit(first[2])
    torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
    layer(x, edge_index)[2].requires_grad_()
    assert not layer(x, edge_index)[2].requires_grad


def test_other_arguments_make_other_edges(x, edge_index):
    plain, layer = Weighted(), accelerate(Weighted())
    weight = torch.rand(9)
    calls = [
        ((x, edge_index), {}),
        ((torch.randn(8, FEATURES), edge_index), {}),
        ((x, edge_index, weight), {}),
        ((x, edge_index, weight + 1), {}),
        ((x, edge_index), {"improved": True}),
        ((x, edge_index), {"add_self_loops": False}),
        ((x, edge_index), {"dtype": torch.float32}),
        ((x, edge_index), {"flow": "target_to_source"}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            torch.testing.assert_close(layer(*args, **kwargs), plain(*args, **kwargs))
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))


@pytest.mark.parametrize("learnt", [True, False])
def test_self_loops_are_found_once_for_weights_that_are_new_in_each_call(learnt, x, edge_index, made):
    # Two self-loops of one node: PyG takes the weight of one, and gives both its gradient.
    edge_index[1, :3] = edge_index[0, :3] = torch.tensor([2, 5, 2])
    plain, layer = Weighted(), accelerate(Weighted())
    layer(x, edge_index, torch.rand(9, requires_grad=learnt))
    edges = set()
    for options in ({}, {"improved": True}, {"flow": "target_to_source"}, {"dtype": torch.float32}):
        weight = torch.rand(9, requires_grad=learnt)
        made.clear()
        results = layer(x, edge_index, weight, **options)
        assert not any(call[0] is edge_index for call in made)
        torch.testing.assert_close(results, plain(x, edge_index, weight, **options))
        edges.add(id(results[1]))
        if learnt:
            grads = [torch.autograd.grad(each(x, edge_index, weight)[0].sum(), weight) for each in (layer, plain)]
            torch.testing.assert_close(*grads)
    assert len(edges) == 1
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 6
    weight = torch.rand(9, requires_grad=learnt)
    torch.testing.assert_close(layer(x, edge_index, weight), plain(x, edge_index, weight))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("loops", [True, False])
def test_norms_of_learnt_weights_have_both_derivatives_of_pyg(loops, flow, x, edge_index):
    plain, layer = Weighted(), accelerate(Weighted())
    # Node 5 has no edges.
    edge_index = edge_index.clamp(max=4)
    weight = torch.rand(9, requires_grad=True)
    found = []
    for each in (layer, plain):
        norm = each(x, edge_index, weight, add_self_loops=loops, flow=flow)[2]
        (first,) = torch.autograd.grad(norm.square().sum(), weight, create_graph=True)
        found.append((norm, first, torch.autograd.grad(first.square().sum(), weight)[0]))
    torch.testing.assert_close(*found)


def test_weights_of_another_number_than_the_edges_are_refused(x, edge_index):
    layer = accelerate(Weighted())
    for size in (8, 10):
        with pytest.raises(IndexError, match="mask"):
            layer(x, edge_index, torch.rand(size, requires_grad=True))


def test_inference_mode(x, edge_index):
    """Edges from outside of it are kept, also for calls outside; its own have no version."""
    plain, layer = Tutorial(FEATURES, 3), Tutorial(FEATURES, 3)
    layer.load_state_dict(plain.state_dict())
    accelerate(layer)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
        own = edge_index.clone()
        for _ in range(3):
            torch.testing.assert_close(layer(x, own), plain(x, own))
            own[0, 4] = (own[0, 4] + 1) % 6
    assert len(kept._kept.entries) == 1
    torch.testing.assert_close(run(layer, x, edge_index), run(plain, x, edge_index))


def test_layers_of_a_class_share_what_is_kept_and_others_do_not(x, edge_index, made):
    first, second, other = accelerate(Weighted()), accelerate(Weighted()), accelerate(Another())
    _, edges, weight = first(x, edge_index)
    made.clear()
    assert second(x, edge_index)[1] is edges and second(x, edge_index)[2] is weight and not made
    torch.testing.assert_close(other(x, edge_index)[2], 2 * weight)
    assert first(x, edge_index)[2] is weight and weight._version == 0


def test_what_is_kept_dies_with_the_edges(x):
    edge_index = torch.randint(6, (2, 9))
    for name in ("OwnARMA", "OwnClusterGCN", "MixHopConv"):
        accelerate(LAYERS[name]())(x, edge_index)
    assert len(kept._kept.entries) == 4
    edges = weakref.ref(edge_index)
    del edge_index
    gc.collect()
    assert edges() is None and not kept._kept.entries


def test_few_are_kept(x):
    layer = accelerate(Tutorial(FEATURES, 3))
    edges = [torch.randint(6, (2, 9)) for _ in range(2 * kept.MOST_KEPT)]
    for edge_index in edges:
        layer(x, edge_index)
    assert len(kept._kept.entries) == kept.MOST_KEPT


def test_copies_keep_too_and_restored_layers_do_not(x, edge_index):
    layer = accelerate(Weighted())
    _, edges, _ = layer(x, edge_index)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin(x, edge_index)[1] is edges
    with local_settings(compile_messages=False):
        assert layer(x, edge_index)[1] is not edges
    assert layer(x, edge_index)[1] is edges
    restore(layer)
    assert layer(x, edge_index)[1] is not edges and Weighted()(x, edge_index)[1] is not edges


def test_subclasses_closures_and_chains(x, edge_index):
    plain, layer = Closed(), accelerate(Closed())
    for _ in range(3):
        torch.testing.assert_close(layer(x, edge_index, scale=3.0), plain(x, edge_index, scale=3.0))
    edges = [layer(x, edge_index)[1] for _ in range(2)]
    assert edges[0] is edges[1]


def test_a_forward_that_sets_globals_runs_as_it_is(x, edge_index):
    layer, plain = accelerate(Counting()), Counting()
    before = count
    torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
    assert count == before + 2 and kept.names_of(original(Counting.forward)) == []


def test_a_replaced_function_is_called(x, edge_index, monkeypatch):
    layer = accelerate(pyg.FAConv(FEATURES))
    expected = layer(x, x, edge_index)
    own = fa_conv.gcn_norm
    with monkeypatch.context() as patch:
        patch.setattr(fa_conv, "gcn_norm", lambda *a, **k: tuple(0 * part for part in own(*a, **k)))
        assert not torch.equal(layer(x, x, edge_index), expected)
    assert torch.equal(layer(x, x, edge_index), expected)
    assert fa_conv.gcn_norm is own is gcn_norm


def test_no_name_of_a_module_changes():
    accelerate(pyg.FAConv(FEATURES))
    assert fa_conv.gcn_norm is gcn_norm and pyg.FAConv.forward.__globals__ is fa_conv.__dict__
    assert torch_geometric.utils.add_self_loops is add_self_loops


@pytest.mark.filterwarnings("ignore")
def test_torchscript_and_tracing_are_as_before(x, edge_index):
    plain = pyg.MixHopConv(FEATURES, 3)
    layer = accelerate(copy.deepcopy(plain))
    expected = plain(x, edge_index)
    torch.testing.assert_close(layer(x, edge_index), expected)
    torch.testing.assert_close(torch.jit.script(layer)(x, edge_index), expected)
    traced = torch.jit.trace(layer, (x, edge_index), check_trace=False)
    other = torch.randint(6, (2, 7))
    torch.testing.assert_close(traced(x, other), plain(x, other))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_is_as_before(x, edge_index):
    plain = Tutorial(FEATURES, 3)
    layer = accelerate(copy.deepcopy(plain))
    layer(x, edge_index)
    compiled = torch.compile(layer, backend="eager")
    for edges in (edge_index, torch.randint(6, (2, 9)), edge_index):
        torch.testing.assert_close(compiled(x, edges), plain(x, edges))
        torch.testing.assert_close(layer(x, edges), plain(x, edges))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_may_come_across_a_forward_that_runs(x, edge_index):
    """Where it gives a caller up, the forward runs as it is and torch.compile tries what that calls."""
    own = original(Weighted.forward)
    layer, forward = Weighted(), kept.keeping(own, Weighted)
    assert forward is not own
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: torch._dynamo.graph_break() or forward(layer, *args), backend="eager")
    for edges in (edge_index, torch.randint(6, (2, 7)), edge_index):
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))


def test_modes_and_transforms_see_the_computation(x, edge_index, made):
    layer = accelerate(Weighted())
    expected = layer(x, edge_index)[0]
    made.clear()
    with FlopCounterMode(display=False):
        layer(x, edge_index)
    assert made
    made.clear()
    torch.testing.assert_close(torch.func.vmap(lambda v: layer(v, edge_index)[0])(x[None])[0], expected)
    assert made


def test_errors_are_those_of_pyg(x):
    layer = accelerate(Weighted())
    for _ in range(2):
        with pytest.raises(IndexError):
            layer(x, torch.zeros(0, dtype=torch.long))


def test_describe_plan_says_what_is_kept(x, edge_index):
    assert "what gcn_norm returns is kept" in str(describe_plan(accelerate(Weighted()), x, edge_index))
    shown = str(describe_plan(accelerate(OwnClusterGCN(FEATURES, 3)), x, edge_index))
    assert "what add_self_loops, remove_self_loops returns is kept while the arguments live unchanged" in shown
