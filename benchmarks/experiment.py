"""An experiment as data: composed by Hydra from ``benchmarks/configs``, checked, laid out as the jobs that it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import DTYPES, Case
from benchmarks.cases import FAMILY_OF, OURS, TITLES, case_of, implementation_of
from benchmarks.graphs import Recipe, recipe_of
from benchmarks.results import Rows, default_folder, device_of
from benchmarks.timing import Pace
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.settings import SCHEDULES

DIRECTIONS = ("fwd", "fwd+bwd", "bwd")
STATES = ("warm", "flushed", "replay")
KEY = ("graph", "op", "size", "dtype", "implementation", "schedule", "direction", "gpu", "torch")


@dataclass(frozen=True)
class Isolation:
    """Which implementations run in a process of their own, because a call of theirs may not come back.

    Attributes:
        implementations: Their names.
        min_edges: They run apart on graphs with at least that many edges.
        limit_s: Seconds after which the process is ended; 0 leaves them to another experiment.
    """

    implementations: tuple[str, ...]
    min_edges: int
    limit_s: float


@dataclass(frozen=True)
class Job:
    """One implementation under one schedule on one case, in the directions that are still missing."""

    graph: str
    case: Case
    dtype: str
    implementation: str
    schedule: str
    directions: tuple[str, ...]

    def key(self, direction: str, environment: Mapping[str, str]) -> tuple[str, ...]:
        """The columns ``KEY`` of a row of this job."""
        columns = (self.graph, self.case.op, self.case.size, self.dtype, self.implementation, self.schedule)
        return (*columns, direction, environment["gpu"], environment["torch"])


@dataclass(frozen=True)
class Experiment:
    """Settings of an experiment; one field per key of ``benchmarks/configs/bench.yaml``, which explains them.

    Raises:
        ValueError: A name is not among the choices, or a size has another form.
    """

    name: str
    file: str
    graphs: tuple[str, ...]
    ops: tuple[str, ...]
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    directions: tuple[str, ...]
    implementations: tuple[str, ...]
    schedules: tuple[str, ...]
    states: tuple[str, ...]
    baseline: str
    pace: Pace
    isolated: Isolation
    device: torch.device
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
            ("ops", tuple(FAMILY_OF)),
            ("dtypes", tuple(DTYPES)),
            ("directions", DIRECTIONS),
            ("implementations", tuple(TITLES)),
            ("schedules", SCHEDULES),
            ("states", STATES),
        ):
            for value in values[name]:
                check_choice(name, value, allowed)
        check_choice("baseline", values["baseline"], (*TITLES, *SCHEDULES))
        for name in values["graphs"]:
            recipe_of(name)
        for op in values["ops"]:
            for size in values["sizes"]:
                case_of(op, size)
        isolated = dict(values["isolated"])
        isolated["implementations"] = tuple(isolated["implementations"])
        values.update(
            pace=Pace(**values["pace"]),
            isolated=Isolation(**isolated),
            device=device_of(values["device"]),
        )
        values["folder"] = Path(values["folder"] or default_folder("bench", values["device"], values["small"]))
        return Experiment(**{field.name: values[field.name] for field in fields(Experiment)})

    def recipe(self, graph: str) -> Recipe:
        """How a graph is made, or its miniature."""
        recipe = recipe_of(graph)
        return recipe.miniature() if self.small else recipe

    def jobs(self, graph: str) -> Iterator[Job]:
        """Everything to measure on a graph; jobs that share inputs follow each other."""
        for op in self.ops:
            for size in self.sizes:
                case = case_of(op, size)
                for dtype in self.dtypes:
                    for name in self.implementations:
                        implementation = implementation_of(op, name)
                        if implementation is None or dtype not in implementation.dtypes:
                            continue
                        is_ours = name == "fused"
                        directions = tuple(d for d in self.directions if is_ours or d in ("fwd", "fwd+bwd"))
                        for schedule in self.schedules if is_ours else ("",):
                            yield Job(graph, case, dtype, name, schedule, directions)

    def missing(self, graph: str, rows: Rows, environment: Mapping[str, str]) -> list[Job]:
        """The jobs whose rows are not there yet; rows of other sources do not count for what runs on our kernels."""
        done = {
            tuple(row[name] for name in KEY)
            for row in rows
            if row["implementation"] not in OURS or row["digest"] == environment["digest"]
        }
        jobs = []
        for job in self.jobs(graph):
            if self.is_isolated(job) and not self.isolated.limit_s:
                continue
            directions = tuple(d for d in job.directions if job.key(d, environment) not in done)
            if directions:
                jobs.append(replace(job, directions=directions))
        return jobs

    def is_isolated(self, job: Job) -> bool:
        """Whether a job runs in a process of its own."""
        is_large = self.recipe(job.graph).num_edges >= self.isolated.min_edges
        return job.implementation in self.isolated.implementations and is_large
