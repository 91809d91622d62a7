"""Times training steps of real loops, all implementations of a row in turns in one process.

``python -m benchmarks experiment=loops`` appends to ``<folder>/loops.csv`` what is not there yet for this state of
the sources, and prints a summary. Losses and gradients of the first step are compared with PyG's in float64 first.
"""

import copy
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor, nn

import pyg_dfgnn
from benchmarks import results
from benchmarks.loops.cases import LOOPS, NOT_CAPTURED, LoopCase
from benchmarks.results import MEASURED_ROOMS, Progress, Rows, Table, markdown, source_digest
from benchmarks.timing import Timer, Timing
from benchmarks.training import flat_gradient
from pyg_dfgnn.capture import Capacity
from pyg_dfgnn.errors import UnsupportedError, check_choice
from pyg_dfgnn.reference.tolerances import relative_error, worst_beside
from pyg_dfgnn.torch_private import dynamo_config

BASELINE = {"pyg": "pyg", "pyg_compile": "pyg", "ours": "pyg", "ours_compile": "pyg_compile", "ours_captured": "pyg"}
"""Implementations, and what each is compared with."""
FIELDS = (
    "loop model size implementation status ms iqr_ms blocks baseline baseline_ms ratio peak_mb warm_up_s "
    "loss_error gradient_error drift note gpu torch cuda pyg cupy commit digest time"
).split()
KEY = ("loop", "model", "size", "implementation", "gpu", "torch")
BOUND = 1e-4
"""Relative error of the first loss and of its gradients, against PyG in float64."""
DRIFT = 1e-2
"""Relative difference of the loss from PyG's after the steps that warm up."""
WARM_UP_STEPS, MIN_BLOCKS, MAX_BLOCKS = 20, 10, 200
SLOWER = 0.98
STOPPED_EARLY = 2


def in_float64(batch: Any) -> Any:
    """A copy whose floating-point tensors are float64."""
    return batch.clone().apply(lambda t: t.double() if t.is_floating_point() else t)


class Batches:
    """The batches of a case on a device, one per step and then again from the first; what is new is a fresh copy."""

    def __init__(self, case: LoopCase, device: torch.device) -> None:
        self.fresh, self.batches = case.fresh, [batch.clone().to(device) for batch in case.source().batches]

    def take(self, first: int, count: int) -> list[Any]:
        """Return the batches of the steps from `first` on."""
        taken = [self.batches[i % len(self.batches)] for i in range(first, first + count)]
        return taken if self.fresh == () else [batch.clone(*(self.fresh or ())) for batch in taken]


class Steps:
    """One implementation of a case, by a key of :data:`BASELINE`, from a copy of a model; `call` takes a step.

    Raises:
        UnsupportedError: The case has no such implementation.
    """

    def __init__(self, name: str, case: LoopCase, model: nn.Module, batches: Batches) -> None:
        self.case, self.batches = case, batches
        self.model = copy.deepcopy(model)
        if name.startswith("ours"):
            pyg_dfgnn.accelerate(self.model)
        self.called: Any = torch.compile(self.model, dynamic=True) if name.endswith("compile") else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.call: Callable[[Any], Tensor] = self._eager
        if name == "ours_captured":
            self._capture()

    def _eager(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.case.loss(self.case.forward(self.called, batch), batch)
        loss.backward()
        if self.case.trains:
            self.optimizer.step()
        return loss.detach()

    def _capture(self) -> None:
        case = self.case
        if not case.trains or not case.capture:
            why = NOT_CAPTURED if case.trains else "a step without an optimizer"
            raise UnsupportedError([why], what="capture_step")
        if case.capture == "whole":
            room = self.batches.take(0, 1)[0]
        else:
            groups = case.source().groups
            room = Capacity.of([graph for group in groups for graph in group], len(groups[0]))
        step: Any = pyg_dfgnn.capture_step(self.model, case.loss, self.optimizer, room, forward=case.forward)

        def refilled(batch: Any) -> Tensor:
            for key in case.fresh or ():
                room[key].copy_(batch[key])
            return step()  # type: ignore[no-any-return]

        self.call = refilled if case.capture == "whole" else step

    def take(self, batches: list[Any]) -> Tensor:
        """Take a step on each batch; return the last loss."""
        for batch in batches:
            loss = self.call(batch)
        return loss


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A block of the main thread that ends with an error once it has taken so long; 0: it has no limit."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases_of(config: Mapping[str, Any]) -> list[LoopCase]:
    """The cases that a config chooses; a ValueError at an unknown loop or implementation."""
    for option, choices in (("loops", LOOPS), ("implementations", BASELINE)):
        for name in config[option]:
            check_choice(option, name, tuple(choices))
    models, sizes = config["models"], config["sizes"]
    cases = [case for loop in config["loops"] for case in LOOPS[loop](config["small"])]
    return [case for case in cases if case.model in (models or [case.model]) and case.size in (sizes or [case.size])]


class Turns:
    """The implementations of one case, and those that they are compared with, in turns."""

    def __init__(self, case: LoopCase, names: Sequence[str], timer: Timer, config: Mapping[str, Any]) -> None:
        needed = {"pyg", *names, *(BASELINE[name] for name in names)}
        self.case, self.timer, self.config, self.block = case, timer, config, config["block"]
        self.names = [name for name in BASELINE if name in needed]
        self.batches = Batches(case, timer.device)
        self.pygs: dict[str, float] | None = None
        self.loss: Tensor | None = None
        self.rows: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, Steps] = {}

    def measure(self) -> dict[str, dict[str, Any]]:
        """Rows by implementation: the reason why there is no time, or the time."""
        torch.manual_seed(0)
        torch.compiler.reset()
        batch = self.batches.take(0, 1)[0]
        model = self.case.make(batch).to(self.timer.device)
        exact, batch = copy.deepcopy(model).double(), in_float64(batch)
        loss = self.case.loss(self.case.forward(exact, batch), batch)
        loss.backward()
        reference = loss.detach(), flat_gradient(exact)
        for name in self.names:
            self._warm_up(name, model, reference)
        samples = self._samples()
        for name in self.steps:
            timing, row = Timing.of(samples[name]), self.rows[name]
            row |= {**timing.columns("ms"), "blocks": timing.n}
            if (baseline := BASELINE[name]) in self.steps:
                other = Timing.of(samples[baseline]).median_ms
                # Of blocks next to each other, so that what slows the host for a while slows both.
                ratio = median(theirs / own for theirs, own in zip(samples[baseline], samples[name]))
                row |= {"baseline": baseline, "baseline_ms": f"{other:.5g}", "ratio": f"{ratio:.4g}"}
        return self.rows

    def _warm_up(self, name: str, model: nn.Module, reference: tuple[Tensor, Tensor]) -> None:
        """Compare the first step of an implementation, and take it to where its steps are timed."""
        row = self.rows[name] = {"implementation": name}
        timer, started = self.timer, time.perf_counter()
        try:
            with limited(self.config["warm_up_limit_s"]):
                steps = Steps(name, self.case, model, self.batches)
                row["note"] = self.case.source().origin
                loss = steps.take(steps.batches.take(0, 1))
                first = loss, flat_gradient(steps.model)
                errors = dict(zip(("loss", "gradient"), map(relative_error, first, reference)))
                row |= {"loss_error": f"{errors['loss']:.2e}", "gradient_error": f"{errors['gradient']:.2e}"}
                if name == "pyg":
                    self.pygs = errors
                worst = worst_beside(errors, BOUND, self.pygs)
                if not worst.is_right:
                    what = f"first {worst.name} {worst.error:.1e}, allowed {worst.allowed:.1e}"
                    row["status"] = f"WRONG: error of the {what}"
                    return
                loss = steps.take(steps.batches.take(1, WARM_UP_STEPS - 1))
                timer.synchronize()
                self.loss = loss if self.loss is None else self.loss
                drift = relative_error(loss, self.loss)
                row |= {"drift": f"{drift:.2e}", "warm_up_s": f"{time.perf_counter() - started:.3g}"}
                if not drift <= DRIFT:
                    row["status"] = f"WRONG: the loss of the last step before is {drift:.1e} from PyG's"
                    return
                batch = steps.batches.take(0, 1)[0]
                peak = timer.peak_mb(lambda: steps.call(batch))
                # A replay runs in memory that its capture has kept.
                has_peak = peak is not None and name != "ours_captured"
                row |= {"peak_mb": f"{peak:.5g}" if has_peak else "", "status": "ok"}
                self.steps[name] = steps
        except Exception as error:
            row["status"] = results.reason(error)

    def _samples(self) -> dict[str, list[float]]:
        """Milliseconds per step of each block."""
        samples: dict[str, list[float]] = {name: [] for name in self.steps}
        budget = self.config["seconds"] * len(self.steps)
        spent, index = 0.0, 0
        order = random.Random(0)
        while self.steps and index < MAX_BLOCKS and (index < MIN_BLOCKS or spent < budget):
            # Each follows each other equally often: steps after a replay start with cold caches.
            for name in order.sample(list(self.steps), len(self.steps)):
                steps = self.steps[name]
                batches = steps.batches.take(index * self.block, self.block)
                try:
                    elapsed_ms = self.timer.wall_ms(partial(steps.take, batches))
                except Exception as error:
                    self.rows[name]["status"] = results.reason(error)
                    del self.steps[name]
                    continue
                spent += elapsed_ms / 1e3
                samples[name].append(elapsed_ms / self.block)
            index += 1
        return samples


def run(config: Mapping[str, Any]) -> int:
    """Measure what the config names; return the exit code, 2 where time ran out."""
    device, cases = results.device_of(config["device"]), cases_of(config)
    table = Table(Path(config["folder"] or results.default_folder("", device, config["small"])) / "loops.csv", FIELDS)
    code = 0 if config["summary"] else _measure(cases, table, Timer(device), config)
    print(summary(table.rows()))
    return code


def _measure(cases: Sequence[LoopCase], table: Table, timer: Timer, config: Mapping[str, Any]) -> int:
    """Append the rows that are not there; return 2 where time ran out, else 0."""
    # Compiled steps of one class but of several models count together.
    dynamo_config.recompile_limit = 64
    progress = Progress(config["limit_s"])
    provenance = results.environment(timer.device) | {"digest": source_digest((*MEASURED_ROOMS, "nn", "capture"))}
    done = {tuple(row[name] for name in KEY) for row in table.rows() if row["digest"] == provenance["digest"]}
    for case in cases:
        base: dict[str, Any] = {**provenance, "loop": case.loop, "model": case.model, "size": case.size}
        keys = {name: tuple({**base, "implementation": name}[key] for key in KEY) for name in config["implementations"]}
        names = [name for name, key in keys.items() if key not in done]
        if not names:
            continue
        if progress.is_over():
            return STOPPED_EARLY
        try:
            measured = Turns(case, names, timer, config).measure()
        except Exception as error:
            measured = {name: {"implementation": name, "status": results.reason(error)} for name in names}
        rows = [{**base, "time": results.now(), **measured[name]} for name in names]
        table.append(rows)
        print(*map(line, rows), sep="\n", flush=True)
        timer.release()
    return 0


def line(row: Mapping[str, Any]) -> str:
    """One row for people."""
    name = f"{row['loop']:<12} {row['model']:<18} {row['size']:<16} {row['implementation']:<14}"
    if row["status"] != "ok":
        return f"{name} {row['status']}"
    beside = f"{row['ratio']:>6} of {row['baseline']}" if row.get("ratio") else ""
    return f"{name} {row['ms']:>9} ms  {beside}  {row.get('peak_mb', '')} MB {row.get('note', '')}"


def summary(rows: Rows) -> str:
    """Per loop and implementation the geometric mean of the ratios; slower rows and those without times.

    Of rows of one name the last counts.
    """
    rows = results.latest(rows, KEY)
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["ratio"] and row["implementation"] != "pyg":
            ratios.setdefault((row["loop"], row["implementation"]), []).append(float(row["ratio"]))
    parts = [
        [loop, name, BASELINE[name], len(values), f"{geometric_mean(values):.3g}", f"{min(values):.3g}",
         sum(value < SLOWER for value in values)]
        for (loop, name), values in ratios.items()
    ]  # fmt: skip
    text = markdown(["loop", "implementation", "beside", "rows", "geometric mean", "least", "slower by 2 %"], parts)
    slow = [row for row in rows if row["ratio"] and float(row["ratio"]) < SLOWER and row["implementation"] != "pyg"]
    text += "".join(f"\nslower: {line(row)}" for row in slow)
    return text + "".join(f"\nno time: {line(row)}" for row in rows if row["status"] != "ok")
