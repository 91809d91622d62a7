"""Loss and metrics of a classification; labels of -100 (:data:`IGNORED`) do not count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice

IGNORED = -100
"""Label of what does not count, such as nodes outside of a split: torch's own choice."""
METRICS = ("accuracy", "balanced_accuracy", "roc_auc", "macro_f1")


def class_counts(y: Tensor, num_classes: int) -> Tensor:
    """How many of `y [N]` have each label, `[K]`, without a device synchronisation."""
    counts = y.new_zeros(num_classes + 1)
    return counts.index_add_(0, torch.where(y < 0, num_classes, y), torch.ones_like(y))[:num_classes]


def class_weights(counts: Tensor) -> Tensor:
    """Rare classes weigh more: `(N - n_c) / N`, and 0 for a class that is absent.

    Args:
        counts: Labels per class `[K]`.

    Returns:
        Weights `[K]`.

    Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, section 4.2.3 (PATTERN and CLUSTER).
    """
    total = counts.sum()
    return torch.where(counts > 0, (total - counts) / total, 0.0)


def label_counts(y: Tensor, num_classes: int, *, loss_weights: bool) -> Tensor:
    """What a loss needs of all labels `y [N]`: :func:`class_counts`, or without weights how many count, `[]`."""
    return class_counts(y, num_classes) if loss_weights else (y != IGNORED).sum()


def cross_entropy(logits: Tensor, y: Tensor, *, loss_weights: bool, counts: Tensor | None = None) -> Tensor:
    """Mean cross entropy of `logits [N, K]` and labels `y [N]`, `sum_i w_{y_i} l_i / sum_i w_{y_i}`.

    Args:
        logits: Of any floating dtype; the loss is taken in float32.
        y: Labels.
        loss_weights: Weigh with the :func:`class_weights` of these labels rather than with 1.
        counts: The :func:`label_counts` of these labels; where several processes hold labels of their own, their
            average over the processes, and the results of the processes average to the loss. None: they are taken here.
    """
    if counts is None and not loss_weights:
        # The same mean, in fewer launches.
        return F.cross_entropy(logits.float(), y, ignore_index=IGNORED)
    total = label_counts(y, logits.size(1), loss_weights=loss_weights) if counts is None else counts
    weight = None
    if loss_weights:
        weight = class_weights(total)
        total = (weight * total).sum()
        # One class alone weighs nothing: a loss of 0 instead of 0 / 0.
        total = torch.where(total > 0, total, 1.0)
    return F.cross_entropy(logits.float(), y, weight, ignore_index=IGNORED, reduction="sum") / total


class Score:
    """Loss and metric over batches, kept on the device until they are read.

    All metrics are taken over the whole split, so they do not depend on the batch size; the published benchmark of
    PATTERN and CLUSTER averages the balanced accuracy over its batches. A class without labels counts 0 in that mean.

    Args:
        num_classes: K.
        metric: "accuracy"; "balanced_accuracy", the mean over the classes of the share that was found; "macro_f1", the
            mean of the F1 score over the classes that are there or predicted; or "roc_auc", the area under the ROC
            curve of two classes.
        device: Of the logits.

    Raises:
        ValueError: `metric` is unknown.
    """

    def __init__(self, num_classes: int, metric: str, device: torch.device) -> None:
        check_choice("metric", metric, METRICS)
        self.kind = metric
        self.loss_sum = torch.zeros((), device=device)
        # Row: class, column: prediction. The last row holds what does not count.
        self.confusion = torch.zeros(num_classes + 1, num_classes, dtype=torch.long, device=device)
        # For the ROC curve: logit of class 1 over that of class 0, and label.
        self.margins: list[tuple[Tensor, Tensor]] = []

    def add(self, loss: Tensor, logits: Tensor, y: Tensor) -> None:
        """Add one batch: its mean loss, logits `[N, K]` and labels `[N]`."""
        rows, classes = self.confusion.shape
        y = torch.where(y < 0, classes, y)
        self.loss_sum += loss.detach() * (y < classes).sum()
        pairs = y * classes + logits.detach().argmax(dim=1)
        self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        if self.kind == "roc_auc":
            self.margins.append((logits.detach()[:, 1].float() - logits.detach()[:, 0].float(), y.clone()))

    def gather(self, group: Group) -> Score:
        """Add what the other processes have seen; returns itself."""
        self.loss_sum, self.confusion = group.sum(self.loss_sum), group.sum(self.confusion)
        if self.margins:
            margin, y = (group.gather(torch.cat(parts)) for parts in zip(*self.margins))
            self.margins = [(margin, y)]
        return self

    @property
    def loss(self) -> float:
        """Mean loss per label."""
        return float(self.loss_sum / self.confusion[:-1].sum())

    @property
    def metric(self) -> float:
        """Between 0 and 1."""
        if self.kind == "roc_auc":
            margin, y = (torch.cat(parts) for parts in zip(*self.margins))
            return roc_auc(margin[y < 2], y[y < 2])
        counted = self.confusion[:-1].double()
        right, total = counted.diagonal(), counted.sum(dim=1)
        if self.kind == "accuracy":
            return float(right.sum() / total.sum())
        if self.kind == "balanced_accuracy":
            return float((right / total.clamp(min=1)).mean())
        # A class that is neither there nor predicted does not count, as in scikit-learn.
        seen = total + counted.sum(dim=0)
        return float((2 * right / seen.clamp(min=1)).sum() / (seen > 0).sum().clamp(min=1))


def roc_auc(score: Tensor, y: Tensor) -> float:
    """Probability that a positive scores higher than a negative, ties counting half; nan if one kind is absent.

    Args:
        score: Higher for positives, `[N]`.
        y: 1 for positives, 0 for negatives, `[N]`.

    Source: Hanley and McNeil, The Meaning and Use of the Area under a ROC Curve, Radiology 1982 (the U statistic).
    """
    _, place, ties = score.unique(return_inverse=True, return_counts=True)
    # The mean rank of equal scores.
    rank = ties.cumsum(0).double() - (ties.double() - 1) / 2
    positive = y == 1
    num_positive, num_negative = positive.sum().double(), (~positive).sum().double()
    above = rank[place[positive]].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))
