"""Times operations side by side with their baselines, as an experiment of ``benchmarks/configs`` says.

``python -m benchmarks experiment=fig9`` appends to ``results/bench/<gpu>/fig9.csv`` what is not there yet for this
state of the sources, prints the tables and draws the figure. An implementation is first compared with float64, outputs
and gradients on every row; one that fails prints WRONG and gets no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import isolated, plots, results, tables
from benchmarks.case import DTYPES, Case, forward_backward, in_force, rounded_problem
from benchmarks.cases import FAMILY_OF, OURS, TITLES, case_of, implementation_of
from benchmarks.graphs import benchmark_graph, compare_with_recipe, compressed, recipe_of
from benchmarks.results import Progress, Row, Rows, Table, environment
from benchmarks.timing import RELEASED_ELEMENTS, Pace, TimedCall, Timer, Timing
from pyg_dfgnn.dispatch.gpu import gpu_of
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.settings import SCHEDULES

FIELDS = (
    "experiment graph nodes edges max_degree op layer size dtype implementation schedule direction state status "
    "median_ms iqr_ms n ran compulsory_mb utilisation host_us peak_mb error worst bound "
    "gpu torch cuda pyg cupy commit digest time"
).split()

FLUSHED_BELOW_BYTES = 300e6
"""Graphs with fewer compulsory forward bytes fit the cache: they are also timed flushed and as a replayed graph."""
ON_A_CPU = """\
Without a GPU no kernel runs: "ours" is the reference in plain torch. The times below say nothing about the kernels, so
no speed-ups are drawn."""
DIRECTIONS = ("fwd", "fwd+bwd", "bwd")
STATES = ("warm", "flushed", "replay")
KEY = ("graph", "op", "size", "dtype", "implementation", "schedule", "direction", "gpu", "torch")


@dataclass(frozen=True)
class Job:
    """One direction of one implementation under one schedule on one case."""

    graph: str
    case: Case
    dtype: str
    implementation: str
    schedule: str
    direction: str

    @property
    def columns(self) -> dict[str, str]:
        """The columns that name it."""
        names = {name: getattr(self, name) for name in ("graph", "dtype", "implementation", "schedule", "direction")}
        return {**names, "op": self.case.op, "layer": self.case.layer, "size": self.case.size}


class Experiment(SimpleNamespace):
    """Settings of an experiment by the keys of ``benchmarks/configs/bench.yaml``, which explains them."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> Experiment:
        """Return the settings of a resolved config; raise a ValueError at an unknown name or a size of another form."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in config.items()}
        choices: dict[str, Any] = {"ops": FAMILY_OF, "dtypes": DTYPES, "implementations": TITLES}
        for name, allowed in {**choices, "directions": DIRECTIONS, "schedules": SCHEDULES, "states": STATES}.items():
            for value in values[name]:
                check_choice(name, value, tuple(allowed))
        check_choice("baseline", values["baseline"], (*TITLES, *SCHEDULES))
        for name in values["graphs"]:
            recipe_of(name)
        for op in values["ops"]:
            for size in values["sizes"]:
                case_of(op, size)
        values |= {"pace": Pace(**values["pace"]), "device": results.device_of(values["device"])}
        values["folder"] = Path(values["folder"] or results.default_folder("bench", values["device"], values["small"]))
        return Experiment(**values)

    def jobs(self, graph: str) -> Iterator[Job]:
        """Everything to measure on a graph; jobs that share inputs follow each other."""
        for op, size, dtype, name in product(self.ops, self.sizes, self.dtypes, self.implementations):
            implementation = implementation_of(op, name)
            if implementation is None or dtype not in implementation.dtypes:
                continue
            case, is_ours = case_of(op, size), name == "fused"
            for schedule, direction in product(self.schedules if is_ours else ("",), self.directions):
                if is_ours or direction != "bwd":
                    yield Job(graph, case, dtype, name, schedule, direction)

    def missing(self, graph: str, rows: Rows, environment: Mapping[str, str]) -> list[Job]:
        """The jobs whose rows are not there yet; rows of other sources do not count for what runs on our kernels."""
        done = {
            tuple(row[name] for name in KEY)
            for row in rows
            if row["implementation"] not in OURS or row["digest"] == environment["digest"]
        }
        return [
            job
            for job in self.jobs(graph)
            if tuple({**job.columns, **environment}[name] for name in KEY) not in done
            and (self.isolated["limit_s"] or not self.is_isolated(job))
        ]

    def is_isolated(self, job: Job) -> bool:
        """Whether a job runs in a process of its own."""
        recipe = recipe_of(job.graph)
        num_edges = (recipe.miniature() if self.small else recipe).num_edges
        return job.implementation in self.isolated["implementations"] and num_edges >= self.isolated["min_edges"]


@dataclass
class Problem:
    """A case on a graph in the dtype of that name."""

    case: Case
    graph: EdgeList
    dtype: str

    @cached_property
    def reference(self) -> tuple[Inputs, Tensor, dict[str, Tensor]]:
        """Rounded inputs, gradient of the output, and the float64 results; made where something is compared."""
        inputs, grad_out = rounded_problem(self.case, self.graph, self.dtype)
        return inputs, grad_out, self.case.reference(self.graph, inputs, grad_out)


def graph_columns(graph: EdgeList) -> dict[str, Any]:
    """The columns that describe a graph, and what is measured with."""
    sizes = {"nodes": graph.num_dst, "edges": graph.num_edges, "max_degree": graph.max_degree}
    return {"graph": graph.name, **sizes, "time": results.now(), **environment(graph.device)}


class Measurement:
    """The rows of one job on its problem: correctness first, then times in the given states of the cache."""

    def __init__(self, job: Job, problem: Problem, timer: Timer, states: Sequence[str]) -> None:
        graph = problem.graph
        self.job, self.case, self.graph, self.problem, self.timer = job, job.case, graph, problem, timer
        implementation: Any = implementation_of(job.case.op, job.implementation)
        self.implementation, self.dtype = implementation, DTYPES[job.dtype]
        self.is_fused = job.implementation == "fused"
        bound = max(self.case.bound(job.dtype), implementation.error_bound)
        self.base: dict[str, Any] = {**job.columns, **graph_columns(graph), "bound": bound}
        is_small = self.case.compulsory_bytes(graph, "fwd", 4) < FLUSHED_BELOW_BYTES
        self.states = [state for state in states if state == "warm" or is_small]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per state, or the reason why there is none."""
        with in_force(self.job.schedule or "auto", self.job.dtype):
            reasons = self.implementation.reasons(self.case, self.graph)
            if self.is_fused:
                plan = self.case.plan(self.job.dtype, self.graph)
                self.base["ran"] = " ".join(f"{name}={schedule}" for name, schedule in plan.items()) or "reference"
                reasons = [*self.case.unbounded_reasons(self.job.dtype, self.graph.device), *reasons]
            if reasons:
                yield {**self.base, "status": "not run: " + "; ".join(reasons)}
                return
            try:
                yield from self._measure()
            except (RuntimeError, ValueError) as error:
                yield {**self.base, "status": results.reason(error)}
            if self.graph.num_edges * self.case.width > RELEASED_ELEMENTS:
                self.timer.release()

    def _measure(self) -> Iterator[dict[str, Any]]:
        inputs, grad_out, expected = self.problem.reference
        leaves = {name: tensor.to(self.dtype, copy=True).requires_grad_() for name, tensor in inputs.items()}
        parameters, grad_out = list(leaves.values()), grad_out.to(self.dtype)
        forward = self.implementation.prepare(self.case, self.graph, leaves)
        with torch.no_grad() if self.job.direction == "fwd" else nullcontext():
            out = forward()
            actual = forward_backward(out, leaves, grad_out) if out.requires_grad else {"out": out}
            expected = {name: expected[name] for name in actual}
            worst, error = self.case.errors(self.graph, actual, expected, grad_out).worst
            base = {**self.base, "status": "ok", "worst": worst, "error": f"{error:.2e}"}
            if not error <= self.base["bound"]:
                yield {**base, "status": "WRONG"}
                return
            del out, actual
            if self.job.direction == "fwd":
                yield from self._times(forward, base)
            elif self.job.direction == "fwd+bwd":
                yield from self._times(lambda: torch.autograd.grad(forward(), parameters, grad_out), base)
            else:
                backward = partial(torch.autograd.grad, forward(), parameters, grad_out, retain_graph=True)
                yield self._timed({**base, "state": "warm"}, self.timer.time(backward))

    def _times(self, call: TimedCall, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
        peak_mb, host_us = self.timer.peak_mb(call), self.timer.host_us(call)
        for state in self.states:
            row = {**base, "state": state}
            if state == "warm":
                row |= {"host_us": f"{host_us:.1f}", "peak_mb": "" if peak_mb is None else f"{peak_mb:.1f}"}
            if state != "replay":
                yield self._timed(row, self.timer.time(call, flushed=state == "flushed"))
            elif self.is_fused and self.timer.on_gpu:
                try:
                    yield self._timed(row, self.timer.time(self.timer.replay(call)))
                except RuntimeError as error:
                    yield {**row, "status": results.reason(error)}

    def _timed(self, row: dict[str, Any], timing: Timing) -> dict[str, Any]:
        compulsory = self.case.compulsory_bytes(self.graph, row["direction"], self.dtype.itemsize)
        share = compulsory / gpu_of(self.graph.device).memory_bytes_per_s / (timing.median_ms / 1e3)
        traffic = {"compulsory_mb": f"{compulsory / 1e6:.4g}", "utilisation": f"{share:.4f}"}
        return {**row, **timing.columns(), "n": timing.n, **traffic}


def graph_build_rows(graph: EdgeList, timer: Timer) -> list[dict[str, Any]]:
    """Wall time of building the cached CSR and CSC from ``edge_index``, each the median of five."""
    names = {"op": "graph", "layer": "graph build", "dtype": "int32", "implementation": "fused"}
    base = {**graph_columns(graph), **names, "state": "warm", "status": "ok"}
    samples: dict[str, list[float]] = {"csr": [], "csc": []}
    for _ in range(6):
        Graph.clear_cache()
        build = partial(compressed, graph)
        samples["csr"].append(timer.wall_ms(build))
        samples["csc"].append(timer.wall_ms(partial(getattr, build(), "csc")))
    # The first build warms up.
    timings = {side: Timing.of(values[1:]) for side, values in samples.items()}
    return [{**base, "direction": side, **timing.columns(), "n": timing.n} for side, timing in timings.items()]


def rows_of_job(experiment: Experiment, job: Job) -> Iterator[dict[str, Any]]:
    """All rows of one job, from its graph on: the work of a process of its own."""
    graph = benchmark_graph(job.graph, experiment.device, small=experiment.small)
    timer, problem = Timer(experiment.device, experiment.pace), Problem(job.case, graph, job.dtype)
    yield from Measurement(job, problem, timer, experiment.states).rows()


def run(config: Mapping[str, Any]) -> int:
    """Measure what the CSV of an experiment lacks, print its tables and draw its figure; return an exit code.

    It is 1 where a result of ours is wrong, and 2 where the measurement stopped early.
    """
    experiment = Experiment.of(config)
    stem = results.file_stem(experiment.device, experiment.small)
    path = experiment.folder / stem / f"{experiment.file}.csv"
    table = Table(path, FIELDS)
    finished = experiment.summary or _fill(experiment, table)
    # Rows of other sources stay until the same thing has been measured anew.
    rows = results.latest(table.rows(), tables.NAMES)
    if rows:
        on_gpu = experiment.device.type == "cuda"
        table.keep(rows)
        if not on_gpu:
            print(ON_A_CPU)
        print(tables.summary(rows, experiment.baseline if on_gpu else ""))
        if on_gpu:
            drawn = plots.draw(rows, experiment.baseline, path.with_suffix(".png"))
            print(drawn or "nothing was timed, so no figure is drawn")
    print(f"{len(rows)} rows in {path}")
    if any(row["status"] == "WRONG" and row["implementation"] == "fused" for row in rows):
        return 1
    return 0 if finished else 2


def _fill(experiment: Experiment, table: Table) -> bool:
    """Append the rows that are not there; return False when time ran out."""
    progress, timer, small = Progress(experiment.limit_s), Timer(experiment.device, experiment.pace), experiment.small

    def append(rows: Iterable[Row]) -> None:
        rows = [{**row, "experiment": experiment.name} for row in rows]
        table.append(rows)
        for row in rows:
            progress.print(tables.line(row))

    rows, now = table.rows(), environment(experiment.device)
    todo = {graph: experiment.missing(graph, rows, now) for graph in experiment.graphs}
    count = sum(map(len, todo.values()))
    print(f"{experiment.name}: {count} measurements to take, {len(rows)} rows are there", flush=True)
    for name, jobs in todo.items():
        if not jobs:
            continue
        if progress.is_over():
            return False
        try:
            graph = benchmark_graph(name, experiment.device, small=small)
        except (FileNotFoundError, ImportError) as error:
            progress.print(f"skipped graph {name}: {error}")
            continue
        if not small:
            progress.print(compare_with_recipe(graph, recipe_of(name)))
        if ("graph", name) not in {(row["op"], row["graph"]) for row in rows}:
            append(graph_build_rows(graph, timer))
        problem: Problem | None = None
        for job in jobs:
            if progress.is_over():
                return False
            if experiment.is_isolated(job):
                try:
                    append(isolated.results(rows_of_job, (experiment, job), experiment.isolated["limit_s"]))
                except isolated.EndedError as ended:
                    append([{**job.columns, **graph_columns(graph), "status": str(ended)}])
                continue
            if problem is None or (problem.case, problem.dtype) != (job.case, job.dtype):
                problem = Problem(job.case, graph, job.dtype)
            append(Measurement(job, problem, timer, experiment.states).rows())
        Graph.clear_cache()
        timer.release()
    return True
