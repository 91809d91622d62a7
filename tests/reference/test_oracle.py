"""The oracle computes blocks of rows as the whole, and its errors show what is wrong where."""

import pytest
import torch

from pyg_dfgnn.reference import oracle
from pyg_dfgnn.reference.attention import cosine_attention, gatv2_attention
from pyg_dfgnn.reference.oracle import compare, float64_reference
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import ZOO

HEADS, CHANNELS = 3, 5
ROLES = {"x_src": "src", "x_dst": "dst", "att": "param", "edge": "edge"}


def gatv2(edge_index, num_dst, inputs, keep):
    return gatv2_attention(edge_index, num_dst, **inputs, keep=keep)[0]


def cosine(edge_index, num_dst, inputs, keep):
    return cosine_attention(edge_index, num_dst, **inputs, keep=keep)[0]


def gradients(out, leaves, grad_out):
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.double())
    return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(leaves, grads)}}


def draw(graph, roles):
    rows = {"src": (graph.num_src, HEADS), "dst": (graph.num_dst, HEADS), "edge": (graph.num_edges, HEADS)}
    inputs = {name: torch.randn(*rows.get(role, (HEADS,)), CHANNELS) for name, role in roles.items()}
    return inputs, torch.randn(graph.num_dst, HEADS, CHANNELS)


@pytest.fixture
def hub():
    """A graph, what the op gives on it, and the gradient of its output."""
    graph = ZOO["hub"]()
    inputs, grad_out = draw(graph, ROLES)
    return graph, float64_reference(gatv2, ROLES, graph, inputs, grad_out), grad_out


@pytest.mark.parametrize("name", ZOO)
def test_blocks_of_rows_give_what_one_pass_gives(name):
    graph = ZOO[name]().shuffled()
    inputs, grad_out = draw(graph, ROLES)
    keep = 2.0 * torch.randint(2, (graph.num_edges, HEADS))
    bytes_of_edge = 8 * HEADS * CHANNELS
    blocks = float64_reference(gatv2, ROLES, graph, inputs, grad_out, keep, chunk_bytes=7 * bytes_of_edge)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    whole = gradients(gatv2(graph.edge_index, graph.num_dst, leaves, keep.double()), leaves, grad_out)
    assert blocks.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(blocks[name], tensor, **elementwise("float64/rounding"), msg=name)


def test_targets_that_are_rows_of_the_sources():
    graph, roles = ZOO["batch"](), {"x_src": "src", "beta": "param"}
    x, grad_out = torch.randn(graph.num_src, HEADS, CHANNELS), torch.randn(graph.num_dst, HEADS, CHANNELS)
    inputs, same = {"x_src": x, "beta": torch.ones(1)}, {"x_dst": "x_src"}
    blocks = float64_reference(cosine, roles, graph, inputs, grad_out, target_rows_of=same, chunk_bytes=2000)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    whole = gradients(cosine(graph.edge_index, graph.num_dst, leaves, None), leaves, grad_out)
    for name, tensor in whole.items():
        torch.testing.assert_close(blocks[name], tensor, **elementwise("float64/rounding"), msg=name)


def test_the_row_of_a_hub_is_compared_alone(hub, monkeypatch):
    monkeypatch.setattr(oracle, "HUB_DEGREE", 100)
    graph, expected, grad_out = hub
    actual = {name: tensor.clone() for name, tensor in expected.items()}
    actual["out"][graph.hubs["dst"][0]] *= 1.5
    errors = compare(ROLES, graph, actual, expected, grad_out)
    assert errors.worst[0] == "out[hub]" and errors.hub["grad_x_dst"] == 0.0
    assert errors.whole["out"] < errors.hub["out"]


def test_nan_is_the_worst_error(hub):
    graph, expected, grad_out = hub
    actual = {**expected, "grad_att": torch.full_like(expected["grad_att"], float("nan"))}
    assert compare(ROLES, graph, actual, expected, grad_out).worst == ("grad_att", float("inf"))


def test_a_gradient_that_cancels_is_measured_by_what_cancels():
    """Rows of one edge have the weight 1: the vector of the scores has no gradient but rounding."""
    graph = ZOO["one-loop"]()
    inputs, grad_out = draw(graph, ROLES)
    expected = float64_reference(gatv2, ROLES, graph, inputs, grad_out)
    assert not expected["grad_att"].any()
    actual = {**expected, "grad_att": torch.full_like(expected["grad_att"], 1e-7)}
    assert 0 < compare(ROLES, graph, actual, expected, grad_out).whole["grad_att"] < 1e-5


def test_wrong_shapes_are_refused(hub):
    graph, expected, grad_out = hub
    with pytest.raises(ValueError, match=r"'out' needs shape \[16, 3, 5\] \(got \[15, 3, 5\]\)"):
        compare(ROLES, graph, {**expected, "out": expected["out"][:-1]}, expected, grad_out)
