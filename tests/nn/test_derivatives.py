"""Derivatives beyond the first, and parameters and features of rare shapes: PyG's results."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import elementwise
from tests.covering import over
from tests.kernels.emulated import emulated_device

NODES, FEATURES, EDGES = 12, 6, 40
CONVS = {
    "agnn": ("AGNNConv", (), {}),
    "gat": ("GATConv", (FEATURES, 4), {"heads": 2}),
    "gatv2": ("GATv2Conv", (FEATURES, 4), {"heads": 2}),
    "transformer": ("TransformerConv", (FEATURES, 4), {"heads": 2}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    with emulated_device() if request.param == "cpu" else nullcontext():
        yield request.param


def pair(name, device="cpu", **more):
    """Our conv and PyG's with its parameters."""
    kind, args, kwargs = CONVS[name]
    conv, other = (getattr(module, kind)(*args, **{**kwargs, **more}).to(device) for module in (ours, pyg))
    other.load_state_dict(conv.state_dict())
    return conv, other


def nodes_and_edges(device="cpu"):
    return torch.randn(NODES, FEATURES, device=device), torch.randint(NODES, (2, EDGES), device=device)


def parameters(conv):
    return [parameter for parameter in conv.parameters() if parameter.requires_grad]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **elementwise("float32"))


def penalty_of_a_constant_gradient(conv, x, edge_index):
    """As a gradient penalty is written most often: no incoming gradient needs one."""
    out = conv(x, edge_index)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return out.sum() + grad.square().sum()


def penalty_of_a_loss(conv, x, edge_index):
    out = conv(x, edge_index)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.sum() + grad.square().sum()


def penalty_of_parameters(conv, x, edge_index):
    out = conv(x, edge_index)
    grads = torch.autograd.grad(out.sum(), parameters(conv), create_graph=True, allow_unused=True)
    return out.sum() + sum(grad.square().sum() for grad in grads if grad is not None)


@over(
    [("name", "penalty"), ("name", "frozen"), ("penalty", "frozen")],
    lambda row: not (row["frozen"] and row["penalty"] is penalty_of_parameters),
    name=tuple(CONVS),
    penalty=(penalty_of_a_constant_gradient, penalty_of_a_loss, penalty_of_parameters),
    frozen=(False, True),
    schedule=("auto", "row_split"),
    cast=(False, True),
)
def test_second_derivatives(name, penalty, schedule, frozen, cast, device):
    conv, other = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    with pyg_dfgnn.local_settings(schedule=schedule):
        for by_backward in (True, False):
            results = []
            for module in (conv, other):
                module.requires_grad_(not frozen).zero_grad()
                leaf = x.clone().requires_grad_()
                with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
                    total = penalty(module, leaf, edge_index)
                leaves = [leaf, *parameters(module)]
                if by_backward:
                    total.backward()
                    results.append([leaf.grad for leaf in leaves])
                else:
                    results.append(torch.autograd.grad(total, leaves, allow_unused=True))
            largest = max(float(grad.abs().max()) for grad in results[1] if grad is not None)
            for actual, expected in zip(*results, strict=True):
                if expected is None or not expected.any():
                    assert actual is None or not actual.any()
                else:
                    torch.testing.assert_close(actual, expected, rtol=0, atol=(0.05 if cast else 1e-5) * largest)


@pytest.mark.parametrize("name", ["gatv2", "transformer"])
def test_what_features_were_cast_from_may_be_gone(name, device):
    """By autocast: gradients of it are found, and those of gradients."""
    conv, other = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    x.requires_grad_()
    seconds = []
    for module in (conv, other):
        with pyg_dfgnn.local_settings(schedule="row_split"), torch.autocast(device, dtype=torch.bfloat16):
            loss = module(2 * x, edge_index).float().square().sum()
        assert torch.autograd.grad(loss, x, retain_graph=True)[0].dtype is torch.float32
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(*seconds, rtol=0, atol=0.05 * float(seconds[1].abs().max()))


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", CONVS)
def test_a_graph_of_the_gradients_alone_changes_nothing(name, cast, device):
    conv, _ = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    leaves, gradients = [x.requires_grad_(), *parameters(conv)], []
    for create_graph in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            loss = conv(x, edge_index).sin().sum()
        gradients.append(torch.autograd.grad(loss, leaves, create_graph=create_graph))
    assert all(map(torch.equal, *gradients)) and all(grad.requires_grad for grad in gradients[1])


@pytest.mark.parametrize("name", CONVS)
def test_batched_gradients(name, device):
    conv, other = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    rows = torch.randn(3, NODES, conv(x, edge_index).size(1), device=device)
    gradients = []
    for module in (conv, other):
        leaves = [x.clone().requires_grad_(), *parameters(module)]
        out = module(leaves[0], edge_index)
        gradients.append(torch.autograd.grad(out, leaves, rows, is_grads_batched=True))
    close(*gradients)
    jacobians = [
        torch.autograd.functional.jacobian(lambda x, module=module: module(x, edge_index), x, vectorize=True)
        for module in (conv, other)
    ]
    close(*jacobians)


@pytest.mark.parametrize("name", CONVS)
def test_an_error_in_backward_stays_what_it_is(name, device):
    conv, _ = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    out = conv(x.requires_grad_(), edge_index).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("name", CONVS)
def test_forward_mode_takes_pygs_path(name, device):
    conv, other = pair(name, device)
    x, edge_index = nodes_and_edges(device)
    duals = []
    for module in (conv, other):
        with forward_ad.dual_level():
            dual = module(forward_ad.make_dual(x, torch.ones_like(x)), edge_index)
            duals.append(forward_ad.unpack_dual(dual))
    close([*duals[0]], [*duals[1]])
    with forward_ad.dual_level():
        assert "forward-mode differentiation is active" in str(pyg_dfgnn.describe_plan(conv, x, edge_index))


def test_a_bias_of_the_edge_features_counts():
    conv, other = pair("gat", edge_dim=3)
    bias = 3 * torch.randn(8)
    for module in (conv, other):
        module.lin_edge.bias = torch.nn.Parameter(bias.clone())
    x, edge_index = nodes_and_edges()
    edge_attr = torch.randn(EDGES, 3)
    with emulated_device() as launched:
        close(conv(x, edge_index, edge_attr), other(x, edge_index, edge_attr))
    assert "attention_forward" in launched


@pytest.mark.parametrize("name, layers", [("transformer", ("lin_query", "lin_key")), ("gatv2", ("lin_l", "lin_r"))])
def test_biases_of_another_shape(name, layers):
    conv, other = pair(name)
    x, edge_index = nodes_and_edges()
    for module in (conv, other):
        for layer in layers:
            getattr(module, layer).bias = torch.nn.Parameter(torch.ones(1))
    with emulated_device():
        close(conv(x, edge_index), other(x, edge_index))
        # Together they are as long as two of the right length.
        for layer, length in zip(layers, (3, 13)):
            getattr(conv, layer).bias = torch.nn.Parameter(torch.randn(length))
        with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
            conv(x, edge_index)


@pytest.mark.parametrize("shape", [(EDGES, 1, 3), (1, 3)], ids=str)
def test_edge_features_that_are_broadcast_take_pygs_path(shape):
    conv, other = pair("transformer", edge_dim=3)
    x, edge_index = nodes_and_edges()
    edge_attr = torch.randn(shape)
    with emulated_device() as launched:
        close(conv(x, edge_index, edge_attr), other(x, edge_index, edge_attr))
    assert not launched


def test_numbers_that_are_no_python_numbers():
    x, edge_index = nodes_and_edges()
    for name in ("gat", "gatv2"):
        conv, other = pair(name)
        conv.negative_slope, other.negative_slope = np.float32(0.3), 0.3
        with emulated_device():
            close(conv(x, edge_index), other(x, edge_index))
    conv, other = pair("agnn", requires_grad=False)
    del conv.beta
    conv.beta, other.beta = 1.3, torch.tensor([1.3])
    with emulated_device():
        close(conv(x, edge_index), other(x, edge_index))
