"""Exported programs run in a process that has done nothing else than `import torch, pyg_dfgnn`."""

import subprocess
import sys
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import pyg_dfgnn.nn as ours
from pyg_dfgnn.ops import visits
from pyg_dfgnn.settings import local_settings
from pyg_dfgnn.statements.segment import MESSAGES, STATS, statement_of
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import EDGES, FEATURES, NUM_NODES

ROOT = Path(__file__).parents[2]
KIND = torch.arange(EDGES.size(1)) % 3
TYPE = torch.arange(NUM_NODES) % 2
X = torch.randn(NUM_NODES, FEATURES, generator=torch.Generator().manual_seed(0))
MLP = lambda: torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.ReLU())  # noqa: E731
EDGE_ATTR = torch.randn(EDGES.size(1), 2, generator=torch.Generator().manual_seed(1))


LAYERS = {
    "GCNConv": (lambda: ours.GCNConv(FEATURES, 4), (X, EDGES)),
    "GCN2Conv": (lambda: ours.GCN2Conv(FEATURES, 0.3), (X, X.flip(0), EDGES)),
    "SGConv": (lambda: ours.SGConv(FEATURES, 4, K=2), (X, EDGES)),
    "APPNP": (lambda: ours.APPNP(2, 0.3), (X, EDGES)),
    "SAGEConv": (lambda: ours.SAGEConv(FEATURES, 4), (X, EDGES)),
    "SAGEConv max": (lambda: ours.SAGEConv(FEATURES, 4, aggr="max"), (X, EDGES)),
    "GraphConv min": (lambda: ours.GraphConv(FEATURES, 4, aggr="min"), (X, EDGES)),
    "GINConv": (lambda: ours.GINConv(MLP()), (X, EDGES)),
    "GINEConv": (lambda: ours.GINEConv(MLP(), edge_dim=2), (X, EDGES, EDGE_ATTR)),
    "SAGEConv several": (lambda: ours.SAGEConv(FEATURES, 4, aggr=["mean", "std", "max"]), (X, EDGES)),
    "ResGatedGraphConv": (lambda: ours.ResGatedGraphConv(FEATURES, 4), (X, EDGES)),
    "GATConv": (lambda: ours.GATConv(FEATURES, 4, heads=2), (X, EDGES)),
    "GATv2Conv": (lambda: ours.GATv2Conv(FEATURES, 4, heads=2), (X, EDGES)),
    "TransformerConv": (lambda: ours.TransformerConv(FEATURES, 4, heads=2), (X, EDGES)),
    "TransformerConv edges": (lambda: ours.TransformerConv(FEATURES, 4, 2, edge_dim=2), (X, EDGES, EDGE_ATTR)),
    "AGNNConv": (lambda: ours.AGNNConv(), (X, EDGES)),
    "SuperGATConv": (lambda: ours.SuperGATConv(FEATURES, 4, attention_type="MX").eval(), (X, EDGES)),
    "RGCNConv": (lambda: ours.RGCNConv(FEATURES, 4, 3), (X, EDGES, KIND)),
    "RGATConv": (lambda: ours.RGATConv(FEATURES, 4, 3), (X, EDGES, KIND)),
    "FiLMConv": (lambda: ours.FiLMConv(FEATURES, 4, 3), (X, EDGES, KIND)),
    "HEATConv": (lambda: ours.HEATConv(FEATURES, 4, 2, 3, 3, 2, 2), (X, EDGES, TYPE, KIND, EDGE_ATTR)),
    "HeteroLinear": (lambda: ours.HeteroLinear(FEATURES, 4, 2), (X, TYPE)),
}
STRICT = ("FiLMConv", "HEATConv", "HeteroLinear")
"""Layers that go to PyG where torch.export traces without Dynamo, which leaves their parts no parameters."""

RUN = """
import sys, torch, pyg_dfgnn
from contextlib import ExitStack
from pathlib import Path

folder = Path(sys.argv[1])
programs = {path.stem: torch.export.load(path) for path in sorted(folder.glob("*.pt2"))}
assert not [name for name in sys.modules if name.startswith("pyg_dfgnn.nn")]
# Only now, for a device without which nothing would run.
from tests.kernels.emulated import emulated_device
with emulated_device() as launched:
    for name, program in programs.items():
        args, want = torch.load(folder / f"{name}.pt")
        error = (program.module()(*args) - want).abs().max().item()
        print(f"{name}: {error}")
assert launched
"""


def in_a_fresh_process(code, *args):
    result = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Name of a layer -> the largest difference between its numbers there and here."""
    folder = tmp_path_factory.mktemp("programs")
    with emulated_device(), local_settings(fallback="error"), torch.no_grad():
        for name, (make, args) in LAYERS.items():
            torch.manual_seed(0)
            layer = make().eval()
            program = torch.export.export(layer, args, strict=name in STRICT)
            assert "pyg_dfgnn.run" in str(program.graph), name
            torch.export.save(program, folder / f"{name}.pt2")
            torch.save((args, layer(*args)), folder / f"{name}.pt")
    lines = in_a_fresh_process(RUN, str(folder)).splitlines()
    return {name: float(error) for name, error in (line.rsplit(": ", 1) for line in lines)}


@needs_compiler
@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_layer_in_a_fresh_process(name, errors):
    assert errors[name] < 1e-5


@pytest.mark.parametrize(
    "place", ["reference", pytest.param("emulator", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINEConv", "TransformerConv edges", "RGATConv"])
def test_a_program_for_any_number_of_nodes_and_edges(name, place):
    """The size of the graph that is exported with decides nothing: few edges are not left to PyG for good."""
    make, (x, edges, *attributes) = LAYERS[name]
    device = "cuda" if place == "cuda" else "cpu"
    layer = make().eval().to(device)
    shapes = ({0: Dim("N", min=2)}, {1: Dim("E", min=2)}, *({0: Dim("E", min=2)} for _ in attributes))
    many = (x.repeat(50, 1), torch.cat([edges + i % 50 * NUM_NODES for i in range(3000)], dim=1))
    many += tuple(attribute.repeat(3000, *[1] * (attribute.dim() - 1)) for attribute in attributes)
    few, many = ([tensor.to(device) for tensor in inputs] for inputs in ((x, edges, *attributes), many))
    with torch.no_grad(), emulated_device() if place == "emulator" else nullcontext():
        program = torch.export.export(layer, tuple(few), dynamic_shapes=shapes).module()
        for inputs in (few, many):
            torch.testing.assert_close(program(*inputs), layer(*inputs))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("RGCNConv", "HEATConv", "HeteroLinear")])
def test_onnx_gets_operators_of_torch(name, monkeypatch):
    """ONNX has no operators for kernels; three layers of PyG's, which read numbers of tensors, have no export."""
    make, args = LAYERS[name]
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with emulated_device(), torch.no_grad():
        program = torch.export.export(make().eval(), args, strict=False)
    assert "pyg_dfgnn" not in str(program.graph)


def test_every_aggregation_is_found_by_its_name():
    """Whatever statistics and message: a process that has made none of them finds each."""
    stats = [part for size in (1, 2, len(STATS)) for part in combinations(STATS, size)]
    names = [statement_of(message, part).name for message in MESSAGES.values() for part in stats]
    names.append(statement_of(MESSAGES["copy"], ("sum",), True).name)
    code = f"import torch, pyg_dfgnn\nfrom pyg_dfgnn.ops.function import runner_of\nfor name in {names}:\n"
    in_a_fresh_process(f"{code}    assert runner_of(name + ':forward:1:0:0:').statement.name == name")


def test_a_name_of_no_op():
    x, anchor = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    for name in ("attention/of_a_user", "segment/copy/median", "segment/unknown/sum", "segment", "other"):
        with pytest.raises(ValueError, match=r"needs.*\(got"):
            torch.ops.pyg_dfgnn.run(f"{name}:forward:1:0:0:", [anchor], [3, 3], [x], [])


def test_exports_are_told_from_compilations():
    class Told(torch.nn.Module):
        def forward(self, x):
            return x + 1 if visits.is_exporting() else x

    x = torch.zeros(1)
    assert torch.compile(Told(), backend="eager", fullgraph=True)(x) == Told()(x) == 0
    assert torch.export.export(Told(), (x,), strict=False).module()(x) == 1
