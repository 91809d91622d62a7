"""The terms of nodes in the additive score, for one or two vectors in one pass over the features."""

from collections.abc import Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import row_reasons
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.gpu import gpu_of, known
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.ops.attention.row_split import node_kernel
from pyg_dfgnn.ops.eager import aligned, apply_of, differentiable, is_eager, is_plain, needs_grad
from pyg_dfgnn.runtime.launcher import addresses, launch

_PATH = "attention/terms.cu"
# Thread blocks of the backward pass, each of which leaves a partial sum: enough to keep the memory busy.
_BLOCKS_PER_MULTIPROCESSOR = 4


def attention_terms(x: Tensor, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    r"""Return per head the products :math:`\langle a, x_i \rangle` of rows with one or two vectors.

    Args:
        x: Shape [N, H, C], or [N, C] without heads.
        first: As many numbers as a row of x has, shape [1, H, C] or [H, C], without heads [1, C] or [C].
        second: As `first`.

    Returns:
        Two tensors [N, H], or [N], the other one None without `second`; in float32 where a kernel runs, else in the
        dtype that torch promotes to.

    Source: Velickovic et al., "Graph Attention Networks" (arXiv 1710.10903).
    """
    vectors = (first,) if second is None else (first, second)
    if is_eager() and has_kernel(x, vectors):
        terms = _apply_terms(x, *vectors) if needs_grad((x, *vectors)) else run_terms(x, *vectors)
        return _pair(terms)
    return _pair([(x * vector).sum(dim=-1) for vector in vectors])


def has_kernel(x: Tensor, vectors: Sequence[Tensor]) -> bool:
    """Return whether a kernel takes these rows and vectors."""
    shape, device, dense = x.shape, x.device, torch.strided
    dims = len(shape)
    if not is_plain(x) or device.type not in fused_device_types or dims not in (2, 3) or x.layout is not dense:
        return False
    row, one = shape[1:], (1, *shape[1:])
    for vector in vectors:
        if not is_plain(vector) or vector.device != device or vector.shape not in (one, row):
            return False
        if vector.dtype not in STORAGE or vector.layout is not dense:
            return False
    heads, channels = one[-2:]
    return _is_supported(heads, channels, x.dtype, device)


@cache
def _is_supported(heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    return not row_reasons(heads, channels, dtype, device)


def run_terms(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return the products with each vector, by kernel."""
    first = x.new_empty(x.shape[:-1], dtype=torch.float32)
    terms = (first,) if len(vectors) == 1 else (first, torch.empty_like(first))
    heads, channels = (1, *x.shape[1:])[-2:]
    run = node_kernel(_PATH, "attention_terms", heads, channels, x.dtype)
    run(x.size(0), x.device, aligned(x), *_pair([_ready(a) for a in vectors]), *_pair(terms))
    return terms


def _ready(vector: Tensor) -> Tensor:
    return aligned(vector if vector.dtype is torch.float32 else vector.float())


def _again(ctx: Any, *grads: Tensor | None) -> Any:
    """Return the gradients by torch's operators, which have derivatives of their own."""
    x, *vectors = ctx.saved_tensors
    wide = [None if grad is None else grad.unsqueeze(-1) for grad in grads]
    of_x = [grad * vector for grad, vector in zip(wide, vectors, strict=True) if grad is not None]
    return (
        reduce(torch.add, of_x).to(x.dtype) if of_x else None,
        *[
            None if grad is None else (grad * x).sum(dim=0).view(vector.shape).to(vector.dtype)
            for grad, vector in zip(wide, vectors, strict=True)
        ],
    )


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *vectors)
        # A vector whose term nothing reads gets no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return run_terms(x, *vectors)

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *vectors = ctx.saved_tensors
        vector_grads: Sequence[Any] = grads
        read = vectors
        if grads[0] is None or grads[-1] is None:
            vector_grads = [grad for grad in grads if grad is not None]
            read = [vector for vector, grad in zip(vectors, grads, strict=True) if grad is not None]
            if not vector_grads:
                return None, *grads
        heads, channels = (1, *x.shape[1:])[-2:]
        run = node_kernel(_PATH, "attention_terms_backward", heads, channels, x.dtype)
        gpu = known.get(x.device) or gpu_of(x.device)
        blocks = min(-(-x.size(0) // run.rows_per_block), _BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors)
        x = aligned(x)
        grad_x = torch.empty_like(x)
        sums = x.new_empty((len(read), blocks, heads, channels), dtype=torch.float32)
        inputs = (x, *_pair([_ready(a) for a in read]), *_pair([aligned(grad) for grad in vector_grads]))
        arguments = addresses((x.size(0), *inputs, grad_x, sums))
        launch(run.kernel, (blocks, run.head_groups, 1), run.threads, arguments, x.device)
        totals = iter(sums.sum(dim=1).unbind())
        of_vectors: list[Tensor | None] = []
        for vector, grad in zip(vectors, grads, strict=True):
            of_vectors.append(None if grad is None else next(totals).view(vector.shape).to(vector.dtype))
        return grad_x, *of_vectors


_apply_terms = apply_of(_Terms)


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return one or two tensors as two."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None
