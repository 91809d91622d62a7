"""AGNNConv on small graphs, where the host takes longer than the kernels: nothing is made that nothing reads."""

from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.reference.tolerances import assert_all_close, assert_close
from pyg_dfgnn.reference.zoo import hub, random
from tests.covering import over
from tests.kernels.emulated import emulated_device

FEATURES = 6
GRAPHS = [random(30, 30, 140), hub(700)]


def build(**options):
    conv, oracle = ours.AGNNConv(**options), pyg.AGNNConv(**options)
    for module in (conv, oracle):
        module.beta.data.fill_(1.5)
    return conv, oracle.double()


def trained(conv, x, edge_index, call=None):
    """Output and gradients, and the kinds of the nodes of autograd: behind the output, and behind that."""
    leaf = x.clone().requires_grad_()
    conv.zero_grad()
    out = (call or conv)(leaf, edge_index)
    behind = {type(node).__name__ for node, _ in out.grad_fn.next_functions if node}
    kinds = type(out.grad_fn).__name__, behind
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).bfloat16().to(out.dtype))
    grads = {name: parameter.grad for name, parameter in conv.named_parameters()}
    return {"out": out.detach(), "x": leaf.grad, **grads}, kinds


@over(
    [("schedule", "norms_before", "dtype")],
    graph=GRAPHS,
    schedule=("row_split", "auto"),
    norms_before=(False, True),
    dtype=(torch.float32, torch.bfloat16),
)
def test_outputs_and_gradients(graph, schedule, norms_before, dtype, monkeypatch):
    """In the second call as in the first, whether forward finds the norms or a kernel gives them before."""
    if norms_before:
        monkeypatch.setattr(row_split, "_NORM_NUMBERS", 0)
    conv, oracle = build()
    conv = conv.to(dtype)
    # The graph of a tensor is kept with its kernels.
    x, edge_index = torch.randn(graph.num_src, FEATURES).to(dtype), graph.edge_index.clone()
    with pyg_dfgnn.local_settings(schedule=schedule), emulated_device() as launched:
        first, _ = trained(conv, x, edge_index)
        launched.clear()
        again, (kind, behind) = trained(conv, x, edge_index)
        with torch.no_grad():
            alone = conv(x, edge_index)
    expected, _ = trained(oracle, x.double(), edge_index)
    assert_all_close({name: (again[name], expected[name]) for name in expected})
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    assert torch.equal(alone, first["out"]) and alone.is_contiguous()
    assert kind == "FusedBackward"
    assert behind <= {"AccumulateGrad"} | ({"ToCopyBackward0"} if dtype is torch.bfloat16 else set())
    if schedule == "row_split":
        assert launched.count("attention_inverse_norm") == (2 if norms_before else 0)


def test_features_that_lie_apart_or_askew():
    conv, _ = build()
    graph = GRAPHS[0]
    wide = torch.randn(graph.num_src, 2 * FEATURES + 1)
    features = [wide[:, 1 : FEATURES + 1], wide[:, : 2 * FEATURES : 2], wide.t().contiguous().t()[:, :FEATURES]]
    with pyg_dfgnn.local_settings(schedule="row_split"), emulated_device():
        for x in features:
            expected, _ = trained(conv, x.contiguous(), graph.edge_index)
            actual, _ = trained(conv, x, graph.edge_index)
            assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
            with torch.no_grad():
                assert torch.equal(conv(x, graph.edge_index), expected["out"])


def test_other_settings_take_other_kernels():
    conv, _ = build()
    graph = GRAPHS[0]
    x = torch.randn(graph.num_src, FEATURES)
    for schedule in ("row_split", "pmf", "row_split"):
        with pyg_dfgnn.local_settings(schedule=schedule), emulated_device() as launched, torch.no_grad():
            for _ in range(2):
                launched.clear()
                conv(x, graph.edge_index)
            assert ("attention_forward" in launched) is (schedule == "row_split")


@pytest.mark.parametrize("change", ["data", "parameter"])
def test_a_compiled_conv_reads_beta_anew(change):
    conv, _ = build()
    called = torch.compile(conv, backend="aot_eager", fullgraph=True)
    x, edge_index = torch.randn(10, FEATURES), torch.randint(10, (2, 40))
    with emulated_device():
        called(x, edge_index)
        if change == "data":
            conv.beta.data.fill_(-3.0)
        else:
            conv.beta = torch.nn.Parameter(torch.tensor([-3.0]))
        assert_close("out", called(x, edge_index), conv(x, edge_index))


def test_a_parametrised_beta():
    """It is a parameter of the module no more."""
    conv, _ = build()
    torch.nn.utils.parametrize.register_parametrization(conv, "beta", torch.nn.Softplus())
    x, edge_index = torch.randn(10, FEATURES), torch.randint(10, (2, 40))
    plain, _ = build()
    plain.beta.data.copy_(conv.beta)
    with emulated_device():
        for _ in range(2):
            assert torch.equal(conv(x, edge_index), plain(x, edge_index))
            conv(x, edge_index).sum().backward()
    assert conv.parametrizations.beta.original.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["row_split", "auto"])
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_checkpoint_of_a_first_call(graph, schedule, dtype):
    """What repeats it saves the same tensors."""
    conv, oracle = build()
    conv = conv.to(dtype)
    x, edge_index = torch.randn(graph.num_src, FEATURES).to(dtype), graph.edge_index.clone()
    with pyg_dfgnn.local_settings(schedule=schedule), emulated_device() as launched:
        call = partial(checkpoint, conv, use_reentrant=False)
        actual, _ = trained(conv, x, edge_index, call)
    assert launched
    expected, _ = trained(oracle, x.double(), edge_index)
    assert_all_close({name: (value, expected[name]) for name, value in actual.items()})
