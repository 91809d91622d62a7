"""Calls that launch their kernels at once: when that is allowed, and autograd at the least cost."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, function

from pyg_dfgnn.settings import current
from pyg_dfgnn.torch_private import (
    DeviceContext,
    add_batch_dim,
    are_transforms_active,
    dispatch_depth,
    forward_ad,
    function_depth,
    function_modes,
    is_any_autocast_enabled,
    is_legacy_batched,
    is_wrapped,
    remove_batch_dim,
)

_logger = logging.getLogger("pyg_dfgnn")
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose operators nothing overrides."""


def is_eager() -> bool:
    """Return whether nothing traces, transforms or intercepts operators, so that their dispatch can be skipped."""
    return (
        not torch.compiler.is_compiling()
        and dispatch_depth() == 0
        and not are_transforms_active()
        and forward_ad._current_level < 0
    )


def intercepts_functions() -> bool:
    """Return whether a mode sees torch's functions; that of a default device sees only those that make tensors."""
    if not function_depth():
        return False
    return any(type(mode) is not DeviceContext for mode in function_modes())


def is_plain(tensor: object) -> bool:
    """Return whether something is a tensor with memory of its own: no subclass, and no wrapper of a transform."""
    return type(tensor) in PLAIN and not is_wrapped(tensor)  # type: ignore[arg-type]


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


class _Unpacked:
    """A context with saved tensors that are unpacked once, as hooks of saved tensors may want it, and stay.

    What is set here does not reach the context, which a later backward pass finds as it was.
    """

    def __init__(self, ctx: Any, saved_tensors: Sequence[Any]) -> None:
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def maybe_clear_saved_tensors(self) -> None:
        """Keep them: they are read again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def is_for_torch(grads: Iterable[Tensor | None]) -> bool:
    """Return whether gradients are to be differentiated again, or are no plain tensors: kernels take neither."""
    present = [grad for grad in grads if grad is not None]
    return torch.is_grad_enabled() or any(is_batched(grad) or not is_plain(grad) for grad in present)


def is_batched(grad: Tensor | None) -> bool:
    """Return whether a gradient stands for a batch of gradients (`is_grads_batched`, `vectorize`), without memory."""
    return grad is not None and is_legacy_batched(grad)


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
    ctx = _Unpacked(ctx, ctx.saved_tensors)
    example: Any = next(grad for grad in grads if is_batched(grad))
    # The threads of autograd are not told the level. A tensor seems empty at a level that it is not batched at.
    levels = range(_MAX_LEVEL, 0, -1)
    level = next(level for level in levels if remove_batch_dim(example, level, 0, 0).size(0))
    unbatched: Callable[..., Tensor] = remove_batch_dim
    batches = [unbatched(grad, level, 0, 0) if is_batched(grad) else None for grad in grads]
    count = max(batch.size(0) for batch in batches if batch is not None)
    results = [
        backward(ctx, *[grad if batch is None else batch[place] for grad, batch in zip(grads, batches, strict=True)])
        for place in range(count)
    ]
    return tuple(
        add_batch_dim(torch.stack(batch), 0, level) if isinstance(batch[0], Tensor) else None
        for batch in zip(*results, strict=True)
    )


def differentiated(
    compute: Callable[[list[Any]], Sequence[Any]],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return gradients by torch's operators, which can be differentiated where gradients are recorded.

    Args:
        compute: Returns tensors, or None, of a list of tensors.
        tensors: What it is called with.
        needed: Of which of these the gradient is returned; None is for each other one.
        grads: The gradients of the results.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs: list[Any] = [tensor if tensor is None else tensor.detach() for tensor in tensors]
        for place, tensor in enumerate(tensors):
            if tensor is not None and needed[place]:
                # A view, so that the gradient of one tensor leaves out what another is computed from it.
                keeps = again and tensor.requires_grad
                inputs[place] = tensor.view_as(tensor) if keeps else inputs[place].requires_grad_()
        results = zip(compute(inputs), grads, strict=True)
        pairs = [(x, g) for x, g in results if x is not None and g is not None and x.requires_grad]
    if not pairs:
        return (None,) * len(tensors)
    outputs, grad_outputs = zip(*pairs)
    places = [place for place, x in enumerate(inputs) if x is not None and needed[place]]
    wanted = [inputs[place] for place in places]
    grad_inputs = torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=again, allow_unused=True)
    by_place = dict(zip(places, grad_inputs, strict=True))
    return tuple(map(by_place.get, range(len(tensors))))


_told: set[str] = set()


def tell_of_torch(name: str) -> None:
    """Log, once for each op, that torch's operators compute gradients because these are differentiated again."""
    if name not in _told and current().fallback != "silent":
        _told.add(name)
        _logger.warning("torch's operators compute gradients of %s, which are differentiated again", name)


class _Gradients(Function):
    """Autograd Function of a backward pass: its results as a function of output gradients and saved tensors."""

    @staticmethod
    def forward(ctx: Any, node: Any, backward: Any, again: Any, count: int, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.call = node, again, count
        return backward(_Unpacked(node, tensors[count:]), *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _second(ctx, *grads)


def differentiable(again: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator of a `backward` whose gradients may be differentiated, at no cost where none is.

    Args:
        again: What gives the gradients by differentiable operators, and runs in place of `backward` when their gradient
            is asked for; `backward` itself if it consists of such. Both may read the saved tensors that are inputs of
            the forward pass, and no other that depends on an input.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        guarded = function.once_differentiable(backward)

        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            if not is_any_autocast_enabled():
                return plain(ctx, *grads)
            # Backward may run in a region of autocast that forward was not in.
            kind = next((grad.device.type for grad in grads if grad is not None), "cpu")
            with torch.autocast(kind, enabled=False):
                return plain(ctx, *grads)

        def plain(ctx: Any, *grads: Any) -> Any:
            is_last = not torch.is_grad_enabled()
            if not is_last and torch.compiler.is_compiling():
                return guarded(ctx, *grads)
            try:
                if is_last:
                    return backward(ctx, *grads)
                tensors = (*grads, *ctx.saved_tensors)
                return _Gradients.apply(ctx, backward, again or backward, len(grads), *tensors)  # type: ignore[no-untyped-call]
            except RuntimeError:
                # A check before would cost every call.
                if all(grad is None or (is_plain(grad) and not is_batched(grad)) for grad in grads):
                    raise
            if any(map(is_batched, grads)):
                return _one_by_one(run, ctx, grads)
            # Wrappers of torch.func, which operators take and kernels do not.
            return (again or backward)(ctx, *grads)

        return run

    return decorate


@differentiable()
def _second(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    node, again, count = ctx.call
    tensors = ctx.saved_tensors

    def gradients(inputs: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = again(_Unpacked(node, inputs[count:]), *inputs[:count])
        return results

    needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
    return *(None,) * 4, *differentiated(gradients, tensors, needed, grads)
