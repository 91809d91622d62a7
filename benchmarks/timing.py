"""Medians of event times, host times, memory peaks and graph replays; the same code runs on a CPU with a wall clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from pyg_dfgnn.torch_private import cuda_sleep

TimedCall = Callable[[], Any]

WARM_UPS = 3
HOST_REPETITIONS = 20
FLUSH_BYTES = 256 << 20
# The device waits before every few short calls, so that the host enqueues ahead of it (but not further than the launch
# queue is long) and the events measure the device alone; host time has its own column.
SHORT_CALL_MS, HEAD_START_CALLS, HEAD_START_FACTOR = 5.0, 10, 1.5
CYCLES_PER_MS = 2_000_000
RELEASED_ELEMENTS = 1 << 27
"""Features along all edges above which cached memory is given back between measurements."""


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of ``n`` calls in milliseconds."""

    median_ms: float
    iqr_ms: float
    n: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        low, _, high = quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
        return Timing(median(samples), high - low, len(samples))

    def columns(self, ms: str = "median_ms", iqr_ms: str = "iqr_ms") -> dict[str, str]:
        """Return the columns of the median and its range, by these names."""
        return {ms: f"{self.median_ms:.5g}", iqr_ms: f"{self.iqr_ms:.3g}"}


@dataclass(frozen=True)
class Pace:
    """How often calls are repeated: those of a median take `sampling_ms` together, long ones are repeated less."""

    min_repetitions: int = 20
    max_repetitions: int = 100
    sampling_ms: float = 250.0
    long_call_ms: float = 500.0
    long_call_repetitions: int = 5

    def repetitions(self, call_ms: float) -> int:
        """Number of calls for one that takes ``call_ms``."""
        if call_ms > self.long_call_ms:
            return self.long_call_repetitions
        return int(min(max(self.sampling_ms / max(call_ms, 1e-3), self.min_repetitions), self.max_repetitions))


def mark(on_gpu: bool, *, external: bool = False) -> Any:
    """Return this point in time: on a GPU an event that its stream records, elsewhere the wall clock.

    Only an external event becomes a node of a graph that is captured, and is recorded anew by each replay.
    """
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=external)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    """Return the milliseconds between two points in time that the device has reached."""
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


class Timer:
    """Times calls on one device: CUDA events on a GPU, a wall clock elsewhere."""

    def __init__(self, device: torch.device, pace: Pace = Pace()) -> None:  # noqa: B008
        self.device, self.pace, self.on_gpu = device, pace, device.type == "cuda"
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def flush_cache(self) -> None:
        """Overwrites a buffer larger than the L2 cache."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1 << 20, dtype=torch.uint8, device=self.device)
        self._flush.zero_()

    def _samples(self, call: TimedCall, count: int, before: TimedCall | None, host_ms: float = 0.0) -> list[float]:
        spans = []
        for position in range(count):
            if self.on_gpu and host_ms and position % HEAD_START_CALLS == 0:
                # As long as the host needs for ten short calls.
                cuda_sleep(int(HEAD_START_FACTOR * HEAD_START_CALLS * host_ms * CYCLES_PER_MS))
            if before is not None:
                before()
            start = mark(self.on_gpu)
            call()
            spans.append((start, mark(self.on_gpu)))
        self.synchronize()
        return [between_ms(*span) for span in spans]

    def _warm_up(self, call: TimedCall) -> tuple[float, float]:
        """Milliseconds of one warm call on the device, and of the host for it; 0 for the host of a long call."""
        for _ in range(WARM_UPS):
            call()
        self.synchronize()
        once = self._samples(call, 1, None)[0]
        return once, 0.0 if once > SHORT_CALL_MS else self.host_us(call, WARM_UPS) / 1e3

    def time(self, call: TimedCall, *, flushed: bool = False) -> Timing:
        """Median time of ``call`` at the pace, with the L2 cache emptied before each repetition if it is flushed."""
        once, host_ms = self._warm_up(call)
        before = self.flush_cache if flushed else None
        return Timing.of(self._samples(call, self.pace.repetitions(once), before, host_ms))

    def host_us(self, call: TimedCall, repetitions: int = HOST_REPETITIONS) -> float:
        """Median host time of one call in microseconds, without waiting for the device."""
        for _ in range(WARM_UPS):
            call()
        samples = []
        for _ in range(repetitions):
            self.synchronize()
            started = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - started))
        self.synchronize()
        return median(samples)

    def wall_ms(self, call: TimedCall, count: int = 1) -> float:
        """Wall time per call of calls in a row, to their end on the device."""
        self.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started) / count

    def peak_mb(self, call: TimedCall) -> float | None:
        """Memory of the device in MB that ``call`` reaches above what was allocated before; None without a GPU."""
        if not self.on_gpu:
            call()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6

    def replay(self, call: TimedCall) -> TimedCall:
        """``call`` captured as a CUDA graph, ready to replay (GPU only)."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        return captured.replay

    def release(self) -> None:
        """Gives cached memory back, so that one implementation's blocks do not crowd out the next."""
        if self.on_gpu:
            gc.collect()
            self.synchronize()
            torch.cuda.empty_cache()
