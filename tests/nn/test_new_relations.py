"""Relational convs on edges that are new: operators of torch on all pairs have PyG's results, compiled too."""

import gc

import pytest
import torch
from torch import nn
from torch_geometric.nn import conv as pyg

import pyg_dfgnn
from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.nn.conv import relational
from pyg_dfgnn.ops import visits
from pyg_dfgnn.ops.function import ops
from pyg_dfgnn.ops.relational import new_edges, traced
from pyg_dfgnn.ops.relational.traced import KIND
from pyg_dfgnn.settings import Settings, current
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges
from tests.nn.relational import METADATA, WIDTHS, assert_near, cast, hetero, results_of

SETTINGS = Settings()
FEATURES, RELATIONS = 8, 4
CONVS = {
    "rgcn": lambda **o: pyg.RGCNConv(FEATURES, 6, RELATIONS, **o),
    "rgcn-sum": lambda **o: pyg.RGCNConv(FEATURES, 6, RELATIONS, aggr="sum", root_weight=False, **o),
    "rgcn-max": lambda **o: pyg.RGCNConv(FEATURES, 6, RELATIONS, aggr="max", **o),
    "rgcn-bases": lambda **o: pyg.RGCNConv(FEATURES, 6, RELATIONS, num_bases=2, **o),
    "rgcn-blocks": lambda **o: pyg.RGCNConv(FEATURES, 6, RELATIONS, num_blocks=2, bias=False, **o),
    "fast": lambda **o: pyg.FastRGCNConv(FEATURES, 6, RELATIONS, **o),
    "rgat": lambda **o: pyg.RGATConv(FEATURES, 3, RELATIONS, heads=2, **o),
    "rgat-within": lambda **o: pyg.RGATConv(
        FEATURES, 3, RELATIONS, heads=2, concat=False, attention_mechanism="within-relation", **o
    ),
    "rgat-multiplicative": lambda **o: pyg.RGATConv(
        FEATURES, 4, RELATIONS, attention_mode="multiplicative-self-attention", num_blocks=2, **o
    ),
    "film": lambda **o: pyg.FiLMConv(FEATURES, 6, RELATIONS, **o),
    "film-gelu": lambda **o: pyg.FiLMConv(FEATURES, 6, RELATIONS, act=nn.GELU(), aggr="max", **o),
}
GRAPHS = ("random", "duplicates", "isolated", "one relation", "one node", "no edges")


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Take edges on a CPU for those on a GPU, and all that are new for too many for PyG's code."""
    monkeypatch.setattr(visits, "may_be_few", lambda _: current().leaves_few)
    monkeypatch.setattr(relational, "may_be_few", lambda _: current().leaves_few)
    monkeypatch.setattr(relational, "MEASURED_NUMBERS", 0)
    yield
    visits._visits.clear()
    visits._last = visits._NONE


def graph(name):
    """Numbers of nodes, edges and their relations."""
    size = 1 if name == "one node" else 20
    edge_index = random_edges(size // 2 if name == "isolated" else size, size, 0 if name == "no edges" else 60)
    relation = torch.randint(RELATIONS - 1, (edge_index.size(1),), generator=torch.Generator().manual_seed(4))
    if name == "one relation":
        relation.fill_(2)
    if name == "duplicates":
        edge_index, relation = edge_index.repeat(1, 2), relation.repeat(2)
    return size, edge_index, relation


def pair(name, **options):
    torch.manual_seed(1)
    layer = CONVS[name](**options)
    layer.reset_parameters()
    if getattr(layer, "l2", None) is not None:
        nn.init.ones_(layer.l2)
    own = CONVS[name](**options)
    own.load_state_dict(layer.state_dict())
    return layer.double(), pyg_dfgnn.accelerate(nn.ModuleList([own]))[0]


@over(
    [("name", "where"), ("name", "flow")],
    name=tuple(CONVS),
    where=GRAPHS,
    flow=("source_to_target", "target_to_source"),
)
def test_convs_on_new_edges_have_pygs_results(name, where, flow):
    upstream, own = pair(name, flow=flow)
    size, edge_index, relation = graph(where)
    x = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(2))
    expected = results_of(upstream, *cast((x, edge_index, relation), torch.float64))
    with emulated_device() as launched:
        actual = results_of(own, x, edge_index.clone(), relation)
        assert not launched
    assert_near(actual, expected, torch.float32)


def test_two_node_sets_and_edge_features():
    upstream, own = pair("rgcn")
    edge_index, relation = random_edges(20, 9, 60), torch.arange(60) % RELATIONS
    x = torch.randn(20, FEATURES), torch.randn(9, FEATURES)
    expected = results_of(upstream, cast(x, torch.float64), edge_index, relation)
    with emulated_device() as launched:
        assert_near(results_of(own, x, edge_index, relation), expected, torch.float32)
    upstream, own = pair("rgat-within", edge_dim=5)
    given = torch.randn(20, FEATURES), random_edges(20, 20, 60), relation, torch.randn(60, 5)
    expected = results_of(upstream, *cast(given, torch.float64))
    with emulated_device() as launched_too:
        assert_near(results_of(own, *given), expected, torch.float32)
    assert not launched and not launched_too


@needs_compiler
def test_edges_that_come_again_take_kernels_and_so_do_many():
    _, own = pair("rgcn")
    size, edge_index, relation = graph("random")
    x, counts = torch.randn(size, FEATURES), []
    with emulated_device() as launched:
        for _ in range(3):
            before = len(launched)
            own(x, edge_index, relation)
            counts.append(len(launched) > before)
        assert counts == [False, False, True]
        with pytest.MonkeyPatch.context() as patch:
            for constant in ("MOST_NUMBERS", "_LOOPED_NUMBERS", "LISTED_NUMBERS"):
                patch.setattr(relational, constant, 0)
            before = len(launched)
            own(x, edge_index.clone(), relation)
            assert len(launched) > before


@pytest.mark.parametrize("name", ["rgcn", "film", "rgat"])
def test_relations_out_of_range_are_named(name):
    _, own = pair(name)
    size, edge_index, relation = graph("random")
    relation[3] = RELATIONS
    with (
        emulated_device(),
        pytest.raises(IdRangeError, match=r"'edge_type' needs relations in \[0, 4\) \(got 0 to 4\)"),
    ):
        own(torch.randn(size, FEATURES), edge_index, relation)


@needs_compiler
@pytest.mark.parametrize("name", ["rgcn", "rgat-within", "film"])
def test_compiled_convs_take_pairs_of_new_edges_and_lists_of_known_ones(name, fused_on_cpu, monkeypatch):
    programs = type(ops[KIND])
    # On a CPU the operator is the interpreter.
    monkeypatch.setattr(programs, "reference", programs.run)
    upstream, own = pair(name)
    size, edge_index, relation = graph("random")
    x = torch.randn(size, FEATURES)
    expected = results_of(upstream, *cast((x, edge_index, relation), torch.float64))
    counts = []
    monkeypatch.setattr(visits, "_COMPILED_NUMBERS", 0)
    monkeypatch.setattr(traced, "COMPILED_VISITS", 2)
    with emulated_device() as launched:
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            before = len(launched)
            found = results_of(compiled, x, edge_index, relation)
            assert_near({key.replace("_orig_mod.", ""): x for key, x in found.items()}, expected, torch.float32)
            counts.append(len(launched) > before)
    assert counts == [False, False, True]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_hgt_takes_pairs_of_all_node_types(heads, is_compiled, fused_on_cpu, monkeypatch):
    programs = type(ops[KIND])
    monkeypatch.setattr(programs, "reference", programs.run)
    torch.manual_seed(1)
    upstream = pyg.HGTConv(WIDTHS, 6, METADATA, heads=heads)
    own = pyg.HGTConv(WIDTHS, 6, METADATA, heads=heads)
    own.load_state_dict(upstream.state_dict())
    own = pyg_dfgnn.accelerate(nn.ModuleList([own]))[0]
    x, edges = hetero()
    expected = results_of(upstream.double(), x, edges)
    called = torch.compile(own, backend="aot_eager") if is_compiled else own
    for _ in range(2):
        with emulated_device() as launched:
            found = results_of(called, cast(x, torch.float32), edges)
        assert not launched
        assert_near({key.replace("_orig_mod.", ""): x for key, x in found.items()}, expected, torch.float32)
    edges["a", "r", "b"] = edges["a", "r", "b"] + 50
    with emulated_device(), pytest.raises(ValueError, match="edge_index"):
        own(cast(x, torch.float32), edges)


@pytest.mark.parametrize("name", ["rgcn", "hgt"])
def test_edges_of_an_inference_can_be_trained_on(name):
    if name == "hgt":
        own = pyg_dfgnn.accelerate(nn.ModuleList([pyg.HGTConv(WIDTHS, 6, METADATA)]))[0]
        x, *edges = hetero()
        x = cast(x, torch.float32)
    else:
        own = pair("rgcn")[1]
        size, *edges = graph("random")
        x = torch.randn(size, FEATURES)
    with emulated_device() as launched:
        with torch.inference_mode():
            before = own(x, *edges)
        after = own(x, *edges)
        first, again = (out["b"] if name == "hgt" else out for out in (before, after))
        torch.testing.assert_close(first, again)
        again.sum().backward()
        assert not launched


def test_node_numbers_and_few_edges_between_many_nodes_take_no_pairs():
    _, own = pair("rgcn")
    size, edge_index, relation = graph("random")
    by_number = pyg_dfgnn.accelerate(nn.ModuleList([pyg.RGCNConv(size, 6, RELATIONS)]))[0]
    numbers, x = torch.arange(size), torch.randn(5000, FEATURES)
    with emulated_device():
        for conv, nodes in ((by_number, numbers), (own, x)):
            assert not conv._call(nodes, edge_index.clone(), relation).by_torch
            conv(nodes, edge_index.clone(), relation)


@pytest.mark.parametrize("name", ["rgcn", "hgt"])
def test_edits_of_edges_of_an_inference_are_seen(name):
    """PyTorch counts no edits of such tensors."""
    with emulated_device(), torch.inference_mode():
        if name == "rgcn":
            own, (size, edge_index, relation) = pair("rgcn")[1], graph("random")
            x, edge_index = torch.randn(size, FEATURES), edge_index.clone()
            own(x, edge_index, relation)
            edge_index[0, 0] = size
            with pytest.raises(IdRangeError, match="'edge_index'"):
                own(x, edge_index, relation)
            return
        own = pyg_dfgnn.accelerate(nn.ModuleList([pyg.HGTConv(WIDTHS, 6, METADATA)]))[0]
        x, edges = hetero()
        x, edges = cast(x, torch.float32), {key: value.clone() for key, value in edges.items()}
        own(x, edges)
        for ends in edges.values():
            ends[0] = 0
        fresh = own(x, {key: value.clone() for key, value in edges.items()})
        torch.testing.assert_close(own(x, edges)["b"], fresh["b"])


def test_joint_edges_are_let_go():
    own = pyg_dfgnn.accelerate(nn.ModuleList([pyg.HGTConv(WIDTHS, 6, METADATA)]))[0]
    x, edges = hetero()
    with emulated_device():
        own(cast(x, torch.float32), edges)
    assert new_edges._joint is not None
    del edges
    gc.collect()
    assert new_edges._joint is None
