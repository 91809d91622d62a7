"""The graph of edges that a caller keeps or a forward makes, and values that a forward keeps, returns or passes on."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from pyg_dfgnn import accelerate, describe_plan, local_settings
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.tolerances import elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import assert_results, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")
NODES, WIDTH = 7, 8
X = torch.randn(NODES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Summed(MessagePassing):
    """Takes the edges as they are."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.relu()


class Twice(Summed):
    """Makes edges of the features and of new tensors, and passes messages twice."""

    def forward(self, x, edge_index):
        nearest = torch.cdist(x, x).topk(2).indices.flatten()
        made = torch.stack([nearest, torch.arange(x.size(0)).repeat_interleave(2)])
        edge_index = torch.cat([edge_index, made], dim=1)
        return self.propagate(edge_index, x=self.propagate(edge_index, x=x))


def edges(seed=0, count=15):
    return torch.randint(NODES, (2, count), generator=torch.Generator().manual_seed(seed))


def test_ids_that_are_out_of_range_raise_an_index_error():
    layer = accelerate(Summed())
    for row, bad in ((0, -1), (0, NODES), (1, -1), (1, NODES)):
        edge_index = edges()
        edge_index[row, 4] = bad
        with messages.interpreted(), pytest.raises(IndexError, match="valid indices"):
            layer(X, edge_index)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_edges_that_a_forward_makes_are_known_by_what_they_are(mode, monkeypatch):
    built, compared, resolve, equal = [], [], Graph.resolve, torch.equal
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(1) or resolve(*key)))
    monkeypatch.setattr(torch, "equal", lambda *tensors: compared.append(1) or equal(*tensors))
    (layer, marked), counts = twins(lambda: Twice("mean")), []
    with messages.interpreted(), mode(), watched() as graphs:
        for edge_index in (edges(), edges(), edges(), edges(), edges(1), edges(), edges(2, 5)):
            compared.clear()
            torch.testing.assert_close(marked(X, edge_index), layer(X, edge_index))
            counts.append((len(built), len(compared)))
    assert graphs.is_fused
    # Edges are kept from the second call on, until others of the same sizes come. They are compared once per forward;
    # tensors of inference mode have no version that tells whether they are as they were.
    assert counts[1][0] == counts[2][0] == counts[3][0] < counts[4][0] < counts[5][0] < counts[6][0]
    assert [times for _, times in counts[2:4]] == [2 if mode is torch.inference_mode else 1] * 2


@pytest.mark.parametrize("run", [messages.interpreted, pytest.param(emulated_device, marks=needs_compiler)])
def test_edges_of_the_caller_may_be_of_inference_mode_and_are_not_kept(run):
    (layer, marked), x, edge_index = twins(Summed), X.float(), edges()
    reference = weakref.ref(edge_index)
    with run():
        for given in (edge_index, edge_index, edges(1)):
            torch.testing.assert_close(marked(x, given), layer(x, given))
        with torch.inference_mode():
            given = edges()
            for _ in range(3):
                torch.testing.assert_close(marked(x, given), layer(x, given))
                given[0, 4] = (given[0, 4] + 1) % NODES
    del edge_index
    gc.collect()
    assert reference() is None


class Attention(MessagePassing):
    """Attention that stays in an attribute, which `what` does something with."""

    def __init__(self, what="kept"):
        super().__init__(aggr="add")
        self.what = what
        self.lin, self.att, self.alpha = torch.nn.Linear(WIDTH, 4), torch.nn.Linear(8, 1), None

    def forward(self, x, edge_index):
        x = self.lin(x)
        if self.what == "kept":
            x[:, :1] = 0.5
        out = self.propagate(edge_index, x=x)
        if self.what == "read":
            x.mul_(2.0)
            out = out + self.alpha.sum() + self.alpha.shape[0] + x
        return out

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = self.att(torch.cat([x_i, x_j], dim=-1)).tanh()
        self.alpha = softmax(alpha, index, ptr, size_i)
        return self.alpha * x_j


class Updated(MessagePassing):
    """Values of edges that are updated, made of each other, passed on twice and returned, as `what` says."""

    def __init__(self, what="updated"):
        super().__init__(aggr="add")
        self.what, self.lin = what, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        x = (x * 1).view(-1, WIDTH)
        first = self.edge_updater(edge_index.flip(0) if self.what == "of others" else edge_index, x=x, gate=None)
        if self.what == "edited":
            x.relu_()
        if self.what == "checkpoint":
            x = checkpoint(lambda x: self.lin(x).tanh(), x, use_reentrant=False)
        second = self.edge_updater(edge_index, x=x, gate=first)
        out = self.propagate(edge_index, x=x, gate=second)
        return out + self.propagate(edge_index, x=self.lin(x), gate=second), second.mul(2.0)

    def edge_update(self, x_i, x_j, gate):
        own = (x_i * x_j).sum(-1, keepdim=True).tanh()
        return own if gate is None else own * gate + own

    def message(self, x_j, gate):
        return gate * x_j


def results(layer, x, edge_index):
    """Outputs, gradients but for those that are None, and what the layer keeps, by name."""
    x = x.clone().requires_grad_()
    out = layer(x, edge_index)
    outs = dict(enumerate(out if isinstance(out, tuple) else (out,)))
    if getattr(layer, "alpha", None) is not None:
        assert type(layer.alpha) is torch.Tensor
        outs["alpha"] = layer.alpha
    leaves = {"x": x} | {name: leaf for name, leaf in layer.named_parameters() if leaf.requires_grad}
    grads = torch.autograd.grad(sum(o.sin().sum() for o in outs.values()), list(leaves.values()), allow_unused=True)
    return outs | {f"d_{name}": grad for name, grad in zip(leaves, grads) if grad is not None}


KINDS = {Attention: ("kept", "read"), Updated: ("updated", "of others", "edited", "checkpoint")}


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, whats in KINDS.items() for what in whats])
def test_values_are_pygs(kind, what):
    layer, marked = twins(lambda: kind(what))
    with messages.interpreted(), watched() as graphs:
        for seed in (0, 1):
            assert_results(
                results(marked, X, edges(seed)), results(layer, X, edges(seed)), **elementwise("float64/messages")
            )
        assert len(graphs) == 1 and graphs.is_fused == (what != "of others")
        # A layer that keeps what it has computed is described.
        assert what != "kept" or describe_plan(marked.float(), X.float(), edges(), device="cuda").fused


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_kernels(kind):
    layer, marked = twins(kind)
    with emulated_device(), local_settings(fallback="error"), torch.device("cpu"), watched() as graphs:
        actual = results(marked.float(), X.float(), edges())
    assert_results(actual, results(layer, X, edges()), **elementwise("float32/gradients"), check_dtype=False)
    assert graphs.is_fused
