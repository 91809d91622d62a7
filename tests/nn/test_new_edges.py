"""Layers on edges that are new in each step, and when a graph is measured."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import conv as pyg

import pyg_dfgnn
from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv import aggregation
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise, relative_error
from pyg_dfgnn.settings import Settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

FEATURES = 8
NOTHING = 1e-12
SETTINGS = Settings()


def network():
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))


def degrees():
    return torch.tensor([0, 3, 5, 9, 4, 2])


CONVS = {
    "GCN": (lambda: pyg.GCNConv(FEATURES, FEATURES), None),
    "GCN-weights": (lambda: pyg.GCNConv(FEATURES, FEATURES), 0),
    "GCN-no-loops": (lambda: pyg.GCNConv(FEATURES, FEATURES, add_self_loops=False), None),
    "SAGE": (lambda: pyg.SAGEConv(FEATURES, FEATURES), None),
    "SAGE-max": (lambda: pyg.SAGEConv(FEATURES, FEATURES, aggr="max"), None),
    "SAGE-std": (lambda: pyg.SAGEConv(FEATURES, FEATURES, aggr="std"), None),
    "GIN": (lambda: pyg.GINConv(network()), None),
    "GINE": (lambda: pyg.GINEConv(network(), edge_dim=3), 3),
    "GraphConv": (lambda: pyg.GraphConv(FEATURES, FEATURES), 0),
    "ResGated": (lambda: pyg.ResGatedGraphConv(FEATURES, FEATURES), None),
    "GAT": (lambda: pyg.GATConv(FEATURES, 4, heads=2), None),
    "GAT-edges": (lambda: pyg.GATConv(FEATURES, 4, heads=2, edge_dim=3), 3),
    "GAT-fill": (lambda: pyg.GATConv(FEATURES, 4, heads=2, edge_dim=3, fill_value=0.5), 3),
    "GATv2": (lambda: pyg.GATv2Conv(FEATURES, 4, heads=2), None),
    "GATv2-edges": (lambda: pyg.GATv2Conv(FEATURES, 4, heads=2, edge_dim=3, fill_value="max"), 3),
    "Transformer": (lambda: pyg.TransformerConv(FEATURES, 4, heads=2), None),
    "Transformer-edges": (lambda: pyg.TransformerConv(FEATURES, 4, heads=2, edge_dim=3), 3),
    "AGNN": (lambda: pyg.AGNNConv(), None),
    "PNA": (
        lambda: pyg.PNAConv(FEATURES, FEATURES, ["mean", "max", "std"], ["identity", "amplification"], degrees()),
        None,
    ),
    "TAG": (lambda: pyg.TAGConv(FEATURES, FEATURES, K=2), None),
}


def trained(conv, x, edge_index, edge_attr):
    """Output and every gradient of a step."""
    x = x.clone().requires_grad_()
    edge_attr = None if edge_attr is None else edge_attr.clone().requires_grad_()
    out = conv(x, edge_index) if edge_attr is None else conv(x, edge_index, edge_attr)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(grad.to(out))
    results = {"out": out.detach(), "grad_x": x.grad}
    if edge_attr is not None:
        results["grad_edge_attr"] = edge_attr.grad
    return results | {f"grad_{name}": p.grad for name, p in conv.named_parameters() if p.grad is not None}


def batches(edge_dim):
    """Edges with self-loops, copies and isolated nodes, of other sizes in each batch."""
    for seed, (nodes, edges) in enumerate([(30, 90), (17, 25), (44, 300), (6, 0)]):
        edge_index = random_edges(nodes, nodes - 2, edges, seed=seed)
        if edges:
            edge_index[:, 3], edge_index[:, 4] = edge_index[0, 3], edge_index[:, 5]
        generator = torch.Generator().manual_seed(seed)
        shape = (edges,) if edge_dim == 0 else (edges, edge_dim)
        edge_attr = None if edge_dim is None else torch.rand(shape, generator=generator) + 0.5
        yield torch.randn(nodes, FEATURES, generator=generator), edge_index, edge_attr


def compare(name, device, around, is_left=False):
    make, edge_dim = CONVS[name]
    torch.manual_seed(0)
    reference = make()
    pygs = copy.deepcopy(reference).to(device)
    conv = pyg_dfgnn.accelerate(copy.deepcopy(reference)).to(device)
    reference = reference.double()
    for x, edge_index, edge_attr in batches(edge_dim):
        given = [None if each is None else each.to(device) for each in (x, edge_index, edge_attr)]
        for module in (conv, reference):
            module.zero_grad()
        with around() as launched:
            actual = trained(conv, *given)
        assert launched is None or "graph_count" in launched or name == "GCN-weights" or not edge_index.numel()
        expected = trained(reference, x.double(), edge_index, None if edge_attr is None else edge_attr.double())
        for each in [each for each in expected if expected[each].norm() < NOTHING]:
            # A bias that a softmax cancels.
            assert actual.pop(each).norm() < 1e-4
            expected.pop(each)
        if is_left:
            pygs.zero_grad()
            alike = trained(pygs, *given)
            for each, want in expected.items():
                allowed = max(5e-6, 2 * relative_error(alike[each].cpu(), want))
                assert relative_error(actual[each].cpu(), want) <= allowed, each
            continue
        assert_all_close({each: (actual[each].cpu(), expected[each]) for each in expected})


@needs_compiler
@pytest.mark.parametrize("name", CONVS)
def test_convs_on_edges_that_are_new_in_each_step(name):
    compare(name, "cpu", emulated_device)


@needs_compiler
@pytest.mark.parametrize("name", ["PNA", "Transformer-edges", "GCN"])
def test_convs_compile_whole_under_a_default_device(name):
    make, edge_dim = CONVS[name]
    x, edge_index, edge_attr = next(iter(batches(edge_dim)))
    rest = [] if edge_attr is None else [edge_attr]
    conv = pyg_dfgnn.accelerate(make())
    with emulated_device(), torch.device("cpu"):
        out = torch.compile(conv, backend="aot_eager", fullgraph=True)(x, edge_index, *rest)
    torch.testing.assert_close(out, conv(x, edge_index, *rest))


@pytest.mark.cuda
@pytest.mark.parametrize("is_left", [False, True], ids=["many edges", "few edges"])
@pytest.mark.parametrize("name", CONVS)
def test_convs_on_edges_that_are_new_in_each_step_on_a_gpu(name, is_left, monkeypatch):
    if not is_left:
        monkeypatch.setattr(aggregation, "NEW_NUMBERS", 0)
        monkeypatch.setattr(aggregation, "_KNOWN_NUMBERS", 0)
    compare(name, "cuda", torch.enable_grad, is_left)


@needs_compiler
def test_a_graph_is_measured_when_its_first_layer_comes_the_third_time():
    first, second = (pyg_dfgnn.nn.SAGEConv(FEATURES, FEATURES) for _ in range(2))
    x, edge_index = torch.randn(30, FEATURES), random_edges(30, 30, 90)
    with emulated_device():
        for times in range(1, 4):
            first(x, edge_index)
            for _ in range(3):
                second(x, edge_index)
            assert Graph.known(edge_index, 30, 30, False, False).is_measured == (times == 3)


@needs_compiler
def test_what_is_computed_once_more_in_backward_is_what_it_was():
    conv = pyg_dfgnn.nn.GATv2Conv(FEATURES, 4, heads=2)
    x, edge_index = torch.randn(30, FEATURES, requires_grad=True), random_edges(30, 30, 90)
    with emulated_device():
        conv(x, edge_index)
        for _ in range(3):
            checkpoint(conv, x, edge_index, use_reentrant=False).sum().backward()


@needs_compiler
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_called_often_in_a_checkpoint_is_what_it_was(reentrant):
    conv = pyg_dfgnn.nn.GATConv(FEATURES, FEATURES, dropout=0.5)
    x, edge_index = torch.randn(30, FEATURES, requires_grad=True), random_edges(30, 30, 90)
    edge_index[0, :9] = edge_index[1, :9]

    outs = []

    def run(x):
        for _ in range(4):
            x = conv(x, edge_index)
            outs.append(x.detach())
        return x

    with emulated_device():
        checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    # A checkpoint may stop as soon as it has what was saved.
    assert len(outs) > 4 and all(map(torch.equal, outs[4:], outs[:4]))


@needs_compiler
def test_settings_measure_at_once():
    conv, edge_index = pyg_dfgnn.nn.SAGEConv(FEATURES, FEATURES), random_edges(30, 30, 90)
    with emulated_device(), pyg_dfgnn.local_settings(check_ids="now"):
        conv(torch.randn(30, FEATURES), edge_index)
    assert Graph.known(edge_index, 30, 30, False, False).is_measured


@needs_compiler
def test_a_graph_goes_with_its_edges():
    conv, x = pyg_dfgnn.nn.GATConv(FEATURES, 4), torch.randn(30, FEATURES, requires_grad=True)
    edge_index = random_edges(30, 30, 90)
    gc.disable()
    try:
        with emulated_device():
            conv(x, edge_index).sum().backward()
        graph = weakref.ref(Graph.known(edge_index, 30, 30, True, False))
        assert graph() is not None
        del edge_index
        assert graph() is None
    finally:
        gc.enable()


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    convs = [pyg_dfgnn.accelerate(make()).cuda() for make, edge_dim in CONVS.values() if edge_dim is None]
    x, edge_index = torch.randn(50, FEATURES, device="cuda", requires_grad=True), random_edges(50, 50, 400).cuda()

    def step():
        edges = edge_index.clone()
        for conv in convs:
            conv(x, edges).sum().backward()

    for _ in range(2):
        step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_bad_ids_are_reported_by_the_next_step_and_the_gpu_stays_usable():
    conv = pyg_dfgnn.nn.GATConv(FEATURES, 4).cuda()
    x, bad = torch.randn(5, FEATURES, device="cuda"), torch.tensor([[0, 7], [1, -1]], device="cuda")
    with pytest.raises(IdRangeError, match="source id 7 of 5 nodes"):
        for _ in range(2):
            conv(x, bad)
            torch.cuda.synchronize()
    good = torch.tensor([[0, 1], [1, 2]], device="cuda")
    assert conv(x, good).isfinite().all()


@pytest.mark.cuda
def test_other_streams_have_graphs_of_their_own():
    conv, edge_index = pyg_dfgnn.nn.GATConv(FEATURES, FEATURES).cuda(), random_edges(50, 50, 400).cuda()
    x = torch.randn(50, FEATURES, device="cuda")
    expected, stream = conv(x, edge_index), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = conv(x, edge_index)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(actual, expected)


@pytest.mark.cuda
def test_new_edges_leak_nothing():
    convs = [pyg_dfgnn.nn.GATConv(FEATURES, 4).cuda(), pyg_dfgnn.nn.GCNConv(FEATURES, FEATURES).cuda()]
    x, edge_index = torch.randn(50, FEATURES, device="cuda", requires_grad=True), random_edges(50, 50, 400).cuda()

    def run(steps):
        for _ in range(steps):
            edges = edge_index.clone()
            for conv in convs:
                conv(x, edges).sum().backward()
        return torch.cuda.memory_allocated()

    assert run(300) == run(30)


@needs_compiler
@pytest.mark.parametrize("name", ["GCN", "SAGE-max", "GAT", "Transformer"])
def test_compiled_layers_on_edges_that_are_new_in_each_step(name):
    torch.manual_seed(0)
    reference = CONVS[name][0]()
    conv = torch.compile(pyg_dfgnn.accelerate(copy.deepcopy(reference)), dynamic=True, backend="aot_eager")
    reference = reference.double()
    for x, edge_index, _ in batches(None):
        if not edge_index.numel():
            continue
        for module in (conv, reference):
            module.zero_grad()
        with emulated_device() as launched:
            x_given = x.clone().requires_grad_()
            out = conv(x_given, edge_index)
            out.sum().backward()
        x_wide = x.double().requires_grad_()
        expected = reference(x_wide, edge_index)
        expected.sum().backward()
        assert "graph_count" in launched
        assert_all_close({"out": (out.detach(), expected.detach()), "grad_x": (x_given.grad, x_wide.grad)})


@pytest.mark.cuda
def test_one_call_is_enough_before_a_capture():
    conv, edge_index = pyg_dfgnn.nn.GCNConv(FEATURES, FEATURES).cuda(), random_edges(50, 50, 400).cuda()
    x, graph, stream = torch.randn(50, FEATURES, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            conv(x, edge_index)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out = conv(x, edge_index)
        for _ in range(4):
            # The graph is measured meanwhile.
            expected = conv(x, edge_index)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(out, 2 * (expected - conv.bias) + conv.bias, **elementwise("float32/few_terms"))


@pytest.mark.cuda
def test_compiled_messages_and_aggregations_are_pygs_on_new_edges():
    layers = [pyg.GENConv(FEATURES, FEATURES), pyg.LEConv(FEATURES, FEATURES)]
    for reference in layers:
        layer, reference = pyg_dfgnn.accelerate(copy.deepcopy(reference)).cuda(), reference.double()
        for x, edge_index, _ in batches(None):
            for _ in range(4):
                out = layer(x.cuda(), edge_index.cuda())
                assert_all_close({"out": (out.detach().cpu(), reference(x.double(), edge_index).detach())})
