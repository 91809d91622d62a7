"""Loss and metrics against numbers worked out by hand."""

import math

import pytest
import torch

from pyg_dfgnn.training.metrics import (
    IGNORED,
    METRICS,
    MetricAccumulator,
    class_counts,
    class_weights,
    cross_entropy,
    roc_auc,
)

Y = torch.tensor([0, 0, 0, 1, 1, 3])
# Predictions 0 0 1 | 1 0 | 3 with a margin that makes each softmax easy: logit m for the prediction, 0 elsewhere.
PREDICTED = torch.tensor([0, 0, 1, 1, 0, 3])
MARGIN = math.log(3)
LOGITS = MARGIN * torch.nn.functional.one_hot(PREDICTED, 4).float()
# Softmax of (log 3, 0, 0, 0): 1/2 for the prediction, 1/6 elsewhere.
RIGHT, WRONG = math.log(2), math.log(6)


def test_class_weights():
    weights = class_weights(class_counts(Y, 4))
    torch.testing.assert_close(weights, torch.tensor([3 / 6, 4 / 6, 0.0, 5 / 6]))


def test_plain_loss():
    assert cross_entropy(LOGITS, Y, loss_weights=False).item() == pytest.approx((4 * RIGHT + 2 * WRONG) / 6)


def test_balanced_loss():
    # Per node weight: class 0 1/2, class 1 2/3, class 3 5/6; cross entropy divides by their sum.
    total = (1 / 2) * (2 * RIGHT + WRONG) + (2 / 3) * (RIGHT + WRONG) + (5 / 6) * RIGHT
    assert cross_entropy(LOGITS, Y, loss_weights=True).item() == pytest.approx(total / (3 / 2 + 4 / 3 + 5 / 6))


def test_one_class_alone_has_no_weighted_loss():
    logits = torch.randn(5, 4, requires_grad=True)
    loss = cross_entropy(logits, torch.full((5,), 2), loss_weights=True)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0.0 and not grad.any()


def test_half_precision_logits_give_a_full_precision_loss():
    loss = cross_entropy(LOGITS.bfloat16(), Y, loss_weights=True)
    assert loss.dtype == torch.float32


def test_ignored_labels_change_nothing():
    y, logits = torch.cat([Y, torch.full((3,), IGNORED)]), torch.cat([LOGITS, torch.randn(3, 4)])
    for weighted in (False, True):
        found, want = (cross_entropy(*pair, loss_weights=weighted) for pair in ((logits, y), (LOGITS, Y)))
        torch.testing.assert_close(found, want)
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        with_ignored, without = (MetricAccumulator(4, metric, torch.device("cpu")) for _ in range(2))
        with_ignored.add(torch.tensor(1.5), logits, y)
        without.add(torch.tensor(1.5), LOGITS, Y)
        assert (with_ignored.loss, with_ignored.metric) == (without.loss, without.metric)


# F1: class 0 finds 2 of 3 and 2 of its 3 predictions are right; class 1 1 of 2 and 1 of 2; class 3 1 of 1, 1 of 1.
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", 4 / 6),
        ("balanced_accuracy", (2 / 3 + 1 / 2 + 0 + 1) / 4),
        # Class 2 is neither there nor predicted.
        ("macro_f1", (4 / 6 + 2 / 4 + 1) / 3),
    ],
)
def test_metric_does_not_depend_on_batches(metric, expected):
    whole, parts = (MetricAccumulator(4, metric, torch.device("cpu")) for _ in range(2))
    whole.add(torch.tensor(1.0), LOGITS, Y)
    parts.add(torch.tensor(2.0), LOGITS[:2], Y[:2])
    parts.add(torch.tensor(0.5), LOGITS[2:], Y[2:])
    assert whole.metric == pytest.approx(expected) and parts.metric == pytest.approx(expected)
    assert whole.loss == pytest.approx(1.0) and parts.loss == pytest.approx((2 * 2.0 + 4 * 0.5) / 6)


def test_roc_auc_counts_pairs():
    generator = torch.Generator().manual_seed(3)
    # Few distinct scores, so that some pairs tie.
    score = torch.randint(6, (40,), generator=generator).float()
    y = torch.randint(2, (40,), generator=generator)
    pairs = [(p > n) + 0.5 * (p == n) for p in score[y == 1].tolist() for n in score[y == 0].tolist()]
    assert roc_auc(score, y) == pytest.approx(sum(pairs) / len(pairs))
    found = MetricAccumulator(2, "roc_auc", torch.device("cpu"))
    for part in (slice(0, 25), slice(25, 40)):
        labels = torch.cat([y[part], torch.tensor([IGNORED])])
        logits = torch.stack([torch.zeros(labels.numel()), torch.cat([score[part], torch.ones(1)])], dim=1)
        found.add(torch.tensor(0.0), logits, labels)
    assert found.metric == pytest.approx(sum(pairs) / len(pairs))


def test_unknown_metric():
    # RankScore has the rank, and ErrorScore the error.
    names = [name for name in METRICS if name not in ("mrr", "mae")]
    with pytest.raises(ValueError, match=f"'metric' needs one of {', '.join(map(repr, names))}"):
        MetricAccumulator(2, "speed", torch.device("cpu"))
