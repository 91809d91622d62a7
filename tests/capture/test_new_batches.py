"""Batches of small graphs as a loader makes them: each step of a captured run compresses their edges by kernels."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.capture import Buckets, Capacity, CapturedStep, capture_step
from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.graph import Graph, RefilledGraph
from pyg_dfgnn.ops.graph import refill, reports
from pyg_dfgnn.ops.visits import refilled
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from tests.capture.test_step import HostRecorder
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

WIDTH = 8


@pytest.fixture(autouse=True)
def no_reports():
    yield
    reports("cpu").values.zero_()


def member(size, seed):
    """A graph whose edges are in no order, some of them self-loops or twice there."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(size, (2, 3 * size), generator=generator)
    x, edge_attr = (torch.randn(n, WIDTH, generator=generator) for n in (size, 3 * size))
    return Data(x=x, edge_index=edge_index, edge_attr=edge_attr, y=torch.tensor([seed % 3]))


def members(count=10):
    return [member(5 + 3 * i % 11, i) for i in range(count)]


class Filter(MessagePassing):
    """A user's own layer, whose messages are compiled where edges stay."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j * edge_attr.sigmoid()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch_geometric.nn.GCNConv(WIDTH, WIDTH, add_self_loops=False)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr[:, 0].abs())


class Typed(nn.Module):
    """A layer with two relations, by a feature of the edges."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, (edge_attr[:, 0] > 0).long())


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())


def plain(kind, *args, **options):
    """A layer that takes no features of edges."""
    return lambda: getattr(torch_geometric.nn, kind)(*args, **options)


KERNELS = {
    "gat": plain("GATConv", WIDTH, WIDTH // 2, heads=2),
    "gat with edges": lambda: torch_geometric.nn.GATConv(WIDTH, WIDTH, edge_dim=WIDTH),
    "gat without loops": plain("GATConv", WIDTH, WIDTH, add_self_loops=False),
    "agnn": plain("AGNNConv"),
    "gatv2": plain("GATv2Conv", WIDTH, WIDTH),
    "transformer": lambda: torch_geometric.nn.TransformerConv(WIDTH, WIDTH // 2, heads=2, edge_dim=WIDTH),
    "gin": lambda: torch_geometric.nn.GINConv(mlp()),
    "gine": lambda: torch_geometric.nn.GINEConv(mlp(), edge_dim=WIDTH),
    "gcn": plain("GCNConv", WIDTH, WIDTH),
    "gcn, max": plain("GCNConv", WIDTH, WIDTH, aggr="max"),
    "gcn without loops, max": plain("GCNConv", WIDTH, WIDTH, aggr="max", add_self_loops=False),
    "lg": plain("LGConv"),
    "sage": plain("SAGEConv", WIDTH, WIDTH),
    "sage, max": plain("SAGEConv", WIDTH, WIDTH, aggr="max"),
    "sage, other flow": plain("SAGEConv", WIDTH, WIDTH, flow="target_to_source"),
}
PYGS = {"a layer of one's own": Filter, "weighted gcn": Weighted}
"""Layers that PyG's code takes: no kernel runs on edges that are not measured."""

TYPED = {
    "rgcn": lambda: Typed(torch_geometric.nn.RGCNConv(WIDTH, WIDTH, 2)),
    "film": lambda: Typed(torch_geometric.nn.FiLMConv(WIDTH, WIDTH, 2)),
    "rgat": lambda: Typed(torch_geometric.nn.RGATConv(WIDTH, WIDTH, 2)),
}
"""Layers that operators of torch take, with all pairs of a node and a relation."""


class Model(nn.Module):
    """Two layers and a pool."""

    def __init__(self, make, pool="mean"):
        super().__init__()
        self.layers, self.pool = nn.ModuleList([make() for _ in range(2)]), pool
        self.lin = nn.Linear(WIDTH, 3)

    def forward(self, data):
        x = data.x
        for layer in self.layers:
            takes_edges = getattr(layer, "edge_dim", None) or isinstance(layer, (Filter, Weighted, Typed, GINE))
            x = layer(x, data.edge_index, data.edge_attr) if takes_edges else layer(x, data.edge_index)
            x = x.relu()
        pool = getattr(torch_geometric.nn, f"global_{self.pool}_pool")
        return self.lin(pool(x, data.batch, data.num_graphs))


GINE = torch_geometric.nn.GINEConv


def call(model, data):
    return model(data)


def loss(out, data):
    return F.cross_entropy(out, data.y)


def by_hand(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def twins(make):
    """A model of PyG's layers and an accelerated copy, each with an optimizer."""
    torch.manual_seed(3)
    model = make()
    models = model, pyg_dfgnn.accelerate(copy.deepcopy(model))
    return [(twin, torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, fused=True)) for twin in models]


def unmeasured(monkeypatch):
    """Make an error of each graph that is measured, for which the host would wait."""
    for name in ("build", "build_index", "build_ptr"):
        monkeypatch.setattr(f"pyg_dfgnn.graph.graph.{name}", None)


def compare(make, monkeypatch, count=CapturedStep.WARM_UPS + 6):
    loader = DataLoader(members(), batch_size=3, shuffle=True)
    (left, first), (right, second) = twins(make)
    batches = [batch for _ in range(-(-count // len(loader))) for batch in loader][:count]
    want = by_hand(left, first, batches)
    unmeasured(monkeypatch)
    with emulated_device() as launched:
        step = capture_step(right, loss, second, loader, forward=call, recorder=HostRecorder(second))
        losses = torch.stack([step(batch) for batch in batches])
    torch.testing.assert_close(losses, want, **elementwise("float32/steps"))
    for (name, a), (_, b) in zip(right.state_dict().items(), left.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert step.recorder.replays == count - CapturedStep.WARM_UPS
    return launched, count


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_layers_on_the_kernels(name, monkeypatch):
    with local_settings(fallback="error"):
        launched, count = compare(lambda: Model(KERNELS[name]), monkeypatch)
    # Both layers share the arrays of a step.
    assert launched.count("graph_count") in (count, count + 1)


@needs_compiler
@pytest.mark.parametrize("pool", ["add", "max"])
def test_pools(pool, monkeypatch):
    monkeypatch.setattr(torch_geometric.nn, f"global_{pool}_pool", getattr(pyg_dfgnn.nn, f"global_{pool}_pool"))
    launched, _ = compare(lambda: Model(KERNELS["gin"], pool), monkeypatch)
    assert "segment_backward_sources" in launched


@needs_compiler
@pytest.mark.parametrize("name", PYGS)
def test_layers_of_pygs_code(name, monkeypatch):
    launched, _ = compare(lambda: Model(PYGS[name]), monkeypatch)
    assert "graph_count" not in launched


@needs_compiler
@pytest.mark.parametrize("name", TYPED)
def test_layers_with_relations(name, monkeypatch):
    with local_settings(fallback="error"):
        launched, _ = compare(lambda: Model(TYPED[name]), monkeypatch)
    assert "relational_traversal" not in launched


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_arrays_are_those_of_each_batch(self_loops, transposed, dtype):
    """Of measured graphs of the same edges; rows of padding are empty."""
    room, sizes, num_nodes = torch.zeros(2, 300, dtype=dtype), torch.zeros(2, dtype=torch.int64), 50
    graph = RefilledGraph(room, sizes, num_nodes, self_loops, transposed, refill)
    graph.register()
    with emulated_device(order="random") as launched:
        for nodes, edges in ((40, 200), (7, 300), (49, 0), (1, 5)):
            batch = random_edges(nodes, nodes, edges, dtype=dtype)
            room.fill_(num_nodes - 1)
            room[:, :edges] = batch
            sizes.copy_(torch.tensor([edges, nodes]))
            graph.register()
            graph.refill()
            measured = Graph.resolve(batch, nodes, nodes, self_loops, transposed)
            assert Graph.resolve(room, num_nodes, num_nodes, self_loops, transposed) is graph
            for side, want in ((graph.csr, measured.csr), (graph.csc, measured.csc)):
                count = want.num_edges
                assert torch.equal(side.rowptr[: nodes + 1], want.rowptr) and (side.rowptr[nodes:] == count).all()
                row = torch.repeat_interleave(want.rowptr.diff().long())
                order = torch.argsort(row * num_nodes + side.col[:count], stable=True)
                by = torch.argsort(row * num_nodes + want.col, stable=True)
                assert torch.equal(side.col[:count][order], want.col[by])
                # As the numbers of the edges say, self-loops behind all of the room.
                ends = graph.edge_index[:, side.perm[:count].long()]
                other, own = (0, 1) if side is graph.csr else (1, 0)
                assert torch.equal(ends[own], row) and torch.equal(ends[other], side.col[:count].long())
    assert launched.count("graph_order") == 4
    assert not reports("cpu").values.any()


@needs_compiler
@pytest.mark.parametrize("name", ["gin", "gcn", "gcn, max", "gcn without loops, max"])
@pytest.mark.parametrize("beyond", [0, 10**6])
def test_ids_out_of_range_are_told_by_the_next_step(name, beyond):
    """Also those that lie in the room for padding; the edges are left out."""
    loader = DataLoader(members(), batch_size=3)
    (_, _), (model, optimizer) = twins(lambda: Model(KERNELS[name]))
    with emulated_device():
        step = capture_step(model, loss, optimizer, loader, forward=call, recorder=HostRecorder(optimizer))
        for _ in range(2):
            for batch in loader:
                step(batch)
        bad = next(iter(loader))
        num_nodes = bad.num_nodes
        good = bad.clone()
        number = bad.edge_index[0, 4] = num_nodes + beyond
        keep = torch.arange(good.num_edges) != 4
        good.edge_index, good.edge_attr = good.edge_index[:, keep], good.edge_attr[keep]
        with torch.no_grad():
            want = loss(copy.deepcopy(model)(good), good)
        torch.testing.assert_close(step(bad), want, **elementwise("float32/steps"))
        with pytest.raises(IdRangeError, match=f"source id {number} of {num_nodes} nodes, in this call or an earlier"):
            step(next(iter(loader)))
        assert step(next(iter(loader))).isfinite()


def test_groups_that_are_not_known_are_pygs():
    """In a step that is refilled, and wherever a stream is captured, the groups of others are not looked for."""
    x, index = torch.randn(20, 4), torch.randint(5, (20,))
    sums = pyg_dfgnn.nn.aggr.SumAggregation()
    with emulated_device() as launched:
        with refilled():
            out = sums(x, index, dim_size=5)
        assert not launched
        # Those of a view, too, as the rows of an `edge_index` are.
        ends = torch.stack([index, index])
        for groups in (lambda: index, lambda: ends[1]):
            torch.testing.assert_close(sums(x, groups(), dim_size=5), out)
            launched.clear()
            with refilled():
                torch.testing.assert_close(sums(x, groups(), dim_size=5), out)
            assert launched


def test_a_refilled_graph():
    batch = Batch.from_data_list(members(3))
    buckets = Buckets(Model(KERNELS["gcn"]), Capacity.of(members(), 3))
    bucket = buckets.place(batch)
    with buckets.active(bucket) as wide:
        graph = Graph.resolve(wide.edge_index, bucket.num_nodes, bucket.num_nodes, False, False)
        assert graph.is_static and graph.pinned and graph.has_loops and graph.kept is None
        assert graph.edge_index is wide.edge_index
        looped = Graph.resolve(wide.edge_index, bucket.num_nodes, bucket.num_nodes, True, False)
        assert torch.equal(looped.edge_index[:, bucket.num_edges], torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ValueError, match="'edge_attr' needs layers without self-loops"):
            looped.kept  # noqa: B018
        with pytest.raises(ValueError, match="'rows' and 'cols' need targets and sources"):
            graph.adjacency("targets", "relations")
        with pytest.raises(TypeError, match="needs edges that stay as they are to be pickled"):
            graph.__reduce__()
