"""Sampled neighbours by PyG's NeighborLoader with torch_sparse as its sampler, not with a stand-in."""

import json

import pytest
import torch

from pyg_dfgnn.distributed import Group
from pyg_dfgnn.training.loaders import Seeds, sampled
from pyg_dfgnn.training.metrics import IGNORED
from pyg_dfgnn.training.run import train
from tests.capture.test_step import graph
from tests.configs.train import train_config
from tests.training.test_run import assert_close, assert_equal, history, parameters

pytest.importorskip("torch_sparse")
pytestmark = pytest.mark.sparse
CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    """run(folder, *overrides) trains GAT on a small Reddit-like graph by sampling and returns the run folder."""

    def go(folder, *overrides):
        small = ["experiment=gat_reddit_like", "data.task.scale=2e-3", "data.task.mean_degree=10", "device=cpu"]
        small += [
            "data.task.signal=3.0",
            "data.task.num_classes=5",
            "model.hidden_channels=4",
            "model.heads=2",
            "trainer.epochs=4",
        ]
        small += ["trainer.sampler.num_neighbors=[5,3]", "trainer.sampler.batch_size=64", "trainer.progress=false"]
        small += [f"paths.cache={tmp_path / 'cache'}", f"paths.run={tmp_path / folder}"]
        train(train_config(*small, *overrides))
        return tmp_path / folder

    return go


def test_batches_of_an_epoch():
    data = graph(40, 0)
    data.train_mask = torch.arange(40) % 3 == 0
    data.n_id_of = torch.arange(40)
    loader = sampled(data, CPU, {"num_neighbors": [4, 2], "batch_size": 5}, torch.Generator().manual_seed(0), Group())
    known = set(map(tuple, data.edge_index.t().tolist()))
    bring, seeds = Seeds(CPU, int(data.train_mask.sum())), []
    for batch in map(bring, loader):
        ids, size = batch.n_id_of, batch.batch_size
        seeds += ids[:size].tolist()
        assert torch.equal(batch.y[:size], data.y[ids[:size]]) and (batch.y[size:] == IGNORED).all()
        assert torch.equal(batch.x, data.x[ids])
        assert set(map(tuple, ids[batch.edge_index].t().tolist())) <= known
        degree = batch.edge_index[1].bincount(minlength=len(ids))
        assert torch.equal(degree[:size], data.edge_index[1].bincount(minlength=40)[ids[:size]].clamp(max=4))
        assert degree.max() <= 4
    assert sorted(seeds) == data.train_mask.nonzero().view(-1).tolist()


def test_loss_falls(run):
    folder = run("run", "trainer.epochs=20", "model.dropout=0.0", "optimizer.lr=0.03")
    rows, summary = history(folder), json.loads((folder / "metrics.json").read_text())
    assert float(rows[-1]["train_loss"]) < 0.8 * float(rows[0]["train_loss"])
    assert summary["task"] == "Reddit-like" and summary["test_accuracy"] > 0.4 and summary["prepare_time_s"] > 0


def test_a_sampled_run_that_diverges(run, caplog):
    folder = run("run", "optimizer.lr=1e20", "trainer.epochs=2")
    assert json.loads((folder / "metrics.json").read_text())["diverged_epoch"] == 1
    assert "epoch 1: the loss has diverged" in caplog.text


def test_backends_give_the_same_run(run):
    assert_close(*(history(run(backend, f"backend={backend}", "model.dropout=0.0")) for backend in ("auto", "pyg")))


def test_a_resumed_run_samples_on(run):
    whole = run("whole")
    half = run("half", "trainer.epochs=2")
    resumed = run("resumed", f"resume={half}")
    assert history(resumed) == history(whole)
    assert_equal(parameters(resumed), parameters(whole))
