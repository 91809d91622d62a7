"""Wall times of training steps of compiled layers: each way has the right gradients, and a wrong one has no time."""

import pytest

from benchmarks import message_steps
from benchmarks.cases.messages import LAYERS, MessageCase
from benchmarks.graphs import benchmark_graph
from benchmarks.message_steps import IMPLEMENTATIONS, Setup, measure
from benchmarks.results import Table
from pyg_dfgnn.nn import messages


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(message_steps, "BLOCK_S", 0.0)
    monkeypatch.setattr(message_steps, "BLOCKS", 2)


def setup(op):
    return Setup(MessageCase.of(op, "8"), benchmark_graph("e", "cpu", small=True))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_steps_have_the_gradients_of_float64(name):
    of_le = setup("le")
    with messages.interpreted():
        columns = measure(of_le, name)
    assert columns["status"] == "ok" and columns["step_ms"] > 0 and columns["n"] >= 6, columns


def test_wrong_and_missing_gradients_have_no_time():
    wrong, missing = setup("le"), setup("le")
    wrong.expected = {name: 1.01 * tensor for name, tensor in wrong.expected.items()}
    columns = measure(wrong, "pyg")
    assert columns["status"] == "WRONG" and "step_ms" not in columns
    missing.data.grad_out = missing.data.grad_out[:-1]
    columns = measure(missing, "fused")
    assert columns["status"].startswith("failed: RuntimeError") and "step_ms" not in columns


def test_command(tmp_path, capsys):
    few = ["--graphs", "e", "--ops", "fa", "simple", "--implementations", "pyg", "fused", "--size", "8"]
    assert message_steps.main([*few, "--small", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("message-steps.csv")
    rows = [*Table.read(path)]
    assert [(row["op"], row["implementation"], row["status"]) for row in rows] == [
        (op, name, "ok") for op in ("fa", "simple") for name in ("pyg", "fused")
    ]
    assert "| e | FAConv | pyg |" in capsys.readouterr().out
    assert set(message_steps.experiment()[1]) == set(LAYERS)
