"""`settings(profile=True)`: ranges and names in profilers, counts of calls, and nothing left once it is off."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.profiler import profile
from torch_geometric.nn import GATConv, MessagePassing, RGCNConv, SAGEConv

import pyg_dfgnn
from pyg_dfgnn import profiling
from pyg_dfgnn.nn import calls
from pyg_dfgnn.nn.gate import FusedConv
from pyg_dfgnn.nn.messages import Mark
from pyg_dfgnn.nn.scripted import Scripted
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.host_codegen import HostFunction
from pyg_dfgnn.profiling import is_on
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import Settings, current, local_settings, settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device, small_gemm

N, E, F = 30, 120, 8


class Gate(MessagePassing):
    """A layer whose messages are compiled."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(2 * F, F)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * x_j


class Cut(Gate):
    """A layer of which a part is PyTorch's: it gathers by what is no end of an edge."""

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x)
        return out + torch.cumsum(x[edge_index[0]], 0).sum(0)


MAKE = {
    "GATConv": lambda: GATConv(F, F),
    "SAGEConv": lambda: SAGEConv(F, F),
    "RGCNConv": lambda: RGCNConv(F, F, 2),
    "Gate": Gate,
}


@pytest.fixture
def edge_index():
    return torch.randint(N, (2, E))


@pytest.fixture(autouse=True)
def no_profiling():
    assert not is_on()
    yield
    assert not is_on()


def step(layer, edge_index):
    x = torch.randn(N, F, requires_grad=True)
    more = (torch.randint(2, (E,)),) if isinstance(layer, RGCNConv) else ()
    layer(x, edge_index, *more).sum().backward()


def names_of(run):
    with profile() as recorded:
        run()
    return [event.name for event in recorded.events() if event.name.startswith("pyg_dfgnn")]


@needs_compiler
@pytest.mark.parametrize("kind", MAKE)
def test_layers_and_programs_are_ranges(kind, edge_index):
    layer = pyg_dfgnn.accelerate(MAKE[kind]())
    with emulated_device():
        # Kernels that were prepared before are ranges too.
        step(layer, edge_index)
        assert names_of(lambda: step(layer, edge_index)) == []
        with local_settings(profile=True):
            names = names_of(lambda: step(layer, edge_index))
        assert names_of(lambda: step(layer, edge_index)) == []
    program = {"GATConv": "attention/add", "SAGEConv": "segment/copy/mean", "RGCNConv": "rgcn_mean", "Gate": "Gate"}
    schedules = {"GATConv": ("smem", "row_split"), "SAGEConv": ("row_split",)}.get(kind, ("traversal",))
    assert names[0] == f"pyg_dfgnn {kind}"
    for group in ("forward", "backward"):
        (label,) = [name for name in names if name.startswith(f"pyg_dfgnn {program[kind]} {group} by ")]
        assert any(schedule in label for schedule in schedules), label


@needs_compiler
def test_results_are_those_without_profiling(edge_index):
    layer, x = pyg_dfgnn.accelerate(GATConv(F, F)), torch.randn(N, F)
    with emulated_device() as launched:
        before = layer(x, edge_index)
        count = len(launched)
        with local_settings(profile=True):
            assert layer(x, edge_index).equal(before)
        assert len(launched) == 2 * count


@needs_compiler
def test_calls_are_counted_by_class_and_by_layer(edge_index):
    model = torch.nn.ModuleDict({name: make() for name, make in MAKE.items()})
    model["other"] = SAGEConv(F, F, aggr="median")
    model["cut"] = Cut()
    pyg_dfgnn.accelerate(model)
    with local_settings(profile=True):
        for _ in range(2):
            # On a device without kernels all calls are PyG's.
            for layer in model.values():
                step(layer, edge_index)
        assert {row.name: row[2:] for row in pyg_dfgnn.stats(model)}.items() >= dict.fromkeys(model, (0, 0, 2)).items()
        with emulated_device():
            for layer in model.values():
                step(layer, edge_index)
    counts = {row.name: row[2:] for row in pyg_dfgnn.stats(model)}
    assert counts.items() >= {**dict.fromkeys(MAKE, (1, 0, 2)), "other": (0, 0, 3), "cut": (0, 1, 2)}.items()
    by_kind = {row.kind: row[2:] for row in pyg_dfgnn.stats()}
    assert by_kind["SAGEConv"] == (1, 0, 5) and by_kind["Gate"] == (1, 0, 2)
    lines = str(pyg_dfgnn.stats(model)).splitlines()
    assert lines[0].split() == ["layer", "class", "fused", "partly", "fused", "PyG's"]
    assert lines[2].split() == ["SAGEConv", "SAGEConv", "1", "0", "2"]


@needs_compiler
def test_pygs_forward_around_a_kernel_is_partly_fused(edge_index):
    conv = pyg_dfgnn.accelerate(SAGEConv(F, F, aggr=["sum", "median"]))
    with emulated_device(), local_settings(profile=True, deterministic=True):
        step(conv, edge_index)
    assert pyg_dfgnn.stats(conv)[0][1:] == ("SAGEConv", 0, 1, 0)


@needs_compiler
def test_linear_layers_by_kernels_are_fused():
    with local_settings(linear="kernels"), small_gemm(), emulated_device():
        model = pyg_dfgnn.accelerate(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        with local_settings(profile=True):
            names = names_of(lambda: model(torch.randn(64, 64)))
        assert [row[2:] for row in pyg_dfgnn.stats(model)] == [(1, 0, 0)]
    assert "pyg_dfgnn gemm forward" in names


def test_counts_start_anew_and_stay_readable(edge_index):
    layer = pyg_dfgnn.accelerate(SAGEConv(F, F))
    step(layer, edge_index)
    with local_settings(profile=True):
        step(layer, edge_index)
        with local_settings(profile=True):
            step(layer, edge_index)
    step(layer, edge_index)
    assert [row[2:] for row in pyg_dfgnn.stats(layer)] == [(0, 0, 2)]
    with local_settings(profile=True):
        assert not pyg_dfgnn.stats(layer) and not pyg_dfgnn.stats()
    with pytest.raises(TypeError, match="'model' needs a torch.nn.Module"):
        pyg_dfgnn.stats("model")


def test_a_call_that_fails_is_not_counted(edge_index):
    layer = pyg_dfgnn.accelerate(SAGEConv(F, F))
    with local_settings(profile=True):
        with pytest.raises(RuntimeError):
            layer(torch.randn(N, F + 1), edge_index)
        step(layer, edge_index)
    assert [row[2:] for row in pyg_dfgnn.stats(layer)] == [(0, 0, 1)]


def state():
    attributes = [vars(owner).get(name) for owner, name in OWNERS]
    return [*attributes, *(function.__code__ for function in list(profiling._programs))]


OWNERS = [(Scripted, "__call__"), (Mark, "call"), (FusedConv, "_fall_back"), (gemm, "project")]


@needs_compiler
def test_nothing_is_left_once_it_is_off(edge_index):
    """A call without profiling runs the code that it ran before."""
    layer = pyg_dfgnn.accelerate(GATConv(F, F))
    with emulated_device():
        step(layer, edge_index)
    before = state()
    with local_settings(profile=True):
        during = state()
        settings(profile=True)
        settings(profile=True)
    assert state() == during
    settings(profile=False)
    settings(profile=False)
    assert state() == before and before[0] is None
    changed = sum(one is not other for one, other in zip(before, during))
    assert changed == len(before) > len(OWNERS)


def test_it_holds_for_all_threads_and_ends_with_the_last_block():
    seen = []

    def look():
        seen.append((is_on(), current().profile))

    block = local_settings(profile=True)
    with block:
        with block:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        look()
    look()
    assert seen == [(True, False), (True, True), (False, False)]


def test_kernels_are_chosen_alike():
    assert Settings() == Settings(profile=True) and hash(Settings()) == hash(Settings(profile=True))
    with pytest.raises(ValueError, match="'profile' needs one of True, False"):
        settings(profile="yes")


def test_a_function_that_is_made_meanwhile_is_a_range_and_can_be_let_go():
    with local_settings(profile=True):
        text = HostFunction("made", False)
        function = text.function(["x"], ["x + 1"], "here")
        assert names_of(partial(function, 1)) == ["pyg_dfgnn made here"]
        assert function(1) == (2,)
    assert names_of(partial(function, 1)) == [] and function(1) == (2,)
    kept = weakref.ref(function)
    gc.disable()
    try:
        del function
        assert kept() is None
    finally:
        gc.enable()


def test_compiled_models_run_under_it(edge_index):
    layer, x = pyg_dfgnn.accelerate(SAGEConv(F, F)), torch.randn(N, F)
    with local_settings(profile=True):
        out = torch.compile(layer, backend="eager", fullgraph=True)(x, edge_index)
    torch.testing.assert_close(out, layer(x, edge_index))


@needs_compiler
def test_generated_kernels_have_the_name_of_their_program(edge_index):
    symbols = []

    def see(spec, entry, *rest):
        symbols.append(spec.symbol(entry))
        assert f"{spec.symbol(entry)}(" in spec.compiled_source
        outer(spec, entry, *rest)

    layers = pyg_dfgnn.accelerate(torch.nn.ModuleList([Gate(), GATConv(F, F)]))
    with emulated_device(), launcher.override(see) as outer:
        for layer in layers:
            step(layer, edge_index)
    assert {"relational_traversal_of_Gate", "attention_forward"} <= set(symbols)
    assert all(symbol.isidentifier() and symbol.isascii() for symbol in symbols)


def test_the_module_of_counts_is_not_the_function():
    assert pyg_dfgnn.stats is calls.stats is pyg_dfgnn.nn.stats
