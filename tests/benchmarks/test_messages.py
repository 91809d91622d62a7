"""Timings of compiled messages: each implementation is right, and the experiment has what the family has."""

from math import prod

import pytest

from benchmarks import run
from benchmarks.case import forward_backward
from benchmarks.cases import case_of
from benchmarks.cases.messages import (
    IMPLEMENTATIONS,
    LAYERS,
    Compiled,
    CompiledPyGMessages,
    HandWritten,
    MessageCase,
    PyGMessages,
)
from benchmarks.experiment import Experiment
from benchmarks.graphs import benchmark_graph
from benchmarks.prepare import rounded_problem
from benchmarks.results import Table
from pyg_dfgnn.ir.domains import D, E, One, R, S, U, V
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.register_layout import MAX_SHORT
from pyg_dfgnn.nn import messages
from tests.benchmarks.quick import QUICK, composed
from tests.nn.message_cases import watched


@pytest.mark.parametrize("op", LAYERS)
def test_implementations_agree_with_float64(op):
    graph, case = benchmark_graph("e", "cpu", small=True), case_of(op, "16")
    inputs, grad_out = rounded_problem(case, graph, ["float32"])
    expected, fused = case.reference(graph, inputs, grad_out), []
    for kind in (Compiled(), HandWritten(), PyGMessages(), *([CompiledPyGMessages("eager")] if op == "le" else [])):
        if reasons := kind.reasons(case, graph):
            assert reasons == [f"there is no drop-in for {case.layer}"]
            continue
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        with messages.interpreted(), watched() as captured:
            actual = forward_backward(kind.prepare(case, graph, leaves)(), leaves, grad_out)
        fused += [kind.name] if captured.is_fused else []
        assert captured.is_fused or not captured
        worst, error = case.errors(graph, actual, expected, grad_out).worst
        assert error < case.bound("float32"), f"{kind.name}, {worst}: {error:.2e}"
    # Only ours is compiled, and whole.
    assert fused == ["fused"]


@pytest.mark.parametrize("op", LAYERS)
def test_no_buffer_has_the_features_of_an_edge(op):
    """Forward and backward with gradients of all inputs, as wide as the bench measures it."""
    graph, case = benchmark_graph("e", "cpu", small=True), case_of(op, "64")
    sizes = {One: 1, R: 1, S: 10_000, D: 10_000, U: 100_000, V: 100_000, E: 100_000}
    with messages.interpreted(), watched() as captured:
        Compiled().prepare(case, graph, case.make_inputs(graph))()
    assert captured.is_fused
    for program in captured.programs:
        lowered = lower(Passes().run(program, sizes, tuple(program.inputs)), [name for name, _ in program.outputs])
        kept = {name: buffer.shape for name, buffer in lowered.buffers.items() if buffer.domain is E}
        assert all(prod(shape) <= MAX_SHORT for shape in kept.values()), kept


def test_the_experiment_runs_on_a_cpu_and_has_all_layers(tmp_path):
    few = [
        "experiment=messages",
        "graphs=[e]",
        "sizes=[8]",
        "ops=[my_gat]",
        "implementations=[fused,drop_in,pyg]",
    ]
    assert run.run(composed(*QUICK, *few, f"folder={tmp_path}")) == 0
    assert set(Experiment.of(composed("experiment=messages")).ops) == set(LAYERS)
    assert set(Experiment.of(composed("experiment=messages")).implementations) == set(IMPLEMENTATIONS)


def test_sizes_of_another_form_are_refused():
    with pytest.raises(ValueError, match=r"'sizes' needs a list of multiples of 8.*\(got '12'\)"):
        case_of("le", "12")


def measured(folder, op):
    """The exit code of an experiment of one layer, and its rows in training by implementation."""
    few = ["experiment=messages", "graphs=[e]", "sizes=[8]", f"ops=[{op}]", "implementations=[fused,pyg]"]
    with messages.interpreted():
        code = run.run(composed(*QUICK, *few, f"folder={folder}"))
    (path,) = folder.rglob("messages.csv")
    return code, {row["implementation"]: row for row in Table.read(path) if row["direction"] == "fwd+bwd"}


def double_ours(monkeypatch):
    prepare = Compiled.prepare

    def doubled(self, case, graph, inputs):
        forward = prepare(self, case, graph, inputs)
        return lambda: 2 * forward()

    monkeypatch.setattr(Compiled, "prepare", doubled)


def test_a_wrong_layer_gets_no_time(tmp_path, monkeypatch):
    double_ours(monkeypatch)
    code, rows = measured(tmp_path, "le")
    assert code == 1 and rows["fused"]["status"] == "WRONG" and rows["pyg"]["status"] == "ok"


@pytest.mark.parametrize("wrong", [False, True])
def test_at_a_kink_the_error_of_pyg_decides(wrong, tmp_path, monkeypatch):
    """Messages whose ReLU is at zero but for the rounding: each arithmetic has signs of its own."""
    make_inputs = MessageCase.make_inputs

    def at_the_kink(self, graph):
        inputs = make_inputs(self, graph)
        edges = inputs["edge"].double() @ inputs["lin.weight"].double().t() + inputs["lin.bias"].double()
        inputs["x"][graph.edge_index[0]] = -edges.float()
        return inputs

    monkeypatch.setattr(MessageCase, "make_inputs", at_the_kink)
    if wrong:
        double_ours(monkeypatch)
    code, rows = measured(tmp_path, "my_gine")
    bound = case_of("my_gine", "8").bound("float32")
    if wrong:
        assert code == 1 and rows["fused"]["status"] == "WRONG"
        return
    assert code == 0 and rows["fused"]["status"] == rows["pyg"]["status"] == "ok"
    # The row states what was allowed.
    assert bound < float(rows["fused"]["error"]) <= float(rows["fused"]["bound"])
