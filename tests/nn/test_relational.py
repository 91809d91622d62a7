"""RGCN, FastRGCN, RGAT and HGT on programs equal PyG's in float64, in outputs and all gradients."""

import pytest
import torch
from torch_geometric import EdgeIndex

import pyg_dfgnn
from pyg_dfgnn import Graph
from pyg_dfgnn.datasets import entities, fb15k237
from pyg_dfgnn.ir import D, E, One, R, S, U, V
from pyg_dfgnn.ir.passes import rounded
from pyg_dfgnn.nn.conv import hgt_conv
from pyg_dfgnn.nn.gate import NO_MATRIX
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.runtime import launcher
from tests.ir.cases import ALL_GRAPHS, GRAPHS
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both, reasons_of
from tests.nn.parity import sparse_tensor
from tests.nn.relational import METADATA, NODES, WIDTHS, assert_same, hetero, real, results_of

pytestmark = pytest.mark.usefixtures("fused_on_cpu")

GRAPH = ALL_GRAPHS["relations-12"]
NUM_NODES, NUM_RELATIONS = GRAPH.num_src, GRAPH.num_relations
SQUARE = {name: graph for name, graph in ALL_GRAPHS.items() if graph.num_src == graph.num_dst}
SMALL = {name: graph for name, graph in SQUARE.items() if graph.num_relations < 1000}
RGCN = [
    {},
    {"num_bases": 3},
    {"num_blocks": 2, "root_weight": False, "bias": False},
    {"aggr": "add"},
    {"aggr": "add", "num_bases": 3},
    {"aggr": "max"},
    {"aggr": "max", "num_blocks": 2},
]
MULTIPLICATIVE, WITHIN = {"attention_mode": "multiplicative-self-attention"}, {"attention_mechanism": "within-relation"}
RGAT = [
    {},
    {"heads": 3, **WITHIN},
    {"heads": 2, "concat": False, "edge_dim": 3},
    {"heads": 2, **MULTIPLICATIVE},
    {"edge_dim": 3, **MULTIPLICATIVE, **WITHIN},
    {"heads": 2, "num_bases": 2, "bias": False},
    {"num_blocks": 2, "negative_slope": 0.1, "concat": False, **MULTIPLICATIVE},
]


def assert_has_kernels(conv, *args, **kwargs):
    """All that the forward and backward of a call need lowers to kernels and products."""
    description = pyg_dfgnn.describe_plan(conv.float(), *args, **kwargs)
    assert description.reasons == () and "backward:" in str(description.plan)


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def cases(options, names=("RGCNConv", "FastRGCNConv")):
    return [(name, o) for name in names for o in options if name != "FastRGCNConv" or o.get("aggr") != "max"]


@pytest.mark.parametrize("graph", SMALL)
@pytest.mark.parametrize("name,options", cases(RGCN), ids=str)
def test_rgcn(name, options, graph):
    edges = SMALL[graph]
    convs = both(name, 6, 4, edges.num_relations, **options)
    assert_same(convs, draw(edges.num_src, 6), edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("name,options", [*cases(RGCN), *(("RGATConv", options) for options in RGAT)], ids=str)
def test_programs_have_kernels(name, options):
    args = GRAPH.edge_index, GRAPH.edge_type, *((draw(GRAPH.num_edges, 3).float(),) if "edge_dim" in options else ())
    conv = both(name, 6, 4, NUM_RELATIONS, **options, **({"dropout": 0.5} if name == "RGATConv" else {}))[0]
    assert_has_kernels(conv, draw(NUM_NODES, 6).float(), *args)
    if "num_blocks" not in options and name != "RGATConv":
        assert_has_kernels(both(name, NUM_NODES, 4, NUM_RELATIONS, **options)[0], None, *args)


@pytest.mark.parametrize("name,args", [("RGCNConv", {}), ("FastRGCNConv", {}), ("RGATConv", WITHIN)])
def test_many_relations(name, args):
    edges = SQUARE["relations-1000"]
    assert_same(both(name, 6, 4, 1000, **args), draw(edges.num_src, 6), edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_bases_are_applied_first_where_that_is_less(aggr):
    """Few nodes among many relations."""
    edges = GRAPHS["relations-12"]
    num_relations = 60
    convs = both("RGCNConv", 6, 4, num_relations, num_bases=2, aggr=aggr)
    x, call = draw(edges.num_src, 6), (edges.edge_index, edges.edge_type)
    gated = convs[0]._call(x, *call)
    layer, _ = convs[0]._program(gated, convs[0]._graph(gated), x)
    assert layer == ("rgcn_bases" if aggr == "mean" else "rgcn_sum",)
    assert_same(convs, x, *call)


@pytest.mark.parametrize("kind", ["none", "indices"])
@pytest.mark.parametrize("name,options", cases([{}, {"num_bases": 3}, {"aggr": "add"}, {"aggr": "max"}]), ids=str)
@pytest.mark.parametrize("graph", ["hub", "duplicates", "no-edges-R3"])
def test_rgcn_embeddings(name, options, kind, graph):
    edges = SQUARE[graph]
    convs = both(name, edges.num_src, 4, edges.num_relations, **options)
    x = None if kind == "none" else torch.arange(edges.num_src).roll(1)
    assert_same(convs, x, edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("graph", ["bipartite", "no-targets"])
@pytest.mark.parametrize("name,options", cases(RGCN[:4]), ids=str)
def test_rgcn_between_two_node_sets(name, options, graph):
    edges = ALL_GRAPHS[graph]
    convs = both(name, (6, 5), 4, edges.num_relations, **options)
    assert_same(convs, (draw(edges.num_src, 6), draw(edges.num_dst, 5)), edges.edge_index, edges.edge_type)


def test_rgat_between_two_node_sets_is_pygs():
    """PyG takes a pair of features, though it does not say so."""
    edges = ALL_GRAPHS["bipartite"]
    convs = both("RGATConv", 6, 4, edges.num_relations)
    call = (draw(edges.num_src, 6), draw(edges.num_dst, 6)), edges.edge_index, edges.edge_type
    assert NO_MATRIX in reasons_of(convs[0], *call)
    own, pygs = (results_of(conv, *call) for conv in convs)
    for name, want in pygs.items():
        torch.testing.assert_close(own[name], want)


def test_rgcn_embeddings_between_two_node_sets():
    edges = ALL_GRAPHS["bipartite"]
    convs = both("RGCNConv", (edges.num_src, edges.num_dst), 4, edges.num_relations)
    for x_src in (None, torch.randperm(edges.num_src)):
        assert_same(convs, (x_src, torch.randperm(edges.num_dst)), edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("graph", SMALL)
@pytest.mark.parametrize("options", RGAT, ids=str)
def test_rgat(options, graph):
    edges = SMALL[graph]
    convs = both("RGATConv", 6, 4, edges.num_relations, **options)
    edge_attr = draw(edges.num_edges, 3) if "edge_dim" in options else None
    x = draw(edges.num_src, 6)
    weights = {"return_attention_weights": False}
    assert_same(convs, x, edges.edge_index, edges.edge_type, edge_attr, **weights)


def test_rgat_dropout():
    """The mask is the one that PyG draws; weights are returned as they were before."""
    edges = GRAPHS["relations-12"]
    convs = both("RGATConv", 6, 4, edges.num_relations, heads=2, dropout=0.4)
    x = draw(edges.num_src, 6)
    results = []
    for conv in convs:
        torch.manual_seed(5)
        results.append(conv(x, edges.edge_index, edges.edge_type, return_attention_weights=True))
    (out, (_, alpha)), (expected, (_, expected_alpha)) = results
    torch.testing.assert_close(out, expected, **elementwise("float64"))
    torch.testing.assert_close(alpha, expected_alpha, **elementwise("float64"))


@pytest.mark.parametrize("missing", [(), ("c", "d")])
def test_hgt_on_features(missing, monkeypatch):
    """With one head, and features as wide as the results, no row of keys, queries or values is made."""
    monkeypatch.setattr(hgt_conv, "_features_move_less", lambda *_: True)
    x_dict, edges = hetero(width=8)
    x_dict = {n: x for n, x in x_dict.items() if n not in missing}
    edges = {t: e for t, e in edges.items() if not {t[0], t[-1]} & set(missing)}
    convs = both("HGTConv", 8, 8, METADATA)
    call = convs[0]._call(x_dict, edges)
    inputs = convs[0]._program(call, convs[0]._graph(call), x_dict)[1]
    assert inputs["x"] is inputs["xd"] and inputs["x"].shape == (sum(map(len, x_dict.values())), 1, 8)
    assert_same(convs, x_dict, edges)
    # Whoever looks at the maps has them called.
    seen = []
    for conv in convs:
        conv.kqv_lin.lins["a"].register_forward_hook(lambda *_: seen.append(1))
    assert_same(convs, x_dict, edges)
    assert len(seen) == 2


def test_hgt_is_on_features_where_rows_are_fewer():
    """Targets of few relations have few rows of pairs. Gradients have more of those than outputs have.

    The maps of very many relations cost more than rows do.
    """
    sizes = {One: 1, R: 4, S: 2_000_000, D: 2_000_000, U: 3_200_000, V: 1_500_000, E: 21_000_000}
    ways = ((False, False), (True, False), (True, True))

    def chosen(**other):
        known = {**sizes, **{domain: other.get(str(domain), size) for domain, size in sizes.items()}}
        return [hgt_conv._features_move_less(rounded(known), 64, *way) for way in ways]

    assert chosen() == [True, True, True]
    assert chosen(U=8_000_000, V=8_000_000) == [True, True, False]
    assert chosen(U=13_000_000, V=13_000_000) == [False, False, False]
    assert chosen(R=200_000) == [False, False, False]
    conv, x = pyg_dfgnn.nn.HGTConv(8, 8, METADATA), {name: torch.randn(9, 8) for name in NODES}
    rows = {**sizes, R: len(METADATA[1])}
    assert conv._folds(x, rows) and not pyg_dfgnn.nn.HGTConv(8, 8, METADATA, heads=2)._folds(x, rows)
    assert not conv._folds({**x, "b": torch.randn(9, 7)}, rows)


def test_hgt_with_computed_scales():
    convs = both("HGTConv", WIDTHS, 8, METADATA)
    for conv in convs:
        torch.nn.utils.parametrize.register_parametrization(conv.p_rel, "a__r__b", torch.nn.Softplus())
    assert_same(convs, *hetero())


@pytest.mark.parametrize("heads", [1, 4])
def test_hgt(heads):
    x_dict, edges = hetero()
    convs = both("HGTConv", WIDTHS, 8, METADATA, heads=heads)
    assert_same(convs, x_dict, edges)
    # Without some node types and their edges, and without any edge.
    some = {n: x_dict[n] for n in "ba"}, {t: edges[t] for t in METADATA[1][:3]}
    assert_same(convs, *some)
    assert_same(convs, x_dict, {t: e[:, :0] for t, e in edges.items()})
    # PyG takes the weights of other relations where edge types come in another order.
    turned = convs[0](some[0], dict(reversed(some[1].items())))
    torch.testing.assert_close(turned, convs[1](*some), **elementwise("float64"))


FORMS = {
    "int32": lambda edges, types: (edges.int(), types.int()),
    "EdgeIndex": lambda edges, types: (EdgeIndex(edges, sparse_size=(NUM_NODES, NUM_NODES)), types),
    "Graph": lambda edges, types: (Graph.of(edges, NUM_NODES), types),
    "Graph of pieces": lambda edges, types: (Graph.of_pieces([edges], edges.size(1), NUM_NODES), types),
    "Graph with relations": lambda edges, types: (
        Graph.of(edges, NUM_NODES, edge_type=types, num_relations=NUM_RELATIONS),
        None,
    ),
}


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv", "RGATConv"])
def test_forms_of_edges(name, form, flow):
    convs = both(name, 6, 4, NUM_RELATIONS, flow=flow)
    x, edge_index, edge_type = draw(NUM_NODES, 6), GRAPH.edge_index.clone(), GRAPH.edge_type.clone()
    is_graph = form.startswith("Graph")
    edges, types = FORMS[form](edge_index.flip(0) if is_graph and flow == "target_to_source" else edge_index, edge_type)
    assert convs[0]._call(x, edges, types).reasons == []
    options = {"return_attention_weights": True} if name == "RGATConv" else {}
    actual, expected = convs[0](x, edges, types, **options), convs[1](x, edge_index, edge_type, **options)
    if options:
        (actual, (edges, alpha)), (expected, (_, expected_alpha)) = actual, expected
        torch.testing.assert_close(alpha, expected_alpha, **elementwise("float64"))
        assert torch.equal(torch.as_tensor(edges).long(), edge_index)
    torch.testing.assert_close(actual, expected, **elementwise("float64"))


@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv", "RGATConv"])
def test_a_flow_that_is_set_later_is_read_as_pyg_reads_it(name):
    convs = both(name, 6, 4, NUM_RELATIONS)
    for conv in convs:
        conv.flow = "neither"
    assert_same(convs, draw(NUM_NODES, 6), GRAPH.edge_index, GRAPH.edge_type)


@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_relations_in_a_sparse_tensor(name):
    order = GRAPH.edge_index[1].argsort(stable=True)
    adj = sparse_tensor(GRAPH.edge_index[:, order], NUM_NODES, NUM_NODES, GRAPH.edge_type[order])
    assert_same(both(name, 6, 4, NUM_RELATIONS), draw(NUM_NODES, 6), adj)


def matrix(layout, values=None):
    """The distinct edges as a transposed adjacency, and relations of its entries."""
    key = torch.unique(GRAPH.edge_index[1] * NUM_NODES + GRAPH.edge_index[0])
    rows, types = torch.stack([key // NUM_NODES, key % NUM_NODES]), torch.arange(key.numel()) % NUM_RELATIONS
    if layout == "SparseTensor":
        return sparse_tensor(rows.flip(0), NUM_NODES, NUM_NODES), types
    values = types if values is None else values(key.numel())
    adj = torch.sparse_coo_tensor(rows, values, (NUM_NODES, NUM_NODES, *values.shape[1:])).coalesce()
    return adj if layout == "coo" else adj.to_sparse_csr(), types


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_relations_in_a_sparse_layout(layout):
    assert_same(both("FastRGCNConv", 6, 4, NUM_RELATIONS), draw(NUM_NODES, 6), matrix(layout)[0])


@pytest.mark.parametrize("layout,options", [("SparseTensor", {}), ("csr", {}), ("coo", {"edge_dim": 3})], ids=str)
def test_relations_beside_a_matrix(layout, options):
    """Values of the matrix are features of edges."""
    adj, types = matrix(layout, (lambda count: draw(count, 3)) if options else None)
    assert_same(both("RGATConv", 6, 4, NUM_RELATIONS, **options), draw(NUM_NODES, 6), adj, types)


@pytest.mark.parametrize("form", ["int32", "EdgeIndex", "Graph", "csr"])
def test_forms_of_edges_in_dicts(form):
    x_dict, edges = hetero()
    convs = both("HGTConv", WIDTHS, 8, METADATA, heads=2)
    sizes = {t: (NODES[t[0]][0], NODES[t[2]][0]) for t in edges}
    edges = {t: torch.unique(e, dim=1).contiguous() for t, e in edges.items()}
    passed = {
        "int32": lambda e, n: e.int(),
        "EdgeIndex": lambda e, n: EdgeIndex(e, sparse_size=n),
        "Graph": lambda e, n: Graph.of(e, *n),
        "csr": lambda e, n: torch.sparse_coo_tensor(e, torch.ones(e.size(1)), n).t().coalesce().to_sparse_csr(),
    }[form]
    adjacencies = {t: passed(e, sizes[t]) for t, e in edges.items()}
    assert convs[0]._call(x_dict, adjacencies).reasons == []
    actual, expected = convs[0](x_dict, adjacencies), convs[1](x_dict, edges)
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, **elementwise("float64"))


@pytest.mark.parametrize("name", ["AIFB", "MUTAG"])
@pytest.mark.parametrize("conv", ["RGCNConv", "FastRGCNConv", "RGATConv"])
def test_entities(conv, name, tmp_path):
    data = real(entities, name, cache=tmp_path, download=False)
    convs = both(conv, 4, 3, int(data.edge_type.max()) + 1)
    assert_same(convs, draw(data.num_nodes, 4), data.edge_index, data.edge_type)


def test_launches_of_rgcn(tmp_path):
    """At most three forward and six backward; long rows and gradients of weights take a second one for their sums."""
    data = real(entities, "AIFB", cache=tmp_path, download=False)
    launched: list[str] = []
    with emulated_device(), launcher.override(lambda spec, entry, *_: launched.append(entry)):
        with pyg_dfgnn.local_settings(fallback="error"):
            conv = pyg_dfgnn.nn.RGCNConv(64, 64, int(data.edge_type.max()) + 1)
            x = torch.randn(data.num_nodes, 64, requires_grad=True)
            out = conv(x, data.edge_index, data.edge_type)
            forward = list(launched)
            out.sum().backward()
    assert 1 <= len(forward) <= 3 and 1 <= len(launched) - len(forward) <= 6, launched


@pytest.mark.parametrize("conv", ["RGCNConv", "RGATConv"])
def test_knowledge_graph(conv, tmp_path):
    """The first triples and their inverses, among all relations."""
    data = real(fb15k237, num_train=70_000, cache=tmp_path, download=False)
    assert_same(both(conv, 2, 2, 474), draw(data.num_nodes, 2), data.edge_index, data.edge_type)
