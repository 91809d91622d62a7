"""Loss and accuracy against numbers worked out by hand."""

import math

import pytest
import torch

from pyg_dfgnn.training.metrics import Score, class_weights, node_loss

Y = torch.tensor([0, 0, 0, 1, 1, 3])
# Predictions 0 0 1 | 1 0 | 3 with a margin that makes each softmax easy: logit m for the prediction, 0 elsewhere.
PREDICTED = torch.tensor([0, 0, 1, 1, 0, 3])
MARGIN = math.log(3)
LOGITS = MARGIN * torch.nn.functional.one_hot(PREDICTED, 4).float()
# Softmax of (log 3, 0, 0, 0): 1/2 for the prediction, 1/6 elsewhere.
RIGHT, WRONG = math.log(2), math.log(6)


def test_class_weights():
    weights = class_weights(Y, 4)
    torch.testing.assert_close(weights, torch.tensor([3 / 6, 4 / 6, 0.0, 5 / 6]))


def test_plain_loss():
    assert node_loss(LOGITS, Y, balanced=False).item() == pytest.approx((4 * RIGHT + 2 * WRONG) / 6)


def test_balanced_loss():
    # Per node weight: class 0 1/2, class 1 2/3, class 3 5/6; cross entropy divides by their sum.
    total = (1 / 2) * (2 * RIGHT + WRONG) + (2 / 3) * (RIGHT + WRONG) + (5 / 6) * RIGHT
    assert node_loss(LOGITS, Y, balanced=True).item() == pytest.approx(total / (3 / 2 + 4 / 3 + 5 / 6))


def test_half_precision_logits_give_a_full_precision_loss():
    loss = node_loss(LOGITS.bfloat16(), Y, balanced=True)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("balanced", "expected"), [(False, 4 / 6), (True, (2 / 3 + 1 / 2 + 0 + 1) / 4)], ids=["plain", "balanced"]
)
def test_accuracy_does_not_depend_on_batches(balanced, expected):
    whole, parts = (Score(4, balanced, torch.device("cpu")) for _ in range(2))
    whole.add(torch.tensor(1.0), LOGITS, Y)
    parts.add(torch.tensor(2.0), LOGITS[:2], Y[:2])
    parts.add(torch.tensor(0.5), LOGITS[2:], Y[2:])
    assert whole.accuracy == pytest.approx(expected) and parts.accuracy == pytest.approx(expected)
    assert whole.loss == pytest.approx(1.0) and parts.loss == pytest.approx((2 * 2.0 + 4 * 0.5) / 6)
