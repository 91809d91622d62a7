"""Generated stand-ins: published counts, seeds, and labels that can be learnt from what a model sees."""

import pytest
import torch
from torch_geometric.utils import contains_self_loops, is_undirected

from pyg_dfgnn.datasets import (
    image_superpixels_like,
    like,
    log_normal_graph,
    log_normal_pieces_graph,
    photograph_superpixels_like,
)
from pyg_dfgnn.datasets.generators import log_normal_pieces
from pyg_dfgnn.graph import Graph
from tests.datasets.sizes import DATA, deviations, size_of

MAKERS = {
    "mnist_superpixels_like": (image_superpixels_like, "MNIST"),
    "cifar10_superpixels_like": (image_superpixels_like, "CIFAR10"),
    "pascalvoc_sp_like": (photograph_superpixels_like, "PascalVOC-SP"),
    "coco_sp_like": (photograph_superpixels_like, "COCO-SP"),
}


def make(config, *counts, **arguments):
    maker, name = MAKERS[config]
    return maker(name, *(counts or (20, 4, 4)), **{"cache": None, **arguments})


def assert_same(left, right):
    for first, second in zip(left, right, strict=True):
        assert first.keys() == second.keys()
        for key in first.keys():
            assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("config", MAKERS)
def test_published_counts(config):
    task, entry = make(config, 400, 1, 1), DATA[config]
    size = size_of(task)
    for what, (deviation, allowed) in deviations(size, entry).items():
        assert abs(deviation) <= allowed, what
    assert (size.features, size.classes) == (entry.size.features, entry.size.classes)
    assert task.synthetic and task.name.endswith("-like") and not task.full_graph


@pytest.mark.parametrize("config", MAKERS)
def test_graphs_are_what_training_reads(config):
    task = make(config)
    graph_level = "superpixels" in config
    assert task.level == ("graph" if graph_level else "node")
    assert task.metric == ("accuracy" if graph_level else "macro_f1")
    assert [len(graphs) for graphs in task.splits.values()] == [20, 4, 4]
    for graph in task.splits["train"]:
        assert graph.validate() and not contains_self_loops(graph.edge_index)
        assert graph.x.shape == (graph.num_nodes, task.num_features) and graph.x.isfinite().all()
        assert graph.edge_attr.shape == (graph.num_edges, 1 if graph_level else 2)
        assert graph.edge_attr.isfinite().all() and (graph.edge_attr >= 0).all()
        assert graph.y.shape == (1 if graph_level else graph.num_nodes,)
        assert 0 <= int(graph.y.min()) <= int(graph.y.max()) < task.num_classes
        if graph_level:
            assert (graph.edge_index[0].bincount() == 8).all()
        else:
            assert is_undirected(graph.edge_index, num_nodes=graph.num_nodes)


@pytest.mark.parametrize("config", MAKERS)
def test_seed_decides_every_graph(config, monkeypatch):
    monkeypatch.setattr(like, "_CHUNK", 5)
    few, more, other = make(config, 10, 3, 3), make(config, 15, 3, 3), make(config, 10, 3, 3, seed=1)
    assert_same(few.splits["train"], more.splits["train"][:10])
    assert_same(few.splits["test"], more.splits["test"])
    first, second = few.splits["train"][0], few.splits["val"][0]
    assert not torch.equal(first.x[:40], second.x[:40])
    assert not torch.equal(first.x[:40], other.splits["train"][0].x[:40])


@pytest.mark.parametrize("config", MAKERS)
def test_kept_on_disk(config, tmp_path, monkeypatch):
    made = make(config, cache=tmp_path)
    monkeypatch.setattr(like, "_splits", None)
    assert_same(made.splits["train"], make(config, cache=tmp_path).splits["train"])
    with pytest.raises(TypeError):
        make(config, cache=tmp_path, noise=0.2)


def test_pictures_tell_the_class():
    """Without noise, graphs of one class show nearly the same colour at the same place; of two classes they do not."""
    graphs = make("mnist_superpixels_like", 30, 1, 1, noise=0.0).splits["train"]

    def difference(first, second):
        nearest = torch.cdist(first.x[:, 1:], second.x[:, 1:]).argmin(dim=1)
        return float((first.x[:, 0] - second.x[nearest, 0]).abs().mean())

    pairs = [(a, b) for i, a in enumerate(graphs) for b in graphs[:i]]
    same = [difference(a, b) for a, b in pairs if a.y == b.y]
    others = [difference(a, b) for a, b in pairs if a.y != b.y]
    assert sum(same) / len(same) < 0.5 * sum(others) / len(others)


def test_objects_are_connected_regions():
    graphs = make("pascalvoc_sp_like", 30, 1, 1).splits["train"]
    y = torch.cat([graph.y for graph in graphs])
    assert 0.3 < (y == 0).float().mean() < 0.9 and len(y.unique()) >= 18
    same = torch.cat([graph.y[graph.edge_index[0]] == graph.y[graph.edge_index[1]] for graph in graphs])
    assert same.float().mean() > 0.75


NETWORK = dict(
    num_nodes=20_000, mean_degree=40, max_degree=900, sigma=0.8, num_features=16, num_classes=5, num_train=12_000,
    num_val=3_000, cache=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def network():
    return log_normal_graph("Net", **NETWORK)


def test_log_normal_graph_has_its_degrees(network):
    (graph,) = network.splits["train"]
    degree = graph.edge_index[1].bincount(minlength=graph.num_nodes)
    assert network.full_graph and network.name == "Net-like" and "sigma 0.8" in network.synthetic
    assert is_undirected(graph.edge_index) and not contains_self_loops(graph.edge_index)
    assert float(degree.double().mean()) == pytest.approx(40, rel=0.05)
    assert int(degree.max()) == pytest.approx(900, rel=0.1)
    assert (degree > 700).sum() >= 8


def test_masks_are_a_partition(network):
    (graph,) = network.splits["test"]
    masks = torch.stack([graph[f"{split}_mask"] for split in ("train", "val", "test")])
    assert masks.sum(dim=1).tolist() == [12_000, 3_000, 5_000]
    assert (masks.sum(dim=0) == 1).all()


def test_neighbours_tell_the_label(network):
    (graph,) = network.splits["train"]
    source, target = graph.edge_index

    def homophily(graph):
        return float((graph.y[graph.edge_index[0]] == graph.y[graph.edge_index[1]]).float().mean())

    (blind,) = log_normal_graph("Net", **NETWORK, homophily=0.0).splits["train"]
    assert homophily(blind) == pytest.approx(0.2, abs=0.01)
    assert 0.4 < homophily(graph) < 0.6
    # The pairs of hubs are not touched.
    degree = target.bincount()
    hub = degree > 700
    at_hub = hub[source] | hub[target]
    assert float((graph.y[source] == graph.y[target])[at_hub].float().mean()) == pytest.approx(0.2, abs=0.03)

    centre = torch.stack([graph.x[graph.y == label].mean(dim=0) for label in range(5)])
    mean = torch.zeros_like(graph.x).index_add_(0, target, graph.x[source]) / degree.clamp(min=1)[:, None]
    alone, together = ((values @ centre.t()).argmax(dim=1) == graph.y for values in (graph.x, mean))
    assert together.float().mean() > alone.float().mean() + 0.2


def test_scale_keeps_mean_degree_and_share_of_hubs():
    task = log_normal_graph("Net", **NETWORK, scale=0.25)
    (graph,) = task.splits["train"]
    degree = graph.edge_index[1].bincount()
    assert graph.num_nodes == 5_000 and int(graph.train_mask.sum()) == 3_000
    assert float(degree.double().mean()) == pytest.approx(40, rel=0.1)
    assert int(degree.max()) == pytest.approx(225, rel=0.2)
    assert "0.25 of the nodes" in task.synthetic


def test_network_seed_and_cache(tmp_path, monkeypatch):
    small = {**NETWORK, "scale": 0.1, "cache": tmp_path}
    first, other = (log_normal_graph("Net", **small, seed=seed).splits["train"][0] for seed in (0, 1))
    assert not torch.equal(first.x, other.x) and not torch.equal(first.y, other.y)
    monkeypatch.setattr(like, "log_normal_chung_lu", None)
    again = log_normal_graph("Net", **small).splits["train"]
    assert_same([first], again)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.01}, r"'scale' needs at least 0.0444 .* hubs would have 9 neighbours \(got 0.01\)"),
        ({"scale": 2.0}, r"'scale' needs a value in \[0.0, 1.0\] \(got 2.0\)"),
        ({"homophily": -1}, r"'homophily' needs a value in \[0.0, 1.0\] \(got -1\)"),
        ({"num_val": 8_000}, r"'num_val' needs a value in \[1, 7999\] \(got 8000\)"),
    ],
    ids=["small", "large", "homophily", "num_val"],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        log_normal_graph("Net", **{**NETWORK, **wrong})


PIECES = dict(
    num_nodes=20_000, num_edges=300_000, max_degree=2_000, sigma=0.8, num_features=16, num_classes=5, num_train=300,
    num_val=100, num_test=50, device="cpu",
)  # fmt: skip


def test_a_graph_from_pieces_labels_some_nodes():
    task = log_normal_pieces_graph("Cites", **PIECES, piece=7_000)
    (data,) = task.splits["train"]
    edges = data.edge_index
    assert task.full_graph and task.name == "Cites-like" and "sigma 0.8" in task.synthetic
    assert isinstance(edges, Graph) and edges.self_loops and edges.num_src == edges.num_dst == 20_000
    source, target = edges.edge_index
    assert int((source == target).sum()) == 20_000
    # Loops among the drawn edges are replaced.
    assert 319_000 < edges.num_edges <= 320_000
    assert data.x.dtype == torch.bfloat16 and data.x.shape == (20_000, 16)
    assert len(data.nodes.unique()) == len(data.y) == 450
    masks = torch.stack([data[f"{split}_mask"] for split in ("train", "val", "test")])
    assert masks.sum(dim=1).tolist() == [300, 100, 50] and (masks.sum(dim=0) == 1).all()
    # Hubs and log-normal degrees, on both sides.
    for ends in (source, target):
        degree = ends.bincount(minlength=20_000) - 1
        assert float(degree.double().mean()) == pytest.approx(15, rel=0.01)
        assert (degree[:8] > 1_500).all() and int(degree[8:].max()) < 1_500
    assert torch.equal(task.degrees(), edges.csr.rowptr.diff().bincount())


def test_labelled_nodes_show_their_class():
    (data,) = log_normal_pieces_graph("Cites", **PIECES, signal=3.0, dtype="float32").splits["train"]
    x = data.x[data.nodes]
    centre = torch.stack([x[data.y == label].mean(dim=0) for label in range(5)])
    assert ((x @ centre.t() - centre.square().sum(1) / 2).argmax(dim=1) == data.y).float().mean() > 0.8


def test_pieces_decide_nothing_but_memory():
    """An int64 `edge_index` has the edges of the `Graph`; a scale takes a share of everything."""
    edges = [log_normal_pieces_graph("Cites", **PIECES, self_loops=False, as_graph=graph) for graph in (True, False)]
    (held,), (plain,) = (task.splits["train"] for task in edges)
    assert plain.edge_index.dtype == torch.int64 and torch.equal(held.edge_index.edge_index, plain.edge_index)
    assert torch.equal(held.y, plain.y) and torch.equal(held.nodes, plain.nodes)
    task = log_normal_pieces_graph("Cites", **PIECES, scale=0.1)
    (small,) = task.splits["train"]
    assert small.num_nodes == 2_000 and len(small.y) == 45 and "0.1 of the nodes" in task.synthetic


def test_pieces_are_int32_and_none_is_larger_than_asked():
    pieces = list(log_normal_pieces(1_000, 5_500, 200, 0.8, 2, seed=3, device="cpu", piece=2_000))
    assert [piece.size(1) for piece in pieces] == [2_000, 2_000, 1_500]
    assert all(piece.dtype == torch.int32 and 0 <= int(piece.min()) <= int(piece.max()) < 1_000 for piece in pieces)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 2.0}, r"'scale' needs a value in \[0.0, 1.0\] \(got 2.0\)"),
        ({"dtype": "int8"}, r"'dtype' needs one of .* \(got 'int8'\)"),
        ({"num_val": 0}, r"'num_val' needs a value in \[1, 20000\] \(got 0\)"),
        ({"num_train": 19_900}, r"'num_train' needs a value in \[1, 19850\] \(got 19900\)"),
        ({"piece": 0}, r"'piece' needs a value >= 1 \(got 0\)"),
    ],
    ids=["scale", "dtype", "num_val", "num_train", "piece"],
)
def test_wrong_arguments_of_pieces(wrong, message):
    with pytest.raises(ValueError, match=message):
        log_normal_pieces_graph("Cites", **{**PIECES, **wrong})


@pytest.mark.parametrize("maker", [image_superpixels_like, photograph_superpixels_like])
def test_wrong_arguments_of_superpixels(maker):
    with pytest.raises(ValueError, match="'name' needs one of .* \\(got 'ImageNet'\\)"):
        maker("ImageNet", 1, 1, 1)
    name = "MNIST" if maker is image_superpixels_like else "COCO-SP"
    with pytest.raises(ValueError, match=r"'num_val' needs a value >= 1 \(got 0\)"):
        maker(name, 1, 0, 1, cache=None)
    with pytest.raises(ValueError, match=r"'noise' needs a value >= 0 \(got -1\)"):
        maker(name, 1, 1, 1, noise=-1, cache=None)
