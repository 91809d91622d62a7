"""The drop-in for PyG's PNAConv against PyG's in float64: values, gradients, launches, and what is left to PyG."""

import copy
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from torch_geometric.nn.conv import PNAConv as PyGConv
from torch_geometric.utils import to_torch_csr_tensor

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise
from pyg_dfgnn.reference.zoo import EdgeList
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import reasons_of

ALL = ["mean", "min", "max", "std", "sum", "var"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
NUM_NODES = 12
# Node 11 has no edges; the others have several, so that variances are more than what is left of cancelled terms.
EDGES = torch.randint(11, (2, 70), generator=torch.Generator().manual_seed(0))
DEGREES = torch.tensor([1, 3, 4, 2])


def pair(in_channels=6, out_channels=8, aggregators=ALL, scalers=SCALERS, **kwargs):
    """A conv of ours and PyG's with the same parameters."""
    convs = [
        kind(in_channels, out_channels, list(aggregators), list(scalers), DEGREES, **kwargs)
        for kind in (ours.PNAConv, PyGConv)
    ]
    convs[0].load_state_dict(convs[1].state_dict())
    return convs


def trained(conv, x, edge_index, edge_attr=None):
    """Output and gradients of all inputs and parameters."""
    inputs = {"x": x.detach().clone().requires_grad_()}
    if edge_attr is not None:
        inputs["edge_attr"] = edge_attr.detach().clone().requires_grad_()
    leaves = {**inputs, **dict(conv.named_parameters())}
    out = conv(inputs["x"], edge_index, inputs.get("edge_attr"))
    grad = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    return {"out": out, **{f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}}


def assert_equals_pyg(
    own, pygs, x, edge_index, edge_attr=None, launches=(1, 1), wanted_edges=None, dtype=torch.float32
):
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = trained(own.to(dtype), x.to(dtype), edge_index, None if edge_attr is None else edge_attr.to(dtype))
    exact = copy.deepcopy(own.state_dict())
    pygs.load_state_dict(exact)
    edge_index = edge_index if wanted_edges is None else wanted_edges
    edge_attr = None if edge_attr is None else edge_attr.to(dtype).double()
    expected = trained(copy.deepcopy(pygs).double(), x.to(dtype).double(), edge_index, edge_attr)
    assert_all_close({name: (value, expected[name]) for name, value in actual.items()}, dtype=dtype, op="attention")
    names = [name for name in launched if not name.endswith("_merge")]
    assert (names.count("segment_forward"), names.count("segment_backward_sources")) == launches


TOWERS = {"one": {}, "shared": {"towers": 2}, "divided": {"towers": 2, "divide_input": True}}


@needs_compiler
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("towers", TOWERS)
def test_values_and_gradients(towers, edge_dim):
    own, pygs = pair(edge_dim=edge_dim, **TOWERS[towers])
    edge_attr = None if edge_dim is None else torch.randn(EDGES.size(1), edge_dim)
    assert_equals_pyg(own, pygs, torch.randn(NUM_NODES, 6), EDGES, edge_attr)


@needs_compiler
@pytest.mark.parametrize("aggregators", [["mean"], ["sum", "max"], ["var", "mean"], ["max", "max"]], ids=str)
@pytest.mark.parametrize(
    "options", [{"post_layers": 2}, {"train_norm": True}, {"post_layers": 3, "towers": 4}], ids=str
)
def test_options(aggregators, options):
    own, pygs = pair(aggregators=aggregators, scalers=["attenuation"], **options)
    assert_equals_pyg(own, pygs, torch.randn(NUM_NODES, 6), EDGES)


@needs_compiler
@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_channels_of_any_integer_type(number):
    own, pygs = pair(number(6), number(8), edge_dim=number(3), towers=number(2))
    assert_equals_pyg(own, pygs, torch.randn(NUM_NODES, 6), EDGES, torch.randn(EDGES.size(1), 3))


@needs_compiler
def test_graphs(case: EdgeList):
    """Nodes without edges get no shift, whatever their own features are."""
    if case.num_src != case.num_dst:
        pytest.skip("PNAConv has one node set")
    own, pygs = pair(aggregators=["mean", "min", "max", "sum"], scalers=SCALERS[:3], towers=2)
    launches = (1, 1) if case.num_src else (0, 0)
    assert_equals_pyg(own, pygs, torch.randn(case.num_src, 6), case.edge_index, launches=launches)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    own, pygs = pair(aggregators=["mean", "sum"], scalers=SCALERS[:2])
    assert_equals_pyg(own, pygs, torch.randn(NUM_NODES, 6), EDGES, dtype=dtype)


@needs_compiler
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_forms_of_edges(flow):
    edge_attr, x = torch.randn(EDGES.size(1), 3), torch.randn(NUM_NODES, 6)
    # A sparse matrix adds up edges that are there twice.
    edges = EDGES[:, :-3].unique(dim=1).contiguous()
    own, pygs = pair(edge_dim=3, flow=flow)
    graph = Graph.of(edges, NUM_NODES, flow=flow)
    assert_equals_pyg(own, pygs, x, graph, edge_attr[: edges.size(1)], wanted_edges=edges)
    assert_equals_pyg(
        own, pygs, x, torch_geometric.EdgeIndex(edges, sparse_size=(NUM_NODES, NUM_NODES)), edge_attr[: edges.size(1)]
    )
    if flow == "source_to_target":
        own, pygs = pair()
        adjacency = to_torch_csr_tensor(edges.flip(0), size=(NUM_NODES, NUM_NODES))
        assert_equals_pyg(own, pygs, x, adjacency, wanted_edges=edges)


@needs_compiler
@pytest.mark.sparse
def test_sparse_tensors():
    """The values of a `SparseTensor` are edge features; one value per edge is left to PyG, which fails."""
    torch_sparse = pytest.importorskip("torch_sparse")
    edges = EDGES.unique(dim=1).contiguous()
    x, edge_attr = torch.randn(NUM_NODES, 6), torch.randn(edges.size(1), 3)
    own, pygs = pair(edge_dim=3)
    adjacency = torch_sparse.SparseTensor(
        row=edges[1], col=edges[0], value=edge_attr, sparse_sizes=(NUM_NODES, NUM_NODES)
    )
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        out = own(x, adjacency)
    assert launched.count("segment_forward") == 1
    assert_all_close({"out": (out, pygs.double()(x.double(), edges, edge_attr.double()))})
    weighted = adjacency.set_value(edge_attr[:, 0], layout="coo")
    with emulated_device():
        assert "a SparseTensor with one value per edge" in reasons_of(pair()[0], x, weighted)


@needs_compiler
def test_zero_features():
    """The bias of the messages keeps nodes of zeros from sending zeros, whose extremes torch shares with its start."""
    x = torch.zeros(NUM_NODES, 6)
    x[3:5] = torch.randn(2, 6)
    own, pygs = pair(aggregators=["max", "min"], scalers=["identity"])
    assert_equals_pyg(own, pygs, x, EDGES)


@needs_compiler
@pytest.mark.parametrize("towers", TOWERS)
def test_autocast(towers, monkeypatch):
    """What is gathered has the dtype of the linear layers."""
    own, pygs = pair(aggregators=["mean", "max"], scalers=SCALERS[:2], edge_dim=3, **TOWERS[towers])
    x, edge_attr, gathered = torch.randn(NUM_NODES, 6), torch.randn(EDGES.size(1), 3), []
    module = sys.modules["pyg_dfgnn.nn.conv.pna_conv"]
    aggregate = module.aggregate
    monkeypatch.setattr(
        module,
        "aggregate",
        lambda graph, x, *args, **kwargs: gathered.append(x.dtype) or aggregate(graph, x, *args, **kwargs),
    )
    with emulated_device() as launched, torch.autocast("cpu", dtype=torch.bfloat16):
        actual = own(x, EDGES, edge_attr)
        assert pyg_dfgnn.describe_plan(own, x, EDGES, edge_attr).problem.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = pygs(x, EDGES, edge_attr)
    assert launched and gathered == [torch.bfloat16] and actual.dtype == expected.dtype == torch.bfloat16
    assert_all_close({"out": (actual, pygs.double()(x.double(), EDGES, edge_attr.double()))}, dtype=torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_compile(edge_dim):
    own, pygs = pair(edge_dim=edge_dim)
    x = torch.randn(NUM_NODES, 6)
    edge_attr = None if edge_dim is None else torch.randn(EDGES.size(1), edge_dim)
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = trained(compiled, x, EDGES, edge_attr)
    assert "segment_forward" in launched and "segment_backward_sources" in launched
    expected = trained(pygs.double(), x.double(), EDGES, None if edge_attr is None else edge_attr.double())
    pairs = {name.replace("_orig_mod.", ""): value for name, value in actual.items()}
    assert_all_close({name: (value, expected[name]) for name, value in pairs.items()})


LEFT = {
    "pre_layers is more than 1": {"pre_layers": 2},
    "aggr is": {"aggregators": ["mean", "softmax"]},
    "edge_dim without": {"edge_dim": 3},
}


@needs_compiler
@pytest.mark.parametrize("reason", LEFT)
def test_what_pyg_takes(reason):
    own, pygs = pair(**LEFT[reason])
    x = torch.randn(NUM_NODES, 6)
    with emulated_device() as launched:
        assert reason in reasons_of(own, x, EDGES)[0]
        if reason != "edge_dim without":
            assert reason in own._standing_reasons()[0]
            with pyg_dfgnn.local_settings(fallback="silent"):
                torch.testing.assert_close(own(x, EDGES), pygs(x, EDGES))
    assert "segment_forward" not in launched or reason == "aggr is"


@needs_compiler
def test_a_hook_inside():
    """A hook of a layer that the fused path would not call."""
    own, pygs = pair()
    x, calls = torch.randn(NUM_NODES, 6), []
    handle = own.pre_nns[0][0].register_forward_hook(lambda *_: calls.append(1))
    with emulated_device(), pyg_dfgnn.local_settings(fallback="silent"):
        torch.testing.assert_close(own(x, EDGES), pygs(x, EDGES))
        assert calls == [1] and reasons_of(own, x, EDGES) == ["a layer is no plain linear layer"]
        handle.remove()
        assert reasons_of(own, x, EDGES) == []


@needs_compiler
@pytest.mark.parametrize("emulated", [False, True], ids=["cpu", "emulated"])
def test_accelerate(emulated):
    model = pyg.PNA(6, 8, num_layers=2, aggregators=["mean", "max"], scalers=SCALERS[:2], deg=DEGREES).eval()
    x = torch.randn(NUM_NODES, 6)
    expected = model(x, EDGES)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model)
    assert all(type(conv) is ours.PNAConv for conv in model.convs)
    with emulated_device() if emulated else nullcontext([]) as launched:
        torch.testing.assert_close(model(x, EDGES), expected, **elementwise("float32"))
        assert launched.count("segment_forward") == 2 * emulated
        described = pyg_dfgnn.describe_plan(model, x, EDGES)
    assert described.layers["convs.0"].fused is emulated
