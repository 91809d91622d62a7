"""Runs on a GPU with the fused kernels and nothing else."""

import pytest

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


@pytest.mark.parametrize("model", ["gat", "gt_small"])
def test_resume_equals_an_unstopped_run(run, model):
    same = [f"model={model}", "scheduler=constant", *FUSED]
    _, whole = run("whole", *same)
    _, half = run("half", *same, "trainer.epochs=2")
    _, resumed = run("resumed", *same, f"resume={half}")
    assert history(resumed) == history(whole)
    assert_equal(parameters(resumed), parameters(whole))
