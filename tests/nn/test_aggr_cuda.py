"""Aggregations, functional reductions, pools and PNAConv on a GPU against PyG's in float64 on the CPU."""

import copy

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric import utils as pyg_utils

import pyg_dfgnn
from pyg_dfgnn import nn, utils
from pyg_dfgnn.reference.tolerances import assert_all_close

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("plain_torch")]
ROWS, GROUPS, CHANNELS = 3000, 200, 48
DEVICE = "cuda"


@pytest.fixture(params=["unsorted", "sorted", "hub"])
def index(request):
    """Group of each row; the last group is empty."""
    groups = torch.randint(GROUPS - 1, (ROWS,))
    if request.param == "hub":
        groups[torch.rand(ROWS) < 0.9] = 7
    return groups.sort().values if request.param == "sorted" else groups


def assert_equals_pyg(own, pygs, x, *args, op="segment", **kwargs):
    """A layer or function gives on the GPU what PyG's gives in float64: outputs, gradients of input and parameters."""
    results = []
    for function, device, dtype in ((own, DEVICE, x.dtype), (pygs, "cpu", torch.float64)):
        module = isinstance(function, torch.nn.Module)
        function = copy.deepcopy(function).to(device, dtype) if module else function
        leaves = {"x": x.to(device, dtype).requires_grad_(), **(dict(function.named_parameters()) if module else {})}
        moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        with pyg_dfgnn.local_settings(fallback="error"):
            out = function(leaves["x"], *moved, **kwargs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device, out.dtype)
        grads = torch.autograd.grad(out, list(leaves.values()), grad)
        results.append({"out": out, **{f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}})
    actual, expected = results
    assert_all_close({name: (value, expected[name]) for name, value in actual.items()}, dtype=x.dtype, op=op)


@pytest.mark.parametrize("values", ["random", "ties"])
@pytest.mark.parametrize("name", ["Sum", "Mean", "Max", "Min", "Var", "Std", "Mul", "Softmax", "PowerMean"])
def test_aggregations(name, values, index):
    # Products of many larger numbers leave the range of float32.
    least = -1 if name == "Mul" else -2
    x = torch.randn(ROWS, CHANNELS) if values == "random" else torch.randint(least, 2, (ROWS, CHANNELS)).float()
    own, pygs = (getattr(library, f"{name}Aggregation")() for library in (nn, pyg))
    assert_equals_pyg(own, pygs, x, index, dim_size=GROUPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_multi(dtype, index):
    x = torch.randn(ROWS, CHANNELS).to(dtype)
    own, pygs = (library.MultiAggregation(["mean", "max", "min", "sum"]) for library in (nn, pyg))
    assert_equals_pyg(own, pygs, x, index, dim_size=GROUPS)


def test_functions(index):
    x = torch.randn(ROWS, CHANNELS)
    assert_equals_pyg(utils.softmax, pyg_utils.softmax, x, index)
    assert_equals_pyg(utils.scatter, pyg_utils.scatter, x, index, reduce="max")
    assert_equals_pyg(utils.segment, pyg_utils.segment, x, torch.tensor([0, 10, 10, ROWS]), reduce="max")
    for name in ("global_add_pool", "global_mean_pool", "global_max_pool"):
        assert_equals_pyg(getattr(nn, name), getattr(pyg, name), x, index)


@pytest.mark.parametrize("edge_dim", [None, 5])
def test_pna(edge_dim):
    scalers = ["identity", "amplification", "attenuation"]
    arguments = 24, 32, ["mean", "min", "max", "std"], scalers, torch.tensor([0, 5, 10, 5])
    own, pygs = (library.PNAConv(*arguments, edge_dim=edge_dim, towers=2) for library in (nn, pyg))
    own.load_state_dict(pygs.state_dict())
    edge_index = torch.randint(GROUPS - 1, (2, ROWS))
    edge_attr = [] if edge_dim is None else [torch.randn(ROWS, edge_dim)]
    if edge_attr:
        # PyG's arguments are positional; a float64 conv takes float64 edges.
        pygs.register_forward_pre_hook(lambda _, args: (args[0], args[1], args[2].double()))
    assert_equals_pyg(own, pygs, torch.randn(GROUPS, 24), edge_index, *edge_attr, op="attention")
