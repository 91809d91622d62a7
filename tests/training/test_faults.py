"""Faults of a training run: it is killed while it trains or writes, or the disk is full."""

import os
import resource
import signal
from contextlib import contextmanager

import pytest
import torch

from pyg_dfgnn.training import checkpoint
from pyg_dfgnn.training import step as step_module
from pyg_dfgnn.training.run import train
from tests.processes import CONTEXT
from tests.training.test_run import assert_equal, history, parameters


def _train_until(config, name, count):
    """Train until a function is called for the given time, and be killed there."""
    owner = {"cross_entropy": step_module, "save": checkpoint.torch}[name]
    function, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            if name == "save":
                args[1].write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, killed)
    train(config)


@pytest.mark.fault("a training run is killed, and goes on with equal losses")
@pytest.mark.parametrize(
    # 3 training and 2 validation batches per epoch; last.pt and best.pt are written once per epoch.
    "place, epochs",
    [(("cross_entropy", 12), 2), (("save", 5), 2)],
    ids=["trains", "writes"],
)
def test_killed_run_goes_on_with_equal_losses(configure, run, tmp_path, place, epochs):
    _, whole = run("whole", "model.dropout=0.3")
    process = CONTEXT.Process(target=_train_until, args=(configure("killed", "model.dropout=0.3"), *place))
    process.start()
    process.join()
    killed = tmp_path / "killed"
    assert process.exitcode == -signal.SIGKILL
    assert torch.load(killed / "checkpoints" / "last.pt", weights_only=True)["epoch"] == epochs
    _, resumed = run("resumed", "model.dropout=0.3", f"resume={killed}")
    assert history(resumed) == history(whole)
    for file in ("last.pt", "best.pt"):
        assert_equal(parameters(resumed, file), parameters(whole, file))


@contextmanager
def files_of_at_most(size):
    """Let no file of this process grow beyond some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault("a full disk keeps the last good checkpoint")
def test_full_disk_keeps_the_last_checkpoint(run, tmp_path):
    _, whole = run("whole", "scheduler=constant")
    _, short = run("short", "scheduler=constant", "trainer.epochs=2")
    last = short / "checkpoints" / "last.pt"
    before = last.read_bytes()
    state = torch.load(last, weights_only=True)
    with files_of_at_most(len(before) // 2), pytest.raises(OSError, match="last.pt cannot be written"):
        checkpoint.save(last, {**state, "epoch": 3})
    assert last.read_bytes() == before and sorted(path.name for path in last.parent.iterdir()) == ["best.pt", "last.pt"]
    _, resumed = run("resumed", "scheduler=constant", f"resume={short}")
    assert history(resumed) == history(whole)
