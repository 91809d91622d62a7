"""Attention of one head that absorbs its linear layers: the numbers of PyG's conv in float64, from tiles of rows."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn import settings
from pyg_dfgnn.dispatch import attention_absorbed, gpu
from tests.kernels.emulated import emulated_device
from tests.tolerances import assert_all_close
from tests.zoo import hub, random, star

NODE = "_AbsorbedAttentionBackward"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Graphs of a few rows, on a device of two multiprocessors: tiles of several rows, of 64 and more."""
    monkeypatch.setattr(attention_absorbed, "MIN_ROWS", dict.fromkeys(attention_absorbed.WIDTHS, 1))
    monkeypatch.setitem(gpu.known, CPU, replace(gpu.H200, multiprocessors=2))


def build(channels=64, bias=True, concat=True):
    conv = ours.TransformerConv(channels, channels, root_weight=False, bias=bias, concat=concat)
    for parameter in conv.parameters():
        parameter.data.normal_(std=channels**-0.5)
    oracle = pyg.TransformerConv(channels, channels, root_weight=False, bias=bias, concat=concat)
    oracle.load_state_dict(conv.state_dict())
    return conv, oracle.double()


def trained(conv, x, edge_index, needs_x=True):
    x = x.clone().requires_grad_(needs_x)
    out = conv(x, edge_index)
    torch.manual_seed(1)
    (out * torch.randn(out.shape).to(out.dtype)).sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **({"x": x.grad} if needs_x else {}), **grads}, names_of(out.grad_fn)


def names_of(node):
    found, nodes = set(), [node]
    while nodes:
        node = nodes.pop()
        found.add(node.name())
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


def compare(found, expected, dtype=None):
    """The softmax does not see the key's bias: its gradient is 0, where PyG's is what rounding leaves."""
    bias = found.pop("lin_key.bias", None)
    expected.pop("lin_key.bias", None)
    assert bias is None or not bias.any()
    assert found.keys() == expected.keys()
    for name in ("lin_query.weight", "lin_query.bias", "lin_key.weight"):
        # Of scores that are the same for all edges of each row there is no gradient.
        if name in expected and expected[name].norm() < 1e-10 * expected["lin_value.weight"].norm():
            expected[name] = torch.zeros_like(expected[name])
    assert_all_close({name: (found[name], expected[name]) for name in expected}, dtype)


GRAPHS = [
    random(150, 150, 700),
    # Rows without edges, and long ones of several chunks.
    hub(300, 40),
    star(180),
    star(180, inward=False),
    random(1, 1, 3),
    random(8, 8, 1, name="one edge"),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_outputs_and_gradients(graph, bias):
    conv, oracle = build(bias=bias)
    x = torch.randn(graph.num_src, 64)
    with emulated_device("random") as launched:
        found, nodes = trained(conv, x, graph.edge_index)
    assert NODE in nodes and "attention_absorbed_targets" in launched
    with emulated_device(), torch.no_grad():
        assert torch.equal(conv(x, graph.edge_index), found["out"])
    compare(found, trained(oracle, x.double(), graph.edge_index)[0])


@pytest.mark.parametrize("channels", [96, 128])
def test_widths(channels):
    graph = random(300, 300, 1500)
    conv, oracle = build(channels)
    x = torch.randn(graph.num_src, channels)
    with emulated_device():
        found, nodes = trained(conv, x, graph.edge_index)
    assert NODE in nodes
    compare(found, trained(oracle, x.double(), graph.edge_index)[0])


def test_heads_averaged_and_tf32():
    graph = random(150, 150, 700)
    conv, oracle = build(concat=False)
    x = torch.randn(graph.num_src, 64)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with emulated_device():
            found, nodes = trained(conv, x, graph.edge_index)
    finally:
        torch.set_float32_matmul_precision(before)
    assert NODE in nodes
    compare(found, trained(oracle, x.double(), graph.edge_index)[0], "tf32")


def shifted(tensor):
    """The same at an address that no kernel takes."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return moved.copy_(tensor.flatten()).view(tensor.shape)


def test_what_lies_elsewhere():
    """Inputs with gaps, saved tensors that hooks give back at other addresses, one gradient for all elements."""
    graph, x = random(150, 150, 700), torch.randn(150, 64)
    conv, _ = build()

    def gradients(x, unpack):
        leaf = x.clone().requires_grad_()
        features = leaf if unpack is None else shifted(leaf.detach()).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack or (lambda tensor: tensor)):
            out = conv(features, graph.edge_index)
            layers = [each for name, each in conv.named_parameters() if "skip" not in name]
            return [out, *torch.autograd.grad(out.sum(), [features, *layers])]

    with emulated_device() as launched:
        plain, moved = gradients(x, None), gradients(x, shifted)
    assert launched.count("attention_absorbed_targets") == 2
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


def test_saved_tensors_in_16_bits():
    """Hooks that round what is floating leave the images of matrices alone."""
    graph, x = random(150, 150, 700), torch.randn(150, 64)
    conv, _ = build()

    def rounded(tensor):
        return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor

    def restored(tensor):
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    with emulated_device():
        plain, _ = trained(conv, x, graph.edge_index)
        conv.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(rounded, restored):
            found, nodes = trained(conv, x, graph.edge_index)
    assert NODE in nodes
    assert all((found[name] - plain[name]).norm() <= 0.02 * plain[name].norm() for name in plain)


def test_layers_on_another_device():
    """As PyG's: an error of torch's, not a launch."""
    graph, x = random(150, 150, 700), torch.randn(150, 64)
    conv, _ = build()
    with emulated_device() as launched:
        conv(x, graph.edge_index)
        launched.clear()
        place = mock.patch.object(torch.Tensor, "get_device", lambda self: 1 if self is conv.lin_key.weight else -1)
        kernels = mock.patch("pyg_dfgnn.ops.attention_absorbed.launch")
        with place, kernels as launch:
            conv(x, graph.edge_index)
    assert not launch.called and not any("absorbed" in name for name in launched)


def test_what_needs_no_gradient():
    graph, x = random(150, 150, 700), torch.randn(150, 64)
    conv, _ = build()
    with emulated_device() as launched:
        every, _ = trained(conv, x, graph.edge_index)
        conv.zero_grad()
        launched.clear()
        layers, nodes = trained(conv, x, graph.edge_index, needs_x=False)
        assert NODE in nodes and "attention_backward_sources" not in launched
        for parameter in conv.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        launched.clear()
        alone, nodes = trained(conv, x, graph.edge_index)
        assert NODE in nodes and "products_weights" not in launched
    assert all(torch.equal(layers[name], every[name]) for name in layers)
    assert set(alone) == {"out", "x"} and torch.equal(alone["x"], every["x"])


def test_large_and_small_rows():
    """A scale for each row and column: numbers 1e10 apart, within the same bound."""
    graph = random(150, 150, 700)
    conv, oracle = build(bias=False)
    x = torch.randn(150, 64) * torch.logspace(-5, 0, 150)[torch.randperm(150), None]
    for layer in (conv.lin_value, oracle.lin_value):
        layer.weight.data.mul_(torch.logspace(-5, 5, 64, dtype=layer.weight.dtype)[:, None])
    with emulated_device(), torch.no_grad():
        found = conv(x, graph.edge_index)
    expected = oracle(x.double(), graph.edge_index).detach()
    assert_all_close({f"column {i}": (found[:, i], expected[:, i]) for i in range(64)})


OTHERS = {
    "heads": ({"heads": 2, "concat": True}, 64, {}),
    "skip": ({"root_weight": True}, 64, {}),
    "dropout": ({"dropout": 0.5}, 64, {}),
    "widths": ({}, 128, {}),
    "schedule": ({}, 64, {"schedule": "rows"}),
}


@pytest.mark.parametrize("key", OTHERS)
def test_what_is_not_absorbed(key):
    options, features, chosen = OTHERS[key]
    conv = ours.TransformerConv(features, 64, **{"root_weight": False, **options})
    graph, x = random(150, 150, 700), torch.randn(150, features)
    with emulated_device() as launched, settings(**chosen):
        conv(x, graph.edge_index)
    assert launched and not any("absorbed" in name for name in launched)


def test_what_does_not_fit_a_tile():
    """More edges than a tile holds, more chunks than it has states for."""
    x = torch.randn(40, 64)
    conv, oracle = build()
    for graph in (hub(1100, 40), random(40, 40, 4200)):
        with emulated_device() as launched:
            found, nodes = trained(copy.deepcopy(conv), x, graph.edge_index)
        assert NODE not in nodes and launched
        expected = trained(copy.deepcopy(oracle), x.double(), graph.edge_index)[0]
        assert_all_close({name: (found[name], expected[name]) for name in ("out", "x")})


def test_the_plan_says_so():
    conv, x = ours.TransformerConv(64, 64, root_weight=False), torch.randn(150, 64)
    edge_index = random(150, 150, 700).edge_index
    with emulated_device():
        found = pyg_dfgnn.describe_plan(conv, x, edge_index)
        assert found.absorbed is not None and "linear layers absorbed" in str(found)
        for other in (ours.TransformerConv(64, 64), ours.TransformerConv(64, 32, 2, root_weight=False)):
            assert pyg_dfgnn.describe_plan(other, x, edge_index).absorbed is None
        with settings(schedule="rows"):
            assert pyg_dfgnn.describe_plan(conv, x, edge_index).absorbed is None
        conv.lin_key.register_forward_hook(lambda *_: None)
        assert pyg_dfgnn.describe_plan(conv, x, edge_index).absorbed is None
