"""Programs that are a hand-written family as they stand: what is found, what is not, and that results agree."""

from functools import partial

import pytest
import torch
import torch_geometric.nn.conv as pyg

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import (
    D,
    E,
    IndexSpace,
    One,
    S,
    dot,
    interpret,
    leaky_relu,
    max_to,
    mean_to,
    relational,
    softmax,
    sum_to,
    to,
)
from pyg_dfgnn.ops.families import match
from pyg_dfgnn.ops.relational.backend import Backend, running
from pyg_dfgnn.reference.zoo import ZOO
from tests.nn.message_cases import FEATURES, WIDTH, Inputs, twins

H, C = 2, 4


@relational
def dot_scaled(q: D, k: S, v: S):
    return sum_to(D, v * (softmax(dot(q, k) * 0.5 / 4.0, among=D).view(H, 1)))


@relational
def one_head(q: D, k: S, v: S):
    return sum_to(D, softmax(dot(k, q), among=D).view(1) * v)


@relational
def additive(a: S, b: D, e: E, v: S):
    return sum_to(D, softmax(leaky_relu(b + a + e, 0.1), among=D).view(H, 1) * v)


@relational
def gatv2(x: S, xd: D, att: One):
    return sum_to(D, softmax(dot(att, leaky_relu(x + xd, 0.2)), among=D).view(H, 1) * x)


@relational
def copies(x: S):
    return max_to(D, x)


@relational
def weighted(w: E, x: S):
    return mean_to(D, x * w)


@relational
def edges_added(e: E, x: S):
    return sum_to(D, (e + x).apply("relu"))


@relational
def gated(t: D, k: S, v: S):
    return mean_to(D, v * (k + t).apply("sigmoid"))


@relational
def other_value(x: S, xd: D, att: One, v: S):
    """GATv2 weighs the vectors that make its logits."""
    return sum_to(D, softmax(dot(att, leaky_relu(x + xd, 0.2)), among=D).view(H, 1) * v)


@relational
def by_channel(q: D, k: S, v: S):
    return sum_to(D, softmax(q * k, among=D) * v)


@relational
def learnt_scale(q: D, k: S, v: S, scale: One):
    return sum_to(D, softmax(dot(q, k) * scale, among=D).view(H, 1) * v)


@relational
def of_targets(x: D):
    return sum_to(D, to(E, x))


@relational
def squared(x: S):
    return sum_to(D, x * x)


@relational
def channel_weights(w: E, x: S):
    return sum_to(D, x * w)


ROWS = {"q": (H, C), "k": (H, C), "v": (H, C), "x": (H, C), "xd": (H, C), "att": (H, C), "a": (H,), "b": (H,)}
FOUND = {
    "attention with the score 'dot'": [(dot_scaled, ROWS), (one_head, {"q": (C,), "k": (C,), "v": (C,)})],
    "attention with the score 'add'": [(additive, {**ROWS, "e": (H,)})],
    "attention with the score 'gatv2'": [(gatv2, ROWS)],
    "aggregation of max": [(copies, {"x": (H, C)})],
    "aggregation of mean": [(weighted, {"w": (1,), "x": (5,)}), (gated, {"t": (5,), "k": (5,), "v": (5,)})],
    "aggregation of sum": [(edges_added, {"e": (5,), "x": (5,)})],
}
OTHERS = [other_value, by_channel, learnt_scale, of_targets, squared, channel_weights]


def program_of(function, shapes):
    return function.program(**{name: shapes[name] for name in function.domains})


@pytest.mark.parametrize("graph", ["self-loops", "isolated", "duplicates", "bipartite-wide", "hub"])
@pytest.mark.parametrize("name", FOUND)
def test_families_give_what_the_interpreter_gives(name, graph):
    edge_list = ZOO[graph]()
    edges = Graph.of(edge_list.edge_index, edge_list.num_src, edge_list.num_dst)
    rows, generator = IndexSpace(edges), torch.Generator().manual_seed(2)
    for function, shapes in FOUND[name]:
        program = program_of(function, shapes)
        found = match(program, "out")
        assert found is not None and found.name == name
        sizes = {S: edge_list.num_src, D: edge_list.num_dst, E: edge_list.num_edges}
        inputs = {
            n: torch.randn(*((sizes[d],) if d in sizes else ()), *shapes[n], dtype=torch.float64, generator=generator)
            for n, d in function.domains.items()
        }
        leaves = {n: t.requires_grad_() for n, t in inputs.items()}
        want, got = interpret(program, rows, leaves)["out"], found.run(edges, leaves)
        assert got.shape == want.shape
        upstream = torch.randn(want.shape, dtype=torch.float64, generator=generator)
        grads = [torch.autograd.grad((out * upstream).sum(), list(leaves.values())) for out in (got, want)]
        # The family multiplies by inverse degrees in float32.
        rtol = 1e-7 if "mean" in name else 1e-9
        for left, right in zip((got, *grads[0]), (want, *grads[1])):
            torch.testing.assert_close(left, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.function.__name__)
def test_what_only_looks_like_one_is_none(function):
    program = program_of(function, {**ROWS, "scale": (1,), "w": (H, C)})
    assert match(program, "out") is None


def test_kernels_are_asked_before():
    found = match(program_of(copies, {"x": (8,)}), "out")
    assert found is not None
    assert any("float64" in reason for reason in found.reasons(torch.float64, torch.device("cuda")))
    wide = match(program_of(gatv2, {name: (H, 600) for name in ROWS}), "out")
    assert wide is not None
    assert any("600 channels" in r for r in wide.reasons(torch.float32, torch.device("cuda")))


@pytest.mark.parametrize("kind", [pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv])
def test_dropout_of_the_weights_is_the_family_s(kind):
    """The masks are those of the interpreter, so that weights that are read later have them too."""
    options = {} if kind is pyg.TransformerConv else {"add_self_loops": False}
    _, layer = twins(lambda: kind(FEATURES, WIDTH, heads=2, dropout=0.4, **options))
    inputs, seen = Inputs(ZOO["self-loops"]()), []

    def find(program, _, __, names):
        return partial(run, program, names)

    def run(program, names, rows, tensors):
        want, found = interpret(program, rows, tensors), match(program, names[0])
        if found is not None:
            seen.append(found.name)
            torch.testing.assert_close(found.run(rows.graph, tensors), want[names[0]], rtol=1e-9, atol=1e-10)
        return want

    with running(Backend(find, None)):
        layer(inputs.x, inputs.edge_index)
    assert len(seen) == 1 and seen[0].startswith("attention")
