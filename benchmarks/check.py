"""Checks outputs and every gradient of the fused operations against float64 over a grid of cases and graphs.

``python -m benchmarks.check`` runs the cases that ``outputs/check/<gpu>-cases.csv`` lacks for the present sources,
then prints the worst error per schedule, operation and dtype. Where all cases of an operation have run on a GPU, these
errors replace the ones in ``results/check/<gpu>.csv``. Exit code: 0 all within bounds, 1 a breach, 2 stopped early.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import DTYPES, Case, forward_backward, in_force, rounded_problem
from benchmarks.cases import FAMILIES
from benchmarks.graphs import benchmark_graph, compressed
from benchmarks.results import Progress, Table, default_folder, file_stem, markdown, reason, source_digest
from benchmarks.timing import RELEASED_ELEMENTS, Timer
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import ZOO, EdgeList, two_way_hub
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.runtime.compiler import precompile
from pyg_dfgnn.settings import SCHEDULES
from pyg_dfgnn.statements.spec import Spec

CHECKED_DTYPES = ("float32", "bfloat16", "float16")
FIELDS = (
    "schedule graph op case dtype status worst worst_error bound output_error gradient_error hub_error digest"
).split()
KEY = ("schedule", "graph", "case", "dtype", "digest")
WORST_FIELDS = "schedule op dtype tensors cases not_run failed worst_error bound worst_case digest".split()
"""Columns of the published results: `tensors` is a group of tensors, `worst_case` the case with its largest error."""
TENSORS = {"output": "output_error", "gradients": "gradient_error", "row of a hub": "hub_error"}
"""Group of tensors -> column of its error in the rows per case."""
SEED = 20_240
REAL_GRAPHS = ("cora", "cornell5")
CHECK_GRAPHS = (*ZOO, *REAL_GRAPHS)


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


def run_seeded(case: Case, graph: Graph, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one call that draws the dropout of ``keep_factors``."""
    torch.manual_seed(SEED)
    return forward_backward(case.fused(graph, inputs), inputs, grad_out)


def check_graph(name: str, device: torch.device, small: bool) -> EdgeList:
    """A graph of the zoo, or a real one, with its edges shuffled so that their order matters.

    Raises:
        FileNotFoundError: The graph is a real one and its raw file is not there; the message says where to put it.
    """
    if small and name == "hub":
        # The zoo's small hub is its only row of several edges, whose gradients cancel.
        return replace(two_way_hub(300), name=name).shuffled().to(device)
    if name in ZOO:
        return ZOO[name](full=not small).shuffled().to(device)
    return benchmark_graph(name, "cpu", small=small).shuffled().to(device)


def keep_factors(case: Case, graph: EdgeList) -> Tensor | None:
    """The dropout factors that ``run_seeded`` draws, None without dropout."""
    torch.manual_seed(SEED)
    return case.keep(graph)


def representable_factor(expected: dict[str, Tensor], dtype: torch.dtype) -> float:
    """A power of two for the output's gradient that keeps all gradients, linear in it, in the range of ``dtype``."""
    sizes = [float(tensor.abs().max()) for name, tensor in expected.items() if name != "out" and tensor.numel()]
    largest, limit = max(sizes, default=0.0), torch.finfo(dtype).max / 4
    return 2.0 ** -math.ceil(math.log2(largest / limit)) if largest > limit else 1.0


def check_dtype(
    case: Case,
    graph: EdgeList,
    inputs: Inputs,
    grad_out: Tensor,
    expected: dict[str, Tensor],
    dtype_name: str,
) -> dict[str, Any]:
    """The result columns of one case in the dtype of that name: status, worst error and tensor, bound."""
    if graph.device.type == "cuda" and (reasons := case.unsupported_reasons(dtype_name, graph.device)):
        return {"status": "refused: " + "; ".join(reasons)}
    if reasons := case.unbounded_reasons(dtype_name, graph.device):
        return {"status": "not run: " + "; ".join(reasons)}
    dtype = DTYPES[dtype_name]
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    factor = representable_factor(expected, dtype)
    expected = {name: tensor if name == "out" else tensor * factor for name, tensor in expected.items()}
    grad_out = (grad_out * factor).to(dtype)
    first = run_seeded(case, compressed(graph), leaves, grad_out)
    with poisoned_memory():
        second = run_seeded(case, compressed(graph), leaves, grad_out)
    errors = case.errors(graph, second, expected, grad_out)
    bound = case.bound(dtype_name)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    worst, worst_error = errors.worst
    status = "ok" if worst_error <= bound else "breach"
    if status == "ok" and different:
        status = "not deterministic: " + " ".join(different)
    gradients = [value for name, value in errors.whole.items() if name != "out"]
    return {
        "status": status,
        "worst": worst,
        "worst_error": f"{worst_error:.2e}",
        "bound": bound,
        "output_error": f"{errors.whole['out']:.2e}",
        "gradient_error": f"{max(gradients):.2e}",
        "hub_error": f"{max(errors.hub.values()):.2e}" if errors.hub else "",
    }


def check_point(
    case: Case, graph: EdgeList, wanted: Sequence[tuple[str, str]], keep: Tensor | None = None
) -> Iterator[dict[str, Any]]:
    """Checks one case on one graph; dtypes that are rounded alike share one float64 reference.

    Args:
        case: What is computed.
        graph: The graph.
        wanted: Pairs of a schedule of `settings` and a dtype of ``DTYPES``. A schedule asked for by name that cannot
            run the case is listed as not run.
        keep: Dropout factors of ``keep_factors``.

    Yields:
        One row per pair.
    """
    for group in (("float32", "tf32"), ("bfloat16", "float16")):
        expected: dict[str, Tensor] | None = None
        for schedule, dtype in (pair for pair in wanted if pair[1] in group):
            row = {**names_of(schedule, case, graph, dtype), "op": case.op}
            try:
                if expected is None:
                    inputs, grad_out = rounded_problem(case, graph, group)
                    expected = case.reference(graph, inputs, grad_out, keep)
                with in_force(schedule, dtype):
                    columns = check_dtype(case, graph, inputs, grad_out, expected, dtype)
            except Exception as error:
                columns = {"status": reason(error)}
            yield {**row, **columns}


def names_of(schedule: str, case: Case, graph: EdgeList, dtype: str) -> dict[str, Any]:
    """The columns ``KEY`` of a row."""
    return dict(zip(KEY, (schedule, graph.name, str(case), dtype, source_digest()), strict=True))


def worst_errors(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The worst error per schedule, operation, dtype, sources and group of tensors, with the numbers of cases."""
    cases_of: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        cases_of.setdefault(tuple(row[name] for name in ("schedule", "op", "dtype", "digest")), []).append(row)
    worst = []
    for (schedule, op, dtype, digest), cases in cases_of.items():
        not_run = sum(case["status"].startswith("not run") for case in cases)
        failed = len(cases) - not_run - sum(case["status"] == "ok" for case in cases)
        for tensors, column in TENSORS.items():
            measured = [case for case in cases if case[column]]
            largest = max(measured, key=lambda case: _size_of(case[column]), default=None)
            bound = next((case["bound"] for case in cases if case["bound"]), "")
            error, at = ("", "") if largest is None else (largest[column], f"{largest['case']} on {largest['graph']}")
            values = (schedule, op, dtype, tensors, len(measured), not_run, failed, error, bound, at, digest)
            worst.append(dict(zip(WORST_FIELDS, values, strict=True)))
    return worst


def _size_of(error: str) -> float:
    """The error as a number; NaN counts as infinite."""
    return float("inf") if math.isnan(float(error)) else float(error)


def publish(rows: Sequence[Mapping[str, str]], table: Table) -> None:
    """Put the worst errors of each operation whose cases have all run in place of earlier ones."""
    sizes = Counter(case.op for cases in all_groups().values() for case in cases)
    counts = Counter((row["schedule"], row["op"], row["dtype"]) for row in rows)
    complete = {key for key, count in counts.items() if count == sizes[key[1]] * len(CHECK_GRAPHS)}

    def is_complete(row: Mapping[str, Any]) -> bool:
        return (row["schedule"], row["op"], row["dtype"]) in complete

    if complete:
        earlier = [row for row in table.rows() if not is_complete(row)]
        table.keep([*earlier, *filter(is_complete, worst_errors(rows))])


def all_groups() -> dict[str, list[Case]]:
    """The cases of all families."""
    return {name: cases for family in FAMILIES for name, cases in family.check_groups().items()}


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"needs a regular expression (got {text!r}: {error})") from None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists = {
        "--dtypes": (CHECKED_DTYPES, tuple(DTYPES)),
        "--schedules": (("auto",), SCHEDULES),
        "--graphs": (tuple(CHECK_GRAPHS), tuple(CHECK_GRAPHS)),
    }
    for name, (default, allowed) in lists.items():
        parser.add_argument(name, nargs="+", default=default, choices=allowed, metavar=name.strip("-").upper()[:-1])
    parser.add_argument("--cases", type=_pattern, default=_pattern(""), metavar="REGEX", help="cases whose name has it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop early; a later run resumes")
    parser.add_argument("--out", type=Path, default=Path("outputs/check"), help="folder of the rows per case")
    parser.add_argument("--small", action="store_true", help="miniature generated graphs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = torch.device(options.device)
    stem = file_stem(device, options.small)
    path = options.out / f"{stem}-cases.csv"
    table = Table(path, FIELDS)
    finished = _fill(options, device, table)
    rows = [row for row in table.rows() if row["digest"] == source_digest()]
    print(f"\n{path}: {len(rows)} cases of sources {source_digest()}\n")
    print(markdown(WORST_FIELDS, ([row[name] for name in WORST_FIELDS] for row in worst_errors(rows))))
    folder = default_folder("check", device, options.small)
    if folder.parent.name == "results":
        publish(rows, Table(folder / f"{stem}.csv", WORST_FIELDS))
    bad = [row for row in rows if row["status"] != "ok" and not row["status"].startswith("not run")]
    for row in bad[:20]:
        what = f"{row['schedule']}, {row['dtype']}, {row['worst']} {row['worst_error']}"
        print(f"{row['status'][:120]}: {row['case']} on {row['graph']}, {what}")
    if bad:
        return 1
    return 0 if finished else 2


def _fill(options: argparse.Namespace, device: torch.device, table: Table) -> bool:
    """Run the cases that a table lacks, group by group; return whether that was all of them before time ran out."""
    progress, timer, graphs = Progress(options.limit_seconds), Timer(device), []
    for name in options.graphs:
        try:
            graphs.append(check_graph(name, device, small=options.small))
        except (FileNotFoundError, ImportError) as error:
            print(f"skipped graph {name}: {error}")
    done = {tuple(row[name] for name in KEY) for row in table.rows()}
    pairs = [*product(options.schedules, options.dtypes)]
    for name, cases in all_groups().items():
        points = []
        for graph, case in product(graphs, filter(lambda case: options.cases.search(str(case)), cases)):
            missing = [(s, d) for s, d in pairs if tuple(names_of(s, case, graph, d).values()) not in done]
            points += [(graph, case, missing)] if missing else []
        if points and device.type == "cuda":
            _compile(dict.fromkeys(case for _, case, _ in points), graphs, options)
        progress.print(f"{name}: {len(points)} points to check")
        for graph, case, missing in points:
            if progress.is_over():
                return False
            table.append(check_point(case, graph, missing, keep_factors(case, graph)))
            # Surfaces a dead CUDA context at once.
            timer.synchronize()
            if graph.num_edges * case.width > RELEASED_ELEMENTS:
                timer.release()
    return True


def collect_specs(
    cases: Sequence[Case], graphs: Sequence[EdgeList], dtypes: Sequence[str], schedule: str = "auto"
) -> list[Spec]:
    """The kernels that the cases launch, found by running the operations with every launch recorded instead of made."""
    specs: dict[Spec, None] = {}

    def record(spec: Spec, *_: Any) -> None:
        specs[spec] = None

    planned = set()
    with launcher.override(record):
        # Graphs without edges last: they launch little, so another graph must stand for the plan they share with it.
        for graph, case, dtype in product(sorted(graphs, key=lambda graph: graph.num_edges == 0), cases, dtypes):
            with in_force(schedule, dtype):
                key = case, dtype, repr(case.plan(dtype, graph))
                if key in planned:
                    continue
                planned.add(key)
                inputs = {}
                for name in case.roles(graph):
                    shape = case.shape(name, graph)
                    inputs[name] = torch.empty(shape, dtype=DTYPES[dtype], device=graph.device).requires_grad_()
                with suppress(UnsupportedError):
                    out = case.fused(compressed(graph), inputs)
                    torch.autograd.grad(out, list(inputs.values()), torch.empty_like(out))
    return list(specs)


def _compile(cases: Iterable[Case], graphs: Sequence[EdgeList], options: argparse.Namespace) -> None:
    """Compile the kernels of a group in parallel."""
    collected = (collect_specs([*cases], graphs, options.dtypes, schedule) for schedule in options.schedules)
    specs = list(dict.fromkeys(spec for of_schedule in collected for spec in of_schedule))
    print(f"{len(specs)} kernels to compile", flush=True)
    precompile(specs, max(1, (os.cpu_count() or 2) - 1))


if __name__ == "__main__":
    sys.exit(main())
