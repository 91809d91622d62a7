"""Modules of TorchScript in layers with compiled messages: PyG's code runs where messages ask for them."""

from itertools import product

import pytest
import torch
from torch import nn

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from tests.nn.message_cases import watched
from tests.nn.test_message_traps import CHANNELS, NODES, Layer

pytestmark = pytest.mark.filterwarnings("ignore")


class Inner(nn.Module):
    """Has a submodule, a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS))
        self.register_buffer("shift", torch.ones(CHANNELS))

    def forward(self, x):
        return torch.relu(self.lin(x)) + self.shift


MAKES = {
    "script": lambda: torch.jit.script(Inner()),
    "trace": lambda: torch.jit.trace(Inner(), torch.randn(NODES, CHANNELS)),
    "freeze": lambda: torch.jit.freeze(torch.jit.script(Inner().eval())),
}
MESSAGES = {
    "none": lambda self, x: x.tanh(),
    "call": lambda self, x: self.inner(x),
    "part": lambda self, x: x @ getattr(self.inner.lin, "0").weight,
    "buffer": lambda self, x: x * self.inner.shift,
    "mode": lambda self, x: 2 * x if self.inner.training else x,
    "children": lambda self, x: x * len(list(self.inner.children())),
    "all": lambda self, x: x * len(list(self.modules())),
    "parameters": lambda self, x: x * sum(p.sum() for p in self.inner.parameters()),
    "caught": lambda self, x: caught(self, x),
}
FOLDED = {("freeze", "part"), ("freeze", "buffer"), ("freeze", "mode")}
"""What a frozen module no longer has."""


def caught(layer, x):
    try:
        return layer.inner(x)
    except Exception:
        return 100 * x


class Scripted(Layer):
    def start(self, make, name, is_called):
        self.inner, self.name, self.is_called = MAKES[make](), name, is_called
        self.lin = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        x = self.lin(self.inner(x)) if self.is_called else self.lin(x)
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return MESSAGES[self.name](self, x_j)


@pytest.mark.parametrize("is_called", [True, False], ids=["in forward", "not there"])
@pytest.mark.parametrize("make, name", [case for case in product(MAKES, MESSAGES) if case not in FOLDED])
def test_modules_of_torchscript(make, name, is_called):
    torch.manual_seed(0)
    layer, x = Scripted(make, name, is_called), torch.randn(NODES, CHANNELS)
    edge_index = torch.randint(NODES, (2, 15))
    # In training the statistics of a norm move, which outputs do not show.
    want = [layer(x, edge_index) for _ in range(2)]
    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    torch.manual_seed(0)
    layer = Scripted(make, name, is_called)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(layer)
        with messages.interpreted(), watched() as calls:
            got = [layer(x, edge_index) for _ in range(2)]
        torch.testing.assert_close(got, want)
        torch.testing.assert_close({key: tensor.clone() for key, tensor in layer.state_dict().items()}, state)
        assert str(pyg_dfgnn.report(layer)) and str(pyg_dfgnn.describe_plan(layer, x, edge_index))
    reasons = {reason for *_, reasons in calls for reason in reasons}
    assert reasons == (set() if name == "none" else {"'self.inner' is a module of TorchScript, which no trace reads"})
