"""Dropout in compiled messages: which masks are drawn, and PyG's results and gradients under them."""

import copy
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn.conv as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from pyg_dfgnn.frontend import run
from pyg_dfgnn.ir import D, E, One, S
from pyg_dfgnn.ir.lowering import _lowered, lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import EDGE, FEATURES, WIDTH, Case, assert_results, outputs_and_gradients, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")
EDGES = torch.stack([torch.arange(4000) % 11, torch.arange(4000).flip(0)])
ONES = torch.ones(11, 8, dtype=torch.float64)


@contextmanager
def drawn_seeds():
    """Yield the list of the seeds that calls of compiled layers draw inside."""
    seeds, draw = [], run.draw_seed
    with patch.object(run, "draw_seed", lambda device: seeds.append(draw(device)) or seeds[-1]):
        yield seeds


@contextmanager
def masked(masks):
    """Let torch's dropout take the masks of (seed, stream) in their order."""
    left = list(masks)

    def dropout(x, p=0.5, training=True, inplace=False):
        seed, stream = left.pop(0)
        factor = dropout_factor(torch.arange(x.size(0)), x[0].numel(), p, seed, stream)
        return x * factor.to(x.dtype).view(x.shape)

    with patch.object(F, "dropout", dropout):
        yield
    assert not left


class Attention(MessagePassing):
    """GAT as a user writes it, against the edges' direction, with dropout of all that it can be taken of."""

    def __init__(self, channels=WIDTH, everywhere=False):
        super().__init__(aggr="add", node_dim=0, flow="target_to_source")
        self.everywhere = everywhere
        self.lin = torch.nn.Linear(FEATURES, 2 * channels)
        self.att = torch.nn.Parameter(torch.randn(2, 2, channels))
        self.drop = torch.nn.Dropout(0.4)

    def forward(self, x, edge_index, edge_weight):
        h = self.lin(x).view(x.size(0), 2, -1)
        left, right = ((h * att).sum(-1) for att in self.att)
        out = self.propagate(edge_index, h=h, left=left, right=right, gate=h.detach().mean(1), edge_weight=edge_weight)
        return out.flatten(1)

    def message(self, h_j, left_j, right_i, gate_j, edge_weight, index, ptr, size_i):
        alpha = self.drop(softmax(F.leaky_relu(left_j + right_i, 0.2), index, ptr, size_i))
        if not self.everywhere:
            return h_j * alpha.unsqueeze(-1)
        weight = F.dropout(left_j[:, 0] * edge_weight, 0.1, self.training).view(-1, 1, 1)
        gate = F.dropout(gate_j, 0.3, self.training).unsqueeze(1)
        return (F.dropout(h_j, 0.2, self.training) * alpha.unsqueeze(-1) + gate) * weight


USER = Case(Attention, lambda c, i: c(i.x, i.edge_index, i.edge_weight))
EVERYWHERE = Case(partial(Attention, everywhere=True), USER.call)
# Attention that is returned has the mask of the sums.
RETURNED = Case(
    partial(pyg.GATConv, FEATURES, WIDTH, 2, edge_dim=EDGE, dropout=0.5),
    lambda c, i: [*(r := c(i.x, i.edge_index, i.edge_attr, return_attention_weights=True))[:1], r[1][1]],
)


@pytest.mark.parametrize(("case", "masks"), [(USER, 1), (EVERYWHERE, 4), (RETURNED, 1)])
def test_results_are_pygs_under_the_mask_of_the_seed(case, masks):
    """Outputs and every gradient are those of PyG's own code with dropout by the reference's masks."""
    (layer, marked), graph = twins(case.make), ZOO["self-loops"]()
    # PyG's code, which takes tensors on a CPU, draws what it would have drawn.
    assert_results(outputs_and_gradients(copy.deepcopy(marked), case, graph), outputs_and_gradients(layer, case, graph))
    with messages.interpreted(), watched() as graphs, drawn_seeds() as seeds:
        results = outputs_and_gradients(marked, case, graph)
    assert graphs.is_fused and len(seeds) == 1
    with masked((seeds[0], stream) for stream in range(masks)):
        expected = outputs_and_gradients(layer, case, graph)
    assert_results(results, expected, **elementwise("float64/messages"))


@needs_compiler
@pytest.mark.parametrize("graph", ["self-loops", "hub"])
def test_kernels_draw_the_masks_of_the_interpreter(graph):
    """Forward, over the CSR and over the CSC, for numbers per edge, per head, per channel and of both."""
    (_, marked), graph = twins(EVERYWHERE.make), ZOO[graph]()
    with messages.interpreted():
        expected = outputs_and_gradients(marked, EVERYWHERE, graph)
    with emulated_device() as launched, local_settings(fallback="error"):
        actual = outputs_and_gradients(marked.float(), EVERYWHERE, graph, torch.float32)
        known = _lowered.cache_info().misses
        again = outputs_and_gradients(marked, EVERYWHERE, graph, torch.float32)
    assert set(launched) <= {"relational_traversal", "relational_traversal_merge", "relational_map"} and launched
    # Nothing that is made of a program depends on a seed.
    assert all(torch.equal(actual[name], again[name]) for name in actual) and _lowered.cache_info().misses == known
    assert_results(actual, expected, **elementwise("float32/gradients"), check_dtype=False)


class Dropped(MessagePassing):
    """Returns what dropout leaves of each edge, twice, if each target has one."""

    def __init__(self, p):
        super().__init__(aggr="add")
        self.p = p

    def forward(self, x, targets, edge_index):
        return self.propagate(edge_index, x=(x, targets)).chunk(2, dim=1)

    def message(self, x_j):
        first, second = x_j.clone(), x_j.clone()
        F.dropout(first, self.p, self.training, inplace=True)
        return torch.cat([first, torch.dropout(second, self.p, self.training)], dim=-1)


def dropping(p, train=True):
    """Return a function that gives what dropout leaves of numbers [11, 8] of nodes for each edge, twice."""
    with torch.random.fork_rng():
        layer = twins(partial(Dropped, p))[1].train(train)
    return lambda x: [out[EDGES[1]] for out in layer(x, torch.ones(4000, 8), EDGES)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_have_the_rate_that_is_asked_for(p):
    torch.manual_seed(1)
    with messages.interpreted(), watched() as graphs:
        call = dropping(p)
        (first, second), (third, _) = call(ONES), call(ONES)
        torch.manual_seed(1)
        # A seed of torch gives the masks again.
        assert torch.equal(first, call(ONES)[0]) and torch.equal(third, call(ONES)[0])
    assert graphs.is_fused
    count, deviation = first.numel(), (p * (1 - p) / first.numel()) ** 0.5
    for mask in (first, second):
        kept = mask != 0
        torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - p)))
        assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
        # Neither an edge nor a channel has more of it than others.
        assert (kept.double().mean(0) - (1 - p)).abs().max() < 4 * (p * (1 - p) / 4000) ** 0.5
        assert (kept.double().mean(1) - (1 - p)).std() < 1.1 * (p * (1 - p) / 8) ** 0.5
    # Two of a program are independent, and so are the same edges' numbers of a later call.
    for other in (second, third):
        both = ((first != 0) & (other != 0)).double().mean().item()
        assert abs(both - (1 - p) ** 2) < 4 * ((1 - p) ** 2 / count) ** 0.5
        assert not torch.equal(first, other)


def test_the_ends_of_the_rate_and_evaluation():
    x = torch.randn(11, 8)
    x[2, 3] = torch.inf
    for p, train in ((0.0, True), (0.5, False), (1.0, True)):
        with messages.interpreted(), watched() as graphs, drawn_seeds() as seeds:
            out = dropping(p, train)(x)
        assert graphs.is_fused and not seeds
        torch.testing.assert_close(out, [F.dropout(x[EDGES[0]], p, train)] * 2, equal_nan=True)
    with messages.interpreted(), pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        dropping(1.5)(x)


def test_no_mask_is_stored():
    """Steps draw masks where they read them: forward with the softmax in one pass over the edges."""
    with messages.interpreted(), watched() as graphs:
        outputs_and_gradients(twins(USER.make)[1], USER, ZOO["self-loops"]())
    (program,) = graphs.programs
    lowered = lower(Passes().run(program, {One: 1, S: 99, D: 99, E: 999}, program.features), ["0"])
    steps = [*lowered.forward, *lowered.backward]
    assert (
        len(lowered.forward) == 1 and sum("dropout_mask" in {v.op for v in step.program.values} for step in steps) == 4
    )
    assert not any(step.program.values[i].op == "dropout_mask" for step in steps for _, i in step.program.outputs)
    assert {lowered.buffers[name].domain for name in lowered.saved} <= {S, D, One}
