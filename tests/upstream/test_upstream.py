"""The runner of PyG's tests, on a test file of our own."""

import subprocess

import pytest
import torch
from torch_geometric.nn import ChebConv

from tests.processes import run_file
from tests.upstream import run

TESTS = """
import torch
from torch_geometric.nn import LEConv, GCNConv, MessagePassing

X, EDGES = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])


class Branching(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j if x_j.sum() > 0 else -x_j


def test_layers():
    conv = LEConv(3, 2)
    out = conv(X, EDGES)
    assert torch.allclose(conv(X, EDGES), out)
    assert GCNConv(3, 2)(X, EDGES).shape == (4, 2)
    assert torch.nn.Sequential(torch.nn.Linear(3, 2))(X).shape == (4, 2)


def test_that_loses_the_gpu():
    def synchronize():
        raise RuntimeError("device-side assert triggered")

    torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), synchronize


def test_refused():
    assert Branching()(X, EDGES).shape == (4, 3)


def test_that_fails_with_pyg():
    assert False


def test_that_tells_us_from_pyg():
    conv = LEConv(3, 2)
    conv(X, EDGES)
    assert not [name for name in vars(conv) if "dfgnn" in name]
"""


@pytest.fixture
def imported_once(monkeypatch, tmp_path):
    """The first process of a run starts as it does outside of tests; PyG is imported when the others start."""
    start, commands = subprocess.run, []

    def process(command, cwd, env, stdout, **options):
        commands.append(command)
        if len(commands) == 1:
            return start(command, cwd=cwd, env=env, stdout=stdout, **options)
        done = run_file(command[1], command[2:], tmp_path, cwd, env)
        stdout.write(done.stdout + done.stderr)
        stdout.flush()
        return done

    monkeypatch.setattr(subprocess, "run", process)
    return commands


def test_every_module_is_accelerated_and_what_then_fails_is_reported(imported_once, tmp_path, capsys):
    path = tmp_path / "nn" / "conv"
    path.mkdir(parents=True)
    (path / "test_made_up.py").write_text(TESTS)
    assert run.main([str(tmp_path), "--files", "nn/conv/test_made_up.py", "--accelerate", "--reference"]) == 1
    # One more of each after the test that loses the GPU.
    assert [command[command.index("--worker") + 1] for command in imported_once] == ["pyg", "pyg", "ours", "ours"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 of 5 tests pass with PyG's classes, 1 of them fail with ours"
    assert lines[1] == "nn/conv/test_made_up.py::test_that_tells_us_from_pyg"
    (compiled,) = (line for line in lines if line.startswith("LEConv: "))
    assert compiled.split(" of ")[0] != "LEConv: 0" and compiled.endswith("graphs have programs")
    assert any(line.startswith("Branching: 0 of ") for line in lines)


def test_parameters_follow_the_default_device(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "register_parameter", torch.nn.Module.register_parameter)
    assert not ChebConv(3, 2, K=2).bias.is_meta
    run.let_parameters_follow("meta")
    layer = torch.nn.Linear(3, 2, bias=False)
    weight = layer.weight
    layer.tied = weight
    assert weight.is_meta and layer.tied is weight and weight.requires_grad
    assert all(parameter.is_meta for parameter in ChebConv(3, 2, K=2).parameters())
