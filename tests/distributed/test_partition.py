"""A graph whose nodes are spread over processes gives what one process gives."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch_geometric.utils import degree, softmax, to_torch_csr_tensor

import pyg_dfgnn.nn
from pyg_dfgnn import models
from pyg_dfgnn.distributed import Group, partition, wrap
from pyg_dfgnn.distributed.partition import edge_cuts
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.nn import GATConv
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

N, FEATURES, CLASSES, ENCODINGS, RELATIONS = 40, 5, 3, 2, 3
MODELS = {
    "GraphTransformer": {"hidden_channels": 8, "heads": 2, "layers": 2},
    "GAT": {"hidden_channels": 4, "heads": 2, "layers": 2, "dropout": 0.0},
    "GATv2": {"hidden_channels": 4, "heads": 2, "layers": 2, "dropout": 0.0, "residual": True},
    "AGNN": {"hidden_channels": 8, "dropout": 0.0},
}


def graph(device="cpu"):
    """Edges with loops, duplicates, a hub and targets without edges; features, encodings, labels."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(N, (2, 300), generator=generator)
    edge_index[1, :60] = 7
    edge_index[:, 60:70] = edge_index[:, 70:80]
    edge_index[0, 80:90] = edge_index[1, 80:90]
    edge_index = edge_index[:, edge_index[1] % 9 != 5]
    x, pe = (torch.randn(N, size, dtype=torch.float64, generator=generator) for size in (FEATURES, ENCODINGS))
    y = torch.randint(CLASSES, (N,), generator=generator)
    return edge_index, x, pe, y


def gradients(model, call, edges, x, pe, y, mean):
    """Loss of the parts, gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    logits = call(x, edges, pe) if isinstance(model, models.GraphTransformer) else call(x, edges)
    loss = mean(F.cross_entropy(logits, y, reduction="sum"), y.numel())
    loss.backward()
    return loss.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_models():
    group = Group.of_environment("cpu")
    edge_index, x, pe, y = graph()
    part = partition(edge_index, N, group)
    assert sum(group.counts(part.num_nodes)) == N and sum(group.counts(part.edge_index.size(1))) == edge_index.size(1)
    assert part.remote_share() == pytest.approx(sum(group.counts(part.num_halo)) / sum(group.counts(part.num_sources)))
    local = [part.local(each) for each in (x, pe, y)]
    assert torch.equal(group.gather(local[0]), x)
    for name, options in MODELS.items():
        torch.manual_seed(2)
        model = getattr(models, name)(FEATURES, CLASSES, pyg_dfgnn.nn, **options).double()
        single = copy.deepcopy(model)
        loss, grad_x, expected = gradients(single, single, edge_index, x, pe, y, Group().mean)
        found_loss, found_x, found = gradients(model, wrap(model, group), part, *local, group.mean)
        torch.testing.assert_close(group.sum(found_loss) / group.size, loss, rtol=1e-12, atol=0, msg=name)
        torch.testing.assert_close(found_x / group.size, part.local(grad_x), rtol=1e-10, atol=1e-14, msg=name)
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=1e-14, msg=f"{name}.{key}")
        for (key, buffer), other in zip(model.named_buffers(), single.buffers()):
            torch.testing.assert_close(buffer, other, rtol=1e-12, atol=1e-14, msg=f"{name}.{key}")
        # The wrapped model still takes a whole graph, under the names that it had.
        arguments = (x, edge_index, pe) if name == "GraphTransformer" else (x, edge_index)
        single.eval().load_state_dict(model.eval().state_dict())
        assert torch.equal(model(*arguments), single(*arguments))

    if group.size > 2:
        more_processes_than_nodes(group)


class Own(torch_geometric.nn.MessagePassing):
    """A layer of a user's own: degrees of sources, a softmax over the edges of a target, and two hops."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.score = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(2 * FEATURES, 1)

    def forward(self, x, edge_index):
        row, col = edge_index
        out_degree = degree(row, x.size(0), dtype=x.dtype).clamp(min=1)
        weight = out_degree[row].rsqrt() * degree(col, x.size(0), dtype=x.dtype).clamp(min=1)[col].rsqrt()
        x = self.propagate(edge_index, x=self.lin(x), weight=weight)
        return x + self.propagate(edge_index, x=x.tanh(), weight=weight)

    def message(self, x_i, x_j, weight, index, size_i):
        share = softmax(self.score(torch.cat([x_i, x_j], dim=-1)), index, num_nodes=size_i)
        return share * weight.view(-1, 1) * x_j


class BySources(torch_geometric.nn.MessagePassing):
    """A softmax over the edges of a source, and reductions along the other flow."""

    def __init__(self):
        super().__init__(aggr="mean", flow="target_to_source")
        self.lin = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        share = softmax(x[edge_index[1], :1], edge_index[0], num_nodes=x.size(0))
        return self.lin(self.propagate(edge_index.flip(0).flip([0]), x=x, share=share))

    def message(self, x_j, share):
        return x_j * share


def counts(edge_index):
    return degree(degree(edge_index[1], N).long(), dtype=torch.long)


CONVS = {
    "GCN": lambda _: torch_geometric.nn.GCNConv(FEATURES, FEATURES),
    "SAGE": lambda _: torch_geometric.nn.SAGEConv(FEATURES, FEATURES),
    "SAGE, max": lambda _: torch_geometric.nn.SAGEConv(FEATURES, FEATURES, aggr="max"),
    "GIN": lambda _: torch_geometric.nn.GINConv(torch.nn.Linear(FEATURES, FEATURES)),
    "GraphConv": lambda _: torch_geometric.nn.GraphConv(FEATURES, FEATURES),
    "ResGated": lambda _: torch_geometric.nn.ResGatedGraphConv(FEATURES, FEATURES),
    "GAT": lambda _: torch_geometric.nn.GATConv(FEATURES, FEATURES),
    "Transformer": lambda _: torch_geometric.nn.TransformerConv(FEATURES, FEATURES),
    "PNA": lambda edges: torch_geometric.nn.PNAConv(
        FEATURES, FEATURES, ["mean", "max", "std"], ["identity", "amplification"], counts(edges)
    ),
    "RGCN": lambda _: torch_geometric.nn.RGCNConv(FEATURES, FEATURES, RELATIONS),
    "RGAT": lambda _: torch_geometric.nn.RGATConv(FEATURES, FEATURES, RELATIONS),
    "FiLM": lambda _: torch_geometric.nn.FiLMConv(FEATURES, FEATURES, RELATIONS),
    "GEN": lambda _: torch_geometric.nn.GENConv(FEATURES, FEATURES, norm=None),
    "TAG": lambda _: torch_geometric.nn.TAGConv(FEATURES, FEATURES),
    "SG": lambda _: torch_geometric.nn.SGConv(FEATURES, FEATURES, K=2),
    "APPNP": lambda _: torch_geometric.nn.APPNP(3, 0.1),
    "ARMA": lambda _: torch_geometric.nn.ARMAConv(FEATURES, FEATURES, num_layers=2),
    "ClusterGCN": lambda _: torch_geometric.nn.ClusterGCNConv(FEATURES, FEATURES),
    "Cheb": lambda _: torch_geometric.nn.ChebConv(FEATURES, FEATURES, K=3, normalization="rw"),
    "LG": lambda _: torch_geometric.nn.LGConv(),
    "GatedGraph": lambda _: torch_geometric.nn.GatedGraphConv(FEATURES, 2),
    "EdgeConv": lambda _: torch_geometric.nn.EdgeConv(torch.nn.Linear(2 * FEATURES, FEATURES)),
    "FA": lambda _: torch_geometric.nn.FAConv(FEATURES),
    "LE": lambda _: torch_geometric.nn.LEConv(FEATURES, FEATURES),
    "own": lambda _: Own(),
    "by sources": lambda _: BySources(),
}
TYPED = ("RGCN", "RGAT", "FiLM")


class Layers(torch.nn.Module):
    """Three layers of one kind with batch norm."""

    def __init__(self, name, edge_index):
        super().__init__()
        self.name = name
        self.convs = torch.nn.ModuleList([CONVS[name](edge_index) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(FEATURES)

    def forward(self, x, edge_index, types):
        first = x
        for conv in self.convs:
            given = (first,) if self.name == "FA" else ()
            x = self.norm(conv(x, *given, edge_index, *((types,) if self.name in TYPED else ())).tanh())
        return x[:, :CLASSES]


def compare_convs(accelerates):
    group = Group.of_environment("cpu")
    edge_index, x, _, y = graph()
    types = torch.randint(RELATIONS, (edge_index.size(1),), generator=torch.Generator().manual_seed(4))
    part = partition(edge_index, N, group)
    local_x, local_y, local_types = part.local(x), part.local(y), types[part.edge_ids]
    for name in CONVS:
        torch.manual_seed(2)
        model = Layers(name, edge_index).double()
        single = copy.deepcopy(model)
        if accelerates:
            pyg_dfgnn.accelerate(model)
        results = []
        for called, edges, given, labels, kinds, mean in (
            (single, edge_index, x, y, types, Group().mean),
            (wrap(model, group), part, local_x, local_y, local_types, group.mean),
        ):
            given = given.clone().requires_grad_()
            out = called(given, edges, kinds)
            loss = mean(F.cross_entropy(out, labels, reduction="sum"), labels.numel())
            loss.backward()
            results.append((out.detach(), given.grad))
        (want, want_grad), (out, grad) = results
        near = {"rtol": 1e-9, "atol": 1e-12, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(out, part.local(want), **near)
        torch.testing.assert_close(grad / group.size, part.local(want_grad), **near)
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        expected = {key: p.grad for key, p in single.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], **near)


FUSED = (
    "GCN",
    "TAG",
    "SG",
    "APPNP",
    "ARMA",
    "LG",
    "SAGE",
    "SAGE, max",
    "GIN",
    "ResGated",
    "GAT",
    "Transformer",
    "PNA",
    "ClusterGCN",
    "RGCN",
    "FiLM",
    # Of the code of a layer, what reduces to targets.
    "RGAT",
    "Cheb",
    "GEN",
    "EdgeConv",
    "GatedGraph",
    "FA",
    "own",
)


def compare_kernels():
    """Forward and gradients of one layer on emulated kernels, which nothing else may run."""
    group = Group.of_environment("cpu")
    edge_index, x, *_ = graph()
    part = partition(edge_index, N, group)
    grad = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(5))
    types = torch.randint(RELATIONS, (edge_index.size(1),), generator=torch.Generator().manual_seed(4))
    for name in FUSED:
        torch.manual_seed(2)
        single = CONVS[name](edge_index)
        model = pyg_dfgnn.accelerate(copy.deepcopy(single))
        given, own = x.clone().requires_grad_(), part.local(x).float().requires_grad_()
        every, kinds = ((types,), (types[part.edge_ids],)) if name in TYPED else ((), ())
        first, own_first = ((given,), (own,)) if name == "FA" else ((), ())
        want = single.double()(given, *first, edge_index, *every)
        want.backward(grad.double())
        model = wrap(model, group)
        with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
            out = model(own, *own_first, part, *kinds)
            out.backward(part.local(grad))
        assert launched, name
        near = {"rtol": 1e-4, "atol": 1e-5, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(out.double(), part.local(want), **near)
        torch.testing.assert_close(own.grad.double(), part.local(given.grad), **near)
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad.double() * group.size, q.grad, **near)


@needs_compiler
def test_kernels_run_on_parts(launch):
    launch(2, compare_kernels)


@pytest.mark.parametrize(("size", "accelerates"), [(2, True), (3, False)])
def test_any_conv_equals_one_process(launch, size, accelerates):
    launch(size, compare_convs, accelerates)


class Untold(torch_geometric.nn.MessagePassing):
    """Degrees of sources and a softmax over their edges, of a number of nodes that the edges tell."""

    def forward(self, x, edge_index):
        share = softmax(x[edge_index[1], :1], edge_index[0])
        return self.propagate(edge_index, x=x * degree(edge_index[0], dtype=x.dtype).view(-1, 1), share=share)

    def message(self, x_j, share):
        return x_j * share


def compare_without_edges():
    """A star, of which one process has no edge."""
    group = Group.of_environment("cpu")
    edge_index = torch.stack([torch.arange(N), torch.zeros(N, dtype=torch.long)])
    part = partition(edge_index, N, group)
    assert 0 in group.counts(part.edge_index.size(1))
    x = graph()[1]
    out = wrap(Untold(), group)(part.local(x), part)
    torch.testing.assert_close(out, part.local(Untold()(x, edge_index)))


def test_a_process_may_have_no_edge(launch):
    launch(2, compare_without_edges)


def more_processes_than_nodes(group):
    part = partition(torch.tensor([[0, 1], [1, 0]]), 2, group)
    x = torch.arange(2.0).view(2, 1)
    assert part.num_nodes == (0 if group.rank == 1 else 1) and part.exchange(part.local(x)).size(0) == part.num_sources
    model = wrap(pyg_dfgnn.nn.GATConv(1, 1).double(), group)
    model(part.local(x.double()), part).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match=r"'x' needs shape \[num_nodes=\d, ...\] \(got \[5, 1\]\)"):
        part.exchange(torch.zeros(5, 1))


@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_process(launch, size):
    launch(size, compare_models)


def test_cuts_balance_edges():
    degree = torch.tensor([0, 30, 1, 1, 1, 1, 1, 1, 24, 0])
    target = torch.arange(10).repeat_interleave(degree)
    # 34 and 36 edges and nodes; one node per half and an empty range between them.
    assert edge_cuts(target, 10, 2) == [0, 3, 10]
    assert edge_cuts(torch.tensor([0, 1]), 2, 3) == [0, 1, 1, 2]
    assert edge_cuts(torch.arange(1000).repeat_interleave(7), 1000, 4) == [0, 250, 500, 750, 1000]


@pytest.mark.parametrize("number", [int, np.int64, torch.tensor])
def test_alone_is_the_whole_graph(number):
    edge_index, x, *_ = graph()
    part = partition(edge_index, number(N), Group())
    assert {type(bound) for bound in part.bounds} == {int}
    assert part.num_halo == part.remote_share() == 0 and torch.equal(part.edge_index, edge_index)
    assert part.exchange(x) is x and torch.equal(part.local(x), x)


def test_edges_of_attributes():
    edge_index, *_ = graph()
    assert torch.equal(edge_index[:, partition(edge_index, N, Group()).edge_ids], edge_index)


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "error", "message"),
    [
        (torch.tensor([[0], [3]]), 3, ValueError, r"'edge_index' needs ids in \[0, num_nodes=3\) \(got 0 to 3\)"),
        (torch.tensor([[0.0], [1.0]]), 3, TypeError, "'edge_index' needs dtype"),
        (torch.tensor([0, 1]), 3, ValueError, r"'edge_index' needs shape \[2, E\] \(got \[2\]\)"),
        (torch.zeros(2, 0, dtype=torch.long), 0, ValueError, r"'num_nodes' needs a value >= 1 \(got 0\)"),
    ],
)
def test_wrong_graphs(edge_index, num_nodes, error, message):
    with pytest.raises(error, match=message):
        partition(edge_index, num_nodes, Group())


def test_wrong_features():
    part = partition(torch.tensor([[0], [1]]), 2, Group())
    with pytest.raises(ValueError, match=r"'nodes' needs shape \[N=2, ...\] \(got \[3\]\)"):
        part.local(torch.zeros(3))
    with pytest.raises(ValueError, match=r"'x' needs shape \[num_nodes=2, ...\] \(got \[3, 1\]\)"):
        part.exchange(torch.zeros(3, 1))


def test_wrong_arguments_of_wrap():
    with pytest.raises(TypeError, match=r"'model' needs a torch.nn.Module \(got None\)"):
        wrap(None, Group())
    with pytest.raises(TypeError, match=r"'group' needs a Group, such as Group.of_environment\(\) \(got None\)"):
        wrap(GATConv(1, 1), None)


def test_a_conv_alone_takes_no_part():
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(TypeError, match=r"'edge_index' needs a model that pyg_dfgnn.distributed.wrap has returned"):
        GATConv(1, 1)(torch.zeros(2, 1), partition(edge_index, 2, Group()))
    with pytest.raises(TypeError, match=r"'group' needs a Group, such as Group.of_environment\(\) \(got NoneType\)"):
        partition(edge_index, 2, None)


def refuse_whole_graphs():
    group = Group.of_environment("cpu")
    part = partition(graph()[0], N, group)
    x = torch.zeros(part.num_nodes, FEATURES)
    conv = torch_geometric.nn.GCNConv(FEATURES, FEATURES)
    for module in (torch_geometric.nn.GraphNorm(FEATURES), torch_geometric.nn.LayerNorm(FEATURES)):
        parts = [(module, "x -> x"), (conv, "x, edge_index -> x")]
        model = wrap(torch_geometric.nn.Sequential("x, edge_index", copy.deepcopy(parts)), Group())
        with pytest.raises(TypeError, match=f"read no whole graph on a part of one .got {type(module).__name__}"):
            model(x, part)
    for conv in (
        torch_geometric.nn.ChebConv(FEATURES, FEATURES, K=2),
        torch_geometric.nn.SAGEConv(FEATURES, FEATURES, aggr="lstm"),
    ):
        with pytest.raises(TypeError, match="needs modules that read no whole graph on a part of one"):
            wrap(conv, Group())(x, part)
    # Rows of the halo are others' to set.
    edges = part.edges
    with pytest.raises(UnsupportedError, match="__setitem__"):
        torch.zeros(part.num_sources)[edges[0]] = 1.0
    kept = torch.zeros(part.num_nodes)
    kept[edges[0][edges[0] == edges[1]]] = 1.0
    assert kept.any()


def refuse_other_graphs():
    group = Group.of_environment("cpu")
    with pytest.raises(ValueError, match=r"'edge_index' needs the whole graph, .* \(got sizes \[300, 200\]\)"):
        partition(torch.zeros(2, 300 - 100 * group.rank, dtype=torch.long), N, group)
    with pytest.raises(ValueError, match=r"'num_nodes' needs the whole graph, .* \(got sizes \[40, 41\]\)"):
        partition(torch.zeros(2, 3, dtype=torch.long), N + group.rank, group)
    with pytest.raises(ValueError, match=r"'edge_index' needs the whole graph, .* \(got sums of ids \[0, 6\]\)"):
        partition(torch.full((2, 3), group.rank), N, group)


def test_other_graphs_on_other_processes_are_named(launch):
    launch(2, refuse_other_graphs)


def test_modules_that_read_the_whole_graph_are_refused(launch):
    launch(2, refuse_whole_graphs)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda edges, x: edges[0].unique(), "unique"),
        (lambda edges, x: edges[0] * 2 + edges[1], "mul"),
        (lambda edges, x: edges.view(-1), "view"),
        (lambda edges, x: x[:, 0].scatter_reduce(0, edges[0], x[edges[1], 0], "prod"), "scatter_reduce"),
        (lambda edges, x: edges.float(), "float"),
        (lambda edges, x: edges[0] == 3, "eq"),
        (lambda edges, x: edges[0] < edges[1], "lt"),
        (lambda edges, x: torch.isin(edges[0], edges[1]), "isin"),
        (lambda edges, x: torch.min(edges[0], edges[1]), "min"),
        (lambda edges, x: torch.index_add(x, 0, edges[0], x[edges[1]], out=torch.zeros(N, 1)), "index_add"),
        (lambda edges, x: to_torch_csr_tensor(edges, size=(N, N)), ""),
    ],
)
def test_functions_of_edges_that_are_not_known_are_named(function, name):
    part = partition(graph()[0], N, Group())
    edges = PartitionedEdges.of(part.edge_index, part)
    with pytest.raises(UnsupportedError, match=rf"a layer calls \S*{name}\S* on its edges, which needs a whole graph"):
        function(edges, torch.zeros(N, 1))


def test_edges_of_a_part_are_read_as_those_of_a_graph():
    edge_index, x, *_ = graph()
    part = partition(edge_index, N, Group())
    edges = PartitionedEdges.of(part.edge_index, part)
    assert part.edges is part.edge_index
    (row, col), (plain_row, plain_col) = edges, edge_index
    assert torch.equal(x[row], x[plain_row]) and torch.equal(x.T[:, row], x.T[:, plain_row])
    assert torch.equal(edges.flip(0)[1].ids, plain_row) and torch.equal(torch.stack([row, col]).ids, edge_index)
    assert int(edges.max()) == N - 1 and torch.equal(row == col, plain_row == plain_col)
    for reduce in ("amax", "amin"):
        for includes in (True, False):
            found = x.new_zeros(N).scatter_reduce(0, row, x[col, 0], reduce, include_self=includes)
            want = x.new_zeros(N).scatter_reduce(0, plain_row, x[plain_col, 0], reduce, include_self=includes)
            assert torch.equal(found, want)
