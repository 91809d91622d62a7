"""The convs that aggregate without attention on emulated kernels, against PyG's in float64, and all that is around."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.aggr import StdAggregation

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn import Graph, describe_plan
from pyg_dfgnn.dispatch.segment import max_channels
from pyg_dfgnn.graph import RefilledGraph
from pyg_dfgnn.nn import gate
from pyg_dfgnn.ops import segment
from pyg_dfgnn.ops.graph import refill
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise, relative_error, tolerance
from pyg_dfgnn.reference.zoo import edges, hub, random
from tests.covering import extended, over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import (
    AGGREGATION,
    EDGES,
    FEATURES,
    LOOPED,
    NORMALIZED,
    NUM_NODES,
    PAIRS,
    arguments,
    both,
    make,
    reasons_of,
    rest_of,
)
from tests.nn.test_drop_in import HETERO_EDGES, HETERO_X

pytestmark = needs_compiler

WEIGHTED = [*NORMALIZED, "GraphConv"]
WIDTH = 8
GRAPHS = {
    # Isolated nodes, duplicates, own self-loops; a hub; one node; no edge.
    "repeated": edges("repeated", [(0, 1), (0, 1), (1, 0), (2, 2), (2, 3), (4, 1), (0, 3), (6, 6)], 7),
    "hub": hub(70),
    "random": random(33, 33, 140),
    "one_node": edges("one_node", [(0, 0)], 1),
    "no_edges": edges("no_edges", [], 5),
}
CASES = [
    *((name, {}) for name in AGGREGATION),
    ("GCNConv", {"cached": True}),
    ("GCNConv", {"aggr": "mean"}),
    ("GCNConv", {"aggr": "max"}),
    ("GCNConv", {"flow": "target_to_source"}),
    ("ChebConv", {"normalization": "rw"}),
    ("GraphConv", {"aggr": "mean"}),
    ("GraphConv", {"aggr": "max"}),
    ("SAGEConv", {"aggr": "max"}),
    ("SAGEConv", {"aggr": ["mean", "max", "std"]}),
    ("SAGEConv", {"project": True}),
    ("GINEConv", {"edge_dim": WIDTH}),
    ("GINEConv", {"aggr": "max"}),
    ("ResGatedGraphConv", {"aggr": "mean"}),
    ("ARMAConv", {"num_stacks": 2, "num_layers": 3}),
    ("ClusterGCNConv", {"diag_lambda": 0.5}),
]


def call(conv, x, before, edge_index, after):
    """The output and all gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *before, *after)]
    count = 1 + len(before)
    out = conv(*leaves[:count], edge_index, *leaves[count:])
    torch.manual_seed(1)
    grad = torch.randn(out.shape)
    named = {f"grad of input {place}": leaf for place, leaf in enumerate(leaves)}
    named |= {f"grad of {name}": parameter for name, parameter in conv.named_parameters()}
    grads = torch.autograd.grad(out, list(named.values()), grad.to(out.dtype), allow_unused=True)
    results = {"out": out.detach(), **dict(zip(named, grads, strict=True))}
    return {name: value for name, value in results.items() if value is not None}


def assert_close(actual, expected, dtype=torch.float32):
    """No tensor is further from float64 than the bound, measured by the largest of all gradients."""
    for name, want in expected.items():
        direction = "forward" if name == "out" else "backward"
        difference = (actual[name].double() - want).norm().item() if name in actual else want.norm().item()
        size = max(t.norm().item() for n, t in expected.items() if (n == "out") == (name == "out"))
        assert difference <= tolerance(dtype, direction, "segment").relative * (size or 1.0), (name, difference, size)


def takes_weights(row):
    """Some convs take no edge weights, some would keep their gradients."""
    name, options = row["layer"]
    return not row["weighted"] or (name in WEIGHTED and not options.get("cached"))


@over([("layer", "weighted")], takes_weights, layer=CASES, graph=tuple(GRAPHS), weighted=(False, True))
def test_outputs_and_gradients(layer, graph, weighted):
    (name, options), case = layer, GRAPHS[graph]
    conv, other = both(name, *arguments_of(name), dtype=torch.float32, **options)
    x = torch.randn(case.num_src, WIDTH)
    before, after = rest_of(name, x, case.num_edges)
    after = (torch.rand(case.num_edges) + 0.5,) if weighted else after
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = [call(conv, x, before, case.edge_index, after) for _ in range(2)]
    if case.num_edges or name in LOOPED or name == "ChebConv":
        assert {"segment_forward", "segment_backward_sources"} <= set(launched)
    wide = [tuple(tensor.double() for tensor in tensors) for tensors in (before, after)]
    expected = call(other.double(), x.double(), wide[0], case.edge_index, wide[1])
    for results in actual:
        assert_close(results, expected)


def arguments_of(name):
    return arguments(name, WIDTH, WIDTH)


@over(name=tuple(AGGREGATION), dtype=(torch.bfloat16, torch.float16))
def test_sixteen_bits(name, dtype):
    case = GRAPHS["random"]
    conv, other = both(name, *arguments_of(name), dtype=dtype)
    x = torch.randn(case.num_src, WIDTH).to(dtype)
    before, after = rest_of(name, x, case.num_edges)
    with emulated_device() as launched:
        out = conv(x, *before, case.edge_index, *after)
    assert launched and out.dtype == dtype
    wide = [tuple(tensor.double() for tensor in tensors) for tensors in (before, after)]
    expected = other.double()(x.double(), *wide[0], case.edge_index, *wide[1])
    # Each layer or hop rounds to 16 bits, too.
    assert relative_error(out, expected) < 3 * tolerance(dtype, "forward", "segment").relative


@pytest.mark.parametrize("name", AGGREGATION)
def test_nothing_is_built_again(name, monkeypatch):
    """A second call makes no graph, sorts nothing and derives nothing; an edit of the edges is noticed."""
    conv, other = both(name, dtype=torch.float32)
    x, edge_index = torch.randn(NUM_NODES, FEATURES), EDGES.clone()
    before, after = rest_of(name, x, EDGES.size(1))
    with emulated_device():
        call(conv, x, before, edge_index, after)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "sort", None)
            patch.setattr(torch.Tensor, "diff", None)
            patch.setattr(Graph, "__init__", None)
            call(conv, x, before, edge_index, after)
        edge_index[:, 0] = edge_index[:, 5]
        torch.testing.assert_close(
            conv(x, *before, edge_index, *after), other(x, *before, edge_index, *after), **elementwise("float32")
        )


@pytest.mark.parametrize("name", AGGREGATION)
def test_no_weight_of_an_edge_is_made_without_edge_weights(name, monkeypatch):
    monkeypatch.setattr("pyg_dfgnn.nn.conv.normalized.gcn_norm", None)
    monkeypatch.setattr(ours.ChebConv, "__norm__", None)
    x = torch.randn(NUM_NODES, FEATURES)
    before, after = rest_of(name, x, EDGES.size(1))
    with emulated_device() as launched:
        make(name)(x, *before, EDGES, *after)
    assert launched


@pytest.mark.parametrize("name", ["GCNConv", "SGConv", "APPNP"])
def test_self_loops_are_stored_only_where_the_edges_have_some(name):
    conv, other = both(name, dtype=torch.float32)
    x = torch.randn(6, FEATURES)
    for loops in ([], [(2, 2)]):
        edge_index = torch.tensor([(0, 1), (1, 0), (5, 3), (3, 5), *loops]).t().contiguous()
        with emulated_device() as launched:
            description = describe_plan(conv, x, edge_index)
            out = conv(x, edge_index)
        assert launched and any(graph.self_loops for graph in Graph.cached_of(edge_index)) == bool(loops)
        assert description.problem.self_loops == (not loops)
        assert description.graph == f"6 sources, 6 targets, {10 if loops else 4} edges"
        torch.testing.assert_close(out, other(x, edge_index), **elementwise("float32/one_formula"))


@pytest.mark.parametrize("case", ["edges", "loops", "scaled"])
def test_describe_plan_of_a_laplacian(case):
    conv, x = make("ChebConv"), torch.randn(6, FEATURES)
    edge_index = torch.tensor([(0, 1), (1, 0), (5, 3), *[(2, 2)] * (case == "loops")]).t().contiguous()
    lambda_max = torch.tensor(3.0) if case == "scaled" else None
    with emulated_device():
        description = describe_plan(conv, x, edge_index, lambda_max=lambda_max)
    problem = description.problem
    by_node = case == "edges"
    assert (problem.message, problem.source_scaled) == ("copy" if by_node else "weight", by_node)
    assert description.graph == f"6 sources, 6 targets, {3 if by_node else 9} edges"


def test_describe_plan_of_cached_edges():
    conv, x = make("GCNConv", cached=True), torch.randn(6, FEATURES)
    first, second = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1, 2], [1, 0, 3]])
    with emulated_device():
        assert "8 edges" in describe_plan(conv, x, first).graph and conv._cached_edge_index is None
        conv(x, first, torch.ones(2))
        description = describe_plan(conv, x, second)
    assert "8 edges" in description.graph and description.problem.message == "weight"


def test_describe_plan_of_wide_features():
    """Of one launch: features that are one too many are cut in two."""
    width = max_channels(("mean",)) + 1
    with emulated_device():
        problem = describe_plan(make("SAGEConv"), torch.randn(6, width), torch.tensor([[0], [1]])).problem
    assert problem.channels == -(-width // 2)


@pytest.mark.parametrize("form", ["tensor", "sparse"])
def test_laplacian_of_a_graph_whose_loops_lie_between_its_edges(form):
    conv, other = both("ChebConv", dtype=torch.float32)
    edge_index, x = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randn(4, FEATURES)
    edges = (
        torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(4), (4, 4)).coalesce()
        if form == "sparse"
        else edge_index
    )
    graph = Graph.of(edges, 4, self_loops=True)
    with emulated_device() as launched:
        out = conv(x, graph)
    assert launched
    torch.testing.assert_close(out, other(x, graph.edge_index), **elementwise("float32/one_formula"))


def test_laplacian_of_edges_that_change_is_refused():
    room = torch.zeros(2, 30, dtype=torch.int64)
    graph = RefilledGraph(room, torch.zeros(2, dtype=torch.int64), 20, False, False, refill)
    graph.register()
    need = "'edge_index' needs edges that stay as they are, .* [(]got those of batches in a captured step"
    with emulated_device(), pytest.raises(ValueError, match=need):
        make("ChebConv")(torch.randn(20, FEATURES), room)


@pytest.mark.parametrize("change", ["edited", "no longer asked for"])
def test_what_is_done_to_a_cache_is_seen(change):
    conv, other = both("GCNConv", dtype=torch.float32, cached=True)
    edge_index, x = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.randn(3, FEATURES)
    results = []
    with emulated_device():
        for each in (conv, other):
            each(x, edge_index)
            if change == "edited":
                each._cached_edge_index[1].mul_(2)
            else:
                each.cached = False
            results.append(each(x, edge_index.flip(0)[:, :2]))
    torch.testing.assert_close(*results, **elementwise("float32/one_formula"))


@pytest.mark.parametrize("name, options", [("GCNConv", {}), ("GATConv", {}), ("SAGEConv", {"aggr": ["sum", "max"]})])
def test_hooks_of_the_aggregation_take_pygs_path(name, options):
    conv, other = both(name, dtype=torch.float32, **options)
    x = torch.randn(NUM_NODES, FEATURES)
    for each in (conv, other):
        *_, innermost = each.aggr_module.modules()
        innermost.register_forward_hook(lambda module, inputs, out: 2 * out)
    with emulated_device() as launched:
        out = conv(x, EDGES)
    assert not launched
    torch.testing.assert_close(out, other(x, EDGES), **elementwise("float32/one_formula"))
    assert "the aggregation module has hooks" in reasons_of(conv, x, EDGES)


# One of each kind: self-loops, weights, no weights, features of edges, gates, the Laplacian.
KINDS = ("GCNConv", "GraphConv", "SAGEConv", "GINEConv", "ResGatedGraphConv", "ChebConv")
COMPILED = {"name": extended(KINDS, sorted({*AGGREGATION} - {*KINDS})), "weighted": (False, True)}


@pytest.mark.filterwarnings("error:Dynamo detected")
@over([("name", "weighted")], lambda row: not row["weighted"] or row["name"] in WEIGHTED, **COMPILED)
def test_compile(name, weighted):
    """Fused, but for weights of edges with self-loops and for the Laplacian, which take PyG's path."""
    conv = make(name)
    x = torch.randn(NUM_NODES, FEATURES)
    before, after = rest_of(name, x, EDGES.size(1))
    after = (torch.rand(EDGES.size(1)) + 0.5,) if weighted else after
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    expected = call(conv, x, before, EDGES, after)
    with emulated_device() as launched:
        actual = call(compiled, x, before, EDGES, after)
    assert bool(launched) is not (name == "ChebConv" or (weighted and name in LOOPED))
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key.replace("grad of ", "grad of _orig_mod.") if key not in actual else key],
            value,
            **elementwise("float32"),
        )


@pytest.mark.parametrize("aggr", ["mean", ["sum", "max"]])
def test_compile_of_several_statistics(aggr):
    conv, x = make("SAGEConv", aggr=aggr), torch.randn(NUM_NODES, FEATURES)
    with emulated_device() as launched:
        out = torch.compile(conv, backend="aot_eager", fullgraph=True)(x, EDGES)
    assert launched
    torch.testing.assert_close(out, conv(x, EDGES), **elementwise("float32"))


def test_compile_of_a_model_whose_aggregations_nobody_has_called(monkeypatch):
    """The trace makes an op for each, though the first of them was there when it began."""
    monkeypatch.setattr(segment, "_ops", SimpleNamespace())
    monkeypatch.setattr(segment, "_requests", {})
    convs = [make("GCNConv"), make("SAGEConv", aggr=["std", "min"])]
    x = torch.randn(NUM_NODES, FEATURES)

    def call():
        return [conv(x, EDGES) for conv in convs]

    with emulated_device() as launched:
        actual = torch.compile(call, backend="aot_eager", fullgraph=True)()
    assert launched
    torch.testing.assert_close(actual, call(), **elementwise("float32"))


def test_compile_for_all_sizes_before_any_call(monkeypatch):
    """What an eager call would have remembered is not there; no number of the module is one of the graph's inputs."""
    monkeypatch.setattr(gate, "_singles", {})
    conv = make("SAGEConv")
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_nodes in (NUM_NODES, NUM_NODES + 3):
        x = torch.randn(num_nodes, FEATURES)
        with emulated_device() as launched:
            out = compiled(x, EDGES)
        assert launched
        torch.testing.assert_close(out, conv(x, EDGES), **elementwise("float32"))


# The class and the gate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGGREGATION)
def test_copies_and_accelerate(name):
    conv = make(name, pyg)
    x = torch.randn(NUM_NODES, FEATURES)
    before, after = rest_of(name, x, EDGES.size(1))
    expected = conv(x, *before, EDGES, *after)
    assert pyg_dfgnn.accelerate(conv) is conv and type(conv) is getattr(ours, name)
    buffer = io.BytesIO()
    torch.save(conv, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (conv, copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), loaded):
        with emulated_device() as launched:
            out = other(x, *before, EDGES, *after)
        assert launched and type(other) is type(conv)
        torch.testing.assert_close(out, expected, **elementwise("float32"))
    with emulated_device():
        assert [row.why for row in pyg_dfgnn.report(conv)] == [""]


@pytest.mark.parametrize("first", ["ours", "pyg"])
@pytest.mark.parametrize("name", AGGREGATION)
def test_hooks_and_explainers_take_pygs_path(name, first):
    for library in (ours, pyg) if first == "ours" else (pyg, ours):
        conv = make(name, library)
        conv = pyg_dfgnn.accelerate(conv)
    x = torch.randn(NUM_NODES, FEATURES)
    before, after = rest_of(name, x, EDGES.size(1))
    calls = []
    handle = conv.register_message_forward_hook(lambda *_: calls.append(1))
    with emulated_device() as launched:
        out = conv(x, *before, EDGES, *after)
    # The aggregation of PyG's path is a drop-in by itself.
    assert calls and set(launched) <= {"segment_forward"}
    handle.remove()
    torch.testing.assert_close(out, conv(x, *before, EDGES, *after))
    if before:
        return
    explainer = Explainer(
        conv,
        GNNExplainer(epochs=2),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    names = ("edge_attr",) if after else ()
    with emulated_device():
        mask = explainer(x, EDGES, **dict(zip(names, after, strict=True))).edge_mask
    assert mask.shape == (EDGES.size(1),) and mask.max() > mask.min()


REPEATED = {
    **{name: {} for name in ("GCNConv", "SAGEConv", "GraphConv", "SimpleConv")},
    "PNAConv": {"scalers": ["identity", "linear"], "deg": torch.tensor([0, 2, 5])},
    "EGConv": {"num_heads": 2},
}


@needs_compiler
@pytest.mark.parametrize("names", [["std", "std"], ["mean", "max", "mean"], ["max", "max"]], ids=str)
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_aggregations(name, names):
    """Layers, drop-ins and compiled ones, give what PyG's do also where PyG computes only the last of a name."""
    is_listed = name in ("PNAConv", "EGConv")
    several = {"aggregators": names} if is_listed else {"aggr": pyg.MultiAggregation(names, mode="sum")}
    kwargs = {**REPEATED[name], **several}
    args = () if name == "SimpleConv" else (FEATURES, 4)
    conv = getattr(pyg, name)(*args, **kwargs)
    x = torch.randn(NUM_NODES, FEATURES) + 3
    expected = copy.deepcopy(conv).double()(x.double(), EDGES)
    with pyg_dfgnn.local_settings(fallback="silent"), emulated_device():
        out = pyg_dfgnn.accelerate(conv)(x, EDGES)
    assert_all_close({"out": (out, expected)}, op="attention")


def test_reasons_of_the_module():
    x = torch.randn(NUM_NODES, FEATURES)

    def reasons(conv, *args, **kwargs):
        with emulated_device():
            return reasons_of(conv, *args, **kwargs)

    lstm = make("SAGEConv", aggr="lstm")
    assert len(reasons(lstm, x, EDGES)) == 1 and reasons(lstm, x, EDGES)[0].startswith("aggr is 'lstm', fused is max")
    assert reasons(make("SAGEConv", aggr=["mean", "median"]), x, EDGES)[0].startswith("aggr is ['mean', 'median']")
    assert reasons(make("SAGEConv", aggr=StdAggregation(semi_grad=True)), x, EDGES)
    assert reasons(make("ResGatedGraphConv", aggr="max"), x, EDGES)[0] == "aggr is 'max', fused is mean, sum"
    assert reasons(make("ResGatedGraphConv", act=torch.nn.Tanh()), x, EDGES) == ["act is Tanh(), fused is the sigmoid"]
    edge_attr = torch.randn(EDGES.size(1), 2)
    assert reasons(make("ResGatedGraphConv", edge_dim=2), x, EDGES, edge_attr) == ["edge features"]
    assert reasons(make("GINEConv"), x, EDGES, edge_attr) == ["edge_attr has another width than x"]
    assert reasons(make("GINEConv"), x, EDGES) == ["edge_attr is no matrix with a row per edge"]
    for name in ("GCNConv", "LGConv"):
        assert reasons(make(name), x, EDGES, torch.rand(1)) == ["the edge weight is to be broadcast"]
        assert "float64" in reasons(make(name).double(), x.double(), EDGES)[0]
        for dtype in (torch.float64, torch.int64):
            weight = torch.ones(EDGES.size(1), dtype=dtype)
            assert reasons(make(name), x, EDGES, weight) == [f"edge weights or features in {dtype}"]
    assert reasons(make("GCNConv", node_dim=0), x, EDGES) == ["node_dim is 0"]
    assert "x is no tensor" in reasons(make("GCNConv"), (x, x), EDGES)
    assert reasons(make("APPNP", dropout=0.5, normalize=False), x, EDGES) == ["dropout without edge weights"]
    assert reasons(make("APPNP", dropout=0.5), x, EDGES) == []
    wide = torch.randn(NUM_NODES, 700)
    assert reasons(make("LGConv"), wide, EDGES) == []


@pytest.mark.parametrize("name", PAIRS)
def test_pygs_errors_stay(name):
    x = torch.randn(NUM_NODES, FEATURES)
    for library in (ours, pyg):
        with emulated_device(), pytest.raises(Exception):  # noqa: B017, PT011
            make(name, library)((None, x), EDGES, *rest_of(name, x, EDGES.size(1))[1])
    for library in (ours, pyg):
        with pytest.raises(ValueError, match="tuple of node features"):
            make("GCNConv", library)((x, x), EDGES)


def test_wrong_edge_weights_are_named():
    x = torch.randn(NUM_NODES, FEATURES)
    with emulated_device():
        for name in WEIGHTED:
            before, _ = rest_of(name, x, 0)
            with pytest.raises(ValueError, match=r"'edge_weight' needs shape \[E=14\] \(got \[13\]\)"):
                make(name)(x, *before, EDGES, torch.rand(13))


@pytest.mark.parametrize("name", WEIGHTED)
def test_gradients_of_edge_weights_alone(name):
    conv, other = both(name, dtype=torch.float32)
    x, weight = torch.randn(NUM_NODES, FEATURES), torch.rand(EDGES.size(1)) + 0.5
    before, _ = rest_of(name, x, 0)
    grads = []
    for layer in (conv.requires_grad_(False), other.requires_grad_(False)):
        leaf = weight.clone().requires_grad_()
        with emulated_device():
            layer(x, *before, EDGES, leaf).sin().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, **elementwise("float32"))


def test_a_graph_in_which_the_other_side_has_no_features():
    """Also on PyG's path, which cannot tell from the edges how many nodes that side has."""
    x, graph = torch.randn(NUM_NODES, FEATURES), Graph.of(EDGES, NUM_NODES, NUM_NODES + 2)
    for name in PAIRS[:4]:
        conv, _ = both(name, dtype=torch.float32)
        _, after = rest_of(name, x, EDGES.size(1))
        plain = conv((x, None), graph, *after)
        with emulated_device() as launched:
            torch.testing.assert_close(conv((x, None), graph, *after), plain, **elementwise("float32"))
        assert launched and len(plain) == NUM_NODES + 2


def test_hetero_conv():
    results = []
    for library in (ours, pyg):
        torch.manual_seed(4)
        convs = {
            ("paper", "cites", "paper"): library.GCNConv(-1, 4),
            ("author", "writes", "paper"): library.SAGEConv((-1, -1), 4),
            ("paper", "rev_writes", "author"): library.GraphConv((-1, -1), 4, aggr="max"),
        }
        torch.manual_seed(5)
        with emulated_device() as launched:
            results.append(HeteroConv(convs)(HETERO_X, HETERO_EDGES))
        assert bool(launched) is (library is ours)
    for key, expected in results[1].items():
        torch.testing.assert_close(results[0][key], expected, **elementwise("float32"))
