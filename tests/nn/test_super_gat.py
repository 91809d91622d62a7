"""`SuperGATConv` against PyG's: outputs, gradients, the self-supervised task, and what is left to PyG."""

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.ops import supergat_attention
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both, reasons_of
from tests.nn.parity import EDGES, FORMS, NUM_NODES, assert_parity

KINDS = {
    "MX": {},
    "SD": {"attention_type": "SD"},
    "mean": {"concat": False, "bias": False, "negative_slope": 0.4},
    "no loops": {"add_self_loops": False, "attention_type": "SD"},
    "other flow": {"flow": "target_to_source"},
}


def make(kind, library=ours, **kwargs):
    return library.SuperGATConv(3, 4, 2, **{**KINDS[kind], **kwargs})


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith(("tensor", "int32", "empty", "graph"))])
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind, form, fused_on_cpu):
    convs = [conv.eval() for conv in both("SuperGATConv", 3, 4, 2, **KINDS[kind])]
    assert_parity(convs, torch.randn(NUM_NODES, 3, dtype=torch.float64), FORMS[form]())


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_supervised_task(kind, fused_on_cpu):
    convs, x = both("SuperGATConv", 3, 4, 2, **KINDS[kind]), torch.randn(NUM_NODES, 3, dtype=torch.float64)
    negative, results = torch.tensor([[3, 4], [0, 1]]), []
    for conv in convs:
        out = conv(x, EDGES, negative)
        loss = out.sum() + conv.get_attention_loss()
        results.append([conv.att_x, conv.att_y, *torch.autograd.grad(loss, list(conv.parameters()))])
        conv(x, EDGES)
        assert conv.att_y.min() == 0 and conv.att_y.max() == 1
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@needs_compiler
@pytest.mark.parametrize("kind", ["MX", "SD"])
def test_kernels(kind, default_settings):
    own, pygs = both("SuperGATConv", 3, 4, 2, dtype=torch.float32, **KINDS[kind])
    x, results = torch.randn(NUM_NODES, 3), []
    for conv, dtype in ((own.eval(), torch.float32), (pygs.eval().double(), torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
            out = conv(leaf, EDGES)
            grads = torch.autograd.grad(out.square().sum(), [leaf, *conv.parameters()])
        assert ("attention_backward_sources" in launched) == (conv is own)
        results.append({"out": out.detach(), **{f"grad {i}": grad for i, grad in enumerate(grads)}})
    assert_all_close({name: (value, results[1][name]) for name, value in results[0].items()})


@needs_compiler
@pytest.mark.parametrize("kind", ["MX", "SD"])
def test_compiles_without_a_break(kind):
    conv, x = make(kind).eval(), torch.randn(NUM_NODES, 3)
    torch._dynamo.reset()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    with emulated_device() as launched:
        torch.testing.assert_close(compiled(x, EDGES), conv(x, EDGES))
    assert launched.count("attention_forward") == 2


class OwnAttention(ours.SuperGATConv):
    def get_attention(self, *args, **kwargs):
        return super().get_attention(*args, **kwargs)


def test_what_is_left_to_pyg(fused_on_cpu):
    x = torch.randn(NUM_NODES, 3)
    assert reasons_of(OwnAttention(3, 4), x, EDGES) == ["'get_attention' is overridden"]
    assert "edge_index is a EdgeIndex" in reasons_of(make("MX"), x, FORMS["edge_index"]())
    assert reasons_of(make("MX", aggr="max"), x, EDGES) == ["aggr is 'max', fused is sum"]


def test_accelerate_swaps_it():
    model = make("MX", pyg)
    pyg_dfgnn.accelerate(model)
    assert type(model) is ours.SuperGATConv


def test_terms_come_together():
    graph, x = pyg_dfgnn.Graph.of(EDGES, NUM_NODES), torch.randn(NUM_NODES, 2, 4)
    with pytest.raises(ValueError, match=r"'alpha_dst' needs a tensor next to 'alpha_src' \(got None\)"):
        supergat_attention(graph, x, x, torch.ones(NUM_NODES, 2))
