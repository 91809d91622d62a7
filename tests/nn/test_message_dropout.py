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
from torch_geometric.utils import scatter, softmax

from pyg_dfgnn.ir import D, E, One, S
from pyg_dfgnn.ir.lowering import _lowered, lower
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.drop_ins import MARK
from pyg_dfgnn.nn.messages import call as calls
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import assert_largest_close
from tests.nn.message_cases import EDGE, FEATURES, WIDTH, Case, assert_results, outputs_and_gradients, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")


@contextmanager
def drawn_seeds():
    """Yield the list of the seeds that calls of compiled layers draw inside."""
    seeds: list[torch.Tensor] = []
    draw = calls.draw_seed
    with patch.object(calls, "draw_seed", lambda device: seeds.append(draw(device)) or seeds[-1]):
        yield seeds


@contextmanager
def masked(masks):
    """Let torch's dropout take the masks of (seed, stream) in their order."""
    left = list(masks)

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or p == 0.0:
            return x
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
        weight = F.dropout(edge_weight, 0.1, self.training).view(-1, 1, 1)
        gate = F.dropout(gate_j, 0.3, self.training).unsqueeze(1)
        return (F.dropout(h_j, 0.2, self.training) * alpha.unsqueeze(-1) + gate) * weight

    def aggregate(self, inputs, index, dim_size=None):
        out = scatter(inputs, index, 0, dim_size, "sum")
        return F.dropout(out, 0.25, self.training) if self.everywhere else out


def _call(layer, i):
    return layer(i.x, i.edge_index, i.edge_weight)


def _attributed(layer, i):
    return layer(i.x, i.edge_index, i.edge_attr)


USER = Case(Attention, _call)
EVERYWHERE = Case(partial(Attention, everywhere=True), _call)
PYGS = {
    "user": USER,
    "everywhere": EVERYWHERE,
    "GATConv": Case(partial(pyg.GATConv, FEATURES, WIDTH, 2, edge_dim=EDGE, dropout=0.5), _attributed),
    "GATv2Conv": Case(partial(pyg.GATv2Conv, FEATURES, WIDTH, 2, edge_dim=EDGE, dropout=0.5), _attributed),
    "TransformerConv": Case(partial(pyg.TransformerConv, FEATURES, WIDTH, 2, edge_dim=EDGE, dropout=0.5), _attributed),
    "HANConv": Case(
        partial(pyg.HANConv, FEATURES, WIDTH, (["a"], [("a", "to", "a")]), heads=2, dropout=0.5),
        lambda c, i: c({"a": i.x}, {("a", "to", "a"): i.edge_index})["a"],
    ),
}


@pytest.mark.parametrize("name", PYGS)
@pytest.mark.filterwarnings("ignore")
def test_results_are_pygs_under_the_mask_of_the_seed(name):
    """Outputs and every gradient are those of PyG's own code with dropout by the reference's masks."""
    case, graph = PYGS[name], ZOO["self-loops"]()
    layer, marked = twins(case.make)
    with messages.interpreted(), watched() as seen, drawn_seeds() as seeds:
        results = outputs_and_gradients(marked, case, graph)
    assert all(trace.program is not None for _, _, trace, _ in seen) and len(seeds) == 1
    with masked((seeds[0], stream) for stream in range(5 if name == "everywhere" else 1)):
        expected = outputs_and_gradients(layer, case, graph)
    assert_results(results, expected, rtol=1e-9, atol=1e-11)


RUNS = [(torch.float32, 2 * WIDTH, "self-loops"), (torch.bfloat16, 5, "hub")]


@needs_compiler
@pytest.mark.parametrize(("dtype", "channels", "graph"), RUNS, ids=lambda value: str(value).removeprefix("torch."))
def test_kernels_draw_the_masks_of_the_interpreter(dtype, channels, graph):
    """Forward, over the CSR and over the CSC, for numbers per edge, per head, per channel and of both."""
    torch.set_default_dtype(torch.float32)
    graph = ZOO[graph]()
    _, marked = twins(partial(Attention, channels, everywhere=True))
    generator = torch.Generator().manual_seed(2)
    narrow = marked.to(dtype)
    x = torch.randn(graph.num_src, FEATURES, generator=generator).to(dtype)
    weight = torch.rand(graph.num_edges, generator=generator).to(dtype)
    upstream = torch.randn(graph.num_src, 2 * channels, generator=generator).to(dtype)

    def results(layer, *tensors):
        named = {"x": tensors[0].clone().requires_grad_(), **dict(layer.named_parameters())}
        torch.manual_seed(7)
        out = layer(named["x"], graph.edge_index, tensors[1])
        gradients = torch.autograd.grad(out, list(named.values()), upstream.to(out.dtype))
        return {"out": out.detach(), **{f"grad {name}": g for name, g in zip(named, gradients)}}

    with emulated_device() as launched, local_settings(fallback="error"):
        actual, again = results(narrow, x, weight), results(narrow, x, weight)
    assert set(launched) <= {"relational_traversal", "relational_traversal_merge", "relational_map"} and launched
    assert all(torch.equal(actual[name], again[name]) for name in actual)
    with messages.interpreted():
        expected = results(copy.deepcopy(narrow).double(), x.double(), weight.double())
    assert_largest_close(dtype, actual, expected, "relational")


class Dropped(MessagePassing):
    """Returns what dropout leaves of each edge, twice."""

    def __init__(self, p):
        super().__init__(aggr=None)
        self.p = p

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        first, second = x_j.clone(), x_j.clone()
        F.dropout(first, self.p, self.training, inplace=True)
        return first, torch.dropout(second, self.p, self.training)

    def aggregate(self, inputs):
        return inputs


EDGES = torch.stack([torch.arange(4000) % 7, torch.arange(4000) % 11])


def dropped(p, train=True, x=None):
    with torch.random.fork_rng():
        layer = twins(partial(Dropped, p))[1].train(train)
    with messages.interpreted(), watched() as seen:
        out = layer(torch.ones(11, 8) if x is None else x, EDGES)
    assert seen[0][2].program is not None
    return out


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_have_the_rate_that_is_asked_for(p):
    torch.manual_seed(1)
    first, second = dropped(p)
    count, deviation = first.numel(), (p * (1 - p) / first.numel()) ** 0.5
    for mask in (first, second):
        kept = mask != 0
        torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - p)))
        assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
        # Neither an edge nor a channel has more of it than others.
        assert (kept.double().mean(0) - (1 - p)).abs().max() < 4 * (p * (1 - p) / 4000) ** 0.5
        assert (kept.double().mean(1) - (1 - p)).std() < 1.1 * (p * (1 - p) / 8) ** 0.5
    # Two of a program are independent, and so are the same edges' numbers of a later call.
    for other in (second, dropped(p)[0]):
        both = ((first != 0) & (other != 0)).double().mean().item()
        assert abs(both - (1 - p) ** 2) < 4 * ((1 - p) ** 2 / count) ** 0.5
        assert not torch.equal(first, other)


def test_a_seed_of_torch_gives_the_masks_again():
    torch.manual_seed(5)
    first, then = dropped(0.5)[0], dropped(0.5)[0]
    torch.manual_seed(5)
    assert not torch.equal(first, then)
    assert torch.equal(first, dropped(0.5)[0]) and torch.equal(then, dropped(0.5)[0])


def test_the_ends_of_the_rate_and_evaluation():
    x = torch.randn(11, 8)
    x[2, 3] = torch.inf
    for p, train in ((0.0, True), (0.5, False), (1.0, True)):
        with drawn_seeds() as seeds:
            out = dropped(p, train, x)
        assert not seeds
        for result in out:
            torch.testing.assert_close(result, F.dropout(x[EDGES[0]], p, train), equal_nan=True)
    layer = twins(partial(Dropped, 1.5))[1]
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        layer(x, EDGES)


def test_no_mask_is_stored():
    """Steps draw masks where they read them: forward with the softmax in one pass over the edges."""
    with messages.interpreted(), watched() as seen:
        outputs_and_gradients(twins(USER.make)[1], USER, ZOO["self-loops"]())
    program = seen[0][2].program
    lowered = lower(Passes().run(program, {One: 1, S: 99, D: 99, E: 999}, program.features), ["0"])
    steps = [*lowered.forward, *lowered.backward]
    assert len(lowered.forward) == 1 and sum("keep" in {v.op for v in step.program.values} for step in steps) == 4
    assert not any(step.program.values[i].op == "keep" for step in steps for _, i in step.program.outputs)
    assert {lowered.buffers[name].domain for name in lowered.saved} <= {S, D, One}


def test_calls_share_what_was_lowered():
    """Neither the trace nor what is made of it depends on a seed."""
    graph = ZOO["self-loops"]()
    _, marked = twins(Attention)
    marked.float()
    x, weight = torch.randn(graph.num_src, FEATURES).float(), torch.ones(graph.num_edges).float()
    with emulated_device(), local_settings(fallback="error"), watched() as seen:
        first = marked(x, graph.edge_index, weight)
        known = _lowered.cache_info().misses
        assert not torch.equal(first, marked(x, graph.edge_index, weight))
    assert _lowered.cache_info().misses == known and seen[0][2] is seen[1][2]


def test_a_call_that_is_refused_draws_no_seed():
    """PyG's code then draws what it would have drawn."""
    graph = ZOO["self-loops"]()
    layer, marked = twins(Attention)
    x, weight = torch.randn(graph.num_src, FEATURES), torch.ones(graph.num_edges)
    results = []
    for module in (layer, marked):
        torch.manual_seed(2)
        results.append(module(x, graph.edge_index, weight))
    assert MARK in marked.__dict__ and torch.equal(*results)


def test_attention_that_is_read_later_has_the_mask_of_the_sums():
    """The edges' values are joined to the program of `propagate`, and computed by their own when they are returned."""
    graph = ZOO["self-loops"]()
    _, marked = twins(partial(pyg.GATConv, FEATURES, WIDTH, 2, dropout=0.5, add_self_loops=False, bias=False))
    x = torch.randn(graph.num_src, FEATURES)
    with messages.interpreted():
        out, (_, alpha) = marked(x, graph.edge_index, return_attention_weights=True)
    source, target = graph.edge_index
    sent = marked.lin(x).view(-1, 2, WIDTH)[source] * alpha.unsqueeze(-1)
    torch.testing.assert_close(out, scatter(sent, target, 0, graph.num_dst, "sum").flatten(1))
    assert (alpha == 0).any()
