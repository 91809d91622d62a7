"""Sampled rows of convolutions on a large graph: right ones pass, wrong ones do not."""

import pytest
import torch

from benchmarks import large_graph
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.models import GCN, GATv2
from pyg_dfgnn.nn import GATv2Conv
from tests.kernels.emulated import emulated_device

SMALL = ["data.task.scale=2e-5", "data.task.max_degree=1e6", "device=cpu"]


@pytest.fixture
def graph():
    return Graph.of(torch.randint(40, (2, 300)), 40, self_loops=True)


def test_edges_of_rows_are_all_edges_to_them(graph):
    rows = torch.tensor([3, 17, 39])
    source, target = large_graph.edges_of(graph, rows)
    ends = graph.edge_index[:, torch.isin(graph.edge_index[1], rows)]
    assert sorted(zip(source.tolist(), target.tolist())) == sorted(map(tuple, ends.t().tolist()))
    sampled = large_graph.sampled_rows(graph, 5)
    assert int(graph.csr.rowptr.diff().argmax()) in sampled and len(sampled) <= 6


class Rough(GATv2Conv):
    """Too large by a percent."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.01


def test_wrong_rows_are_seen(graph):
    x = torch.randn(40, 8)
    with emulated_device():
        model = GATv2(8, 3, large_graph.import_convs("pyg_dfgnn.nn"), heads=2, layers=2, dropout=0.0, readout=True)
        right = large_graph.errors(model, x, graph, "fp32")
        model.convs[1].__class__ = Rough
        wrong = large_graph.errors(model, x, graph, "fp32")
    assert max(right) < 1e-6 and wrong[0] == right[0] and wrong[1] == pytest.approx(0.01, rel=1e-2)


def test_normalised_sums_have_the_degrees_of_the_whole_graph(graph):
    """PyG's own GCNConv on the edges, with loops that the graph already has."""
    convs = large_graph.import_convs("torch_geometric.nn")
    model = GCN(8, 3, convs, hidden_channels=8)
    x, rows = torch.randn(40, 8, dtype=torch.float64), torch.arange(40)
    conv = model.convs[0].double()
    exact = large_graph.rows_in_float64(conv, x, graph, rows)
    assert exact.requires_grad and conv.normalize and conv.add_self_loops
    torch.testing.assert_close(exact, conv(x, graph.edge_index))


def test_command(capsys):
    assert large_graph.main(["gatv2_papers100m_like", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "ogbn-papers100M-like: 2,221 nodes" in printed and printed.count("| GATv2Conv |") == 3
