"""Models that PyG's to_hetero makes give the same results when the relations of a layer are called together."""

import copy

import pytest
import torch
from torch_geometric.nn import GATConv, GINConv, SAGEConv, to_hetero

import pyg_dfgnn
from pyg_dfgnn.nn.conv.to_hetero import RelationDict
from pyg_dfgnn.reference.tolerances import elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

WIDTH = 6
NODES = {"user": 9, "item": 12, "shop": 5}
RELATIONS = [
    *(("user", "buys", "item"), ("item", "of", "user"), ("shop", "sells", "item"), ("item", "in", "shop")),
    *(("user", "knows", "user"), ("item", "like", "item"), ("user", "likes", "item")),
]


class Net(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.conv1, self.conv2, self.lin = make(), make(), torch.nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index).relu() + x
        return self.lin(x)


class Called(Net):
    """A model whose layer is called twice, and no other."""

    def __init__(self, make):
        super().__init__(make)
        self.conv2 = None

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.lin(self.conv1(x, edge_index))


CONVS = {
    "mean": lambda: SAGEConv((WIDTH, WIDTH), WIDTH),
    "sum": lambda: SAGEConv(WIDTH, WIDTH, aggr="sum", bias=False),
    "attention": lambda: GATConv((WIDTH, WIDTH), 3, heads=2, add_self_loops=False),
    "another": lambda: GINConv(torch.nn.Linear(WIDTH, WIDTH)),
}


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(count, WIDTH, generator=generator) for name, count in NODES.items()}
    edges = {}
    for k, relation in enumerate(RELATIONS):
        count = 0 if k == 2 else 5 + 3 * k
        ends = [torch.randint(NODES[name], (count,), generator=generator) for name in relation[::2]]
        edges[relation] = torch.stack(ends)
    return x, edges


def model_of(name, net=Net, aggr="sum"):
    torch.manual_seed(0)
    return to_hetero(net(CONVS[name]), (list(NODES), RELATIONS), aggr=aggr)


def results(model, x, edges, dtype=torch.float32):
    x = {name: rows.to(dtype).requires_grad_() for name, rows in x.items()}
    out = model.to(dtype)(x, edges)
    leaves = {**{f"x {name}": rows for name, rows in x.items()}, **dict(model.named_parameters())}
    grads = torch.autograd.grad(sum(rows.sin().sum() for rows in out.values()), list(leaves.values()))
    return {**out, **dict(zip(leaves, grads, strict=True))}


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, rows in want.items():
        torch.testing.assert_close(
            found[name].double(), rows, **elementwise("float32"), msg=lambda text, name=name: f"{name}: {text}"
        )


def check(model, own):
    for seed in range(3):
        x, edges = batch(seed)
        with emulated_device() as launched:
            found = results(model, x, edges)
        assert_equal(found, results(own, x, edges, torch.float64))
    return launched


def layers_together(model):
    return sum(type(module) is RelationDict for module in model.modules())


@needs_compiler
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", CONVS)
def test_results_are_pygs(name, aggr):
    own = model_of(name, aggr=aggr)
    ours = pyg_dfgnn.accelerate(copy.deepcopy(own))
    assert layers_together(ours) == (0 if aggr == "max" else 2)
    assert list(ours.state_dict()) == list(own.state_dict())
    launched = check(ours, own)
    if name == "attention" and aggr == "sum":
        assert sum("forward" in each for each in launched) == 2


@needs_compiler
def test_copies_and_restored_models():
    own = model_of("mean")
    ours = pyg_dfgnn.accelerate(copy.deepcopy(own))
    check(copy.deepcopy(ours), own)
    restored = pyg_dfgnn.restore(ours)
    assert layers_together(restored) == 0
    assert sum(type(module) is SAGEConv for module in restored.modules()) == 2 * len(RELATIONS)
    assert restored.code.count("torch.add") == own.code.count("torch.add")
    x, edges = batch(0)
    assert_equal(results(restored, x, edges, torch.float64), results(own, x, edges, torch.float64))
    check(pyg_dfgnn.accelerate(restored), own)


@needs_compiler
def test_layers_that_are_called_twice_run_one_by_one():
    own = model_of("mean", Called)
    ours = pyg_dfgnn.accelerate(copy.deepcopy(own))
    assert layers_together(ours) == 0
    check(ours, own)


def test_graphs_of_other_models_stay():
    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleDict({str(k): SAGEConv(WIDTH, WIDTH) for k in range(6)})

        def forward(self, x, edge_index):
            return [self.convs[str(k)](x, edge_index) for k in range(6)]

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, SAGEConv)

    towers = Towers()
    graph = Tracer().trace(towers)
    model = pyg_dfgnn.accelerate(torch.fx.GraphModule(towers, graph))
    assert layers_together(model) == 0
    assert len(model(torch.randn(4, WIDTH), torch.tensor([[0, 1], [2, 3]]))) == 6


def test_accelerate_names_the_layers(caplog):
    with caplog.at_level("INFO", logger="pyg_dfgnn"):
        pyg_dfgnn.accelerate(model_of("mean"))
    assert "2 to_hetero layer" in caplog.text
