"""Where the host's time of a step goes: functions, launches, waits, sorts."""

from __future__ import annotations

import cProfile
import pstats
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.loops.cases import LoopCase
from benchmarks.loops.run import Batches, Steps, cases_of
from benchmarks.results import PACKAGE, device_of
from benchmarks.timing import Timer

TOP = 15
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
OPS = ("aten::sort", "aten::argsort", "aten::unique", "aten::arange", "aten::to", "aten::_to_copy", "aten::item")


def run(config: Mapping[str, Any]) -> int:
    """Profile what the config names; return the exit code."""
    for case in cases_of(config):
        _profile(case, config["implementations"], Timer(device_of(config["device"])), config["block"])
    return 0


def _profile(case: LoopCase, names: Sequence[str], timer: Timer, block: int) -> None:
    """Print the pieces of a step for each implementation of a case."""
    torch.manual_seed(0)
    batches = Batches(case, timer.device)
    model = case.make(batches.batches[0]).to(timer.device)
    for name in names:
        print(f"\n{case.loop} {case.model} {case.size} {name}")
        try:
            steps = Steps(name, case, model, batches)
            # Backward stays in this thread, where the profiler sees our Python.
            with torch.autograd.set_multithreading_enabled(False):
                steps.take(steps.batches.take(0, 3 * block))
                for text in (*_functions(steps, timer, block), *_events(steps, timer, block)):
                    print(text)
        except Exception as error:
            print(f"failed: {type(error).__name__}: {error}")


def _functions(steps: Steps, timer: Timer, block: int) -> list[str]:
    """Microseconds per step by function, own and with what it calls."""
    batches = steps.batches.take(0, 2 * block)
    timer.synchronize()
    wall = timer.wall_ms(lambda: steps.take(batches)) / len(batches)
    batches = steps.batches.take(0, 2 * block)
    timer.synchronize()
    profiler = cProfile.Profile()
    with profiler:
        steps.take(batches)
    stats: Mapping[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    count = len(batches)
    rows = []
    for (file, first, name), (_, calls, own, total, _) in stats.items():
        path = Path(file)
        place = f"{path.relative_to(PACKAGE)}:{first}" if path.is_relative_to(PACKAGE) else path.name
        is_ours = path.is_relative_to(PACKAGE)
        rows.append((is_ours, f"{place} {name}", calls / count, 1e6 * own / count, 1e6 * total / count))
    ours = [row for row in rows if row[0]]
    lines = [
        f"wall {wall:.3f} ms per step; under the profiler {sum(row[3] for row in rows):,.0f} us of Python and C, "
        f"of which pyg_dfgnn's own lines {sum(row[3] for row in ours):,.0f} us"
    ]
    for title, chosen, key in (
        ("pyg_dfgnn by own time", ours, 3),
        ("pyg_dfgnn with what it calls", ours, 4),
        ("all by own time", rows, 3),
    ):
        lines.append(f"-- {title}: us own, us in all, calls per step")
        for _, name, calls, own, total in sorted(chosen, key=itemgetter(key), reverse=True)[:TOP]:
            lines.append(f"{own:9.0f} {total:9.0f} {calls:7.1f}  {name}")
    return lines


def _events(steps: Steps, timer: Timer, block: int) -> list[str]:
    """Launches, waits, copies to the host, sorts and other ops per step."""
    batches = steps.batches.take(0, block)
    timer.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if timer.on_gpu else [])]
    with torch.profiler.profile(activities=activities) as traced:
        steps.take(batches)
    counts: Counter[str] = Counter()
    for event in traced.events() or []:
        name = event.name
        counts["launches"] += name.startswith(LAUNCHES)
        counts["waits of the host"] += name in WAITS
        counts["copies to the host"] += name.startswith("Memcpy DtoH")
        counts["aten ops"] += name.startswith("aten::")
        counts[name] += name in OPS
    lines = ["-- per step: " + ", ".join(f"{n} {count / block:.1f}" for n, count in counts.items() if count)]
    batches = steps.batches.take(0, block)
    with _waits(timer) as caught:
        steps.take(batches)
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught)
    return [*lines, *(f"   waits at {place}: {count / block:.1f}" for place, count in places.most_common(TOP))]


@contextmanager
def _waits(timer: Timer) -> Any:
    """A block whose waits of torch for the device are warnings, which it yields."""
    mode = torch.cuda.get_sync_debug_mode() if timer.on_gpu else 0
    with warnings.catch_warnings(record=True) if timer.on_gpu else nullcontext([]) as caught:
        if timer.on_gpu:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            if timer.on_gpu:
                torch.cuda.set_sync_debug_mode(mode)
