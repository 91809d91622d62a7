"""Timing of the passes of candidates, for `schedule="autotune"`."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.core import FORWARD, Option, options
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.host_codegen import CallShape, compile_group
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.op import FEATURES, TensorSpec
from pyg_dfgnn.torch_private import cuda_sleep

_logger = logging.getLogger("pyg_dfgnn")

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
    cuda_sleep(_HEAD_START_CYCLES)
    for start, end in events:
        start.record()
        call()
        end.record()
    events[-1][1].synchronize()
    return [max(1e-3 * start.elapsed_time(end), 1e-7) for start, end in events]


class Timed:
    """A prepared pass that is timed when it runs.

    Attributes:
        seconds: Time of the last run; infinite when it ran out of memory.
    """

    def __init__(self, prepared: Any, device: torch.device) -> None:
        self._pass, self._device = prepared, device
        self.plan, self.num_blocks = prepared.plan, prepared.num_blocks
        self.head_groups: int = prepared.head_groups
        self.derives = prepared.derives
        self.seconds = math.inf

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass, then time it."""
        carry = self._pass(*arguments)
        self.seconds = seconds_of(lambda: self._pass(*arguments), self._device)
        return carry


def example(shape: CallShape, problem: Any, graph: Graph) -> tuple[list[Tensor | None], list[float]]:
    """Return random inputs of an op, drawn from a generator of their own, and numbers."""
    device, generator = problem.device, torch.Generator(problem.device).manual_seed(0)
    tensors: list[Tensor | None] = []
    for value in shape.statement.inputs:
        sizes = shape.sizes(value, graph) or (1,)
        if value.name not in shape.present:
            tensors.append(None)
        elif value.dtype == "int64":
            tensors.append(torch.zeros(sizes, dtype=torch.int64, device=device))
        else:
            dtype = problem.dtype if value.dtype == FEATURES else torch.float32
            tensors.append(torch.randn(sizes, generator=generator, dtype=dtype, device=device))
    is_dropped = {"dropout": bool(getattr(problem, "dropout", False))}
    return tensors, [number.example if is_dropped.get(number.name, True) else 0.0 for number in shape.statement.numbers]


def measure(
    op: Any,
    problem: Any,
    graph: Graph,
    shape: CallShape,
    directions: tuple[str, ...],
    offers: Sequence[Mapping[str, Option]],
    optional: frozenset[str],
) -> dict[str, dict[str, float]]:
    """Return the seconds of each pass by each schedule that can run it, on random inputs.

    Args:
        op: What is computed.
        problem: Its problem, as the passes see it.
        graph: On which graph.
        shape: What functions are compiled for.
        directions: ``FORWARD`` or the backward passes.
        offers: The options of each of them.
        optional: Flags of optional values that the forward pass leaves.
    """
    seconds: dict[str, dict[str, float]] = {direction: {} for direction in directions}
    statement, fallback = op.statement, op.family.fallback
    tensors, numbers = example(shape, problem, graph)
    flags = frozenset({"stats"})
    if directions != FORWARD:
        exact = {"exact"} if problem.dtype.itemsize == 2 else set()
        flags |= optional | {"saved", "edge_grad"} | exact
    for name in dict.fromkeys(name for each in offers for name, option in each.items() if not option.reasons):
        team = [each[fallback] if each[name].reasons else each[name] for each in offers]
        timed = [
            Timed(op.prepare(problem, direction, option.plan, graph, optional), problem.device)
            for direction, option in zip(directions, team, strict=True)
        ]
        try:
            if directions != FORWARD:
                kept = [_zeros(shape, statement.values[each], problem, graph) for each in statement.kept(flags)]
                outs = [_zeros(shape, value, problem, graph) for value in statement.outputs]
                grads = map(torch.ones_like, outs)
                compile_group(shape, "backward", flags, timed)(graph, *tensors, *kept, *outs, *grads, *numbers)
            else:
                compile_group(shape, "forward", flags, timed)(graph, *tensors, *numbers)
        except torch.OutOfMemoryError as error:
            _logger.warning("schedule %r is left out of a choice by autotune: %s", name, error)
        for direction, option, result in zip(directions, team, timed, strict=True):
            if option.schedule == name:
                seconds[direction][name] = result.seconds
    return seconds


def _zeros(shape: CallShape, value: TensorSpec, problem: Any, graph: Graph) -> Tensor:
    dtype = problem.dtype if value.dtype == FEATURES else getattr(torch, value.dtype)
    return torch.zeros(shape.sizes(value, graph), dtype=dtype, device=problem.device)


def tune(
    op: Any, problem: Any, graph: Graph, shape: CallShape, directions: tuple[str, ...], settings: Settings
) -> None:
    """Time every candidate that can run a group of passes, unless that is remembered or impossible now."""
    seen = op.family.problem_for(problem, graph, directions, settings)
    offers = options(op.family, seen, graph, directions, settings)
    key = store.key_of(op.family, seen, graph, directions, offers)
    if key is None or store.recall(key) is not None or not can_time(graph.device):
        return
    try:
        with torch.inference_mode(False), torch.no_grad():
            optional = op.optional(problem, graph, settings) if directions != FORWARD else frozenset()
            seconds = measure(op, seen, graph, shape, directions, offers, optional)
    except torch.OutOfMemoryError as error:
        _logger.warning("nothing is timed for a choice by autotune: %s", error)
        seconds = {direction: {} for direction in directions}
    store.remember(key, seconds)
