"""One training step: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data

from pyg_dfgnn.distributed import Group
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.training.buckets import Buckets, Room
from pyg_dfgnn.training.metrics import cross_entropy, label_counts

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Mark = Callable[[str], None]
Work = Callable[[], tuple[Tensor, Tensor]]


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
        self._num_classes: int | None = None
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
        mean = self.group.start_average(loss)
        self.mark("forward")
        # One device needs no thread of its own, and handing over to it takes as long as many launches.
        with torch.autograd.set_multithreading_enabled(False):
            self.scaler.scale(loss).backward()
        self.mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.mark("optimizer")
        return mean(), logits.detach()

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
        # Processes exchange their counts while the model computes; the first batch shows how many classes there are.
        shared, counts = self.group.size > 1, None
        if shared and self._num_classes is not None:
            counts = self._start_counts(batch.y)
        with self._autocast():
            logits = self.model(batch.x, batch.edge_index, **given)
        self._num_classes = logits.size(1)
        if shared and counts is None:
            counts = self._start_counts(batch.y)
        total = None if counts is None else counts()
        return cross_entropy(logits, batch.y, loss_weights=self.loss_weights, counts=total), logits

    def _start_counts(self, y: Tensor) -> Callable[[], Tensor]:
        assert self._num_classes is not None
        return self.group.start_average(label_counts(y, self._num_classes, loss_weights=self.loss_weights))

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


class Recording:
    """Work on a GPU that was captured as a CUDA graph; `results` are where each replay writes."""

    def __init__(self, work: Work, stream: torch.cuda.Stream, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # A loader may pin memory in a thread of its own meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results = work()

    def replay(self) -> tuple[Tensor, Tensor]:
        """Launch the work again."""
        self.graph.replay()
        return self.results


class Recorder:
    """One stream and one memory pool for all recordings: they never run at the same time, so they share memory.

    Args:
        device: A CUDA device.

    Raises:
        ValueError: The device is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"'cuda_graph' needs a CUDA device (got {device})")
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, work: Work) -> tuple[Tensor, Tensor]:
        """Launch work on the stream of the recordings, as it has to be a few times before it is captured."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = work()
        current.wait_stream(self.stream)
        for result in results:
            result.record_stream(current)
        return results

    def record(self, work: Work) -> Recording:
        """Capture work without running it."""
        return Recording(work, self.stream, self.pool)


class CapturedStep(Step):
    """A training step that is captured as a CUDA graph and replayed: one launch for all its kernels.

    The first steps on a batch run one by one, count as any other, and find out what has to be known: plans, compiled
    kernels, the state of the optimizer. What follows replays, with the random numbers and learning rates that single
    launches on the same tensors would take; dropout on padded batches depends on the room of their bucket. A capture
    belongs to the tensors of its batch, which it keeps: a replay reads what they hold by then. So a batch is either one
    that comes again and again, or it is padded to the size of a bucket and put there.

    Args:
        model: As in :class:`Step`; of several processes, wrapped for the stream of `recorder`.
        optimizer: One that torch can capture: Adam, AdamW and others with the argument `capturable`.
        padded: The room of batches that are all different and go to :class:`Buckets`; evaluation then launches one by
            one. None: the same batches come again.
        mark: Called while the step is captured and not when it runs.
        recorder: Captures; one for the model's device if None.
        **options: As in :class:`Step`; without loss scaling, which decides on the host whether to step.

    Raises:
        ValueError: The model is not on a CUDA device, or the precision, the optimizer or the model cannot be captured.
    """

    WARM_UPS = 3
    SHARED_WARM_UPS = 12
    """Of several processes: DistributedDataParallel times its first ten steps, which cannot be captured."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        padded: Room | None = None,
        mark: Mark | None = None,
        recorder: Recorder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        self.recorder = recorder or Recorder(self.device)
        if self.scaler.is_enabled():
            raise ValueError("'precision' needs fp32 or bf16 with cuda_graph: loss scaling is not captured (got fp16)")
        if any("capturable" not in group for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            raise ValueError(f"'optimizer' needs the argument 'capturable' with cuda_graph, as Adam has (got {kind})")
        self.buckets = None if padded is None else Buckets(model, self.graph_level, padded)
        self.capture_mark = mark or _no_mark
        self._found: dict[tuple[str, int], _Captured] = {}
        self._rates: list[Tensor] = []

    def __call__(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Take one step, as :meth:`Step.__call__`; the next step on this batch overwrites the logits it returns."""
        self._set_rates()
        if self.buckets is None:
            loss, logits = self._run("step", batch, lambda: super(CapturedStep, self).__call__(batch))
            return loss.clone(), logits
        with self.buckets.active(self.buckets.place(batch)) as room:
            loss, logits = self._run("step", room, lambda: super(CapturedStep, self).__call__(room))
        return loss.clone(), logits[: batch.y.numel()]

    def evaluate(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch; the next evaluation of this batch overwrites them."""
        if self.buckets is not None:
            return super().evaluate(batch)
        return self._run("evaluate", batch, lambda: super(CapturedStep, self).evaluate(batch))

    def _run(self, kind: str, batch: Data, work: Work) -> tuple[Tensor, Tensor]:
        found = self._found.setdefault((kind, id(batch)), _Captured(batch))
        warm_ups = self.WARM_UPS if self.group.size == 1 else self.SHARED_WARM_UPS
        if found.recording is None and found.runs < warm_ups:
            found.runs += 1
            return self.recorder.run(work)
        if found.recording is None:
            with self._capturing():
                found.recording = self.recorder.record(work)
        return found.recording.replay()

    def _set_rates(self) -> None:
        """Hand the learning rates of the groups to the tensors that a replay reads, and make the optimizer ready."""
        groups = self.optimizer.param_groups
        if not self._rates:
            for group in groups:
                group["capturable"] = True
            # Steps counted before this, perhaps by a run that was resumed, may be counted on the host.
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(self.device, torch.float32)
            self._rates = [torch.zeros((), device=self.device) for _ in groups]
            self._known: list[float | None] = [None] * len(groups)
        for position, group in enumerate(groups):
            if group["lr"] != self._known[position]:
                self._rates[position].fill_(group["lr"])
                self._known[position] = float(group["lr"])

    @contextmanager
    def _capturing(self) -> Any:
        """Learning rates as tensors, so that schedulers, which set numbers, reach the replays; phases are marked."""
        groups = self.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates):
            group["lr"] = rate
        self.mark = self.capture_mark
        try:
            yield
        finally:
            self.mark = _no_mark
            for group, number in zip(groups, numbers):
                group["lr"] = number


class _Captured:
    """What is known of the work on one batch, which it keeps alive."""

    def __init__(self, batch: Data) -> None:
        self.batch = batch
        self.runs = 0
        self.recording: Recording | None = None
