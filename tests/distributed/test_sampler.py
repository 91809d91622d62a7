"""Every sample of a global batch goes to one process."""

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch_geometric.data import Batch, Data

import pyg_dfgnn.nn
from pyg_dfgnn import models
from pyg_dfgnn.distributed import Group, SharedBatches, empty_graph, own_share


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_make_up_the_batches(size):
    def sampler():
        return RandomSampler(range(10), generator=torch.Generator().manual_seed(0))

    alone = list(SharedBatches(sampler(), 4, Group(), filler=10))
    shares = [list(SharedBatches(sampler(), 4, Group(rank, size), filler=10)) for rank in range(size)]
    assert [len(batch) for batch in alone] == [4, 4, 2] and sorted(sum(alone, [])) == list(range(10))
    for batch, parts in zip(alone, zip(*shares)):
        assert sorted(index for part in parts for index in part if index != 10) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Two samples for three processes.
    assert [len(batches) for batches in shares] == [3] * size and (size < 3 or shares[2][-1] == [10])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_cost_about_the_same(size):
    costs = torch.randint(100, 10_000, (500,), generator=torch.Generator().manual_seed(0))
    batch = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:96]
    shares = [own_share(batch, Group(rank, size), costs) for rank in range(size)]
    assert torch.equal(torch.cat(shares).sort().values, batch.sort().values)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    sums = torch.stack([costs[share].sum() for share in shares])
    # In turns alone, the shares of this batch differ by more than the dearest sample.
    assert sums.max() - sums.min() <= costs[batch].max() / 2
    plain = torch.stack([costs[batch[rank::size]].sum() for rank in range(size)])
    assert plain.max() - plain.min() > costs[batch].max()


def test_a_batch_needs_a_sample_per_process():
    with pytest.raises(ValueError, match=r"'batch_size' needs a value >= 3 \(got 2\)"):
        SharedBatches(SequentialSampler(range(10)), 2, Group(0, 3), filler=10)


@pytest.mark.parametrize("level", ["node", "graph"])
def test_empty_graph(level):
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])
    y = torch.tensor([1, 0, 1] if level == "node" else [1])
    graph = Data(x=torch.randn(3, 4), edge_index=edge_index, edge_attr=torch.randn(4, 2), pe=torch.randn(3, 2), y=y)
    empty = empty_graph(graph)
    assert empty.num_nodes == empty.num_edges == 0 and graph.num_nodes == 3
    assert empty.y.tolist() == ([] if level == "node" else [-100])
    batch = Batch.from_data_list([empty])
    assert {
        key: (each.dtype, each.shape[1:]) for key, each in graph if torch.is_tensor(each) and key != "edge_index"
    } == {key: (each.dtype, each.shape[1:]) for key, each in batch if key in graph and key != "edge_index"}
    model = models.GraphTransformer(4, 2, pyg_dfgnn.nn, hidden_channels=8, heads=2, layers=1, norm="layer")
    model(batch.x, batch.edge_index, batch.pe).sum().backward()
    assert all(float(p.grad.abs().sum()) == 0 for p in model.embed.parameters())
