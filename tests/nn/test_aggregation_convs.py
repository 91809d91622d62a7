"""The convs that aggregate without attention, as layers, against PyG's own in float64."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch_geometric.nn.aggr import MultiAggregation

from pyg_dfgnn import Graph
from pyg_dfgnn.nn.conv_call import num_edges
from pyg_dfgnn.ops import segment
from tests.covering import over
from tests.kernels.emulated import emulated_device
from tests.nn.convs import AGGREGATION, LOOPED, PAIRS, arguments, both, rest_of
from tests.nn.parity import BIPARTITE, EDGES, FORMS, NUM_NODES, adjacency, as_pyg_takes, assert_parity, simple

F_IN, F_DST, F_OUT = 6, 5, 4
MATRICES = {"coo", "csr", "sparse_tensor"}


def build(name, *args, **options):
    """The drop-in and PyG's conv with the same parameters."""
    return both(name, *(args or arguments(name, F_IN, F_OUT)), **options)


def before(name, dtype=torch.float64, count=NUM_NODES):
    """The arguments of a call between x and the edges."""
    return rest_of(name, torch.empty(count, F_IN, dtype=dtype), 0)[0]


def after(name, count, dtype=torch.float64, width=F_IN):
    """The arguments of a call after the edges."""
    return rest_of(name, torch.empty(0, width, dtype=dtype), count)[1]


@pytest.fixture
def exact(monkeypatch, fused_on_cpu):
    """Factors of nodes in float64: what is left of a difference are errors of the layer."""

    def of_degrees(graph, name, domain, function):
        side = graph.csr if domain == "targets" else graph.csc
        return function(side.rowptr.diff().double())

    monkeypatch.setattr(segment, "of_degrees", of_degrees)


UNWEIGHTED = ("SAGEConv", "GINConv", "GINEConv", "ResGatedGraphConv", "ClusterGCNConv")
"""Convs that take no weights of edges."""

# Layers -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
@over(name=tuple(AGGREGATION), form=tuple(FORMS))
def test_every_form_of_edge_index(name, form):
    edges = FORMS[form]()
    # PyG's product of a sparse matrix and features takes one dtype.
    dtype = torch.float32 if form in {*MATRICES, "edge_index_by_col"} else torch.float64
    conv, other = build(name, dtype=dtype)
    x = torch.randn(NUM_NODES, F_IN, dtype=dtype)
    if (form in MATRICES and name in ("ChebConv", "GINEConv")) or (form in ("coo", "csr") and name in LOOPED):
        reasons = conv._call(x, *before(name, dtype), edges, *after(name, num_edges(edges), dtype)).reasons
        assert any("sparse adjacency" in reason for reason in reasons)
        return
    count = num_edges(edges)
    if name in LOOPED and form == "graph_with_loops":
        # The graph has them already.
        assert conv._edges(conv._call(x, *before(name, dtype), edges))[0] is edges
    assert_parity((conv, other), x, edges, *after(name, count, dtype), before=before(name, dtype))


OPTIONS = {
    "GCNConv": {
        "plain": {},
        "no_loops": {"add_self_loops": False},
        "not_normalized": {"normalize": False},
        "improved": {"improved": True},
        "no_bias": {"bias": False},
        "mean": {"aggr": "mean"},
        "max": {"aggr": "max"},
        "cached": {"cached": True},
    },
    "GCN2Conv": {
        "plain": {},
        "theta": {"theta": 0.5, "layer": 2},
        "two_weights": {"theta": 0.5, "layer": 2, "shared_weights": False},
        "not_normalized": {"normalize": False},
        "no_loops": {"add_self_loops": False},
        "cached": {"cached": True},
    },
    "SGConv": {"plain": {}, "hops": {"K": 3}, "no_loops": {"add_self_loops": False}},
    "SSGConv": {"plain": {}, "hops": {"K": 3}, "no_loops": {"add_self_loops": False}, "cached": {"cached": True}},
    "TAGConv": {"plain": {}, "not_normalized": {"normalize": False}, "no_bias": {"bias": False}, "hops": {"K": 1}},
    "APPNP": {
        "plain": {},
        "not_normalized": {"normalize": False},
        "no_loops": {"add_self_loops": False},
        "cached": {"cached": True},
    },
    "ChebConv": {"plain": {}, "rw": {"normalization": "rw"}, "none": {"normalization": None}, "mean": {"aggr": "mean"}},
    "LGConv": {"plain": {}, "not_normalized": {"normalize": False}},
    "ARMAConv": {
        "plain": {},
        "stacks": {"num_stacks": 3, "num_layers": 2},
        "layers": {"num_layers": 6},
        "shared": {"num_layers": 3, "num_stacks": 2, "shared_weights": True, "bias": False},
        "act": {"act": torch.nn.Softmax(dim=0), "num_stacks": 2},
        "act_of_fewer": {"act": torch.nn.GLU(dim=-1), "num_stacks": 2},
        "act_of_a_view": {"act": lambda h: h.view(h.size(0), -1).relu().view_as(h), "num_stacks": 2},
        "no_act": {"act": None, "aggr": "mean"},
    },
    "GraphConv": {aggr: {"aggr": aggr} for aggr in ("add", "mean", "max", "min")},
}


@pytest.mark.usefixtures("exact")
@over(
    [("option", "weighted"), ("flow", "as_graph", "weighted")],
    option=[(name, option) for name in OPTIONS for option in OPTIONS[name]],
    flow=("source_to_target", "target_to_source"),
    as_graph=(False, True),
    weighted=(False, True),
)
def test_every_option(option, flow, as_graph, weighted):
    name, option = option
    convs = build(name, flow=flow, **OPTIONS[name][option])
    x = torch.randn(NUM_NODES, F_IN, dtype=torch.float64)
    edges = Graph.of(EDGES, NUM_NODES, flow=flow) if as_graph else EDGES
    weight = (torch.rand(EDGES.size(1), dtype=torch.float64) + 0.5,) if weighted else ()
    if option == "cached" and weighted:
        # PyG keeps the graph of gradients of the weights, too.
        with torch.no_grad():
            rest, plain = before(name), as_pyg_takes(edges, flow)
            for _ in range(2):
                torch.testing.assert_close(convs[0](x, *rest, edges, *weight), convs[1](x, *rest, plain, *weight))
        return
    for _ in range(2):
        assert_parity(convs, x, edges, *weight, before=before(name))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("value, options", [(2.0, {}), (None, {"improved": True}), (None, {"aggr": "max"})])
def test_self_loops_of_a_sparse_tensor_with_values(value, options):
    """PyG gives loops the value 1 or 2, also those that have another: its own path does."""
    edges = FORMS["sparse_tensor"]()
    edges = edges if value is None else edges.fill_value(value)
    conv, other = build("GCNConv", dtype=torch.float32, **options)
    x = torch.randn(NUM_NODES, F_IN)
    assert conv._call(x, edges).reasons == ["self-loops added to the values of a sparse adjacency"]
    torch.testing.assert_close(conv(x, edges), other(x, edges))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["GCNConv", "TAGConv", "LGConv", "GraphConv"])
@pytest.mark.parametrize("layout", sorted(MATRICES))
def test_values_of_a_sparse_adjacency_are_weights(name, layout):
    values = torch.rand(simple(EDGES).size(1)) + 0.5
    edges = FORMS[layout]().set_value(values) if layout == "sparse_tensor" else None
    edges = adjacency(simple(EDGES), layout, values=values) if edges is None else edges
    options = {"GCNConv": {"add_self_loops": False}}.get(name, {})
    assert_parity(build(name, dtype=torch.float32, **options), torch.randn(NUM_NODES, F_IN), edges)


SAGE_OPTIONS = {
    "plain": {},
    **{aggr: {"aggr": aggr} for aggr in ("sum", "max", "min", "std", "var")},
    "several": {"aggr": ["mean", "max", "std"]},
    "one_of_a_list": {"aggr": ["max"]},
    "combined": {"aggr": MultiAggregation(["sum", "min"], mode="mean")},
    "normalize": {"normalize": True},
    "no_root": {"root_weight": False},
    "project": {"project": True},
    "no_bias": {"bias": False},
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("as_graph", [False, True], ids=["tensor", "graph"])
@pytest.mark.parametrize("option", SAGE_OPTIONS)
def test_every_option_of_sage(option, as_graph):
    edges = Graph.of(EDGES, NUM_NODES) if as_graph else EDGES
    convs = build("SAGEConv", **copy.deepcopy(SAGE_OPTIONS[option]))
    assert_parity(convs, torch.randn(NUM_NODES, F_IN, dtype=torch.float64), edges)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("as_graph", [False, True], ids=["tensor", "graph"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", PAIRS)
def test_bipartite(name, flow, as_graph):
    # With the other flow PyG's forward fits node sets of one size, but for the conv that sends the first in either.
    backwards = flow == "target_to_source"
    num_src = 5 if backwards and name != "ResGatedGraphConv" else 3
    edges = BIPARTITE.flip(0) if backwards else BIPARTITE
    own = arguments(name, F_DST if name.startswith("GIN") else (F_IN, F_DST), F_OUT)
    width = F_DST if name.startswith("GIN") else F_IN
    convs = build(name, *own, flow=flow)
    x = torch.randn(num_src, width, dtype=torch.float64), torch.randn(5, F_DST, dtype=torch.float64)
    if as_graph:
        sizes = (num_src, 5) if not backwards or name == "ResGatedGraphConv" else (5, num_src)
        edges = Graph.of(edges, *sizes, flow=flow)
    rest = after(name, BIPARTITE.size(1), width=F_DST)
    assert_parity(convs, x, edges, *rest)
    if name == "ResGatedGraphConv" or backwards:
        return
    assert_parity(convs, x, edges, *rest, size=(3, 5))
    if as_graph:
        actual, expected = convs[0]((x[0], None), edges, *rest), convs[1]((x[0], None), BIPARTITE, *rest, size=(3, 5))
        torch.testing.assert_close(actual, expected)
    else:
        assert_parity(convs, (x[0], None), edges, *rest, size=(3, 5))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "options", [{}, {"edge_dim": 3}, {"train_eps": True}, {"aggr": "max"}, {"aggr": "mean"}], ids=str
)
def test_every_option_of_gine(options):
    edge_attr = torch.randn(EDGES.size(1), options.get("edge_dim", F_IN), dtype=torch.float64)
    assert_parity(build("GINEConv", **options), torch.randn(NUM_NODES, F_IN, dtype=torch.float64), EDGES, edge_attr)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [{"train_eps": True, "eps": 0.3}, {"aggr": "max"}, {"aggr": ["add"]}], ids=str)
def test_every_option_of_gin(options):
    assert_parity(build("GINConv", **options), torch.randn(NUM_NODES, F_IN, dtype=torch.float64), EDGES)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [{"root_weight": False}, {"bias": False}, {"aggr": "mean"}], ids=str)
def test_every_option_of_gated_sums(options):
    assert_parity(build("ResGatedGraphConv", **options), torch.randn(NUM_NODES, F_IN, dtype=torch.float64), EDGES)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("largest", [None, 1.5, 2, torch.tensor(1.7), "batch"])
def test_largest_eigenvalue_of_chebyshev(largest, loops):
    edges = EDGES if loops else EDGES[:, EDGES[0] != EDGES[1]]
    batch = torch.tensor([0, 0, 1, 1, 1])
    lambda_max = torch.tensor([1.5, 2.5], dtype=torch.float64) if largest == "batch" else largest
    convs = build("ChebConv")
    x = torch.randn(NUM_NODES, F_IN, dtype=torch.float64)
    assert_parity(convs, x, edges, None, batch, lambda_max)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", AGGREGATION)
@pytest.mark.parametrize("count", [0, 1])
def test_few_nodes(name, count):
    if name == "ChebConv" and not count:
        pytest.skip("PyG takes the largest entry of an empty matrix")
    edges = torch.zeros(2, 2 * count, dtype=torch.long)
    x = torch.randn(count, F_IN, dtype=torch.float64)
    assert_parity(build(name), x, edges, *after(name, 2 * count), before=before(name, count=count))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("normalize", [True, False])
def test_dropout_of_edges(normalize):
    """The masks are PyG's own."""
    convs = build("APPNP", 3, 0.2, 0.5, normalize=normalize)
    x, weight = torch.randn(NUM_NODES, F_IN, dtype=torch.float64), torch.rand(EDGES.size(1), dtype=torch.float64)
    results = []
    for args in [(weight,)] + [()] * normalize:
        for conv in convs:
            torch.manual_seed(3)
            assert conv is convs[1] or not conv._call(x, EDGES, *args).reasons
            results.append(conv(x, EDGES, *args))
        torch.testing.assert_close(*results[-2:])
        assert not torch.allclose(results[-1], convs[1].eval()(x, EDGES, *args))
        convs[1].train()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["GCNConv", "GCN2Conv", "APPNP"])
def test_cached_edges_are_those_of_the_first_call(name):
    convs = build(name, cached=True)
    x, rest = torch.randn(NUM_NODES, F_IN, dtype=torch.float64), before(name)
    for conv in convs:
        conv(x, *rest, EDGES)
    kept = convs[0]._cached_edge_index
    for mine, theirs in zip(kept, convs[1]._cached_edge_index, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_parity(convs, x, EDGES.flip(0), before=rest)
    assert convs[0]._cached_edge_index is kept
    loaded = pickle.loads(pickle.dumps(convs[0]))
    torch.testing.assert_close(loaded(x, *rest, EDGES.flip(0)), convs[1](x, *rest, EDGES.flip(0)))
    for conv in convs:
        conv.reset_parameters()
        assert conv._cached_edge_index is None
    convs[1].load_state_dict(convs[0].state_dict())
    assert_parity(convs, x, EDGES.flip(0), before=rest)


@pytest.mark.usefixtures("exact")
def test_cached_features_of_sg():
    convs = build("SGConv", cached=True)
    x = torch.randn(NUM_NODES, F_IN, dtype=torch.float64)
    for args in ((x, EDGES), (2 * x, EDGES.flip(0))):
        torch.testing.assert_close(*(conv(*args) for conv in convs))
    torch.testing.assert_close(convs[0]._cached_x, convs[1]._cached_x)


@over(
    [("name", "weighted"), ("weighted", "autocast", "dtype")],
    lambda row: not (row["weighted"] and row["name"] in UNWEIGHTED),
    name=tuple(AGGREGATION),
    weighted=(False, True),
    autocast=(False, True),
    dtype=(torch.float32, torch.bfloat16),
)
def test_dtypes_are_those_of_pyg(name, weighted, autocast, dtype):
    conv, other = build(name, dtype=torch.float32 if autocast else dtype)
    x, rest = torch.randn(NUM_NODES, F_IN).to(dtype), before(name, dtype)
    edge_attr = after(name, EDGES.size(1), dtype)
    edge_attr = (torch.rand(EDGES.size(1)) + 0.5,) if weighted else edge_attr
    outputs = []
    for layer, device in ((other, nullcontext()), (conv, emulated_device())):
        with device, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            try:
                outputs.append(layer(x, *rest, EDGES, *edge_attr))
            except RuntimeError as error:
                # A linear layer refuses mixed dtypes, in ours as in PyG's.
                assert "dtype" in str(error)
                outputs.append(None)
    if name == "ClusterGCNConv" and outputs[0] is None:
        # PyG's own weights, in float32, keep it from 16 bits.
        assert dtype is torch.bfloat16 and outputs[1].dtype is dtype
        return
    assert (outputs[0] is None) == (outputs[1] is None)
    if outputs[0] is not None:
        assert outputs[1].dtype == outputs[0].dtype
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0.1, atol=0.1)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [{}, {"act": torch.nn.Tanh()}, {"num_stacks": 2}, {"act": None}])
def test_what_arma_returns_may_be_edited(options):
    for conv in build("ARMAConv", **options):
        out = conv(torch.randn(NUM_NODES, F_IN, dtype=torch.float64, requires_grad=True), EDGES)
        out += 1
        out.sum().backward()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [{"dropout": 0.4}, {"act": torch.nn.Dropout(0.4)}])
def test_arma_draws_what_pyg_draws(options):
    convs = build("ARMAConv", num_stacks=2, num_layers=2, **options)
    x, outs = torch.randn(NUM_NODES, F_IN, dtype=torch.float64), []
    for conv in convs:
        torch.manual_seed(3)
        outs.append(conv(x, EDGES))
    torch.testing.assert_close(*outs)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("ARMAConv", {"aggr": ["add", "mean"], "num_stacks": 2}, "several aggregations"),
        ("ARMAConv", {"num_layers": 0}, "there is no layer"),
        ("ARMAConv", {"dropout": 1.5}, "dropout needs a probability (got 1.5)"),
        ("ClusterGCNConv", {"aggr": "mean"}, "the aggregation needs to be a sum (got 'mean')"),
        ("ClusterGCNConv", {"flow": "target_to_source"}, "degrees are of sources in this flow"),
        ("ClusterGCNConv", {"add_self_loops": False}, "the self-loops that edges have"),
        ("ClusterGCNConv", {"diag_lambda": torch.tensor(0.5)}, "diag_lambda is a tensor"),
    ],
)
def test_what_takes_pygs_path(name, options, reason):
    conv, _ = build(name, **options)
    assert any(reason in text for text in conv._call(torch.randn(NUM_NODES, F_IN, dtype=torch.float64), EDGES).reasons)


@pytest.mark.usefixtures("exact")
def test_arma_says_of_a_sparse_tensor_what_pyg_says():
    """PyG has no product of a sparse tensor with features of three dimensions, which those of the stacks are."""
    adjacency = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(EDGES.size(1)), (NUM_NODES, NUM_NODES)).coalesce()
    errors = []
    for conv in build("ARMAConv", num_stacks=2):
        with pytest.raises(RuntimeError) as raised:
            conv(torch.randn(NUM_NODES, F_IN, dtype=torch.float64), adjacency.to(torch.float64))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "GINConv", "GINEConv"])
@pytest.mark.parametrize(
    "edges", [[[0, 9], [1, 2]], [[0, -1], [1, 2]], [[0, 1], [1, 9]], [[0, 1], [1, 2], [2, 0]], [[0, 1], [1, -1]]]
)
def test_wrong_edges_are_an_error_as_with_pyg(name, edges):
    ours, pygs = build(name)
    x, edge_index = torch.randn(5, F_IN), torch.tensor(edges)
    call = x, *before(name, torch.float32, 5), edge_index, *after(name, 2, torch.float32)
    with pytest.raises((IndexError, RuntimeError, ValueError)) as expected:
        pygs(*call)
    with pytest.raises(type(expected.value)) as error:
        ours(*call)
    assert str(error.value) == str(expected.value)
