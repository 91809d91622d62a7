"""Batches that are gathered from graphs that stay on the device."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_dfgnn.graph import DeviceDataset, Graph
from tests.graph.brute import check_graph, members

PICKS = ([0, 1, 2], [5, 3, 3, 0, 9], list(range(15)), [4])


@pytest.mark.parametrize("ids", PICKS, ids=str)
def test_resident_batch_equals_pygs(ids, host_syncs):
    data = members()
    want, resident = Batch.from_data_list([data[i] for i in ids]), DeviceDataset(data)
    assert len(resident) == len(data)
    del host_syncs[:]
    batch = resident.batch(torch.tensor(ids))
    assert host_syncs == []
    assert batch.num_graphs == want.num_graphs and batch.num_nodes == want.num_nodes
    for name in ("x", "y", "edge_index", "edge_attr", "batch", "ptr"):
        assert torch.equal(batch[name], want[name]) and batch[name].dtype == want[name].dtype, name
    assert batch.edge_index.is_contiguous()


def test_a_resident_batch_has_a_graph():
    batch = DeviceDataset(members()).batch(torch.tensor([7, 2, 11, 3]))
    check_graph(Graph.of(batch), batch.edge_index, batch.num_nodes, batch.num_nodes)


def test_what_cannot_be_gathered():
    data = [Data(x=torch.zeros(3, 1), edge_index=torch.zeros(2, 1, dtype=torch.long), name="a") for _ in range(2)]
    with pytest.raises(ValueError, match=r"'graphs' needs tensors along nodes, edges or graphs \(got 'name'\)"):
        DeviceDataset(data)
    many = [Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=1 << 30) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'num_nodes' needs a value in \[0, 2147483647\] \(got 2147483648\)"):
        DeviceDataset(many)
    with pytest.raises(ValueError, match=r"'len\(graphs\)' needs a value >= 1 \(got 0\)"):
        DeviceDataset([])
    with pytest.raises(ValueError, match=r"'device' needs a device, such as 'cuda' or 'cuda:1' \(got 'gpu'\)"):
        DeviceDataset(members(), "gpu")


@pytest.mark.parametrize("name", ["root_index", "sub_batch", "face"])
def test_attributes_that_collation_shifts_are_refused(name):
    graphs = members()
    for graph in graphs:
        graph[name] = torch.zeros(graph.num_nodes, dtype=torch.int64) + (name == "sub_batch")
    with pytest.raises(ValueError, match=f"'graphs' needs attributes that a batch joins row by row .* [(]got '{name}'"):
        DeviceDataset(graphs)


def test_wrong_ids():
    resident = DeviceDataset(members())
    with pytest.raises(ValueError, match=r"'len\(ids\)' needs a value >= 1 \(got 0\)"):
        resident.batch(torch.tensor([], dtype=torch.int64))
    with pytest.raises(TypeError, match="'ids' needs dtype torch.int64"):
        resident.batch(torch.ones(len(resident), dtype=torch.bool))
