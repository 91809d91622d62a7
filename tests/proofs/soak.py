"""Minutes of mini-batches with a new graph each, and of kernels that are compiled anew.

Memory of the device and the host, file handles, threads and throughput are sampled. The proof fails where one of them
has a trend over the last half of the samples beyond its bound. On a CPU the emulator runs the kernels of small graphs.
"""

import gc
import itertools
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pyg_dfgnn
from benchmarks.results import Table
from pyg_dfgnn.command.layers import LAYERS, RELATIONS
from pyg_dfgnn.nn import messages
from pyg_dfgnn.runtime import compiler, launcher
from tests.emu.loader import compiler as emulators_compiler
from tests.kernels.emulated import emulated_device
from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, Outcome, device_of, finish, options, path_of

WIDTHS = (16, 32)
"""Channels of the layers, one after the other: each churn makes new layers of the next width."""
LEAST_SAMPLES = 6
"""Samples in the last half."""
BOUNDS = {
    "allocated_mb": (16.0, 0.01),
    "reserved_mb": (32.0, 0.01),
    "used_mb": (64.0, 0.02),
    "rss_mb": (32.0, 0.02),
    "handles": (2.0, 0.0),
    "threads": (2.0, 0.0),
    "steps_per_s": (0.0, 0.10),
}
"""Quantity -> the change over the last half that is allowed: a number or a part of the median, the larger of both.

Throughput must not fall by more, all else must not grow by more. `used_mb` is that of the whole device.
"""
FIELDS = ("seconds", "steps", "width", *BOUNDS)

Sample = dict[str, float]


class Batches:
    """Training steps of a layer of each family, with a new graph in each."""

    def __init__(self, device: torch.device, nodes: int) -> None:
        self.device, self.nodes, self.steps = device, nodes, 0
        self._generator = torch.Generator().manual_seed(0)
        self._widths = itertools.cycle(WIDTHS)
        self.renew()

    def renew(self) -> None:
        """Make layers of the next width."""
        torch.manual_seed(0)
        self.width = next(self._widths)
        made = {name: pyg_dfgnn.accelerate(make(self.width)).to(self.device) for name, make in LAYERS.items()}
        self.layers = [(name, layer, torch.optim.Adam(layer.parameters())) for name, layer in made.items()]

    def __call__(self) -> None:
        for name, layer, optimizer in self.layers:
            nodes = int(torch.randint(self.nodes, 2 * self.nodes, (1,), generator=self._generator))
            edge_index = torch.randint(nodes, (2, 4 * nodes), generator=self._generator).to(self.device)
            x = torch.randn(nodes, self.width, generator=self._generator).to(self.device)
            rest = (torch.arange(4 * nodes, device=self.device) % RELATIONS,) if name == "relations" else ()
            optimizer.zero_grad()
            layer(x, edge_index, *rest).square().mean().backward()
            optimizer.step()
        self.steps += 1


def forget(cache: Path) -> None:
    """Forget every compiled kernel, in this process and on disk."""
    messages.clear()
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    compiler.module.cache_clear()
    launcher._kernel_of.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        compiler.import_cupy().clear_memo()
        for path in cache.iterdir():
            path.unlink()


def sample(seconds: float, steps: int, steps_per_s: float) -> Sample:
    """Return what this process takes up."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "seconds": seconds,
        "steps": steps,
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "steps_per_s": steps_per_s,
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["allocated_mb"] = torch.cuda.memory_allocated() / 1e6
        found["reserved_mb"] = torch.cuda.memory_reserved() / 1e6
        found["used_mb"] = (total - free) / 1e6
    return found


def soak(step: Batches, seconds: float, every_s: float, churn_s: float, cache: Path) -> Iterator[Sample]:
    """Yield a sample after each so many seconds of steps, once layers of each width have run.

    A slow machine takes longer than the given seconds, until there are samples enough to judge.
    """
    for _ in WIDTHS:
        step.renew()
        step()
    started = last_churn = time.perf_counter()
    count = 0
    while time.perf_counter() - started < seconds or count < 2 * LEAST_SAMPLES:
        if time.perf_counter() - last_churn > churn_s:
            forget(cache)
            step.renew()
            # Compiles, which is no part of the throughput.
            step()
            last_churn = time.perf_counter()
        begun, before = time.perf_counter(), step.steps
        while time.perf_counter() - begun < every_s:
            step()
        if step.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        count += 1
        yield sample(now - started, step.steps, (step.steps - before) / (now - begun)) | {"width": step.width}


def trend(times: Sequence[float], values: Sequence[float], widths: Sequence[float]) -> float:
    """Return by how much values change over their time: the median slope, which outliers do not move.

    Slopes are those of all pairs of one width: layers of another one take other memory and another time.
    """
    pairs = itertools.combinations(zip(times, values, widths, strict=True), 2)
    slopes = [(b - a) / (later - first) for (first, a, one), (later, b, other) in pairs if one == other]
    return statistics.median(slopes) * (times[-1] - times[0])


def judge(samples: Sequence[Sample]) -> list[Outcome]:
    """Make a row of each quantity, from the last half of the samples."""
    half = samples[len(samples) // 2 :]
    rows = []
    for name, (least, part) in BOUNDS.items():
        what = f"{name} is flat"
        if name not in samples[0]:
            rows.append(Outcome(what, SKIPPED, "needs an NVIDIA GPU"))
        elif name == "steps_per_s" and "used_mb" not in samples[0]:
            rows.append(Outcome(what, SKIPPED, "the time of emulated kernels says nothing of a GPU"))
        else:
            times, values, widths = ([each[key] for each in half] for key in ("seconds", name, "width"))
            change, middle = trend(times, values, widths), statistics.median(values)
            bound = max(least, part * middle)
            is_flat = (-change if name == "steps_per_s" else change) <= bound
            seconds = times[-1] - times[0]
            reason = f"changes by {change:+.3g} in {seconds:.0f} s, bound {bound:.3g}, median {middle:.4g}"
            rows.append(Outcome(what, PASSED if is_flat else FAILED, reason, f"{seconds:.0f}"))
    return rows


@contextmanager
def own_cache() -> Iterator[Path]:
    """Keep compiled kernels in a folder that ends with the block."""
    folder = tempfile.mkdtemp(prefix="pyg_dfgnn-soak-")
    before = os.environ.get("CUPY_CACHE_DIR")
    os.environ["CUPY_CACHE_DIR"] = folder
    try:
        yield Path(folder)
    finally:
        os.environ.pop("CUPY_CACHE_DIR")
        if before is not None:
            os.environ["CUPY_CACHE_DIR"] = before
        shutil.rmtree(folder)


def main(arguments: list[str] | None = None, make: Callable[[torch.device, int], Batches] = Batches) -> int:
    given = options(
        arguments,
        __doc__,
        1200.0,
        ("--every", {"type": float, "default": 10.0, "help": "seconds between samples; 10 by default"}),
        ("--churn", {"type": float, "default": 30.0, "help": "seconds until all is compiled anew; 30 by default"}),
    )
    started, device = time.perf_counter(), device_of()
    logging.getLogger("pyg_dfgnn").addHandler(logging.NullHandler())
    has_emulator = device.type == "cpu" and emulators_compiler() is not None
    with own_cache() as cache, emulated_device() if has_emulator else nullcontext():
        # On a GPU PyG's code takes graphs of few edges.
        step = make(device, 20_000 if device.type == "cuda" else 10)
        samples = list(soak(step, given.limit_seconds, given.every, given.churn, cache))
    path = path_of("soak-samples", given.out)
    path.unlink(missing_ok=True)
    Table(path, FIELDS).append({name: f"{value:.6g}" for name, value in each.items()} for each in samples)
    print(f"{step.steps} steps, {len(samples)} samples in {path}")
    return finish("soak", judge(samples), given.out, started)
