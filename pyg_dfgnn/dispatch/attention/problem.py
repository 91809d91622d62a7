"""The attention problem: the facts of a call, apart from the graph, that decide its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.statements.scores import SCORES, Score
from pyg_dfgnn.torch_private import fp32_precision


@dataclass(frozen=True)
class AttentionProblem:
    """Facts of one attention call that decide its kernels.

    Attributes:
        score: Name of a record in ``SCORES``.
        heads: Number of heads H.
        channels: Features per head C.
        dtype: Common dtype of the feature tensors.
        device: Where they live.
        edge: Whether the score takes edge features.
        dropout: Whether attention weights are dropped.
        tf32: Whether products of float32 features may be rounded to TF32, see :func:`tf32_allowed`.
        dout_dlogit: Whether the forward pass has left the derivative of the output in the target scalars, which spares
            the pass over targets of `row_split` its gathers.
        edge_channels: Channels of the edge features if these are rows that all heads share, else 0.
    """

    score: str
    heads: int
    channels: int
    dtype: torch.dtype
    device: torch.device
    edge: bool
    dropout: bool
    tf32: bool = False
    dout_dlogit: bool = False
    edge_channels: int = 0

    @cached_property
    def record(self) -> Score:
        """The record of the score."""
        return SCORES[self.score]

    @property
    def is_current(self) -> bool:
        """Whether torch still rounds products as it did when the problem was posed."""
        return self.tf32 is tf32_allowed(self.dtype)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the features of one node, [H, C]."""
        return self.heads * self.channels * self.dtype.itemsize

    @cached_property
    def constants(self) -> Mapping[str, int]:
        """Constants that every attention kernel is specialised by."""
        operands = self.record.constants(self.edge, self.edge_channels > 0)
        return MappingProxyType({**operands, "STORAGE": STORAGE[self.dtype], "DROPOUT": int(self.dropout)})


@torch.compiler.assume_constant_result
def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether torch lets matrix products of a dtype run in TF32: `torch.set_float32_matmul_precision` and its kin."""
    return dtype is torch.float32 and fp32_precision("cuda", "matmul") == "tf32"
