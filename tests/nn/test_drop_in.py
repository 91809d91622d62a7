"""Everything around the numbers that users rely on: state, copies, explainers, heterogeneous graphs, compile."""

import copy
import io
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, PGExplainer
from torch_geometric.nn import HeteroConv, to_hetero

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from tests.covering import over
from tests.nn.convs import AGGREGATION, EDGES, FEATURES, NAMES, NUM_NODES, arguments, make, reasons_of
from tests.processes import run_script

OPTIONS = [
    ("GATConv", (3, 4), {"heads": 2}),
    ("GATConv", ((3, 5), 4), {"heads": 2, "edge_dim": 2, "residual": True, "concat": False}),
    ("GATConv", (3, 4), {"bias": False}),
    ("GATv2Conv", (3, 4), {"heads": 2, "share_weights": True}),
    ("GATv2Conv", ((3, 5), 4), {"edge_dim": 2, "residual": True}),
    ("GATv2Conv", (3, 4), {"bias": False}),
    ("TransformerConv", (3, 4), {"heads": 2, "beta": True, "edge_dim": 2}),
    ("TransformerConv", ((3, 5), 4), {"concat": False, "root_weight": False}),
    ("AGNNConv", (), {}),
    ("AGNNConv", (False,), {}),
    ("SuperGATConv", (3, 4), {"heads": 2}),
    ("SuperGATConv", (3, 4), {"attention_type": "SD", "concat": False}),
    *((name, None, {}) for name in AGGREGATION),
]


@pytest.mark.parametrize(
    "name,hint",
    [
        ("EdgeConv", "; torch_geometric.nn.EdgeConv has no drop-in, and pyg_dfgnn.accelerate(model) compiles it"),
        ("knn_graph", "; torch_geometric.nn.knn_graph has no drop-in"),
        ("EdgConv", ""),
    ],
)
def test_a_layer_without_drop_in_is_named(name, hint):
    assert not hasattr(ours, name)
    with pytest.raises(AttributeError) as caught:
        getattr(ours, name)
    assert str(caught.value) == f"module 'pyg_dfgnn.nn' has no attribute {name!r}{hint}"


@pytest.mark.parametrize("name,args,kwargs", OPTIONS)
def test_same_class_surface(name, args, kwargs):
    convs = []
    for library in (ours, pyg):
        torch.manual_seed(5)
        convs.append(getattr(library, name)(*(arguments(name) if args is None else args), **kwargs))
    mine, theirs = convs
    assert isinstance(mine, getattr(pyg, name)) and type(mine).__name__ == name
    assert repr(mine) == repr(theirs)
    state, expected = mine.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state), "the same seed gives other parameters"
    for conv in convs:
        torch.manual_seed(6)
        conv.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), theirs.state_dict().values()))
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_copies(name, fused, x, request):
    if fused:
        request.getfixturevalue("fused_on_cpu")
    conv = make(name)
    expected = conv(x, EDGES)
    buffer = io.BytesIO()
    torch.save(conv, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert type(other) is type(conv)
        assert torch.equal(other(x, EDGES), expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES[:3])
def test_lazy_sizes(name, fused, x, request):
    if fused:
        request.getfixturevalue("fused_on_cpu")
    torch.manual_seed(1)
    mine = getattr(ours, name)(-1, 4, edge_dim=-1)
    edge_attr = torch.randn(EDGES.size(1), 2)
    assert mine(x, EDGES, edge_attr).shape == (NUM_NODES, 4)
    assert all(p.shape[-1] in (2, 3, 4) for p in mine.parameters())
    pairs = getattr(ours, name)((-1, -1), 4)
    assert pairs((x, torch.randn(NUM_NODES, 5)), EDGES).shape == (NUM_NODES, 4)


# Explainers ----------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, library, *names):
        super().__init__()
        self.convs = torch.nn.ModuleList([make(name, library, FEATURES, FEATURES) for name in names])
        self.lin = torch.nn.Linear(FEATURES, 4)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.lin(x)


CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_gnn_explainer(name, x):
    model = Net(ours, name)
    before = model(x, EDGES)
    explainer = Explainer(
        model, GNNExplainer(epochs=3), explanation_type="model", edge_mask_type="object", model_config=CONFIG
    )
    mask = explainer(x, EDGES).edge_mask
    assert mask.shape == (EDGES.size(1),) and mask.max() > mask.min()
    assert reasons_of(model.convs[0], x, EDGES) == [], "the explainer has gone"
    torch.testing.assert_close(model(x, EDGES), before)


@pytest.mark.usefixtures("fused_on_cpu")
def test_attention_explainer(x):
    def explain(library):
        model = Net(library, "GATConv", "GATv2Conv", "TransformerConv")
        model.load_state_dict(reference.state_dict())
        explainer = Explainer(
            model, AttentionExplainer(), explanation_type="model", edge_mask_type="object", model_config=CONFIG
        )
        return explainer(x, EDGES).edge_mask

    reference = Net(pyg, "GATConv", "GATv2Conv", "TransformerConv")
    torch.testing.assert_close(explain(ours), explain(pyg))


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_pg_explainer(name, x):
    model, target = Net(ours, name), torch.randint(4, (NUM_NODES,))
    explainer = Explainer(
        model, PGExplainer(epochs=1), explanation_type="phenomenon", edge_mask_type="object", model_config=CONFIG
    )
    for index in range(NUM_NODES):
        assert explainer.algorithm.train(0, model, x, EDGES, target=target, index=index) >= 0
    assert explainer(x, EDGES, target=target, index=0).edge_mask.shape == (EDGES.size(1),)


ORDER = """
import os
import pickle
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer
import pyg_dfgnn, pyg_dfgnn.nn as ours

def check(name, swapped):
    arguments = () if name == "AGNNConv" else (3, 4)
    conv = getattr(pyg if swapped else ours, name)(*arguments)
    conv = pyg_dfgnn.accelerate(conv) if swapped else conv
    x, edge_index = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    explainer = Explainer(conv, GNNExplainer(epochs=2), explanation_type="model", edge_mask_type="object",
                          model_config=dict(mode="regression", task_level="node", return_type="raw"))
    assert explainer(x, edge_index).edge_mask.shape == (4,)
    seen = []
    handle = conv.register_message_forward_hook(lambda *args: seen.append(1))
    conv(x, edge_index)
    assert seen == [1]
    handle.remove()
    assert torch.equal(pickle.loads(pickle.dumps(conv.eval()))(x, edge_index), conv(x, edge_index))

for first in ([], [pyg], [ours]):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, first
        continue
    for library in first:
        library.GATConv(3, 4), library.GATv2Conv(3, 4), library.TransformerConv(3, 4), library.AGNNConv()
    for name, swapped in [("GATConv", True), ("AGNNConv", False), ("GATv2Conv", False), ("TransformerConv", True)]:
        check(name, swapped)
        check(name, not swapped)
    break
"""


def test_order_of_first_instances(tmp_path):
    """PyG generates code into a class on its first instance; no order may break explainers or hooks."""
    run_script(ORDER, tmp_path)


# Heterogeneous graphs ------------------------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    def __init__(self, library):
        super().__init__()
        self.conv1 = library.GATConv((-1, -1), 4, heads=2, add_self_loops=False)
        self.conv2 = library.GATv2Conv((-1, -1), 4, add_self_loops=False)
        self.conv3 = library.TransformerConv((-1, -1), 4)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv3(self.conv2(x, edge_index).relu(), edge_index)


HETERO_X = {"paper": torch.randn(6, 3), "author": torch.randn(4, 5)}
HETERO_EDGES = {
    ("paper", "cites", "paper"): torch.tensor([[0, 1, 2, 5], [3, 3, 0, 1]]),
    ("author", "writes", "paper"): torch.tensor([[0, 1, 3, 3], [0, 1, 2, 5]]),
    ("paper", "rev_writes", "author"): torch.tensor([[0, 1, 2, 5], [0, 1, 3, 3]]),
}
METADATA = list(HETERO_X), list(HETERO_EDGES)


@pytest.mark.usefixtures("fused_on_cpu")
def test_to_hetero():
    results = []
    for library in (ours, pyg):
        torch.manual_seed(4)
        model = to_hetero(Stack(library), METADATA)
        results.append(model(HETERO_X, HETERO_EDGES))
        if library is ours:
            assert all(isinstance(conv, ours.GATConv) for conv in model.conv1.values())
    for key, expected in results[1].items():
        torch.testing.assert_close(results[0][key], expected)


@pytest.mark.usefixtures("fused_on_cpu")
def test_accelerate_a_to_hetero_model():
    torch.manual_seed(4)
    model = to_hetero(Stack(pyg), METADATA)
    expected = model(HETERO_X, HETERO_EDGES)
    assert pyg_dfgnn.accelerate(model) is model
    assert all(type(conv) is ours.GATv2Conv for conv in model.conv2.values())
    for key, value in model(HETERO_X, HETERO_EDGES).items():
        torch.testing.assert_close(value, expected[key])


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("aggr", ["sum", "mean", None])
def test_hetero_conv(aggr):
    results = []
    for library in (ours, pyg):
        torch.manual_seed(4)
        convs = {
            ("paper", "cites", "paper"): library.GATConv(-1, 4),
            ("author", "writes", "paper"): library.GATv2Conv((-1, -1), 4, add_self_loops=False),
            ("paper", "rev_writes", "author"): library.TransformerConv((-1, -1), 4),
        }
        torch.manual_seed(5)
        results.append(HeteroConv(convs, aggr=aggr)(HETERO_X, HETERO_EDGES))
    for key, expected in results[1].items():
        torch.testing.assert_close(results[0][key], expected)


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:Dynamo detected")
@over(name=tuple(NAMES), swapped=(False, True))
def test_compile_on_the_cpu(name, swapped, x):
    conv = pyg_dfgnn.accelerate(make(name, pyg)) if swapped else make(name)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, EDGES), conv(x, EDGES))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for function, leaf in zip((compiled, conv), leaves):
        function(leaf, EDGES).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.usefixtures("forget_logged")
def test_compile_reports_at_trace_time(x, caplog):
    conv = make("GATConv", aggr="mean")
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, EDGES), conv(x, EDGES))
    told = [record.getMessage() for record in caplog.records if record.name == "pyg_dfgnn"]
    assert len(told) == 1 and "aggr is 'mean'" in told[0]


class Scripted(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["TransformerConv", "AGNNConv", "GCNConv", "SAGEConv"])
def test_script_takes_pygs_class(name, x, caplog, forget_logged):
    """Convs that TorchScript takes upstream."""
    model = Scripted(make(name))
    expected = model(x, EDGES)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x, EDGES), expected)
    assert "torch.jit.script" in caplog.text and "give it a copy" in caplog.text
    assert type(model.conv) is getattr(pyg, name)
    kept = Scripted(make(name))
    torch.jit.script(copy.deepcopy(kept))
    assert type(kept.conv) is getattr(ours, name)


# Importing -----------------------------------------------------------------------------------------------------------


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="nothing"):
        pyg_dfgnn.nothing  # noqa: B018
    assert {"Graph", "accelerate", "settings"} <= set(dir(pyg_dfgnn))


def gated(nn):
    return nn.ResGatedGraphConv(4, 4, edge_dim=3)


def of_two_layers(nn):
    return nn.PNAConv(4, 4, ["sum"], ["identity"], torch.ones(9), pre_layers=2)


@pytest.mark.parametrize("make", [gated, of_two_layers])
def test_layers_without_kernels_are_compiled_by_whatever_name_they_were_made(make):
    for nn in (pyg, ours):
        layer = pyg_dfgnn.accelerate(make(nn))
        (row, *_) = pyg_dfgnn.report(layer)
        assert row.compiled and type(layer).__module__.startswith("torch_geometric")
