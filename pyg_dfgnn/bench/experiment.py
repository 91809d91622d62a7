"""An experiment as data: composed by Hydra from ``configs/bench``, checked, and laid out as the jobs that it lacks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from pyg_dfgnn.bench.baselines import IMPLEMENTATIONS, Flex
from pyg_dfgnn.bench.cases.attention import SCORES, AttentionCase
from pyg_dfgnn.bench.graphs import Recipe, recipe_of
from pyg_dfgnn.bench.prepare import DTYPES
from pyg_dfgnn.bench.results import Rows, default_folder
from pyg_dfgnn.bench.timing import Pace
from pyg_dfgnn.dispatch.attention.problem import WALKS
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.settings import SCHEDULES

DIRECTIONS = ("fwd", "fwd+bwd", "bwd", *WALKS)
STATES = ("warm", "flushed", "replay")
FLUSHED_BELOW_BYTES = 300e6
"""Graphs with fewer compulsory forward bytes fit the cache: they are also timed flushed and as a replayed graph."""
KEY = ("graph", "score", "heads", "channels", "dtype", "implementation", "schedule", "direction", "gpu", "torch")


@dataclass(frozen=True)
class Isolation:
    """Which implementations run in a process of their own, because a call of theirs may not come back.

    Attributes:
        implementations: Their names.
        min_edges: On graphs with at least that many edges.
        limit_s: Seconds after which the process is ended; 0: left to another experiment.
    """

    implementations: tuple[str, ...]
    min_edges: int
    limit_s: float


@dataclass(frozen=True)
class Job:
    """One implementation under one schedule on one case, in the directions that are still missing."""

    graph: str
    case: AttentionCase
    dtype: str
    implementation: str
    schedule: str
    directions: tuple[str, ...]

    def key(self, direction: str, environment: Mapping[str, str]) -> tuple[str, ...]:
        case = self.case
        named = (self.graph, case.score, case.heads, case.channels, self.dtype, self.implementation, self.schedule)
        return (*map(str, named), direction, environment["gpu"], environment["torch"])


@dataclass(frozen=True)
class Experiment:
    """What to measure and how; one field per key of ``configs/bench/bench.yaml``, which explains them.

    Raises:
        ValueError: A name is not among the choices, or a size has another form.
    """

    name: str
    file: str
    graphs: tuple[str, ...]
    scores: tuple[str, ...]
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    directions: tuple[str, ...]
    implementations: tuple[str, ...]
    schedules: tuple[str, ...]
    states: tuple[str, ...]
    pace: Pace
    isolated: Isolation
    device: torch.device
    workers: int
    limit_s: float
    folder: Path
    small: bool
    restart: bool
    summary: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> Experiment:
        """From a resolved config."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in config.items()}
        for name, allowed in (
            ("scores", SCORES),
            ("dtypes", tuple(DTYPES)),
            ("directions", DIRECTIONS),
            ("implementations", tuple(IMPLEMENTATIONS)),
            ("schedules", SCHEDULES),
            ("states", STATES),
        ):
            for value in values[name]:
                check_choice(name, value, allowed)
        for name in values["graphs"]:
            recipe_of(name)
        for size in values["sizes"]:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", str(size)):
                raise ValueError(f"'sizes' needs a list of heads x channels, such as [1x128,8x16] (got {size!r})")
        isolated = dict(values["isolated"])
        isolated["implementations"] = tuple(isolated["implementations"])
        device = values["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        values.update(
            pace=Pace(**values["pace"]),
            isolated=Isolation(**isolated),
            device=torch.device(device),
            workers=max(1, (os.cpu_count() or 2) - 1) if values["workers"] is None else values["workers"],
        )
        values["folder"] = Path(values["folder"] or default_folder("bench", values["device"], values["small"]))
        return Experiment(**{field.name: values[field.name] for field in fields(Experiment)})

    def recipe(self, graph: str) -> Recipe:
        recipe = recipe_of(graph)
        return recipe.miniature() if self.small else recipe

    def jobs(self, graph: str) -> Iterator[Job]:
        """Everything to measure on a graph: inputs that are shared stand next to each other."""
        for score in self.scores:
            for size in self.sizes:
                heads, channels = map(int, size.split("x"))
                case = AttentionCase(score, heads, channels)
                for dtype in self.dtypes:
                    for name in self.implementations:
                        if dtype not in IMPLEMENTATIONS[name].dtypes:
                            continue
                        own = name == "fused"
                        directions = tuple(d for d in self.directions if own or d in ("fwd", "fwd+bwd"))
                        for schedule in self.schedules if own else ("",):
                            yield Job(graph, case, dtype, name, schedule, directions)

    def missing(self, graph: str, rows: Rows, environment: Mapping[str, str]) -> list[Job]:
        """The jobs whose rows are not there yet; rows of other sources do not count for our own implementation."""
        done = {
            tuple(row[name] for name in KEY)
            for row in rows
            if row["implementation"] != "fused" or row["digest"] == environment["digest"]
        }
        jobs = []
        for job in self.jobs(graph):
            if self.is_isolated(job) and not self.isolated.limit_s:
                continue
            directions = tuple(d for d in job.directions if job.key(d, environment) not in done)
            if directions:
                jobs.append(Job(**{**vars(job), "directions": directions}))
        return jobs

    def is_isolated(self, job: Job) -> bool:
        """Whether a job runs in a process of its own."""
        large = self.recipe(job.graph).num_edges >= self.isolated.min_edges
        return job.implementation in self.isolated.implementations and large


_EDGES_PER_SECOND = {"fused": 1.7e10, "unfused": 8e9, "pyg": 6e8, "compile": 3e9, "flex": 3e9}
"""Forward, one gather of 128 float32 features; rough, from an H200, for the estimate alone."""
_SET_UP_S = {"compile": 5.0, "flex": 10.0}
_GATHERS = {"dot": 2.0, "cosine": 1.3, "add": 1.0, "gatv2": 1.3}
_SHARES = {"fwd": 1.0, "fwd+bwd": 3.3, "bwd": 2.3, "forward": 1.0, "targets": 1.1, "sources": 1.2}
_MEMORY_BYTES = 127e9


def expected_s(jobs: Sequence[Job], experiment: Experiment) -> float:
    """Rough seconds that jobs take on an H200: float64 references, set-up, calls at their pace."""
    total, references = 0.0, set()
    for job in jobs:
        case, recipe = job.case, experiment.recipe(job.graph)
        features = case.heads * case.channels
        elements = float(recipe.num_edges) * features / 128
        masked = "num_graphs" not in recipe.arguments and recipe.num_nodes**2 > Flex.max_mask_bytes
        if job.implementation == "flex" and (case.score != "dot" or masked):
            continue
        if (case, job.dtype) not in references:
            references.add((case, job.dtype))
            total += 0.05 + elements / 6e7
        if experiment.is_isolated(job):
            total += experiment.isolated.limit_s * len(job.directions)
            continue
        total += 0.3 + _SET_UP_S.get(job.implementation, 0.0)
        small = 16 * recipe.num_nodes * features + 4 * recipe.num_edges < FLUSHED_BELOW_BYTES
        states = len(experiment.states) if small else 1
        implementation = IMPLEMENTATIONS[job.implementation]()
        forward_ms = 0.03 + 1e3 * _GATHERS[case.score] * elements / _EDGES_PER_SECOND.get(job.implementation, 2e9)
        for direction in job.directions:
            if implementation.predicted_bytes(case, recipe.num_edges, direction != "fwd") > _MEMORY_BYTES:
                continue
            call_ms = forward_ms * _SHARES[direction]
            calls = experiment.pace.repetitions(call_ms) + 8
            total += 1e-3 * call_ms * calls * states
    return total
