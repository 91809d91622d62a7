"""Times attention layers side by side with the baselines, as an experiment of ``configs/bench`` says.

``python -m pyg_dfgnn.bench experiment=fig9`` appends to ``results/bench/<gpu>/fig9.csv`` what is not there yet for this
state of the sources, prints the tables and writes the plots. An implementation is first compared with float64, outputs
and gradients on every row; one that fails prints WRONG and no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.bench import isolated, plots, tables
from pyg_dfgnn.bench.baselines import IMPLEMENTATIONS
from pyg_dfgnn.bench.cases.attention import LAYERS, AttentionCase, Inputs, forward_backward
from pyg_dfgnn.bench.experiment import FLUSHED_BELOW_BYTES, Experiment, Job, expected_s
from pyg_dfgnn.bench.graphs import BenchGraph, benchmark_graph, compare_with_recipe, recipe_of
from pyg_dfgnn.bench.oracle import BOUNDS, compare, float64_reference
from pyg_dfgnn.bench.prepare import (
    DTYPES,
    Prepared,
    collect_specs,
    compressed,
    in_force,
    problem_of,
    rounded_problem,
    unbounded_reasons,
)
from pyg_dfgnn.bench.results import Rows, Table, environment, file_stem, now
from pyg_dfgnn.bench.timing import Call, Timer, Timing
from pyg_dfgnn.bench.traffic import compulsory_bytes, gathered_bytes
from pyg_dfgnn.dispatch.attention.problem import WALKS
from pyg_dfgnn.dispatch.core import AttentionProblem, LaunchPlan, plan, unsupported_reasons
from pyg_dfgnn.dispatch.gpu import gpu_of
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.runtime.compiler import CompileError, Spec, precompile

FIELDS = (
    "experiment graph nodes edges max_degree score layer heads channels dtype implementation schedule direction state "
    "status median_ms iqr_ms n forward_schedule targets_schedule sources_schedule compulsory_mb gathered_mb "
    "utilisation gather_roof host_us peak_mb error worst bound gpu torch cuda pyg cupy commit "
    "digest time"
).split()

RELEASED_ELEMENTS = 1 << 27
"""Features along all edges above which cached memory is given back between measurements."""

Row = dict[str, Any]
Reference = tuple[Inputs, Tensor, dict[str, Tensor]]


def graph_columns(graph: BenchGraph) -> Row:
    return {"graph": graph.name, "nodes": graph.num_dst, "edges": graph.num_edges, "max_degree": graph.max_degree}


def job_columns(job: Job, device: torch.device) -> Row:
    """What names a measurement, and what it was made with."""
    case = job.case
    return {
        "graph": job.graph,
        "score": case.score,
        "layer": LAYERS[case.score],
        "heads": case.heads,
        "channels": case.channels,
        "dtype": job.dtype,
        "implementation": job.implementation,
        "schedule": job.schedule,
        "time": now(),
        **environment(device),
    }


class Measurement:
    """All rows of one job: correctness first, then times.

    Args:
        job: What to measure.
        graph: Where.
        reference: Rounded float32 inputs, gradient of the output, and the float64 results.
        timer: The clock.
        states: Which of 'warm', 'flushed' and 'replay' to time.
    """

    def __init__(self, job: Job, graph: BenchGraph, reference: Reference, timer: Timer, states: Sequence[str]) -> None:
        self.job, self.case, self.graph, self.timer = job, job.case, graph, timer
        self.implementation = IMPLEMENTATIONS[job.implementation]()
        self.is_fused = job.implementation == "fused"
        inputs, grad_out, self.expected = reference
        self.dtype = DTYPES[job.dtype]
        self.leaves = {name: tensor.to(self.dtype, copy=True).requires_grad_() for name, tensor in inputs.items()}
        self.grad_out = grad_out.to(self.dtype)
        self.bound = max(BOUNDS[job.dtype], self.implementation.error_bound)
        self.base: Row = {**job_columns(job, graph.device), **graph_columns(graph), "bound": self.bound}
        small = compulsory_bytes(self.case, graph, "fwd") < FLUSHED_BELOW_BYTES
        self.states = [state for state in states if state == "warm" or small]

    def rows(self, memory_bytes: float) -> Iterator[Row]:
        """One row per direction and state, or per direction the reason why there is none."""
        forward_only = [d for d in self.job.directions if d == "fwd"]
        training = [d for d in self.job.directions if d != "fwd"]
        with in_force(self.job.schedule or "auto", self.job.dtype):
            unbounded: list[str] = []
            if self.is_fused:
                problem = problem_of(self.case, self.job.dtype, self.graph.device)
                self.base.update(self._plan_columns(problem))
                unbounded = unbounded_reasons(problem)
            for directions in filter(None, (forward_only, training)):
                own = self.implementation.reasons(self.case, self.graph, directions is training, memory_bytes)
                if reasons := [*unbounded, *own]:
                    yield from self._without_times(directions, "not run: " + "; ".join(reasons))
                    continue
                try:
                    yield from self._measure(directions, directions is training)
                except UnsupportedError as error:
                    yield from self._without_times(directions, "not run: " + "; ".join(error.reasons))
                except (RuntimeError, NotImplementedError, ValueError) as error:
                    message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    yield from self._without_times(directions, f"failed: {message}")
                if self.graph.num_edges * self.case.heads * self.case.channels > RELEASED_ELEMENTS:
                    self.timer.release()

    def _without_times(self, directions: Sequence[str], status: str) -> Iterator[Row]:
        yield from ({**self.base, "direction": direction, "status": status} for direction in directions)

    def _plan_columns(self, problem: AttentionProblem) -> Row:
        if unsupported_reasons(problem):
            return {f"{walk}_schedule": "reference" for walk in WALKS}
        return plan_columns(plan(problem, compressed(self.graph)))

    def _measure(self, directions: Sequence[str], training: bool) -> Iterator[Row]:
        forward = self.implementation.prepare(self.case, self.graph, self.leaves)
        leaves = list(self.leaves.values())
        with nullcontext() if training else torch.no_grad():
            result: dict[str, Tensor] = {}

            def once() -> None:
                out = forward()
                result.update(forward_backward(out, self.leaves, self.grad_out) if training else {"out": out})

            once()
            gate = self._gate(result, training)
            result.clear()
            base = {**self.base, **gate}
            if gate["status"] != "ok":
                yield from ({**base, "direction": direction} for direction in directions)
                return

            def both() -> tuple[Tensor, ...]:
                return torch.autograd.grad(forward(), leaves, self.grad_out)

            if "fwd" in directions:
                yield from self._times(forward, {**base, "direction": "fwd"})
            if "fwd+bwd" in directions:
                yield from self._times(both, {**base, "direction": "fwd+bwd"})
            if "bwd" in directions:
                out = forward()

                def backward() -> tuple[Tensor, ...]:
                    return torch.autograd.grad(out, leaves, self.grad_out, retain_graph=True)

                yield self._timed({**base, "direction": "bwd", "state": "warm"}, self.timer.time(backward))
            walks = [walk for walk in WALKS if walk in directions]
            if walks:
                timings = self.timer.walks(both)
                with torch.no_grad():
                    timings.update(self.timer.walks(forward))
                for walk in walks:
                    row = {**base, "direction": walk, "state": "warm"}
                    if walk in timings:
                        yield self._timed(row, timings[walk])
                    else:
                        yield {**row, "status": "not run: launches no kernel"}

    def _gate(self, result: dict[str, Tensor], training: bool) -> Row:
        expected = self.expected if training else {"out": self.expected["out"]}
        worst, error = compare(self.case, self.graph, result, expected, self.grad_out).worst
        return {"status": "ok" if error <= self.bound else "WRONG", "worst": worst, "error": f"{error:.2e}"}

    def _times(self, call: Call, base: Row) -> Iterator[Row]:
        peak_mb = self.timer.peak_mb(call)
        extra = {
            "host_us": f"{self.timer.host_us(call):.1f}",
            "peak_mb": "" if peak_mb is None else f"{peak_mb:.1f}",
        }
        for state in self.states:
            row = {**base, "state": state}
            if state == "replay":
                if self.is_fused and self.timer.on_gpu:
                    yield self._replayed(call, row)
            else:
                timing = self.timer.time(call, flushed=state == "flushed")
                yield {**self._timed(row, timing), **(extra if state == "warm" else {})}

    def _replayed(self, call: Call, row: Row) -> Row:
        try:
            return self._timed(row, self.timer.time(self.timer.replay(call)))
        except RuntimeError as error:
            return {**row, "status": f"failed: {' '.join(str(error).split())[:300]}"}

    def _timed(self, row: Row, timing: Timing) -> Row:
        arguments = self.case, self.graph, row["direction"], self.dtype.itemsize
        compulsory, gathered = compulsory_bytes(*arguments), gathered_bytes(*arguments)
        gpu = gpu_of(self.graph.device)
        seconds = timing.median_ms / 1e3
        return {
            **row,
            **timing_columns(timing),
            "compulsory_mb": f"{compulsory / 1e6:.4g}",
            "gathered_mb": f"{gathered / 1e6:.4g}",
            "utilisation": f"{compulsory / gpu.memory_bytes_per_s / seconds:.4f}",
            "gather_roof": f"{gathered / gpu.cache_bytes_per_s / seconds:.4f}",
        }


def plan_columns(chosen: LaunchPlan) -> Row:
    """The schedule of each pass."""
    return {f"{choice.walk}_schedule": choice.chosen.schedule for choice in chosen.choices}


def timing_columns(timing: Timing) -> Row:
    return {"median_ms": f"{timing.median_ms:.5g}", "iqr_ms": f"{timing.iqr_ms:.3g}", "n": timing.n}


def graph_build_rows(graph: BenchGraph, timer: Timer) -> list[Row]:
    """Wall time of building the cached CSR and CSC from ``edge_index``, each the median of five."""
    base: Row = {
        **graph_columns(graph),
        "score": "graph",
        "layer": "graph build",
        "heads": 0,
        "channels": 0,
        "dtype": "int32",
        "implementation": "fused",
        "schedule": "",
        "state": "warm",
        "status": "ok",
        "time": now(),
        **environment(graph.device),
    }
    samples: dict[str, list[float]] = {"csr": [], "csc": []}
    for _ in range(6):
        Graph.clear_cache()
        build = partial(compressed, graph)
        samples["csr"].append(timer.wall_ms(build))
        samples["csc"].append(timer.wall_ms(partial(getattr, build(), "csc")))
    # The first build warms up.
    return [{**base, "direction": side, **timing_columns(Timing.of(values[1:]))} for side, values in samples.items()]


def run(config: Mapping[str, Any]) -> int:
    """Measures what the CSV of an experiment lacks, then prints its tables and writes its plots.

    Args:
        config: Composed from ``configs/bench/bench.yaml``, resolved.

    Returns:
        0: all done; 1: a result of ours is wrong; 2: stopped early.
    """
    experiment = Experiment.of(config)
    device = experiment.device
    folder = experiment.folder / file_stem(device, experiment.small)
    path = folder / f"{experiment.file}.csv"
    if experiment.restart:
        path.unlink(missing_ok=True)
    table = Table(path, FIELDS)
    finished = experiment.summary or _Runner(experiment, table).run()
    rows = table.rows()
    if rows:
        print(tables.of(experiment.name, rows))
        for png in plots.draw(experiment.name, rows, folder):
            print(png)
    print(f"{len(rows)} rows in {path}")
    if any(row["status"] == "WRONG" and row["implementation"] == "fused" for row in rows):
        return 1
    return 0 if finished else 2


class _Runner:
    def __init__(self, experiment: Experiment, table: Table) -> None:
        self.experiment, self.table = experiment, table
        self.device = experiment.device
        self.timer = Timer(self.device, experiment.pace)
        self.environment = environment(self.device)
        self.memory_bytes = (
            torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else float("inf")
        )
        self.compiled: set[Spec] = set()
        self.started = time.perf_counter()

    def run(self) -> bool:
        """False when time ran out."""
        experiment = self.experiment
        rows = self.table.rows()
        todo = {graph: experiment.missing(graph, rows, self.environment) for graph in experiment.graphs}
        jobs = sum(map(len, todo.values()))
        expected = sum(expected_s(each, experiment) for each in todo.values())
        print(f"{experiment.name}: {jobs} measurements, about {expected:.0f} s on an H200", flush=True)
        return all(self._graph(graph, jobs) for graph, jobs in todo.items() if jobs)

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    def _out_of_time(self) -> bool:
        over = self._elapsed() > self.experiment.limit_s
        if over:
            print(f"stopped after {self.experiment.limit_s:g} s; run again to resume")
        return over

    def _graph(self, name: str, jobs: Sequence[Job]) -> bool:
        """All jobs on one graph; False when time ran out."""
        if self._out_of_time():
            return False
        small = self.experiment.small
        try:
            graph = benchmark_graph(name, self.device, small=small)
        except (FileNotFoundError, ImportError) as error:
            print(f"[{self._elapsed():5.0f} s] skipped graph {name}: {error}", flush=True)
            return True
        if not small:
            print(f"[{self._elapsed():5.0f} s] {compare_with_recipe(graph, recipe_of(name))}", flush=True)
        self._compile(jobs, graph)
        if ("graph", name) not in {(row["score"], row["graph"]) for row in self.table.rows()}:
            self._append(graph_build_rows(graph, self.timer))
        kept: tuple[tuple[AttentionCase, torch.dtype], Reference] | None = None
        for job in jobs:
            if self._out_of_time():
                return False
            if self.experiment.is_isolated(job):
                self._isolated(job, graph)
                continue
            refused = self._refused(job, graph)
            if refused:
                self._append(refused)
                continue
            key = job.case, DTYPES[job.dtype]
            if kept is None or kept[0] != key:
                # Not both at once: on the largest graphs each takes gigabytes.
                kept = None
                kept = key, _reference(job.case, graph, DTYPES[job.dtype])
            measurement = Measurement(job, graph, kept[1], self.timer, self.experiment.states)
            self._append(list(measurement.rows(self.memory_bytes)))
        Graph.clear_cache()
        self.timer.release()
        return True

    def _refused(self, job: Job, graph: BenchGraph) -> list[Row]:
        """The rows of a job that cannot run in any direction: no reference is needed to say so."""
        base = {**job_columns(job, self.device), **graph_columns(graph)}
        rows = []
        for direction in job.directions:
            training = direction != "fwd"
            reasons = IMPLEMENTATIONS[job.implementation]().reasons(job.case, graph, training, self.memory_bytes)
            if not reasons:
                return []
            rows.append({**base, "direction": direction, "status": "not run: " + "; ".join(reasons)})
        return rows

    def _isolated(self, job: Job, graph: BenchGraph) -> None:
        base = {**job_columns(job, self.device), **graph_columns(graph)}
        for direction in job.directions:
            rows, status = isolated.measure(self.experiment, job, direction)
            self._append(rows or [{**base, "direction": direction, "status": status}])

    def _append(self, rows: Rows) -> None:
        rows = [{**row, "experiment": self.experiment.name} for row in rows]
        self.table.append(rows)
        for row in rows:
            print(f"[{self._elapsed():5.0f} s] {tables.line(row)}", flush=True)

    def _compile(self, jobs: Sequence[Job], graph: BenchGraph) -> None:
        """Compiles the fused kernels that no earlier graph needed, in parallel, before anything is timed."""
        workers = self.experiment.workers
        if not workers or graph.device.type != "cuda":
            return
        wanted = dict.fromkeys((job.case, job.dtype, job.schedule) for job in jobs if job.implementation == "fused")
        found: dict[Spec, None] = {}
        for case, dtype, schedule in wanted:
            found.update(dict.fromkeys(collect_specs([case], [Prepared.of(graph)], [dtype], schedule)))
        new = [spec for spec in found if spec not in self.compiled]
        self.compiled.update(new)
        # A few kernels compile faster one by one than a pool of processes starts.
        if len(new) > workers:
            try:
                precompile(new, workers)
            except CompileError as error:
                # Found again, and listed, by the measurement that needs the kernel.
                print(f"[{self._elapsed():5.0f} s] {str(error).splitlines()[0]}", flush=True)


def _reference(case: AttentionCase, graph: BenchGraph, dtype: torch.dtype) -> Reference:
    inputs, grad_out = rounded_problem(case, graph, [dtype])
    return inputs, grad_out, float64_reference(case, graph, inputs, grad_out)
