"""Out of memory in any place of a training step: the layer, what is kept with the graph and the memory stay usable."""

import gc
import sys

import pytest
import torch

import pyg_dfgnn
from pyg_dfgnn.command.layers import LAYERS, RELATIONS
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device


class Step:
    """A layer of a family with a graph of its own, and which of the two passes of a call has begun."""

    def __init__(self, family, device, nodes, edges, channels):
        torch.manual_seed(0)
        self.layer = pyg_dfgnn.accelerate(LAYERS[family](channels)).to(device)
        self.x = torch.randn(nodes, channels, device=device, requires_grad=True)
        self.edge_index = torch.randint(nodes, (2, edges), device=device)
        self.rest = (torch.randint(RELATIONS, (edges,), device=device),) if family == "relations" else ()
        self.phase, self.begin = "", lambda phase: None

    def __call__(self):
        self.phase = "forward"
        self.begin(self.phase)
        out = self.layer(self.x, self.edge_index, *self.rest)
        self.phase = "backward"
        self.begin(self.phase)
        grads = torch.autograd.grad(out.square().sum(), [self.x, *self.layer.parameters()])
        return [out.detach(), *grads]


def number_of_tensors():
    # What earlier tests left may hold more, which only the next search finds.
    while gc.collect():
        pass
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@needs_compiler
@pytest.mark.fault("out of memory in an allocation of a layer")
@pytest.mark.parametrize("family", LAYERS)
def test_each_allocation_may_fail(family, monkeypatch):
    left, allocations = -1, []

    def failing(allocate):
        def wrapper(*args, **kwargs):
            nonlocal left
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith(("pyg_dfgnn.ops", "pyg_dfgnn.graph")):
                left -= 1
                if left == -1:
                    raise torch.OutOfMemoryError("planted")
            return allocate(*args, **kwargs)

        return wrapper

    with emulated_device(), local_settings(fallback="error"):
        step = Step(family, "cpu", 12, 30, 8)
        # The first calls prepare launches and compile messages.
        for _ in range(2):
            want = step()
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
        before = number_of_tensors()
        while True:
            left = len(allocations)
            try:
                step()
            except torch.OutOfMemoryError:
                allocations.append(step.phase)
            else:
                break
            left = -1
            assert all(map(torch.equal, step(), want))
        # Once, because it looks at all objects of the process.
        assert number_of_tensors() == before
    assert set(allocations) == {"forward", "backward"}


@pytest.mark.cuda
@pytest.mark.fault("a GPU runs out of memory")
@pytest.mark.parametrize("family", LAYERS)
def test_gpu_out_of_memory(family):
    """Each pass with no more memory than is reserved as it begins, and with a part of what a step takes besides."""
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    step = Step(family, device, 100_000, 1_000_000, 128)

    def limit(passes, room):
        def begin(phase):
            if phase == passes:
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)

        return begin

    with local_settings(fallback="error"):
        for _ in range(4):
            step()
        gc.collect()
        torch.cuda.empty_cache()
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        want = [each.cpu() for each in step()]
        peak, failed = torch.cuda.max_memory_reserved() - reserved, set()
        for passes in ("forward", "backward"):
            for part in (0.0, 0.25, 0.5, 0.75):
                step.begin = limit(passes, part * peak)
                try:
                    step()
                except torch.OutOfMemoryError:
                    failed.add((step.phase, part))
                finally:
                    torch.cuda.set_per_process_memory_fraction(1.0)
                    step.begin = lambda phase: None
                got = [each.cpu() for each in step()]
                for mine, first in zip(got, want, strict=True):
                    torch.testing.assert_close(mine, first)
                gc.collect()
                # Memory may be given back, none may stay taken.
                now = torch.cuda.memory_allocated()
                assert now <= before
                before = now
    assert {("forward", 0.0), ("backward", 0.0)} <= failed
