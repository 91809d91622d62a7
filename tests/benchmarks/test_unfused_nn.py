"""The unfused convs against PyG's: parameters, results, gradients."""

import gc

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.utils import coalesce

from benchmarks.cases import unfused_nn

CONVS = {
    "gt": lambda convs: convs.TransformerConv(12, 8),
    "gt-heads-mean-beta": lambda convs: convs.TransformerConv(12, 8, heads=3, concat=False, beta=True),
    "gt-no-root": lambda convs: convs.TransformerConv(12, 4, heads=2, root_weight=False),
    "gat": lambda convs: convs.GATConv(12, 8, dropout=0.0),
    "gat-heads-residual": lambda convs: convs.GATConv(12, 8, heads=3, concat=False, residual=True, negative_slope=0.1),
    "gat-no-loops": lambda convs: convs.GATConv(12, 4, heads=2, add_self_loops=False),
    "agnn": lambda convs: convs.AGNNConv(),
    "agnn-fixed": lambda convs: convs.AGNNConv(requires_grad=False),
    "agnn-no-loops": lambda convs: convs.AGNNConv(add_self_loops=False),
}


def edges(num_nodes=40, num_edges=200):
    """Random edges with loops, node 0 isolated."""
    return coalesce(torch.randint(1, num_nodes, (2, num_edges)))


@pytest.mark.parametrize("name", CONVS)
def test_equals_pyg(name):
    theirs, ours = (CONVS[name](convs).double() for convs in (pyg, unfused_nn))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    edge_index, x = edges(), torch.randn(40, 12, dtype=torch.float64)
    results = {}
    for which, conv in (("theirs", theirs), ("ours", ours)):
        features = x.clone().requires_grad_()
        out = conv(features, edge_index)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        grads = {key: p.grad for key, p in conv.named_parameters() if p.grad is not None}
        results[which] = {"out": out.detach(), "x": features.grad, **grads}
    assert results["ours"].keys() == results["theirs"].keys()
    for key, expected in results["theirs"].items():
        torch.testing.assert_close(results["ours"][key], expected, msg=lambda text, key=key: f"{key}: {text}")


def test_same_seed_same_parameters():
    for make in CONVS.values():
        states = []
        for convs in (pyg, unfused_nn):
            torch.manual_seed(3)
            states.append(make(convs).state_dict())
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_edges_are_compressed_once():
    edge_index = edges()
    sparse = unfused_nn.compress(edge_index, 40)
    assert unfused_nn.compress(edge_index, 40) is sparse
    assert unfused_nn.compress(edge_index, 40, self_loops=True) is not sparse
    edge_index[0, 0] = 5
    assert unfused_nn.compress(edge_index, 40) is not sparse
    before = len(unfused_nn._compressed)
    del edge_index, sparse
    gc.collect()
    assert len(unfused_nn._compressed) == before - 1
