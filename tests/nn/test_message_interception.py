"""How `accelerate` takes a user's layers, what survives copies, and how it is undone."""

import copy
import io
import pickle
import runpy
import sys

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.conv_call import edges_in_flow
from pyg_dfgnn.nn.registry import MARK
from tests.nn.message_cases import watched
from tests.nn.message_users import FEATURES, Temperature
from tests.processes import run_script

EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 4, 4]])


class Mine(MessagePassing):
    """A user's layer."""

    def __init__(self, channels=4):
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(channels, channels)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(self.lin(x_i)) * x_j


class Derived(Mine):
    """A user's subclass of a layer that may be compiled already."""

    def message(self, x_i, x_j):
        return super().message(x_i, x_j) + 1.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.gat = Mine(), Derived(), pyg.GATConv(4, 4)

    def forward(self, x, edge_index):
        return self.gat(self.second(self.first(x, edge_index), edge_index), edge_index)


class Custom(Mine):
    """A layer that propagates by itself."""

    def propagate(self, edge_index, size=None, **kwargs):
        return kwargs["x"]


@pytest.fixture
def x():
    return torch.randn(5, 4)


@pytest.fixture(autouse=True)
def quiet():
    with pyg_dfgnn.local_settings(fallback="silent"):
        yield


def calls_of(model, *args):
    """The result of a call and the classes of the layers that were captured anew, whose programs ran."""
    with messages.interpreted(), watched() as captured:
        result = model(*args)
    assert not captured.left
    return result, captured.names


def test_accelerate_takes_every_layer_and_restore_undoes_it(x):
    model = Net()
    expected, state = model(x, EDGES), str(model)
    assert pyg_dfgnn.accelerate(model) is model and type(model.gat) is ours.GATConv and type(model.first) is Mine
    marks = model.first.__dict__[MARK]
    pyg_dfgnn.accelerate(model)
    assert model.first.__dict__[MARK] is marks and str(model) == state
    assert [row.state for row in pyg_dfgnn.report(model) if row.name in ("first", "second")] == ["compiled"] * 2
    result, compiled = calls_of(model, x, EDGES)
    torch.testing.assert_close(result, expected)
    assert compiled == ["Mine", "Derived"]
    assert pyg_dfgnn.restore(model) is model and type(model.gat) is pyg.GATConv
    assert calls_of(model, x, EDGES)[1] == [] and "left" in str(pyg_dfgnn.report(model))
    assert calls_of(pyg_dfgnn.accelerate(model), x, EDGES)[1] == compiled


def test_accelerate_says_what_it_compiles(caplog):
    with pyg_dfgnn.local_settings(fallback="log"), caplog.at_level("INFO", logger="pyg_dfgnn"):
        pyg_dfgnn.accelerate(Net())
    assert "compiled: 1 Derived, 1 Mine; left: none" in caplog.messages[0]


@pytest.mark.parametrize(
    ("kwargs", "taken"),
    [
        ({"only": Derived}, {"second"}),
        ({"only": "first"}, {"first"}),
        ({"only": ["sec*", pyg.GATConv]}, {"second", "gat"}),
        ({"only": ours.GATConv}, {"gat"}),
        ({"skip": Derived}, {"first", "gat"}),
        ({"only": Mine, "skip": "second"}, {"first"}),
    ],
)
def test_accelerate_is_limited_by_class_or_name(kwargs, taken):
    model = pyg_dfgnn.accelerate(Net(), **kwargs)
    layers = {"first": model.first, "second": model.second, "gat": model.gat}
    assert {name for name, m in layers.items() if MARK in m.__dict__ or type(m) is ours.GATConv} == taken


def test_a_layer_with_its_own_propagation_is_right(x):
    layer = pyg_dfgnn.accelerate(Custom())
    for _ in range(2):
        assert torch.equal(calls_of(layer, x, EDGES)[0], x)
    assert pyg_dfgnn.report(layer)[0].state == "left"


def test_copies_stay_compiled(x):
    model = pyg_dfgnn.accelerate(Net())
    expected = calls_of(model, x, EDGES)[0]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        twin.load_state_dict(model.state_dict())
        result, compiled = calls_of(twin, x, EDGES)
        torch.testing.assert_close(result, expected)
        assert compiled == ["Mine", "Derived"]
        with torch.no_grad():
            twin.first.lin.weight.zero_()
        assert not torch.equal(calls_of(twin, x, EDGES)[0], expected)


def test_a_saved_model_is_compiled_in_another_process(tmp_path):
    layer, x = pyg_dfgnn.accelerate(Temperature(FEATURES)), torch.randn(5, FEATURES)
    torch.save((layer, x, calls_of(layer, x, EDGES)[0]), tmp_path / "model.pt")
    code = f"""
import sys, torch
layer, x, expected = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
from pyg_dfgnn import frontend
from pyg_dfgnn.nn import messages
graphs = []
frontend.watchers.append(graphs.append)
with messages.interpreted():
    torch.testing.assert_close(layer(x, torch.tensor({EDGES.tolist()})), expected)
assert graphs[0].regions
"""
    run_script(code, tmp_path)


@pytest.mark.parametrize("first", [Mine, Derived])
def test_subclasses_of_a_compiled_class_are_their_own(first, x):
    pyg_dfgnn.accelerate(first())
    plain = Derived()
    assert calls_of(plain, x, EDGES)[1] == []
    expected = plain(x, EDGES)
    result, compiled = calls_of(pyg_dfgnn.accelerate(plain), x, EDGES)
    torch.testing.assert_close(result, expected)
    assert compiled == ["Derived"]


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_names_that_no_layer_has_are_refused(argument):
    model = Net()
    with pytest.raises(ValueError, match=rf"'{argument}' needs names of layers .* \(got 'frist', which no layer has\)"):
        pyg_dfgnn.accelerate(model, **{argument: ["second", "frist"]})
    assert not any("_pyg_dfgnn" in name for module in model.modules() for name in vars(module))


def test_explainers_see_pygs_path(x):
    model = pyg_dfgnn.accelerate(Net(), skip=pyg.GATConv)
    calls_of(model, x, EDGES)
    explainer = Explainer(
        model=model,
        algorithm=GNNExplainer(epochs=2),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    with messages.interpreted():
        assert explainer(x, EDGES).edge_mask.numel() == EDGES.size(1)
    result, compiled = calls_of(model, x, EDGES)
    assert compiled == ["Mine", "Derived"]
    model.first.explain = True
    model.first._edge_mask, model.first._apply_sigmoid = torch.nn.Parameter(torch.zeros(5)), False
    explained, compiled = calls_of(model, x, EDGES)
    assert compiled == ["Derived"] and not torch.equal(explained, result)


def test_settings_turn_it_off(x):
    layer = pyg_dfgnn.accelerate(Mine())
    with pyg_dfgnn.local_settings(compile_messages=False):
        assert calls_of(layer, x, EDGES)[1] == []
    assert calls_of(layer, x, EDGES)[1] == ["Mine"]
    with pytest.raises(ValueError, match="'compile_messages' needs one of True, False"):
        pyg_dfgnn.settings(compile_messages="no")


@pytest.mark.parametrize("value", ["0", "1"])
def test_environment_turns_it_off(value, monkeypatch):
    monkeypatch.setenv("PYG_DFGNN_COMPILE_MESSAGES", value)
    anew = runpy.run_path(sys.modules["pyg_dfgnn.settings"].__file__, run_name="pyg_dfgnn.another")
    assert anew["Settings"]().compile_messages is (value == "1")


def test_pygs_own_code_runs_on_a_cpu(x, monkeypatch):
    """Nothing is captured where there are no kernels, and nobody is told of an error."""
    layer = Mine()
    expected = layer(x, EDGES)
    pyg_dfgnn.accelerate(layer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pyg_dfgnn.local_settings(fallback="error"), watched() as captured:
        assert torch.equal(layer(x, EDGES), expected) and not captured
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match="not on a CUDA device"):
        layer(x, EDGES)


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_export_and_transforms_take_pygs_path(x):
    layer = pyg_dfgnn.accelerate(Mine())
    expected = layer(x, EDGES)
    with messages.interpreted(), watched() as captured:
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, EDGES), expected)
        for strict in (True, False):
            exported = torch.export.export(layer, (x, EDGES), strict=strict)
            torch.testing.assert_close(exported.module()(x, EDGES), expected)
        torch.testing.assert_close(torch.func.vmap(lambda v: layer(v, EDGES))(x[None])[0], expected)
        torch.testing.assert_close(torch.jit.trace(layer, (x, EDGES), check_trace=False)(x, EDGES), expected)
    assert not captured


def test_describe_plan_shows_the_program_or_the_line(x):
    layer = pyg_dfgnn.accelerate(Mine())
    shown = str(pyg_dfgnn.describe_plan(layer, x, EDGES))
    assert "%0 = input" in shown and "not on a CUDA device" in shown
    on_cuda = pyg_dfgnn.describe_plan(layer, x, EDGES, device="cuda")
    assert on_cuda.fused and "traversal E->D" in str(on_cuda)

    class Wrong(Mine):
        def message(self, x_i, x_j):
            return x_j * x_i.max()

    description = pyg_dfgnn.describe_plan(pyg_dfgnn.accelerate(Wrong()), x, EDGES)
    assert "return x_j * x_i.max()" in description.reasons[0] and not description.fused


def test_describe_plan_is_of_its_call_alone(x):
    class Sorting(Mine):
        sorts = True

        def message(self, x_i, x_j):
            return x_j.sort(dim=-1).values if self.sorts else x_i * x_j

    layer = pyg_dfgnn.accelerate(Sorting())
    assert "sort" in pyg_dfgnn.describe_plan(layer, x, EDGES, device="cuda").reasons[0]
    layer.sorts = False
    assert pyg_dfgnn.describe_plan(layer, x, EDGES, device="cuda").fused


class Branches(MessagePassing):
    """A branch on numbers, in whose pieces nothing is gathered and reduced."""

    def __init__(self):
        super().__init__()
        self.limit = 1e9

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return -x_j if x_j.sum() > self.limit else x_j


def test_a_layer_without_programs_runs_its_own_code_and_says_why(x):
    layer, plain = pyg_dfgnn.accelerate(Branches()), Branches()
    with messages.interpreted(), watched() as captured:
        for limit in (1e9, -1e9, 1e9):
            layer.limit = plain.limit = limit
            assert torch.equal(layer(x, EDGES), plain(x, EDGES))
        many = len(captured)
        layer(torch.cat([x, x]), EDGES)
        assert len(captured) == many and not captured.programs
        row = pyg_dfgnn.report(layer)[0]
        assert row.state == "left" and row.why
        with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError):
            layer(x, EDGES)


class Weighted(MessagePassing):
    """A layer that takes what PyG reads as an adjacency."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrices_are_pygs(x):
    layer, plain = pyg_dfgnn.accelerate(Weighted()), Weighted()
    coo = torch.sparse_coo_tensor(EDGES.flip(0), torch.rand(EDGES.size(1)), (5, 5)).coalesce()
    with messages.interpreted(), watched() as captured:
        for matrix in (coo, coo.to_sparse_csr()):
            torch.testing.assert_close(layer(x, matrix), plain(x, matrix))
    assert not captured


class Selecting(Mine):
    """A layer whose forward works on the edges."""

    def forward(self, x, edge_index):
        return super().forward(x, edge_index[:, edge_index[0] != edge_index[1]])


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kind", [Mine, Selecting])
def test_a_graph_stands_for_its_edges(x, kind, flow):
    layer = kind()
    layer.flow = flow
    want = layer(x, EDGES)
    pyg_dfgnn.accelerate(layer)
    graph = Graph.of(EDGES.clone(), 5, flow=flow)
    result, compiled = calls_of(layer, x, graph)
    assert compiled == [kind.__name__] and torch.allclose(result, want)
    by_name, compiled = calls_of(lambda x: layer(x, edge_index=graph), x)
    assert compiled == [kind.__name__] and torch.equal(by_name, result)


def test_an_edit_of_edges_that_a_graph_has_made_ends_with_the_call(x):
    graph = Graph.of(EDGES.clone(), 5, flow="target_to_source")
    want = edges_in_flow(graph, "target_to_source").clone()
    edges_in_flow(graph, "target_to_source").zero_()
    assert torch.equal(edges_in_flow(graph, "target_to_source"), want)
