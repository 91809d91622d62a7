"""One implementation's training steps on one case."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pyg_dfgnn
from benchmarks.loops.cases import NOT_CAPTURED, LoopCase
from pyg_dfgnn.capture import Capacity
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.reference.tolerances import relative_error

BASELINE = {"pyg": "pyg", "pyg_compile": "pyg", "ours": "pyg", "ours_compile": "pyg_compile", "ours_captured": "pyg"}
"""Implementations, and what each is compared with."""


@dataclass(frozen=True)
class First:
    """Loss and gradients by parameter of the first step."""

    loss: Tensor
    gradients: dict[str, Tensor]

    def errors(self, expected: First) -> dict[str, float]:
        """Relative errors of the loss and of all gradients together; a parameter without a gradient counts as zeros."""
        mine, others = [], []
        for name in {**self.gradients, **expected.gradients}:
            got, want = self.gradients.get(name), expected.gradients.get(name)
            mine.append(torch.zeros_like(want) if got is None else got)  # type: ignore[arg-type]
            others.append(torch.zeros_like(got) if want is None else want)  # type: ignore[arg-type]
        flat = [torch.cat([gradient.flatten().double() for gradient in part]) for part in (mine, others)]
        return {"loss": relative_error(self.loss, expected.loss), "gradient": relative_error(*flat)}


def first_step(case: LoopCase, model: nn.Module, batch: Any) -> First:
    """Forward and backward of a model without a step."""
    loss = case.loss(case.forward(model, batch), batch)
    loss.backward()
    return First(loss.detach(), gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that the last backward pass left in the parameters, by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def in_float64(batch: Any) -> Any:
    """A copy whose floating-point tensors are float64."""
    return batch.clone().apply(lambda t: t.double() if t.is_floating_point() else t)


class Batches:
    """The batches of a case, a fresh copy of what is new for every step.

    Args:
        case: What is new.
        batches: One per step, then again from the first; on the device of the steps.
    """

    @staticmethod
    def on(device: torch.device, case: LoopCase) -> Batches:
        """The batches of the case, moved to a device."""
        return Batches(case, [batch.clone().to(device) for batch in case.source().batches])

    def __init__(self, case: LoopCase, batches: list[Any]) -> None:
        self.fresh, self.batches = case.fresh, batches

    def take(self, first: int, count: int) -> list[Any]:
        """Batches of the steps from `first` on."""
        return [self._copy(self.batches[i % len(self.batches)]) for i in range(first, first + count)]

    def _copy(self, batch: Any) -> Any:
        if self.fresh is None:
            return batch.clone()
        if self.fresh == ():
            return batch
        batch = copy.copy(batch)
        for name in self.fresh:
            batch[name] = batch[name].clone()
        return batch


class Steps:
    """One implementation of a case.

    Args:
        name: A key of :data:`BASELINE`.
        case: What is trained.
        model: Where it starts, on its device; it is copied.
        batches: On that device.

    Attributes:
        model: What is trained.
        batches: What each step takes.
        call: Takes a step on a batch, returns the loss.
        note: What is special.

    Raises:
        UnsupportedError: The case has no such implementation.
    """

    def __init__(self, name: str, case: LoopCase, model: nn.Module, batches: Batches) -> None:
        self.case, self.batches, self.note = case, batches, case.source().origin
        self.model = copy.deepcopy(model)
        if name.startswith("ours"):
            pyg_dfgnn.accelerate(self.model)
        self.called: Any = torch.compile(self.model, dynamic=True) if name.endswith("compile") else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.call: Callable[[Any], Tensor] = self._eager
        if name == "ours_captured":
            self._capture()

    def _eager(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.case.loss(self.case.forward(self.called, batch), batch)
        loss.backward()
        if self.case.trains:
            self.optimizer.step()
        return loss.detach()

    def _capture(self) -> None:
        case = self.case
        if not case.trains:
            raise UnsupportedError(["a step without an optimizer"], what="capture_step")
        if not case.capture:
            raise UnsupportedError([NOT_CAPTURED], what="capture_step")
        options: dict[str, Any] = {"forward": case.forward}
        if case.capture == "whole":
            room = self.batches.take(0, 1)[0]
            step = pyg_dfgnn.capture_step(self.model, case.loss, self.optimizer, room, **options)

            def refilled(batch: Any) -> Tensor:
                for key in case.fresh or ():
                    room[key].copy_(batch[key])
                return step()

            self.call = refilled
            return
        groups = case.source().groups
        capacity = Capacity.of([graph for group in groups for graph in group], len(groups[0]))
        self.call = pyg_dfgnn.capture_step(self.model, case.loss, self.optimizer, capacity, **options)

    def take(self, batches: list[Any]) -> Tensor:
        """Take a step on each batch; return the last loss."""
        for batch in batches:
            loss = self.call(batch)
        return loss


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A block of the main thread that ends with an error once it has taken so long; 0: it has no limit."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
