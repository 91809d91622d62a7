"""Relations that one gather takes are what they are one by one, whichever of them a batch has."""

import copy
import logging
import pickle

import pytest
import torch
from torch_geometric.nn import GATConv, GraphConv, HeteroConv, SAGEConv

import pyg_dfgnn
import pyg_dfgnn.nn
from pyg_dfgnn.nn.conv import hetero_conv
from pyg_dfgnn.reference.tolerances import elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

WIDTH = 6
NODES = {"user": 9, "item": 12, "shop": 5, "tag": 4, "empty": 0}
RELATIONS = [
    *(("user", "buys", "item"), ("item", "of", "user"), ("shop", "sells", "item"), ("item", "in", "shop")),
    *(("user", "knows", "user"), ("item", "like", "item"), ("tag", "on", "item"), ("empty", "to", "item")),
]


def batch(seed, left_out=(), most=23):
    generator = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(count, WIDTH, generator=generator).double() for name, count in NODES.items()}
    edges = {}
    for relation in RELATIONS:
        if relation in left_out:
            continue
        source, target = NODES[relation[0]], NODES[relation[-1]]
        count = 0 if relation[1] == "in" or not source else most
        ends = [torch.randint(max(n, 1), (count,), generator=generator) for n in (source, target)]
        edges[relation] = torch.stack(ends)
    return x, edges


def results(layer, x, edges):
    x = {name: rows.clone().requires_grad_() for name, rows in x.items()}
    out = layer(x, edges)
    loss = sum((rows.sin() * (k + 1)).sum() for k, rows in enumerate(out.values()))
    leaves = {**{f"x {name}": rows for name, rows in x.items()}, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return list(out), {**out, **{name: grad for name, grad in zip(leaves, grads) if grad is not None and grad.any()}}


def assert_equal(found, want):
    assert found[0] == want[0] and found[1].keys() == want[1].keys()
    for name in want[1]:
        torch.testing.assert_close(
            found[1][name], want[1][name], rtol=1e-10, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}"
        )


def mixed(relation):
    if relation[1] == "knows":
        return GATConv((WIDTH, WIDTH), WIDTH, add_self_loops=False)
    if relation[1] in ("like", "on", "sells"):
        return GraphConv(WIDTH, WIDTH, aggr="add", bias=relation[1] == "on")
    return SAGEConv(WIDTH, WIDTH, root_weight=relation[1] != "buys", aggr="max" if relation[1] == "of" else "mean")


CONVS = {
    "mean": lambda _: SAGEConv((WIDTH, WIDTH), WIDTH),
    "sum": lambda _: SAGEConv(WIDTH, WIDTH, aggr="sum", bias=False),
    "no roots": lambda _: SAGEConv(WIDTH, WIDTH, root_weight=False),
    "GraphConv": lambda _: GraphConv((WIDTH, WIDTH), WIDTH, aggr="mean"),
    "normalised": lambda _: SAGEConv(WIDTH, WIDTH, normalize=True),
    "mixed": mixed,
}


def twins(name, aggr="sum"):
    torch.manual_seed(0)
    own = HeteroConv({relation: CONVS[name](relation) for relation in RELATIONS}, aggr=aggr).double()
    return own, pyg_dfgnn.accelerate(copy.deepcopy(own))


@pytest.fixture(autouse=True)
def few_relations(monkeypatch):
    monkeypatch.setattr(hetero_conv, "LEAST_RELATIONS", 2)


@pytest.mark.parametrize("name", CONVS)
def test_relations_are_what_they_are_one_by_one(name):
    own, ours = twins(name)
    for seed, left_out in ((0, ()), (1, RELATIONS[:3]), (2, RELATIONS[2:]), (3, (RELATIONS[5],))):
        x, edges = batch(seed, left_out)
        with emulated_device():
            found = results(ours, x, edges)
        assert_equal(found, results(own, x, edges))


ATTENTION = {
    "pairs": lambda _: GATConv((WIDTH, WIDTH), 4, heads=2, add_self_loops=False),
    "one width": lambda _: GATConv(WIDTH, 4, heads=2, add_self_loops=False, bias=False),
    "mean of heads": lambda _: GATConv((WIDTH, WIDTH), WIDTH, heads=3, concat=False, add_self_loops=False),
    "mixed": lambda relation: (
        SAGEConv((WIDTH, WIDTH), 8)
        if relation[1] in ("on", "in", "to")
        else GATConv((WIDTH, WIDTH), 4, heads=2, add_self_loops=False, dropout=0.5 * (relation[1] == "of"))
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", ATTENTION)
def test_relations_of_attention_are_what_they_are_one_by_one(name):
    torch.manual_seed(0)
    own = HeteroConv({relation: ATTENTION[name](relation) for relation in RELATIONS}).eval()
    ours, own = pyg_dfgnn.accelerate(copy.deepcopy(own)), own.double()
    for seed, left_out, most in ((0, (), 23), (1, RELATIONS[:3], 3), (2, (RELATIONS[5],), 1), (3, (), 0)):
        x, edges = batch(seed, left_out, most)
        with emulated_device() as launched:
            found = results(ours, {name: rows.float() for name, rows in x.items()}, edges)
        want = results(own, x, edges)
        assert found[0] == want[0]
        for key in want[1]:
            # Gradients of zero are left out: with one edge a softmax has no other.
            mine = found[1].get(key, torch.zeros(())).double().expand_as(want[1][key])
            torch.testing.assert_close(
                mine, want[1][key], **elementwise("float32"), msg=lambda t, key=key: f"{key}: {t}"
            )
        forward = [each for each in launched if "forward" in each]
        assert len(forward) == (most > 0), forward


@pytest.mark.parametrize("aggr", ["mean", "max", "cat", None])
def test_other_reductions_of_relations_are_pygs(aggr):
    own, ours = twins("mean", aggr)
    with emulated_device():
        found = results(ours, *batch(0))
    assert_equal(found, results(own, *batch(0)))


LAUNCHES = {"aten::index_select", "aten::scatter_add_", "aten::index_add_", "aten::mm", "aten::addmm", "aten::div"}


def launches(layer, x, edges):
    with torch.profiler.profile() as profile:
        results(layer, x, edges)
    return sum(event.count for event in profile.key_averages() if event.key in LAUNCHES)


def test_relations_take_fewer_launches_together():
    own, ours = twins("mean")
    with emulated_device():
        count = launches(ours, *batch(0))
    assert 3 * count < launches(own, *batch(0))


def test_edits_of_edges_hooks_and_other_weights_are_seen():
    own, ours = twins("mean")
    x, edges = batch(0)
    with emulated_device():
        for change in (
            lambda layer: None,
            lambda layer: edges[RELATIONS[0]].zero_(),
            lambda layer: layer.convs[RELATIONS[1]].register_forward_hook(lambda *_: _[-1] * 2),
            lambda layer: setattr(layer.convs[RELATIONS[2]], "aggr_module", pyg_dfgnn.nn.SumAggregation()),
        ):
            for layer in (own, ours):
                change(layer)
            assert_equal(results(ours, x, edges), results(own, x, edges))


def test_ids_and_widths_that_do_not_fit_are_errors():
    own, ours = twins("mean")
    for row in (0, 1):
        x, edges = batch(0)
        edges[RELATIONS[0]][row, 0] = 20
        for layer in (own, ours):
            with emulated_device(), pytest.raises((IndexError, RuntimeError, ValueError)):
                layer(x, edges)
    wide = HeteroConv({relation: SAGEConv(WIDTH, 1 + (k > 3)) for k, relation in enumerate(RELATIONS)})
    x, edges = batch(0)
    for layer in (wide, pyg_dfgnn.accelerate(wide)):
        with emulated_device(), pytest.raises(RuntimeError, match="equal size"):
            layer({name: rows.float() for name, rows in x.items()}, edges)


def test_means_of_many_in_16_bits():
    torch.manual_seed(0)
    relations = [("a", str(k), "a") for k in range(5)]
    own = HeteroConv({relation: SAGEConv(2, 2) for relation in relations})
    ours = pyg_dfgnn.accelerate(copy.deepcopy(own)).bfloat16()
    x = torch.ones(10, 2)
    ends = {relation: torch.stack([torch.randint(10, (1000,)), torch.zeros(1000).long()]) for relation in relations}
    with emulated_device():
        out = ours({"a": x.bfloat16()}, ends)["a"]
    torch.testing.assert_close(out.float(), own({"a": x}, ends)["a"], rtol=2e-2, atol=5e-2)


def test_copies_pickles_and_restored_modules():
    own, ours = twins("mean")
    assert type(ours) is pyg_dfgnn.nn.HeteroConv
    for layer in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours):
        with emulated_device():
            assert_equal(results(layer, *batch(0)), results(own, *batch(0)))
    assert type(pyg_dfgnn.restore(ours)) is HeteroConv
    assert all(type(layer) is SAGEConv for layer in ours.convs.values())


def test_layers_of_ours_in_it():
    torch.manual_seed(0)
    ours = pyg_dfgnn.nn.HeteroConv({relation: pyg_dfgnn.nn.SAGEConv(WIDTH, WIDTH) for relation in RELATIONS}).double()
    own = HeteroConv({relation: SAGEConv(WIDTH, WIDTH) for relation in RELATIONS}).double()
    own.load_state_dict(ours.state_dict())
    with emulated_device():
        found = results(ours, *batch(0))
    assert_equal(found, results(own, *batch(0)))


def test_accelerate_names_the_container(caplog):
    own, _ = twins("mean")
    with caplog.at_level(logging.INFO, logger="pyg_dfgnn"):
        pyg_dfgnn.accelerate(own)
    assert "1 HeteroConv" in caplog.text
