"""Convs that replace self-loops on few edges under torch.compile: one graph without a break, and PyG's numbers."""

import pytest
import torch

from pyg_dfgnn.ops import visits
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings, current
from tests.nn.convs import FEATURES, LOOPED, NUM_NODES, both, rest_of, trained

SETTINGS = Settings()
LOOPS = torch.tensor([[2, 2, 5, 0], [2, 2, 5, 0]])
OPTIONS = [
    *((name, (), {}) for name in LOOPED),
    ("GATConv", (FEATURES, 4), {"heads": 2, "edge_dim": 3, "residual": True}),
    ("GATConv", (FEATURES, 4), {"heads": 2, "edge_dim": 3, "fill_value": 0.7, "flow": "target_to_source"}),
    ("GATv2Conv", (FEATURES, 4), {"heads": 3, "edge_dim": 3, "fill_value": "max", "concat": False}),
    ("GATv2Conv", (FEATURES, 4), {"edge_dim": 3, "flow": "target_to_source", "share_weights": True}),
    ("GCNConv", (FEATURES, 4), {"flow": "target_to_source"}),
    ("SGConv", (FEATURES, 4), {"K": 3}),
]


@pytest.fixture
def few_on_cpu(monkeypatch, fused_on_cpu):
    """Take few edges on a CPU for those on a GPU."""
    monkeypatch.setattr(visits, "may_be_few", lambda _: current().leaves_few)


def compiled(conv):
    torch._dynamo.reset()
    return torch.compile(conv.forward, backend="eager", fullgraph=True, dynamic=True)


def doubled(*tensors):
    return [tensor.double() for tensor in tensors]


def batches():
    """Edges of three sizes: random with self-loops of which one is twice, nothing but self-loops, and none."""
    generator = torch.Generator().manual_seed(0)
    for count, num_nodes in ((30, NUM_NODES), (17, NUM_NODES + 5)):
        edge_index = torch.randint(num_nodes - 1, (2, count), generator=generator)
        yield num_nodes, torch.cat([edge_index[:, :9], LOOPS, edge_index[:, 9:]], dim=1)
    yield NUM_NODES, LOOPS
    yield NUM_NODES, LOOPS[:, :0]


@pytest.mark.usefixtures("few_on_cpu")
@pytest.mark.parametrize(("name", "args", "options"), OPTIONS, ids=str)
def test_few_edges_are_one_graph_with_pygs_numbers(name, args, options):
    layer, pygs = both(name, *args, dtype=torch.float32, **options)
    pygs.double()
    call = compiled(layer)
    for num_nodes, edge_index in batches():
        x = torch.randn(num_nodes, FEATURES)
        before, _ = rest_of(name, x, edge_index.size(1))
        edges = (torch.randn(edge_index.size(1), 3),) if "edge_dim" in options else ()
        expected = trained(pygs, x.double(), *doubled(*before), edge_index, *doubled(*edges))
        results = trained(layer, x, *before, edge_index, *edges, call=call)
        assert results.keys() == expected.keys()
        torch.testing.assert_close(results, expected, **elementwise("float32/few_terms"), check_dtype=False)


@pytest.mark.usefixtures("few_on_cpu")
def test_edges_between_two_node_sets_are_one_graph_with_pygs_numbers():
    layer, pygs = both("GATv2Conv", (FEATURES, FEATURES), 4, dtype=torch.float32, edge_dim=3)
    call = compiled(layer)
    for num_dst in (4, 9):
        nodes = torch.randn(7, FEATURES), torch.randn(num_dst, FEATURES)
        edge_index = torch.stack([torch.arange(20) % 7, torch.arange(20) % 4])
        edge_attr = torch.randn(20, 3)
        torch.testing.assert_close(
            call(nodes, edge_index, edge_attr), pygs(nodes, edge_index, edge_attr), **elementwise("float32/few_terms")
        )


@pytest.mark.usefixtures("few_on_cpu")
def test_infinite_rows_of_own_loops_are_pygs():
    layer, pygs = both("GCNConv", dtype=torch.float32)
    x = torch.ones(NUM_NODES, FEATURES)
    x[2] = torch.inf
    torch.testing.assert_close(compiled(layer)(x, LOOPS), pygs(x, LOOPS), equal_nan=True)


@pytest.mark.usefixtures("few_on_cpu")
def test_wide_rows_are_one_graph_with_pygs_numbers():
    layer, pygs = both("GCNConv", FEATURES, 600, dtype=torch.float32)
    x, edge_index = torch.randn(NUM_NODES, FEATURES), next(batches())[1]
    torch.testing.assert_close(compiled(layer)(x, edge_index), pygs(x, edge_index), **elementwise("float32/few_terms"))


@pytest.mark.usefixtures("few_on_cpu")
@pytest.mark.parametrize("name", ["GATConv", "GCNConv"])
@pytest.mark.parametrize("ids", [(0, NUM_NODES), (NUM_NODES, 0), (0, NUM_NODES + 1)])
def test_ids_out_of_range_are_errors(name, ids):
    layer, _ = both(name, dtype=torch.float32)
    edge_index = torch.cat([LOOPS, torch.tensor(ids).view(2, 1)], dim=1)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(layer)(torch.randn(NUM_NODES, FEATURES), edge_index)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "AGNNConv"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_compiled_kernels_on_a_gpu_have_pygs_numbers(name, autocast):
    layer, pygs = both(name, dtype=torch.float32)
    pygs.double()
    torch._dynamo.reset()
    call = torch.compile(layer.cuda().forward, fullgraph=True, dynamic=True)
    for num_nodes, edge_index in batches():
        x = torch.randn(num_nodes, FEATURES)
        expected = trained(pygs, x.double(), edge_index)
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            results = trained(layer, x.cuda(), edge_index.cuda(), call=call)
        bound = elementwise("16 bits" if autocast else "float32")
        results = {key: value.cpu() for key, value in results.items()}
        torch.testing.assert_close(results, expected, **bound, check_dtype=False)
