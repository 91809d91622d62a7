"""A device to plan for, with CuPy, whatever this machine has."""

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import gpu, store

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    """An H200 in the place of the first CUDA device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(dispatch, "_HAS_CUPY", True)
    monkeypatch.setitem(gpu.known, DEVICE, gpu.H200)


@pytest.fixture(autouse=True)
def no_timings(monkeypatch, tmp_path):
    """Timings of this test alone, in a folder of its own."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    store.forget()
    yield tmp_path
    store.forget()
