"""The training loop, over mini-batches of graphs or over one whole graph."""

from __future__ import annotations

import copy
import logging
import math
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pyg_dfgnn.capture import Capacity, Recorder
from pyg_dfgnn.datasets import Task
from pyg_dfgnn.distributed import Group, own_hetero_part, own_part, remote_share, wrap
from pyg_dfgnn.errors import check_bool, check_choice, check_integer, check_range, check_type
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.torch_private import foreach_copy
from pyg_dfgnn.training import checkpoint
from pyg_dfgnn.training.loaders import (
    Batches,
    Seeds,
    check_sampling,
    graph_batches,
    query_batches,
    sampled,
    weighted,
    whole_graph,
)
from pyg_dfgnn.training.loggers import LogRow, check_loggers
from pyg_dfgnn.training.metrics import ErrorScore, MetricAccumulator, RankScore
from pyg_dfgnn.training.report import write_rows
from pyg_dfgnn.training.step import PRECISIONS, check_captured, make_step

log = logging.getLogger(__name__)

MONITORS = ("val_accuracy", "val_error", "val_loss", "epoch")
DIVERGED = 1e4
"""A mean loss above this is that of no model that learns: guesses among K classes cost log K."""
# These arguments of a DataLoader decide which samples are in a batch.
_OF_SAMPLES = ("drop_last", "shuffle", "sampler", "batch_sampler", "generator")
# These options decide how an optimizer launches its kernels, not what it computes.
_LAUNCHES = ("capturable", "foreach", "fused")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to train, as `configs/trainer` has it.

    Args:
        epochs: Number of epochs unless training stops early.
        monitor: Metric that decides the best epoch and early stopping: "val_accuracy" or, of values, "val_error",
            "val_loss", or "epoch" to keep the last one; None: the first of these that the task has.
        patience: Number of epochs without a better one after which training stops; None: never.
        max_time_s: Time limit of :meth:`Trainer.fit`; an epoch starts if one of the mean duration would end in time.
            None: no limit.
        precision: "fp32", or autocast to "bf16" or "fp16" (with loss scaling).
        loader: Arguments of PyG's DataLoader but those of what is in a batch: an epoch has each sample once, and the
            training samples in an order that the seed gives. None where the task is one graph. Of a task of links its
            `batch_size` is the number of queries of a step.
        sampler: Arguments of PyG's NeighborLoader, which then samples the training batches from the one graph.
        cuda_graph: Capture the steps as CUDA graphs and replay them (see :func:`~pyg_dfgnn.capture_step`); with several
            processes the task must be one graph.
        compile: Call the model through `torch.compile(fullgraph=True)`.
        prefetch: On a GPU, make each mini-batch on a separate stream while the previous one is in use.
        resident: Keep all graphs on the device and gather mini-batches there; None: if a GPU has enough memory.
        checkpoint_every: Epochs between two writes of the checkpoints, which an interrupt and the end write too.
        log_every: Epochs between two log lines.
        progress: Show a progress bar; None: only on a terminal.
        tensorboard: Log metrics of epochs for TensorBoard, to `tensorboard` in the folder of the run.
        wandb: Project of Weights & Biases to log metrics of epochs to; None: to none.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is not among its choices or out of range.
    """

    epochs: int
    monitor: str | None = None
    patience: int | None = None
    max_time_s: float | None = None
    precision: str = "fp32"
    loader: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any] | None = None
    cuda_graph: bool = False
    compile: bool = False
    prefetch: bool = False
    resident: bool | None = None
    checkpoint_every: int = 1
    log_every: int = 1
    progress: bool | None = None
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_choice("monitor", self.monitor, (None, *MONITORS))
        check_choice("precision", self.precision, tuple(PRECISIONS))
        for name in ("epochs", "checkpoint_every", "log_every"):
            check_integer(name, getattr(self, name), 1)
        for name in ("cuda_graph", "compile", "prefetch", "tensorboard"):
            check_bool(name, getattr(self, name))
        for name in ("resident", "progress"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.wandb is not None:
            check_type("wandb", self.wandb, str, "the name of a project, or null")
        if self.patience is not None:
            check_integer("patience", self.patience, 1)
        if self.max_time_s is not None:
            check_range("max_time_s", self.max_time_s, 0.0)
        for place, section in (("loader", self.loader), ("sampler", self.sampler)):
            for name in _OF_SAMPLES:
                if section is not None and name in section:
                    need = "an epoch has each sample once, and training samples in an order that the seed gives"
                    raise ValueError(f"'{place}' needs no {name!r}: {need} (got {section[name]})")
        if self.loader is not None:
            check_integer("loader.batch_size", self.loader.get("batch_size"), 1)
            check_integer("loader.num_workers", self.loader.get("num_workers", 0), 0)
        if self.sampler is not None:
            check_integer("sampler.batch_size", self.sampler.get("batch_size"), 1)
            if not self.sampler.get("num_neighbors"):
                neighbors = self.sampler.get("num_neighbors")
                raise ValueError(f"'sampler.num_neighbors' needs one number per layer (got {neighbors})")
            if self.cuda_graph:
                raise ValueError("'cuda_graph' needs false with a sampler: sampled batches are of all sizes (got True)")
        if self.cuda_graph:
            check_captured(self.precision)

    def check_place(self, device: torch.device, group: Group) -> None:
        """Check that device, processes and installed packages can do what is asked, before any data are made.

        Raises:
            TypeError: An argument of a loader is unknown or has the wrong type.
            ValueError: They cannot.
            ModuleNotFoundError: The package of a logger is missing.
        """
        check_loggers(self.tensorboard, self.wandb)
        if self.cuda_graph:
            Recorder(device)
        if self.compile and group.size > 1:
            raise ValueError(f"'compile' needs one process (got {group.size})")
        if self.loader is not None:
            try:
                DataLoader([Data(num_nodes=1)], **self.loader)
            except (TypeError, ValueError) as error:
                need = f"arguments that PyG's DataLoader takes (got {dict(self.loader)})"
                raise type(error)(f"'loader' needs {need}: {error}") from error
        if self.sampler is not None:
            check_sampling()


class Trainer:
    """Train a model epoch by epoch and keep the best epoch by a validation metric.

    Args:
        model: Model on `device`, called as `model(x, edge_index)`, with `pe` if the graphs carry it, and with
            `edge_attr` if they do and the model has an attribute `edge_channels`.
        task: Graphs and labels.
        optimizer: Optimizer of the model's parameters.
        scheduler: Learning rate scheduler, stepped once per epoch.
        device: Device to train on.
        folder: Folder of the run; checkpoints go to `checkpoints/last.pt` and `checkpoints/best.pt` in it.
        config: Resolved config, stored in the checkpoints.
        options: Options of training.
        seed: Seed of the order of the mini-batches.
        group: Processes that train together; they share each mini-batch, or each owns a part of the whole graph.

    Raises:
        ValueError: An option does not fit the task, the device or the group.
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
        options: Options,
        *,
        seed: int = 0,
        group: Group | None = None,
    ) -> None:
        task = task.read_by(model)
        if task.is_of_values:
            task = task.map(weighted)
        self.monitor = options.monitor or f"val_{task.quantity}"
        if self.monitor not in (f"val_{task.quantity}", "val_loss", "epoch"):
            need = f"null, val_{task.quantity}, val_loss or epoch"
            raise ValueError(f"'monitor' needs {need} for {task.name} (got {options.monitor!r})")
        self.group = group = group or Group()
        _check_fit(options, task, group)
        options.check_place(device, group)
        self.model, self.task, self.optimizer, self.scheduler = model, task, optimizer, scheduler
        self.device, self.folder, self.config = device, folder, config
        self.options = options
        recorder = Recorder(device) if options.cuda_graph else None
        called: Any = model if group.size == 1 else wrap(model, group, recorder.stream if recorder else None)
        if options.compile:
            # Sizes that change from batch to batch become variables in a second compilation.
            called = torch.compile(called, fullgraph=True)
        self.seed = seed
        self.order = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Any] | None = None
        self._batches: dict[str, Any]
        largest: Data | Capacity | None = None
        if options.loader is None:
            self._batches, largest = self._of_one_graph()
        elif task.level == "link":
            self._batches = query_batches(task, device, options.loader, self.order)
        else:
            graphs = task.splits["train"]
            if options.cuda_graph:
                largest = Capacity.of(graphs, min(options.loader["batch_size"], len(graphs)))
            arguments = task, device, options.loader, self.order, group
            self._batches = graph_batches(*arguments, resident=options.resident, prefetch=options.prefetch)
        self.step = make_step(
            called,
            optimizer,
            largest,
            captured=options.cuda_graph,
            recorder=recorder,
            loss_weights=task.loss_weights,
            graph_level=task.level == "graph",
            precision=options.precision,
            group=group,
        )
        self._state = self.state()
        self._is_between_epochs = True

    def _of_one_graph(self) -> tuple[dict[str, Any], Data]:
        """Return the batches of a task that is one graph, this process's part of it, and the graph of a whole step."""
        task, group, options = self.task, self.group, self.options
        cut: Any = own_hetero_part if task.metadata else own_part
        own = task if group.size == 1 else task.map(lambda graph: cut(graph, group))
        batches: dict[str, Any] = whole_graph(own, self.device)
        (whole,) = batches["train"]
        if group.size > 1:
            (graph,) = own.splits["train"]
            share = remote_share(graph.edge_index_dict, group) if task.metadata else graph.edge_index.remote_share()
            log.info(
                "nodes are partitioned: %.0f %% of the rows that a layer reads are of other processes", 100 * share
            )
        if options.sampler is not None:
            (graph,) = task.splits["train"]
            source = sampled(graph, self.device, options.sampler, self.order, group)
            seeds = Seeds(self.device, int(graph.train_mask.sum()))
            batches["train"] = Batches(source, seeds, self.device, prefetch=options.prefetch)
        return batches, whole

    def fit(self, log_row: LogRow = lambda _: None) -> None:
        """Train until the last epoch, for `max_time_s`, or until no better epoch was seen for `patience` epochs.

        Args:
            log_row: Takes the metrics of each epoch.

        Raises:
            KeyboardInterrupt: The user interrupts, or the process receives SIGTERM; the state of the last whole epoch
                is saved before.
        """
        options, steps = self.options, len(self._batches["train"])
        started = time.perf_counter()
        bar = tqdm(
            total=options.epochs * steps,
            initial=self.epoch * steps,
            disable=not self.group.is_main or (None if options.progress is None else not options.progress),
            unit="step",
            dynamic_ncols=True,
        )
        # With several processes, one that waits for another would not receive the exception.
        before = _interrupt_at_sigterm() if self.group.size == 1 else None
        try:
            while not self.is_done and not self._is_late(started):
                with _interrupts_after() if steps == 1 else nullcontext():
                    row = self._run_epoch(bar)
                log_row(row)
                if self.epoch % options.log_every == 0 or self.epoch == options.epochs:
                    with nullcontext() if bar.disable else logging_redirect_tqdm():
                        log.info(_line(row, options.epochs, self._remaining_s(started)))
                if not bar.disable:
                    shown = {key: f"{row[key]:.4f}" for key in ("train_loss", "val_loss", f"val_{self.task.quantity}")}
                    bar.set_postfix(shown, refresh=False)
                if _has_diverged(row) and self.epoch == self.diverged_epoch:
                    with nullcontext() if bar.disable else logging_redirect_tqdm():
                        log.warning("epoch %d: the loss has diverged: %s", self.epoch, _losses(row))
                if self.epoch % options.checkpoint_every == 0:
                    self._try_save()
        except KeyboardInterrupt:
            with _interrupts_after():
                self._try_save()
            raise
        finally:
            bar.close()
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        self._try_save()
        if self.epoch < options.epochs:
            why = f"no better one for {options.patience}" if self._is_stale() else f"max_time_s={options.max_time_s}"
            log.info("stopped after epoch %d of %d: %s", self.epoch, options.epochs, why)

    @property
    def is_done(self) -> bool:
        """Whether the last epoch has run, or no better epoch was seen for `patience` epochs."""
        return self.epoch >= self.options.epochs or self._is_stale()

    @property
    def diverged_epoch(self) -> int | None:
        """First epoch with a loss that is no number, infinite or above :data:`DIVERGED`; None: there is none."""
        return next((int(row["epoch"]) for row in self.history if _has_diverged(row)), None)

    def evaluate(self, split: str) -> dict[str, float]:
        """Return loss and accuracy, or error, of the current model on "train", "val" or "test"."""
        score = self._score()
        self.model.eval()
        for batch in self._batches[split]:
            score.add(self.step.evaluate(batch), self.step.output, batch.y)
        score.gather(self.group)
        return {f"{split}_loss": score.loss, f"{split}_{self.task.quantity}": score.metric}

    def load_best(self) -> int:
        """Load the parameters of the best epoch into the model and return that epoch.

        Raises:
            RuntimeError: `fit` has not run.
        """
        if self.best is None:
            raise RuntimeError("load_best() needs the epochs of fit(), which has not run")
        self.model.load_state_dict(self.best["model"])
        return self.best["epoch"]

    def state(self) -> dict[str, Any]:
        """Return a copy of everything that a run needs to continue after the last whole epoch."""
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
        """Continue from a state; the following epochs equal those of a run that was never stopped.

        On a GPU they are equal up to rounding unless the settings ask for determinism, because the schedules of a batch
        depend on the batches that the process has seen.
        """
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.epoch, self.history, self.best = state["epoch"], list(state["history"]), state["best"]
        checkpoint.set_rng_state(state["rng"], self.device)
        self.order.set_state(state["order"])
        self._state = self.state()

    def save(self) -> None:
        """Write the state of the last whole epoch, the best parameters, and `metrics.csv` with one row per epoch."""
        if self._is_between_epochs:
            self._state = self.state()
        if not self.group.is_main:
            return
        checkpoint.save(self.folder / "checkpoints" / "last.pt", self._state)
        if self._state["best"] is not None:
            checkpoint.save(self.folder / "checkpoints" / "best.pt", {**self._state["best"], "config": self.config})
            write_rows(self.folder / "metrics.csv", self._state["history"][0], self._state["history"])

    def _try_save(self) -> None:
        """Write the state; a full disk costs the checkpoint, not the results."""
        try:
            self.save()
        except OSError as error:
            log.warning("epoch %d: the run cannot be resumed from here: %s", self.epoch, error)

    def _run_epoch(self, bar: tqdm) -> dict[str, float]:
        start = time.perf_counter()
        self._is_between_epochs = False
        lr = self.optimizer.param_groups[0]["lr"]
        trained = self._train_epoch(bar)
        validated = self.evaluate("val")
        step_scheduler(self.scheduler, validated["val_loss"])
        epoch = self.epoch + 1
        row = {"epoch": epoch, "lr": lr, **trained, **validated, "time_s": time.perf_counter() - start}
        best = self.best
        monitor = self.monitor
        # A resumed run may monitor another metric than the one that chose the best epoch so far.
        if best is None or self._is_better(row[monitor], self.history[best["epoch"] - 1][monitor]):
            best = {"epoch": epoch, monitor: row[monitor], "model": self._keep_model()}
        # The epoch counts from here on; an earlier interrupt leaves the state of the previous epoch.
        self.epoch, self.best = epoch, best
        self.history.append(row)
        self._is_between_epochs = True
        # An epoch of one step is not interrupted, and a copy of the state would take longer than the step.
        if len(self._batches["train"]) > 1:
            self._state = self.state()
        return row

    def _train_epoch(self, bar: tqdm) -> dict[str, float]:
        score = self._score()
        # All parts of a whole graph need the same signs of encodings, which are drawn before any dropout.
        whole = not isinstance(self._batches["train"], Batches)
        alike = whole and getattr(self.model, "pe_size", 0) > 0
        self.group.seed_dropout(self.model, self.seed, self.epoch, alike=alike)
        self.model.train()
        for batch in self._batches["train"]:
            score.add(self.step(batch), self.step.output, batch.y)
            bar.update()
        score.gather(self.group)
        return {"train_loss": score.loss, f"train_{self.task.quantity}": score.metric}

    @property
    def prepare_s(self) -> float:
        """Seconds that the host has spent on making mini-batches."""
        return sum(batches.host_s for batches in self._batches.values() if isinstance(batches, Batches))

    def _remaining_s(self, started: float) -> float:
        """Estimate the time until the last epoch or the time limit."""
        needed_s = (self.options.epochs - self.epoch) * statistics.fmean(row["time_s"] for row in self.history)
        if self.options.max_time_s is None:
            return needed_s
        return min(needed_s, max(0.0, started + self.options.max_time_s - time.perf_counter()))

    def _keep_model(self) -> dict[str, Any]:
        """Copy the model's state, into the memory of the previous best state if there is one."""
        live = self.model.state_dict()
        if self.best is None:
            return copy.deepcopy(live)
        best = self.best["model"]
        foreach_copy(list(best.values()), list(live.values()))
        return best

    def _score(self) -> MetricAccumulator | RankScore | ErrorScore:
        if self.task.is_of_values:
            return ErrorScore(self.task.scale, self.device)
        if self.task.metric == "mrr":
            return RankScore(self.device)
        return MetricAccumulator(self.task.num_classes, self.task.metric, self.device)

    def _is_better(self, value: float, best: float) -> bool:
        # A metric may be undefined in an epoch.
        if math.isnan(best):
            return not math.isnan(value)
        return value < best if self.monitor.endswith(("loss", "error")) else value > best

    def _is_late(self, started: float) -> bool:
        if self.options.max_time_s is None or not self.history:
            return False
        end = time.perf_counter() - started + statistics.fmean(row["time_s"] for row in self.history)
        # All processes must decide alike.
        return max(self.group.counts(int(end > self.options.max_time_s))) > 0

    def _is_stale(self) -> bool:
        patience, best = self.options.patience, self.best
        return patience is not None and best is not None and self.epoch - best["epoch"] >= patience


def _check_fit(options: Options, task: Task, group: Group) -> None:
    """Check that options fit a task and the processes.

    Raises:
        ValueError: They do not.
    """
    loader, sampler, cuda_graph = options.loader, options.sampler, options.cuda_graph
    if task.full_graph != (loader is None):
        needed = "null: the task is one whole graph" if task.full_graph else "a batch_size: the task is many graphs"
        raise ValueError(f"'loader' needs {needed} (got {loader})")
    if sampler is not None and not task.full_graph:
        raise ValueError(f"'sampler' needs null: the task is many graphs (got {sampler})")
    if task.num_relations or task.metadata:
        if sampler is not None:
            raise ValueError(f"'sampler' needs null: the edges of the task have relations (got {sampler})")
        if group.size > 1 and task.num_relations:
            need = f"features of nodes to part them among {group.size} processes"
            raise ValueError(f"'task' needs {need}: a learnt row per node would be whole on each")
        if task.level == "link" and cuda_graph:
            raise ValueError("'cuda_graph' needs false: each batch of a task of links has other queries (got True)")
    elif task.full_graph and isinstance(task.splits["train"][0].edge_index, Graph):
        if sampler is not None:
            raise ValueError(f"'sampler' needs null: the edges of the task are a Graph (got {sampler})")
        if group.size > 1:
            need = f"edges as a tensor to part them among {group.size} processes"
            raise ValueError(f"'task' needs {need} (got a Graph)")
    if cuda_graph and group.size > 1 and not task.full_graph:
        # The batches of the processes differ in size, so that the processes would capture at different steps.
        raise ValueError(f"'cuda_graph' needs one process where the task is many graphs (got {group.size})")


def step_scheduler(scheduler: LRScheduler, val_loss: float) -> None:
    """Step a scheduler after an epoch with this validation loss."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(val_loss)
    else:
        scheduler.step()


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer but keep its launch options, which belong to the device of this run."""
    kept = [{name: group[name] for name in _LAUNCHES if name in group} for group in optimizer.param_groups]
    groups = [{**saved, **own} for saved, own in zip(state["param_groups"], kept, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _interrupt_at_sigterm() -> Any:
    """Let SIGTERM, which cluster schedulers send, raise KeyboardInterrupt; return the previous handler."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def _interrupts_after() -> Iterator[None]:
    """Hold interrupts back until a short block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def _has_diverged(row: dict[str, float]) -> bool:
    return not (row["train_loss"] <= DIVERGED and row["val_loss"] <= DIVERGED)


def _losses(row: dict[str, float]) -> str:
    return ", ".join(f"{key} {row[key]:.4g}" for key in ("train_loss", "val_loss"))


def _line(row: dict[str, float], epochs: int, remaining_s: float) -> str:
    values = "  ".join(f"{key} {row[key]:.4f}" for key in row if key.startswith(("train_", "val_")))
    remaining = f", {tqdm.format_interval(remaining_s)} left" if remaining_s else ""
    return f"epoch {row['epoch']}/{epochs}  {values}  {row['time_s']:.2f} s{remaining}"
