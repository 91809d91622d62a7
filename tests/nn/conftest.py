"""What lets the fused branch of the convs run on the CPU, and features for it."""

import pytest
import torch

from pyg_dfgnn import fallback
from pyg_dfgnn.nn import gate, on_cpu
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.conv.relational import RelationalConv
from pyg_dfgnn.nn.dense.hetero_linear import TypedLayer
from pyg_dfgnn.ops.function import ops
from pyg_dfgnn.ops.relational.traced import KIND
from pyg_dfgnn.settings import local_settings
from tests.kernels.emulated import emulated_device
from tests.nn.convs import FEATURES, NUM_NODES


@pytest.fixture
def fused_on_cpu(monkeypatch):
    """Take the device and the kernels out of the gate: the ops then run their reference path behind the real Graph."""
    for module in (gate, on_cpu):
        monkeypatch.setattr(module, "fused_device_types", {"cpu", "cuda"})
    for family in (AggregationConv, AttentionConv, RelationalConv, TypedLayer):
        monkeypatch.setattr(family, "_reasons_against", staticmethod(lambda problem: ()))


@pytest.fixture
def forget_logged(monkeypatch):
    """Reasons are logged once per process; start without a memory."""
    monkeypatch.setattr(fallback, "logged", set())


@pytest.fixture
def in_float64():
    """Numbers are in float64 unless told otherwise, and what is left to PyG is not said."""
    torch.set_default_dtype(torch.float64)
    with local_settings(fallback="silent"):
        yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def runs(monkeypatch):
    """The arguments of all that the operator of programs has run, a program's name first."""
    taken, programs = [], type(ops[KIND])
    run = programs.run
    monkeypatch.setattr(programs, "run", lambda self, *args: taken.append(args) or run(self, *args))
    return taken


@pytest.fixture
def launched():
    """Names of the kernels launched so far: CPU tensors take the fused path, and what is left to PyG is not said."""
    with emulated_device() as names, local_settings(fallback="silent"):
        yield names


@pytest.fixture
def x():
    """Features of the nodes of the small graph."""
    return torch.randn(NUM_NODES, FEATURES)
