"""Imported by the server of tests' processes: what TorchDynamo does at its first graph is done before they start."""

import torch
from torch._dynamo.utils import counters


def _double(x):
    return x + x


torch.compile(_double, backend="eager", dynamic=True)(torch.ones(3))
torch._dynamo.reset()
counters.clear()
