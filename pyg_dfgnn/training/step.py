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
from pyg_dfgnn.training.buckets import Buckets, Capacity
from pyg_dfgnn.training.metrics import cross_entropy, label_counts

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Mark = Callable[[str], None]
Work = Callable[[], tuple[Tensor, Tensor]]


def _no_mark(phase: str) -> None:
    """Ignore the end of a phase."""


class Step:
    """A training step that launches its kernels one by one.

    Args:
        model: Model on the device of the batches, called as `model(x, edge_index)`, with `pe` if the batch carries it.
        optimizer: Optimizer of the model's parameters.
        loss_weights: Weigh the classes by rarity in the loss.
        graph_level: Whether the labels belong to graphs; the model then takes `batch` and `num_graphs` too.
        precision: "fp32", or autocast to "bf16" or "fp16" (with loss scaling).
        group: Processes that share each batch; the loss is the mean over all of them.
        mark: Function called with "forward", "backward" and "optimizer" once the kernels of that phase are enqueued.

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
        # Backward on one device needs no second thread; handing over to one takes as long as many launches.
        with torch.autograd.set_multithreading_enabled(False):
            self.scaler.scale(loss).backward()
        self.mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.mark("optimizer")
        return mean(), logits.detach()

    @torch.no_grad()
    def evaluate(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Return loss and logits of a batch; the caller decides whether the model is in evaluation mode."""
        loss, logits = self.forward(batch)
        return self.group.average(loss), logits

    def forward(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Return this process's part of the loss, and its logits."""
        arguments = {"pe": batch.pe} if "pe" in batch else {}
        if self.graph_level:
            arguments |= {"batch": batch.batch, "num_graphs": batch.y.numel()}
        # Processes exchange their counts while the model computes; the first batch shows how many classes there are.
        shared, counts = self.group.size > 1, None
        if shared and self._num_classes is not None:
            counts = self._start_counts(batch.y)
        with self._autocast():
            logits = self.model(batch.x, batch.edge_index, **arguments)
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
    """Work on a GPU that was captured as a CUDA graph; each replay writes to `results`."""

    def __init__(self, work: Work, stream: torch.cuda.Stream, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # A thread of the loader may pin memory during the capture.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results = work()

    def replay(self) -> tuple[Tensor, Tensor]:
        """Launch the work again."""
        self.graph.replay()
        return self.results


class Recorder:
    """One stream and one memory pool for all recordings, which share memory because they never run together.

    Args:
        device: CUDA device of the recordings.

    Raises:
        ValueError: The device is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"'cuda_graph' needs a CUDA device (got {device})")
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, work: Work) -> tuple[Tensor, Tensor]:
        """Launch work on the stream of the recordings, which PyTorch asks for before it is captured."""
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
    """A training step that is captured as a CUDA graph and replayed, so that one launch runs all its kernels.

    The first steps on a batch launch their kernels one by one; they count as steps and settle plans, compiled kernels
    and the state of the optimizer. Later steps replay with the random numbers and learning rates that single launches
    would use; dropout on a padded batch draws for its padded size. A capture belongs to the tensors of its batch and
    reads what they hold at each replay. Therefore a batch must come again and again, or it is copied to a bucket.

    Args:
        model: As in :class:`Step`; with several processes it is wrapped for the stream of `recorder`.
        optimizer: Optimizer that torch can capture: Adam, AdamW and others with the argument `capturable`.
        padded: Sizes of batches that all differ and are copied to :class:`Buckets`; evaluation then launches kernels
            one by one. None: the same batches come again.
        mark: Function as in :class:`Step`, called during the capture but not in a replay.
        recorder: Recorder of the captures; None: a new one on the model's device.
        **options: As in :class:`Step`, but loss scaling is not captured, since it decides on the host whether to step.

    Raises:
        ValueError: The model is not on a CUDA device, or precision, optimizer or model cannot be captured.
    """

    WARM_UPS = 3
    SHARED_WARM_UPS = 12
    """Warm-ups with several processes: DistributedDataParallel times its first ten steps, which cannot be captured."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        padded: Capacity | None = None,
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
        self._captures: dict[tuple[str, int], _Capture] = {}
        self._rates: list[Tensor] = []

    def __call__(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Take one step as :meth:`Step.__call__` does; the next step on this batch overwrites the returned logits."""
        self._set_rates()
        if self.buckets is None:
            loss, logits = self._run("step", batch, lambda: super(CapturedStep, self).__call__(batch))
            return loss.clone(), logits
        with self.buckets.active(self.buckets.place(batch)) as wide:
            loss, logits = self._run("step", wide, lambda: super(CapturedStep, self).__call__(wide))
        return loss.clone(), logits[: batch.y.numel()]

    def evaluate(self, batch: Data) -> tuple[Tensor, Tensor]:
        """Return loss and logits of a batch; the next evaluation of this batch overwrites them."""
        if self.buckets is not None:
            return super().evaluate(batch)
        return self._run("evaluate", batch, lambda: super(CapturedStep, self).evaluate(batch))

    def _run(self, kind: str, batch: Data, work: Work) -> tuple[Tensor, Tensor]:
        capture = self._captures.setdefault((kind, id(batch)), _Capture(batch))
        warm_ups = self.WARM_UPS if self.group.size == 1 else self.SHARED_WARM_UPS
        if capture.recording is None and capture.runs < warm_ups:
            capture.runs += 1
            return self.recorder.run(work)
        if capture.recording is None:
            with self._capturing():
                capture.recording = self.recorder.record(work)
        return capture.recording.replay()

    def _set_rates(self) -> None:
        """Copy the learning rates of the groups to the tensors that a replay reads."""
        groups = self.optimizer.param_groups
        if not self._rates:
            for group in groups:
                group["capturable"] = True
            # A resumed run may have counted its steps on the host.
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
        """A block in which learning rates are tensors, so that replays follow schedulers, and phases are marked."""
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


class _Capture:
    """Warm-ups and recording of the work on one batch, which is kept alive."""

    def __init__(self, batch: Data) -> None:
        self.batch = batch
        self.runs = 0
        self.recording: Recording | None = None
