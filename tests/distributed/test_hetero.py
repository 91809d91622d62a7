"""A graph of several node types whose nodes are spread over processes gives what one process gives."""

import copy

import pytest
import torch
import torch_geometric.nn
from torch_geometric.nn import HeteroConv, to_hetero

import pyg_dfgnn
from pyg_dfgnn.distributed import Group, partition_hetero, wrap
from pyg_dfgnn.reference.tolerances import elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

SIZES = {"paper": 23, "author": 17, "venue": 3, "alone": 1}
RELATIONS = {
    ("paper", "cites", "paper"): 80,
    ("author", "writes", "paper"): 60,
    ("paper", "written_by", "author"): 60,
    ("paper", "in", "venue"): 23,
    ("venue", "prints", "paper"): 23,
    ("author", "knows", "author"): 0,
}
METADATA = list(SIZES), list(RELATIONS)
WIDTH = 4


def graph():
    """Edges with duplicates and a hub, a relation without edges, and a node without relations; features."""
    generator = torch.Generator().manual_seed(1)
    edges = {}
    for (source, name, target), count in RELATIONS.items():
        ends = [torch.randint(SIZES[kind], (count,), generator=generator) for kind in (source, target)]
        ends[1][: count // 3] = SIZES[target] - 1
        edges[source, name, target] = torch.stack(ends)
    x = {kind: torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for kind, size in SIZES.items()}
    return edges, x


class Layers(torch.nn.Module):
    """Layers on dicts, the first called by keywords; a type that a layer leaves out keeps its features."""

    def __init__(self, make):
        super().__init__()
        self.convs = torch.nn.ModuleList([make() for _ in range(3)])

    def forward(self, x_dict, edge_index_dict):
        for place, conv in enumerate(self.convs):
            dicts = {"x_dict": x_dict, "edge_index_dict": edge_index_dict}
            found = conv(*dicts.values()) if place else conv(**dicts)
            x_dict = {kind: x if found.get(kind) is None else found[kind].tanh() for kind, x in x_dict.items()}
        return x_dict


class Plain(torch.nn.Module):
    """A model of one type, for `to_hetero`."""

    def __init__(self):
        super().__init__()
        self.first = torch_geometric.nn.SAGEConv((-1, -1), WIDTH)
        self.second = torch_geometric.nn.GATConv((-1, -1), WIDTH, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Own(torch_geometric.nn.MessagePassing):
    """A layer of a user's own, which reads both ends."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j], dim=-1))


def hetero(make, **options):
    return lambda: Layers(lambda: HeteroConv({relation: make(relation) for relation in RELATIONS}, **options))


def mixed(relation):
    if relation == ("paper", "cites", "paper"):
        return torch_geometric.nn.GCNConv(WIDTH, WIDTH)
    return Own() if "author" in relation else torch_geometric.nn.SAGEConv(WIDTH, WIDTH)


def converted():
    model = to_hetero(Plain(), (list(SIZES)[:3], [each for each in RELATIONS if "alone" not in each]))
    edges, x = graph()
    with torch.no_grad():
        # The first call makes the lazy parameters.
        model({kind: rows.float() for kind, rows in x.items() if kind != "alone"}, edges)
    return model


MODELS = {
    "HGT": lambda: Layers(lambda: torch_geometric.nn.HGTConv(WIDTH, WIDTH, METADATA, heads=2)),
    "SAGE": hetero(lambda _: torch_geometric.nn.SAGEConv(WIDTH, WIDTH)),
    "GAT": hetero(lambda _: torch_geometric.nn.GATConv(WIDTH, WIDTH, add_self_loops=False), aggr="mean"),
    "mixed": hetero(mixed),
    "to_hetero": converted,
}


def compare_models(accelerates):
    group = Group.of_environment("cpu")
    edges, x = graph()
    parts = partition_hetero(edges, SIZES, group)
    assert sum(group.counts(parts.num_nodes["paper"])) == SIZES["paper"] and 0 < parts.remote_share() < 1
    local_x = parts.local(x)
    for name, make in MODELS.items():
        torch.manual_seed(2)
        model = make().double()
        single = copy.deepcopy(model)
        if accelerates:
            pyg_dfgnn.accelerate(model)
        kinds = list(SIZES)[: 3 if name == "to_hetero" else 4]
        results = []
        for called, ends, given in ((single, edges, x), (wrap(model, group), parts, local_x)):
            given = {kind: given[kind].clone().requires_grad_() for kind in kinds}
            out = called(given, ends)
            sum(rows.square().sum() for rows in out.values()).backward()
            results.append((out, {kind: rows.grad for kind, rows in given.items() if rows.grad is not None}))
        near = {"rtol": 1e-9, "atol": 1e-12, "msg": lambda text, name=name: f"{name}: {text}"}
        (want, want_grad), (out, grad) = results
        for found, wanted in ((out, want), (grad, want_grad)):
            assert found.keys() == wanted.keys()
            for kind, rows in parts.local({kind: rows.detach() for kind, rows in wanted.items()}).items():
                torch.testing.assert_close(found[kind].detach(), rows, **near)
        found, wanted = (
            {key: p.grad for key, p in each.named_parameters() if p.grad is not None} for each in (model, single)
        )
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key] * group.size, wanted[key], **near)


@pytest.mark.parametrize(("size", "accelerates"), [(2, True), (3, False)])
def test_equals_one_process(launch, size, accelerates):
    launch(size, compare_models, accelerates)


def compare_kernels():
    """Forward and gradients on emulated kernels, which nothing else may run."""
    group = Group.of_environment("cpu")
    edges, x = graph()
    parts = partition_hetero(edges, SIZES, group)
    torch.manual_seed(2)
    single = torch_geometric.nn.HGTConv(WIDTH, WIDTH, METADATA, heads=2)
    model = wrap(pyg_dfgnn.accelerate(copy.deepcopy(single)), group)
    given = {kind: rows.clone().requires_grad_() for kind, rows in x.items()}
    own = {kind: rows.float().requires_grad_() for kind, rows in parts.local(x).items()}
    want = single.double()(given, edges)
    sum(rows.square().sum() for rows in want.values()).backward()
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        out = model(own, parts)
        sum(rows.square().sum() for rows in out.values()).backward()
    assert launched
    for kind, rows in parts.local({kind: rows.detach() for kind, rows in want.items()}).items():
        torch.testing.assert_close(out[kind].double(), rows, **elementwise("float32"))
        torch.testing.assert_close(
            own[kind].grad.double(), parts.local({kind: given[kind].grad})[kind], **elementwise("float32")
        )
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.double() * group.size, q.grad, **elementwise("float32"))


@needs_compiler
def test_kernels_run_on_parts(launch):
    launch(2, compare_kernels)


def test_alone_is_the_whole_graph():
    edges, x = graph()
    parts = partition_hetero(edges, SIZES, Group())
    assert parts.num_nodes == SIZES and parts.remote_share() == 0 and list(parts) == list(edges)
    assert all(torch.equal(parts[name].edge_index, edges[name]) for name in edges)
    model = wrap(MODELS["HGT"]().double(), Group())
    for kind, rows in model(x, edges).items():
        assert torch.equal(rows, model(x, parts)[kind])


def refuse_other_graphs():
    group = Group.of_environment("cpu")
    edges = {("a", "to", "a"): torch.zeros(2, 3 + group.rank, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"'edge_index_dict\[.*\]' needs the whole graph, .* \(got sizes \[3, 4\]\)"):
        partition_hetero(edges, {"a": 4}, group)
    with pytest.raises(ValueError, match=r"'num_nodes_dict\['a'\]' needs the whole graph, .* \(got sizes \[4, 5\]\)"):
        partition_hetero({}, {"a": 4 + group.rank}, group)


def test_other_graphs_on_other_processes_are_named(launch):
    launch(2, refuse_other_graphs)


@pytest.mark.parametrize(
    ("edges", "sizes", "error", "message"),
    [
        ({("a", "to", "b"): torch.tensor([[0], [3]])}, {"a": 4, "b": 3}, ValueError, r"ids in \[0, num_nodes=3\)"),
        ({("a", "to", "c"): torch.tensor([[0], [0]])}, {"a": 4, "b": 3}, ValueError, r"node types of \['a', 'b'\]"),
        ({("a", "to", "a"): torch.tensor([0, 1])}, {"a": 4}, ValueError, r"needs shape \[2, E\]"),
        ({}, {"a": -1}, ValueError, r"'num_nodes_dict\['a'\]' needs a value >= 0"),
    ],
)
def test_wrong_graphs(edges, sizes, error, message):
    with pytest.raises(error, match=message):
        partition_hetero(edges, sizes, Group())


def test_wrong_features():
    parts = partition_hetero(*[graph()[0], SIZES], Group())
    with pytest.raises(ValueError, match=r"'nodes\['paper'\]' needs shape \[N=23, ...\] \(got \[2, 4\]\)"):
        parts.local({"paper": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match="'nodes' needs node types of .* .got 'other'"):
        parts.local({"other": torch.zeros(2, 4)})
