"""Runs on values of graphs and nodes: loss, error in their unit, and the choices that follow from a lower error."""

import json

import pytest
import torch
from hydra.utils import instantiate
from torch_geometric.data import Data

import pyg_dfgnn
from pyg_dfgnn.datasets.task import value_task
from pyg_dfgnn.distributed import empty_graph
from pyg_dfgnn.training import sweep
from pyg_dfgnn.training import trainer as trainer_module
from pyg_dfgnn.training.loaders import Seeds, labelled, weighted
from pyg_dfgnn.training.metrics import ErrorScore, absolute_error
from pyg_dfgnn.training.run import import_convs, make_model, train
from tests.capture.test_step import HostRecorder
from tests.configs.train import train_config
from tests.training.test_run import assert_close, history

CPU = torch.device("cpu")
RESIDENT = {"resident": "trainer.cuda_graph=false", "captured_resident": "trainer.cuda_graph=true"}
OUT = torch.tensor([[1.0], [2.0], [-1.0], [5.0]])
# The last one has no value.
Y = torch.tensor([[0.5, 1.0], [2.0, 1.0], [1.0, 1.0], [9.0, 0.0]])


@pytest.fixture
def run(tmp_path):
    """run(folder, *overrides) trains on a few generated molecules and returns (metric, run folder)."""

    def go(folder, *overrides):
        small = ["data.task.source=generated", "data.task.num_graphs=24", "trainer.loader.batch_size=5", "device=cpu"]
        small += ["trainer.progress=false", "trainer.epochs=2", "model.hidden_channels=8", "model.layers=2"]
        names = ("data=solubility", *small, f"paths.run={tmp_path / folder}", *overrides)
        return train(train_config(*names)), tmp_path / folder

    return go


def test_error_by_hand():
    # |1 - 0.5| + |2 - 2| + |-1 - 1| over 3.
    assert absolute_error(OUT, Y).item() == pytest.approx(2.5 / 3)
    assert absolute_error(OUT.bfloat16(), Y).dtype == torch.float32
    whole, parts = ErrorScore(4.0, CPU), ErrorScore(4.0, CPU)
    whole.add(absolute_error(OUT, Y), OUT, Y)
    for part in (slice(0, 1), slice(1, 4)):
        parts.add(absolute_error(OUT[part], Y[part]), OUT[part], Y[part])
    for score in (whole, parts):
        assert score.loss == pytest.approx(2.5 / 3) and score.metric == pytest.approx(4 * 2.5 / 3)


class PerNode(torch.nn.Linear):
    """Forgets to pool the rows of nodes."""

    def __init__(self, in_channels, out_channels, **_):
        super().__init__(in_channels, out_channels)

    def forward(self, x, edge_index, **_):
        return super().forward(x)


def test_a_model_of_nodes_on_graphs_is_told_to_pool(run):
    error = r"'output of the model' needs shape \[5, K\], a row per graph, pooled with 'batch' \(got \[\d+, 1\]\)"
    with pytest.raises(ValueError, match=error):
        run("run", f"model._target_={__name__}.PerNode")


def test_what_has_no_value_has_no_weight():
    graph = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), y=torch.tensor([1.0, 2.0, 3.0]))
    graph.val_mask = torch.tensor([False, True, False])
    assert labelled(weighted(graph), "val").y.tolist() == [[0, 0], [2, 1], [0, 0]]
    assert graph.y.tolist() == [1, 2, 3]
    batch = weighted(graph)
    batch.input_id, batch.batch_size = torch.tensor([4]), 1
    assert Seeds(CPU, 9)(batch).y.tolist() == [[1, 1], [0, 0], [0, 0]]
    of_graph = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([1.0]))
    assert empty_graph(weighted(of_graph)).y.tolist() == [[0, 0]]


@pytest.mark.parametrize("data", ["solubility", "qm9"])
def test_error_of_a_run_is_that_of_its_best_epoch_in_the_unit(run, caplog, data):
    caplog.set_level("INFO")
    metric, folder = run("run", f"data={data}", "trainer.epochs=3")
    summary, rows = json.loads((folder / "metrics.json").read_text()), history(folder)
    assert summary["test_error"] == metric and summary["metric"] == "mae"
    assert f"test mean absolute error: {metric:.4g} {summary['unit']}" in caplog.text
    errors = [float(row["val_error"]) for row in rows]
    assert summary["best_epoch"] == 1 + errors.index(min(errors))

    cfg = train_config(f"data={data}", "data.task.source=generated", "data.task.num_graphs=24", "model.layers=2")
    cfg.model.hidden_channels = 8
    task = instantiate(cfg.data.task)
    model = make_model(instantiate(cfg.model, _partial_=True, convs=import_convs("torch_geometric.nn")), task).eval()
    model.load_state_dict(torch.load(folder / "checkpoints" / "best.pt", weights_only=True)["model"])
    with torch.no_grad():
        differences = [
            (model(g.x, g.edge_index, torch.zeros(g.num_nodes, dtype=int), 1, edge_attr=g.edge_attr) - g.y) * task.scale
            for g in task.splits["test"]
        ]
    assert torch.cat(differences).abs().mean().item() == pytest.approx(metric, rel=1e-4)


def test_a_lower_error_is_better(run, monkeypatch):
    """By default, for the best epoch and for early stopping."""
    errors = iter([3.0, 2.0, 5.0, 4.0, 9.0, 9.0, 9.0])
    evaluate = trainer_module.Trainer.evaluate

    def told(self, split):
        row = evaluate(self, split)
        return row | {"val_error": next(errors)} if split == "val" and not self.is_done else row

    monkeypatch.setattr(trainer_module.Trainer, "evaluate", told)
    _, folder = run("run", "trainer.epochs=7", "trainer.patience=2")
    summary = json.loads((folder / "metrics.json").read_text())
    assert summary["best_epoch"] == 2 and summary["epochs"] == 4
    assert torch.load(folder / "checkpoints" / "best.pt", weights_only=True)["val_error"] == 2.0


@pytest.mark.parametrize("data", ["solubility", "qm9"])
def test_all_ways_to_run_a_step_agree(run, monkeypatch, data):
    """The last batch is short, so that graphs of padding are in captured ones."""
    make_step = trainer_module.make_step

    def recorded(model, optimizer, *args, recorder, **options):
        if recorder is not None:
            recorder.optimizer = optimizer
        return make_step(model, optimizer, *args, recorder=recorder, **options)

    monkeypatch.setattr(trainer_module, "Recorder", lambda device: HostRecorder(None))
    monkeypatch.setattr(trainer_module, "make_step", recorded)
    same = [f"data={data}", "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.05", "+optimizer.fused=true"]
    same += ["model.dropout=0"] if data == "solubility" else []
    _, plain = run("plain", *same, "backend=pyg")
    _, ours = run("ours", *same, "backend=auto")
    _, captured = run("captured", *same, "backend=pyg", "trainer.cuda_graph=true")
    for folder in (ours, captured):
        assert_close(history(folder), history(plain))
    # Batches that stay on the device have another order.
    kept = [run(name, *same, "backend=pyg", "trainer.resident=true", words)[1] for name, words in RESIDENT.items()]
    assert_close(history(kept[1]), history(kept[0]))


def test_layers_of_messages_are_accelerated(run, monkeypatch):
    models, accelerate = [], pyg_dfgnn.accelerate
    monkeypatch.setattr(pyg_dfgnn, "accelerate", lambda model: models.append(model) or accelerate(model))
    run("pyg", "data=qm9", "backend=pyg", "trainer.epochs=1")
    run("layers", "data=solubility", "backend=auto", "trainer.epochs=1")
    assert not models
    run("messages", "data=qm9", "backend=auto", "trainer.epochs=1")
    assert len(models) == 1


def ring(nodes=40, **_):
    """Values of nodes of a ring: the feature of the node and of its neighbours."""
    x = torch.randn(nodes, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(nodes)
    edge_index = torch.stack([torch.cat([ids, ids]), torch.cat([(ids + 1) % nodes, (ids - 1) % nodes])])
    data = Data(x=x, edge_index=edge_index, y=100 + 10 * (x[:, 0] + x.roll(1, 0)[:, 0] + x.roll(-1, 0)[:, 0]))
    for place, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = ids % 4 == place
    data.train_mask = data.train_mask | (ids % 4 == 3)
    return value_task("ring", dict.fromkeys(("train", "val", "test"), [data]), "m")


def test_values_of_nodes(tmp_path):
    words = ["data=cora", "data.task={_target_: tests.training.test_values.ring}", "model=sage", "device=cpu"]
    words += ["model.dropout=0", "trainer.epochs=150", "trainer.progress=false", "optimizer.lr=0.02"]
    error = train(train_config(*words, f"paths.run={tmp_path}"))
    # The mean of the training values is off by about 13.
    assert error < 6 and json.loads((tmp_path / "metrics.json").read_text())["unit"] == "m"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.monitor=val_accuracy", r"'trainer.monitor' needs null, val_error, val_loss or epoch for solubility"),
        ("returns=test_accuracy", r"'returns' needs null, or a loss or error of solubility.* \(got 'test_accuracy'\)"),
        ("model=continuous_filter", r"'model.edge_channels' needs 1, the distance \(got 3\)|'edge_channels' needs 1"),
    ],
)
def test_what_does_not_fit_values_is_refused(run, override, message):
    with pytest.raises(ValueError, match=message):
        run("run", override)


def test_errors_are_not_for_classes(tmp_path):
    from tests.training.conftest import TINY

    for override, name in (("trainer.monitor=val_error", "'trainer.monitor'"), ("returns=test_error", "'returns'")):
        with pytest.raises(ValueError, match=f"{name} needs null, .* PATTERN"):
            train(train_config(*TINY, override, f"paths.run={tmp_path}"))


def test_a_sweep_tells_errors_in_their_unit(run, capsys):
    for seed in (0, 1):
        _, folder = run(f"sweep/{seed}", f"seed={seed}", "trainer.epochs=1")
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(f"[data=solubility,seed={seed}]\n")
    sweep.main([str(folder.parent)])
    values = [json.loads((folder.parent / seed / "metrics.json").read_text())["test_error"] for seed in "01"]
    assert f"test mae {sum(values) / 2:.4g} +- " in capsys.readouterr().out
    assert "log10(mol/L)" in (folder.parent / "sweep.md").read_text() and (folder.parent / "sweep.png").is_file()
