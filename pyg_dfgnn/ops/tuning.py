"""Timing of the passes of candidates, for `schedule="autotune"`."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from pyg_dfgnn.runtime import launcher

_SAMPLING_S = 0.03
_MIN_SAMPLES, _MAX_SAMPLES = 3, 15
# Cycles that the device waits before a series, so that the host is ahead of it and the events see the device alone.
_HEAD_START_CYCLES = 2_000_000


def can_time(device: torch.device) -> bool:
    """Whether a timing on the current stream is possible now and means something."""
    return device.type == "cuda" and not launcher.is_overridden() and not torch.cuda.is_current_stream_capturing()


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Median device time of a call on torch's current stream; the caller has warmed it up."""
    with torch.cuda.device(device):
        once = _samples(call, 1)[0]
        return median(_samples(call, min(max(int(_SAMPLING_S / once), _MIN_SAMPLES), _MAX_SAMPLES)))


def _samples(call: Callable[[], Any], count: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for start, end in events:
        start.record()
        call()
        end.record()
    events[-1][1].synchronize()
    return [max(1e-3 * start.elapsed_time(end), 1e-7) for start, end in events]


class Timed:
    """A walk that is timed when it runs.

    Attributes:
        seconds: Time of the last run; infinite when it ran out of memory.
    """

    def __init__(self, walk: Any, device: torch.device) -> None:
        self._walk = walk
        self._device = device
        self.chosen = walk.chosen
        self.parameter_blocks: int = walk.parameter_blocks
        self.seconds = math.inf

    def forward(self, *arguments: Any) -> None:
        """As the walk's."""
        self._time(self._walk.forward, arguments)

    def targets(self, *arguments: Any) -> Any:
        """As the walk's."""
        return self._time(self._walk.targets, arguments)

    def nodes(self, *arguments: Any) -> None:
        """As the walk's."""
        self._time(self._walk.nodes, arguments)

    def sources(self, *arguments: Any) -> None:
        """As the walk's."""
        self._time(self._walk.sources, arguments)

    def _time(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = call(*arguments)
        self.seconds = seconds_of(lambda: call(*arguments), self._device)
        return result
