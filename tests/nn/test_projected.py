"""Attention among projections that lie side by side: the same numbers as PyG's conv gives in float64, in one node."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import plan_pass
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.reference.zoo import hub, random
from tests.covering import over
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both
from tests.nn.test_autocast import names_of

CONVS = {
    "transformer": ("TransformerConv", {"heads": 2}),
    "transformer_alone": ("TransformerConv", {"heads": 3, "root_weight": False, "bias": False}),
    "transformer_beta": ("TransformerConv", {"heads": 2, "beta": True}),
    "transformer_narrow": ("TransformerConv", {"heads": 8}),
    "transformer_narrow_alone": ("TransformerConv", {"heads": 8, "root_weight": False}),
    "transformer_mean": ("TransformerConv", {"heads": 2, "concat": False}),
    "gatv2": ("GATv2Conv", {"heads": 2, "residual": True}),
    "gatv2_mean": ("GATv2Conv", {"heads": 3, "concat": False, "add_self_loops": False}),
}
FEATURES = 6


@pytest.fixture(autouse=True)
def rows():
    """Small graphs would take another schedule, which reads one projection after the other."""
    with pyg_dfgnn.settings(schedule="row_split"):
        yield


def build(key, channels=4):
    name, options = CONVS[key]
    conv, oracle = both(name, FEATURES, channels, dtype=torch.float32, std=0.3, **options)
    return conv, oracle.double()


def trained(conv, x, edge_index):
    """Output and gradients, and the node of autograd of the attention."""
    x = x.clone().requires_grad_()
    out = conv(x, edge_index)
    names = names_of(out)
    torch.manual_seed(1)
    (out * torch.randn(out.shape).to(out.dtype)).sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}, names


def compare(found, expected):
    # Softmax does not see the key's bias: its gradient is 0.
    for each in (found, expected):
        bias = each.pop("lin_key.bias", None)
        assert bias is None or bias.norm() < 1e-5 * each["lin_value.bias"].norm()
    assert_all_close({name: (found[name], expected[name]) for name in expected})


@over(key=tuple(CONVS), graph=(random(30, 30, 140), hub(700)))
def test_outputs_and_gradients(key, graph):
    conv, oracle = build(key)
    x = torch.randn(graph.num_src, FEATURES)
    with emulated_device():
        found, nodes = trained(conv, x, graph.edge_index)
    assert "_ProjectedAttentionBackward" in nodes and "FusedBackward" not in nodes
    expected = trained(oracle, x.double(), graph.edge_index)[0]
    assert found.keys() == expected.keys()
    compare(found, expected)
    with emulated_device(), torch.no_grad():
        assert torch.equal(conv(x, graph.edge_index), found["out"])


def test_every_graph(case):
    conv, oracle = build("transformer", channels=8)
    if case.num_src != case.num_dst or not case.num_src:
        pytest.skip("projections of two node sets, or of none, lie apart")
    x = torch.randn(case.num_src, FEATURES)
    with emulated_device():
        found, nodes = trained(conv, x, case.edge_index)
    assert "_ProjectedAttentionBackward" in nodes
    expected = trained(oracle, x.double(), case.edge_index)[0]
    if case.edge_index.size(1):
        compare(found, expected)
    else:
        assert all(torch.allclose(found[name].double(), expected[name], atol=1e-5) for name in expected)


@pytest.mark.parametrize("key", ["transformer_narrow", "transformer_narrow_alone"])
def test_half_of_the_heads_in_a_warp(key):
    """Three or four projections side by side, of which a thread block reads four heads."""
    node = torch.arange(1, 150)
    edge_index = torch.stack([torch.cat([node, 0 * node]), torch.cat([0 * node, node])])
    problem = AttentionProblem("dot", 8, 16, torch.float32, torch.device("cpu"), False, False)
    planned = plan_pass(problem, "forward", Graph.of(edge_index, 160)).constants
    assert planned["JOINED"] and planned["HEAD_SLOTS"] == 4
    conv, oracle = build(key, channels=16)
    x = torch.randn(160, FEATURES)
    with emulated_device():
        found, nodes = trained(conv, x, edge_index)
    assert "_ProjectedAttentionBackward" in nodes
    compare(found, trained(oracle, x.double(), edge_index)[0])


def test_16_bits():
    conv, _ = build("transformer", channels=8)
    conv = conv.to(torch.bfloat16)
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES).to(torch.bfloat16)
    with emulated_device():
        found, nodes = trained(conv, x, graph.edge_index)
        products_apart = copy.deepcopy(conv)
        products_apart.lin_query.register_forward_hook(lambda *_: None)
        apart, others = trained(products_apart, x, graph.edge_index)
    assert "_ProjectedAttentionBackward" in nodes and "FusedBackward" in others
    for name in ("out", "lin_value.weight", "lin_query.weight"):
        assert (found[name] - apart[name]).norm() <= 2e-2 * apart[name].norm()


def test_dropout_draws_what_it_draws_apart():
    conv, _ = build("transformer_alone")
    conv.dropout = 0.4
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    apart = copy.deepcopy(conv)
    apart.lin_query.register_forward_hook(lambda *_: None)
    results = []
    for each in (conv, apart):
        torch.manual_seed(3)
        with emulated_device():
            results.append(trained(each, x, graph.edge_index)[0])
    assert_all_close({name: (results[0][name], results[1][name].double()) for name in results[0]})


@pytest.mark.parametrize("key", ["transformer_alone", "gatv2"])
def test_what_lies_apart(key, monkeypatch):
    """Many rows, other schedules, layers that are watched."""
    conv, _ = build(key)
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)

    def nodes():
        with emulated_device():
            return trained(conv, x, graph.edge_index)[1]

    assert "_ProjectedAttentionBackward" in nodes()
    with monkeypatch.context() as patched:
        patched.setattr(gemm, "MAX_ROWS", 29)
        assert "_ProjectedAttentionBackward" not in nodes()
    if key != "gatv2":
        # The paper's schedules have no kernel of GATv2: `row_split` would take their place.
        with pyg_dfgnn.settings(schedule="smmf"):
            assert "_ProjectedAttentionBackward" not in nodes()
    handle = (conv.lin_key if key != "gatv2" else conv.lin_r).register_forward_hook(lambda *_: None)
    assert "_ProjectedAttentionBackward" not in nodes()
    handle.remove()
    assert "_ProjectedAttentionBackward" in nodes()


def test_gradients_that_are_not_wanted():
    conv, oracle = build("transformer")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    for each in (conv, oracle):
        each.lin_query.weight.requires_grad_(False)
        for layer in (each.lin_query, each.lin_key, each.lin_value, each.lin_skip):
            layer.bias.requires_grad_(False)
    with emulated_device():
        conv(x, graph.edge_index).square().sum().backward()
    oracle(x.double(), graph.edge_index).square().sum().backward()
    wanted = {name: p.grad for name, p in oracle.named_parameters() if p.requires_grad}
    found = dict(conv.named_parameters())
    assert all(found[name].grad is None for name in found if name not in wanted)
    assert_all_close({name: (found[name].grad, wanted[name]) for name in wanted})


def test_the_output_may_be_edited_and_the_graph_traversed_twice():
    conv, _ = build("transformer_alone")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    gradients = []
    for edit in (lambda out: out.mul_(2), lambda out: out.mul(2)):
        leaf = x.clone().requires_grad_()
        with emulated_device():
            loss = edit(conv(leaf, graph.edge_index)).sin().sum()
            (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            (again,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(first, again)
        gradients.append(first)
    assert torch.equal(*gradients)


def test_an_edited_input_is_noticed():
    conv, _ = build("transformer_alone")
    x = torch.randn(30, FEATURES)
    with emulated_device():
        out = conv(x, random(30, 30, 140).edge_index)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_vector_that_lies_elsewhere():
    """Transposed, and at an odd address."""
    conv, oracle = build("gatv2")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    expected = trained(oracle, x.double(), graph.edge_index)[0]
    for laid_out in (
        conv.att.detach().mT.contiguous().mT,
        torch.cat([conv.att.new_zeros(1), conv.att.detach().flatten()]),
    ):
        moved = copy.deepcopy(conv)
        moved.att = torch.nn.Parameter(laid_out if laid_out.dim() == 3 else laid_out[1:].view_as(conv.att))
        with emulated_device() as launched:
            found, nodes = trained(moved, x, graph.edge_index)
        assert "_ProjectedAttentionBackward" in nodes and launched
        compare(found, expected)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 4, 2), (2, 2, 4)])
def test_a_vector_that_does_not_fit_is_refused(shape):
    conv, _ = build("gatv2_mean" if shape[0] == 2 else "gatv2")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    with emulated_device():
        conv(x, graph.edge_index)
        conv.att = torch.nn.Parameter(torch.randn(shape))
        with pytest.raises(ValueError, match="'att'"):
            conv(x, graph.edge_index)


def test_layers_of_another_width_or_type():
    """What cannot be one product with whole heads is left to the layers one by one."""
    conv, _ = build("transformer_alone")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)
    conv.lin_key.to(torch.bfloat16)
    with emulated_device(), pytest.raises(RuntimeError, match="dtype"):
        conv(x, graph.edge_index)
    conv, _ = build("transformer_alone")
    for layer in (conv.lin_query, conv.lin_key, conv.lin_value):
        layer.weight = torch.nn.Parameter(torch.randn(13, FEATURES))
        layer.bias = torch.nn.Parameter(torch.randn(13))
    with emulated_device(), pytest.raises(RuntimeError, match="shape"):
        conv(x, graph.edge_index)


def test_saved_tensors_that_come_back_elsewhere():
    conv, oracle = build("transformer")
    graph, x = random(30, 30, 140), torch.randn(30, FEATURES)

    def unpack(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    with emulated_device(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        found, nodes = trained(conv, x, graph.edge_index)
    assert "_ProjectedAttentionBackward" in nodes
    compare(found, trained(oracle, x.double(), graph.edge_index)[0])


def test_a_wrong_probability_is_refused():
    conv, _ = build("transformer_alone")
    conv.dropout = 1.5
    with emulated_device(), pytest.raises(ValueError, match="dropout_p"):
        conv(torch.randn(30, FEATURES), random(30, 30, 140).edge_index)


@pytest.mark.parametrize(
    "name, options", [("GATConv", {}), ("GATv2Conv", {}), ("GATv2Conv", {"share_weights": True})], ids=str
)
@pytest.mark.parametrize("bipartite", [False, True])
def test_layers_of_many_rows(name, options, bipartite, monkeypatch):
    """They go to the kernel of products, which takes features and channels in multiples of four."""
    monkeypatch.setattr(gemm, "MAX_ROWS", 9)
    conv = getattr(ours, name)((8, 8) if bipartite else 8, 4, heads=2, add_self_loops=False, **options)
    oracle = getattr(pyg, name)((8, 8) if bipartite else 8, 4, heads=2, add_self_loops=False, **options)
    oracle.load_state_dict(conv.state_dict())
    graph = random(30, 30, 140)
    results, taken = [], []
    for each, dtype in ((conv, torch.float32), (oracle.double(), torch.float64)):
        torch.manual_seed(0)
        leaves = [torch.randn(30, 8).to(dtype).requires_grad_() for _ in range(1 + bipartite)]
        with emulated_device() as launched:
            out = each(tuple(leaves) if bipartite else leaves[0], graph.edge_index)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)).sum().backward()
        taken.append({name for name in launched if name.startswith("gemm")})
        grads = {n: p.grad for n, p in each.named_parameters()}
        results.append({"out": out.detach(), **{f"x{i}": leaf.grad for i, leaf in enumerate(leaves)}, **grads})
    assert taken == [{"gemm_forward", "gemm_backward"}, set()]
    compare(*results)
