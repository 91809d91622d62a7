"""A graph whose nodes are spread over processes gives what one process gives."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn

import pyg_dfgnn.nn
from pyg_dfgnn import models
from pyg_dfgnn.distributed import Group, partition, wrap
from pyg_dfgnn.distributed.partition import edge_cuts
from pyg_dfgnn.nn import GATConv

N, FEATURES, CLASSES, ENCODINGS = 40, 5, 3, 2
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
    assert part.num_halo == 0 and torch.equal(part.edge_index, edge_index)
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


def test_other_convs_are_refused():
    model = wrap(torch_geometric.nn.GCNConv(1, 1), Group())
    edge_index = torch.tensor([[0], [1]])
    model(torch.zeros(2, 1), edge_index)
    with pytest.raises(TypeError, match=r"'model' needs convs among GATConv, .* \(got GCNConv\)"):
        model(torch.zeros(2, 1), partition(edge_index, 2, Group()))


def test_a_conv_alone_takes_no_part():
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(TypeError, match=r"'edge_index' needs a model that pyg_dfgnn.distributed.wrap has returned"):
        GATConv(1, 1)(torch.zeros(2, 1), partition(edge_index, 2, Group()))
    with pytest.raises(TypeError, match=r"'group' needs a Group, such as Group.of_environment\(\) \(got NoneType\)"):
        partition(edge_index, 2, None)
