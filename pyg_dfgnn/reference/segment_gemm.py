"""Products of rows that are sorted by type with the weights of their types, in plain torch: any device and dtype."""

from itertools import pairwise

import torch
from torch import Tensor


def segment_linear(
    x: Tensor,
    weight: Tensor,
    heads: int,
    type_ptr: Tensor,
    gather: Tensor | None = None,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    r"""Linear maps of rows by the weight of their type.

    .. math:: Y_{ih} = X_{g(i) h} W_{t(i) h} + b_{t(i) h}

    Args:
        x: Shape [M, H, K], or [M, 1, K] for all heads; with `transposed` [M, H, N].
        weight: Shape [T, H, K, N], or [T, 1, K, N] for all heads.
        heads: The number H of heads.
        type_ptr: Range of the rows of each type, int [T + 1].
        gather: Row of `x` of each row, int [I]; None: the rows as they are.
        bias: Shape [T, H, N].
        transposed: Whether the weights are transposed.

    Returns:
        Shape [I, H, N], with `transposed` [I, H, K].
    """
    rows = (x if gather is None else x.index_select(0, gather)).expand(-1, heads, -1)
    matrices = (weight.transpose(2, 3) if transposed else weight).expand(-1, heads, -1, -1)
    parts = [rows.new_empty((0, heads, matrices.shape[3]))]
    for number, (begin, end) in enumerate(pairwise(type_ptr.tolist())):
        part = torch.einsum("ihk,hkn->ihn", rows[begin:end], matrices[number])
        parts.append(part if bias is None else part + bias[number])
    return torch.cat(parts)


def segment_outer(
    x: Tensor, grad: Tensor, heads: int, type_ptr: Tensor, gather_x: Tensor | None, gather_grad: Tensor | None
) -> Tensor:
    r"""Outer products of rows, summed by type.

    .. math:: W_{th} = \sum_{i : t(i) = t} X_{g(i) h}^T G_{k(i) h}

    Args:
        x: Shape [M, H, K], or [M, 1, K] for all heads.
        grad: Shape [L, H, N], or [L, 1, N] for all heads.
        heads: The number H of heads.
        type_ptr: Range of the rows of each type, int [T + 1].
        gather_x: Row of `x` of each row, int [I]; None: the rows as they are.
        gather_grad: Row of `grad` of each row, int [I].

    Returns:
        Shape [T, H, K, N]; zeros for a type without rows.
    """
    left = (x if gather_x is None else x.index_select(0, gather_x)).expand(-1, heads, -1)
    right = (grad if gather_grad is None else grad.index_select(0, gather_grad)).expand(-1, heads, -1)
    products = [
        torch.einsum("ihk,ihn->hkn", left[begin:end], right[begin:end]) for begin, end in pairwise(type_ptr.tolist())
    ]
    return torch.stack(products) if products else left.new_empty((0, heads, x.shape[2], grad.shape[2]))
