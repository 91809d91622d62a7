"""Reordered graphs train as the graphs do in the order in which they come."""

import csv
import sys

import pytest
import torch

from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.training.run import train
from tests.configs.train import train_config


def losses(folder):
    with open(folder / "metrics.csv") as stream:
        return [[float(row["train_loss"]), float(row["val_loss"])] for row in csv.DictReader(stream)]


@pytest.fixture
def whole_graph(tmp_path):
    """whole_graph(folder, *overrides) trains on one generated graph and returns the run folder."""

    def go(folder, *overrides):
        words = ["data=reddit_like_small", "data.task.scale=0.002", "model.dropout=0", "trainer.epochs=3"]
        words += ["device=cpu", "trainer.progress=false", f"paths.run={tmp_path / folder}"]
        train(train_config(*words, f"paths.cache={tmp_path / 'cache'}", *overrides))
        return tmp_path / folder

    return go


@pytest.mark.parametrize("method", ["degree", "rcm", "community"])
def test_one_graph_has_the_losses_of_the_old_order(whole_graph, method, caplog):
    caplog.set_level("INFO")
    plain, reordered = whole_graph("plain"), whole_graph("reordered", f"data.reorder={method}")
    assert f"reordered by {method} in " in caplog.text
    torch.testing.assert_close(torch.tensor(losses(reordered)), torch.tensor(losses(plain)), **elementwise("float32"))


def test_batches_have_the_losses_of_the_old_order(run, caplog):
    caplog.set_level("INFO")
    words = ["model=gat", "model.dropout=0", "trainer.epochs=2"]
    (_, plain), (_, reordered) = run("plain", *words), run("reordered", *words, "data.reorder=community")
    assert "last graph: reordered by community in " in caplog.text
    torch.testing.assert_close(torch.tensor(losses(reordered)), torch.tensor(losses(plain)), **elementwise("float32"))


def test_a_wrong_method_is_refused_before_the_data_are_made(run, monkeypatch):
    with pytest.raises(ValueError, match=r"'data.reorder' needs one of None, 'degree', .* \(got 'metric'\)"):
        run("run", "data.reorder=metric", "data.task.num_train=-1")
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ModuleNotFoundError, match=r'pymetis: pip install "\.\[reorder\]"'):
        run("run", "data.reorder=metis", "data.task.num_train=-1")
