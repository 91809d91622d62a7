"""What surrounds the relational convs: parameters, kept graphs, reasons of the gate, reports, refused arguments."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn import Graph
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph.hetero import joint_graph, known_joint
from pyg_dfgnn.reference.tolerances import elementwise
from tests.ir.cases import GRAPHS
from tests.nn.convs import reasons_of
from tests.nn.relational import METADATA, NODES, WIDTHS, hetero

EDGES = GRAPHS["relations-12"]
NUM_NODES, NUM_RELATIONS = EDGES.num_src, EDGES.num_relations
TYPED = {
    "RGCNConv": ((6, 4, NUM_RELATIONS), {}),
    "FastRGCNConv": ((6, 4, NUM_RELATIONS), {"num_bases": 2}),
    "RGATConv": ((6, 4, NUM_RELATIONS), {"heads": 2}),
    "FiLMConv": ((6, 4, NUM_RELATIONS), {}),
}
DICTS = {name: ((WIDTHS, 8, METADATA), {"heads": 2}) for name in ("HGTConv", "HANConv")}
CONVS = {**TYPED, **DICTS, "HEATConv": ((6, 4, 3, NUM_RELATIONS, 2, 3, 2), {"heads": 2})}
typed, dicts, all_convs = (pytest.mark.parametrize("name", names) for names in (TYPED, DICTS, CONVS))


def make(name, library=ours, **options):
    args, kwargs = CONVS[name]
    return getattr(library, name)(*args, **kwargs, **options)


def arguments(name):
    """Fresh arguments of a call in float32."""
    if name in DICTS:
        x_dict, edges = hetero()
        return {node: x.float() for node, x in x_dict.items()}, edges
    x = torch.randn(NUM_NODES, 6, generator=torch.Generator().manual_seed(0))
    if name == "HEATConv":
        rest = torch.arange(NUM_NODES) % 3, EDGES.edge_type.clone(), torch.ones(EDGES.num_edges, 3)
        return x, EDGES.edge_index.clone(), *rest
    return x, EDGES.edge_index.clone(), EDGES.edge_type.clone()


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, **elementwise("float32"))


@all_convs
def test_parameters_are_pygs(name):
    convs = []
    for library in (ours, pyg):
        torch.manual_seed(3)
        convs.append(make(name, library))
    states = [conv.state_dict() for conv in convs]
    assert list(states[0]) == list(states[1]) and str(convs[0]) == str(convs[1])
    for key, value in states[0].items():
        # PyG leaves l2 without values.
        want = torch.full_like(value, 0.25) if key == "l2" else states[1][key]
        assert torch.equal(value, want), key


@pytest.mark.usefixtures("fused_on_cpu")
@all_convs
def test_copies(name):
    conv, args = make(name), arguments(name)
    expected = conv(*args)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert type(other) is type(conv) and other._call(*args).reasons == []
        assert_equal(other(*args), expected)


@pytest.mark.usefixtures("fused_on_cpu")
@all_convs
def test_accelerate_and_describe(name):
    model, args = torch.nn.ModuleList([make(name, pyg)]), arguments(name)
    expected = model[0](*args)
    pyg_dfgnn.accelerate(model)
    assert type(model[0]) is getattr(ours, name)
    with pyg_dfgnn.local_settings(fallback="error"):
        assert_equal(model[0](*args), expected)
    (row,) = pyg_dfgnn.report(model)
    assert row.drop_in and row.why == ""
    description = pyg_dfgnn.describe_plan(model[0], *args)
    assert description.fused and "sum %" in str(description.plan) and "compact_rows" in str(description.memory)


@all_convs
def test_on_a_cpu_pygs_code_runs(name):
    conv, other, args = make(name), make(name, pyg), arguments(name)
    other.load_state_dict(conv.state_dict())
    assert reasons_of(conv, *args, device="cuda") == []
    assert list(conv._call(*args).reasons) == ["the tensors are not on a CUDA device"]
    torch.testing.assert_close(conv(*args), other(*args), rtol=0, atol=0)


@pytest.mark.usefixtures("fused_on_cpu")
@all_convs
def test_nothing_is_built_again(name, monkeypatch):
    """A second call makes no graph, sorts nothing and reads nothing from the device; edits are noticed."""
    conv, args = make(name), arguments(name)
    expected = conv(*args)
    with monkeypatch.context() as patch:
        patch.setattr(Graph, "__init__", None)
        patch.setattr(torch, "sort", None)
        patch.setattr("pyg_dfgnn.graph.adjacency.pull", None)
        patch.setattr("pyg_dfgnn.graph.hetero.pull", None)
        assert_equal(conv(*args), expected)
    other = make(name, pyg)
    other.load_state_dict(conv.state_dict())
    edited = [args[1][METADATA[1][0]]] if name in DICTS else args[1:-1] if name == "HEATConv" else args[1:]
    for tensor in edited:
        tensor[..., 0] = tensor[..., 5]
        assert conv._call(*args).reasons == []
        assert_equal(conv(*args), other(*args))


@pytest.mark.usefixtures("fused_on_cpu")
@all_convs
def test_graphs_go_with_their_edges(name):
    """Nothing refers to itself: what was built is freed without a search for circles."""
    conv, args = make(name), arguments(name)
    graph = weakref.ref(conv._graph(conv._call(*args)))
    conv(*args)
    assert graph() is not None
    gc.disable()
    try:
        del args
        assert graph() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("forget_logged")
@pytest.mark.parametrize("relations", [None, torch.zeros(30), torch.zeros(30, 1, dtype=torch.int64)])
def test_wrong_relations_on_a_cpu_are_named(relations, caplog):
    """PyG fails by an assertion without a text, or by an error of an operator."""
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        ours.RGCNConv(8, 4, 3)(torch.randn(10, 8), torch.randint(10, (2, 30)), relations)
    wrong = "is missing" if relations is None else "is no int64 or int32 vector"
    assert f"edge_type {wrong}" in caplog.text


REASONS = {
    "no relations": ("RGCNConv", {}, lambda x, e, t: (x, e), "edge_type is missing"),
    "float relations": ("RGCNConv", {}, lambda x, e, t: (x, e, t.float()), "edge_type is no int64 or int32 vector"),
    "aggregation": ("RGCNConv", {"aggr": "min"}, None, "aggr is 'min'"),
    "several": ("RGCNConv", {"aggr": ["mean", "max"]}, None, "several aggregations"),
    "fast max": ("FastRGCNConv", {"aggr": "max"}, None, "aggr is 'max'"),
    "blocks of embeddings": (
        "RGCNConv",
        {"num_blocks": 2},
        lambda x, e, t: (torch.arange(NUM_NODES), e, t),
        "num_blocks with node indices for x",
    ),
    "one side": (
        "RGCNConv",
        {},
        lambda x, e, t: ((x, torch.arange(NUM_NODES)), e, t),
        "x is features on one side and node indices on the other",
    ),
    "dtype": (
        "RGCNConv",
        {},
        lambda x, e, t: (x.double(), e, t),
        "x is in torch.float64 and the parameters in torch.float32",
    ),
    "matrix": ("RGCNConv", {}, lambda x, e, t: (x[:, 0], e, t), "x is not a matrix [N, F] per node set"),
    "mode": ("RGATConv", {"mod": "f-scaled"}, None, "mod is 'f-scaled'"),
    "dim": (
        "RGATConv",
        {"dim": 2, "attention_mode": "multiplicative-self-attention"},
        None,
        "dim is 2",
    ),
    "edge features": (
        "RGATConv",
        {},
        lambda x, e, t: (x, e, t, torch.ones(e.size(1), 2)),
        "edge_attr with another edge layer than PyG's",
    ),
    "activation": ("FiLMConv", {"act": torch.nn.Softsign()}, None, "the activation Softsign()"),
    "film layers": (
        "FiLMConv",
        {"nn": torch.nn.Sequential(torch.nn.Linear(6, 8))},
        None,
        "lins or films are other layers than PyG's",
    ),
    "film of several": ("FiLMConv", {"aggr": ["mean", "max"]}, None, "several aggregations"),
    "no edge features": ("HEATConv", {}, lambda x, e, *t: (x, e, *t[:2]), "edge_attr is missing"),
    "float node types": (
        "HEATConv",
        {},
        lambda x, e, n, *t: (x, e, n.float(), *t),
        "node_type is no int64 or int32 vector",
    ),
    "no edge sets": ("HGTConv", {}, lambda x, e: (x, {}), "edge_index_dict is empty"),
    "unknown edges": (
        "HGTConv",
        {},
        lambda x, e: (x, {("a", "z", "b"): e["a", "r", "b"]}),
        "edge type ('a', 'z', 'b') has no parameters, or no features at an end",
    ),
    "flow": ("HGTConv", {"flow": "target_to_source"}, None, "flow is 'target_to_source'"),
    "layers": (
        "HGTConv",
        {},
        lambda x, e: ({**x, "a": x["a"].double()}, e),
        "the features in x_dict have several dtypes or devices",
    ),
}


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
@pytest.mark.parametrize("case", REASONS)
def test_reasons(case):
    name, options, change, reason = REASONS[case]
    args, kwargs = CONVS[name]
    kwargs = {} if "num_blocks" in options else kwargs
    conv = getattr(ours, name)(*args, **{**kwargs, **options})
    call = arguments(name)
    call = call if change is None else change(*call)
    (own,) = [text for text in reasons_of(conv, *call) if reason in text]
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError) as error:
        conv(*call)
    assert own in error.value.reasons


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
@pytest.mark.parametrize("mod", ["additive", "scaled", "f-additive", "f-scaled"])
def test_pygs_code_takes_the_modes_of_rgat(mod):
    conv, args = make("RGATConv", mod=mod), arguments("RGATConv")
    other = make("RGATConv", pyg, mod=mod)
    other.load_state_dict(conv.state_dict())
    assert torch.equal(conv(*args), other(*args))


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
@typed
def test_pygs_code_takes_a_graph_with_relations(name):
    """The relations of the graph go with its edges."""
    conv, (x, edge_index, edge_type) = make(name), arguments(name)
    graph = Graph.of(edge_index, NUM_NODES, edge_type=edge_type, num_relations=NUM_RELATIONS)
    expected = conv(x, edge_index, edge_type)
    conv.register_message_forward_pre_hook(lambda *_: None)
    assert reasons_of(conv, x, graph) == ["message passing hooks are registered"]
    assert_equal(conv(x, graph), expected)


@pytest.mark.usefixtures("fused_on_cpu", "forget_logged")
def test_layers_with_hooks_are_called():
    """What PyG's HGTConv would call with hooks is called."""
    conv, args = make("HGTConv"), arguments("HGTConv")
    expected, calls = conv(*args), []
    conv.k_rel.register_forward_hook(lambda *_: calls.append(1))
    assert reasons_of(conv, *args) == ["k_rel or v_rel is another layer than PyG's"]
    assert_equal(conv(*args), expected)
    assert calls == [1]


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize(
    "change,message",
    [
        (lambda e, t: (e, t + 7), "'edge_type' needs values in [0, num_relations=12)"),
        (lambda e, t: (e, t[1:]), "'edge_type' needs shape [E="),
        (lambda e, t: (e + NUM_NODES, t), "'edge_index' needs source ids in [0, num_src="),
        (lambda e, t: (Graph.of(e, NUM_NODES, edge_type=t, num_relations=13), None), "num_relations=12 (got 13)"),
        (lambda e, t: (Graph.of(e, NUM_NODES + 1), t), "'edge_index' needs"),
    ],
)
@typed
def test_refused_edges(name, change, message):
    x, edge_index, edge_type = arguments(name)
    with pytest.raises(ValueError) as error:
        make(name)(x, *change(edge_index, edge_type))
    assert message in str(error.value)


@pytest.mark.usefixtures("fused_on_cpu")
def test_refused_features_of_edges():
    x, *edges = arguments("RGATConv")
    conv = make("RGATConv", edge_dim=3)
    with pytest.raises(ValueError, match=r"'edge_attr' needs shape \[E, edge_dim=3\] \(got \[150, 2\]\)"):
        conv(x, *edges, torch.ones(150, 2))


@pytest.mark.usefixtures("fused_on_cpu")
def test_refused_edges_of_one_type():
    """Ids count within the node type: those of the next type are out of range."""
    x_dict, edges = arguments("HGTConv")
    edges["b", "s", "a"][0, 0] = NODES["b"][0]
    with pytest.raises(ValueError, match=r"'edge_index' needs source ids in \[0, num_src=7\) \(got 0 to 7\)"):
        make("HGTConv")(x_dict, edges)


def test_joint_graph():
    edge_sets = [torch.tensor([[0, 1], [0, 0]]), Graph.of(torch.tensor([[0], [1]]), 1, 2)]
    # Nodes, relations, then of each relation its number and its nodes.
    numbers = 3, 4, *(2, 0, 2, 2, 1), *(0, 2, 1, 0, 2)
    graph = joint_graph(edge_sets, numbers)
    assert graph.edge_index.tolist() == [[0, 1, 2], [2, 2, 1]] and graph.relation.tolist() == [2, 2, 0]
    assert graph.num_relations == 4 and joint_graph(edge_sets, numbers) is graph
    assert known_joint(edge_sets, numbers) is graph
    assert known_joint(edge_sets, (3, 4, *(1, 0, 2, 2, 1), *(0, 2, 1, 0, 2))) is None
    assert known_joint([edge_sets[0].clone(), edge_sets[1]], numbers) is None
    edge_sets[0][0, 0] = 1
    assert known_joint(edge_sets, numbers) is None


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", ["HANConv", "HGTConv"])
def test_edges_are_asked_about_again_once_they_change(name, monkeypatch):
    """A call on the edges, types and sizes of one before asks nothing about edges; any other one asks about each."""
    conv, (x_dict, edges), asked = make(name), arguments(name), []
    ask = type(conv)._edge_set_reasons
    monkeypatch.setattr(type(conv), "_edge_set_reasons", lambda *args: asked.append(args[2]) or ask(*args))

    def asked_by(x_dict, edges):
        asked.clear()
        conv(x_dict, edges)
        return len(asked)

    count = len(edges)
    assert [asked_by(x_dict, edges), asked_by(x_dict, dict(edges))] == [count, 0]
    first, second = list(edges)[:2]
    assert asked_by(x_dict, {**edges, first: edges[first].clone()}) == count
    assert asked_by(x_dict, {name: edges[name] for name in edges if name != second}) == count - 1
    edges[first][:, 0] = 0
    assert [asked_by(x_dict, edges), asked_by(x_dict, edges)] == [count, 0]
    longer = {name: torch.cat([x, x[:1]]) for name, x in x_dict.items()}
    assert asked_by(longer, edges) == count
    with torch.inference_mode():
        untracked = {name: edge_index.clone() for name, edge_index in edges.items()}
        assert [asked_by(x_dict, untracked), asked_by(x_dict, untracked)] == [count, count]
    edges[first].resize_(2, 0)
    assert asked_by(x_dict, edges) == count
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match="no int64 or int32"):
        conv(x_dict, {**edges, first: edges[first].float()})
