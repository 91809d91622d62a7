"""Estimates of attention's cost models beside measured times, the fit of their constants, and what `auto` loses.

python -m benchmarks experiment=choice                      measures every pass by every schedule
python -m benchmarks.costs                                            compares, and judges what auto takes today
python -m benchmarks.costs results/bench/<gpu>/choice.csv             the same with the times of another GPU
python -m benchmarks.costs --fit row_split.STEP row_split.ROW.forward gpu.cache_bytes_per_s

A constant is named by the module of its schedule in pyg_dfgnn/dispatch/attention (``row_split``, ``block_mma``, ...),
its name there and, in a table, the key; or by ``gpu`` and a field of `Gpu`. Better values are printed, to be written
there by hand. The graphs are built again by their recipes; without a GPU the device of reference is planned for.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cases.attention.case import AttentionCase
from benchmarks.graphs import benchmark_graph, compressed
from benchmarks.results import Table, default_folder, file_stem, markdown
from benchmarks.tables import timed
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import saves_dout_dlogit
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD, choose
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.op import DIRECTIONS

STEPS = 2000
ALLOWED_LOSS = 0.05
"""Fraction that the chosen schedule may lose to the fastest."""

Times = Mapping[tuple[str, str], float]
"""(schedule, pass) -> milliseconds."""


@dataclass(frozen=True)
class Sample:
    """One measured pass.

    Attributes:
        case: Graph, score, size and dtype, as the file has them.
        problem: What was computed.
        graph: The graph.
        direction: Name of the pass.
        schedule: Name of the schedule.
        chosen: The plan of the pass.
        seconds: The measured time.
    """

    case: tuple[str, ...]
    problem: AttentionProblem
    graph: Graph
    direction: str
    schedule: str
    chosen: Any
    seconds: float

    @property
    def estimate(self) -> float:
        """Seconds by the cost model as it is now."""
        device = gpu.gpu_of(self.problem.device)
        return FAMILY.by_name[self.schedule].cost(self.problem, self.direction, self.graph, self.chosen, device).seconds

    @property
    def error(self) -> float:
        """Logarithm of estimated over measured."""
        return math.log(self.estimate / self.seconds)


def read(path: Path, device: torch.device, small: bool = False, graphs: Container[str] | None = None) -> list[Sample]:
    """The timed passes of a result file, each by a candidate that was asked for by name.

    Args:
        path: A CSV of the bench.
        device: What is planned for; its graphs are built there, and skipped with a message where that is not possible.
        small: Whether the graphs were miniatures.
        graphs: Names of the graphs to read; None: all.

    Returns:
        A sample per pass.
    """
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in timed(Table.read(path)):
        if (
            (graphs is None or row["graph"] in graphs)
            and row["direction"] in DIRECTIONS
            and row["schedule"] in FAMILY.candidates
        ):
            rows_of.setdefault(row["graph"], []).append(row)
    samples = []
    for graph_name, rows in rows_of.items():
        try:
            graph = compressed(benchmark_graph(graph_name, device, small=small))
        except (FileNotFoundError, ImportError, RuntimeError) as error:
            print(f"skipped graph {graph_name}: {error}")
            continue
        for row in rows:
            name, direction = row["schedule"], row["direction"]
            problem = AttentionCase.of(row["op"], row["size"]).problem(row["dtype"], device)
            directions = FORWARD if direction in FORWARD else BACKWARD
            problem = FAMILY.seen_by(problem, graph, directions, Settings(schedule=name))
            if not FAMILY.by_name[name].reasons_against(problem, direction, graph):
                case = (graph_name, row["op"], row["size"], row["dtype"])
                chosen = FAMILY.by_name[name].plan_pass(problem, direction, graph)
                samples.append(Sample(case, problem, graph, direction, name, chosen, 1e-3 * float(row["median_ms"])))
    return samples


def spread(samples: Sequence[Sample]) -> float:
    """Root mean square of the errors."""
    return math.sqrt(sum(sample.error**2 for sample in samples) / max(1, len(samples)))


def comparison(samples: Sequence[Sample]) -> str:
    """Estimated over measured, by schedule and pass."""
    body = []
    for name, direction in product(FAMILY.candidates, DIRECTIONS):
        of_pass = [sample for sample in samples if (sample.schedule, sample.direction) == (name, direction)]
        if of_pass:
            errors = sorted(sample.error for sample in of_pass)
            worst = max(of_pass, key=lambda sample: abs(sample.error))
            ratios = [f"{math.exp(error):.2f}" for error in (errors[0], median(errors), errors[-1])]
            shown = f"{' '.join(worst.case)}: {1e3 * worst.seconds:.4g} ms, estimated {1e3 * worst.estimate:.4g}"
            body.append([name, direction, len(of_pass), *ratios, f"{spread(of_pass):.3f}", shown])
    return markdown(["schedule", "pass", "n", "least", "median", "most", "rms of log", "furthest"], body)


def totals(directions: tuple[str, ...], times: Times, dout_dlogit_ms: float = 0.0) -> dict[tuple[str, ...], float]:
    """Schedules of the passes -> milliseconds together, of all schedules that can run together.

    Schedules that hand over from one pass to the other run with themselves alone. Where `row_split` reads over targets
    what a forward pass by `row_split` leaves, `dout_dlogit_ms` counts: how much longer that pass takes than the
    one that ran.
    """
    sums = {}
    for team in product(dict.fromkeys(schedule for schedule, _ in times), repeat=len(directions)):
        passes = list(zip(team, directions, strict=True))
        hands_over = any(FAMILY.by_name[schedule].hands_over for schedule in team)
        if all(each in times for each in passes) and (len(set(team)) == 1 or not hands_over):
            extra = dout_dlogit_ms if directions == BACKWARD and team[0] == "row_split" else 0.0
            sums[team] = sum(times[each] for each in passes) + extra
    return sums


def losses(samples: Iterable[Sample]) -> list[tuple[float, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """What `auto` loses by its estimates of today: loss, case and direction, schedules taken, fastest; worst first."""
    times: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[str, str], float]] = {}
    first: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        directions: tuple[str, ...] = FORWARD if sample.direction in FORWARD else BACKWARD
        times.setdefault((sample.case, directions), {})[sample.schedule, sample.direction] = 1e3 * sample.seconds
        first.setdefault(sample.case, sample)
    lost = []
    for (case, directions), measured in times.items():
        problem = replace(first[case].problem, dout_dlogit=False)
        taken = tuple(
            choice.plan.schedule for choice in choose(FAMILY, problem, first[case].graph, directions, Settings())
        )
        forward = choose(FAMILY, problem, first[case].graph, FORWARD, Settings())[0].plan.schedule
        dout_dlogit_ms = 0.0
        of_forward = times.get((case, FORWARD), {})
        if (
            saves_dout_dlogit(problem.score, False)
            and {("row_split", "forward"), (forward, "forward")} <= of_forward.keys()
        ):
            dout_dlogit_ms = max(0.0, of_forward["row_split", "forward"] - of_forward[forward, "forward"])
        sums = totals(directions, measured, dout_dlogit_ms)
        if taken in sums:
            fastest = min(sums, key=lambda team: sums[team])
            direction = "forward" if directions == FORWARD else "backward"
            lost.append((max(0.0, sums[taken] / sums[fastest] - 1.0), (*case, direction), taken, fastest))
    return sorted(lost, key=lambda choice: -choice[0])


def loss_table(samples: Iterable[Sample], count: int = 20) -> str:
    """The choices that lose most."""
    lost = losses(samples)
    over = sum(loss > ALLOWED_LOSS for loss, *_ in lost)
    body = [
        [*case, *("/".join(dict.fromkeys(team)) for team in teams), f"{100 * loss:.1f} %"]
        for loss, case, *teams in lost[:count]
    ]
    header = ["graph", "score", "size", "dtype", "direction", "auto takes", "fastest", "loss"]
    return f"{len(lost)} choices, {over} lose more than {100 * ALLOWED_LOSS:.0f} %\n\n{markdown(header, body)}"


class Constant:
    """One number of the cost models, by name.

    Raises:
        ValueError: There is no such number.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        stem, _, rest = name.partition(".")
        self._table: Any = None
        self._key = rest
        if stem != "gpu":
            attribute, _, key = rest.partition(".")
            module = import_module(f"pyg_dfgnn.dispatch.attention.{stem}")
            self._table, self._key = (getattr(module, attribute), key) if key else (vars(module), attribute)
        try:
            self.value = float(self.get())
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"'{name}' is no number of a cost model") from error

    def get(self) -> Any:
        """The number as it is now."""
        if self._table is None:
            return getattr(gpu.gpu_of(self._device), self._key)
        return self._table[self._key]

    def set(self, value: float) -> None:
        """Let the cost models of this process use another number."""
        if self._table is None:
            changes: Any = {self._key: value}
            gpu.known[self._device] = replace(gpu.gpu_of(self._device), **changes)
        else:
            self._table[self._key] = value


def fit(samples: Sequence[Sample], constants: Sequence[Constant], steps: int = STEPS, seed: int = 0) -> float:
    """Change the constants so that the estimates come near the measured times; returns the spread that is left."""
    draw = random.Random(seed)
    best = spread(samples)
    for step in range(steps):
        width = 0.3 * 0.1 ** (step / steps)
        tried = draw.sample(constants, min(len(constants), draw.choice((1, 1, 2, 3))))
        before = [constant.get() for constant in tried]
        for constant, value in zip(tried, before, strict=True):
            constant.set(value * math.exp(draw.gauss(0.0, width)))
        reached = spread(samples)
        if reached < best:
            best = reached
        else:
            for constant, value in zip(tried, before, strict=True):
                constant.set(value)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how estimates and times compare, and what `auto` loses; with ``--fit`` before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", help="of the bench (default: choice.csv of this device)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="miniature graphs, as they were measured with")
    parser.add_argument("--graphs", nargs="+", help="only these (default: all of the CSV)")
    parser.add_argument("--schedules", nargs="+", default=list(FAMILY.candidates), help="those whose times are fitted")
    parser.add_argument("--fit", nargs="+", default=[], metavar="CONSTANT")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    folder = default_folder("bench", device, options.small) / file_stem(device, options.small)
    path = options.csv or folder / "choice.csv"
    if not path.exists():
        parser.error(f"there is no {path}: name another CSV, or run `python -m benchmarks experiment=choice`")

    samples = read(path, device, options.small, options.graphs)
    print(f"{comparison(samples)}\n\n{loss_table(samples)}")
    if options.fit:
        constants = [Constant(name, device) for name in options.fit]
        fitted = [sample for sample in samples if sample.schedule in options.schedules]
        before, after = spread(fitted), fit(fitted, constants, options.steps)
        print(f"\nfitted to {len(fitted)} times: rms of log {before:.3f} -> {after:.3f}")
        for constant in constants:
            print(f"  {constant.name}: {constant.value:.4g} -> {constant.get():.4g}")
        print(f"\n{comparison(samples)}\n\n{loss_table(samples)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
