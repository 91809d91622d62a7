"""The constants of devices, and how costs add up."""

from types import SimpleNamespace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.gpu import Cost, gpu_of


def test_the_slowest_unit_counts_and_the_rest_adds_up():
    cost = Cost({"memory": 3e-3, "gathers": 2e-3}, {"launch": 1e-3, "tail": 0.5e-3})
    assert cost.seconds == pytest.approx(4.5e-3)
    assert str(cost) == "4.5 ms = max(memory 3 ms, gathers 2 ms) + launch 1 ms + tail 0.5 ms"
    assert str(Cost({"memory": 3e-3})) == "3 ms = memory 3 ms"
    assert Cost({}).seconds == 0.0


def test_what_is_not_here_is_planned_for_as_the_reference_device(monkeypatch):
    monkeypatch.setattr(gpu, "known", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of(torch.device("cpu")) is gpu_of(torch.device("cuda", 0)) is gpu.H200


def test_other_devices_are_scaled(monkeypatch):
    smaller = SimpleNamespace(
        name="half",
        multi_processor_count=66,
        clock_rate=gpu.H200_CLOCK_KHZ,
        memory_clock_rate=gpu.H200_MEMORY_CLOCK_KHZ,
        memory_bus_width=gpu.H200_BUS_BITS // 4,
        L2_cache_size=1 << 20,
        shared_memory_per_block_optin=99 << 10,
        major=8,
        minor=6,
    )
    monkeypatch.setattr(gpu, "known", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or smaller)
    device = torch.device("cuda", 3)
    found = gpu_of(device)
    assert gpu_of(device) is found and asked == [device]
    assert (found.name, found.multiprocessors, found.cache_bytes, found.shared_bytes) == ("half", 66, 1 << 20, 99 << 10)
    assert found.memory_bytes_per_s == pytest.approx(gpu.H200.memory_bytes_per_s / 4)
    for rate in ("cache_bytes_per_s", "instructions_per_s", "tensor_flops"):
        assert getattr(found, rate) == pytest.approx(getattr(gpu.H200, rate) / 2), rate
    assert found.launch_s == gpu.H200.launch_s and found.capability == (8, 6)


@pytest.mark.cuda
def test_the_device_here(monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.delitem(gpu.known, device, raising=False)
    found = gpu.gpu_of(device)
    assert found.name == torch.cuda.get_device_name() and found.shared_bytes > 48 << 10
    assert 1e11 < found.memory_bytes_per_s < 1e14 and 1e10 < found.instructions_per_s < 1e14
