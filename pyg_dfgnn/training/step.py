"""The training steps of a run: how its task calls the model, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data, HeteroData

from pyg_dfgnn.capture import Recorder, Step, capture_step
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice, check_shape
from pyg_dfgnn.training.metrics import absolute_error, cross_entropy, label_counts

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_ARGUMENTS = ("pe", "nodes", "edge_type", "edge_attr", "queries")
"""Arguments that a model takes by name where a batch has them."""


class Objective:
    """Forward pass and loss of the steps of a run; labels of -100, and values of weight 0, do not count.

    Args:
        device: Device of the batches.
        loss_weights: Weigh the classes by rarity in the loss.
        graph_level: Whether the labels belong to graphs; the model then takes `batch` and `num_graphs` too.
        precision: "fp32", or autocast to "bf16" or "fp16".
        group: Processes that share each batch.

    Raises:
        ValueError: `precision` is unknown.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        loss_weights: bool = False,
        graph_level: bool = False,
        precision: str = "fp32",
        group: Group | None = None,
    ) -> None:
        check_choice("precision", precision, tuple(PRECISIONS))
        self.loss_weights, self.graph_level = loss_weights, graph_level
        self.device, self.dtype = device, PRECISIONS[precision]
        self.group = group or Group()
        self._num_classes: int | None = None
        self._counts: Callable[[], Tensor] | None = None

    def forward(self, model: nn.Module, batch: Data) -> Tensor:
        """Return the logits `[N, K]` (or `[G, K]`) of a batch with `x [N, F]` and `edge_index [2, E]`.

        The model takes what else the batch has of `pe [N, P]`, `edge_type [E]` and `edge_attr [E, D]`.

        With `nodes [M]`, logits and labels are of these nodes alone; with `queries [Q, 2]`, of these queries, among
        whose logits those at `known [2, K]` do not count. The model of a `HeteroData` takes dicts.

        Raises:
            TypeError: The model returns no tensor.
            ValueError: The model does not return one row per label.
        """
        is_hetero = isinstance(batch, HeteroData)
        inputs = (batch.x_dict, batch.edge_index_dict) if is_hetero else (batch.x, batch.edge_index)
        arguments = {name: batch[name] for name in _ARGUMENTS if name in batch and not is_hetero}
        if self.graph_level:
            arguments |= {"batch": batch.batch, "num_graphs": len(batch.y)}
        # Processes exchange their counts while the model computes; the first batch shows how many classes there are.
        shared, self._counts = self.group.size > 1, None
        if shared and self._num_classes is not None:
            self._counts = self._start_counts(batch.y)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            logits = model(*inputs, **arguments)
        rows, kind = len(batch.y), "graph, pooled with 'batch'" if self.graph_level else "label"
        check_shape("output of the model", logits, (rows, "K"), f"[{rows}, K], a row per {kind}")
        if "known" in batch:
            logits = logits.index_put(tuple(batch.known), logits.new_tensor(-torch.inf))
        self._num_classes = logits.size(1)
        if shared and self._counts is None:
            self._counts = self._start_counts(batch.y)
        return logits

    def loss(self, logits: Tensor, batch: Data) -> Tensor:
        """Return this process's part of the loss of a batch with labels `y [N]` (or `[G]`), or values `[N, 2]`."""
        total = None if self._counts is None else self._counts()
        if batch.y.is_floating_point():
            return absolute_error(logits, batch.y, counts=total)
        return cross_entropy(logits, batch.y, loss_weights=self.loss_weights, counts=total)

    def _start_counts(self, y: Tensor) -> Callable[[], Tensor]:
        assert self._num_classes is not None
        return self.group.start_average(label_counts(y, self._num_classes, loss_weights=self.loss_weights))


def check_captured(precision: str) -> None:
    """Check that steps of a precision can be captured.

    Raises:
        ValueError: They cannot.
    """
    if precision == "fp16":
        raise ValueError("'precision' needs fp32 or bf16 with cuda_graph: loss scaling is not captured (got fp16)")


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any = None,
    *,
    captured: bool = False,
    recorder: Recorder | None = None,
    mark: Callable[[str], None] | None = None,
    precision: str = "fp32",
    group: Group | None = None,
    **options: Any,
) -> Step:
    """Return the step of a run, of :func:`~pyg_dfgnn.capture_step` if it is captured.

    Args:
        model: Model on the device of the batches, called as `model(x, edge_index)`, with `pe`, `nodes`, `edge_type`,
            `edge_attr` and `queries` if the batch carries them.
        optimizer: Optimizer of the model's parameters.
        data: For a captured step, the whole graph or the capacity of the batches.
        captured: Capture the step as a CUDA graph and replay it.
        recorder: As in :func:`~pyg_dfgnn.capture_step`.
        mark: As in :class:`~pyg_dfgnn.capture.Step`.
        precision: As in :class:`Objective`; losses of "fp16" are scaled.
        group: As in :class:`Objective`.
        **options: Further arguments of :class:`Objective`.

    Raises:
        ValueError: `precision` is unknown, or model, optimizer or precision cannot be captured.
    """
    device = next(model.parameters()).device
    objective = Objective(device, precision=precision, group=group, **options)
    shared: dict[str, Any] = {"forward": objective.forward, "group": group, "mark": mark}
    if not captured:
        scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        return Step(model, objective.loss, optimizer, data, scaler=scaler, **shared)
    check_captured(precision)
    return capture_step(model, objective.loss, optimizer, data, recorder=recorder or Recorder(device), **shared)
