"""Whole runs on tiny data: what they leave behind, stop early at, and go on from."""

import csv
import errno
import json
import re
import sys

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.training import checkpoint, report
from pyg_dfgnn.training import step as step_module
from pyg_dfgnn.training import trainer as trainer_module
from pyg_dfgnn.training.run import resume_command, train
from tests.capture.test_step import HostRecorder
from tests.configs.train import hydra_config, train_config
from tests.training.conftest import TINY

MODELS = ["gat", "gatv2", "agnn", "gt_small", "transformer_stack", "gcn", "sage", "sage_max", "gin", "resgated", "pna"]


def history(folder):
    """Rows of metrics.csv without the times."""
    with open(folder / "metrics.csv") as stream:
        return [{key: value for key, value in row.items() if key != "time_s"} for row in csv.DictReader(stream)]


def times(folder):
    with open(folder / "metrics.csv") as stream:
        return [row["time_s"] for row in csv.DictReader(stream)]


def parameters(folder, file="last.pt"):
    return torch.load(folder / "checkpoints" / file, weights_only=True)["model"]


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_close(rows, expected):
    """Histories of runs that differ by rounding."""
    for row, want in zip(rows, expected, strict=True):
        for key, value in want.items():
            assert float(row[key]) == pytest.approx(float(value), rel=1e-3), key


def interrupt_at(monkeypatch, count, interrupt):
    """Call `interrupt` at a loss by its number, of training or of validation; returns a list that grows by each."""
    cross_entropy, calls = step_module.cross_entropy, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            interrupt()
        return cross_entropy(*args, **kwargs)

    monkeypatch.setattr(step_module, "cross_entropy", interrupted)
    return calls


@pytest.mark.parametrize("model", MODELS)
def test_each_model_trains(run, model):
    metric, folder = run("run", f"model={model}", "backend=auto", "trainer.epochs=2")
    rows = history(folder)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(torch.tensor([float(value) for value in row.values()]).isfinite().all() for row in rows)
    assert 0 <= metric <= 1


LARGE = ["data=papers100M_like_small", "data.task.scale=2e-5", "data.task.max_degree=1e6", "data.task.dtype=float32"]


def trained_on_pieces(folder, *overrides):
    """History of two epochs on a graph from pieces, composed as train.py composes it."""
    same = ["trainer.precision=fp32", "trainer.epochs=2", "trainer.progress=false", "device=cpu", f"paths.run={folder}"]
    train(train_config(*LARGE, *same, *overrides))
    return history(folder)


@pytest.mark.parametrize("model", ["gatv2", "gcn"])
def test_a_graph_takes_the_place_of_edges(tmp_path, model):
    options = [f"model={model}", "model.readout=true", "model.dropout=0"]
    held = trained_on_pieces(tmp_path / "held", *options, "backend=auto")
    plain = trained_on_pieces(tmp_path / "plain", *options, "backend=pyg", "data.task.as_graph=false")
    assert_close(held, plain)
    summary = json.loads((tmp_path / "held" / "metrics.json").read_text())
    assert summary["task"] == "ogbn-papers100M-like" and summary["peak_memory_gb"] is None


def test_a_graph_in_place_of_edges_is_not_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    with pytest.raises(ValueError, match="'trainer.sampler' needs null: the edges of the task are a Graph"):
        trained_on_pieces(tmp_path, "model=gatv2", "trainer.sampler={num_neighbors: [2], batch_size: 4}")


def test_backends_give_the_same_run(run):
    (_, pyg), (_, ours) = (run(backend, f"backend={backend}", "trainer.epochs=1") for backend in ("pyg", "auto"))
    assert_close(history(ours), history(pyg))


@pytest.mark.parametrize("backend", ["pyg", "auto"])
def test_linear_layers_have_kernels_where_they_are_asked_for(run, monkeypatch, backend):
    kinds, forward = set(), step_module.Objective.forward

    def record(self, model, batch):
        layers = [layer for layer in model.modules() if isinstance(layer, (torch.nn.Linear, pyg.Linear))]
        kinds.update(type(layer).__module__.partition(".")[0] for layer in layers)
        return forward(self, model, batch)

    monkeypatch.setattr(step_module.Objective, "forward", record)
    for folder, linear, room in (("plain", "torch", "torch_geometric"), ("kernels", "kernels", "pyg_dfgnn")):
        kinds.clear()
        run(folder, f"backend={backend}", "trainer.epochs=1", f"++backend.settings.linear={linear}")
        assert kinds == {room}


def test_captured_batches_of_all_graphs(run, monkeypatch):
    """They hold the graphs that are there, however large a batch may be."""
    capacities, make = [], trainer_module.Capacity.of
    monkeypatch.setattr(trainer_module.Capacity, "of", lambda *sizes: capacities.append(make(*sizes)) or capacities[-1])
    monkeypatch.setattr(trainer_module, "Recorder", lambda device: HostRecorder(None))
    same = ["backend=pyg", "trainer.loader.batch_size=1000", "trainer.epochs=2", "+optimizer.fused=true"]
    _, eager = run("eager", *same)
    assert not capacities
    _, captured = run("captured", *same, "trainer.cuda_graph=true")
    assert [capacity.num_graphs for capacity in capacities] == [6]
    assert_close(history(captured), history(eager))


def test_edge_features_reach_the_model_that_takes_them(tmp_path, monkeypatch):
    """Batches from the host and from the device, and captured ones, and those of no other model."""
    seen, forward = [], step_module.Objective.forward

    def record(self, model, batch):
        seen.append(batch.get("edge_attr"))
        return forward(self, model, batch)

    monkeypatch.setattr(step_module.Objective, "forward", record)
    monkeypatch.setattr(trainer_module, "Recorder", lambda device: HostRecorder(None))

    def run(name, *overrides):
        sizes = [f"data.task.num_{split}=4" for split in ("train", "val", "test")]
        same = ["data=mnist_superpixels_like_small", *sizes, "trainer.epochs=1", "trainer.progress=false", "device=cpu"]
        fixed = ["model.dropout=0", "trainer.loader.batch_size=2", f"paths.run={tmp_path / name}"]
        seen.clear()
        train(train_config(*same, *fixed, *overrides))
        return history(tmp_path / name)

    plain = run("plain", "model=gine", "backend=pyg")
    assert all(features.dim() == 2 and features.size(1) == 1 for features in seen)
    assert_close(run("ours", "model=gine", "backend=auto"), plain)
    assert_close(run("resident", "model=gine", "backend=auto", "trainer.resident=true"), plain)
    captured = run("captured", "model=gine", "backend=pyg", "trainer.cuda_graph=true", "+optimizer.fused=true")
    assert_close(captured, plain)
    run("gin", "model=gin", "backend=pyg")
    assert seen and not any(seen)


def test_a_model_of_edge_features_needs_some(run):
    with pytest.raises(ValueError, match="'model' needs one that takes no edge features for PATTERN .*got GINE"):
        run("run", "model=gine")


def test_a_folder_of_data_that_is_named_twice_is_searched_once(run, caplog):
    caplog.set_level("INFO")
    run("run", "trainer.epochs=1", "paths.data=[data,data,more]")
    assert "paths: data=['data', 'more']" in caplog.text


def test_loss_falls(run):
    _, folder = run("run", "trainer.epochs=30", "optimizer.lr=0.01")
    losses = [float(row["train_loss"]) for row in history(folder)]
    assert losses[-1] < 0.9 * losses[0]


def test_files_of_a_run(run, drawn, caplog):
    caplog.set_level("INFO")
    metric, folder = run()
    summary = json.loads((folder / "metrics.json").read_text())
    assert summary["test_accuracy"] == metric
    assert summary["epochs"] == 4 and summary["task"] == "PATTERN (generated)" and summary["seed"] == 0
    rows = history(folder)
    assert max(rows, key=lambda row: float(row["val_accuracy"]))["epoch"] == str(summary["best_epoch"])
    assert float(rows[summary["best_epoch"] - 1]["val_accuracy"]) == pytest.approx(summary["val_accuracy"])
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for part in (
        f"test mean accuracy per class: {100 * metric:.2f} %",
        str(folder / "metrics.json"),
        str(folder / "metrics.csv"),
        str(folder / "curves.png"),
        "hidden_channels=32",
        "epoch 4/4",
    ):
        assert part in caplog.text


@pytest.mark.fault("a full disk costs no results of a training run")
def test_a_plot_that_fails_costs_no_results(run, drawn, monkeypatch, caplog):
    caplog.set_level("INFO")

    def full(figure, path, **_):
        assert (path.parent / "metrics.json").is_file()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    metric, folder = run("run", "trainer.epochs=2")
    assert json.loads((folder / "metrics.json").read_text())["test_accuracy"] == metric
    assert len(history(folder)) == 2 and "plots: none" in caplog.text and "No space left on device" in caplog.text


@pytest.mark.fault("a full disk costs no results of a training run")
def test_a_checkpoint_that_fails_costs_no_results(run, monkeypatch, caplog):
    """torch reports a full disk as a RuntimeError."""

    def full(_, path):
        path.write_bytes(b"half a file")
        raise RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    metric, folder = run("run", "trainer.epochs=2")
    assert json.loads((folder / "metrics.json").read_text())["test_accuracy"] == metric
    assert list((folder / "checkpoints").iterdir()) == []
    last = folder / "checkpoints" / "last.pt"
    assert f"epoch 2: the run cannot be resumed from here: {last} cannot be written: Pytorch" in caplog.text


@pytest.mark.parametrize("value", ["nan", "inf", "1e30"])
def test_a_loss_that_diverges_is_told_when_it_does_and_at_the_end(run, monkeypatch, caplog, value):
    caplog.set_level("INFO")
    cross_entropy, calls = step_module.cross_entropy, []

    def diverged(*args, **kwargs):
        calls.append(1)
        # 3 training and 2 validation batches per epoch: in epoch 2, once.
        return cross_entropy(*args, **kwargs) + (float(value) if len(calls) == 7 else 0.0)

    monkeypatch.setattr(step_module, "cross_entropy", diverged)
    _, folder = run("run", "trainer.epochs=4", "trainer.log_every=100")
    assert json.loads((folder / "metrics.json").read_text())["diverged_epoch"] == 2
    told = [record.message for record in caplog.records if "diverged" in record.message]
    assert len(told) == 2 and told[0].startswith("epoch 2: the loss has diverged: train_loss ")
    assert told[1] == "the loss has diverged in epoch 2; a lower optimizer.lr may help"


def test_a_whole_graph_that_diverges(tmp_path, caplog):
    trained_on_pieces(tmp_path, "model=gatv2", "optimizer.lr=1e20")
    assert json.loads((tmp_path / "metrics.json").read_text())["diverged_epoch"] == 1
    assert "epoch 1: the loss has diverged" in caplog.text


def test_a_run_that_learns_has_not_diverged(run, caplog):
    _, folder = run("run", "trainer.epochs=1")
    assert json.loads((folder / "metrics.json").read_text())["diverged_epoch"] is None
    assert "diverged" not in caplog.text


def test_a_curve_of_one_epoch_shows_its_point(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    row = {"train_loss": 1.0, "train_accuracy": 0.5, "val_loss": 1.0, "val_accuracy": 0.5}
    for epochs in (1, 2):
        report.plot_curves(tmp_path, "", [{"epoch": epoch + 1, **row} for epoch in range(epochs)], 1)
    markers = [{line.get_marker() for axes in figure.axes for line in axes.lines[:2]} for figure in figures]
    assert markers == [{"o"}, {"None"}]


@pytest.mark.parametrize("returns", ["val_loss", "test_loss"])
def test_returned_metric(run, returns):
    metric, folder = run("run", f"returns={returns}")
    assert metric == json.loads((folder / "metrics.json").read_text())[returns]


def test_seed_decides_a_run(run):
    (_, first), (_, again), (_, other) = (
        run(folder, f"seed={seed}") for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert history(first) == history(again) != history(other)
    assert_equal(parameters(first), parameters(again))


@pytest.mark.fault("an interrupted training run goes on with equal losses")
@pytest.mark.parametrize("scheduler", ["plateau", "cosine", "constant"])
@pytest.mark.parametrize("model", ["gat", "gt_small"])
def test_resume_after_an_interrupt_equals_an_unstopped_run(run, monkeypatch, model, scheduler):
    overrides = [f"model={model}", f"scheduler={scheduler}", "trainer.checkpoint_every=100"]
    _, whole = run("whole", *overrides)
    # 3 training and 2 validation batches per epoch: in the middle of training in epoch 3.
    interrupt_at(monkeypatch, 12, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run("stopped", *overrides)
    monkeypatch.undo()
    stopped = whole.parent / "stopped"
    assert torch.load(stopped / "checkpoints" / "last.pt", weights_only=True)["epoch"] == 2
    # What is known by then lies there too.
    assert history(stopped) == history(whole)[:2] and (stopped / "curves.png").is_file()

    torch.manual_seed(99)
    _, resumed = run("resumed", *overrides, f"resume={stopped}")
    assert history(resumed) == history(whole)
    for file in ("last.pt", "best.pt"):
        assert_equal(parameters(resumed, file), parameters(whole, file))
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (whole, resumed)]
    assert metrics[0]["test_loss"] == metrics[1]["test_loss"]


def test_resume_may_monitor_something_else(run):
    _, first = run("first", "trainer.epochs=1", "scheduler=constant")
    _, other = run("other", "trainer.epochs=3", "scheduler=constant", "trainer.monitor=val_loss", f"resume={first}")
    best = json.loads((other / "metrics.json").read_text())["best_epoch"]
    losses = [float(row["val_loss"]) for row in history(other)]
    assert len(losses) == 3 and losses[best - 1] == min(losses)


def test_resume_trains_longer(run):
    _, whole = run("whole", "scheduler=constant", "trainer.epochs=5")
    _, short = run("short", "scheduler=constant", "trainer.epochs=3")
    _, longer = run("longer", "scheduler=constant", "trainer.epochs=5", f"resume={short / 'checkpoints' / 'last.pt'}")
    assert history(longer) == history(whole)


def test_early_stopping(run, caplog):
    caplog.set_level("INFO")
    # Without a step nothing gets better after the first epoch.
    _, folder = run("run", "model=agnn", "optimizer.lr=0", "trainer.epochs=20", "trainer.patience=3")
    summary = json.loads((folder / "metrics.json").read_text())
    assert summary["best_epoch"] == 1 and summary["epochs"] == 4
    assert "stopped after epoch 4 of 20: no better one for 3" in caplog.text


def test_time_limit(run, monkeypatch, caplog):
    caplog.set_level("INFO")
    clock = iter(range(1000))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(next(clock)))
    # A clock that counts how often it is read, a few times around an epoch too; the limit falls into the fifth.
    _, folder = run("run", "trainer.epochs=1")
    per_epoch = float(times(folder)[0])
    limit = 4.5 * (per_epoch + 2)
    _, folder = run("limited", "trainer.epochs=20", f"trainer.max_time_s={limit}")
    assert len(history(folder)) == 4 and "stopped after epoch 4 of 20: max_time_s=" in caplog.text
    left = [60 * int(minutes) + int(seconds) for minutes, seconds in re.findall(r"(\d+):(\d+) left", caplog.text)]
    # The time that the limit leaves, not that of all epochs.
    assert len(left) == 4 and limit > left[0] > left[1] > left[2] > left[3]
    _, folder = run("none", "trainer.epochs=20", "trainer.max_time_s=0")
    assert len(history(folder)) == 1


def test_best_by_loss(run):
    _, folder = run("run", "trainer.monitor=val_loss", "optimizer.lr=0.05", "trainer.epochs=6")
    summary = json.loads((folder / "metrics.json").read_text())
    assert min(history(folder), key=lambda row: float(row["val_loss"]))["epoch"] == str(summary["best_epoch"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(run, precision):
    _, folder = run("run", f"trainer.precision={precision}", "trainer.epochs=2")
    _, full = run("full", "trainer.epochs=2")
    loss, expected = (float(history(each)[0]["train_loss"]) for each in (folder, full))
    assert loss == pytest.approx(expected, rel=0.05) and loss != expected


def test_whole_graph(tmp_path):
    from tests.datasets.test_planetoid import write_raw

    write_raw(tmp_path / "Cora" / "raw")
    overrides = ["data=cora", "backend=pyg", "device=cpu", "trainer.epochs=6", "trainer.progress=false"]
    overrides += [f"paths.data=[{tmp_path}]", f"paths.cache={tmp_path / 'cache'}"]
    for folder in ("a", "b"):
        train(train_config(*overrides, f"paths.run={tmp_path / folder}"))
    # A checkpoint in the middle, gone on from.
    train(train_config(*overrides, f"paths.run={tmp_path / 'half'}", "trainer.epochs=3"))
    resumed = [f"resume={tmp_path / 'half'}", f"paths.run={tmp_path / 'resumed'}"]
    train(train_config(*overrides, *resumed))
    assert history(tmp_path / "a") == history(tmp_path / "b") == history(tmp_path / "resumed")
    summary = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert (
        (summary["task"], summary["model"]) == ("Cora", "GAT")
        and summary["metric"] == "accuracy"
        and summary["synthetic"] is None
    )


def test_cora_needs_no_more_than_its_name(tmp_path):
    overrides = ["data=cora", "device=cpu", "trainer.epochs=40", "trainer.progress=false", f"paths.run={tmp_path}"]
    overrides += [f"paths.data={list(SEARCH)}", f"paths.cache={tmp_path / 'cache'}", "data.task.download=false"]
    cfg = train_config(*overrides)
    try:
        assert train(cfg) > 0.7
    except (FileNotFoundError, ModuleNotFoundError) as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ["trainer.precision=fp8"],
            ValueError,
            r"'trainer.precision' needs one of 'fp32', 'bf16', 'fp16' \(got 'fp8'\)",
        ),
        (
            ["trainer.monitor=loss"],
            ValueError,
            r"'trainer.monitor' needs one of None, 'val_accuracy', .*, 'epoch' \(got",
        ),
        (["trainer.max_time_s=-1"], ValueError, r"'trainer.max_time_s' needs a value >= 0.0 \(got -1\)"),
        (["trainer.epochs=0"], ValueError, r"'trainer.epochs' needs a value >= 1 \(got 0\)"),
        (
            ["trainer.loader=null"],
            ValueError,
            r"'trainer.loader' needs a batch_size: the task is many graphs \(got None\)",
        ),
        (["device=gpu"], ValueError, r"'device' needs auto, cpu, cuda or cuda:<index> \(got 'gpu'\)"),
        (["device=cuda:99"], ValueError, r"'device' needs a GPU that is there: \d+ found \(got 'cuda:99'\)"),
        (["seed=abc"], TypeError, r"'seed' needs an integer \(got str 'abc'\)"),
        (["trainer.loader.batch_size=0"], ValueError, r"'trainer.loader.batch_size' needs a value >= 1 \(got 0\)"),
        (["returns=speed"], ValueError, r"'returns' needs one of None, 'val_loss'.* \(got 'speed'\)"),
        (["resume=nowhere"], FileNotFoundError, r"'resume' needs a run folder .* \(got nowhere\)"),
        (["+data.task.p=2"], ValueError, r"'data.task.p' needs a value in \[0.0, 1.0\] \(got 2\)"),
        (["model.heads=5"], ValueError, r"'model.hidden_channels' needs a multiple of heads=5 \(got 32\)"),
        (["model.norm=none"], ValueError, r"'model.norm' needs one of 'batch', 'layer' \(got 'none'\)"),
        (
            ["backend=auto", "backend.settings.fallback=no"],
            ValueError,
            r"'backend.settings.fallback' needs one of 'log', 'error'",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_configs(run, overrides, error, message):
    with pytest.raises(error, match=message):
        run("run", *overrides)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("trainer.epochs=2.5", TypeError, r"'trainer.epochs' needs an integer \(got float 2.5\)"),
        ("trainer.patience=2.5", TypeError, r"'trainer.patience' needs an integer \(got float 2.5\)"),
        ("trainer.loader.batch_size=2.5", TypeError, r"'trainer.loader.batch_size' needs an integer \(got float 2.5\)"),
        ("trainer.resident=abc", TypeError, r"'trainer.resident' needs True or False \(got str 'abc'\)"),
        ("trainer.progress=maybe", TypeError, r"'trainer.progress' needs True or False \(got str 'maybe'\)"),
        ("seed=1.5", TypeError, r"'seed' needs an integer \(got float 1.5\)"),
        ("model.heads=4.5", TypeError, r"'model.heads' needs an integer \(got float 4.5\)"),
        ("optimizer.lr=abc", TypeError, r"'optimizer' needs arguments that Adam takes \(got .*'lr': 'abc'.*\): "),
        ("optimizer.lr=-1", ValueError, r"'optimizer' needs .* Adam takes \(got .*'lr': -1.*\): Invalid learning rate"),
        ("+scheduler.steps=2", TypeError, r"'scheduler' needs .* takes \(got .*'steps': 2.*\): .*'steps'"),
        ("scheduler.T_max=abc", TypeError, r"'scheduler' needs .* CosineAnnealingLR takes \(got .*'abc'.*\): "),
        ("scheduler.T_max=0", ValueError, r"'scheduler' needs .* CosineAnnealingLR takes \(got .*0.*\): "),
        ("trainer.loader.num_workers=-1", ValueError, r"'trainer.loader.num_workers' needs a value >= 0 \(got -1\)"),
        ("+trainer.loader.drop_last=true", ValueError, r"'trainer.loader' needs no 'drop_last': an .* \(got True\)"),
        ("+trainer.loader.shuffle=false", ValueError, r"'trainer.loader' needs no 'shuffle': an .* \(got False\)"),
        ("+trainer.foo=1", ValueError, r"'trainer' needs options among epochs, .*, wandb \(got foo\)"),
        ("seed=99999999999999999999", ValueError, r"'seed' needs a value in \[0, \d+\] \(got 9{20}\)"),
        ("backend=auto_graph", ValueError, r"'device' needs a CUDA device for steps in a CUDA graph \(got cpu\)"),
        ("+trainer.loader.foo=1", TypeError, r"'trainer.loader' needs arguments that PyG's DataLoader takes .*'foo'"),
        (
            "trainer.sampler={num_neighbors: [2], batch_size: 4}",
            ValueError,
            "'trainer.sampler' needs pyg-lib or torch_sparse",
        ),
        ("+backend.settings.schedule=rows", ValueError, r"'backend.settings.schedule' needs one of .* \(got 'rows'\)"),
        ("+backend.settings.foo=1", ValueError, r"'backend.settings' needs .* schedule, .*, profile \(got foo\)"),
        ("+foo=3", ValueError, r"'config' needs options among model, .*, returns \(got foo\)"),
        ("+data.foo=1", ValueError, r"'data' needs options among task, reorder \(got foo\)"),
        ("+backend.foo=1", ValueError, r"'backend' needs options among convs, settings \(got foo\)"),
        ("+paths.foo=1", ValueError, r"'paths' needs options among data, cache, run \(got foo\)"),
        ("+model.width=3", TypeError, r"'model' needs arguments that GraphTransformer takes \(got .*'width': 3.*\): "),
        ("device=mps", ValueError, r"'device' needs auto, cpu, cuda or cuda:<index> \(got 'mps'\)"),
        ("backend.convs=torch_geometric", ValueError, r"'convs' needs a namespace with Tr.* \(got torch_geometric\)"),
        ("backend.convs=nowhere", ValueError, r"'backend.convs' needs a module.* \(got 'nowhere'\)"),
    ],
)
def test_wrong_values_do_not_wait_for_the_data(run, monkeypatch, override, error, message):
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(error, match=message):
        run("run", override, "+data.task.refused=here")


def test_what_cannot_be_captured_does_not_wait_for_the_data(run, monkeypatch):
    monkeypatch.setattr(trainer_module, "Recorder", lambda device: HostRecorder(None))
    captured = ["trainer.cuda_graph=true", "+data.task.refused=here"]
    with pytest.raises(ValueError, match="'trainer.precision' needs fp32 or bf16 with cuda_graph"):
        run("run", *captured, "trainer.precision=fp16")
    with pytest.raises(ValueError, match="'optimizer' needs the option 'capturable'"):
        run("run", *captured, f"optimizer._target_={__name__}.Scaled")


class Scaled(torch.optim.SGD):
    """Takes for granted that there are gradients."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad.div_(norm)
        return super().step(closure)


def test_an_optimizer_of_the_user_makes_no_step_before_there_are_gradients(run):
    run("run", "trainer.epochs=1", f"optimizer._target_={__name__}.Scaled")


@pytest.mark.fault("a checkpoint is damaged")
def test_only_a_whole_checkpoint_is_resumed(run, tmp_path):
    _, folder = run("run", "trainer.epochs=1")
    last = (folder / "checkpoints" / "last.pt").read_bytes()
    for name, content in (("text", b"# Text"), ("short", last[: len(last) // 2]), ("keys", b"h\x01.")):
        (tmp_path / name).write_bytes(content)
    wrong = [(tmp_path / name, "is no") for name in ("text", "short", "keys")]
    for file, why in (*wrong, (folder / "checkpoints" / "best.pt", "lacks 'optimizer'")):
        with pytest.raises(ValueError, match=rf"needs a run folder or .*last.pt \(got {file}, which {why}"):
            run("other", f"resume={file}")


def test_resumed_run_says_where_it_is(run, caplog):
    caplog.set_level("INFO")
    _, folder = run("run", "trainer.epochs=2")
    with pytest.raises(ValueError, match=r"needs 2 as in the checkpoint \(got 3\)\. Go on with scheduler\.T_max=2$"):
        run("run", "trainer.epochs=3", f"resume={folder}")
    run("run", "trainer.epochs=3", "scheduler.T_max=2", f"resume={folder}")
    assert "resumed after epoch 2 of 3\n" in caplog.text and "nothing is left" not in caplog.text
    run("run", "trainer.epochs=3", "scheduler.T_max=2", f"resume={folder}")
    assert "resumed after epoch 3 of 3: nothing is left to train\n" in caplog.text


def test_overrides_of_a_checkpoint(run):
    _, folder = run("run", "trainer.epochs=1", "+optimizer.eps=1e-7", "optimizer.weight_decay=0.1")
    words = r"optimizer.weight_decay=0.1 \+optimizer.eps=1e-07 '~optimizer.amsgrad'$"
    with pytest.raises(ValueError, match=f"Go on with {words}"):
        run("other", "trainer.epochs=1", "+optimizer.amsgrad=true", f"resume={folder}")


def test_a_run_of_other_options_is_told_the_words_of_the_run_that_it_resumes(run):
    _, folder = run("run", "trainer.epochs=2")
    (folder / ".hydra").mkdir()
    OmegaConf.save(["trainer.epochs=2", "resume=before"], folder / ".hydra" / "overrides.yaml")
    few = r"\(got 3\)\. Go on with scheduler\.T_max=2, or with the words of that run: trainer\.epochs=2$"
    with pytest.raises(ValueError, match=few):
        run("other", "trainer.epochs=3", f"resume={folder}")
    many = r"^[^;]*(; '[^;]*){4}; and \d+ more\. Go on with the words of that run: trainer\.epochs=2$"
    with pytest.raises(ValueError, match=many):
        run("other", "trainer.epochs=2", "model=gat", "optimizer=adam_l2", f"resume={folder}")
    OmegaConf.save([], folder / ".hydra" / "overrides.yaml")
    with pytest.raises(ValueError, match="the words of that run: none$"):
        run("other", "trainer.epochs=3", f"resume={folder}")


def test_composed_config_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = train_config(*TINY, "trainer.epochs=1")
    train(cfg)
    (folder,) = (tmp_path / "outputs").iterdir()
    assert (folder / "metrics.json").is_file()


def test_command_of_a_resumed_run(tmp_path, monkeypatch):
    job = HydraConfig.instance()
    monkeypatch.setattr(job, "cfg", None)
    assert resume_command(tmp_path) == f"resume={tmp_path}"
    overrides = ["seed=3", "resume=before", "trainer.sampler={num_neighbors: [4], batch_size: 2}"]
    job.set_config(hydra_config(*overrides, "hydra.job.chdir=false", return_hydra_config=True))
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=3,4"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-O", *sys.argv])
    arguments = (
        f"hydra.job.chdir=false seed=3 'trainer.sampler={{num_neighbors: [4], batch_size: 2}}' resume={tmp_path}"
    )
    assert resume_command(tmp_path) == f"python -O train.py {arguments}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resume_command(tmp_path) == arguments


def test_resume_needs_the_same_run(run):
    _, folder = run("run", "trainer.epochs=1", "scheduler=constant")
    with pytest.raises(
        ValueError, match=r"'model.heads' needs 4 as in the checkpoint \(got 2\).*'seed' needs 0 .*got 7"
    ):
        run("other", "model.heads=2", "seed=7", "scheduler=constant", f"resume={folder}")
