"""HEAT, HAN and FiLM on programs equal PyG's in float64, in outputs and all gradients."""

import pytest
import torch
from torch.nn import ELU, LeakyReLU, SiLU, Tanh

from pyg_dfgnn.datasets import imdb
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import many_relations
from tests.ir.cases import ALL_GRAPHS
from tests.nn.convs import both
from tests.nn.parity import sparse_tensor
from tests.nn.relational import METADATA, NODES, WIDTHS, assert_same, hetero, real
from tests.nn.test_relational import (
    FORMS,
    GRAPH,
    NUM_NODES,
    NUM_RELATIONS,
    SMALL,
    SQUARE,
    assert_has_kernels,
    draw,
    matrix,
)

pytestmark = pytest.mark.usefixtures("fused_on_cpu")

TYPES, EDGE_DIM = 3, 4
HEAT = [
    {},
    {"heads": 3, "concat": False},
    {"heads": 2, "root_weight": False, "bias": False, "negative_slope": 0.1},
]
FILM = [{}, {"aggr": "add", "act": None}, {"aggr": "max", "act": Tanh()}, {"act": LeakyReLU(0.3)}, {"act": ELU()}]


def heat(num_relations, **options):
    return both("HEATConv", 6, 5, TYPES, num_relations, 2, EDGE_DIM, 3, **options)


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("options", HEAT, ids=str)
def test_heat(options, graph):
    edges = SQUARE[graph]
    node_type = torch.arange(edges.num_src) % TYPES
    call = edges.edge_index, node_type, edges.edge_type, draw(edges.num_edges, EDGE_DIM)
    assert_same(heat(edges.num_relations, **options), draw(edges.num_src, 6), *call)


@pytest.mark.parametrize("name,options", [("HEATConv", o) for o in HEAT] + [("FiLMConv", o) for o in FILM], ids=str)
def test_programs_have_kernels(name, options):
    x, types = draw(NUM_NODES, 6).float(), GRAPH.edge_type
    if name == "FiLMConv":
        assert_has_kernels(both(name, 6, 4, NUM_RELATIONS, **options)[0], x, GRAPH.edge_index, types)
    else:
        edges = torch.arange(NUM_NODES) % TYPES, types, draw(GRAPH.num_edges, EDGE_DIM).float()
        assert_has_kernels(heat(NUM_RELATIONS, dropout=0.5, **options)[0], x, GRAPH.edge_index, *edges)


@pytest.mark.parametrize("name", ["HGTConv", "HANConv"])
@pytest.mark.parametrize("heads", [1, 4])
def test_programs_on_dicts_have_kernels(name, heads):
    x_dict, edges = hetero()
    conv = both(name, WIDTHS, 8, METADATA, heads=heads)[0]
    assert_has_kernels(conv, {node: x.float() for node, x in x_dict.items()}, edges)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_edges_of_heat(form):
    convs, node_type = heat(NUM_RELATIONS), torch.arange(NUM_NODES) % TYPES
    x, edge_attr = draw(NUM_NODES, 6), draw(GRAPH.num_edges, EDGE_DIM)
    edges, types = FORMS[form](GRAPH.edge_index, GRAPH.edge_type)
    assert convs[0]._call(x, edges, node_type, types, edge_attr).reasons == []
    actual = convs[0](x, edges, node_type, types, edge_attr)
    expected = convs[1](x, GRAPH.edge_index, node_type, GRAPH.edge_type, edge_attr)
    torch.testing.assert_close(actual, expected, **elementwise("float64"))


def test_heat_on_a_matrix():
    adj, types = matrix("csr")
    node_type = torch.arange(NUM_NODES) % TYPES
    assert_same(heat(NUM_RELATIONS), draw(NUM_NODES, 6), adj, node_type, types, draw(types.numel(), EDGE_DIM))


def test_heat_dropout():
    """The mask is the one that PyG draws."""
    convs, results = heat(NUM_RELATIONS, heads=2, dropout=0.4), []
    node_type, edge_attr = torch.arange(NUM_NODES) % TYPES, draw(GRAPH.num_edges, EDGE_DIM)
    for conv in convs:
        torch.manual_seed(5)
        results.append(conv(draw(NUM_NODES, 6), GRAPH.edge_index, node_type, GRAPH.edge_type, edge_attr))
    torch.testing.assert_close(*results, **elementwise("float64"))


@pytest.mark.parametrize("graph", SMALL)
@pytest.mark.parametrize("options", FILM, ids=str)
def test_film(options, graph):
    edges = SMALL[graph]
    convs = both("FiLMConv", 6, 4, edges.num_relations, **options)
    assert_same(convs, draw(edges.num_src, 6), edges.edge_index, edges.edge_type)


def test_film_of_many_relations():
    edges = many_relations(30, 200, 200)
    assert_same(both("FiLMConv", 3, 2, 200), draw(edges.num_src, 3), edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("num_relations", [1, 4])
@pytest.mark.parametrize("graph", ["bipartite", "no-targets"])
def test_film_between_two_node_sets(graph, num_relations):
    edges = ALL_GRAPHS[graph]
    x = draw(edges.num_src, 6), draw(edges.num_dst, 5)
    assert_same(both("FiLMConv", (6, 5), 4, num_relations, act=SiLU()), x, edges.edge_index, edges.edge_type)
    reverse = both("FiLMConv", (5, 6), 4, num_relations, flow="target_to_source")
    assert_same(reverse, x[::-1], edges.edge_index, edges.edge_type)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "Graph with relations"])
def test_film_of_one_relation_reads_no_types(form, flow):
    convs, x = both("FiLMConv", 6, 4, flow=flow), draw(NUM_NODES, 6)
    is_turned = form.startswith("Graph") and flow == "target_to_source"
    edges, _ = FORMS[form](GRAPH.edge_index.flip(0) if is_turned else GRAPH.edge_index, GRAPH.edge_type)
    assert convs[0]._call(x, edges).reasons == []
    torch.testing.assert_close(convs[0](x, edges), convs[1](x, GRAPH.edge_index), **elementwise("float64"))


@pytest.mark.parametrize("num_relations", [1, NUM_RELATIONS])
def test_film_on_a_sparse_tensor(num_relations):
    order = GRAPH.edge_index[1].argsort(stable=True)
    adj = sparse_tensor(GRAPH.edge_index[:, order], NUM_NODES, NUM_NODES, GRAPH.edge_type[order])
    assert_same(both("FiLMConv", 6, 4, num_relations), draw(NUM_NODES, 6), adj)


@pytest.mark.parametrize("heads", [1, 4])
def test_han(heads):
    x_dict, edges = hetero()
    convs = both("HANConv", WIDTHS, 8, METADATA, heads=heads)
    assert_same(convs, x_dict, edges)
    assert_same(convs, x_dict, edges, return_semantic_attention_weights=True)
    # Without some node types and their edges, in another order, without any edge, and with an empty node type.
    some = {n: x_dict[n] for n in "ba"}, {t: edges[t] for t in METADATA[1][2::-1]}
    assert_same(convs, *some, return_semantic_attention_weights=True)
    assert_same(convs, x_dict, {t: e[:, :0] for t, e in edges.items()})
    x_dict["c"], empty = x_dict["c"][:0], {t: e[:, :0] if "c" in t else e for t, e in edges.items()}
    assert_same(convs, x_dict, empty, return_semantic_attention_weights=True)
    assert set(convs[0](x_dict, empty)) == set(NODES) and convs[0](x_dict, empty)["d"] is None


def test_han_dropout():
    """Dropped weights are 0, the others twice what they were; the mean over many draws is the output without."""
    x_dict, edges = {"a": torch.ones(300, 2)}, {("a", "r", "a"): torch.arange(300).expand(2, -1).clone()}
    conv, _ = both("HANConv", 2, 4, (["a"], list(edges)), dropout=0.5, dtype=torch.float32)
    for name in ("a",):
        conv.proj[name].weight.data.fill_(1.0)
        conv.proj[name].bias.data.zero_()
    out = conv(x_dict, edges)["a"]
    assert set(out.unique().tolist()) == {0.0, 4.0} and 90 < (out[:, 0] > 0).sum() < 210
    assert torch.equal(conv.eval()(x_dict, edges)["a"].unique(), torch.tensor([2.0]))


@pytest.mark.parametrize("name,options", [("HANConv", {"heads": 2}), ("HGTConv", {"heads": 2})], ids=str)
def test_films(name, options):
    data = real(imdb)
    edges = data.edge_index_dict
    x_dict = {node: x[:, :8].double() for node, x in data.x_dict.items()}
    assert_same(both(name, 8, 8, (list(x_dict), list(edges)), **options), x_dict, edges)


def test_dtype_of_han_under_autocast():
    """Scores of parameters in float32 make PyG's sums float32."""
    x_dict, edges = hetero()
    x_dict = {node: x.float() for node, x in x_dict.items()}
    own, pygs = both("HANConv", WIDTHS, 8, METADATA, heads=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [conv(x_dict, edges) for conv in (own, pygs)]
    for node, want in results[1].items():
        assert (want is None and results[0][node] is None) or results[0][node].dtype is want.dtype
