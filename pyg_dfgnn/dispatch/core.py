"""Which kernels run a problem on a graph, and every reason why others cannot.

A family of kernels is data: its candidates, one per schedule, in the order of preference. For each pass of a problem
every candidate gives its reasons against itself, or a plan and what the plan costs; the cheapest plans run. This module
knows no family.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import RULES, Settings, current
from pyg_dfgnn.statements.op import DIRECTIONS

T = TypeVar("T")

FORWARD, BACKWARD = DIRECTIONS[:1], DIRECTIONS[1:]
LABELS: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "targets": "backward over targets", "sources": "backward over sources"}
)

fused_device_types = {"cuda"}
"""Device types that kernels run on; the tests add "cpu" while the emulator takes the launches."""

_HAS_CUPY = find_spec("cupy") is not None
_logger = logging.getLogger("pyg_dfgnn")
_logged: set[tuple[str, str, str]] = set()


class Problem(Protocol):
    """Facts of a call that decide its kernels, apart from the graph: a frozen dataclass, hashable.

    Its fields are part of what timings are remembered by.
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""

    @property
    def is_current(self) -> bool:
        """Whether torch's own settings that the problem depends on are still those."""


class PassPlan(Protocol):
    """Plan of one pass: a frozen dataclass of its schedule, which `str` describes."""

    @property
    def schedule(self) -> str:
        """Name of the schedule."""


class Candidate(Protocol):
    """A schedule as dispatch sees it: a module, or an object, with these names.

    A direction is one of ``DIRECTIONS``; all passes of all schedules of a family agree on what they save for each
    other.
    """

    passes_share_buffers: bool
    """Whether its pass over targets hands more than that to its pass over sources, so that they run together."""
    deterministic: bool
    """Whether its results are the same in every run."""
    refillable: bool
    """Whether its launches stay valid when other edges are put into the arrays of the graph."""

    def reasons_against(self, problem: Any, direction: str, graph: Graph) -> list[str]:
        """Return every reason why it cannot run a pass; empty when it can."""

    def plan_pass(self, problem: Any, direction: str, graph: Graph) -> Any:
        """Return how it runs a pass that nothing speaks against: its own kind of :class:`PassPlan`."""

    def cost(self, problem: Any, direction: str, graph: Graph, plan: Any, gpu: Gpu) -> Cost:
        """Return the estimated time of a pass that it has planned."""

    def specs(self, problem: Any, direction: str, plan: Any) -> Sequence[Any]:
        """Return what is compiled for a pass that it has planned; no GPU is needed."""


Rule = Callable[[Any, Graph, Sequence[str]], tuple[str, str]]
"""Names the schedule for the passes of a problem on a graph, and says why."""


@dataclass(frozen=True)
class Family:
    """Kernels that compute one kind of problem.

    Attributes:
        name: Name of the family.
        candidates: The schedules by name. The first runs every problem of the family and replaces those that cannot.
        others: Schedules that run only where they are asked for by name.
        rules: Rules that the setting `schedule` may name beside "auto" and "autotune".
        unsupported: Returns every reason why no kernel can run a problem; empty when one can.
        problem_for: Returns the problem as the passes of a direction see it, given what passes before them leave.
        after_forward: Returns the problem as backward passes see it, given the flags of what the forward pass has left.
        prologue: Returns the time of other kernels that a planned pass needs before it, by what they compute.
    """

    name: str
    candidates: Mapping[str, Candidate]
    others: Mapping[str, Candidate]
    rules: Mapping[str, Rule]
    unsupported: Callable[[Any], list[str]]
    problem_for: Callable[[Any, Graph, Sequence[str], Settings], Any] = lambda problem, *_: problem
    after_forward: Callable[[Any, frozenset[str]], Any] = lambda problem, _: problem
    prologue: Callable[[Any, str, Graph, Any, Gpu], Mapping[str, float]] | None = None

    @cached_property
    def by_name(self) -> Mapping[str, Candidate]:
        """All schedules of the family."""
        return MappingProxyType({**self.candidates, **self.others})

    @property
    def fallback(self) -> str:
        """The schedule that runs every problem of the family."""
        return next(iter(self.candidates))


@dataclass(frozen=True)
class Option:
    """One candidate for one pass.

    Attributes:
        schedule: Its name.
        reasons: Why it cannot run; empty when it can.
        plan: How it runs the pass; None with reasons.
        price: Makes its cost.
        measured_s: Its time on this kind of graph, where there is a timing.
    """

    schedule: str
    reasons: tuple[str, ...] = ()
    plan: Any = None
    price: Callable[[], Cost] = field(default=lambda: Cost({}), repr=False, compare=False)
    measured_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # With its cost, and without the graph and the family that make it.
        known = partial(_known, self.cost)
        return Option, (self.schedule, self.reasons, self.plan, known, self.measured_s)

    @cached_property
    def cost(self) -> Cost:
        """Its estimated time, found when first asked for: it may read facts of the graph that take a while."""
        return self.price()

    @property
    def seconds(self) -> float:
        """The measured time, with what no timing of the pass covers, where there is one; else the estimate."""
        if self.measured_s is None:
            return self.cost.seconds
        return self.measured_s + self.cost.prologue_s

    def __str__(self) -> str:
        if self.reasons:
            return f"{self.schedule} cannot run: {'; '.join(self.reasons)}"
        measured = "" if self.measured_s is None else f"{1e3 * self.measured_s:.3g} ms measured, "
        return f"{self.schedule}: {measured}{self.cost}"


def _known(cost: Cost) -> Cost:
    return cost


@dataclass(frozen=True)
class Choice:
    """Chosen plan of one pass of a call.

    Attributes:
        direction: One of ``DIRECTIONS``.
        plan: How the pass runs.
        reason: Why its schedule was chosen.
        final: Whether the same will be chosen next time; False where `autotune` could not take its timing yet.
        deterministic: Whether the results of the pass are the same in every run.
        options: The candidates that were looked at.
    """

    direction: str
    plan: Any
    reason: str
    final: bool = field(default=True, compare=False)
    deterministic: bool = field(default=True, compare=False)
    options: tuple[Option, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        lines = [
            f"{LABELS[self.direction]}: {self.plan.schedule} ({self.reason}), {self.plan}",
            *map(str, self.options),
        ]
        return "\n    ".join(lines)


class Choices(tuple[Choice, ...]):
    """Chosen plans of the passes of a call, in order of execution; `str` shows each candidate's numbers."""

    @property
    def schedule(self) -> str:
        """The schedule of all passes, or of each, joined by commas."""
        names = [choice.plan.schedule for choice in self]
        return names[0] if len(set(names)) == 1 else ", ".join(names)

    @property
    def deterministic(self) -> bool:
        """Whether results and gradients are the same in every run."""
        return all(choice.deterministic for choice in self)

    def __str__(self) -> str:
        results = "the same in every run" if self.deterministic else "may differ between runs"
        return "\n  ".join([f"schedule {self.schedule}", f"results: {results}", *map(str, self)])


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on a CUDA device: there is CuPy, and compute capability 8.0 or newer."""
    return _HAS_CUPY and torch.cuda.get_device_capability(device) >= (8, 0)


def device_reasons(device: torch.device) -> list[str]:
    """Return every reason why no kernel can run on a device; one that is not there is planned for as an H200."""
    if device.type not in fused_device_types:
        return [f"tensors are on {device.type}, the kernels run on CUDA devices"]
    reasons = []
    if device.type == "cuda" and torch.cuda.is_available():
        if not _HAS_CUPY:
            reasons.append('CuPy is not installed (pip install ".[cuda13]" or ".[cuda12]" in a clone of pyg_dfgnn)')
        if torch.cuda.get_device_capability(device) < (8, 0):
            reasons.append("the kernels need compute capability 8.0 or newer")
    return reasons


def _is_strict(settings: Settings) -> bool:
    """Return whether results must be the same in every run."""
    return torch.are_deterministic_algorithms_enabled() if settings.deterministic is None else settings.deterministic


def options(
    family: Family,
    problem: Any,
    graph: Graph,
    directions: Sequence[str],
    settings: Settings,
    names: Sequence[str] | None = None,
) -> list[dict[str, Option]]:
    """Return what the named candidates, by default all, have to offer for each of ``directions``.

    A candidate that hands over from pass to pass can run all of the passes or none.
    """
    names = tuple(family.candidates) if names is None else names
    strict = _is_strict(settings)
    per_direction: list[dict[str, Option]] = []
    for direction in directions:
        offers = {}
        for name in names:
            candidate = family.by_name[name]
            if graph.is_static and not candidate.refillable:
                offers[name] = Option(name, ("its launches depend on edges that others will replace",))
                continue
            reasons = candidate.reasons_against(problem, direction, graph)
            if strict and not candidate.deterministic:
                reasons = [*reasons, "its results may differ between runs"]
            if reasons:
                offers[name] = Option(name, tuple(reasons))
                continue
            plan = candidate.plan_pass(problem, direction, graph)
            price = partial(_price, family, name, problem, direction, graph, plan)
            offers[name] = Option(name, (), plan, price)
        per_direction.append(offers)
    for name in names:
        reasons = list(dict.fromkeys(reason for offers in per_direction for reason in offers[name].reasons))
        if reasons and family.by_name[name].passes_share_buffers:
            for offers in per_direction:
                offers[name] = Option(name, tuple(reasons))
    return per_direction


def _price(family: Family, name: str, problem: Any, direction: str, graph: Graph, plan: Any) -> Cost:
    """Return the cost of a planned pass, with what other kernels take before it."""
    gpu = gpu_of(problem.device)
    cost: Cost = family.by_name[name].cost(problem, direction, graph, plan, gpu)
    if family.prologue is None:
        return cost
    return replace(cost, prologue=family.prologue(problem, direction, graph, plan, gpu))


def cheapest(family: Family, per_direction: Sequence[Mapping[str, Option]]) -> list[Option]:
    """Return the fastest option of each pass, where schedules that hand over take all passes or none."""
    able = [[option for option in offers.values() if not option.reasons] for offers in per_direction]
    free = [[option for option in each if not family.by_name[option.schedule].passes_share_buffers] for each in able]
    teams = [[_least(each, lambda option: option.seconds) for each in free]]
    for option in able[0]:
        if family.by_name[option.schedule].passes_share_buffers:
            teams.append([offers[option.schedule] for offers in per_direction])
    return _least(teams, lambda team: sum(option.seconds for option in team))


def _least(candidates: Sequence[T], key: Callable[[T], float]) -> T:
    """Return the candidate with the least key, which is not asked for where there is no choice."""
    return candidates[0] if len(candidates) == 1 else min(candidates, key=key)


def _report(option: Option, direction: str, fallback: str, setting: str) -> None:
    """Tell the user, as `settings(fallback=...)` asks, that a schedule cannot run a pass and another takes its place.

    Raises:
        UnsupportedError: The settings ask for an error.
    """
    what = f"schedule {option.schedule!r} ({LABELS[direction]})"
    if setting == "error":
        raise UnsupportedError(option.reasons, what)
    # Numbers differ from graph to graph.
    key = (option.schedule, direction, re.sub(r"\d+(\.\d+)?", "", "; ".join(option.reasons)))
    if setting == "log" and key not in _logged:
        _logged.add(key)
        _logger.warning("%s cannot run here, %r takes its place: %s", what, fallback, "; ".join(option.reasons))


def choose(
    family: Family,
    problem: Problem,
    graph: Graph,
    directions: Sequence[str],
    settings: Settings,
    explain: bool = False,
) -> tuple[Choice, ...]:
    """Choose what runs in the passes ``directions`` of ``problem`` on ``graph``.

    Args:
        family: Whose kernels.
        problem: What is computed.
        graph: On which graph.
        directions: ``FORWARD`` or the backward passes of a statement.
        settings: What the user decided.
        explain: Look at all candidates also where one is asked for, and refuse nothing: a choice to be read.

    Returns:
        A choice for each pass.

    Raises:
        UnsupportedError: The schedule asked for cannot run, and the settings ask for an error then.
    """
    problem = family.problem_for(problem, graph, directions, settings)
    if not graph.is_measured:
        plain = family.by_name[family.fallback]
        plans = [plain.plan_pass(problem, direction, graph) for direction in directions]
        return tuple(Choice(d, plan, "nothing is measured of new edges") for d, plan in zip(directions, plans))
    name, reason = settings.schedule, "asked for"
    rule = family.rules.get(name)
    if rule is not None:
        name, reason = rule(problem, graph, directions)
    if name in RULES or name not in family.by_name:
        return _by_time(family, problem, graph, directions, settings)
    return _by_name(family, name, reason, problem, graph, directions, settings, explain)


def _by_time(
    family: Family, problem: Any, graph: Graph, directions: Sequence[str], settings: Settings
) -> tuple[Choice, ...]:
    """Return the fastest candidates."""
    per_direction = options(family, problem, graph, directions, settings)
    final, reason = True, f"the lowest estimate of {len(family.candidates)} candidates"
    if settings.schedule == "autotune":
        seconds = store.recall(store.key_of(family, problem, graph, directions, per_direction))
        final, reason = seconds is not None, "the fastest of all candidates that can run"
        if seconds is None:
            reason = "the lowest estimate: not timed yet, and no timing is taken while a graph is captured"
        else:
            timed = zip(per_direction, directions, strict=True)
            per_direction = [_with_seconds(offers, seconds[direction]) for offers, direction in timed]
    taken = cheapest(family, per_direction)
    return tuple(
        _choice(family, direction, option, reason, final, offers)
        for direction, option, offers in zip(directions, taken, per_direction, strict=True)
    )


def _choice(
    family: Family, direction: str, option: Option, reason: str, final: bool, offers: Mapping[str, Option]
) -> Choice:
    deterministic = family.by_name[option.schedule].deterministic
    return Choice(direction, option.plan, reason, final, deterministic, tuple(offers.values()))


def _by_name(
    family: Family,
    name: str,
    reason: str,
    problem: Any,
    graph: Graph,
    directions: Sequence[str],
    settings: Settings,
    explain: bool,
) -> tuple[Choice, ...]:
    """Return the schedule that was asked for, and the family's fallback for the passes that it cannot run."""
    others = tuple(other for other in family.candidates if other != name) if explain else ()
    per_direction = options(family, problem, graph, directions, settings, (name, *others))
    choices = []
    for direction, offers in zip(directions, per_direction, strict=True):
        option, why = offers[name], reason
        if option.reasons:
            if not explain:
                _report(option, direction, family.fallback, settings.fallback)
            why = f"{name} cannot run"
            (option,) = options(family, problem, graph, (direction,), settings, (family.fallback,))[0].values()
        choices.append(_choice(family, direction, option, why, True, offers))
    return tuple(choices)


def _with_seconds(offers: Mapping[str, Option], seconds: Mapping[str, float]) -> dict[str, Option]:
    return {name: replace(option, measured_s=seconds.get(name)) for name, option in offers.items()}


def explain(
    family: Family,
    problem: Problem,
    graph: Graph,
    trained: bool,
    settings: Settings | None = None,
    backward: Sequence[str] = BACKWARD,
) -> Choices:
    """Return what would run for ``problem`` on ``graph``, and why.

    Args:
        family: Whose kernels.
        problem: What is computed.
        graph: On which graph.
        trained: Whether a backward pass may follow.
        settings: What the user decided; by default the settings in force.
        backward: The backward passes.
    """
    settings = current() if settings is None else settings
    groups = (FORWARD, backward) if trained else (FORWARD,)
    return Choices(c for each in groups for c in choose(family, problem, graph, each, settings, explain=True))
