"""Convs on a normalised adjacency of few edges, whose norm is kept: PyG's numbers, whatever is edited and wherever."""

import gc
import weakref

import pytest
import torch
from torch_geometric.nn import conv as pyg

import pyg_dfgnn
from pyg_dfgnn.errors import IdRangeError, UnsupportedError
from pyg_dfgnn.nn import on_cpu
from pyg_dfgnn.ops import visits
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings, current, local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

FEATURES = 8
NODES = 30
SETTINGS = Settings()
CONVS = {
    "GCNConv": lambda cls: cls(FEATURES, 4),
    "GCNConv-improved": lambda cls: cls(FEATURES, 4, improved=True),
    "SGConv": lambda cls: cls(FEATURES, 4, K=2),
    "TAGConv": lambda cls: cls(FEATURES, 4, K=2),
    "LGConv": lambda cls: cls(),
}


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Take edges on a CPU for those on a GPU."""
    monkeypatch.setattr(visits, "may_be_few", lambda _: current().leaves_few)
    monkeypatch.setattr(on_cpu.Shortcut, "is_open", False)


def edges():
    """Edges of which some are self-loops, of no node two."""
    edge_index = random_edges(NODES, NODES, 90)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([edge_index, torch.arange(0, NODES, 4).expand(2, -1)], dim=1)


def pair_of(name):
    make, kind = CONVS[name], name.partition("-")[0]
    upstream, layer = make(getattr(pyg, kind)), make(getattr(pyg_dfgnn.nn, kind))
    layer.load_state_dict(upstream.state_dict())
    return upstream, layer


def assert_alike(upstream, layer, edge_index, weight=None):
    """Compare outputs and all gradients, PyG's in float64 on copies."""
    x = torch.randn(NODES, FEATURES)
    results = []
    for conv, dtype in ((upstream.double(), torch.float64), (layer, torch.float32)):
        features = x.to(dtype).requires_grad_()
        own = (
            weight if conv is layer or weight is None else weight.detach().double().requires_grad_(weight.requires_grad)
        )
        out = conv(features, edge_index if conv is layer else edge_index.clone(), own)
        wanted = [features, *conv.parameters(), *([own] if own is not None and own.requires_grad else [])]
        results.append((out, *torch.autograd.grad(out.sin().sum(), wanted)))
    for pygs, own in zip(*results, strict=True):
        torch.testing.assert_close(own.double(), pygs, **elementwise("float32/few_terms"))


@pytest.mark.parametrize("weights", ["none", "fixed", "learned"])
@pytest.mark.parametrize("name", CONVS)
def test_calls_with_edges_that_stay_have_pygs_numbers_and_follow_edits(name, weights):
    (upstream, layer), edge_index = pair_of(name), edges()
    weight = None if weights == "none" else torch.rand(edge_index.size(1)).requires_grad_(weights == "learned")
    for _ in range(3):
        assert_alike(upstream, layer, edge_index, weight)
    if weight is not None:
        with torch.no_grad():
            weight.mul_(3.0).add_(0.1)
        assert_alike(upstream, layer, edge_index, weight)
    edge_index[0, :5] = edge_index[1, 5:10]
    edge_index[:, 3] = torch.tensor([1, 1])
    assert_alike(upstream, layer, edge_index, weight)


@pytest.mark.parametrize("name", CONVS)
@needs_compiler
def test_operators_of_torch_sum_few_new_edges_with_weights(name):
    upstream, layer = pair_of(name)
    with emulated_device() as launched:
        for _ in range(3):
            edge_index = edges()
            assert_alike(upstream, layer, edge_index, torch.rand(edge_index.size(1)))
        assert not launched


NEAR = ("GCNConv", "SGConv", "APPNP")
WIDE = {
    # (class, width of the rows of edges) -> layer; those of NEAR have sums alone, over up to three hops.
    "GCNConv": lambda cls, width: cls(FEATURES, width),
    "SGConv": lambda cls, width: cls(width, 4, K=2),
    "APPNP": lambda cls, width: cls(2, 0.1),
    "SGConv-far": lambda cls, width: cls(width, 4, K=4),
    "GCNConv-mean": lambda cls, width: cls(FEATURES, width, aggr="mean"),
    "GCN2Conv": lambda cls, width: cls(width, 0.1),
}


@pytest.mark.parametrize("width", [16, 600])
@pytest.mark.parametrize("name", WIDE)
@needs_compiler
def test_kernels_sum_new_edges_whose_rows_they_take_whole(name, width):
    make, kind = WIDE[name], name.partition("-")[0]
    upstream, layer = make(getattr(pyg, kind), width), make(getattr(pyg_dfgnn.nn, kind), width)
    layer.load_state_dict(upstream.state_dict())
    x, has_kernels = torch.randn(NODES, FEATURES if kind == "GCNConv" else width), width < 512 or name not in NEAR
    more = (x,) if kind == "GCN2Conv" else ()
    with emulated_device() as launched:
        for _ in range(3):
            edge_index = edges()
            want = upstream(x, *more, edge_index)
            torch.testing.assert_close(layer(x, *more, edge_index), want, **elementwise("float32/few_terms"))
        assert bool(launched) is has_kernels
        # What is no tensor is no new edges.
        graph = pyg_dfgnn.Graph.of(edge_index, NODES)
        torch.testing.assert_close(layer(x, *more, graph), want, **elementwise("float32/few_terms"))


@needs_compiler
def test_wide_rows_of_messages_of_ones_own_are_told():
    class Tripled(pyg_dfgnn.nn.GCNConv):
        def message(self, x_j, edge_weight):
            return 3 * edge_weight.view(-1, 1) * x_j

    layer = Tripled(FEATURES, 600)
    with emulated_device(), local_settings(fallback="error"), pytest.raises(UnsupportedError, match="'message'"):
        layer(torch.randn(NODES, FEATURES), edges())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CONVS)
def test_steps_that_may_not_wait_have_the_same_numbers(name, weighted):
    (upstream, layer), edge_index = pair_of(name), edges()
    weight = torch.rand(edge_index.size(1), requires_grad=True) if weighted else None
    with visits.refilled():
        for _ in range(2):
            assert_alike(upstream, layer, edge_index, weight)
            # What refills a captured batch leaves no trace in the version of a tensor.
            edge_index.data[0, :5] = edge_index[1, 5:10]


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_other_statistics_see_no_loops_that_weigh_nothing(aggr):
    upstream, layer = (library.GCNConv(FEATURES, 4, aggr=aggr) for library in (pyg, pyg_dfgnn.nn))
    layer.load_state_dict(upstream.state_dict())
    edge_index = edges()
    weight = torch.rand(edge_index.size(1))
    with visits.refilled():
        assert_alike(upstream, layer, edge_index, weight)


@pytest.mark.parametrize("self_loops", [False, True])
def test_padding_of_no_weight_leaves_gradients_finite(self_loops):
    layer, scale = pyg_dfgnn.nn.GCNConv(FEATURES, 4, add_self_loops=self_loops), torch.ones(1, requires_grad=True)
    # As a captured batch is padded: self-loops of its last node, whose weight is 0.
    edge_index = torch.cat([edges(), torch.full((2, 9), NODES)], dim=1)
    weight = torch.rand(edge_index.size(1)).index_fill(0, torch.arange(edge_index.size(1) - 9, edge_index.size(1)), 0)
    with visits.refilled():
        layer(torch.randn(NODES + 1, FEATURES), edge_index, scale * weight).sum().backward()
    assert torch.isfinite(scale.grad).all()


def test_weights_that_an_optimizer_edits_without_a_trace_are_read_again():
    (upstream, layer), edge_index = pair_of("GCNConv"), edges()
    weight = (torch.rand(edge_index.size(1)) + 0.5).requires_grad_()
    optimizer, x = torch.optim.SGD([weight], lr=0.01, fused=True), torch.randn(NODES, FEATURES)
    for _ in range(5):
        layer(x, edge_index, weight).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            want = upstream(x, edge_index, weight)
            torch.testing.assert_close(layer(x, edge_index, weight), want, **elementwise("float32/few_terms"))


@pytest.mark.parametrize("options", [{"flow": "target_to_source"}, {"aggr": "min"}], ids=str)
@needs_compiler
def test_a_description_says_which_known_edges_kernels_take(options):
    layer, plain = pyg_dfgnn.nn.GCNConv(FEATURES, 4, **options), pyg_dfgnn.nn.GCNConv(FEATURES, 4)
    x, edge_index = torch.randn(NODES, FEATURES), edges()
    with emulated_device() as launched:
        for each, has_kernels in ((layer, True), (plain, False)):
            for _ in range(3):
                each(x, edge_index)
            before = len(launched)
            each(x, edge_index)
            assert (len(launched) > before) is has_kernels
            assert pyg_dfgnn.describe_plan(each, x, edge_index).fused is has_kernels


@pytest.mark.parametrize("weighted", [False, True])
def test_ids_out_of_range_of_known_edges_are_named(weighted):
    layer, edge_index = pyg_dfgnn.nn.GCNConv(FEATURES, 4), edges()
    weight = torch.rand(edge_index.size(1)) if weighted else None
    x = torch.randn(NODES, FEATURES)
    for _ in range(3):
        layer(x, edge_index, weight)
    edge_index[1, 3] = NODES
    with pytest.raises(IdRangeError, match=r"target ids in \[0, num_dst=30\) \(got 0 to 30\)"):
        layer(x, edge_index, weight)


@pytest.mark.parametrize("calls", [1, 4])
def test_what_is_kept_goes_with_the_edges(calls):
    layer, x = pyg_dfgnn.nn.TAGConv(FEATURES, 4), torch.randn(NODES, FEATURES)
    edge_index = edges()
    weight = torch.rand(edge_index.size(1))
    for _ in range(calls):
        layer(x, edge_index, weight)
    refs = [weakref.ref(edge_index), weakref.ref(weight)]
    del edge_index, weight
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
