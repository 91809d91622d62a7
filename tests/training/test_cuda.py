"""Runs on a GPU with the fused kernels and nothing else."""

import pytest

from pyg_dfgnn.training.run import train
from tests.configs.train import train_config
from tests.training.test_run import MODELS, assert_equal, history, parameters

pytestmark = pytest.mark.cuda
FUSED = ["device=cuda", "backend=auto", "backend.settings.fallback=error"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_each_model_trains(run, model, precision):
    _, folder = run("run", f"model={model}", *FUSED, f"trainer.precision={precision}", "trainer.epochs=2")
    assert len(history(folder)) == 2


@pytest.mark.parametrize("model", ["gt_small", "transformer_stack"])
def test_first_epoch_equals_the_cpu(run, model):
    # One batch and no encoding, whose random signs differ between devices.
    same = [f"model={model}", "trainer.epochs=1", "trainer.loader.batch_size=6"]
    same += ["model.pe_size=0"] if model == "gt_small" else []
    (_, cpu), (_, cuda) = run("cpu", *same), run("cuda", *same, *FUSED)
    for key, value in history(cpu)[0].items():
        assert float(history(cuda)[0][key]) == pytest.approx(float(value), rel=1e-2), key


@pytest.mark.parametrize("data", ["solubility", "qm9"])
def test_molecules_are_those_of_pyg_eager_and_captured(tmp_path, data):
    """Batches are new in each step; values of padding do not count."""
    same = [f"data={data}", "data.task.source=generated", "data.task.num_graphs=200", "device=cuda", "trainer.epochs=3"]
    same += ["trainer.loader.batch_size=16", "trainer.progress=false", "trainer.resident=true", "model.layers=2"]
    same += ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.01"]
    same += ["model.dropout=0"] if data == "solubility" else []
    for backend in ("pyg", "auto", "auto_graph"):
        train(train_config(*same, f"backend={backend}", f"paths.run={tmp_path / backend}"))
    for backend in ("auto", "auto_graph"):
        for row, want in zip(history(tmp_path / backend), history(tmp_path / "pyg"), strict=True):
            assert float(row["val_error"]) == pytest.approx(float(want["val_error"]), rel=1e-2), backend
            assert float(row["train_loss"]) == pytest.approx(float(want["train_loss"]), rel=1e-2), backend


@pytest.mark.parametrize("model", ["gat", "gt_small"])
def test_resume_equals_an_unstopped_run(run, model):
    same = [f"model={model}", "scheduler=constant", *FUSED]
    _, whole = run("whole", *same)
    _, half = run("half", *same, "trainer.epochs=2")
    _, resumed = run("resumed", *same, f"resume={half}")
    assert history(resumed) == history(whole)
    assert_equal(parameters(resumed), parameters(whole))
