"""Loss and accuracy, plain or balanced over the classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def class_counts(y: Tensor, num_classes: int) -> Tensor:
    """Nodes per class `[K]` of labels `y [N]`, without a device synchronisation."""
    return y.new_zeros(num_classes).index_add_(0, y, torch.ones_like(y))


def class_weights(y: Tensor, num_classes: int) -> Tensor:
    """Rare classes weigh more: `(N - n_c) / N`, and 0 for a class that is absent.

    Args:
        y: Labels `[N]`.
        num_classes: K.

    Returns:
        Weights `[K]`.

    Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, section 4.2.3 (PATTERN and CLUSTER).
    """
    counts = class_counts(y, num_classes)
    return torch.where(counts > 0, (y.numel() - counts) / y.numel(), 0.0)


def node_loss(logits: Tensor, y: Tensor, *, balanced: bool) -> Tensor:
    """Cross entropy of `logits [N, K]` and labels `y [N]`; balanced: with the :func:`class_weights` of these nodes."""
    weight = class_weights(y, logits.size(1)) if balanced else None
    return F.cross_entropy(logits.float(), y, weight)


class Score:
    """Loss and accuracy summed over batches, kept on the device until they are read.

    The balanced accuracy is the mean over the classes of the share of their nodes that were found, a class without
    nodes counting 0. It is taken over the whole split, so it does not depend on the batch size; the published
    benchmark averages the same number over its batches.

    Args:
        num_classes: K.
        balanced: Mean of the accuracies per class instead of the share of right nodes.
        device: Of the logits.
    """

    def __init__(self, num_classes: int, balanced: bool, device: torch.device) -> None:
        self.balanced = balanced
        self.nodes = 0
        self.loss_sum = torch.zeros((), device=device)
        # Row: class, column: prediction.
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=device)

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Add one batch: its mean loss, logits `[N, K]` and labels `[N]`."""
        self.nodes += y.numel()
        self.loss_sum += loss.detach() * y.numel()
        pairs = y * self.confusion.size(0) + logits.detach().argmax(dim=1)
        self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))

    @property
    def loss(self) -> float:
        """Mean loss per node."""
        return float(self.loss_sum) / self.nodes

    @property
    def accuracy(self) -> float:
        """Between 0 and 1."""
        right, total = self.confusion.diagonal().double(), self.confusion.sum(dim=1)
        if self.balanced:
            return float((right / total.clamp(min=1)).mean())
        return float(right.sum() / total.sum())
