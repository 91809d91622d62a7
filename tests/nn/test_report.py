"""What users see: the line of `accelerate`, the table of `report`, the plans of `describe_plan`, the line on a CPU."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.graph.derived import in_units
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.messages import UNCALLED
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import EDGES, LOOPED, NAMES, NUM_NODES, make, reasons_of
from tests.nn.message_cases import watched
from tests.processes import run_script


class Special(pyg.GATConv):
    """A user's subclass of PyG's class: it may mean something else."""


class Model(torch.nn.Module):
    """A layer of each kind: fused, of another aggregation, too wide in float64, without drop-in, never called."""

    def __init__(self):
        super().__init__()
        self.lin = pyg.Linear(3, 4)
        self.first = pyg.GATConv(4, 4, heads=2)
        self.mean = pyg.TransformerConv(8, 4, aggr="mean")
        self.norm = pyg.BatchNorm(4)
        self.eg = pyg.EGConv(4, 4, num_heads=2, cached=True)
        self.wide = pyg.GATv2Conv(4, 600).double()
        self.idle = pyg.AGNNConv()

    def forward(self, x, edge_index):
        x = self.norm(self.mean(self.first(self.lin(x), edge_index), edge_index))
        return self.wide(self.eg(x, edge_index).double(), edge_index)


@pytest.mark.usefixtures("fused_on_cpu")
def test_accelerate(x):
    model = torch.nn.ModuleDict(
        {
            "nested": torch.nn.ModuleList([torch.nn.Sequential(pyg.GATConv(3, 4)), pyg.AGNNConv()]),
            "model": pyg.GAT(3, 4, num_layers=2, v2=True),
            "other": pyg.LEConv(3, 4),
            "special": Special(3, 4),
        }
    ).eval()
    parameters = {name: parameter for name, parameter in model.named_parameters()}
    expected = model["nested"][0][0](x, EDGES), model["model"](x, EDGES)
    for _ in range(2):
        assert pyg_dfgnn.accelerate(model) is model
    assert type(model["nested"][0][0]) is ours.GATConv and type(model["nested"][1]) is ours.AGNNConv
    assert all(type(conv) is ours.GATv2Conv for conv in model["model"].convs)
    assert type(model["other"]) is pyg.LEConv and type(model["special"]) is Special
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


@pytest.mark.parametrize("name", ["only", "skip"])
@pytest.mark.parametrize("wrong", [pyg.AGNNConv(), 3, [pyg.AGNNConv, None]], ids=["layer", "number", "several"])
def test_layers_are_chosen_by_classes_and_names(name, wrong):
    got = "NoneType" if isinstance(wrong, list) else type(wrong).__name__
    with pytest.raises(TypeError, match=rf"'{name}' needs a class, a name, or several of them \(got {got}\)"):
        pyg_dfgnn.accelerate(pyg.AGNNConv(), **{name: wrong})


# describe_plan -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("name", NAMES)
def test_describe_plan(name, x):
    conv = make(name)
    description = pyg_dfgnn.describe_plan(conv, x, EDGES)
    assert description.fused and description.reasons == () and description.plan is not None
    # A sum of copies needs no array with self-loops where the edges have none.
    loops = NUM_NODES if name in LOOPED and not isinstance(conv, NormalizedConv) else 0
    text = str(description)
    assert f"{EDGES.size(1) + loops} edges" in text and str(conv) in text and "schedule" in text
    sides = 2 * 4 * (NUM_NODES + 1 + 2 * (EDGES.size(1) + loops))
    assert f"kept: {description.memory}" in text and "adjacency targets sources" in description.memory
    # A forward call alone, or the backward passes too.
    assert in_units(sides) in description.memory or in_units(sides / 2) in description.memory


@pytest.mark.parametrize("name", NAMES)
def test_describe_plan_under_autocast(name, x):
    """Autocast is at work in linear layers, which AGNNConv has none of and SAGEConv has after its sums."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem = pyg_dfgnn.describe_plan(make(name), x, EDGES).problem
    assert problem.dtype == (torch.float32 if name in ("AGNNConv", "SAGEConv") else torch.bfloat16)


@pytest.mark.parametrize(
    "make_conv",
    [
        lambda: ours.GCNConv(3, 4),
        lambda: ours.SAGEConv(3, 4),
        lambda: ours.SAGEConv(3, 4, aggr="max"),
        lambda: ours.ClusterGCNConv(3, 4),
        lambda: ours.GATConv(3, 4),
    ],
    ids=["GCN", "mean", "max", "ClusterGCN", "GAT"],
)
def test_described_is_all_that_a_step_keeps(make_conv, x):
    conv, edges = make_conv(), EDGES.clone()
    with emulated_device():
        before = pyg_dfgnn.describe_plan(conv, x, edges)
        conv(x.clone().requires_grad_(), edges).sum().backward()
        assert before.memory == pyg_dfgnn.describe_plan(conv, x, edges).memory


def test_describe_plan_after_a_step(x):
    """What the forward has left in attributes, alone and in lists, has a history that torch does not copy."""

    class Keeping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.left = pyg.LEConv(3, 4), []

        def forward(self, x, edge_index):
            self.hidden = self.conv(x, edge_index)
            self.left.append(self.hidden.relu())
            return self.hidden

    model = pyg_dfgnn.accelerate(Keeping())
    before = str(pyg_dfgnn.describe_plan(model, x, EDGES))
    model(x, EDGES).sum().backward()
    assert str(pyg_dfgnn.describe_plan(model, x, EDGES)) == before and len(model.left) == 1


def test_describe_plan_of_other_modules(x):
    assert "accelerate" in str(pyg_dfgnn.describe_plan(make("GATConv", pyg), x, EDGES))
    assert "no drop-in" in str(pyg_dfgnn.describe_plan(pyg.LEConv(3, 4), x, EDGES))
    for layer in (torch.nn.Linear(3, 4), torch.nn.ReLU()):
        assert "no layer that passes messages" in str(pyg_dfgnn.describe_plan(layer, x))
    with pyg_dfgnn.local_settings(linear="kernels"):
        assert "this is torch's Linear" in str(pyg_dfgnn.describe_plan(torch.nn.Linear(3, 4), x))
    with pytest.raises(TypeError, match="'model' needs a torch.nn.Module"):
        pyg_dfgnn.describe_plan("conv", x, EDGES)


def test_describe_plan_of_a_model(x):
    """Each layer is described by its own call, every reason is listed, and the model stays as it was."""
    model = pyg_dfgnn.accelerate(Model())
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with emulated_device():
        description = pyg_dfgnn.describe_plan(model, x, EDGES)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state()) and model.eg._cached_edge_index is None
    layers = description.layers
    assert list(layers) == ["first", "mean", "eg", "eg.aggr_module", "wide", "idle"] and not description.fused
    assert layers["first"].fused and layers["first"].plan is not None
    assert layers["mean"].reasons == ("aggr is 'mean', fused is sum",)
    assert layers["eg"].fused and "E->D" in str(layers["eg"])
    wide = " ".join(layers["wide"].reasons)
    assert len(layers["wide"].reasons) == 2 and "float64" in wide and "600 channels" in wide
    assert layers["idle"].reasons == ("this forward does not call the layer",)
    assert all(f"{name}: {layer.layer}" in str(description) for name, layer in layers.items())
    fused = sum(layer.fused for layer in layers.values())
    assert str(description).splitlines()[-1] == f"6 layers: {fused} fused, 0 in part, {6 - fused} PyG's"


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)], ids=["named", "indexed"])
def test_describe_plan_for_a_gpu_that_is_not_there(device, x, monkeypatch):
    """It plans with the constants of an H200, whatever the device of the tensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in NAMES:
        description = pyg_dfgnn.describe_plan(make(name), x, EDGES, device=device)
        assert description.fused and description.problem.device == torch.device(device)
        assert "backward over sources" in str(description.plan)
    with torch.no_grad():
        description = pyg_dfgnn.describe_plan(make("GATConv"), x, EDGES, device=device)
    assert description.fused and "backward" not in str(description.plan)
    wrong = make("GATConv", aggr="max", out_channels=600).double()
    reasons = reasons_of(wrong, x.double(), EDGES, device=device)
    assert len(reasons) == 3 and "tensors are on" not in str(reasons)


@pytest.mark.parametrize("rows, features, channels", [(10, 8, 8), (1 << 16, 128, 128), (1 << 16, 999, 128)])
def test_describe_plan_of_a_linear_layer(rows, features, channels):
    """It says what the layer does."""
    layer, x = pyg.Linear(features, channels), torch.empty(rows, features)
    with pyg_dfgnn.local_settings(linear="kernels"):
        assert "call pyg_dfgnn.accelerate(model)" in str(pyg_dfgnn.describe_plan(layer, x))
        pyg_dfgnn.accelerate(layer)
    assert str(torch.device("cpu")) in str(pyg_dfgnn.describe_plan(layer, x))
    with emulated_device():
        description = pyg_dfgnn.describe_plan(layer, x)
        assert description.fused is gemm.kernel_is_faster(x, channels)
        assert description.fused is (rows > 10 and features == 128)


def test_report():
    model = Model()
    model.special = Special(3, 4)
    before = pyg_dfgnn.report(model)
    assert not any(row.drop_in for row in before) and all(
        "call pyg_dfgnn.accelerate(model)" in row.why for row in before
    )
    assert " this is PyG's GATConv; call " in str(before)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model)
    rows = {row.name: row for row in pyg_dfgnn.report(model)}
    parts = ["first", "mean", "eg", "eg.aggr_module", "wide", "idle", "special", "special.aggr_module"]
    assert list(rows) == parts
    assert [name for name, row in rows.items() if not row.drop_in] == ["eg", "special"]
    assert rows["eg"].state == rows["special"].state == "compiled"
    assert rows["eg"].why == "tensors are on cpu, the kernels run on CUDA devices"
    assert "aggr is 'mean'" in rows["mean"].why and "float64" in rows["wide"].why and "600" in rows["wide"].why
    with emulated_device():
        reasons = {row.name: row.why for row in pyg_dfgnn.report(model) if row.why}
    assert reasons.keys() == {"mean", "wide", "eg", "special"} and "first call tells" in reasons["eg"]
    lines = str(pyg_dfgnn.report(model)).splitlines()
    assert lines[0].split() == ["module", "class", "state", "why"] and len(lines) == 1 + len(rows)
    assert lines[3].split()[:3] == ["eg", "EGConv", "compiled"]


class Silent(pyg.SimpleConv):
    """A user's layer whose `__repr__` fails."""

    def __repr__(self):
        return f"Silent({self.missing})"


def test_layers_that_do_not_print(x):
    drop_in = ours.GATConv(3, 4)
    drop_in.lin.extra_repr = lambda: 1 / 0
    for model in (Silent(), torch.nn.Sequential(Silent()), torch.nn.Sequential(pyg.Linear(3, 3), Silent()), drop_in):
        for _ in range(2):
            assert [row.kind for row in pyg_dfgnn.report(model)] and str(pyg_dfgnn.report(model))
            layer = model[-1] if isinstance(model, torch.nn.Sequential) else model
            description = pyg_dfgnn.describe_plan(layer, x, EDGES, device="cuda")
            assert str(description).startswith(type(layer).__name__)
            with pyg_dfgnn.local_settings(fallback="silent"):
                pyg_dfgnn.accelerate(model)
    model = pyg.Sequential("x, edge_index", [(Silent(), "x, edge_index -> x")])
    with pyg_dfgnn.local_settings(fallback="silent"):
        assert str(pyg_dfgnn.describe_plan(pyg_dfgnn.accelerate(model), x, EDGES)).startswith("module_0: Silent: ")


class Branching(pyg.SimpleConv):
    """Decides by numbers of edges."""

    def message(self, x_j):
        return x_j if x_j.sum() > 0 else -x_j


class Asking(pyg.SimpleConv):
    """Asks for what differs from call to call, as its code alone shows."""

    def message(self, x_j):
        return x_j if torch.is_grad_enabled() else -x_j


class Plain(pyg.SimpleConv):
    def message(self, x_j):
        return x_j.tanh()


def rows_by_name(model):
    return {row.name: row for row in pyg_dfgnn.report(model) if "." not in row.name}


def stacked(x):
    return torch.stack([x, x], dim=1)


def test_layers_of_which_nothing_or_a_part_is_compiled(caplog):
    caplog.set_level("INFO", "pyg_dfgnn")
    features = torch.randn(NUM_NODES, 8)
    model = torch.nn.ModuleDict(
        {"branch": Branching(), "dna": pyg.DNAConv(8), "asks": Asking(), "late": Late(), "plain": Plain()}
    )
    with emulated_device(), watched():
        pyg_dfgnn.accelerate(model)
        assert "compiled: 1 Asking, 1 Branching, 1 DNAConv, 1 Late, 1 Plain; left: none;" in caplog.text
        assert all(row.why == UNCALLED for row in rows_by_name(model).values())
        with pyg_dfgnn.local_settings(fallback="silent"):
            for name, layer in model.items():
                layer(stacked(features) if name == "dna" else features, EDGES)
        rows = rows_by_name(model)
    assert [name for name, row in rows.items() if row.state == "left"] == ["branch"]
    assert not rows["plain"].why and not rows["asks"].why
    assert "`max` with these arguments" in rows["dna"].why
    described = pyg_dfgnn.describe_plan(model["dna"], stacked(features), EDGES, device="cuda")
    assert str(described).count("`max` with these arguments") == 1


class Late(pyg.SimpleConv):
    def update(self, out, x_i):
        return out + x_i.sum(0)


def test_compiled_layers_on_a_cpu(x):
    model = torch.nn.ModuleDict({"plain": Plain(), "conv": pyg.GCNConv(3, 3)})
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model)
        for _ in range(2):
            rows = rows_by_name(model)
            assert rows["plain"].state == "compiled" and rows["plain"].why == rows["conv"].why != ""
            model["plain"](x, EDGES)


@needs_compiler
@pytest.mark.parametrize(
    "make_conv",
    [
        lambda: pyg.ResGatedGraphConv(4, 4, edge_dim=3),
        lambda: pyg.PNAConv(4, 4, ["mean", "max"], ["identity"], torch.ones(9), pre_layers=2, edge_dim=3),
    ],
    ids=["gates of edges", "several layers"],
)
def test_layers_that_a_drop_in_has_no_kernels_for_are_compiled(make_conv):
    torch.manual_seed(0)
    conv = make_conv()
    twin, edge_attr = copy.deepcopy(conv), torch.randn(EDGES.size(1), 3)
    x = torch.randn(NUM_NODES, 4)
    expected = conv.double()(x.double(), EDGES, edge_attr.double())
    with emulated_device() as launched:
        out = pyg_dfgnn.accelerate(twin)(x, EDGES, edge_attr)
    assert launched and type(twin) is type(conv)
    assert [row.state for row in pyg_dfgnn.report(twin) if row.name == ""] == ["compiled"]
    torch.testing.assert_close(out.double(), expected, **elementwise("float32"))
    assert type(pyg_dfgnn.restore(twin)) is type(conv) and pyg_dfgnn.report(twin)[0].state == "left"


def test_layers_that_are_left_out(x):
    model = torch.nn.ModuleDict(
        {"gat": pyg.GATConv(3, 3), "plain": Plain(), "other": Plain(), "special": Special(3, 3)}
    )
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model, skip=["gat", "plain", "special"])
        whys = {name: row.why for name, row in rows_by_name(model).items() if row.state == "left"}
        assert whys == dict.fromkeys(["gat", "plain", "special"], "left out by 'skip' of pyg_dfgnn.accelerate")
        for name in whys:
            description = pyg_dfgnn.describe_plan(model[name], x, EDGES)
            assert description.reasons == ("left out by 'skip' of pyg_dfgnn.accelerate",)
        pyg_dfgnn.accelerate(model, only=pyg.GATConv)
        rows = rows_by_name(model)
        assert rows["gat"].state == "drop-in" and rows["plain"].why == "left out by 'only' of pyg_dfgnn.accelerate"
        # A layer that an earlier call has taken stays.
        assert rows["other"].state == "compiled"
        assert all(
            "first" in row.why for row in rows_by_name(pyg_dfgnn.restore(model)).values() if row.name != "special"
        )


PROGRAM = """
import logging, os, sys
import torch, torch_geometric.nn as pyg, pyg_dfgnn, pyg_dfgnn.nn

child = 0
for name, setup in {setups}.items():
    print(f"\\n--- {name}", file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
if child:
    sys.exit()
model = torch.nn.ModuleList([pyg.GATConv(3, 4), pyg.GATConv(3, 4), pyg.FAConv(3), pyg.Linear(3, 3)])
exec(setup)
pyg_dfgnn.accelerate(model)
for conv in model[:2]:
    conv(torch.randn(4, 3), torch.tensor([[0, 1], [1, 0]]))
"""


SETUPS = {
    "plain": ("", 2),
    "silent": ("pyg_dfgnn.settings(fallback='silent')", 0),
    "info": ("logging.basicConfig(level=logging.INFO)", 2),
    "warning": ("logging.basicConfig(level=logging.WARNING)", 0),
}


def test_what_a_script_prints(tmp_path):
    """Two lines without any set-up: what `accelerate` changed, and that PyG's code runs on a CPU."""
    program = PROGRAM.replace("{setups}", repr({name: setup for name, (setup, _) in SETUPS.items()}))
    printed, said = run_script(program, tmp_path)
    assert not printed
    parts = said.split("\n--- ")[1:]
    assert [part.partition("\n")[0] for part in parts] == list(SETUPS)
    for part, (name, (_, lines)) in zip(parts, SETUPS.items(), strict=True):
        shown = [line for line in part.splitlines() if "pyg_dfgnn" in line]
        assert len(shown) == lines, (name, shown)
        if lines:
            assert "2 GATConv" in shown[0] and "Linear" not in shown[0] and "compiled: 1 FAConv; left: none" in shown[0]
            assert "PyG's own code runs" in shown[1] and "CPU" in shown[1]


def test_layers_without_parameters_are_on_the_device_of_the_model():
    layers = [ours.SumAggregation(), ours.MultiAggregation(["mean", "max"]), ours.LGConv()]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), *layers)
    on_cpu = "tensors are on cpu, the kernels run on CUDA devices"
    assert [row.why for row in pyg_dfgnn.report(model)] == [on_cpu] * 3
    with emulated_device():
        assert [row.why for row in pyg_dfgnn.report(model)] == [""] * 3
    # Nothing tells where an aggregation by itself will run.
    assert pyg_dfgnn.report(layers[0])[0].why == ""


class NormedMessages(pyg.MessagePassing):
    """Messages through batch norm, which stays PyTorch's in training."""

    def __init__(self):
        super().__init__(aggr="add")
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.norm(x_i * x_j)


def test_a_layer_in_part_says_how_much_stays_pytorchs():
    layer = pyg_dfgnn.accelerate(NormedMessages())
    x, edge_index = torch.randn(6, 4), torch.randint(6, (2, 20))
    with messages.interpreted():
        layer(x, edge_index)
    assert "2 of 3 gathers and reductions by edges stay PyTorch's" in pyg_dfgnn.report(layer)[0].why
    assert "stay PyTorch's" in str(pyg_dfgnn.describe_plan(layer, x, edge_index, device="cuda"))


class Chosen(pyg.MessagePassing):
    """A message with a branch on what is computed."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        if x_j.sum() > 0:
            return x_j
        return 2 * x_j


def test_a_layer_that_breaks_its_graph_says_where():
    layer = pyg_dfgnn.accelerate(Chosen())
    with messages.interpreted():
        layer(torch.randn(6, 4), torch.randint(6, (2, 20)))
    assert "it ends one at nn/test_report.py" in pyg_dfgnn.report(layer)[0].why
    assert "`if x_j.sum() > 0:`" in pyg_dfgnn.report(layer)[0].why
