"""Loss and metrics of classification, which leave out labels of -100 (:data:`IGNORED`), of values, and ranks of links.

Labels that are values come as `y [N, 2]`: the value, and its weight, 0 where there is none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from pyg_dfgnn.capture.buckets import IGNORED
from pyg_dfgnn.datasets.task import METRICS
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice


def class_counts(y: Tensor, num_classes: int) -> Tensor:
    """Return the number of each label in `y [N]` as `[K]`, without a device synchronisation."""
    counts = y.new_zeros(num_classes + 1)
    return counts.index_add_(0, torch.where(y < 0, num_classes, y), torch.ones_like(y))[:num_classes]


def class_weights(counts: Tensor) -> Tensor:
    """Return class weights `(N - n_c) / N`, which favour rare classes; an absent class has weight 0.

    Args:
        counts: Labels per class `[K]`.

    Returns:
        Weights `[K]`.

    Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, section 4.2.3 (PATTERN and CLUSTER).
    """
    total = counts.sum()
    return torch.where(counts > 0, (total - counts) / total, 0.0)


def label_counts(y: Tensor, num_classes: int, *, loss_weights: bool) -> Tensor:
    """Return what a loss needs to know of all labels `y [N]`: :func:`class_counts`, or without weights their number."""
    if y.is_floating_point():
        return y[:, 1].sum()
    return class_counts(y, num_classes) if loss_weights else (y != IGNORED).sum()


def cross_entropy(logits: Tensor, y: Tensor, *, loss_weights: bool, counts: Tensor | None = None) -> Tensor:
    """Return the mean cross entropy of `logits [N, K]` and labels `y [N]`, `sum_i w_{y_i} l_i / sum_i w_{y_i}`.

    Args:
        logits: Logits of any floating dtype; the loss is computed in float32.
        y: Labels.
        loss_weights: Weigh the labels with their :func:`class_weights` rather than with 1.
        counts: The :func:`label_counts` of these labels. With several processes, the average of their label counts;
            the results of the processes then average to the loss. None: the counts of `y`.
    """
    if counts is None and not loss_weights:
        # This form of the mean needs fewer launches.
        return F.cross_entropy(logits.float(), y, ignore_index=IGNORED)
    total = label_counts(y, logits.size(1), loss_weights=loss_weights) if counts is None else counts
    weight = None
    if loss_weights:
        weight = class_weights(total)
        total = (weight * total).sum()
        # A single class has weight 0; its loss is 0 rather than 0 / 0.
        total = torch.where(total > 0, total, 1.0)
    return F.cross_entropy(logits.float(), y, weight, ignore_index=IGNORED, reduction="sum") / total


def absolute_error(out: Tensor, y: Tensor, *, counts: Tensor | None = None) -> Tensor:
    """Return the mean absolute error of `out [N, 1]`, `sum_i w_i |out_i - y_i| / sum_i w_i`.

    Args:
        out: Predictions of any floating dtype; the error is computed in float32.
        y: Values and weights `[N, 2]`.
        counts: As in :func:`cross_entropy`.
    """
    value, weight = y.unbind(dim=1)
    total = weight.sum() if counts is None else counts
    return ((out.float().squeeze(1) - value).abs() * weight).sum() / total


class MetricAccumulator:
    """Loss and metric over batches, kept on the device until they are read.

    Metrics are computed over the whole split, so they do not depend on the batch size; the published benchmark of
    PATTERN and CLUSTER averages the balanced accuracy over its batches instead.

    Args:
        num_classes: K.
        metric: "accuracy"; "balanced_accuracy", the mean recall of the classes, 0 for a class without labels;
            "macro_f1", the mean F1 score of the classes that occur or are predicted; or "roc_auc", the area under the
            ROC curve of two classes.
        device: Device of the logits.

    Raises:
        ValueError: `metric` is unknown.
    """

    def __init__(self, num_classes: int, metric: str, device: torch.device) -> None:
        check_choice("metric", metric, [name for name in METRICS if name not in ("mrr", "mae")])
        self.kind = metric
        self.loss_sum = torch.zeros((), device=device)
        # Rows are classes, columns are predictions; the last row holds ignored labels.
        self.confusion = torch.zeros(num_classes + 1, num_classes, dtype=torch.long, device=device)
        # The ROC curve needs the difference of the two logits, and the label.
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

    def gather(self, group: Group) -> MetricAccumulator:
        """Add the batches of the other processes and return this score."""
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
        # As in scikit-learn, a class that neither occurs nor is predicted is left out.
        seen = total + counted.sum(dim=0)
        return float((2 * right / seen.clamp(min=1)).sum() / (seen > 0).sum().clamp(min=1))


class _MeanScore:
    """Loss and metric that are means of numbers over batches, kept on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        # The sums of the losses, of what the metric is the mean of, and of weights.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def gather(self, group: Group) -> Self:
        """Add the batches of the other processes and return this score."""
        self.sums = group.sum(self.sums)
        return self

    @property
    def loss(self) -> float:
        """Mean loss per value or answer."""
        return float(self.sums[0] / self.sums[2])

    @property
    def metric(self) -> float:
        """Mean of the metric."""
        return float(self.sums[1] / self.sums[2])


class ErrorScore(_MeanScore):
    """Loss and mean absolute error of values over batches, kept on the device until they are read.

    Args:
        scale: Unit of the labels, as in :class:`~pyg_dfgnn.datasets.Task`.
        device: Device of the predictions.
    """

    def __init__(self, scale: float, device: torch.device) -> None:
        super().__init__(device)
        self.scale = scale

    def add(self, loss: Tensor, out: Tensor, y: Tensor) -> None:
        """Add one batch: its mean loss, predictions `[N, 1]`, and values and weights `[N, 2]`."""
        count = y[:, 1].sum()
        error = absolute_error(out.detach(), y, counts=torch.ones_like(count))
        self.sums += torch.stack([loss.detach() * count, error, count])

    @property
    def metric(self) -> float:
        """Mean absolute error in the unit of the values."""
        return super().metric * self.scale


class RankScore(_MeanScore):
    """Loss and mean reciprocal rank over batches, kept on the device until they are read.

    The rank of an answer is 1 plus the number of nodes with a higher score plus half of the others with an equal score.

    Args:
        device: Device of the scores.

    Source: Bordes et al., Translating Embeddings for Modeling Multi-relational Data, NeurIPS 2013, section 4.2.
    """

    def add(self, loss: Tensor, scores: Tensor, y: Tensor) -> None:
        """Add one batch: its mean loss, scores `[Q, N]` and answers `[Q]`."""
        wanted = scores.detach().gather(1, y[:, None])
        above, equal = (scores > wanted).sum(1), (scores == wanted).sum(1)
        # A score that is no number equals nothing, and its answer is not the best.
        rank = torch.where(equal > 0, above + (equal + 1) / 2, scores.size(1))
        self.sums += torch.stack(
            [loss.detach().double() * len(y), rank.double().reciprocal().sum(), rank.new_tensor(len(y))]
        )


def roc_auc(score: Tensor, y: Tensor) -> float:
    """Return the probability that a positive scores higher than a negative; a tie counts half.

    The result is nan if there are no positives or no negatives.

    Args:
        score: Scores, higher for positives, `[N]`.
        y: 1 for positives, 0 for negatives, `[N]`.

    Source: Hanley and McNeil, The Meaning and Use of the Area under a ROC Curve, Radiology 1982 (the U statistic).
    """
    _, place, ties = score.unique(return_inverse=True, return_counts=True)
    # Equal scores share their mean rank.
    rank = ties.cumsum(0).double() - (ties.double() - 1) / 2
    positive = y == 1
    num_positive, num_negative = positive.sum().double(), (~positive).sum().double()
    above = rank[place[positive]].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))
