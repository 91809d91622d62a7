"""A task refuses what training could not read."""

import io
import sys
import time

import pytest
import torch
from torch_geometric.data import Data

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.datasets.task import progress

GRAPH = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]), y=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"splits": {"dev": [GRAPH]}}, r"'splits' needs one of 'train', 'val', 'test' \(got 'dev'\)"),
        ({"level": "edge"}, r"'level' needs one of 'node', 'graph', 'link' \(got 'edge'\)"),
        ({"level": "link"}, r"'metric' needs 'mrr' for links and for nothing else \(got 'accuracy', link\)"),
        ({"metric": "mrr"}, r"'metric' needs 'mrr' for links and for nothing else \(got 'mrr', node\)"),
        ({"metric": "f1"}, r"'metric' needs one of 'accuracy', .* \(got 'f1'\)"),
        ({"metric": "roc_auc", "num_classes": 3}, r"'metric' needs another choice than 'roc_auc' for 3 classes"),
    ],
    ids=["splits", "level", "links", "ranks", "metric", "roc_auc"],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        Task(**{"name": "x", "splits": {"train": [GRAPH]}, "num_features": 1, "num_classes": 2, **wrong})


def test_map_transforms_a_shared_graph_once():
    calls = []

    def transform(graph):
        calls.append(graph)
        return graph.clone()

    task = Task("x", {split: [GRAPH] for split in ("train", "val", "test")}, 1, 2, metric="roc_auc").map(transform)
    assert len(calls) == 1 and task.splits["train"][0] is task.splits["test"][0] is not GRAPH
    assert task.metric == "roc_auc"


def test_long_work_shows_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("PATTERN", 10) as bar:
            bar.update()
            assert not stream.getvalue()
            # It takes longer than a moment.
            bar.start_t = bar.last_print_t = time.time() - 60
            bar.update()
        shown.append(stream.getvalue())
    assert "PATTERN:" in shown[0] and "2/10" in shown[0] and not shown[1]
