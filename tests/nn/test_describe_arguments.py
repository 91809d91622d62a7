"""`describe_plan` takes arguments by position and by name, and models that `torch.compile` has returned."""

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.nn.registry import DROP_INS
from pyg_dfgnn.settings import local_settings
from tests.nn.convs import EDGES, FEATURES, NUM_NODES

X, WEIGHT = torch.randn(NUM_NODES, FEATURES), torch.rand(EDGES.size(1))
KIND, TYPE, ATTR = torch.arange(EDGES.size(1)) % 3, torch.arange(NUM_NODES) % 2, torch.randn(EDGES.size(1), 5)
GRAPH = {"x": X, "edge_index": EDGES}
WEIGHTED, TYPED = {**GRAPH, "edge_weight": WEIGHT}, {**GRAPH, "edge_type": KIND}
ROWS = {"x": X, "index": TYPE.sort()[0]}
SETS = {"x_dict": {"a": X}, "edge_index_dict": {("a", "to", "a"): EDGES}}
META = ["a"], [("a", "to", "a")]


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 4))


CALLS = {
    "AGNNConv": (ours.AGNNConv, GRAPH),
    "APPNP": (lambda: ours.APPNP(2, 0.1), WEIGHTED),
    "ARMAConv": (lambda: ours.ARMAConv(FEATURES, 4), WEIGHTED),
    "ChebConv": (lambda: ours.ChebConv(FEATURES, 4, 2), WEIGHTED),
    "ClusterGCNConv": (lambda: ours.ClusterGCNConv(FEATURES, 4), GRAPH),
    "FastRGCNConv": (lambda: ours.FastRGCNConv(FEATURES, 4, 3), TYPED),
    "FiLMConv": (lambda: ours.FiLMConv(FEATURES, 4, 3), TYPED),
    "GATConv": (lambda: ours.GATConv(FEATURES, 4, edge_dim=5), {**GRAPH, "edge_attr": ATTR}),
    "GATv2Conv": (lambda: ours.GATv2Conv(FEATURES, 4, edge_dim=5), {**GRAPH, "edge_attr": ATTR}),
    "GCN2Conv": (lambda: ours.GCN2Conv(FEATURES, 0.3), {"x": X, "x_0": X, "edge_index": EDGES}),
    "GCNConv": (lambda: ours.GCNConv(FEATURES, 4), WEIGHTED),
    "GINConv": (lambda: ours.GINConv(mlp()), {**GRAPH, "size": (NUM_NODES, NUM_NODES)}),
    "GINEConv": (lambda: ours.GINEConv(mlp(), edge_dim=5), {**GRAPH, "edge_attr": ATTR}),
    "GraphConv": (lambda: ours.GraphConv(FEATURES, 4), WEIGHTED),
    "HANConv": (lambda: ours.HANConv(FEATURES, 4, META), {**SETS, "return_semantic_attention_weights": True}),
    "HEATConv": (
        lambda: ours.HEATConv(FEATURES, 4, 2, 3, 3, 5, 4),
        {**GRAPH, "node_type": TYPE, "edge_type": KIND, "edge_attr": ATTR},
    ),
    "HGTConv": (lambda: ours.HGTConv(FEATURES, 4, META), SETS),
    "LGConv": (ours.LGConv, WEIGHTED),
    "PNAConv": (
        lambda: ours.PNAConv(FEATURES, 4, ["mean"], ["identity"], torch.tensor([1, 3]), edge_dim=5),
        {**GRAPH, "edge_attr": ATTR},
    ),
    "RGATConv": (lambda: ours.RGATConv(FEATURES, 4, 3, edge_dim=5), {**TYPED, "edge_attr": ATTR}),
    "RGCNConv": (lambda: ours.RGCNConv(FEATURES, 4, 3), TYPED),
    "ResGatedGraphConv": (lambda: ours.ResGatedGraphConv(FEATURES, 4, edge_dim=5), {**GRAPH, "edge_attr": ATTR}),
    "SAGEConv": (lambda: ours.SAGEConv(FEATURES, 4), {**GRAPH, "size": (NUM_NODES, NUM_NODES)}),
    "SGConv": (lambda: ours.SGConv(FEATURES, 4), WEIGHTED),
    "SSGConv": (lambda: ours.SSGConv(FEATURES, 4, 0.1), WEIGHTED),
    "SuperGATConv": (lambda: ours.SuperGATConv(FEATURES, 4), {**GRAPH, "neg_edge_index": EDGES.flip(0)}),
    "TAGConv": (lambda: ours.TAGConv(FEATURES, 4), WEIGHTED),
    "TransformerConv": (lambda: ours.TransformerConv(FEATURES, 4, edge_dim=5), {**GRAPH, "edge_attr": ATTR}),
    "HeteroLinear": (lambda: ours.HeteroLinear(FEATURES, 4, 2), {"x": X, "type_vec": TYPE}),
    "HeteroDictLinear": (
        lambda: ours.HeteroDictLinear({f"t{i}": FEATURES for i in range(12)}, 4),
        {"x_dict": {f"t{i}": X for i in range(12)}},
    ),
    "DegreeScalerAggregation": (
        lambda: ours.DegreeScalerAggregation("mean", "identity", torch.tensor([1, 3])),
        ROWS,
    ),
    "MultiAggregation": (lambda: ours.MultiAggregation(["mean", "std"]), ROWS),
    "QuantileAggregation": (lambda: ours.QuantileAggregation(0.5), ROWS),
    **{
        name: (getattr(ours, name), ROWS)
        for name in (
            "MaxAggregation MeanAggregation MedianAggregation MinAggregation MulAggregation PowerMeanAggregation "
            "SoftmaxAggregation StdAggregation SumAggregation VarAggregation"
        ).split()
    },
}


@pytest.fixture(autouse=True)
def silent():
    with local_settings(fallback="silent"):
        yield


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_position_and_by_name(name, device):
    torch.manual_seed(0)
    make, kwargs = CALLS[name]
    layer, values, names = make(), list(kwargs.values()), list(kwargs)
    want = str(pyg_dfgnn.describe_plan(layer, *values, device=device))
    for count in range(len(values)):
        rest = dict(zip(reversed(names[count:]), reversed(values[count:]), strict=True))
        assert str(pyg_dfgnn.describe_plan(layer, *values[:count], device=device, **rest)) == want
    layer(**kwargs)


def test_every_drop_in_is_described():
    assert CALLS.keys() == {kind.__name__ for kind in DROP_INS}


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match="missing a required argument: 'edge_index'"):
        pyg_dfgnn.describe_plan(ours.GCNConv(FEATURES, 4), x=X)


def test_a_wrong_device_is_named():
    with pytest.raises(ValueError, match=r"'device' needs a device, such as 'cuda' or 'cuda:1' \(got 'gpu'\)"):
        pyg_dfgnn.describe_plan(ours.GCNConv(FEATURES, 4), X, EDGES, device="gpu")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(FEATURES, 4), pyg.LEConv(4, 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def compiled_inside(model):
    model.first = torch.compile(model.first, backend="eager")
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


WAYS = {
    "wrapped": lambda model: torch.compile(model, backend="eager"),
    "a layer": compiled_inside,
    "in place": compiled_in_place,
}


def states(model):
    """What became of both layers."""
    return [row.state for row in pyg_dfgnn.report(model) if row.name.split(".")[0] in ("first", "second")][:2]


@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models(way, called):
    torch.manual_seed(0)
    model = Model()
    want = model(X, EDGES)
    compiled = WAYS[way](model)
    if called:
        compiled(X, EDGES)
    assert pyg_dfgnn.accelerate(compiled) is compiled
    assert states(compiled) == ["drop-in", "compiled"]
    first = "first._orig_mod" if way == "a layer" else "first"
    described = pyg_dfgnn.describe_plan(compiled, x=X, edge_index=EDGES, device="cuda")
    assert all(described.layers[name].fused for name in (first, "second"))
    torch.testing.assert_close(compiled(X, EDGES), want)
    assert pyg_dfgnn.restore(compiled) is compiled
    assert states(compiled) == ["left", "left"]
    torch.testing.assert_close(compiled(X, EDGES), want)


def test_a_compiled_layer():
    conv = torch.compile(ours.GCNConv(FEATURES, 4), backend="eager")
    assert pyg_dfgnn.describe_plan(conv, X, EDGES, device="cuda").fused
    assert [row.name for row in pyg_dfgnn.report(conv)] == [""]


def test_names_of_a_compiled_model():
    model = torch.compile(Model(), backend="eager")
    pyg_dfgnn.accelerate(model, only="first")
    assert states(model) == ["drop-in", "left"]
