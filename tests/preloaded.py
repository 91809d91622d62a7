"""Imported by the server of tests' processes: what TorchDynamo does at its first graph is done before they start.

With a build for CUDA they do it themselves, because TorchDynamo asks for the GPU, which a server must not have.
"""

import torch
from torch._dynamo.utils import counters


def _double(x):
    return x + x


if torch.version.cuda is None:
    torch.compile(_double, backend="eager", dynamic=True)(torch.ones(3))
    torch._dynamo.reset()
    counters.clear()
