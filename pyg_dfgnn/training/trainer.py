"""The training loop, over mini-batches of graphs or over one whole graph."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.distributed import Group, own_part, shared_loader, wrap
from pyg_dfgnn.errors import check_choice, check_range
from pyg_dfgnn.training import checkpoint
from pyg_dfgnn.training.metrics import IGNORED, Score
from pyg_dfgnn.training.step import Step

log = logging.getLogger(__name__)

MONITORS = ("val_accuracy", "val_loss")


class Trainer:
    """Trains a model epoch by epoch and keeps the best one by a validation metric.

    Args:
        model: Called as `model(x, edge_index)`, or with `pe` where the graphs carry it; on `device`.
        task: The graphs.
        optimizer: Of the model's parameters.
        scheduler: Stepped once per epoch.
        device: Where to train.
        folder: Checkpoints go to `checkpoints/last.pt` and `checkpoints/best.pt` in it.
        config: Resolved config, stored in the checkpoints.
        epochs: Most epochs.
        monitor: "val_accuracy" or "val_loss"; decides the best epoch and early stopping.
        patience: Stop after this many epochs without a better one; None trains all epochs.
        precision: "fp32", or autocast to "bf16" or "fp16" (with loss scaling).
        loader: Arguments of PyG's DataLoader; None where the task is one graph.
        seed: Decides the order of the mini-batches.
        group: The processes that train together: they share each mini-batch, or each owns a part of the whole graph.
        prepare: Called with each batch on its device, before the model sees it.
        checkpoint_every: Epochs between two writes of the checkpoints; an interrupt and the end write them too.
        log_every: Epochs between two log lines where no progress bar is shown.
        progress: Show a progress bar; None: only on a terminal.

    Raises:
        ValueError: An argument is not among its choices, out of range, or `loader` does not fit the task.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        device: torch.device,
        folder: Path,
        config: dict[str, Any],
        *,
        epochs: int,
        monitor: str = "val_accuracy",
        patience: int | None = None,
        precision: str = "fp32",
        loader: dict[str, Any] | None = None,
        seed: int = 0,
        group: Group | None = None,
        prepare: Callable[[Data], None] | None = None,
        checkpoint_every: int = 1,
        log_every: int = 1,
        progress: bool | None = None,
    ) -> None:
        check_range("epochs", epochs, 1)
        check_choice("monitor", monitor, MONITORS)
        check_range("checkpoint_every", checkpoint_every, 1)
        check_range("log_every", log_every, 1)
        if patience is not None:
            check_range("patience", patience, 1)
        if task.full_graph != (loader is None):
            needed = "null: the task is one whole graph" if task.full_graph else "a batch_size: the task is many graphs"
            raise ValueError(f"'loader' needs {needed} (got {loader})")
        self.group = group = group or Group()
        if group.size > 1 and task.full_graph:
            task = task.map(lambda graph: own_part(graph, group))
        self.model, self.task, self.optimizer, self.scheduler = model, task, optimizer, scheduler
        self.device, self.folder, self.config = device, folder, config
        self.epochs, self.monitor, self.patience = epochs, monitor, patience
        self.step = Step(
            model if group.size == 1 else wrap(model, group),
            optimizer,
            loss_weights=task.loss_weights,
            graph_level=task.level == "graph",
            precision=precision,
            group=group,
        )
        self.prepare = prepare
        self.checkpoint_every, self.log_every, self.progress = checkpoint_every, log_every, progress
        self.seed = seed
        self.order = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Any] | None = None
        self._batches = self._whole_graph() if loader is None else self._loaders(loader)
        self._state = self.state()

    def fit(self) -> None:
        """Train until the last epoch or until no better epoch was seen for `patience` epochs.

        Raises:
            KeyboardInterrupt: As it came, after the state of the last whole epoch was saved.
        """
        steps = len(self._batches["train"])
        bar = tqdm(
            total=self.epochs * steps,
            initial=self.epoch * steps,
            disable=not self.group.is_main or (None if self.progress is None else not self.progress),
            unit="step",
            dynamic_ncols=True,
        )
        try:
            while self.epoch < self.epochs and not self._is_stale():
                row = self._run_epoch(bar)
                if bar.disable and (self.epoch % self.log_every == 0 or self.epoch == self.epochs):
                    log.info(_line(row, self.epochs))
                bar.set_postfix({key: f"{row[key]:.4f}" for key in ("train_loss", "val_loss", "val_accuracy")})
                if self.epoch % self.checkpoint_every == 0:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            log.info("interrupted after epoch %d; go on with resume=%s", self.epoch, self.folder)
            raise
        finally:
            bar.close()
        self.save()

    def evaluate(self, split: str) -> dict[str, float]:
        """Loss and accuracy of the model as it is on "train", "val" or "test"."""
        score = self._score()
        self.model.eval()
        for batch in self._on_device(split):
            score.add(*self.step.evaluate(batch), batch.y)
        score.gather(self.group)
        return {f"{split}_loss": score.loss, f"{split}_accuracy": score.metric}

    def load_best(self) -> int:
        """Give the model the parameters of its best epoch; returns that epoch."""
        assert self.best is not None, "fit() has not run"
        self.model.load_state_dict(self.best["model"])
        return self.best["epoch"]

    def state(self) -> dict[str, Any]:
        """Everything a run needs to go on after the last whole epoch, as copies."""
        live = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.step.scaler.state_dict(),
        }
        kept = {"epoch": self.epoch, "history": list(self.history), "best": self.best, "config": self.config}
        return {
            **copy.deepcopy(live),
            **kept,
            "rng": checkpoint.rng_state(self.device),
            "order": self.order.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; the following epochs equal those of a run that was never stopped."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.epoch, self.history, self.best = state["epoch"], list(state["history"]), state["best"]
        checkpoint.set_rng_state(state["rng"], self.device)
        self.order.set_state(state["order"])
        self._state = self.state()

    def save(self) -> None:
        """Write the state of the last whole epoch and the best parameters."""
        if not self.group.is_main:
            return
        checkpoint.save(self.folder / "checkpoints" / "last.pt", self._state)
        if self._state["best"] is not None:
            checkpoint.save(self.folder / "checkpoints" / "best.pt", {**self._state["best"], "config": self.config})

    def _run_epoch(self, bar: tqdm) -> dict[str, float]:
        start = time.perf_counter()
        lr = self.optimizer.param_groups[0]["lr"]
        trained = self._train_epoch(bar)
        validated = self.evaluate("val")
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validated["val_loss"])
        else:
            self.scheduler.step()
        epoch = self.epoch + 1
        row = {"epoch": epoch, "lr": lr, **trained, **validated, "time_s": time.perf_counter() - start}
        best = self.best
        if best is None or self._is_better(row[self.monitor], best[self.monitor]):
            best = {"epoch": epoch, self.monitor: row[self.monitor], "model": copy.deepcopy(self.model.state_dict())}
        # From here on the epoch counts; an interrupt before it leaves the state of the epoch before.
        self.epoch, self.best = epoch, best
        self.history.append(row)
        self._state = self.state()
        return row

    def _train_epoch(self, bar: tqdm) -> dict[str, float]:
        score = self._score()
        # The parts of a whole graph draw alike: they need the same signs of encodings.
        if not self.task.full_graph:
            self.group.seed_dropout(self.model, self.seed, self.epoch)
        self.model.train()
        for batch in self._on_device("train"):
            score.add(*self.step(batch), batch.y)
            bar.update()
        score.gather(self.group)
        return {"train_loss": score.loss, "train_accuracy": score.metric}

    def _on_device(self, split: str) -> Iterator[Data]:
        for batch in self._batches[split]:
            batch = batch.to(self.device, non_blocking=True)
            if self.prepare is not None:
                self.prepare(batch)
            yield batch

    def _whole_graph(self) -> dict[str, Any]:
        return {split: [_labelled(graph.to(self.device), split)] for split, (graph,) in self.task.splits.items()}

    def _loaders(self, options: dict[str, Any]) -> dict[str, Any]:
        pinned = {"pin_memory": self.device.type == "cuda", **options}
        return {
            split: self._loader(graphs, shuffle=split == "train", generator=self.order, **pinned)
            for split, graphs in self.task.splits.items()
        }

    def _loader(self, graphs: list[Data], **options: Any) -> DataLoader:
        return DataLoader(graphs, **options) if self.group.size == 1 else shared_loader(graphs, self.group, **options)

    def _score(self) -> Score:
        return Score(self.task.num_classes, self.task.metric, self.device)

    def _is_better(self, value: float, best: float) -> bool:
        return value < best if self.monitor.endswith("loss") else value > best

    def _is_stale(self) -> bool:
        return self.patience is not None and self.best is not None and self.epoch - self.best["epoch"] >= self.patience


def _labelled(graph: Data, split: str) -> Data:
    """The graph with the labels of one split, all others ignored; tensors are shared."""
    graph = copy.copy(graph)
    graph.y = graph.y.masked_fill(~graph[f"{split}_mask"], IGNORED)
    return graph


def _line(row: dict[str, float], epochs: int) -> str:
    values = "  ".join(f"{key} {row[key]:.4f}" for key in ("train_loss", "train_accuracy", "val_loss", "val_accuracy"))
    return f"epoch {row['epoch']}/{epochs}  {values}  {row['time_s']:.2f} s"
