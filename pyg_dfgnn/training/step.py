"""One training step: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data

from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.training.metrics import cross_entropy

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Mark = Callable[[str], None]


def _no_mark(phase: str) -> None:
    """Nobody wants to know."""


class Step:
    """A training step that launches its kernels one by one.

    Args:
        model: Called as `model(x, edge_index)`, with `pe` where the batch carries it; on the device of the batches.
        optimizer: Of the model's parameters.
        loss_weights: Weigh the classes by rarity in the loss.
        graph_level: Whether the labels belong to graphs: the model is given `batch` and `num_graphs` too.
        precision: "fp32", or autocast to "bf16" or "fp16" (with loss scaling).
        group: The processes that share each batch; the loss is the mean over all of them.
        mark: Called with "forward" (the loss is computed), "backward" and "optimizer" once their kernels are enqueued.

    Raises:
        ValueError: `precision` is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss_weights: bool = False,
        graph_level: bool = False,
        precision: str = "fp32",
        group: Group | None = None,
        mark: Mark | None = None,
    ) -> None:
        check_choice("precision", precision, tuple(PRECISIONS))
        self.model, self.optimizer = model, optimizer
        self.loss_weights, self.graph_level = loss_weights, graph_level
        self.dtype = PRECISIONS[precision]
        self.group = group or Group()
        self.mark = mark or _no_mark
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    def __call__(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Take one step; nothing waits for the device.

        Args:
            batch: On the model's device, with `x [N, F]`, `edge_index [2, E]` and `y [N]` (or `[G]` at graph level),
                where a label of -100 does not count.

        Returns:
            The mean loss `[]` and the logits `[N, K]` (or `[G, K]`) before the step, detached.
        """
        self.optimizer.zero_grad()
        loss, logits = self.forward(batch)
        self.mark("forward")
        self.scaler.scale(loss).backward()
        self.mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.mark("optimizer")
        return self.group.average(loss), logits.detach()

    @torch.no_grad()
    def evaluate(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch; the caller decides whether the model is in evaluation mode."""
        loss, logits = self.forward(batch)
        return self.group.average(loss), logits

    def forward(self, batch: Data) -> tuple[Tensor, Tensor]:
        """This process's part of the loss and its logits, as the mode of autograd has it."""
        given = {"pe": batch.pe} if "pe" in batch else {}
        if self.graph_level:
            given |= {"batch": batch.batch, "num_graphs": batch.y.numel()}
        with self._autocast():
            logits = self.model(batch.x, batch.edge_index, **given)
        return cross_entropy(logits, batch.y, loss_weights=self.loss_weights, group=self.group), logits

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)
