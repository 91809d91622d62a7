"""What tests of the code around messages share: a layer on one small graph, compared with PyG's in float64."""

import copy
from collections import Counter

import torch

import pyg_dfgnn
from pyg_dfgnn.reference.tolerances import assert_all_close

NODES, WIDTH = 9, 8


class Functions(torch.overrides.TorchFunctionMode):
    """The functions of torch that are called in it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def edges():
    return torch.randint(NODES, (2, 40), generator=torch.Generator().manual_seed(0))


def features(dtype=torch.float32):
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def outputs_and_gradients(layer, x):
    layer.zero_grad()
    out = layer(x, edges())
    out.square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out, "grad_x": x.grad, **grads}


def compiled_calls(layer, launched, calls=3):
    """The compiled layer, and how often each kernel was launched in calls of it that equal PyG's in float64."""
    compiled, counts = pyg_dfgnn.accelerate(copy.deepcopy(layer)), []
    expected = outputs_and_gradients(copy.deepcopy(layer).double(), features(torch.float64))
    for _ in range(calls):
        launched.clear()
        actual = outputs_and_gradients(compiled, features())
        assert actual.keys() == expected.keys()
        assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
        counts.append(Counter(launched))
    return compiled, counts
