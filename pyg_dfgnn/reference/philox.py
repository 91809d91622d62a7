"""Philox 4x32-10 in plain torch: the dropout mask that the kernels draw, for tests and the reference path."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, for 32-bit numbers held in int64."""
    low_product = a * (b & 0xFFFF)
    high_product = a * (b >> 16)
    middle = high_product + (low_product >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_product & 0xFFFF)


def dropout_factor(rows: Tensor, numbers: int, p: float, seed: Tensor, stream: int = 0) -> Tensor:
    r"""Dropout factors :math:`D \in \{0, 1/(1-p)\}` of the numbers of rows, such as the heads of edges.

    Args:
        rows: Positions of the rows, of edges in input order, shape [E].
        numbers: Numbers H of a row.
        p: Probability of 0.
        seed: The call's 64-bit key as an int64 tensor of one element.
        stream: Which of the masks of the call.

    Returns:
        Shape [E, H], float64.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); kernels/include/philox.cuh.
    """
    device = rows.device
    number = torch.arange(numbers, device=device)
    c0 = rows.long()[:, None].expand(-1, numbers)
    c1 = (number >> 2)[None, :].expand_as(c0)
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
    key = seed.to(device).reshape(())
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIER[0], c0)
        high1, low1 = _multiply(_MULTIPLIER[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    words = torch.stack([c0, c1, c2, c3], dim=-1)
    word = words.gather(-1, (number & 3)[None, :, None].expand(*c0.shape, 1)).squeeze(-1)
    uniform = (word >> 8).double() * 2.0**-24
    # The kernels compare in float32.
    keep = uniform >= torch.tensor(p, dtype=torch.float32, device=device).double()
    return keep.double() / (1.0 - p) if p < 1.0 else torch.zeros_like(uniform)
