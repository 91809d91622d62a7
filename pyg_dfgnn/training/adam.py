"""A step of torch's fused Adam on pieces of the parameters, for captured steps of small models.

Torch's kernel gives each thread block 65,536 numbers of a parameter: a matrix of 128 x 500 keeps one multiprocessor
busy while the others wait. Each number is updated as ever, so the results have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

PIECE = 1 << 12
"""Numbers of a parameter that one thread block updates."""
_MOST = 1 << 23
"""Parameters in all, up to which there are too few pieces of torch's to keep a device busy."""


def takes_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its next step may be one of :func:`step_in_pieces`.

    It is torch's own fused Adam without extras, all states are there, and there are parameters longer than a piece, yet
    so few in all that they leave the device idle.
    """
    if type(optimizer) is not torch.optim.Adam:
        return False
    longest, total = 0, 0
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"] or group["maximize"] or group["differentiable"]:
            return False
        for parameter in _trained(group):
            grad = parameter.grad
            if "exp_avg" not in optimizer.state[parameter] or not parameter.is_contiguous():
                return False
            if not grad.is_contiguous() or grad.is_sparse or parameter.is_complex():
                return False
            longest, total = max(longest, parameter.numel()), total + parameter.numel()
    return longest > PIECE and total <= _MOST


def _trained(group: dict[str, Any]) -> list[Any]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


@torch.no_grad()
def step_in_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters and the state as `optimizer.step()` does, for an optimizer that :func:`takes_pieces`."""
    for group in optimizer.param_groups:
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        counted: list[Tensor] = []
        for parameter in _trained(group):
            state = optimizer.state[parameter]
            parameters += parameter.view(-1).split(PIECE)
            grads += parameter.grad.view(-1).split(PIECE)
            means += state["exp_avg"].view(-1).split(PIECE)
            squares += state["exp_avg_sq"].view(-1).split(PIECE)
            count = -(-parameter.numel() // PIECE)
            # Each piece counts its steps: the first in the state, the others in a copy.
            steps += [state["step"], *(torch.empty_like(state["step"]) for _ in range(count - 1))]
            counted += [state["step"]] * count
        if not steps:
            continue
        copies = [(copy, step) for copy, step in zip(steps, counted, strict=True) if copy is not step]
        if copies:
            torch._foreach_copy_([copy for copy, _ in copies], [step for _, step in copies])
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            grads,
            means,
            squares,
            [],
            steps,
            fused=True,
            capturable=group["capturable"],
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
