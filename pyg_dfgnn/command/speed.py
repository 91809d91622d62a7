"""Training steps of PyG's layers and of ours on this machine, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import pyg_dfgnn
from pyg_dfgnn.command.layers import NO_GPU, Case, UserError, builtin_cases, loss_of, users_case
from pyg_dfgnn.nn.registry import copied

STEPS = 50
_WARM_UP = 10
_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}
"""Dtype of a parameter or output -> largest difference of it, by the length of the difference over that of PyG's."""


class Speed(NamedTuple):
    """Medians of training steps of one model.

    Attributes:
        name: Its name.
        pyg_ms: Time of PyG's.
        ours_ms: Time of ours.
        difference: Largest difference of the loss and of gradients, over their length.
        report: What became of its layers.
        calls: How many calls of its layers were fused.
    """

    name: str
    pyg_ms: float
    ours_ms: float
    difference: float
    report: str
    calls: str


def _results(case: Case) -> list[Tensor]:
    """Return the loss and the gradients of parameters, without dropout and running statistics."""
    modes = {module: module.training for module in case.model.modules()}
    case.model.eval()
    parameters = [each for each in case.model.parameters() if each.requires_grad]
    loss = loss_of(case.model(*case.arguments))
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for module, mode in modes.items():
        module.training = mode
    return [loss.detach(), *grads]


def difference_of(pyg: Case, ours: Case) -> float:
    """Return the largest difference of the losses and gradients of two models.

    Raises:
        UserError: It is more than rounding explains.
    """
    worst, names = 0.0, ["the loss", *(name for name, each in pyg.model.named_parameters() if each.requires_grad)]
    for name, own, other in zip(names, _results(ours), _results(pyg), strict=True):
        length = float(other.double().norm())
        difference = float((own.double() - other.double()).norm()) / (length or 1.0)
        limit = max(_LIMITS[each.dtype] for each in (own, *pyg.model.parameters()) if each.dtype in _LIMITS)
        if not difference <= limit:
            problem = f"{name} differs from PyG's by {difference:.1e} of it, more than {limit:.0e}"
            raise UserError(f"{pyg.name}: {problem}: no times are taken")
        worst = max(worst, difference)
    return worst


def _step_of(case: Case) -> Callable[[], None]:
    optimizer = torch.optim.Adam(case.model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(case.model(*case.arguments)).backward()
        optimizer.step()

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(case: Case, device: torch.device, steps: int) -> Speed:
    """Return the times of training steps of PyG's model and of ours, in turns, once their gradients agree.

    Args:
        case: The model and its arguments.
        device: Where to run.
        steps: Timed steps of each.

    Raises:
        UserError: Losses or gradients differ.
    """
    pyg = case._replace(model=pyg_dfgnn.restore(copied(case.model))).to(device)
    ours = pyg._replace(model=pyg_dfgnn.accelerate(copied(pyg.model)))
    with pyg_dfgnn.local_settings(check_ids="now"):
        difference = difference_of(pyg, ours)
    own_steps = {"pyg": _step_of(pyg), "ours": _step_of(ours)}
    times: dict[str, list[float]] = {name: [] for name in own_steps}
    for turn in range(_WARM_UP + steps):
        for name in list(own_steps)[:: 1 if turn % 2 else -1]:
            _wait(device)
            start = time.perf_counter()
            own_steps[name]()
            _wait(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    pyg_ms, ours_ms = (median(each[_WARM_UP:]) for each in times.values())
    with pyg_dfgnn.local_settings(profile=True):
        own_steps["ours"]()
    report, calls = str(pyg_dfgnn.report(ours.model)), str(pyg_dfgnn.stats(ours.model))
    return Speed(case.name, pyg_ms, ours_ms, difference, report, calls)


def speed(source: str | None = None, steps: int = STEPS) -> int:
    """Time training steps of PyG and of ours on this machine: layers of each family, or a model of yours.

    Args:
        source: "module:function" of the model; None for the layers.
        steps: Timed steps of each.

    Returns:
        0.

    Raises:
        UserError: There is no GPU, or losses or gradients differ.
    """
    cases = builtin_cases(20_000, 200_000, 64) if source is None else [users_case(source)]
    if not torch.cuda.is_available():
        for case in cases if source else ():
            print(pyg_dfgnn.report(pyg_dfgnn.accelerate(case.model)))
        raise UserError(f"{NO_GPU}: how fast they are cannot be told")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}: medians of {steps} training steps, in turns")
    for case in cases:
        print(f"{case.name}: {case.text}")
    speeds = [compare(case, device, steps) for case in cases]
    print_table(speeds)
    return 0


def print_table(speeds: list[Speed]) -> None:
    """Print times, and what was fused."""
    width = max(len(each.name) for each in speeds)
    print(f"{'':{width}}  {'PyG':>9}  {'ours':>9}  PyG / ours  difference")
    for each in speeds:
        ratio = each.pyg_ms / each.ours_ms
        times = f"{each.pyg_ms:6.2f} ms  {each.ours_ms:6.2f} ms"
        print(f"{each.name:{width}}  {times}  {ratio:10.2f}  {each.difference:10.1e}")
    for each in speeds:
        print(f"\n{each.name}\n{each.report}\n{each.calls}")
