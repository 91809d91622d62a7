"""The generated data sets against the numbers of their recipe, and their seeds."""

import pytest
import torch
from torch_geometric.utils import contains_self_loops, is_undirected

from pyg_dfgnn.datasets import cluster, pattern, sbm


def means(graphs):
    """Nodes and directed edges per graph."""
    return (
        sum(graph.num_nodes for graph in graphs) / len(graphs),
        sum(graph.num_edges for graph in graphs) / len(graphs),
    )


@pytest.fixture(scope="module")
def pattern_task():
    return pattern(2000, 10, 10)


@pytest.fixture(scope="module")
def cluster_task():
    return cluster(2000, 10, 10)


def test_pattern_statistics(pattern_task):
    nodes, edges = means(pattern_task.splits["train"])
    # Expected 117.05 and 5,876; only 100 pattern sizes are drawn, hence the width.
    assert nodes == pytest.approx(117.05, rel=0.03)
    assert edges == pytest.approx(5876, rel=0.07)
    labels = torch.cat([graph.y for graph in pattern_task.splits["train"]]).float()
    assert labels.mean() == pytest.approx(19.5 / 117.05, rel=0.1)


def test_cluster_statistics(cluster_task):
    nodes, edges = means(cluster_task.splits["train"])
    assert nodes == pytest.approx(117.0, rel=0.01)
    assert edges == pytest.approx(4290, rel=0.02)


def test_link_probabilities(cluster_task):
    inside, across = [0, 0], [0, 0]
    for graph in cluster_task.splits["train"][:200]:
        same = graph.y[:, None] == graph.y
        linked = torch.zeros_like(same)
        linked[graph.edge_index[0], graph.edge_index[1]] = True
        pairs = ~torch.eye(len(same), dtype=torch.bool)
        for counts, kind in ((inside, same & pairs), (across, ~same)):
            counts[0] += int((linked & kind).sum())
            counts[1] += int(kind.sum())
    assert inside[0] / inside[1] == pytest.approx(0.55, abs=0.005)
    assert across[0] / across[1] == pytest.approx(0.25, abs=0.005)


@pytest.mark.parametrize("make", [pattern, cluster], ids=["pattern", "cluster"])
def test_graphs_are_simple_and_labelled(make):
    task = make(20, 5, 5)
    for graph in task.splits["train"]:
        assert is_undirected(graph.edge_index, num_nodes=graph.num_nodes)
        assert not contains_self_loops(graph.edge_index)
        assert graph.x.shape == (graph.num_nodes, task.num_features)
        assert torch.equal(graph.x.sum(dim=1), torch.ones(graph.num_nodes))
        assert set(graph.y.tolist()) == set(range(task.num_classes))
    assert task.metric == "balanced_accuracy" and task.loss_weights and task.synthetic and not task.full_graph


def test_cluster_names_one_node_per_community():
    task = cluster(10, 1, 1)
    for graph in task.splits["train"]:
        signal = graph.x.argmax(dim=1)
        named = signal > 0
        assert torch.equal(graph.y[named], signal[named] - 1)
        assert sorted(signal[named].tolist()) == [1, 2, 3, 4, 5, 6]


def test_pattern_is_planted_in_every_split():
    task = pattern(6, 3, 3, num_patterns=3)

    def planted(graph):
        """Size and signals of the pattern, whatever the node order."""
        signals = graph.x[graph.y == 1].argmax(dim=1).tolist()
        inside = (graph.y[graph.edge_index] == 1).all(dim=0).sum()
        return sorted(signals), int(inside)

    for index in range(3):
        same = [planted(graphs[index]) for graphs in task.splits.values()] + [planted(task.splits["train"][index + 3])]
        assert same.count(same[0]) == 4
    assert planted(task.splits["train"][0]) != planted(task.splits["train"][1])


def test_seed_decides_each_graph():
    few, many, other = (pattern(count, 2, 2, seed=seed) for count, seed in ((2, 0), (4, 0), (2, 1)))
    for split in ("train", "val", "test"):
        for first, second in zip(few.splits[split], many.splits[split]):
            assert torch.equal(first.edge_index, second.edge_index) and torch.equal(first.x, second.x)
    assert not torch.equal(few.splits["train"][0].y, other.splits["train"][0].y)
    assert not torch.equal(few.splits["train"][0].y, few.splits["val"][0].y)


@pytest.mark.parametrize("make", [pattern, cluster])
def test_kept_on_disk(make, tmp_path, monkeypatch):
    made = make(3, 2, 2)
    for _ in range(2):
        kept = make(3, 2, 2, cache=tmp_path)
        for split, graphs in made.splits.items():
            for first, second in zip(graphs, kept.splits[split], strict=True):
                assert torch.equal(first.edge_index, second.edge_index)
                assert torch.equal(first.x, second.x) and torch.equal(first.y, second.y)
        monkeypatch.setattr(sbm, "_block_model", None)
    with pytest.raises(TypeError):
        make(3, 2, 2, p=0.4, cache=tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"p": 1.5}, r"'p' needs a value in \[0.0, 1.0\] \(got 1.5\)"),
        ({"num_train": 0}, r"'num_train' needs a value >= 1 \(got 0\)"),
        ({"min_size": 9, "max_size": 8}, r"'max_size' needs a value >= 9 \(got 8\)"),
        ({"num_communities": 0}, r"'num_communities' needs a value >= 1 \(got 0\)"),
    ],
    ids=["p", "num_train", "max_size", "num_communities"],
)
def test_wrong_arguments(wrong, message):
    for make in (pattern, cluster):
        with pytest.raises(ValueError, match=message):
            make(**{"num_train": 1, "num_val": 1, "num_test": 1, **wrong})
