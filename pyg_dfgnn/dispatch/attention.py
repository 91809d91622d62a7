"""Which attention kernels run, and every reason why none can: the candidates are asked pass by pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol

import torch

from pyg_dfgnn.dispatch import attention_rows
from pyg_dfgnn.dispatch.attention_problem import SCORES, STORAGE, WALKS, AttentionProblem
from pyg_dfgnn.dispatch.gpu import Cost, Gpu
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import Settings, current

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
    "Pass",
    "choose",
    "plan",
    "unsupported_reasons",
]

MAX_CHANNELS = 512
MAX_HEADS = 65535
FORWARD = ("forward",)
BACKWARD = ("targets", "sources")

fused_device_types = {"cuda"}
"""Device types that kernels run on; the tests add "cpu" while the emulator takes the launches."""

_HAS_CUPY = find_spec("cupy") is not None


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

    def reasons_against(self, problem: AttentionProblem, walk: str, graph: Graph) -> list[str]:
        """Every reason why it cannot run a pass; empty when it can."""

    def plan_pass(self, problem: AttentionProblem, walk: str, graph: Graph) -> Any:
        """How it runs a pass that nothing speaks against: its own kind of :class:`Pass`."""

    def cost(self, problem: AttentionProblem, walk: str, graph: Graph, chosen: Any, gpu: Gpu) -> Cost:
        """Estimated time of a pass it has planned."""


CANDIDATES: Mapping[str, Candidate] = MappingProxyType({"rows": attention_rows})
"""The schedules by name. `rows` runs everything, so it is what the others fall back to."""


@dataclass(frozen=True)
class Choice:
    """What one walk of a call runs.

    Attributes:
        walk: One of ``WALKS``.
        chosen: The pass.
        reason: Why its schedule was chosen.
    """

    walk: str
    chosen: Pass
    reason: str

    def __str__(self) -> str:
        return f"{_LABELS[self.walk]}: {self.chosen.schedule} ({self.reason}), {self.chosen}"


_LABELS = {"forward": "forward", "targets": "backward over targets", "sources": "backward over sources"}


@dataclass(frozen=True)
class LaunchPlan:
    """The kernels of one attention call on one graph.

    Attributes:
        forward: The forward pass, over the CSR.
        targets: The backward pass over the CSR, if gradients are needed.
        sources: The backward pass over the CSC, if gradients are needed.
    """

    forward: Choice
    targets: Choice | None = None
    sources: Choice | None = None

    def __str__(self) -> str:
        choices = (self.forward, self.targets, self.sources)
        schedules = dict.fromkeys(c.chosen.schedule for c in choices if c is not None)
        return "\n  ".join([f"schedule {', '.join(schedules)}", *(str(c) for c in choices if c is not None)])


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return every reason why no fused kernel can run ``problem``; empty when one can."""
    reasons = []
    if problem.score not in SCORES:
        reasons.append(f"score {problem.score!r} has no fused kernel (one of {', '.join(SCORES)})")
    if problem.device.type not in fused_device_types:
        reasons.append(f"tensors are on {problem.device.type}, the kernels run on CUDA devices")
    elif problem.device.type == "cuda":
        if not _HAS_CUPY:
            reasons.append("CuPy is not installed (pip install 'pyg_dfgnn[cuda13]' or 'pyg_dfgnn[cuda12]')")
        if torch.cuda.get_device_capability(problem.device) < (8, 0):
            reasons.append("the kernels need compute capability 8.0 or newer")
    if problem.dtype not in STORAGE:
        reasons.append(f"{problem.dtype} has no fused kernel (float32, float16, bfloat16)")
    if not 1 <= problem.channels <= MAX_CHANNELS:
        reasons.append(f"{problem.channels} channels per head, the kernels take 1 to {MAX_CHANNELS}")
    if not 1 <= problem.heads <= MAX_HEADS:
        reasons.append(f"{problem.heads} heads, the kernels take 1 to {MAX_HEADS}")
    if problem.edge and problem.score == "cosine":
        reasons.append("the cosine score takes no edge features")
    return reasons


def choose(problem: AttentionProblem, graph: Graph, walks: Sequence[str], settings: Settings) -> tuple[Choice, ...]:
    """Choose what runs in ``walks`` (``FORWARD`` or ``BACKWARD``) of ``problem`` on ``graph``."""
    reason = "asked for" if settings.schedule == "rows" else "the general schedule"
    return tuple(Choice(walk, attention_rows.plan_pass(problem, walk, graph), reason) for walk in walks)


def plan(problem: AttentionProblem, graph: Graph, settings: Settings | None = None) -> LaunchPlan:
    """Choose the kernels for ``problem`` on ``graph`` under ``settings``, by default those in force."""
    settings = current() if settings is None else settings
    walks = FORWARD + BACKWARD if problem.needs_grad else FORWARD
    return LaunchPlan(*choose(problem, graph, FORWARD, settings), *choose(problem, graph, walks[1:], settings))
