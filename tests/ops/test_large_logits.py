"""Weights and gradients of a softmax are as exact for logits around a thousand as for small ones, or as PyG's."""

import pytest
import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax as pygs_softmax

from pyg_dfgnn import Graph, accelerate, local_settings, settings, utils
from pyg_dfgnn.ops import add_attention
from pyg_dfgnn.reference.tolerances import assert_all_close, largest_errors, tolerance, worst_beside
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

NODES, HEADS, CHANNELS = 40, 2, 8
SCHEDULES = ("row_split", "smem", "block_mma", "smmf", "pmf")


def scalars(*shape, base=0.0):
    """Sixteenths, whose sums and differences with the base float32 holds exactly."""
    return base + torch.randint(-32, 32, shape) / 16


def simple_edges():
    places = torch.randperm(NODES * NODES)[:300]
    return torch.stack([places // NODES, places % NODES])


class Weighted(MessagePassing):
    """A message that weighs its source by a softmax of the sum, or the product, of numbers of both ends."""

    def __init__(self, joins):
        super().__init__(aggr="add")
        self.joins = joins

    def forward(self, x, edge_index, left, right):
        return self.propagate(edge_index, x=x, left=left, right=right)

    def message(self, x_j, left_i, right_j, index, size_i):
        logits = left_i + right_j if self.joins == "sum" else left_i * right_j
        return pygs_softmax(logits, index, num_nodes=size_i) * x_j


def of_messages(joins):
    layer = accelerate(Weighted(joins))

    def run(edge_index, x, left, right):
        return layer(x.flatten(1), edge_index, *(t.repeat_interleave(CHANNELS, 1) for t in (left, right)))

    return run


def exact(edge_index, x, left, right, joins="sum"):
    (source, target), shape = edge_index, (NODES, HEADS, CHANNELS)
    logits = left[target] + right[source] if joins == "sum" else left[target] * right[source]
    weights = pygs_softmax(logits, target, num_nodes=NODES)
    return x.new_zeros(shape).index_add(0, target, weights.unsqueeze(-1) * x[source]).flatten(1)


def assert_exact(run, device, base, joins="sum"):
    torch.manual_seed(0)
    edge_index = simple_edges().to(device)
    inputs = {"x": scalars(NODES, HEADS, CHANNELS), "left": scalars(NODES, HEADS)}
    inputs["right"] = scalars(NODES, HEADS, base=base)
    if joins == "product":
        # A multiple of the base is what a row has in common.
        inputs["left"] = 1 + torch.randint(0, 2, (NODES, HEADS)).float()
    grad, results = torch.randn(NODES, HEADS * CHANNELS), []
    for function, dtype in ((run, torch.float32), (exact, torch.float32), (exact, torch.float64)):
        leaves = [t.to(device, dtype).requires_grad_() for t in inputs.values()]
        out = function(edge_index, *leaves) if function is run else exact(edge_index, *leaves, joins=joins)
        grads = torch.autograd.grad(out.flatten(1), leaves, grad.to(out))
        results.append({"out": out.flatten(1), **{f"grad {n}": g for n, g in zip(inputs, grads, strict=True)}})
    errors, pygs = (largest_errors(result, results[2]) for result in results[:2])
    worst = worst_beside(errors, tolerance(torch.float32).relative, pygs)
    assert worst.is_right, (worst, errors)


def of_attention(edge_index, x, left, right):
    return add_attention(Graph.of(edge_index, NODES, NODES), x, right, left, negative_slope=1.0)


@needs_compiler
@pytest.mark.parametrize("base", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention(schedule, base):
    settings(schedule=schedule)
    with emulated_device() as launched:
        assert_exact(of_attention, "cpu", base)
    assert launched


@needs_compiler
@pytest.mark.parametrize("joins", ["sum", "product"])
def test_messages(joins):
    with local_settings(fallback="silent"), emulated_device() as launched:
        assert_exact(of_messages(joins), "cpu", 1000.0, joins)
    assert launched


@needs_compiler
def test_segments():
    x, index = scalars(60, CHANNELS, base=1000.0), torch.randint(7, (60,))
    with emulated_device():
        weights = utils.softmax(x, index)
    assert_all_close({"out": (weights, pygs_softmax(x.double(), index))}, op="segment")


@pytest.mark.cuda
@pytest.mark.parametrize("base", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention_on_a_gpu(schedule, base):
    """Products and differences are fused on a GPU alone: weights of a row still add up to 1."""
    settings(schedule=schedule)
    assert_exact(of_attention, "cuda", base)
    edge_index = simple_edges().cuda()
    x, left, right = torch.ones(NODES, HEADS, CHANNELS), scalars(NODES, HEADS), scalars(NODES, HEADS, base=base)
    out = of_attention(edge_index, *(1.1 * t.cuda() for t in (x, left, right)))
    assert (out[edge_index[1].unique()] - 1.1).abs().max() < 2e-6


@pytest.mark.cuda
@pytest.mark.parametrize("joins", ["sum", "product"])
def test_messages_on_a_gpu(joins):
    with local_settings(fallback="silent"):
        assert_exact(of_messages(joins), "cuda", 1000.0, joins)
