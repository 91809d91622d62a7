"""Times attention layers, forward and forward+backward, side by side with the baselines on the benchmark graphs.

``python -m pyg_dfgnn.bench`` appends to ``results/bench/<gpu>.csv`` what is not there yet for this state of the
sources, then prints the table and how the targets stand. An implementation is first compared with float64, outputs and
gradients on every row; one that fails prints WRONG and no time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.bench.baselines import IMPLEMENTATIONS, Implementation
from pyg_dfgnn.bench.cases.attention import (
    LAYERS,
    SCORES,
    AttentionCase,
    Inputs,
    forward_backward,
)
from pyg_dfgnn.bench.graphs import RECIPES, BenchGraph, benchmark_graph, compare_with_recipe
from pyg_dfgnn.bench.oracle import BOUNDS, compare, float64_reference
from pyg_dfgnn.bench.prepare import DTYPES, Prepared, collect_specs, problem_of, rounded_problem
from pyg_dfgnn.bench.results import Table, environment, file_stem, now
from pyg_dfgnn.bench.tables import print_tables
from pyg_dfgnn.bench.timing import Call, Timer, Timing
from pyg_dfgnn.dispatch.attention import plan, unsupported_reasons
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.runtime.compiler import Spec, precompile

SIZES = ((1, 128), (8, 16))
DIRECTIONS = ("fwd", "fwd+bwd", "bwd")
FLUSHED_BELOW_BYTES = 300e6
"""Graphs with fewer compulsory forward bytes are timed warm, with the L2 cache flushed, and as a replayed graph."""

FIELDS = (
    "graph nodes edges max_degree score layer heads channels dtype implementation direction state status median_ms "
    "iqr_ms n host_us peak_mb error worst bound first_call_s plan clocks gpu torch cuda pyg cupy commit sources time"
).split()
KEY = ("graph", "score", "heads", "channels", "dtype", "implementation", "gpu", "torch")

Row = dict[str, Any]


def compulsory_bytes(case: AttentionCase, graph: BenchGraph) -> float:
    """Bytes of a float32 GT forward that touches each tensor once: 4 N D b + 4 E + 4 N."""
    return 16.0 * graph.num_dst * case.heads * case.channels + 4.0 * graph.num_edges + 4.0 * graph.num_dst


class Measurement:
    """All rows of one implementation on one case, graph and dtype: correctness first, then times.

    Args:
        implementation: What to measure.
        case: What to compute.
        graph: Where.
        dtype: Name from ``DTYPES``.
        expected: ``float64_reference`` on the same rounded inputs.
        inputs: Rounded float32 inputs.
        grad_out: Rounded float32 gradient of the output.
        timer: The clock.
    """

    def __init__(
        self,
        implementation: Implementation,
        case: AttentionCase,
        graph: BenchGraph,
        dtype: str,
        expected: dict[str, Tensor],
        inputs: Inputs,
        grad_out: Tensor,
        timer: Timer,
    ) -> None:
        self.implementation, self.case, self.graph, self.timer = implementation, case, graph, timer
        self.dtype, self.expected = DTYPES[dtype], expected
        self.leaves = {name: tensor.to(self.dtype, copy=True).requires_grad_() for name, tensor in inputs.items()}
        self.grad_out = grad_out.to(self.dtype)
        is_fused = implementation.name == "fused"
        self.base: Row = {
            "graph": graph.name,
            "nodes": graph.num_dst,
            "edges": graph.num_edges,
            "max_degree": graph.max_degree,
            "score": case.score,
            "layer": LAYERS[case.score],
            "heads": case.heads,
            "channels": case.channels,
            "dtype": dtype,
            "implementation": implementation.name,
            "bound": BOUNDS[self.dtype] if implementation.error_bound is None else implementation.error_bound,
            "plan": self._plan() if is_fused else "",
            "time": now(),
            **environment(graph.device),
        }
        self.directions = DIRECTIONS if is_fused else DIRECTIONS[:2]
        self.small = compulsory_bytes(case, graph) < FLUSHED_BELOW_BYTES
        self.replays = is_fused and self.small

    def _plan(self) -> str:
        problem = problem_of(self.case, self.dtype, self.graph.device)
        reasons = unsupported_reasons(problem)
        if reasons:
            return "reference: " + "; ".join(reasons)
        return str(plan(problem, Graph.of(self.graph.edge_index, self.graph.num_src, self.graph.num_dst)))

    def rows(self, memory_bytes: float) -> Iterator[Row]:
        """One row per direction and state, or per direction the reason why there is none."""
        for training in (False, True):
            directions = [d for d in self.directions if (d != "fwd") == training]
            reasons = self.implementation.reasons(self.case, self.graph, training, memory_bytes)
            if reasons:
                yield from (
                    {**self.base, "direction": d, "status": "not run: " + "; ".join(reasons)} for d in directions
                )
                continue
            try:
                yield from self._measure(training)
            except (RuntimeError, NotImplementedError) as error:
                message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                yield from ({**self.base, "direction": d, "status": f"failed: {message}"} for d in directions)
            self.timer.release()

    def _measure(self, training: bool) -> Iterator[Row]:
        forward = self.implementation.prepare(self.case, self.graph, self.leaves)
        with nullcontext() if training else torch.no_grad():
            result: dict[str, Tensor] = {}

            def once() -> None:
                out = forward()
                result.update(forward_backward(out, self.leaves, self.grad_out) if training else {"out": out})

            first_call_s = self.timer.wall_ms(once) / 1e3
            gate = self._gate(result, training)
            result.clear()
            base = {**self.base, **gate, "first_call_s": f"{first_call_s:.3f}", "clocks": self.timer.clocks()}
            if gate["status"] != "ok":
                yield {**base, "direction": "fwd+bwd" if training else "fwd"}
                return
            if not training:
                yield from self._times(forward, "fwd", base)
                return

            def both() -> tuple[Tensor, ...]:
                return torch.autograd.grad(forward(), list(self.leaves.values()), self.grad_out)

            yield from self._times(both, "fwd+bwd", base)
            if "bwd" in self.directions:
                out = forward()

                def backward() -> tuple[Tensor, ...]:
                    return torch.autograd.grad(out, list(self.leaves.values()), self.grad_out, retain_graph=True)

                timing = self.timer.time(backward)
                yield {**base, "direction": "bwd", "state": "warm", **_columns(timing)}

    def _gate(self, result: dict[str, Tensor], training: bool) -> Row:
        expected = self.expected if training else {"out": self.expected["out"]}
        errors = compare(self.case, self.graph, result, expected, self.grad_out)
        worst, error = errors.worst
        status = "ok" if error <= self.base["bound"] else "WRONG"
        return {"status": status, "worst": worst, "error": f"{error:.2e}"}

    def _times(self, call: Call, direction: str, base: Row) -> Iterator[Row]:
        base = {**base, "direction": direction}
        timing = self.timer.time(call)
        host_us = self.timer.host_us(call)
        peak_mb = self.timer.peak_mb(call)
        extra = {"host_us": f"{host_us:.1f}", "peak_mb": "" if peak_mb is None else f"{peak_mb:.1f}"}
        yield {**base, "state": "warm", **_columns(timing), **extra}
        if self.small:
            yield {**base, "state": "flushed", **_columns(self.timer.time(call, flushed=True))}
        if self.replays and self.timer.on_gpu:
            try:
                yield {**base, "state": "replay", **_columns(self.timer.time(self.timer.replay(call)))}
            except RuntimeError as error:
                yield {**base, "state": "replay", "status": f"failed: {' '.join(str(error).split())[:300]}"}


def _columns(timing: Timing) -> Row:
    return {"median_ms": f"{timing.median_ms:.5g}", "iqr_ms": f"{timing.iqr_ms:.3g}", "n": timing.n}


def graph_build_rows(graph: BenchGraph, timer: Timer) -> list[Row]:
    """Wall time of building the cached CSR and CSC from ``edge_index``, each the median of five."""
    base: Row = {
        "graph": graph.name,
        "nodes": graph.num_dst,
        "edges": graph.num_edges,
        "max_degree": graph.max_degree,
        "score": "graph",
        "layer": "graph build",
        "heads": 0,
        "channels": 0,
        "dtype": "int32",
        "implementation": "fused",
        "state": "warm",
        "status": "ok",
        "time": now(),
        **environment(graph.device),
    }
    samples: dict[str, list[float]] = {"csr": [], "csc": []}
    for _ in range(6):
        Graph.clear_cache()
        build = partial(Graph.of, graph.edge_index, graph.num_src, graph.num_dst)
        samples["csr"].append(timer.wall_ms(build))
        samples["csc"].append(timer.wall_ms(partial(getattr, build(), "csc")))
    # The first build warms up.
    return [{**base, "direction": side, **_columns(Timing.of(values[1:]))} for side, values in samples.items()]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list("abcde"), choices=list(RECIPES))
    parser.add_argument("--scores", nargs="+", default=list(SCORES), choices=SCORES)
    parser.add_argument(
        "--sizes", nargs="+", default=[f"{h}x{c}" for h, c in SIZES], help="heads x channels, like 8x16"
    )
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compiling processes; 0: none"
    )
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop early; a later run resumes")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--small", action="store_true", help="miniature graphs, to try the command on a CPU")
    parser.add_argument("--summary", action="store_true", help="only print the tables of the CSV")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = torch.device(options.device)
    path = options.out / f"{file_stem(device)}{'-small' if options.small else ''}.csv"
    if options.restart:
        path.unlink(missing_ok=True)
    table = Table(path, FIELDS)
    finished = options.summary or _run(options, device, table)
    rows = table.rows()
    print_tables(rows)
    print(f"\n{len(rows)} rows in {path}")
    if any(row["status"] == "WRONG" and row["implementation"] == "fused" for row in rows):
        return 1
    return 0 if finished else 2


def _run(options: argparse.Namespace, device: torch.device, table: Table) -> bool:
    """Measures what the table lacks; False when time ran out."""
    started = time.perf_counter()
    timer = Timer(device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
    env = environment(device)
    # A baseline does not change with our sources; our own rows are measured again when they do.
    done = {
        tuple(row[name] for name in KEY)
        for row in table.rows()
        if row["implementation"] != "fused" or row["sources"] == env["sources"]
    }
    sizes = [size.split("x") for size in options.sizes]
    cases = [AttentionCase(score, int(heads), int(channels)) for score in options.scores for heads, channels in sizes]

    def key(graph: str, case: AttentionCase, dtype: str, implementation: str) -> tuple[str, ...]:
        values = (graph, case.score, case.heads, case.channels, dtype, implementation, env["gpu"], env["torch"])
        return tuple(map(str, values))

    def elapsed() -> float:
        return time.perf_counter() - started

    names = {dtype: name for name, dtype in DTYPES.items()}
    compiled: set[Spec] = set()
    for graph_name in options.graphs:
        todo = [
            (case, implementation, names[dtype])
            for case in cases
            for implementation in (IMPLEMENTATIONS[name]() for name in options.implementations)
            for dtype in implementation.dtypes
            if key(graph_name, case, names[dtype], implementation.name) not in done
        ]
        if not todo:
            continue
        if elapsed() > options.limit_seconds:
            return _stopped(options)
        graph = benchmark_graph(graph_name, device, small=options.small)
        if not options.small:
            print(f"[{elapsed():5.0f} s] {compare_with_recipe(graph, RECIPES[graph_name])}", flush=True)
        _compile(todo, graph, options.workers, compiled)
        if ("graph", graph_name) not in {(row["score"], row["graph"]) for row in table.rows()}:
            table.append(graph_build_rows(graph, timer))
        for case in cases:
            mine = [entry for entry in todo if entry[0] == case]
            references: dict[str, tuple[Inputs, Tensor, dict[str, Tensor]]] = {}
            for _, implementation, dtype in mine:
                if elapsed() > options.limit_seconds:
                    return _stopped(options)
                if dtype not in references:
                    references[dtype] = _reference(case, graph, dtype)
                inputs, grad_out, expected = references[dtype]
                measurement = Measurement(implementation, case, graph, dtype, expected, inputs, grad_out, timer)
                rows = list(measurement.rows(memory))
                table.append(rows)
                for row in rows:
                    _report(row, elapsed())
        Graph.clear_cache()
        timer.release()
    return True


def _reference(case: AttentionCase, graph: BenchGraph, dtype: str) -> tuple[Inputs, Tensor, dict[str, Tensor]]:
    inputs, grad_out = rounded_problem(case, graph, [DTYPES[dtype]])
    return inputs, grad_out, float64_reference(case, graph, inputs, grad_out)


def _compile(
    todo: Sequence[tuple[AttentionCase, Implementation, str]], graph: BenchGraph, workers: int, compiled: set[Spec]
) -> None:
    """Compiles the fused kernels that no earlier graph needed, in parallel, before anything is timed."""
    mine = [(case, dtype) for case, implementation, dtype in todo if implementation.name == "fused"]
    if not mine or not workers or graph.device.type != "cuda":
        return
    cases, dtypes = dict.fromkeys(case for case, _ in mine), dict.fromkeys(dtype for _, dtype in mine)
    new = [spec for spec in collect_specs(list(cases), [Prepared.of(graph)], list(dtypes)) if spec not in compiled]
    compiled.update(new)
    # A few kernels compile faster one by one than a pool of processes starts.
    if len(new) > workers:
        precompile(new, workers)


def _stopped(options: argparse.Namespace) -> bool:
    print(f"stopped after {options.limit_seconds:g} s; run again to resume")
    return False


def _report(row: Row, elapsed_s: float) -> None:
    what = f"({row['graph']}) {row['layer']} H={row['heads']} d={row['channels']} {row['dtype']}"
    how = f"{row['implementation']} {row['direction']}"
    if row["status"] == "ok":
        result = f"{row['state']} {row['median_ms']} ms, iqr {row['iqr_ms']}, n {row['n']}, error {row['error']}"
        memory = row.get("peak_mb")
        result += f", peak {memory} MB" if memory else ""
    else:
        result = f"{row['status']} {row.get('worst', '')} {row.get('error', '')}".strip()
    print(f"[{elapsed_s:5.0f} s] {what} {how}: {result}", flush=True)
