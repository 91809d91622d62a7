"""Where a process learns who it is, and what it is told when that cannot work."""

import pytest
import torch
from torch import nn

from pyg_dfgnn.distributed import Group, wrap
from tests.distributed.test_training import PATTERN, run


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:1", r"'device' needs auto, cpu or cuda with 4 processes \(got 'cuda:1'\)"),
        ("cuda", r"'nproc_per_node' needs at most one process per GPU: 2 found \(got 4 or more\)"),
    ],
)
def test_wrong_devices(monkeypatch, device, message):
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        Group.of_environment(device)


def test_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    group = Group.of_environment("cpu")
    assert group == Group() and group.is_main and group.counts(3) == [3]
    tensor, model = torch.arange(3.0), nn.Linear(2, 2)
    assert all(torch.equal(each(tensor), tensor) for each in (group.sum, group.average, group.gather))
    assert wrap(model, group) is model
    assert float(group.mean(tensor.sum(), 3)) == 1.0


def collectives(folder):
    group = Group.of_environment("cpu")
    own = torch.full((group.rank, 2), float(group.rank))
    assert group.gather(own).tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert group.counts(10 * group.rank) == [0, 10, 20]
    # Of six numbers 0, 1, 1, 2, 2, 2: the parts average to the mean.
    part = group.mean(torch.tensor(float(group.rank * (group.rank + 1))), group.rank + 1)
    assert float(group.average(part)) == pytest.approx(8 / 6)
    assert float(group.start_average(torch.tensor(float(group.rank)))()) == 1.0
    with pytest.raises(ValueError, match=r"'trainer.compile' needs one process \(got 3\)"):
        run(folder, *PATTERN, "trainer.compile=true")


def test_collectives(launch, tmp_path):
    launch(3, collectives, tmp_path)
