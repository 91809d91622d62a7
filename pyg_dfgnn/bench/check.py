"""Checks outputs and every gradient of the fused ops against float64 over a grid of problems and graphs.

``python -m pyg_dfgnn.bench.check`` runs the cases that ``outputs/check/<gpu>-cases.csv`` lacks for the present sources,
then prints the worst error per schedule, score and dtype. Where all cases of a score have run on a GPU, these errors
replace the ones in ``results/check/<gpu>.csv``. Exit code: 0 all within bounds, 1 a breach, 2 stopped early.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.bench.cases.attention import (
    SCORES,
    AttentionCase,
    Inputs,
    forward_backward,
    fused,
)
from pyg_dfgnn.bench.check_graphs import CHECK_GRAPHS, check_graph
from pyg_dfgnn.bench.graphs import BenchGraph
from pyg_dfgnn.bench.oracle import BOUNDS, compare, float64_reference
from pyg_dfgnn.bench.prepare import (
    DTYPES,
    Prepared,
    collect_specs,
    in_force,
    problem_of,
    rounded_problem,
    unbounded_reasons,
)
from pyg_dfgnn.bench.results import Table, default_folder, file_stem, markdown, source_digest
from pyg_dfgnn.dispatch.core import unsupported_reasons
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.arguments import draw_seed
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.runtime.compiler import precompile
from pyg_dfgnn.settings import SCHEDULES

HEADS = (1, 3, 8)
CHANNELS = (1, 7, 16, 32, 40, 64, 128, 256)
DROPOUTS = (0.0, 0.5)
EDGES = {"no": False, "yes": True}
FIELDS = (
    "schedule graph score edge heads channels dropout dtype status worst worst_error bound out_error grad_error "
    "hub_error digest"
).split()
WORST_FIELDS = "schedule score dtype tensors cases not_run failed worst_error bound worst_case digest".split()
"""Columns of the published results: `tensors` is a group of tensors, `worst_case` the case with its largest error."""
GROUPS = {"output": "out_error", "gradients": "grad_error", "row of a hub": "hub_error"}
"""Group of tensors -> column of its error in the rows per case."""
KEY = ("schedule", "graph", "score", "edge", "heads", "channels", "dropout", "dtype", "digest")
SEED = 20_240
MEMORY_PER_EDGE_FEATURE = 32
"""Bytes per element of an [E, H, C] input at the peak: input, two runs' gradients, float64 gradient, its block."""

Op = Callable[[AttentionCase, Graph, Inputs], Tensor]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills every torch.empty with NaN, so that a row that no kernel writes cannot pass by luck."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fill


def run_seeded(op: Op, case: AttentionCase, graph: Graph, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return forward_backward(op(case, graph, inputs), inputs, grad_out)


def keep_factors(case: AttentionCase, graph: BenchGraph) -> Tensor | None:
    """The dropout factors [E, H] that ``run_seeded`` draws, None without dropout."""
    if not case.dropout:
        return None
    torch.manual_seed(SEED)
    seed = draw_seed(graph.device)
    ids = torch.arange(graph.num_edges, device=graph.device)
    return dropout_factor(ids, case.heads, case.dropout, seed)


def check_dtype(
    case: AttentionCase,
    graph: Prepared,
    inputs: Inputs,
    grad_out: Tensor,
    expected: dict[str, Tensor],
    name: str,
    op: Op,
) -> dict[str, Any]:
    """The result columns of one case in the dtype of that name: status, worst error and tensor, bound."""
    problem = problem_of(case, name, graph.bench.device)
    if problem.device.type == "cuda" and (reasons := unsupported_reasons(problem)):
        return {"status": "refused: " + "; ".join(reasons)}
    if reasons := unbounded_reasons(problem):
        return {"status": "not run: " + "; ".join(reasons)}
    dtype = DTYPES[name]
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    factor = representable_factor(expected, dtype)
    expected = {name: tensor if name == "out" else tensor * factor for name, tensor in expected.items()}
    grad_out = (grad_out * factor).to(dtype)
    first = run_seeded(op, case, graph.fused, leaves, grad_out)
    with poisoned_memory():
        second = run_seeded(op, case, graph.fused, leaves, grad_out)
    errors = compare(case, graph.bench, second, expected, grad_out)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    worst, worst_error = errors.worst
    bound = BOUNDS[name]
    status = "ok" if worst_error <= bound else "breach"
    if status == "ok" and different:
        status = "not deterministic: " + " ".join(different)
    gradients = [value for name, value in errors.whole.items() if name != "out"]
    return {
        "status": status,
        "worst": worst,
        "worst_error": f"{worst_error:.2e}",
        "bound": bound,
        "out_error": f"{errors.whole['out']:.2e}",
        "grad_error": f"{max(gradients):.2e}",
        "hub_error": f"{max(errors.hub.values()):.2e}" if errors.hub else "",
    }


def representable_factor(expected: dict[str, Tensor], dtype: torch.dtype) -> float:
    """A power of two for the output's gradient that keeps all gradients, linear in it, in the range of ``dtype``."""
    sizes = [float(tensor.abs().max()) for name, tensor in expected.items() if name != "out" and tensor.numel()]
    largest = max(sizes, default=0.0)
    limit = torch.finfo(dtype).max / 4
    return 2.0 ** -math.ceil(math.log2(largest / limit)) if largest > limit else 1.0


def _memory_reason(case: AttentionCase, graph: BenchGraph) -> str | None:
    if graph.device.type != "cuda" or not case.edge or case.score == "add":
        return None
    needed = graph.num_edges * case.heads * case.channels * MEMORY_PER_EDGE_FEATURE
    total = torch.cuda.get_device_properties(graph.device).total_memory
    return f"not run: needs {needed / 1e9:.0f} GB" if needed > 0.95 * total else None


def check_point(
    case: AttentionCase,
    graph: Prepared,
    wanted: Sequence[tuple[str, str]],
    op: Op = fused,
    keep: Tensor | None = None,
) -> Iterator[dict[str, Any]]:
    """Checks one case on one graph; what is rounded alike shares one float64 reference.

    Args:
        case: Score, heads, channels, edge features, dropout.
        graph: Where.
        wanted: Pairs of a schedule of `settings` and a dtype of ``DTYPES``. A schedule asked for by name that cannot
            run the case is listed as not run.
        op: What is checked; tests pass a wrong one.
        keep: Dropout factors of ``keep_factors``.

    Yields:
        One row of result columns per pair.
    """
    reason = _memory_reason(case, graph.bench)
    for group in (("float32", "tf32"), ("bfloat16", "float16")):
        expected: dict[str, Tensor] | None = None
        for schedule, name in (pair for pair in wanted if pair[1] in group):
            row = {**_columns(schedule, case, graph.bench.name), "dtype": name, "digest": source_digest()}
            if reason is not None:
                yield {**row, "status": reason}
                continue
            try:
                if expected is None:
                    types = [DTYPES[other] for other in group]
                    inputs, grad_out = rounded_problem(case, graph.bench, types)
                    expected = float64_reference(case, graph.bench, inputs, grad_out, keep)
                with in_force(schedule, name):
                    columns = check_dtype(case, graph, inputs, grad_out, expected, name, op)
            except UnsupportedError as error:
                columns = {"status": "not run: " + "; ".join(error.reasons)}
            except Exception as error:
                columns = {"status": "error: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            yield {**row, **columns}


def _columns(schedule: str, case: AttentionCase, graph: str) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "graph": graph,
        "score": case.score,
        "edge": "yes" if case.edge else "no",
        "heads": case.heads,
        "channels": case.channels,
        "dropout": case.dropout,
    }


def grid(options: argparse.Namespace) -> dict[str, list[AttentionCase]]:
    """The selected cases, grouped so that the kernels of one group compile while another group is checked."""
    groups: dict[str, list[AttentionCase]] = {}
    for score, edge in product(options.scores, options.edges):
        if score == "cosine" and EDGES[edge]:
            continue
        points = product(options.heads, options.widths, options.dropouts)
        groups[f"{score} edge={edge}"] = [AttentionCase(score, h, c, EDGES[edge], p) for h, c, p in points]
    return groups


def _row_key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def worst_errors(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The worst error per schedule, score, dtype, sources and group of tensors, with how many cases went which way."""
    cases_of: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        cases_of.setdefault(tuple(row[name] for name in ("schedule", "score", "dtype", "digest")), []).append(row)
    worst = []
    for (schedule, score, dtype, digest), cases in cases_of.items():
        for tensors, column in GROUPS.items():
            errors = {position: abs(float(case[column])) for position, case in enumerate(cases) if case[column]}
            largest = max(errors, key=lambda position: (math.isnan(errors[position]), errors[position]), default=None)
            not_run = sum(case["status"].startswith("not run") for case in cases)
            worst.append(
                {
                    "schedule": schedule,
                    "score": score,
                    "dtype": dtype,
                    "tensors": tensors,
                    "cases": len(errors),
                    "not_run": not_run,
                    "failed": len(cases) - not_run - sum(case["status"] == "ok" for case in cases),
                    "worst_error": "" if largest is None else cases[largest][column],
                    "bound": BOUNDS[dtype],
                    "worst_case": "" if largest is None else describe(cases[largest]),
                    "digest": digest,
                }
            )
    return worst


def publish(rows: Sequence[dict[str, str]], table: Table) -> None:
    """Put the worst errors of each score whose cases have all run in place of earlier ones."""
    sizes = {score: len(HEADS) * len(CHANNELS) * len(DROPOUTS) * (1 if score == "cosine" else 2) for score in SCORES}
    counts = Counter((row["schedule"], row["score"], row["dtype"]) for row in rows)
    complete = {key for key, count in counts.items() if count == sizes[key[1]] * len(CHECK_GRAPHS)}

    def of_complete(row: dict[str, Any]) -> bool:
        return (row["schedule"], row["score"], row["dtype"]) in complete

    if complete:
        earlier = [row for row in table.rows() if not of_complete(row)]
        table.keep([*earlier, *filter(of_complete, worst_errors(rows))])


def describe(row: dict[str, str]) -> str:
    """The case and the graph of a row, for a reader."""
    case = AttentionCase(
        row["score"], int(row["heads"]), int(row["channels"]), EDGES[row["edge"]], float(row["dropout"])
    )
    return f"{case} on {row['graph']}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def choice(name: str, values: Sequence[Any], kind: Callable[[str], Any] = str) -> None:
        parser.add_argument(name, nargs="+", type=kind, default=list(values), metavar=name.strip("-").upper()[:-1])

    choice("--scores", SCORES)
    choice("--heads", HEADS, int)
    choice("--widths", CHANNELS, int)
    choice("--dtypes", ("float32", "bfloat16", "float16"))
    choice("--schedules", ("auto",))
    choice("--edges", list(EDGES))
    choice("--dropouts", DROPOUTS, float)
    choice("--graphs", list(CHECK_GRAPHS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compiling processes; 0: none"
    )
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop early; a later run resumes")
    parser.add_argument("--out", type=Path, default=Path("outputs/check"), help="folder of the rows per case")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--small", action="store_true", help="miniature generated graphs")
    parser.add_argument("--summary", action="store_true", help="only print the table of the CSV")
    options = parser.parse_args(arguments)
    known = {"scores": SCORES, "dtypes": DTYPES, "edges": EDGES, "graphs": CHECK_GRAPHS, "schedules": SCHEDULES}
    for name, allowed in known.items():
        unknown = [value for value in getattr(options, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name} needs some of {', '.join(allowed)} (got {', '.join(unknown)})")
    return options


def _prepare_graphs(options: argparse.Namespace, device: torch.device) -> list[Prepared]:
    graphs = []
    for name in options.graphs:
        try:
            bench = check_graph(name, device, small=options.small)
        except (FileNotFoundError, ImportError) as error:
            print(f"skipped graph {name}: {error}")
            continue
        graphs.append(Prepared.of(bench))
    return graphs


def main(arguments: Sequence[str] | None = None, op: Op = fused) -> int:
    options = _options(arguments)
    device = torch.device(options.device)
    started = time.perf_counter()
    stem = file_stem(device, options.small)
    path = options.out / f"{stem}-cases.csv"
    if options.restart:
        path.unlink(missing_ok=True)
    table = Table(path, FIELDS)
    groups = grid(options)
    if not options.summary:
        graphs = _prepare_graphs(options, device)
        finished = _run(groups, graphs, options, table, started, op)
    else:
        finished = True
    rows = [row for row in table.rows() if row["digest"] == source_digest()]
    print(f"\n{path}: {len(rows)} cases of sources {source_digest()}, {time.perf_counter() - started:.0f} s\n")
    print(markdown(WORST_FIELDS, ([row[name] for name in WORST_FIELDS] for row in worst_errors(rows))))
    folder = default_folder("check", device, options.small)
    if folder.parent.name == "results":
        publish(rows, Table(folder / f"{stem}.csv", WORST_FIELDS))
    bad = [row for row in rows if row["status"] != "ok" and not row["status"].startswith("not run")]
    for row in bad[:20]:
        what = f"{row['schedule']}, {row['dtype']}, {row['worst']} {row['worst_error']}"
        print(f"{row['status'][:120]}: {describe(row)}, {what}")
    if bad:
        return 1
    return 0 if finished else 2


def _run(
    groups: dict[str, list[AttentionCase]],
    graphs: list[Prepared],
    options: argparse.Namespace,
    table: Table,
    started: float,
    op: Op,
) -> bool:
    """Runs what the table lacks; False when time ran out."""
    done = {_row_key(row) for row in table.rows()}
    todo: dict[str, list[tuple[Prepared, AttentionCase, list[tuple[str, str]]]]] = {}
    for group, cases in groups.items():
        todo[group] = []
        for graph, case in product(graphs, cases):
            missing = [
                (schedule, dtype)
                for schedule, dtype in product(options.schedules, options.dtypes)
                if _row_key({**_columns(schedule, case, graph.bench.name), "dtype": dtype, "digest": source_digest()})
                not in done
            ]
            if missing:
                todo[group].append((graph, case, missing))
    names = [group for group in todo if todo[group]]
    compiles = options.workers > 0 and torch.device(options.device).type == "cuda"

    def compile_group(group: str, executor: ThreadPoolExecutor) -> Future[None] | None:
        if not compiles:
            return None
        cases = list(dict.fromkeys(case for _, case, _ in todo[group]))
        specs = [s for name in options.schedules for s in collect_specs(cases, graphs, options.dtypes, name)]
        specs = list(dict.fromkeys(specs))
        print(f"[{time.perf_counter() - started:5.0f} s] {group}: {len(specs)} kernels to compile", flush=True)
        return executor.submit(precompile, specs, options.workers)

    with ThreadPoolExecutor(1) as executor:
        pending = compile_group(names[0], executor) if names else None
        for position, group in enumerate(names):
            if pending is not None:
                pending.result()
            follows = names[position + 1 : position + 2]
            pending = compile_group(follows[0], executor) if follows else None
            count = len(todo[group])
            print(f"[{time.perf_counter() - started:5.0f} s] {group}: {count} points to check", flush=True)
            keep_of: dict[tuple[str, int, float], Tensor | None] = {}
            for graph, case, wanted in todo[group]:
                if time.perf_counter() - started > options.limit_seconds:
                    print(f"stopped after {options.limit_seconds:g} s; run again to resume")
                    return False
                key = (graph.bench.name, case.heads, case.dropout)
                if key not in keep_of:
                    keep_of[key] = keep_factors(case, graph.bench)
                table.append(check_point(case, graph, wanted, op, keep_of[key]))
                _after_case(case, graph.bench)
    return True


def _after_case(case: AttentionCase, graph: BenchGraph) -> None:
    """Surfaces a dead CUDA context at once, and returns large blocks so that the next shape finds room."""
    if graph.device.type != "cuda":
        return
    torch.cuda.synchronize(graph.device)
    if graph.num_edges * case.heads * case.channels > 1 << 27:
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
