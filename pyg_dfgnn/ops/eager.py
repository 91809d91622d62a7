"""Whether a call may launch its kernels at once."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that nothing intercepts."""


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts operators, so that their dispatch can be skipped."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd has to know of a function of the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
