"""Calls that launch their kernels at once: when that is allowed, and autograd at the least cost."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad, function

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose operators nobody overrides."""
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts operators, so that their dispatch can be skipped."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def is_plain(tensor: object) -> bool:
    """Whether something is a tensor with memory of its own: no subclass, and nothing that a transform left behind."""
    return type(tensor) in PLAIN and not _is_wrapped(tensor)  # type: ignore[arg-type]


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd has to know of a function of the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def apply_of(kind: type[Function]) -> Callable[..., Any]:
    """`kind.apply` without its look for torch.func transforms, which :func:`is_eager` has excluded."""
    return super(Function, kind).apply  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of this name, at no cost where no second derivative is asked for."""
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
