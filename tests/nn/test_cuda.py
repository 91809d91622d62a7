"""The drop-ins with their kernels on a GPU, against PyG's convs in float64 on the same device."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import elementwise

pytestmark = pytest.mark.cuda

FEATURES, EDGE_DIM = 24, 5
CONVS = {
    "gat": ("GATConv", (FEATURES, 16), {"heads": 3, "edge_dim": EDGE_DIM, "residual": True}),
    "gat_mean": ("GATConv", (FEATURES, 7), {"heads": 2, "concat": False}),
    "gat_reversed": ("GATConv", (FEATURES, 8), {"flow": "target_to_source"}),
    "gatv2": ("GATv2Conv", (FEATURES, 16), {"heads": 3, "edge_dim": EDGE_DIM}),
    "gatv2_shared": ("GATv2Conv", (FEATURES, 9), {"share_weights": True, "add_self_loops": False}),
    "transformer": ("TransformerConv", (FEATURES, 16), {"heads": 3, "edge_dim": EDGE_DIM, "beta": True}),
    "transformer_mean": ("TransformerConv", (FEATURES, 5), {"heads": 4, "concat": False}),
    "agnn": ("AGNNConv", (), {}),
    "supergat": ("SuperGATConv", (FEATURES, 16), {"heads": 3}),
    "supergat_sd": ("SuperGATConv", (FEATURES, 9), {"heads": 2, "attention_type": "SD", "concat": False}),
    "gcn": ("GCNConv", (FEATURES, 16), {}),
    "gcn_weighted": ("GCNConv", (FEATURES, 33), {"improved": True}),
    "gcn_mean": ("GCNConv", (FEATURES, 16), {"aggr": "mean", "flow": "target_to_source"}),
    "sage": ("SAGEConv", (FEATURES, 16), {}),
    "sage_several": ("SAGEConv", (FEATURES, 16), {"aggr": ["sum", "mean", "max"]}),
    "graph_weighted": ("GraphConv", (FEATURES, 16), {"aggr": "max"}),
    "gin": ("GINConv", (torch.nn.Linear(FEATURES, 16),), {"train_eps": True}),
    "gine": ("GINEConv", (torch.nn.Linear(FEATURES, 16),), {"edge_dim": EDGE_DIM}),
    "gine_max": ("GINEConv", (torch.nn.Linear(FEATURES, 16),), {"edge_dim": EDGE_DIM, "aggr": "max"}),
    "gated": ("ResGatedGraphConv", (FEATURES, 16), {}),
    "sg": ("SGConv", (FEATURES, 16), {"K": 2}),
    "ssg": ("SSGConv", (FEATURES, 16, 0.1), {"K": 2}),
    "tag_weighted": ("TAGConv", (FEATURES, 16), {}),
    "cheb": ("ChebConv", (FEATURES, 16, 3), {}),
    "arma_weighted": ("ARMAConv", (FEATURES, 16), {"num_stacks": 2, "num_layers": 2}),
    "cluster_gcn": ("ClusterGCNConv", (FEATURES, 16), {"diag_lambda": 0.5}),
}
ATTENTION = [key for key, (name, _, _) in CONVS.items() if name in ("GATConv", "GATv2Conv", "TransformerConv")]


@pytest.fixture
def graph():
    """200 nodes, a hub, duplicates, self-loops, targets without edges."""
    edge_index = torch.randint(150, (2, 3000), device="cuda")
    edge_index[1, :1200] = 3
    return torch.randn(200, FEATURES, device="cuda"), edge_index


def arguments(key, edge_index):
    if key.endswith("weighted"):
        return (torch.rand(edge_index.size(1), device="cuda") + 0.5,)
    return (torch.randn(edge_index.size(1), EDGE_DIM, device="cuda"),) if "edge_dim" in CONVS[key][2] else ()


def build(key, dtype=torch.float32, std=0.5):
    name, args, kwargs = copy.deepcopy(CONVS[key])
    conv = getattr(ours, name)(*args, **kwargs).cuda()
    for parameter in conv.parameters():
        parameter.data.normal_(std=std)
    other = getattr(pyg, name)(*copy.deepcopy(args), **kwargs).cuda().to(dtype)
    other.load_state_dict(conv.state_dict())
    return conv, other


def relative(actual, expected, floor=1e-12):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=floor)).item()


@pytest.mark.parametrize("key", CONVS)
def test_outputs_and_gradients(key, graph):
    check_against_float64(key, *graph)


@pytest.mark.parametrize("edges", [600, 60_000])
@pytest.mark.parametrize("key", ["gcn", "sg", "ssg"])
def test_self_loops_that_no_array_holds(key, edges):
    """No edge is one; a row of the larger graph is taken in chunks that a launch of their own merges."""
    edge_index = torch.randint(150, (2, edges), device="cuda")
    edge_index[1, : edges // 2] = 3
    edge_index = edge_index[:, edge_index[0] != edge_index[1]].contiguous()
    check_against_float64(key, torch.randn(200, FEATURES, device="cuda"), edge_index)


def check_against_float64(key, x, edge_index):
    # Smaller weights for TransformerConv: with 0.5 the softmax puts a row on few edges, and the rounding left in the
    # key's bias (see below) comes to the bound in PyG's float32 too; with 0.2 it is below a third of it.
    conv, oracle = build(key, torch.float64, std=0.2 if key.startswith("transformer") else 0.5)
    rest = arguments(key, edge_index)
    results = []
    for module, dtype in ((conv, torch.float32), (oracle, torch.float64)):
        leaves = [value.detach().to(dtype).requires_grad_() for value in (x, *rest)]
        if module is conv:
            assert pyg_dfgnn.describe_plan(conv, leaves[0], edge_index, *leaves[1:]).fused
        out = module(leaves[0], edge_index, *leaves[1:])
        torch.manual_seed(1)
        (out * torch.randn(out.shape, device="cuda").to(dtype)).sum().backward()
        grads = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
        results.append({"out": out.detach(), **grads, **{n: p.grad for n, p in module.named_parameters()}})
    # Softmax does not see the key's bias: its gradient is 0, so an error counts against the size of the others.
    floor = 1e-2 * max(expected.norm().item() for expected in results[1].values())
    for name, expected in results[1].items():
        assert relative(results[0][name], expected, floor) < 1e-5, name


@pytest.mark.parametrize("key", ATTENTION)
def test_attention_weights(key, graph):
    x, edge_index = graph
    conv, other = build(key)
    rest = arguments(key, edge_index)
    with torch.no_grad():
        assert pyg_dfgnn.describe_plan(conv, x, edge_index, *rest, return_attention_weights=True).fused
        out, (edges, weights) = conv(x, edge_index, *rest, return_attention_weights=True)
        expected, (expected_edges, expected_weights) = other(x, edge_index, *rest, return_attention_weights=True)
    assert torch.equal(edges, expected_edges)
    torch.testing.assert_close(weights, expected_weights, **elementwise("float32"))
    torch.testing.assert_close(out, expected, **elementwise("float32/gradients"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", CONVS)
def test_autocast_gives_the_dtype_of_pyg(key, dtype, graph):
    x, edge_index = graph
    conv, other = build(key)
    rest = arguments(key, edge_index)
    with torch.autocast("cuda", dtype=dtype):
        assert pyg_dfgnn.describe_plan(conv, x, edge_index, *rest).fused
        out, expected = conv(x, edge_index, *rest), other(x, edge_index, *rest)
    assert out.dtype == expected.dtype
    # PyG's own sums of many 16-bit numbers may be further off than ours.
    assert relative(out, other(x, edge_index, *rest)) < 2e-2
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in conv.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", CONVS)
def test_half_modules(key, dtype, graph):
    x, edge_index = graph
    conv, oracle = build(key, torch.float64)
    conv = conv.to(dtype)
    oracle.load_state_dict(conv.state_dict())
    x, rest = x.to(dtype), [value.to(dtype) for value in arguments(key, edge_index)]
    out = conv(x, edge_index, *rest)
    assert out.dtype == dtype
    assert relative(out, oracle(x.double(), edge_index, *(value.double() for value in rest))) < 3e-2


@pytest.mark.parametrize(
    "key", ["gat_mean", "gatv2_shared", "transformer", "agnn", "gcn", "sage_several", "gine", "gated"]
)
def test_compile(key, graph):
    x, edge_index = graph
    conv, _ = build(key)
    rest = arguments(key, edge_index)
    compiled = torch.compile(copy.deepcopy(conv), backend="aot_eager", fullgraph=True)
    grads = []
    for function in (conv, compiled):
        leaf = x.clone().requires_grad_()
        out = function(leaf, edge_index, *rest)
        out.square().sum().backward()
        grads.append((out.detach(), leaf.grad))
    assert all(relative(actual, expected) < 1e-5 for actual, expected in zip(grads[1], grads[0], strict=True))


# PyG's Laplacian removes self-loops by a mask, whose count the host waits for.
@pytest.mark.parametrize("key", [key for key in CONVS if key != "cheb"])
def test_a_cached_call_never_waits_for_the_device(key, graph):
    x, edge_index = graph
    conv, _ = build(key)
    if "supergat" in key:
        # In training it samples edges by PyG's functions, which wait.
        conv.eval()
    rest = arguments(key, edge_index)

    def step():
        conv(x, edge_index, *rest).square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dropout_follows_the_generator(graph):
    x, edge_index = graph
    conv = ours.GATConv(FEATURES, 8, heads=2, dropout=0.5).cuda()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(conv(x, edge_index))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_reasons(graph):
    x, edge_index = graph
    conv = ours.GATConv(FEATURES, 8).cuda().double()
    assert any("float64" in reason for reason in pyg_dfgnn.describe_plan(conv, x.double(), edge_index).reasons)
    conv = conv.float()
    assert any("edge_index is on cpu" in r for r in pyg_dfgnn.describe_plan(conv, x, edge_index.cpu()).reasons)


@pytest.mark.parametrize("key", CONVS)
def test_wrong_node_ids_leave_the_context_usable(key, graph):
    x, edge_index = graph
    conv, _ = build(key)
    rest = arguments(key, edge_index)
    for bad in (-1, x.size(0)):
        wrong = edge_index.clone()
        wrong[0, 5] = bad
        with pytest.raises(IndexError, match="edge_index"):
            conv(x, wrong, *rest)
    assert conv(x, edge_index, *rest).isfinite().all()
