"""Compiled messages under torch.compile: programs through the one operator, guarded by what PyG's code reads."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn import fallback
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.tolerances import BACKWARD, largest_errors, tolerance
from pyg_dfgnn.reference.zoo import ZOO
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import assert_results, outputs_and_gradients, twins
from tests.nn.test_messages import CASES

pytestmark = pytest.mark.filterwarnings("ignore")
GRAPHS = ("self-loops", "isolated")
OF_PYG = ("index_select", "scatter", "index_add", "gather", "index.Tensor", "segment")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


class Scaled(MessagePassing):
    """Scales what is summed by an attribute, and in training by another."""

    def __init__(self):
        super().__init__(aggr="add")
        self.scale, self.drops = 2.0, 0.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        x_j = torch.nn.functional.dropout(x_j, self.drops, self.training)
        return helper((x_i - x_j).tanh()) * (self.scale if self.training else 1.0)


def helper(x):
    return x.sigmoid()


def other_helper(x):
    return x.relu()


def marked(layer):
    return pyg_dfgnn.accelerate(copy.deepcopy(layer))


def edges(number=9):
    return torch.randint(6, (2, number), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name",
    ["TransformerConv", "RGATConv", "EGConv", "SGConv", "GATConv"],
)
def test_one_graph_for_all_sizes_equals_pyg(name, runs):
    """Layers that leave attention in an attribute, look types up, update, or propagate twice."""
    case = CASES[name]
    layer, ours = twins(case.make)
    layer, ours = layer.double(), ours.double()
    ours.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for graph in GRAPHS:
        expected = outputs_and_gradients(layer, case, ZOO[graph]())
        with messages.interpreted():
            actual = outputs_and_gradients(ours, case, ZOO[graph]())
        assert_results(actual, expected, rtol=1e-9, atol=1e-11)
    assert counters["stats"]["unique_graphs"] == 1
    # Both directions of each program on each graph.
    assert len(runs) == len(GRAPHS) * 2 * (2 if name == "SGConv" else 1)


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_classes_than_one_function_may_be_compiled_for():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for number in range(3):
        layer = type(f"Scaled{number}", (Scaled,), {})().eval()
        compiled = torch.compile(marked(layer), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges()), layer(x, edges()))


@pytest.mark.parametrize("name", ["GENConv", "TransformerConv"])
def test_nothing_of_pygs_path_is_left_in_the_graph(name):
    targets = []

    def keep(graph, _):
        targets.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    _, ours = twins(CASES[name].make)
    ours.double().compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=True)
    with messages.interpreted():
        outputs_and_gradients(ours, CASES[name], ZOO["self-loops"]())
    assert len(targets) == 2
    for names in targets:
        assert names.count("pyg_dfgnn.run.default") == 1
        assert not [target for target in names if any(part in target for part in OF_PYG)]


def test_what_the_layer_reads_is_guarded(monkeypatch, runs):
    plain, x = Scaled(), torch.randn(6, 3)
    ours = marked(plain)
    with messages.interpreted():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        for change in ("nothing", "scale", "training", "helper"):
            for layer in (plain, ours):
                if change == "scale":
                    layer.scale = -3.0
                layer.train(change != "training")
            if change == "helper":
                monkeypatch.setitem(globals(), "helper", other_helper)
            for _ in range(2):
                torch.testing.assert_close(compiled(x, edges()), plain(x, edges()))
    assert len(runs) == 8 and len({name for name, *_ in runs}) == 4


def test_settings_hold_and_what_is_traced_beside_says_nothing(runs, monkeypatch):
    """GENConv's aggregation is a drop-in that takes PyG's path while torch.compile traces."""
    layer, _ = twins(CASES["GENConv"].make)
    ours, case = marked(layer), CASES["GENConv"]
    monkeypatch.setattr(fallback, "logged", set())
    ours.compile(backend="aot_eager", fullgraph=True)
    with messages.interpreted(), pyg_dfgnn.local_settings(fallback="error"):
        outputs_and_gradients(ours, case, ZOO["self-loops"]())
    assert len(runs) == 2 and not fallback.logged
    with messages.interpreted(), pyg_dfgnn.local_settings(compile_messages=False):
        outputs_and_gradients(ours, case, ZOO["self-loops"]())
    assert len(runs) == 2 and fallback.logged


def test_autocast_gives_what_eager_calls_give(runs):
    case = CASES["user-Modulated"]
    _, ours = twins(case.make)
    ours.float()
    with messages.interpreted(), torch.autocast("cpu", torch.bfloat16):
        expected = outputs_and_gradients(ours, case, ZOO["self-loops"](), torch.float32)
        ours.compile(backend="aot_eager", fullgraph=True)
        actual = outputs_and_gradients(ours, case, ZOO["self-loops"](), torch.float32)
    assert len(runs) == 2
    for name, want in expected.items():
        assert actual[name].dtype is want.dtype
        torch.testing.assert_close(actual[name], want, rtol=2e-2, atol=2e-2)


def test_random_numbers_in_messages_are_pygs(runs, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "logged", set())
    plain, x = Scaled(), torch.randn(6, 3)
    plain.drops = 0.5
    ours = marked(plain)
    with messages.interpreted():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        results = []
        for layer in (compiled, plain):
            torch.manual_seed(3)
            results.append(layer(x, edges()))
        torch.testing.assert_close(*results)
        compiled(x, edges(11))
    assert not runs
    assert caplog.text.count("Scaled takes PyG's own path: messages draw random numbers, while compiling") == 1


def test_transforms_take_pygs_path(runs):
    plain, x, edge_index = Scaled(), torch.randn(6, 3), edges()
    ours = marked(plain)

    def gradient(layer):
        call = torch.func.grad(lambda v: layer(v, edge_index).sum())
        return torch.compile(lambda v: call(v), backend="eager", fullgraph=True)

    with messages.interpreted():
        torch.testing.assert_close(gradient(ours)(x), gradient(plain)(x))
    assert not runs


@needs_compiler
def test_kernels_run_in_compiled_graphs_and_what_they_refuse_is_pygs(caplog, monkeypatch):
    monkeypatch.setattr(fallback, "logged", set())
    for name in ("GENConv", "EdgeConv"):
        case = CASES[name]
        layer, ours = twins(case.make)
        graph = ZOO["self-loops"]()
        expected = outputs_and_gradients(layer.double(), case, graph)
        ours.float().compile(backend="aot_eager", fullgraph=True)
        with emulated_device() as launched:
            actual = outputs_and_gradients(ours, case, graph, torch.float32)
        assert bool(launched) == (name == "GENConv")
        renamed = [
            {f"grad_{k[2:]}" if k.startswith("d_") else k: tensor for k, tensor in results.items()}
            for results in (actual, expected)
        ]
        assert max(largest_errors(*renamed).values()) < tolerance("float32", BACKWARD, "relational").largest
    assert "EdgeConv takes PyG's own path: rows of edges are mapped" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(strict, caplog, monkeypatch):
    monkeypatch.setattr(fallback, "logged", set())
    plain, x, edge_index = Scaled().eval(), torch.randn(6, 3), edges()
    ours = marked(plain)
    with messages.interpreted():
        exported = torch.export.export(ours, (x, edge_index), strict=strict)
        torch.testing.assert_close(exported.module()(x, edge_index), plain(x, edge_index))
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    has_program = any("pyg_dfgnn.run" in str(node.target) for graph in graphs for node in graph.nodes)
    said = [record.getMessage() for record in caplog.records if "PyG's own path" in record.getMessage()]
    # By default torch records the code that runs, which is PyG's; the one line names the layer.
    assert has_program == strict
    assert [line.split()[0] for line in said] == ([] if strict else ["Scaled"])
    assert strict or "strict=True exports the program" in said[0]
