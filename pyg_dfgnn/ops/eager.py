"""Calls that launch their kernels at once: when that is allowed, and autograd at the least cost."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad, function
from torch.utils._device import DeviceContext

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose operators nothing overrides."""
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def is_eager() -> bool:
    """Return whether nothing traces, transforms or intercepts operators, so that their dispatch can be skipped."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def intercepts_functions() -> bool:
    """Return whether a mode sees torch's functions; that of a default device sees only those that make tensors."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())


def is_plain(tensor: object) -> bool:
    """Return whether something is a tensor with memory of its own: no subclass, and no wrapper of a transform."""
    return type(tensor) in PLAIN and not _is_wrapped(tensor)  # type: ignore[arg-type]


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy whose address allows 16-byte loads."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def needs_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether autograd has to record a function of the tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def apply_of(kind: type[Function]) -> Callable[..., Any]:
    """Return `kind.apply` without its check for torch.func transforms, which :func:`is_eager` has excluded."""
    return super(Function, kind).apply  # type: ignore[misc]


_NO_SECOND = (
    "a fused kernel has no second derivative (its backward is marked with @once_differentiable): use PyG's class where "
    "gradients are differentiated"
)


class _Final(Function):
    """Passes gradients on that were computed from other tensors, and refuses a derivative of them by these."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(_NO_SECOND)


class _Unpacked:
    """A context whose saved tensors are unpacked once, as hooks of saved tensors may want it, and stay."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def maybe_clear_saved_tensors(self) -> None:
        """Keep them: they are read again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def is_for_torch(grads: Iterable[Tensor | None]) -> bool:
    """Return whether gradients are to be differentiated again, or are no plain tensors: kernels take neither."""
    given = [grad for grad in grads if grad is not None]
    return torch.is_grad_enabled() or any(is_batched(grad) or not is_plain(grad) for grad in given)


def is_batched(grad: Tensor | None) -> bool:
    """Return whether a gradient stands for a batch of gradients (`is_grads_batched`, `vectorize`), without memory."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def unpack_saved(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the saved tensors; unless another backward pass will read them, autograd refers to them no longer.

    A backward pass can then free each of them once it has read it, and its peak of memory is lower.
    """
    saved = list(ctx.saved_tensors)
    if not any(map(is_batched, grads)):
        ctx.maybe_clear_saved_tensors()
    return saved


_MAX_LEVEL = 63
"""Most levels of nested batches in PyTorch."""


def _one_by_one(backward: Callable[..., Any], ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients for each of a batch of output gradients."""
    ctx = _Unpacked(ctx)
    example: Any = next(grad for grad in grads if is_batched(grad))
    # The threads of autograd are not told the level. A tensor seems empty at a level that it is not batched at.
    levels = range(_MAX_LEVEL, 0, -1)
    level = next(level for level in levels if torch._remove_batch_dim(example, level, 0, 0).size(0))
    unbatched: Callable[..., Tensor] = torch._remove_batch_dim
    batches = [unbatched(grad, level, 0, 0) if is_batched(grad) else None for grad in grads]
    count = max(batch.size(0) for batch in batches if batch is not None)
    results = [
        backward(ctx, *[grad if batch is None else batch[place] for grad, batch in zip(grads, batches, strict=True)])
        for place in range(count)
    ]
    return tuple(
        torch._add_batch_dim(torch.stack(batch), 0, level) if isinstance(batch[0], Tensor) else None
        for batch in zip(*results, strict=True)
    )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives, as torch's decorator of this name does, at no cost where none is asked for.

    With torch's decorator gradients seem constant where the gradients of the outputs are constant, and autograd.grad
    goes around its error. Here gradients depend on all that is saved, and on the tensors in ``ctx.layers``. The tensor
    that an input was cast from is not kept alive for this: ``ctx.cast_from`` is a weak reference, and where nothing
    else refers to the tensor, gradients with a graph of their own are refused.
    """
    guarded = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            try:
                return backward(ctx, *grads)
            except RuntimeError:
                # A check before would cost every call.
                if not any(map(is_batched, grads)):
                    raise
            return _one_by_one(run, ctx, grads)
        if torch.compiler.is_compiling():
            return guarded(ctx, *grads)
        cast_from = getattr(ctx, "cast_from", None)
        origin = None if cast_from is None else cast_from()
        if cast_from is not None and origin is None:
            raise RuntimeError(_NO_SECOND)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            computed = backward(unpacked, *grads)
        sources = [*grads, origin, *unpacked.saved_tensors, *getattr(ctx, "layers", ())]
        sources = [source for source in sources if isinstance(source, Tensor) and source.requires_grad]
        places = [place for place, grad in enumerate(computed) if isinstance(grad, Tensor)]
        tensors = [computed[place] for place in places]
        final = dict(zip(places, _Final.apply(len(places), *tensors, *sources), strict=True))  # type: ignore[no-untyped-call]
        return tuple(final.get(place, grad) for place, grad in enumerate(computed))

    return run
