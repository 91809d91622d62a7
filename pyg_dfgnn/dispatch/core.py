"""Which attention kernels run, and every reason why none can: the candidates are asked pass by pass."""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.attention import block_mma, paper, row_split, smem
from pyg_dfgnn.dispatch.attention.problem import SCORES, STORAGE, WALKS, AttentionProblem
from pyg_dfgnn.dispatch.gpu import Cost, Gpu, gpu_of
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import RULES, Settings, current

__all__ = [
    "BACKWARD",
    "CANDIDATES",
    "FORWARD",
    "SCORES",
    "WALKS",
    "AttentionProblem",
    "Candidate",
    "Choice",
    "LaunchPlan",
    "Option",
    "Pass",
    "choose",
    "leaves_tangent",
    "options",
    "plan",
    "unsupported_reasons",
    "with_tangent",
]

T = TypeVar("T")

MAX_CHANNELS = 512
MAX_HEADS = 65535
FORWARD = ("forward",)
BACKWARD = ("targets", "sources")

fused_device_types = {"cuda"}
"""Device types that kernels run on; the tests add "cpu" while the emulator takes the launches."""

_HAS_CUPY = find_spec("cupy") is not None
_logger = logging.getLogger("pyg_dfgnn")
# What was decided for batches of a kind, see `_kind`.
_decided: dict[Any, Any] = {}
_MAX_KINDS = 4096
_logged: set[tuple[str, str, str]] = set()


class Pass(Protocol):
    """What runs in one walk: a frozen dataclass of its schedule, that `str` describes."""

    @property
    def schedule(self) -> str:
        """Name of the schedule."""


class Candidate(Protocol):
    """A schedule as dispatch sees it: a module, or an object, with these names.

    `walk` is one of ``WALKS``; all passes of all schedules agree on what they save for each other.
    """

    hands_over: bool
    """Whether its pass over targets hands more than that to its pass over sources, so that they run together."""
    deterministic: bool
    """Whether its results are the same in every run."""

    def reasons_against(self, problem: AttentionProblem, walk: str, graph: Graph) -> list[str]:
        """Every reason why it cannot run a pass; empty when it can."""

    def plan_pass(self, problem: AttentionProblem, walk: str, graph: Graph) -> Any:
        """How it runs a pass that nothing speaks against: its own kind of :class:`Pass`."""

    def cost(self, problem: AttentionProblem, walk: str, graph: Graph, chosen: Any, gpu: Gpu) -> Cost:
        """Estimated time of a pass it has planned."""


CANDIDATES: Mapping[str, Candidate] = MappingProxyType(
    {
        "row_split": row_split,
        "smem": smem,
        "block_mma": block_mma,
        "smmf": paper.smmf,
        "pmf": paper.pmf,
    }
)
"""The schedules by name. `row_split` runs everything, so it is what the others fall back to."""


BY_NAME: Mapping[str, Candidate] = MappingProxyType({**CANDIDATES, **paper.ABLATIONS})
"""The candidates, and those that no rule chooses."""

REFILLABLE = ("row_split", "block_mma")
"""Schedules whose launches stay valid when other edges are put into the arrays of a graph (see `Graph.is_static`)."""


@dataclass(frozen=True)
class Option:
    """One candidate for one walk.

    Attributes:
        schedule: Its name.
        reasons: Why it cannot run; empty when it can.
        chosen: The pass; None with reasons.
        price: Makes its cost.
        measured_s: Its time on this kind of graph, where there is a timing.
    """

    schedule: str
    reasons: tuple[str, ...] = ()
    chosen: Any = None
    price: Callable[[], Cost] = field(default=lambda: Cost({}), repr=False, compare=False)
    measured_s: float | None = None

    @cached_property
    def cost(self) -> Cost:
        """Its estimated time, found when first asked for: it may read facts of the graph that take a while."""
        return self.price()

    @property
    def seconds(self) -> float:
        """Measured if it was, but for norms, which no timing of a pass has in it; else estimated."""
        if self.measured_s is None:
            return self.cost.seconds
        return self.measured_s + self.cost.added.get("norms", 0.0)

    def __str__(self) -> str:
        if self.reasons:
            return f"{self.schedule} cannot run: {'; '.join(self.reasons)}"
        measured = "" if self.measured_s is None else f"{1e3 * self.measured_s:.3g} ms measured, "
        return f"{self.schedule}: {measured}{self.cost}"


@dataclass(frozen=True)
class Choice:
    """What one walk of a call runs.

    Attributes:
        walk: One of ``WALKS``.
        chosen: The pass.
        reason: Why its schedule was chosen.
        final: Whether the same will be chosen next time; False where `autotune` could not take its timing yet.
        options: The candidates that were looked at.
    """

    walk: str
    chosen: Pass
    reason: str
    final: bool = field(default=True, compare=False)
    options: tuple[Option, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        lines = [
            f"{_LABELS[self.walk]}: {self.chosen.schedule} ({self.reason}), {self.chosen}",
            *map(str, self.options),
        ]
        return "\n    ".join(lines)


_LABELS = {"forward": "forward", "targets": "backward over targets", "sources": "backward over sources"}


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of one attention call on one graph; `str` shows each candidate's numbers.

    Attributes:
        forward: The forward pass, over the CSR.
        targets: The backward pass over the CSR, if gradients are needed.
        sources: The backward pass over the CSC, if gradients are needed.
    """

    forward: Choice
    targets: Choice | None = None
    sources: Choice | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Those that are there, in order of execution."""
        return tuple(choice for choice in (self.forward, self.targets, self.sources) if choice is not None)

    @property
    def schedule(self) -> str:
        """The schedule of all passes, or of each, joined by commas."""
        names = [choice.chosen.schedule for choice in self.choices]
        return names[0] if len(set(names)) == 1 else ", ".join(names)

    @property
    def deterministic(self) -> bool:
        """Whether results and gradients are the same in every run."""
        return all(BY_NAME[choice.chosen.schedule].deterministic for choice in self.choices)

    def __str__(self) -> str:
        results = "the same in every run" if self.deterministic else "may differ between runs"
        return "\n  ".join([f"schedule {self.schedule}", f"results: {results}", *map(str, self.choices)])


@cache
def runs_on(device: torch.device) -> bool:
    """Whether kernels run on a CUDA device: there is CuPy, and compute capability 8.0 or newer."""
    return _HAS_CUPY and torch.cuda.get_device_capability(device) >= (8, 0)


def device_reasons(device: torch.device) -> list[str]:
    """Return every reason why no kernel can run on a device; one that is not there is planned for as an H200."""
    if device.type not in fused_device_types:
        return [f"tensors are on {device.type}, the kernels run on CUDA devices"]
    reasons = []
    if device.type == "cuda" and torch.cuda.is_available():
        if not _HAS_CUPY:
            reasons.append("CuPy is not installed (pip install 'pyg_dfgnn[cuda13]' or 'pyg_dfgnn[cuda12]')")
        if torch.cuda.get_device_capability(device) < (8, 0):
            reasons.append("the kernels need compute capability 8.0 or newer")
    return reasons


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return every reason why no fused kernel can run ``problem``; empty when one can."""
    reasons = []
    if problem.score not in SCORES:
        reasons.append(f"score {problem.score!r} has no fused kernel (one of {', '.join(SCORES)})")
    reasons += device_reasons(problem.device)
    if problem.dtype not in STORAGE:
        reasons.append(f"{problem.dtype} has no fused kernel (float32, float16, bfloat16)")
    if not 1 <= problem.channels <= MAX_CHANNELS:
        reasons.append(f"{problem.channels} channels per head, the kernels take 1 to {MAX_CHANNELS}")
    if not 1 <= problem.heads <= MAX_HEADS:
        reasons.append(f"{problem.heads} heads, the kernels take 1 to {MAX_HEADS}")
    if problem.edge and problem.score == "cosine":
        reasons.append("the cosine score takes no edge features")
    return reasons


def _is_strict(settings: Settings) -> bool:
    """Whether results must be the same in every run."""
    return torch.are_deterministic_algorithms_enabled() if settings.deterministic is None else settings.deterministic


def _kind(what: Any, problem: AttentionProblem, graph: Graph, settings: Settings) -> Any:
    """What batches have in common for which `what` is decided once; None for other graphs, decided one by one.

    Sizes count by eighths of an octave, degrees and the largest graph by halves. Where results must be the same in
    every run no batch follows another, because which one comes first may differ. Of the settings nothing else decides.
    """
    facts = graph.facts
    if facts is None or settings.schedule != "auto" or _is_strict(settings):
        return None
    sizes = (round(8 * math.log2(size + 1)) for size in (graph.num_dst, graph.num_edges))
    most = (round(2 * math.log2(n + 1)) for n in (facts.max_in_degree, facts.max_out_degree, facts.max_nodes))
    return what, replace(problem, needs_grad=False), facts.is_simple, *sizes, *most


def _remember(kind: Any, decision: Any) -> None:
    if kind is not None:
        if len(_decided) >= _MAX_KINDS:
            _decided.clear()
        _decided[kind] = decision


def _as_its_kind(
    kind: Any, problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings
) -> list[Option] | None:
    """What another batch of its kind took, where this one can run it too."""
    names = _decided.get(kind)
    if names is None:
        return None
    found = options(problem, graph, walks, settings, tuple(dict.fromkeys(names)))
    taken = [offers[name] for offers, name in zip(found, names, strict=True)]
    return None if any(option.reasons for option in taken) else taken


def options(
    problem: AttentionProblem,
    graph: Graph,
    walks: Sequence[str],
    settings: Settings,
    names: Sequence[str] | None = None,
) -> list[dict[str, Option]]:
    """What the named candidates, by default all, have to offer for each of ``walks``.

    One that hands over from pass to pass can run all of them or none.
    """
    names = tuple(CANDIDATES) if names is None else names
    strict = _is_strict(settings)
    found: list[dict[str, Option]] = []
    for walk in walks:
        offers = {}
        for name in names:
            candidate = BY_NAME[name]
            if graph.is_static and name not in REFILLABLE:
                offers[name] = Option(name, ("its launches depend on edges that others will replace",))
                continue
            reasons = candidate.reasons_against(problem, walk, graph)
            if strict and not candidate.deterministic:
                reasons = [*reasons, "its results may differ between runs"]
            if reasons:
                offers[name] = Option(name, tuple(reasons))
                continue
            chosen = candidate.plan_pass(problem, walk, graph)
            price = partial(_price, candidate, problem, walk, graph, chosen)
            offers[name] = Option(name, (), chosen, price)
        found.append(offers)
    for name in names:
        reasons = list(dict.fromkeys(reason for offers in found for reason in offers[name].reasons))
        if reasons and BY_NAME[name].hands_over:
            for offers in found:
                offers[name] = Option(name, tuple(reasons))
    return found


def _price(candidate: Candidate, problem: AttentionProblem, walk: str, graph: Graph, chosen: Any) -> Cost:
    """The cost of a pass, with that of the norms before a forward pass that does not find them itself."""
    gpu = gpu_of(problem.device)
    cost = candidate.cost(problem, walk, graph, chosen, gpu)
    if walk == "forward" and problem.score == "cosine" and not chosen.constants.get("NORMS"):
        norms = graph.num_src * problem.row_bytes / gpu.memory_bytes_per_s + gpu.launch_s
        cost = replace(cost, added={**cost.added, "norms": norms})
    return cost


def _cheapest(found: Sequence[Mapping[str, Option]]) -> list[Option]:
    """The fastest option of each walk, where schedules that hand over take all walks or none."""
    able = [[option for option in offers.values() if not option.reasons] for offers in found]
    free = [[option for option in each if not BY_NAME[option.schedule].hands_over] for each in able]
    teams = [[_least(each, lambda option: option.seconds) for each in free]]
    for option in able[0]:
        if BY_NAME[option.schedule].hands_over:
            teams.append([offers[option.schedule] for offers in found])
    return _least(teams, lambda team: sum(option.seconds for option in team))


def _least(found: Sequence[T], key: Callable[[T], float]) -> T:
    """The one with the least key, which is not asked for where there is no choice."""
    return found[0] if len(found) == 1 else min(found, key=key)


def _asked_for(
    problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings
) -> tuple[str | None, str]:
    """The schedule that the settings name, if they do, and the reason to show."""
    if settings.schedule == "paper":
        return paper.rule(problem, graph, walks)
    return (None, "") if settings.schedule in RULES else (settings.schedule, "asked for")


def _report(option: Option, walk: str, fallback: str) -> None:
    """Tell the user, as `settings(fallback=...)` asks, that a schedule cannot run a pass and `row_split` takes its
    place.

    Raises:
        UnsupportedError: The settings ask for an error.
    """
    what = f"schedule {option.schedule!r} ({_LABELS[walk]})"
    if fallback == "error":
        raise UnsupportedError(option.reasons, what)
    # Numbers differ from graph to graph.
    key = (option.schedule, walk, re.sub(r"\d+(\.\d+)?", "", "; ".join(option.reasons)))
    if fallback == "log" and key not in _logged:
        _logged.add(key)
        _logger.warning("%s cannot run here, 'row_split' takes its place: %s", what, "; ".join(option.reasons))


def leaves_tangent(problem: AttentionProblem, graph: Graph, settings: Settings) -> bool:
    """Whether a forward pass that gradients follow leaves the tangent for the pass over targets (see ``row_split``).

    `row_split` does. Where another schedule is chosen by estimate for the forward pass alone, all three passes are
    weighed.
    """
    if not row_split.has_tangent(problem.score, problem.edge):
        return False
    kind = _kind("tangent", problem, graph, settings)
    found: bool | None = _decided.get(kind)
    if found is None:
        found = _tangent_pays(problem, graph, settings)
        _remember(kind, found)
    return found


def _tangent_pays(problem: AttentionProblem, graph: Graph, settings: Settings) -> bool:
    (forward,) = choose(problem, graph, FORWARD, replace(settings, fallback="silent"))
    if forward.chosen.schedule == "row_split" or settings.schedule not in ("auto", "autotune"):
        return forward.chosen.schedule == "row_split"

    def training_s(chosen: Any, tangent: bool) -> float:
        """Estimate of all passes, given the forward one."""
        seen = replace(problem, tangent=tangent)
        cost = CANDIDATES[chosen.schedule].cost(seen, "forward", graph, chosen, gpu_of(problem.device))
        backward = _cheapest(options(seen, graph, BACKWARD, settings))
        return sum((option.cost.seconds for option in backward), cost.seconds)

    rows = row_split.plan_pass(problem, "forward", graph)
    return training_s(rows, True) < training_s(forward.chosen, False)


def with_tangent(problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings) -> AttentionProblem:
    """The problem that ``walks`` see: in backward, with what the forward pass has left, if that is not known yet."""
    if walks != BACKWARD or problem.tangent:
        return problem
    return replace(problem, tangent=leaves_tangent(problem, graph, settings))


def choose(
    problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings, explain: bool = False
) -> tuple[Choice, ...]:
    """Choose what runs in ``walks`` of ``problem`` on ``graph``.

    Args:
        problem: What is computed.
        graph: On which graph.
        walks: ``FORWARD`` or ``BACKWARD``.
        settings: What the user decided.
        explain: Look at all candidates also where one is asked for, and refuse nothing: a plan to be read.

    Raises:
        UnsupportedError: The schedule asked for cannot run, and the settings ask for an error then.
    """
    problem = with_tangent(problem, graph, walks, settings)
    name, reason = _asked_for(problem, graph, walks, settings)
    if name is None:
        return _by_time(problem, graph, walks, settings, explain)
    return _by_name(name, reason, problem, graph, walks, settings, explain)


def _by_time(
    problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings, explain: bool
) -> tuple[Choice, ...]:
    """The fastest candidates, or what another batch of the kind took."""
    kind = _kind(walks, problem, graph, settings)
    taken = _as_its_kind(kind, problem, graph, walks, settings)
    final, reason = True, "as for another batch of its kind"
    if taken is None or explain:
        found = options(problem, graph, walks, settings)
    else:
        found = [{option.schedule: option} for option in taken]
    if taken is None:
        reason = f"the lowest estimate of {len(CANDIDATES)} candidates"
        if settings.schedule == "autotune":
            seconds = store.recall(store.key_of(problem, graph, walks, found))
            final, reason = seconds is not None, "the fastest of all candidates that can run"
            if seconds is None:
                reason = "the lowest estimate: not timed yet, and no timing is taken while a graph is captured"
            else:
                found = [_with_seconds(offers, seconds[walk]) for offers, walk in zip(found, walks, strict=True)]
        taken = _cheapest(found)
        if not explain:
            _remember(kind, tuple(option.schedule for option in taken))
    return tuple(
        Choice(walk, option.chosen, reason, final, tuple(offers.values()))
        for walk, option, offers in zip(walks, taken, found, strict=True)
    )


def _by_name(
    name: str,
    reason: str,
    problem: AttentionProblem,
    graph: Graph,
    walks: Sequence[str],
    settings: Settings,
    explain: bool,
) -> tuple[Choice, ...]:
    """The schedule that was asked for, and `row_split` for the passes that it cannot run."""
    others = tuple(other for other in CANDIDATES if other != name) if explain else ()
    found = options(problem, graph, walks, settings, (name, *others))
    choices = []
    for walk, offers in zip(walks, found, strict=True):
        option, why = offers[name], reason
        if option.reasons:
            if not explain:
                _report(option, walk, settings.fallback)
            why = f"{name} cannot run"
            (rows,) = options(problem, graph, (walk,), settings, ("row_split",))
            option = rows["row_split"]
        choices.append(Choice(walk, option.chosen, why, True, tuple(offers.values())))
    return tuple(choices)


def _with_seconds(offers: Mapping[str, Option], seconds: Mapping[str, float]) -> dict[str, Option]:
    return {name: replace(option, measured_s=seconds.get(name)) for name, option in offers.items()}


def plan(problem: AttentionProblem, graph: Graph, settings: Settings | None = None) -> LaunchPlan:
    """Say what would run for ``problem`` on ``graph`` under ``settings``, by default those in force, and why."""
    settings = current() if settings is None else settings
    walks = (FORWARD, BACKWARD) if problem.needs_grad else (FORWARD,)
    return LaunchPlan(*(choice for each in walks for choice in choose(problem, graph, each, settings, explain=True)))
