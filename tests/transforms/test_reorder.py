"""A reordered graph is the old one under other names: everything follows, models agree, results go back."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.transforms import RandomLinkSplit, ToSparseTensor
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.graph import DeviceDataset, Graph
from pyg_dfgnn.graph.reorder import METHODS
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import ZOO, random, zoo
from pyg_dfgnn.transforms import Reorder, break_even_epochs, restore_order

GRAPHS = [*(graph for graph in zoo() if graph.num_src == graph.num_dst), random(8, 8, 8, seed=4)]
COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc


def data_of(graph, dtype=torch.float64):
    """A graph with attributes of every kind, drawn from one seed."""
    num_nodes, num_edges = graph.num_src, graph.num_edges
    generator = torch.Generator().manual_seed(0)
    return Data(
        num_nodes=num_nodes,
        x=torch.randn(num_nodes, 6, generator=generator, dtype=dtype),
        y=torch.randint(3, (num_nodes,), generator=generator),
        pos=torch.randn(num_nodes, 2, generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.5,
        n_id=torch.arange(100, 100 + num_nodes),
        edge_index=graph.edge_index,
        edge_attr=torch.randn(num_edges, 4, generator=generator, dtype=dtype),
        edge_weight=torch.rand(num_edges, generator=generator, dtype=dtype),
    )


def reordered(data, method="degree"):
    if method == "metis":
        pytest.importorskip("pymetis")
    return Reorder(method)(data)


def triples(data):
    """Edges between old nodes with what they carry, in the order of the edges."""
    ends = data.edge_index if "node_perm" not in data else data.node_perm[data.edge_index]
    return torch.cat([ends, data.edge_weight[None], data.edge_attr.t()]).t().tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_everything_follows_its_node(graph, method):
    before = data_of(graph)
    copy = before.clone()
    after = reordered(before, method)
    perm = after.node_perm
    assert sorted(perm.tolist()) == list(range(graph.num_src))
    assert torch.equal(after.node_inverse[perm], torch.arange(graph.num_src))
    for name in ("x", "y", "pos", "train_mask", "n_id"):
        assert torch.equal(after[name], before[name][perm]), name
        assert torch.equal(after[name][after.node_inverse], before[name]), name
        assert torch.equal(restore_order(after[name], after), before[name]), name
    # Edges keep their order, with everything on them.
    assert triples(after) == triples(before)
    assert after.validate() and "node_perm" not in before and before.keys() == copy.keys()
    assert all(torch.equal(before[name], copy[name]) for name in before.keys() if name != "num_nodes")


CONVS = {
    "GATConv": (lambda: pyg.GATConv(6, 3, heads=2, edge_dim=4), True),
    "TransformerConv": (lambda: pyg.TransformerConv(6, 3, heads=2, edge_dim=4), True),
    "GINEConv": (lambda: pyg.GINEConv(torch.nn.Linear(6, 3), edge_dim=4), True),
    "GCNConv": (lambda: pyg.GCNConv(6, 3), False),
    "SAGEConv max": (lambda: pyg.SAGEConv(6, 3, aggr="max"), False),
    "our GATConv": (lambda: ours.GATConv(6, 3, heads=2, edge_dim=4), True),
    "our TransformerConv": (lambda: ours.TransformerConv(6, 3, heads=2, edge_dim=4), True),
}


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize(
    "name", ["hub", "duplicates", "self-loops", "isolated", "star-out", "many-relations", "one-node"]
)
def test_a_conv_gives_the_rows_and_gradients_of_the_old_order(name, conv):
    torch.manual_seed(0)
    make, takes_edges = CONVS[conv]
    layer, before = make().double(), data_of(ZOO[name]())
    after = reordered(before, "community")
    results = {}
    for data in (before, after):
        x = data.x.clone().requires_grad_()
        edge_attr = data.edge_attr.clone().requires_grad_()
        out = layer(x, data.edge_index, edge_attr) if takes_edges else layer(x, data.edge_index)
        rows = out if data is before else restore_order(out, after)
        weight = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).view_as(rows)
        leaves = [x, *([edge_attr] if takes_edges else []), *layer.parameters()]
        # A graph without edges reaches only some of them.
        grads = torch.autograd.grad((rows * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        results[data is after] = [rows, grads[0] if data is before else restore_order(grads[0], after), *grads[1:]]
    for old, new in zip(*results.values(), strict=True):
        torch.testing.assert_close(new, old, **elementwise("float64/rounding"))


@pytest.mark.parametrize(
    "name", ["hub", "duplicates", "self-loops", "isolated", "no-edges", "one-node", "many-relations"]
)
@pytest.mark.parametrize("keeps_edges", [True, False])
@pytest.mark.parametrize("layout", [None, COO, CSR])
def test_adj_t_and_what_is_in_its_order(name, keeps_edges, layout):
    if layout is None and not torch_geometric.typing.WITH_TORCH_SPARSE:
        pytest.skip("needs torch_sparse")
    graph = ZOO[name]()
    if layout is not None:
        # PyG merges duplicates in torch's layouts, and then attributes do not fit the merged edges.
        graph = replace(graph, edge_index=graph.edge_index.unique(dim=1))
    data = data_of(graph)
    before = ToSparseTensor("edge_weight", not keeps_edges, layout=layout)(data)
    after = reordered(before)
    perm = after.node_perm
    assert type(after.adj_t) is type(before.adj_t) and getattr(after.adj_t, "layout", 0) == getattr(
        before.adj_t, "layout", 0
    )
    torch.testing.assert_close(after.adj_t.to_dense(), before.adj_t.to_dense()[perm][:, perm])
    if keeps_edges:
        assert triples(after) == triples(before)
        return
    entries = {}
    for graph in (before, after):
        adj = graph.adj_t
        if layout is None:
            row, col, value = adj.coo()
        else:
            coo = adj.to_sparse_coo()
            (row, col), value = coo._indices(), coo._values()
        ids = torch.arange(before.num_nodes) if graph is before else perm
        rows = torch.stack([ids[row], ids[col], value], dim=1)
        entries[graph is after] = sorted(torch.cat([rows, graph.edge_attr], dim=1).tolist())
    assert entries[True] == entries[False]


@pytest.mark.parametrize("layout", [COO, CSR, CSC])
def test_sparse_matrices_of_edges_and_of_features(layout):
    graph = random(9, 9, 30, seed=5)
    make = {COO: to_torch_coo_tensor, CSR: to_torch_csr_tensor, CSC: to_torch_csc_tensor}[layout]
    value = torch.rand(30, dtype=torch.float64)
    x = torch.randn(9, 4).relu().to_sparse(layout=layout)
    before = Data(num_nodes=9, adj_t=make(graph.edge_index.flip(0), value, size=(9, 9)), x=x)
    after = reordered(before)
    perm = after.node_perm
    assert after.adj_t.layout == after.x.layout == layout
    torch.testing.assert_close(after.adj_t.to_dense(), before.adj_t.to_dense()[perm][:, perm])
    assert torch.equal(after.x.to_dense(), x.to_dense()[perm])
    dense = data_of(graph)
    dense.adj = torch.rand(9, 9)
    moved = reordered(dense)
    assert torch.equal(moved.adj, dense.adj[moved.node_perm][:, moved.node_perm])


def test_edge_index_class_loses_its_order_and_keeps_its_size():
    graph = random(9, 9, 30, seed=5)
    edge_index = EdgeIndex(graph.edge_index, sparse_size=(9, 9)).sort_by("col").values
    before = Data(x=torch.randn(9, 2), edge_index=edge_index)
    after = reordered(before).edge_index
    assert isinstance(after, EdgeIndex) and after.sparse_size() == (9, 9) and after.sort_order is None
    after.validate()


def test_node_ids_anywhere_are_renumbered():
    num_nodes = 9
    before = data_of(random(num_nodes, num_nodes, 30, seed=5))
    before.parent_index = torch.randint(num_nodes, (num_nodes,))
    before.root_index = torch.tensor([4])
    before.face = torch.randint(num_nodes, (3, num_nodes))
    before.edge_label_index = torch.randint(num_nodes, (2, num_nodes))
    before.edge_label = torch.rand(num_nodes)
    before.names = [f"node {i}" for i in range(num_nodes)]
    before.numbers = np.arange(num_nodes)
    before.graph_feature = torch.randn(1, 7)
    before.title = "a graph"
    after = reordered(before)
    perm = after.node_perm
    assert torch.equal(perm[after.parent_index], before.parent_index[perm])
    for name in ("root_index", "face", "edge_label_index"):
        assert torch.equal(perm[after[name]], before[name]), name
    for name in ("edge_label", "graph_feature"):
        assert torch.equal(after[name], before[name]), name
    assert after.names == [f"node {i}" for i in perm.tolist()] and after.title == "a graph"
    assert np.array_equal(after.numbers, perm.numpy())


def test_numbers_of_nodes_are_no_ids_whatever_their_name():
    edge_index = torch.tensor([[5, 5, 5, 5, 0, 1], [0, 1, 2, 3, 1, 2]])
    numbers, marks = torch.rand(8), torch.arange(8) % 2 == 0
    data = Data(x=torch.rand(8, 2), edge_index=edge_index, refractive_index=numbers, in_index_set=marks)
    new = Reorder("degree")(data)
    perm = new.node_perm
    assert not torch.equal(perm, torch.arange(8))
    assert torch.equal(new.refractive_index, numbers[perm]) and torch.equal(new.in_index_set, marks[perm])


@pytest.mark.parametrize("method", ["degree", "rcm", "community"])
def test_a_default_device_changes_no_order(method):
    data = Data(x=torch.rand(10, 2), edge_index=torch.randint(10, (2, 30)))
    with torch.device("meta"):
        new = Reorder(method)(data.clone())
    assert torch.equal(new.node_perm, Reorder(method)(data).node_perm)


def test_splits_of_links_follow():
    before = data_of(random(40, 40, 200, seed=2))
    train, _, _ = RandomLinkSplit(num_val=0.2, num_test=0.2)(before)
    after = reordered(train)
    assert torch.equal(after.node_perm[after.edge_label_index], train.edge_label_index)
    assert torch.equal(after.edge_label, train.edge_label)


def test_as_many_edges_as_nodes():
    """Where sizes do not tell nodes from edges, PyG goes by the name."""
    before = data_of(random(12, 12, 12, seed=1))
    after = reordered(before)
    assert triples(after) == triples(before)
    assert torch.equal(after.y, before.y[after.node_perm])


@pytest.mark.parametrize("method", METHODS)
def test_every_run_gives_the_same_order(method):
    before = data_of(ZOO["many-relations"]())
    assert torch.equal(reordered(before, method).node_perm, reordered(before, method).node_perm)


def test_a_second_reordering_still_knows_the_first_order():
    before = data_of(random(50, 50, 300))
    after = reordered(reordered(before, "community"), "degree")
    assert torch.equal(after.x, before.x[after.node_perm])
    assert torch.equal(after.node_inverse[after.node_perm], torch.arange(50))
    assert torch.equal(restore_order(after.x, after), before.x) and triples(after) == triples(before)


def test_batches_of_reordered_graphs():
    members = [data_of(graph) for graph in GRAPHS if graph.num_src and graph.edge_type is None]
    others = [reordered(member) for member in members]
    (batch,) = DataLoader(others, batch_size=len(members))
    whole = Batch.from_data_list(members)
    assert torch.equal(restore_order(batch.x, batch), whole.x)
    assert Graph.of(batch).num_edges == whole.num_edges
    resident = DeviceDataset(others).batch(torch.tensor([2, 0]))
    assert torch.equal(restore_order(resident.x, resident), torch.cat([members[2].x, members[0].x]))
    layer = pyg.GCNConv(6, 3).double()
    out = restore_order(layer(batch.x, batch.edge_index), batch)
    torch.testing.assert_close(out, layer(whole.x, whole.edge_index))


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE), reason="no sampler"
)
def test_samples_know_their_old_nodes():
    before = data_of(random(50, 50, 300))
    after = reordered(before)
    batch = next(iter(NeighborLoader(after, num_neighbors=[3], batch_size=8)))
    assert torch.equal(batch.x, before.x[batch.node_perm])
    with pytest.raises(ValueError, match="'data' needs every node that Reorder saw: node_perm is no permutation"):
        restore_order(batch.x, batch)


def test_an_accelerated_model_agrees():
    before = data_of(random(50, 50, 300), torch.float32)
    model = pyg.GAT(6, 8, num_layers=2, heads=2)
    pyg_dfgnn.accelerate(model)
    after = reordered(before, "community")
    out = restore_order(model(after.x, after.edge_index), after)
    torch.testing.assert_close(out, model(before.x, before.edge_index))


def test_the_report_tells_cost_and_misses():
    block = torch.arange(2000).view(-1, 20)
    pairs = torch.stack([block[:, :, None].expand(-1, -1, 20), block[:, None].expand(-1, 20, -1)]).reshape(2, -1)
    label = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    reorder = Reorder("community", cache_rows=40)
    assert reorder.report is None and repr(reorder) == "Reorder(method='community')"
    # The nodes of a block read its 20 rows, which were spread over the graph and now lie together.
    after = reorder(Data(edge_index=label[pairs], num_nodes=2000))
    report = reorder.report
    assert report.cost_s > 0 and report.misses_before > 0.9 and report.misses_after == pytest.approx(1 / 20)
    assert "reordered by community in " in str(report) and str(report).endswith("% to 5 %")
    assert torch.equal(after.node_perm[after.edge_index], label[pairs])
    assert reorder(Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=3)).node_perm.tolist() == [0, 1, 2]
    assert reorder.report.misses_before == reorder.report.misses_after == 0.0


def test_break_even():
    assert break_even_epochs(10.0, 1.5, 1.0) == 20
    assert break_even_epochs(0.1, 1.5, 1.0) == 1 and break_even_epochs(0.0, 2.0, 1.0) == 0
    assert break_even_epochs(10.0, 1.0, 1.0) == break_even_epochs(10.0, 1.0, 1.2) == math.inf
    with pytest.raises(ValueError, match=r"'after_s' needs a value >= 0 \(got -1.0\)"):
        break_even_epochs(1.0, 2.0, -1.0)


def test_what_cannot_be_reordered_is_refused():
    reorder, data = Reorder("degree"), data_of(random(9, 9, 30))
    with pytest.raises(TypeError, match=r"'data' needs to be a homogeneous Data \(got HeteroData\)"):
        reorder(HeteroData())
    with pytest.raises(ValueError, match=r"apply Reorder before batches are made \(got 'batch'\)"):
        reorder(Batch.from_data_list([data, data]))
    with pytest.raises(TypeError, match=r"'data' needs a tensor 'edge_index' or a sparse 'adj_t' \(got \['x'\]\)"):
        reorder(Data(x=data.x))
    data.seed_index = torch.tensor([9])
    with pytest.raises(ValueError, match=r"'seed_index' needs node ids in \[0, num_nodes=9\) \(got 9 to 9\)"):
        reorder(data)
    with pytest.raises(ValueError, match=r"'edge_index' needs source ids in \[0, num_src=2\) \(got 5 to 5\)"):
        reorder(Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[5], [0]])))
    with pytest.raises(ValueError, match="'method' needs one of 'degree', "):
        Reorder("metric")
    with pytest.raises(TypeError, match="'cache_rows' needs an integer"):
        Reorder("degree", cache_rows=1.5)


def test_what_cannot_be_restored_is_refused():
    after = reordered(data_of(random(9, 9, 30)))
    with pytest.raises(ValueError, match="'data' needs the node_perm that Reorder stores"):
        restore_order(torch.zeros(9), data_of(random(9, 9, 30)))
    with pytest.raises(ValueError, match=r"'rows' needs shape \[N=9, ...\] \(got \[8, 2\]\)"):
        restore_order(torch.zeros(8, 2), after)
    with pytest.raises(TypeError, match="'rows' needs a torch.Tensor"):
        restore_order([1.0], after)


def test_a_missing_package_is_named_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ModuleNotFoundError, match=r"'metis' need pymetis: pip install .\.\[reorder\]."):
        Reorder("metis")
