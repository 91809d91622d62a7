"""The gate: what sends a call down PyG's own path, what stays fused, and what one call costs the host."""

import functools
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn import Graph
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.fallback import NO_DEVICE, ON_CPU
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.gate import HOOKS, METHODS, statistics_of
from pyg_dfgnn.reference.tolerances import elementwise
from tests.covering import over
from tests.kernels.emulated import emulated_device
from tests.nn.convs import EDGES, FEATURES, NAMES, NUM_NODES, make, reasons_of, trained


def pair(name, *libraries, **kwargs):
    """The conv of each library, by default ours and PyG's, with the parameters of the first."""
    convs = [make(name, library, **kwargs) for library in libraries or (ours, pyg)]
    for conv in convs[1:]:
        conv.load_state_dict(convs[0].state_dict())
    return convs


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, **elementwise("float32"))


MAX_FILES, MAX_CALLS = 14, 90

# Methods and hooks of message passing ---------------------------------------------------------------------------------

STEPS = {name: {"propagate", "message", "aggregate", "update"} for name in NAMES}
STEPS["GATConv"] = STEPS["GATv2Conv"] = STEPS["AGNNConv"] | {"edge_update"}
"""What PyG's forward calls on a tensor of edges."""


def subclass(conv_type):
    return type(conv_type.__name__, (conv_type,), {"__module__": conv_type.__module__})


def doubled(method, calls):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        calls.append(method)
        return 2 * method(*args, **kwargs)

    return wrapper


@over([("name", "method")], name=tuple(NAMES), method=tuple(METHODS), where=("instance", "class", "upstream"))
def test_a_replaced_method(name, method, where, x, monkeypatch):
    """After a fused call: PyG's conv with the method replaced alike gives the same, in as many calls of it."""
    kinds = [subclass(getattr(library, name)) for library in (ours, pyg)]
    convs = pair(name, *(SimpleNamespace(**{name: kind}) for kind in kinds))
    with emulated_device() as launched:
        plain = trained(convs[0], x, EDGES)
    assert launched
    calls = []
    for place in {"instance": convs, "class": kinds, "upstream": [getattr(pyg, name)]}[where]:
        monkeypatch.setattr(place, method, doubled(getattr(place, method), calls))
    results, counts = [], []
    for conv in convs:
        calls.clear()
        with emulated_device() as launched:
            results.append(trained(conv, x, EDGES))
        assert not launched
        counts.append(len(calls))
    assert_same(*results)
    assert counts == [method in STEPS[name]] * 2
    assert reasons_of(convs[0], x, EDGES)[0] == f"'{method}' is overridden"
    assert torch.allclose(results[0]["out"], plain["out"], **elementwise("float32")) is (method not in STEPS[name])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_of_message_passing(name, hook, x):
    """PyG's path calls it as often as in PyG's conv; without it the next call is fused again."""
    step = hook.removeprefix("_").split("_forward_")[0]
    convs = pair(name)
    calls, results, counts, handles = [], [], [], []
    for conv in convs:
        handles.append(getattr(conv, f"register{hook.removesuffix('s')}")(lambda *_: calls.append(1)))
        calls.clear()
        with emulated_device() as launched:
            results.append(trained(conv, x, EDGES))
        assert not launched
        counts.append(len(calls))
    assert_same(*results)
    assert counts == [step in STEPS[name]] * 2
    handles[0].remove()
    with emulated_device() as launched:
        assert_same(trained(convs[0], x, EDGES), results[1])
    assert launched


# Graphs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulated", [False, True], ids=["cpu", "emulated"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_in_place_of_edge_index(name, flow, emulated, x):
    """A graph says which nodes send, so the flow of a conv, which says how to read a tensor, does not matter."""
    conv, other = pair(name, flow=flow)
    edge_index = EDGES if flow == "source_to_target" else EDGES.flip(0)
    graph = Graph.of(edge_index, NUM_NODES, flow=flow)
    with emulated_device() if emulated else nullcontext([]) as launched:
        for _ in range(2):
            assert_same(trained(conv, x, graph), trained(other, x, edge_index))
    assert bool(launched) is emulated


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_pieces_trains_without_its_edges(name, x):
    conv, other = pair(name)
    graph = Graph.of_pieces(EDGES.split(3, dim=1), EDGES.size(1), NUM_NODES)
    with emulated_device() as launched:
        assert_same(trained(conv, x, graph), trained(other, x, EDGES))
    assert launched
    looped = graph.get("looped")
    assert all("edge_index" not in g.derived_bytes() for g in (graph, looped) if g is not None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_other_sizes_is_refused(name, fused, x, request):
    if fused:
        request.getfixturevalue("fused_on_cpu")
    with pytest.raises(ValueError, match=r"'edge_index' needs 8 sources, as many as x \(got Graph\(9 -> 9 nodes"):
        make(name)(x, Graph.of(EDGES, NUM_NODES + 1))


def test_a_graph_knows_how_many_nodes_have_no_features(x):
    conv, other = pair("GATConv", add_self_loops=False)
    graph = Graph.of(EDGES, NUM_NODES, NUM_NODES + 2)
    expected = other((x, None), EDGES, size=(NUM_NODES, NUM_NODES + 2))
    assert_same(conv((x, None), graph), expected)
    with pytest.raises(ValueError, match=r"'size' needs \(8, 10\)"):
        conv((x, None), graph, size=(NUM_NODES, NUM_NODES))
    with emulated_device():
        assert_same(conv((x, None), graph), expected)


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
@pytest.mark.parametrize("name", ["GATConv", "GraphConv", "SAGEConv"])
def test_sizes_of_any_integer_type(name, number, x):
    conv, other = pair(name, **({"add_self_loops": False} if name == "GATConv" else {}))
    size, edge_index = (number(NUM_NODES), number(NUM_NODES + 2)), EDGES.clone()
    expected = other((x, None), edge_index, size=size)
    with emulated_device() as launched:
        assert_same(conv((x, None), edge_index, size=size), expected)
        assert_same(conv((x, None), Graph.of(edge_index, *size), size=size), expected)
        with pytest.raises(TypeError, match=r"'size' needs an integer \(got float 8.0\)"):
            conv((x, None), edge_index, size=(8.0, 8))
    assert launched


@pytest.mark.filterwarnings("ignore:Sparse")
def test_self_loops_by_any_value_that_is_true(x):
    conv, other = pair("GATConv", add_self_loops=1)
    adj = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(EDGES.size(1)), (NUM_NODES, NUM_NODES)).coalesce()
    with emulated_device() as launched:
        assert_same(conv(x, adj.to_sparse_csr()), other(x, adj.to_sparse_csr()))
    assert launched


def test_an_aggregation_of_one_aggregation_of_several_is_no_other():
    names = ["sum", "max"]
    assert statistics_of(pyg.MultiAggregation([pyg.MultiAggregation(names)])) == ()
    assert statistics_of(pyg.MultiAggregation(names)) == ("sum", "max")


# What a call costs the host -----------------------------------------------------------------------------------------


def test_files_and_calls_of_a_training_step(x):
    """The second step of GATConv, forward and backward, enters few files of the package, and asks the question once."""
    conv, root = make("GATConv", heads=4), str(Path(pyg_dfgnn.__file__).parent)
    entered = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.append((frame.f_code.co_filename, frame.f_code.co_name))

    with emulated_device():
        trained(conv, x, EDGES)
        sys.setprofile(profile)
        try:
            trained(conv, x, EDGES)
        finally:
            sys.setprofile(None)
    assert len({file for file, _ in entered}) <= MAX_FILES, sorted({file for file, _ in entered})
    assert len(entered) <= MAX_CALLS
    questions = [name for _, name in entered if name in ("kernel_reasons", "unsupported_reasons", "row_reasons")]
    assert questions == ["kernel_reasons"]


def test_the_question_is_asked_once_per_problem(x, monkeypatch):
    problems = []
    monkeypatch.setattr(AttentionConv, "_reasons_against", staticmethod(lambda problem: problems.append(problem) or ()))
    conv = make("GATConv", heads=2)
    with emulated_device():
        for _ in range(3):
            conv(x, EDGES)
        conv.double()(x.double(), EDGES)
    assert [problem.dtype for problem in problems] == [torch.float32, torch.float64]


# Reasons ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_cpu_is_pygs_own_forward(name, x, monkeypatch):
    mine, theirs = make(name), make(name, pyg)
    theirs.load_state_dict(mine.state_dict())
    with pyg_dfgnn.local_settings(fallback="error"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert torch.equal(mine(x, EDGES), theirs(x, EDGES))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(UnsupportedError, match=NO_DEVICE):
            mine(x, EDGES)


@pytest.mark.usefixtures("forget_logged")
def test_that_tensors_are_on_a_cpu_is_said_once(x, caplog):
    with caplog.at_level(logging.DEBUG, logger="pyg_dfgnn"):
        with pyg_dfgnn.local_settings(fallback="silent"):
            make("GATConv")(x, EDGES)
        assert not caplog.records
        for name in NAMES * 2:
            make(name)(x, EDGES)
        assert [record.getMessage() for record in caplog.records] == [ON_CPU]


@pytest.mark.usefixtures("forget_logged")
@pytest.mark.parametrize("name", NAMES)
def test_wrong_edges_on_a_cpu_are_named(name, x, caplog):
    """PyG's errors do not always tell which argument is wrong; aggregations without a norm have PyG's that do."""
    wrong = {"float": EDGES.float(), "transposed": EDGES.t().contiguous(), "row": EDGES[0]}
    for edges in wrong.values():
        caplog.clear()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make(name)(x, edges)
        told = f"edge_index is no int64 or int32 tensor of shape [2, E] ({edges.dtype}, {list(edges.shape)})"
        assert told in caplog.text or "Expected 'edge_index' to " in str(caught.value)


class OwnMessage(ours.GATConv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * alpha.unsqueeze(-1) * x_j


class OwnUpdate(ours.TransformerConv):
    def update(self, inputs: Tensor) -> Tensor:
        return inputs + 1


class OwnPropagate(ours.AGNNConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return -super().propagate(edge_index, size=size, **kwargs)


class OwnNothing(ours.GATv2Conv):
    def extra(self):
        return None


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
@pytest.mark.parametrize(
    "conv_type,method", [(OwnMessage, "message"), (OwnUpdate, "update"), (OwnPropagate, "propagate")]
)
def test_overridden_methods_take_pygs_path(conv_type, method, x, caplog):
    conv = conv_type() if conv_type is OwnPropagate else conv_type(FEATURES, 4)
    base = next(base for base in conv_type.__mro__[1:] if base.__name__ in NAMES)
    plain = base() if base is ours.AGNNConv else base(FEATURES, 4)
    plain.load_state_dict(conv.state_dict())
    assert any(method in reason and "overridden" in reason for reason in reasons_of(conv, x, EDGES))
    assert not torch.allclose(conv(x, EDGES), plain(x, EDGES)), "the override had no effect"
    conv(x, EDGES)
    assert len(caplog.records) == 1, "a reason is logged once"
    assert conv_type.__name__ in caplog.text and method in caplog.text
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match=method) as error:
        conv(x, EDGES)
    assert len(error.value.reasons) == 1
    with pyg_dfgnn.local_settings(fallback="silent"):
        conv(x, EDGES)
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("fused_on_cpu")
def test_a_subclass_that_overrides_nothing_is_fused(x):
    conv = OwnNothing(FEATURES, 4)
    conv(x, EDGES)
    assert reasons_of(conv, x, EDGES) == []


@pytest.mark.usefixtures("fused_on_cpu")
def test_module_hooks_stay_fused(x):
    conv, seen = make("GATConv"), []
    conv.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    conv(x, EDGES)
    assert len(seen) == 1 and reasons_of(conv, x, EDGES) == []


@pytest.mark.usefixtures("fused_on_cpu")
def test_reasons_of_the_module(x):
    assert reasons_of(make("GATConv", aggr="mean"), x, EDGES) == ["aggr is 'mean', fused is sum"]
    assert reasons_of(make("GATv2Conv", aggr="sum"), x, EDGES) == []
    assert reasons_of(make("TransformerConv", aggr=["add", "max"]), x, EDGES)[0].startswith("aggr is")
    assert reasons_of(make("AGNNConv", node_dim=0), x, EDGES) == ["node_dim is 0"]
    decomposed = make("AGNNConv", decomposed_layers=3)
    assert reasons_of(decomposed, x, EDGES) == ["decomposed_layers is 3"]


@pytest.mark.usefixtures("fused_on_cpu")
def test_reasons_of_the_inputs(x):
    conv = make("GATConv")
    assert reasons_of(conv, x.unsqueeze(0), EDGES) == ["x is not a matrix [N, F] per node set"]
    assert reasons_of(conv, x, EDGES.tolist()) == ["edge_index is a list"]
    assert "no int64 or int32 tensor of shape [2, E]" in reasons_of(conv, x, EDGES.short())[0]
    assert "no int64 or int32 tensor of shape [2, E]" in reasons_of(conv, x, EDGES[0])[0]
    assert "adjacency 9" in reasons_of(conv, x, EDGES, size=(8, 9))[0]
    assert "edge_index is on meta" in reasons_of(conv, x, EDGES.to("meta"))[0]
    assert reasons_of(conv, x, EDGES, return_attention_weights=True) == []
    adj = torch.sparse_coo_tensor(EDGES, torch.ones(EDGES.size(1)), (NUM_NODES, NUM_NODES))
    assert reasons_of(conv, x, adj) == ["a COO adjacency that is not coalesced"]
    assert reasons_of(conv, x, adj.coalesce().to_sparse_csc()) == ["the sparse layout torch.sparse_csc"]
    assert reasons_of(make("GATConv", flow="target_to_source"), x, adj.coalesce()) == [
        "flow='target_to_source' with a sparse adjacency"
    ]
    edge_attr = torch.randn(EDGES.size(1), 2)
    assert "edge_dim" in reasons_of(make("GATv2Conv"), x, EDGES, edge_attr)[0]
    assert "edge_dim" in reasons_of(make("TransformerConv", edge_dim=2), x, EDGES)[0]
    dropping = make("TransformerConv", dropout=0.5)
    with torch.no_grad():
        assert "before dropout" in reasons_of(dropping, x, EDGES, return_attention_weights=True)[0]
        assert reasons_of(dropping.eval(), x, EDGES, return_attention_weights=True) == []


def test_all_reasons_at_once(x, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    conv = make("GATConv", aggr="max")
    conv.register_message_forward_hook(lambda module, inputs, out: None)
    description = pyg_dfgnn.describe_plan(conv, x, EDGES)
    assert not description.fused and len(description.reasons) == 3 and "tensors are on cpu" in str(description)
    assert all(reason in str(description) for reason in description.reasons)
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError) as error:
        conv(x, EDGES)
    assert len(error.value.reasons) == 2, "the CPU is no reason to fail where there is no GPU"


def test_meta_tensors_pass(x):
    conv = make("TransformerConv").to("meta")
    out = conv(x.to("meta"), EDGES.to("meta"))
    assert out.is_meta and out.shape == make("TransformerConv")(x, EDGES).shape


@pytest.mark.usefixtures("fused_on_cpu")
def test_wrong_edge_attr_is_named(x):
    for name in NAMES[:3]:
        conv = make(name, edge_dim=4)
        with pytest.raises(ValueError, match=r"'edge_attr' needs shape \[E, edge_dim=4\] \(got \[14, 3\]\)"):
            conv(x, EDGES, torch.randn(14, 3))
        with pytest.raises(ValueError, match="'edge_attr' needs shape"):
            conv(x, EDGES, torch.randn(13, 4))


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_wrong_node_ids_are_refused(name, x):
    for bad in (-1, NUM_NODES):
        edges = EDGES.clone()
        edges[0, 3] = bad
        with pytest.raises(IndexError, match="edge_index"):
            make(name)(x, edges)
