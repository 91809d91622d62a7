"""The terms of nodes in the additive score, for one or two vectors in one pass over the features."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import row_reasons
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.gpu import gpu_of, known
from pyg_dfgnn.ops.attention.row_split import node_kernel
from pyg_dfgnn.ops.eager import aligned, apply_of, is_eager, is_plain, needs_grad, once_differentiable
from pyg_dfgnn.runtime.launcher import addresses, launch

_PATH = "attention/terms.cu"
# Thread blocks of the backward pass, each of which leaves a partial sum: enough to keep the memory busy.
_BLOCKS_PER_MULTIPROCESSOR = 4


def attention_terms(x: Tensor, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    r"""Return per head the products :math:`\langle a, x_i \rangle` of rows with one or two vectors.

    Args:
        x: Shape [N, H, C].
        first: Shape [1, H, C].
        second: Shape [1, H, C].

    Returns:
        Two tensors [N, H], the other one None without `second`; in float32 where a kernel runs, else in the dtype that
        torch promotes to.

    Source: Velickovic et al., "Graph Attention Networks" (arXiv 1710.10903).
    """
    vectors = (first,) if second is None else (first, second)
    if is_eager() and _has_kernel(x, vectors):
        terms = _apply_terms(x, *vectors) if needs_grad((x, *vectors)) else run_terms(x, *vectors)
        return _pair(terms)
    return _pair([(x * vector).sum(dim=-1) for vector in vectors])


def _has_kernel(x: Tensor, vectors: Sequence[Tensor]) -> bool:
    device, (_, heads, channels) = x.device, x.shape
    for vector in vectors:
        if not is_plain(vector) or vector.shape != (1, heads, channels) or vector.device != device:
            return False
    return is_plain(x) and device.type in fused_device_types and _is_supported(heads, channels, x.dtype, device)


@cache
def _is_supported(heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    return not row_reasons(heads, channels, dtype, device)


def run_terms(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return the products with each vector, by kernel."""
    rows, heads, channels = x.shape
    first = x.new_empty((rows, heads), dtype=torch.float32)
    terms = (first,) if len(vectors) == 1 else (first, torch.empty_like(first))
    run = node_kernel(_PATH, "attention_terms", heads, channels, x.dtype)
    run(rows, x.device, aligned(x), *_pair([_ready(a) for a in vectors]), *_pair(terms))
    return terms


def _ready(vector: Tensor) -> Tensor:
    return aligned(vector if vector.dtype is torch.float32 else vector.float())


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *vectors)
        return run_terms(x, *vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *vectors = ctx.saved_tensors
        rows, heads, channels = x.shape
        run = node_kernel(_PATH, "attention_terms_backward", heads, channels, x.dtype)
        gpu = known.get(x.device) or gpu_of(x.device)
        blocks = min(-(-rows // run.rows_per_block), _BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors)
        x = aligned(x)
        grad_x = torch.empty_like(x)
        sums = x.new_empty((len(vectors), blocks, heads, channels), dtype=torch.float32)
        inputs = (x, *_pair([_ready(a) for a in vectors]), *_pair([aligned(grad) for grad in grads]))
        arguments = addresses((rows, *inputs, grad_x, sums))
        launch(run.kernel, (blocks, run.head_groups, 1), run.threads, arguments, x.device)
        totals = sums.sum(dim=1, keepdim=True).unbind()
        return grad_x, *[total if a.dtype is total.dtype else total.to(a.dtype) for total, a in zip(totals, vectors)]


_apply_terms = apply_of(_Terms)


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return one or two tensors as two."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None
