"""Where batches come from, and what is refused."""

import json
import os
import signal

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Batch

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.training import loaders
from pyg_dfgnn.training.loaders import Seeds, graph_batches, sampled, whole_graph
from pyg_dfgnn.training.metrics import IGNORED
from pyg_dfgnn.training.run import train
from pyg_dfgnn.training.trainer import Options
from tests.capture.test_step import graph
from tests.configs.train import train_config
from tests.datasets.test_planetoid import write_raw
from tests.training.test_run import assert_close, assert_equal, history, interrupt_at, parameters

CPU = torch.device("cpu")


def task_of(count=7):
    splits = {"train": [graph(6 + i, i) for i in range(count)], "val": [graph(5, 90), graph(8, 91)]}
    return Task("test", splits, 5, 3)


@pytest.mark.parametrize("resident", [False, True], ids=["host", "resident"])
def test_each_graph_once_per_epoch(resident):
    task, order = task_of(), torch.Generator().manual_seed(0)
    options = {"batch_size": 3, "num_workers": 0}
    made = graph_batches(task, CPU, options, order, Group(), resident=resident, prefetch=True)
    orders = []
    for _ in range(2):
        assert len(made["train"]) == 3
        batches = list(made["train"])
        assert [batch.num_graphs for batch in batches] == [3, 3, 1]
        seen = [len(part) for batch in batches for part in batch.x.split(batch.ptr.diff().tolist())]
        assert sorted(seen) == [graph.num_nodes for graph in task.splits["train"]]
        orders.append(seen)
    assert orders[0] != orders[1] and made["train"].host_s > 0
    (val,) = made["val"]
    want = Batch.from_data_list(task.splits["val"])
    assert torch.equal(val.x, want.x) and torch.equal(val.y, want.y) and torch.equal(val.ptr, want.ptr)


def test_whole_graph_has_the_labels_of_one_split():
    data = graph(12, 0)
    for position, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = torch.arange(12) % 3 == position
    found = whole_graph(Task("test", {split: [data] for split in ("train", "val", "test")}, 5, 3), CPU)
    for position, split in enumerate(("train", "val", "test")):
        (view,) = found[split]
        counted = torch.arange(12) % 3 == position
        assert torch.equal(view.y[counted], data.y[counted]) and (view.y[~counted] == IGNORED).all()
        assert view.x is found["train"][0].x and view.edge_index is found["train"][0].edge_index
    assert (data.y != IGNORED).all()


def test_sampling_needs_a_library(monkeypatch):
    data = graph(12, 0)
    data.train_mask = torch.ones(12, dtype=torch.bool)
    for name in ("WITH_PYG_LIB", "WITH_TORCH_SPARSE"):
        monkeypatch.setattr(torch_geometric.typing, name, False)
    with pytest.raises(ValueError, match="'trainer.sampler' needs pyg-lib or torch_sparse"):
        sampled(data, CPU, {"num_neighbors": [2], "batch_size": 4}, torch.Generator(), Group())


def test_sampling_takes_the_training_nodes(monkeypatch):
    data = graph(12, 0)
    data.train_mask = torch.arange(12) < 8
    given = {}
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    monkeypatch.setattr(loaders, "NeighborLoader", lambda *args, **kwargs: given.update(kwargs, data=args[0]))
    order = torch.Generator()
    sampled(data, CPU, {"num_neighbors": [2], "batch_size": 4}, order, Group())
    assert torch.equal(given["input_nodes"], torch.arange(8)) and given["generator"] is order and given["shuffle"]
    assert given["num_neighbors"] == [2] and given["batch_size"] == 4 and not given["pin_memory"]


def test_only_seeds_keep_their_labels():
    batch = graph(12, 0)
    batch.input_id, batch.batch_size, labels = torch.arange(4), 4, batch.y.clone()
    found = Seeds(CPU, 8)(batch)
    assert torch.equal(found.y[:4], labels[:4]) and (found.y[4:] == IGNORED).all()


def test_resident_run_resumes(run):
    same = ["trainer.resident=true", "scheduler=constant"]
    _, whole = run("whole", *same)
    _, half = run("half", *same, "trainer.epochs=2")
    _, resumed = run("resumed", *same, f"resume={half}")
    assert history(resumed) == history(whole)
    assert_equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("backend", ["pyg_compile", "auto"])
def test_compiled_run_equals_the_eager_one(run, monkeypatch, backend):
    compile = torch.compile
    seen = []

    def traced(model, *, fullgraph):
        # All of what is traced, and none of the minutes of code generation.
        seen.append(fullgraph)
        return compile(model, fullgraph=fullgraph, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    same = ["trainer.epochs=2", "model.pe_size=0", "model.layers=1"]
    _, eager = run("eager", *same)
    _, compiled = run("compiled", *same, f"backend={backend}", "trainer.compile=true")
    assert seen == [True]
    assert_close(history(compiled), history(eager))


def test_environment_of_a_run(run, caplog):
    caplog.set_level("INFO")
    _, folder = run("run", "trainer.epochs=2")
    found = json.loads((folder / "environment.json").read_text())
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert {"python", "command", "commit", "device", "torch_geometric", "pyg_dfgnn"} <= found.keys()
    assert "hidden_channels: 32" in (folder / "config.yaml").read_text()
    assert " left" in caplog.text
    assert json.loads((folder / "metrics.json").read_text())["prepare_time_s"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backend=auto_graph"], r"'device' needs a CUDA device for steps in a CUDA graph \(got cpu\)"),
        (
            ["trainer.sampler={num_neighbors: [2], batch_size: 4}"],
            "'trainer.sampler' needs null: the task is many graphs",
        ),
    ],
    ids=["cuda_graph", "sampler"],
)
def test_refused(run, monkeypatch, overrides, message):
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    with pytest.raises(ValueError, match=message):
        run("run", *overrides)


def test_a_request_to_end_interrupts_an_epoch(run, tmp_path, monkeypatch):
    calls = interrupt_at(monkeypatch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run("stopped", "trainer.checkpoint_every=100")
    monkeypatch.undo()
    assert len(calls) == 7 and len(history(tmp_path / "stopped")) == 1
    _, resumed = run("resumed", f"resume={tmp_path / 'stopped'}")
    assert len(history(resumed)) == 4


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 4}, {"num_neighbors": [2]}, {"num_neighbors": [], "batch_size": 4}]
)
def test_sampler_without_its_numbers(options):
    with pytest.raises((TypeError, ValueError), match=r"'sampler\.(num_neighbors|batch_size)' needs .* \(got "):
        Options(epochs=1, sampler=options)


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_interrupt_in_the_middle_of_an_epoch(run, monkeypatch, loader):
    same = {"resident": ["trainer.resident=true"], "workers": ["trainer.loader.num_workers=1"]}[loader]
    same += ["scheduler=cosine", "model.dropout=0.3", "trainer.checkpoint_every=100"]
    _, whole = run("whole", *same)
    calls = interrupt_at(monkeypatch, 7, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run("stopped", *same)
    monkeypatch.undo()
    assert len(calls) == 7 and torch.load(whole.parent / "stopped" / "checkpoints" / "last.pt")["epoch"] == 1
    _, resumed = run("resumed", *same, f"resume={whole.parent / 'stopped'}")
    assert history(resumed) == history(whole)
    assert_equal(parameters(resumed), parameters(whole))


@pytest.mark.fault("an interrupted training run goes on with equal losses")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["keyboard", "scheduler"])
def test_short_epochs_are_finished_before_an_interrupt(tmp_path, monkeypatch, number):
    write_raw(tmp_path / "Cora" / "raw")
    same = ["data=cora", "model=gat", "backend=pyg", "device=cpu", "trainer.epochs=6", "trainer.progress=false"]
    same += [f"paths.data=[{tmp_path}]", f"paths.cache={tmp_path / 'cache'}"]

    def go(folder, *overrides):
        train(train_config(*same, f"paths.run={tmp_path / folder}", *overrides))
        return tmp_path / folder

    whole = go("whole")
    # In training of the third epoch: two losses per epoch.
    interrupt_at(monkeypatch, 5, lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        go("stopped")
    monkeypatch.undo()
    assert torch.load(tmp_path / "stopped" / "checkpoints" / "last.pt")["epoch"] == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = go("resumed", f"resume={tmp_path / 'stopped'}")
    assert history(resumed) == history(whole)
    for file in ("last.pt", "best.pt"):
        assert_equal(parameters(resumed, file), parameters(whole, file))
