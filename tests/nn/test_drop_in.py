"""Everything around the numbers that users rely on: state, copies, hooks, explainers, to_hetero, compile, reports."""

import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer, PGExplainer
from torch_geometric.nn import HeteroConv, to_hetero

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.nn.fallback import NO_DEVICE, ON_CPU

NAMES = ["GATConv", "GATv2Conv", "TransformerConv", "AGNNConv"]
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6]])
NUM_NODES, FEATURES = 8, 3
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
]


def pair(name, *args, **kwargs):
    return getattr(ours, name)(*args, **kwargs), getattr(pyg, name)(*args, **kwargs)


def make(name, library=ours, in_channels=FEATURES, out_channels=4, **kwargs):
    conv_type = getattr(library, name)
    return conv_type(**kwargs) if name == "AGNNConv" else conv_type(in_channels, out_channels, **kwargs)


@pytest.fixture
def x():
    return torch.randn(NUM_NODES, FEATURES)


@pytest.mark.parametrize("name,args,kwargs", OPTIONS)
def test_same_class_surface(name, args, kwargs):
    torch.manual_seed(5)
    mine = getattr(ours, name)(*args, **kwargs)
    torch.manual_seed(5)
    theirs = getattr(pyg, name)(*args, **kwargs)
    assert isinstance(mine, getattr(pyg, name)) and type(mine).__name__ == name
    assert repr(mine) == repr(theirs)
    state, expected = mine.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in state), "the same seed gives other parameters"
    torch.manual_seed(6)
    mine.reset_parameters()
    torch.manual_seed(6)
    theirs.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), theirs.state_dict().values()))
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_cpu_is_pygs_own_forward(name, x, monkeypatch):
    mine, theirs = make(name), make(name, pyg)
    theirs.load_state_dict(mine.state_dict())
    with pyg_dfgnn.settings(fallback="error"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert torch.equal(mine(x, EDGES), theirs(x, EDGES))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(UnsupportedError, match=NO_DEVICE):
            mine(x, EDGES)


@pytest.mark.usefixtures("forget_logged")
def test_that_tensors_are_on_a_cpu_is_said_once(x, caplog):
    with caplog.at_level(logging.DEBUG, logger="pyg_dfgnn"):
        with pyg_dfgnn.settings(fallback="silent"):
            make("GATConv")(x, EDGES)
        assert not caplog.records
        for name in NAMES * 2:
            make(name)(x, EDGES)
        assert [record.getMessage() for record in caplog.records] == [ON_CPU]


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


# The reasons ---------------------------------------------------------------------------------------------------------


def reasons_of(conv, *args, **kwargs):
    return list(pyg_dfgnn.describe_plan(conv, *args, **kwargs).reasons)


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
    with pyg_dfgnn.settings(fallback="error"), pytest.raises(UnsupportedError, match=method) as error:
        conv(x, EDGES)
    assert len(error.value.reasons) == 1
    with pyg_dfgnn.settings(fallback="silent"):
        conv(x, EDGES)
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("fused_on_cpu")
def test_a_subclass_that_overrides_nothing_is_fused(x):
    conv = OwnNothing(FEATURES, 4)
    conv(x, EDGES)
    assert reasons_of(conv, x, EDGES) == []


@pytest.mark.usefixtures("fused_on_cpu")
def test_a_replaced_method_of_an_instance_is_seen(x):
    conv = ours.GATConv(FEATURES, 4)
    before = conv(x, EDGES)
    conv.message = lambda x_j, alpha: 0 * x_j
    assert reasons_of(conv, x, EDGES) == ["'message' is overridden"]
    assert not torch.equal(conv(x, EDGES), before)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_hooks_take_pygs_path_and_are_called(name, x):
    conv = make(name)
    before = conv(x, EDGES)
    seen = []
    handle = conv.register_message_forward_hook(lambda module, inputs, out: seen.append(out.size(0)))
    assert reasons_of(conv, x, EDGES) == ["message passing hooks are registered"]
    torch.testing.assert_close(conv(x, EDGES), before)
    assert len(seen) == 1
    handle.remove()
    assert reasons_of(conv, x, EDGES) == []


@pytest.mark.usefixtures("fused_on_cpu")
def test_module_hooks_stay_fused(x):
    conv, seen = make("GATConv"), []
    conv.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    conv(x, EDGES)
    assert len(seen) == 1 and reasons_of(conv, x, EDGES) == []


@pytest.mark.usefixtures("fused_on_cpu")
def test_reasons_of_the_module(x):
    assert reasons_of(make("GATConv", aggr="mean"), x, EDGES) == ["aggr is 'mean', only the sum is fused"]
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


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_torch_func_takes_pygs_path(name, x):
    conv = make(name)
    grad = torch.func.grad(lambda value: conv(value, EDGES).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(conv(leaf, EDGES).square().sum(), leaf)
    torch.testing.assert_close(grad, expected)


def test_all_reasons_at_once(x, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    conv = make("GATConv", aggr="max")
    conv.register_message_forward_hook(lambda module, inputs, out: None)
    description = pyg_dfgnn.describe_plan(conv, x, EDGES)
    assert not description.fused and len(description.reasons) == 3 and "tensors are on cpu" in str(description)
    assert all(reason in str(description) for reason in description.reasons)
    with pyg_dfgnn.settings(fallback="error"), pytest.raises(UnsupportedError) as error:
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
        with pytest.raises((ValueError, IndexError), match="edge_index"):
            make(name)(x, edges)


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

for library in {first}:
    library.GATConv(3, 4), library.GATv2Conv(3, 4), library.TransformerConv(3, 4), library.AGNNConv()
for name, swapped in [("GATConv", True), ("AGNNConv", False), ("GATv2Conv", False), ("TransformerConv", True)]:
    check(name, swapped)
    check(name, not swapped)
"""


@pytest.mark.parametrize("first", ["[]", "[pyg]", "[ours]"])
def test_order_of_first_instances(first):
    """PyG generates code into a class on its first instance; no order may break explainers or hooks."""
    program = ORDER.replace("{first}", first)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


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


# accelerate ----------------------------------------------------------------------------------------------------------


class Special(pyg.GATConv):
    """A user's subclass of PyG's class: it may mean something else."""


@pytest.mark.usefixtures("fused_on_cpu")
def test_accelerate(x):
    model = torch.nn.ModuleDict(
        {
            "nested": torch.nn.ModuleList([torch.nn.Sequential(pyg.GATConv(3, 4)), pyg.AGNNConv()]),
            "model": pyg.GAT(3, 4, num_layers=2, v2=True),
            "other": pyg.GCNConv(3, 4),
            "special": Special(3, 4),
        }
    ).eval()
    parameters = {name: parameter for name, parameter in model.named_parameters()}
    expected = model["nested"][0][0](x, EDGES), model["model"](x, EDGES)
    for _ in range(2):
        assert pyg_dfgnn.accelerate(model) is model
    assert type(model["nested"][0][0]) is ours.GATConv and type(model["nested"][1]) is ours.AGNNConv
    assert all(type(conv) is ours.GATv2Conv for conv in model["model"].convs)
    assert type(model["other"]) is pyg.GCNConv and type(model["special"]) is Special
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    actual = model["nested"][0][0](x, EDGES), model["model"](x, EDGES)
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_accelerate_a_bare_conv(name, x):
    conv = make(name, pyg)
    expected = conv(x, EDGES)
    assert pyg_dfgnn.accelerate(conv) is conv and type(conv) is getattr(ours, name)
    assert reasons_of(conv, x, EDGES) == []
    torch.testing.assert_close(conv(x, EDGES), expected)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x, EDGES), expected)


@pytest.mark.parametrize("wrong", [None, "model", pyg.GATConv, [pyg.AGNNConv()]])
def test_accelerate_wants_a_module(wrong):
    with pytest.raises(TypeError, match="'model' needs a torch.nn.Module"):
        pyg_dfgnn.accelerate(wrong)


# describe_plan -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_describe_plan(name, x):
    conv = make(name)
    description = pyg_dfgnn.describe_plan(conv, x, EDGES)
    assert description.fused and description.reasons == () and description.plan is not None
    loops = 0 if name == "TransformerConv" else NUM_NODES
    text = str(description)
    assert f"{EDGES.size(1) + loops} edges" in text and str(conv) in text and "schedule" in text


@pytest.mark.parametrize("name", NAMES)
def test_describe_plan_under_autocast(name, x):
    """Autocast is at work in linear layers, of which AGNNConv has none."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem = pyg_dfgnn.describe_plan(make(name), x, EDGES).problem
    assert problem.dtype == (torch.float32 if name == "AGNNConv" else torch.bfloat16)


def test_describe_plan_of_other_modules(x):
    assert "accelerate" in str(pyg_dfgnn.describe_plan(make("GATConv", pyg), x, EDGES))
    assert "no drop-in" in str(pyg_dfgnn.describe_plan(pyg.GCNConv(3, 4), x, EDGES))
    with pytest.raises(TypeError, match="'model' needs a torch.nn.Module"):
        pyg_dfgnn.describe_plan("conv", x, EDGES)


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", NAMES)
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
@pytest.mark.parametrize("name", ["TransformerConv", "AGNNConv"])
def test_script_takes_pygs_class(name, x, caplog, forget_logged):
    """The two convs that TorchScript takes upstream."""
    model = Scripted(make(name))
    expected = model(x, EDGES)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x, EDGES), expected)
    assert "torch.jit.script" in caplog.text
    assert type(model.conv) is getattr(pyg, name)


# Importing -----------------------------------------------------------------------------------------------------------


def test_import_is_light():
    program = (
        "import sys, pyg_dfgnn; assert pyg_dfgnn.__version__ and callable(pyg_dfgnn.settings); "
        "assert 'torch_geometric' not in sys.modules; from pyg_dfgnn import Graph, accelerate, describe_plan; "
        "import pyg_dfgnn.nn; assert callable(pyg_dfgnn.settings); assert 'cupy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="nothing"):
        pyg_dfgnn.nothing  # noqa: B018
    assert {"Graph", "accelerate", "settings"} <= set(dir(pyg_dfgnn))
