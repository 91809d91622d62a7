"""Estimates of the cost models beside measured times of passes, the fit of their constants, and what `auto` loses.

python -m pyg_dfgnn.bench experiment=choice                                  measures every pass by every schedule
python -m pyg_dfgnn.bench.costs                                              compares, judges what auto takes today
python -m pyg_dfgnn.bench.costs results/bench/<gpu>/choice.csv               with the times of another GPU
python -m pyg_dfgnn.bench.costs --fit row_split.STEP row_split.ROW.forward gpu.cache_bytes_per_s

A constant is named by the candidate's module (``row_split``, ``block_mma``, ``paper``:
pyg_dfgnn.dispatch.attention), its
name there and, in a table, the key; or by ``gpu`` and a field of `Gpu`. Better values are printed, to be written there
by hand. The graphs are made again by their recipes; without a GPU the device of reference is planned for.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pyg_dfgnn.bench.cases.attention import AttentionCase
from pyg_dfgnn.bench.graphs import benchmark_graph
from pyg_dfgnn.bench.prepare import compressed, problem_of
from pyg_dfgnn.bench.results import Table, default_folder, file_stem, markdown
from pyg_dfgnn.bench.tables import Choice, latest, tangent_cost
from pyg_dfgnn.bench.targets import CHOICE_LOSS
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.core import (
    BACKWARD,
    BY_NAME,
    CANDIDATES,
    FORWARD,
    WALKS,
    AttentionProblem,
    choose,
    with_tangent,
)
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import Settings

STEPS = 2000


@dataclass(frozen=True)
class Sample:
    """One measured pass.

    Attributes:
        case: Graph, score, heads, channels and dtype, as the file has them.
        problem: What was computed.
        graph: On which graph.
        walk: Which pass.
        schedule: By which schedule.
        chosen: How.
        seconds: In which time.
    """

    case: tuple[str, ...]
    problem: AttentionProblem
    graph: Graph
    walk: str
    schedule: str
    chosen: Any
    seconds: float

    @property
    def estimate(self) -> float:
        """Seconds by the cost model as it is now."""
        device = gpu.gpu_of(self.problem.device)
        return BY_NAME[self.schedule].cost(self.problem, self.walk, self.graph, self.chosen, device).seconds

    @property
    def error(self) -> float:
        """Logarithm of estimated over measured."""
        return math.log(self.estimate / self.seconds)


def read(path: Path, device: torch.device, small: bool = False, graphs: Container[str] | None = None) -> list[Sample]:
    """The timed passes of a result file, each by a candidate that was asked for by name.

    Args:
        path: A CSV of the bench.
        device: What is planned for; its graphs are made there, and skipped with a message where that is not possible.
        small: Whether the graphs were miniatures.
        graphs: Names of those to read; None: all.

    Returns:
        A sample per pass.
    """
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in latest(Table.read(path)).values():
        wanted = graphs is None or row["graph"] in graphs
        timed = row["status"] == "ok" and row["state"] == "warm"
        if wanted and timed and row["direction"] in WALKS and row["schedule"] in CANDIDATES:
            rows_of.setdefault(row["graph"], []).append(row)
    samples = []
    for graph_name, rows in rows_of.items():
        try:
            graph = compressed(benchmark_graph(graph_name, device, small=small))
        except (FileNotFoundError, ImportError, RuntimeError) as error:
            print(f"skipped graph {graph_name}: {error}")
            continue
        for row in rows:
            name, walk = row["schedule"], row["direction"]
            attention = AttentionCase(row["score"], int(row["heads"]), int(row["channels"]))
            problem = problem_of(attention, row["dtype"], device)
            walks = FORWARD if walk in FORWARD else BACKWARD
            problem = with_tangent(problem, graph, walks, Settings(schedule=name))
            if not BY_NAME[name].reasons_against(problem, walk, graph):
                case = (graph_name, row["score"], row["heads"], row["channels"], row["dtype"])
                chosen = BY_NAME[name].plan_pass(problem, walk, graph)
                samples.append(Sample(case, problem, graph, walk, name, chosen, 1e-3 * float(row["median_ms"])))
    return samples


def spread(samples: Sequence[Sample]) -> float:
    """Root mean square of the errors."""
    return math.sqrt(sum(sample.error**2 for sample in samples) / max(1, len(samples)))


def comparison(samples: Sequence[Sample]) -> str:
    """Estimated over measured, by schedule and pass."""
    body = []
    for name in CANDIDATES:
        for walk in WALKS:
            mine = sorted((s for s in samples if (s.schedule, s.walk) == (name, walk)), key=lambda s: s.error)
            if mine:
                worst = max(mine, key=lambda s: abs(s.error))
                ratios = [f"{math.exp(s):.2f}" for s in (mine[0].error, median(s.error for s in mine), mine[-1].error)]
                shown = f"{' '.join(worst.case)}: {1e3 * worst.seconds:.4g} ms, estimated {1e3 * worst.estimate:.4g}"
                body.append([name, walk, len(mine), *ratios, f"{spread(mine):.3f}", shown])
    return markdown(["schedule", "pass", "n", "least", "median", "most", "rms of log", "furthest"], body)


def losses(samples: Iterable[Sample]) -> list[tuple[float, tuple[str, ...], Choice]]:
    """What `auto` loses by its estimates of today against the fastest schedule, worst first."""
    times: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[str, str], float]] = {}
    first: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        walks: tuple[str, ...] = FORWARD if sample.walk in FORWARD else BACKWARD
        times.setdefault((sample.case, walks), {})[sample.schedule, sample.walk] = 1e3 * sample.seconds
        first.setdefault(sample.case, sample)
    found = []
    for (case, walks), measured in times.items():
        problem = replace(first[case].problem, tangent=False)
        taken = tuple(c.chosen.schedule for c in choose(problem, first[case].graph, walks, Settings()))
        forward = choose(problem, first[case].graph, FORWARD, Settings())[0].chosen.schedule
        tangent_ms = tangent_cost(problem.score, times.get((case, FORWARD), {}), forward)
        choice = Choice(walks, measured, taken, None, tangent_ms=tangent_ms)
        if choice.loss is not None:
            found.append((choice.loss, (*case, "forward" if walks == FORWARD else "backward"), choice))
    return sorted(found, key=lambda each: -each[0])


def loss_table(samples: Iterable[Sample], count: int = 20) -> str:
    """The choices that lose most."""
    found = losses(samples)
    over = sum(loss > CHOICE_LOSS for loss, _, _ in found)
    head = f"{len(found)} choices, {over} lose more than {100 * CHOICE_LOSS:.0f} %"
    body = [
        [
            *case,
            "/".join(dict.fromkeys(choice.taken)),
            "/".join(dict.fromkeys(choice.best or ())),
            f"{100 * loss:.1f} %",
        ]
        for loss, case, choice in found[:count]
    ]
    header = ["graph", "score", "H", "d", "dtype", "pass", "auto takes", "fastest", "loss"]
    return f"{head}\n\n{markdown(header, body)}"


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
        found = spread(samples)
        if found < best:
            best = found
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
    parser.add_argument("--schedules", nargs="+", default=list(CANDIDATES), help="those whose times are fitted")
    parser.add_argument("--fit", nargs="+", default=[], metavar="CONSTANT")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    folder = default_folder("bench", device, given.small) / file_stem(device, given.small)
    path = given.csv or folder / "choice.csv"
    if not path.exists():
        parser.error(f"there is no {path}: name another CSV, or run `python -m pyg_dfgnn.bench experiment=choice`")

    samples = read(path, device, given.small, given.graphs)
    print(f"{comparison(samples)}\n\n{loss_table(samples)}")
    if given.fit:
        constants = [Constant(name, device) for name in given.fit]
        fitted = [sample for sample in samples if sample.schedule in given.schedules]
        before, after = spread(fitted), fit(fitted, constants, given.steps)
        print(f"\nfitted to {len(fitted)} times: rms of log {before:.3f} -> {after:.3f}")
        for constant in constants:
            print(f"  {constant.name}: {constant.value:.4g} -> {constant.get():.4g}")
        print(f"\n{comparison(samples)}\n\n{loss_table(samples)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
