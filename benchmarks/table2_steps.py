"""Training steps of one backend on one data set: losses beside those of a reference, then the time of each phase."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Batch, Data

import pyg_dfgnn
from benchmarks.timing import Timer, Timing, between_ms, mark
from benchmarks.training import flat_gradient
from pyg_dfgnn import nn as drop_ins
from pyg_dfgnn.capture import Capacity, CapturedStep
from pyg_dfgnn.datasets import Task
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import relative_error
from pyg_dfgnn.torch_private import foreach_copy
from pyg_dfgnn.training.loaders import labelled
from pyg_dfgnn.training.run import make_model, make_optimizer
from pyg_dfgnn.training.step import make_step

PHASES = ("transfer", "preprocess", "forward", "backward", "optimizer")
SUMMED = ("preprocess", "forward", "backward")
"""Phases that the paper adds up."""
READ = ("x", "edge_index", "edge_attr", "y")
"""Attributes of a graph that a step reads, `edge_attr` only if the model takes it; no others go to the device."""
MIN_WALL_STEPS, MAX_WALL_STEPS = 5, 200
STEP_BY_STEP = ("step_loss_difference", "step_gradient_difference", "step_update_difference")
"""Largest relative differences where each step starts from the parameters of the reference: of the losses, of the
average of the gradients, and of what the updates do to the loss.
"""
ONCE = 5
"""How often one whole graph is moved and prepared for a median."""
TURN = 5
"""Steps of a backend before the other has its turn."""
Prepare = Callable[[Data], Any]
"""Called with a batch on the device."""


class Phases:
    """Marks the end of each phase of a step: events on a GPU, in captured graphs too; a wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._ends: dict[str, Any] = {}
        self._captures: list[dict[str, Any]] = []

    def start(self) -> None:
        """A step begins."""
        self._ends = {}
        self("start")

    def __call__(self, phase: str) -> None:
        capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        if capturing and phase == "forward":
            self._captures.append({})
        (self._captures[-1] if capturing else self._ends)[phase] = mark(self.on_gpu, external=capturing)

    def durations_ms(self) -> dict[str, float]:
        """Milliseconds of each phase of the last step, of those of the paper, and of the whole; the device is idle."""
        start = self._ends["start"]
        # The capture that was replayed last.
        replayed = max(self._captures, key=lambda ends: between_ms(start, ends["optimizer"]), default={})
        ends = {**replayed, **self._ends}
        marks = ["start", *(phase for phase in PHASES if phase in ends)]
        spans = {end: between_ms(ends[start], ends[end]) for start, end in zip(marks, marks[1:])}
        whole = between_ms(ends["start"], ends[marks[-1]])
        return {**spans, "sum": sum(spans.get(phase, 0.0) for phase in SUMMED), "step": whole}


@dataclass(frozen=True)
class TaskBatches:
    """Batches of a data set for the steps, on the host, pinned for a GPU; only one where it is one whole graph."""

    task: Task
    batches: list[Data]

    @staticmethod
    def of(task: Task, batch_size: int, pinned: bool) -> TaskBatches:
        """The training graphs of a task in batches; the training nodes of a task that is one graph."""
        whole, graphs = task.full_graph, task.splits["train"]
        graphs = [labelled(graph, "train") if whole else graph for graph in graphs]
        graphs = [Data(**{key: graph[key] for key in READ if key in graph}) for graph in graphs]
        starts = range(0, len(graphs), batch_size)
        batches = graphs if whole else [Batch.from_data_list(graphs[i : i + batch_size]) for i in starts]
        return TaskBatches(task, [batch.pin_memory() for batch in batches] if pinned else batches)


@dataclass(frozen=True)
class Backend:
    """How a model is trained, as `configs/backend` and the trainer of a run have it; `convs` is a module."""

    name: str
    convs: str
    settings: dict[str, Any]
    compile: bool
    cuda_graph: bool

    @property
    def is_ours(self) -> bool:
        return self.convs == drop_ins.__name__

    def preparation(self, model: nn.Module) -> Prepare:
        """Return the function that prepares a batch on its device for the model, found again by its `edge_index`."""
        if self.is_ours:
            # Without self-loops, which layers that store some add; layers sort the batches that they take themselves.
            return lambda batch: None if isinstance(batch, Batch) else Graph.of(batch.edge_index, batch.num_nodes).csc
        compress = getattr(importlib.import_module(self.convs), "compress", None)
        if compress is not None:
            loops = any(getattr(m, "add_self_loops", False) or getattr(m, "self_loops", False) for m in model.modules())
            return lambda batch: compress(batch.edge_index, batch.num_nodes, loops)
        return lambda batch: None


@dataclass(frozen=True)
class Reference:
    """Run that other backends are compared with: its backend, initial state, losses and first gradient."""

    backend: Backend
    state: dict[str, Tensor]
    losses: list[float]
    gradient: Tensor

    def differences(self, losses: list[float], gradient: Tensor) -> dict[str, float]:
        """How far losses and the first gradient are from these."""
        of_losses, of_gradient = relative_difference(losses, self.losses), relative_error(gradient, self.gradient)
        return {"loss_difference": of_losses, "gradient_difference": of_gradient}


def relative_difference(numbers: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of numbers from the expected ones; NaN if there is a NaN."""
    actual, wanted = (torch.tensor(values, dtype=torch.float64) for values in (numbers, expected))
    return float(((actual - wanted) / wanted).abs().max())


def agree(differences: Mapping[str, float], bound: float) -> bool:
    """Whether the first gradient and the losses are within the bound, or those of each step from the same parameters.

    Nothing agrees with a NaN.
    """

    def within(*names: str) -> bool:
        return all(differences.get(name, float("nan")) <= bound for name in names)

    return within("gradient_difference") and (within("loss_difference") or within(*STEP_BY_STEP))


def average_gradient(optimizer: Optimizer) -> Tensor:
    """The average of the gradients of all steps that Adam keeps, the last ones weigh most, on the CPU."""
    return torch.cat([state["exp_avg"].flatten().cpu() for state in optimizer.state.values()])


def effect_of_update(before: Sequence[Tensor], after: Iterable[Tensor], averages: Sequence[Tensor | None]) -> float:
    """The change of the loss by an update of parameters, to first order, for average gradients of those in use."""
    pairs = [(a.double() - b.double(), g.double()) for b, a, g in zip(before, after, averages) if g is not None]
    return float(sum((update * gradient).sum() for update, gradient in pairs))


def measure(
    backend: Backend, options: Any, source: TaskBatches, reference: Reference | None
) -> tuple[dict[str, Any], Reference]:
    """Take the steps of one backend from the initial state of the reference, compare them with it, and time them.

    Training may carry a difference of rounding beyond any bound. Where the losses differ by more than `pace.bound`, the
    steps are therefore taken again, each from the parameters that the reference has at this step: then every loss, the
    average of all gradients and every update decide. There is no time where they do not :func:`agree`.

    Returns:
        The columns of status, times, memory and differences, and these steps as a reference.

    Raises:
        UnsupportedError: The backend cannot run these steps.
    """
    pace, device = options.pace, options.device
    timer, task = Timer(device), source.task
    timer.release()
    allocated = 0
    if timer.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
    with pyg_dfgnn.local_settings(**backend.settings):
        state = None if reference is None else reference.state
        turns = _Turns(backend, options, source, state)
        state = {name: value.detach().cpu().clone() for name, value in turns.model.state_dict().items()}
        # At worst each batch is captured by itself, after steps without a capture.
        captures = (CapturedStep.WARM_UPS + 1) * len(source.batches) if backend.cuda_graph else 0

        losses, spans = [], []
        for index in range(pace.steps):
            started = time.perf_counter()
            loss = turns(index)
            timer.synchronize()
            if index == 0:
                first_step_s, gradient = time.perf_counter() - started, flat_gradient(turns.model).cpu()
            losses.append(float(loss))
            if index >= max(pace.warm_up, captures):
                spans.append(turns.phases.durations_ms())
        peak_mb = f"{(torch.cuda.max_memory_allocated(device) - allocated) / 1e6:.1f}" if timer.on_gpu else ""
        differences = {} if reference is None else reference.differences(losses, gradient)
        if reference is not None and differences["gradient_difference"] <= pace.bound < differences["loss_difference"]:
            differences |= step_by_step(backend, options, source, reference)
        columns = {name: f"{value:.2e}" for name, value in differences.items()}
        own = Reference(backend, state, losses, gradient)
        if reference is not None and not agree(differences, pace.bound):
            what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in columns.items())
            name = reference.backend.name
            return {**columns, "status": f"WRONG: {what} from {name}", "reference": name}, own
        columns["status"] = "ok"

        if reference is not None and task.full_graph:
            other = reference.backend
            with pyg_dfgnn.local_settings(**other.settings):
                others = _Turns(other, options, source, reference.state)
                for index in range(pace.warm_up):
                    others(index)
            spans, of_reference = [], []
            for _ in range(pace.rounds):
                spans += turns.take(TURN, timer)
                with pyg_dfgnn.local_settings(**other.settings):
                    of_reference += others.take(TURN, timer)
            reference_sum = Timing.of([span["sum"] for span in of_reference])
            columns["reference_sum_ms"] = f"{reference_sum.median_ms:.5g}"
        timings = {phase: Timing.of([span[phase] for span in turns.once]) for phase in PHASES[:2] if turns.once}
        timings |= {phase: Timing.of([span[phase] for span in spans]) for phase in spans[0]}
        for phase, timing in timings.items():
            columns |= timing.columns(f"{phase}_ms", f"{phase}_iqr_ms")

        steps = int(1e3 * pace.wall_s / timings["step"].median_ms)
        steps, indices = min(max(steps, MIN_WALL_STEPS), MAX_WALL_STEPS), count()
        wall_ms = timer.wall_ms(lambda: turns(next(indices)), steps)
        columns |= {"n": str(timings["step"].n), "wall_ms": f"{wall_ms:.5g}"}
        columns |= {"first_step_s": f"{first_step_s:.3f}", "peak_mb": peak_mb}
        columns["reference"] = "" if reference is None else reference.backend.name
    return columns, own


def step_by_step(backend: Backend, options: Any, source: TaskBatches, reference: Reference) -> dict[str, float]:
    """Return the differences of a backend's steps, each of which starts from the parameters of the reference then.

    An update counts by what it does to the loss, its product with the average of the gradients: Adam makes steps of
    full size of gradients that are rounding alone.
    """
    with pyg_dfgnn.local_settings(**reference.backend.settings):
        others = _Turns(reference.backend, options, source, reference.state)
    with pyg_dfgnn.local_settings(**backend.settings):
        turns = _Turns(backend, options, source, reference.state)
    model, other = turns.model, others.model
    losses, expected = [], []
    updates: list[float] = []
    wanted: list[float] = []
    for index in range(options.pace.steps):
        with torch.no_grad():
            foreach_copy(list(model.parameters()), list(other.parameters()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pyg_dfgnn.local_settings(**backend.settings):
            losses.append(float(turns(index)))
        with pyg_dfgnn.local_settings(**reference.backend.settings):
            expected.append(float(others(index)))
        averages = [others.optimizer.state.get(parameter, {}).get("exp_avg") for parameter in other.parameters()]
        for effects, stepped in ((updates, model), (wanted, other)):
            effects.append(effect_of_update(before, (p.detach() for p in stepped.parameters()), averages))
    return {
        STEP_BY_STEP[0]: relative_difference(losses, expected),
        STEP_BY_STEP[1]: relative_error(average_gradient(turns.optimizer), average_gradient(others.optimizer)),
        STEP_BY_STEP[2]: relative_difference(updates, wanted),
    }


def _step(
    backend: Backend, model: nn.Module, optimizer: Optimizer, task: Task, data: Any, phases: Phases
) -> Callable[[Data], Tensor]:
    called: Any = model
    if backend.compile:
        # Compilations of one model class count together, and end in an error beyond a number.
        torch.compiler.reset()
        called = torch.compile(model, fullgraph=True, dynamic=not task.full_graph)
    options: dict[str, Any] = {"loss_weights": task.loss_weights, "graph_level": task.level == "graph"}
    return make_step(called, optimizer, data, captured=backend.cuda_graph, mark=phases, **options)


class _Turns:
    """Steps of a backend, one after the other, each on the next batch, from a state or from that of the seed.

    One whole graph is moved and prepared once, batches by each step; `once` has the milliseconds of each trial.
    """

    def __init__(self, backend: Backend, options: Any, source: TaskBatches, state: Mapping[str, Tensor] | None) -> None:
        self.device, self.batches, task = options.device, source.batches, source.task
        torch.manual_seed(options.pace.seed)
        convs = importlib.import_module(backend.convs)
        model: nn.Module = make_model(partial(instantiate(options.model, _partial_=True), convs=convs), task)
        self.model = model.to(self.device)
        if state is not None:
            self.model.load_state_dict(state)
        self.optimizer = make_optimizer(options.optimizer, self.model, self.device)
        self.phases, self.prepare = Phases(self.device), backend.preparation(self.model)
        self.once: list[dict[str, float]] = []
        self._resident: Data | None = None
        for _ in range(ONCE if task.full_graph else 0):
            self.phases.start()
            self._resident = self._arrive(self.batches[0])
            Timer(self.device).synchronize()
            self.once.append(self.phases.durations_ms())
        data: Any = self._resident
        if data is None:
            data = Capacity.of(task.splits["train"], max(batch.num_graphs for batch in self.batches))
        self.step = _step(backend, self.model, self.optimizer, task, data, self.phases)

    def __call__(self, index: int) -> Tensor:
        """The loss of a step, on the device."""
        self.phases.start()
        batch = self._resident
        if batch is None:
            batch = self._arrive(self.batches[index % len(self.batches)])
        return self.step(batch)

    def take(self, count: int, timer: Timer) -> list[dict[str, float]]:
        """Milliseconds of steps of which each is waited for; the first, which follows other work, is left out."""
        spans = []
        for index in range(count):
            loss = self(index)
            timer.synchronize()
            float(loss)
            spans.append(self.phases.durations_ms())
        return spans[1:]

    def _arrive(self, host: Data) -> Data:
        # New tensors each time, on a CPU too, so that nothing known of an earlier batch is found again.
        batch = copy(host).apply(lambda tensor: tensor.to(self.device, non_blocking=True, copy=True))
        self.phases("transfer")
        self.prepare(batch)
        self.phases("preprocess")
        return batch
