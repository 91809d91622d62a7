"""Masks of explainers have the effect that they have in PyG, in whatever order layers are explained and swapped."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.settings import local_settings
from tests.nn.convs import EDGES, FEATURES, NUM_NODES
from tests.processes import run_script

KIND = torch.zeros(EDGES.size(1), dtype=torch.long)
X = torch.randn(NUM_NODES, FEATURES, generator=torch.Generator().manual_seed(0))
MASK = torch.randn(EDGES.size(1), generator=torch.Generator().manual_seed(1))
LAYERS = {
    "GCNConv": lambda p: p.GCNConv(FEATURES, 4),
    "GATConv": lambda p: p.GATConv(FEATURES, 4, heads=2),
    "SAGEConv": lambda p: p.SAGEConv(FEATURES, 4),
    "GINConv": lambda p: p.GINConv(torch.nn.Linear(FEATURES, 4)),
    # With one relation: PyG propagates the edges of each apart, which masks do not fit.
    "RGCNConv": lambda p: p.RGCNConv(FEATURES, 4, 1),
    # No drop-in: its messages are compiled.
    "LEConv": lambda p: pyg.LEConv(FEATURES, 4),
}
ORDERS = ["AERE", "EAE", "EARE", "AEAE", "NAE", "NARE", "FAF", "DAE", "EAEREAE", "XAXRX", "SE"]


class Model(torch.nn.Module):
    def __init__(self, make, library):
        super().__init__()
        torch.manual_seed(0)
        self.conv = make(library)

    def forward(self, x, edge_index):
        rest = (KIND,) if "RGCN" in type(self.conv).__name__ else ()
        return self.conv(x, edge_index, *rest)


def explained(model):
    set_masks(model, MASK, EDGES)
    try:
        return model(X, EDGES).detach()
    finally:
        clear_masks(model)


def by_gnn_explainer(model):
    torch.manual_seed(3)
    explainer = Explainer(
        model, GNNExplainer(epochs=3), explanation_type="model", edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )  # fmt: skip
    return explainer(X, EDGES).edge_mask


def results(name, library=pyg):
    """What the layer gives, under masks, and what an explainer finds."""
    model = Model(LAYERS[name], library)
    return model(X, EDGES).detach(), explained(model), by_gnn_explainer(model)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The results of PyG in a process in which no layer of this package was made."""
    folder = tmp_path_factory.mktemp("wanted")
    path = folder / "results.pt"
    code = f"""
import torch
from tests.nn.test_explained import LAYERS, results
torch.save({{name: results(name) for name in LAYERS}}, {str(path)!r})
"""
    run_script(code, folder)
    return torch.load(path)


def check(model, wanted, is_final=False):
    plain, masked, found = wanted
    torch.testing.assert_close(explained(model), masked)
    torch.testing.assert_close(model(X, EDGES).detach(), plain)
    if is_final:
        torch.testing.assert_close(by_gnn_explainer(model), found)


def state_of(kind):
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("order", ORDERS)
def test_orders(name, order, wanted):
    """A: accelerate, R: restore, E: explain, N: explain is False for once, D: decomposed for once, X: under a mask all
    along, F: never explained, S: a copy of the explained model.
    """
    wanted, make = wanted[name], LAYERS[name]
    before = [Model(make, library) for library in (pyg, ours)]
    kinds = {name: state_of(kind) for name, kind in ((k.__qualname__, k) for k in type(before[0].conv).__mro__)}
    model = Model(make, pyg)
    for step in order:
        match step:
            case "A":
                with local_settings(fallback="silent"):
                    pyg_dfgnn.accelerate(model)
            case "R":
                pyg_dfgnn.restore(model)
            case "N":
                model.conv.explain = False
                model.conv.explain = None
            case "F":
                model.conv.explain = False
                assert torch.equal(explained(model), model(X, EDGES))
            case "D" if name == "GCNConv":
                model.conv.decomposed_layers = 2
                torch.testing.assert_close(model(X, EDGES).detach(), wanted[0])
                model.conv.decomposed_layers = 1
            case "S":
                explained(model)
                model = copy.deepcopy(model)
            case "X":
                set_masks(model, MASK, EDGES)
                torch.testing.assert_close(model(X, EDGES).detach(), wanted[1])
            case "E":
                check(model, wanted)
    clear_masks(model)
    if "F" not in order:
        check(model, wanted, True)
    for other in (*before, Model(make, pyg), Model(make, ours)):
        check(other, wanted)
    if name != "LEConv":
        for kind in type(before[0].conv).__mro__:
            assert state_of(kind) == kinds[kind.__qualname__]


@pytest.mark.parametrize("masked", [False, True], ids=["", "under masks"])
def test_attentive_fp_takes_kernels(masked, fused_on_cpu):
    """PyG's model sets `explain=False` on one of its convs."""
    torch.manual_seed(0)
    plain = pyg.AttentiveFP(FEATURES, 8, 2, edge_dim=2, num_layers=3, num_timesteps=2)
    model = copy.deepcopy(plain)
    with local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model)
    data = X, EDGES, torch.randn(EDGES.size(1), 2), torch.arange(NUM_NODES) // 4
    if masked:
        set_masks(plain, MASK, EDGES)
        set_masks(model, MASK, EDGES)
    torch.testing.assert_close(model(*data), plain(*data))
    fused = [not ours.gate.module_reasons(conv, False) for conv in (*model.atom_convs, model.mol_conv)]
    assert fused == [not masked, not masked, True]


def test_a_function_of_a_user_stays():
    conv = pyg.GCNConv(FEATURES, 4)
    conv.propagate = lambda edge_index, x, **_: 2 * x
    want = conv(X, EDGES)
    with local_settings(fallback="silent"):
        for change in (pyg_dfgnn.accelerate, pyg_dfgnn.restore):
            assert torch.equal(change(conv)(X, EDGES), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripting_an_explained_drop_in(wanted):
    model = Model(LAYERS["SAGEConv"], ours)
    explained(model)
    with local_settings(fallback="silent"):
        scripted = torch.jit.script(model.conv)
    torch.testing.assert_close(scripted(X, EDGES).detach(), wanted["SAGEConv"][0])
    check(Model(LAYERS["SAGEConv"], pyg), wanted["SAGEConv"])
