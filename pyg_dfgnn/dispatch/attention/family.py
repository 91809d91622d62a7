"""The attention family: its schedules, what none of them can run, and which passes leave something for the next."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from pyg_dfgnn.dispatch import core
from pyg_dfgnn.dispatch.attention import block_mma, paper, row_split, smem
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD, Family
from pyg_dfgnn.dispatch.gpu import Gpu, gpu_of
from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.scores import SCORES, Score

MAX_CHANNELS = 512
MAX_HEADS = 65535
MAX_EDGE_CHANNELS = 64
"""Channels of an edge's row that the lanes of a head hold next to its features."""


def row_reasons(heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return every reason why no kernel can read rows [N, H, C]; empty when one can."""
    reasons = storage_reasons(dtype, device)
    if not 1 <= channels <= MAX_CHANNELS:
        reasons.append(f"{channels} channels per head, the kernels take 1 to {MAX_CHANNELS}")
    if not 1 <= heads <= MAX_HEADS:
        reasons.append(f"{heads} heads, the kernels take 1 to {MAX_HEADS}")
    return reasons


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return every reason why no fused kernel can run ``problem``; empty when one can."""
    score = SCORES.get(problem.score)
    reasons = []
    if score is None:
        reasons.append(f"score {problem.score!r} has no fused kernel (one of {', '.join(SCORES)})")
    reasons += row_reasons(problem.heads, problem.channels, problem.dtype, problem.device)
    if problem.edge and score is not None and score.edge is None:
        reasons.append(f"the {problem.score} score takes no edge features")
    if problem.edge_channels and score is not None and not score.takes_edge_rows:
        reasons.append(f"the {problem.score} score takes no edge features that all heads share")
    if problem.edge_channels > MAX_EDGE_CHANNELS:
        reasons.append(f"{problem.edge_channels} channels per edge, the kernels take up to {MAX_EDGE_CHANNELS}")
    return reasons


def shares_edge_rows(score: Score, heads: int, channels: int, edge_channels: int) -> bool:
    """Return whether the linear terms of edge features [E, D] are better taken at the targets than at each edge."""
    return score.takes_edge_rows and 0 < edge_channels <= MAX_EDGE_CHANNELS and edge_channels < heads * channels


def leaves_dout_dlogit(problem: AttentionProblem, graph: Graph, settings: Settings) -> bool:
    """Return whether a forward pass that gradients follow leaves dout_dlogit for the pass over targets.

    `row_split` leaves it. Where another schedule is chosen by estimate for the forward pass alone, all three passes are
    weighed.
    """
    if not row_split.saves_dout_dlogit(problem.score, problem.edge):
        return False
    (forward,) = core.choose(FAMILY, problem, graph, FORWARD, replace(settings, fallback="silent"))
    if forward.plan.schedule == FAMILY.fallback or settings.schedule not in ("auto", "autotune"):
        return forward.plan.schedule == FAMILY.fallback

    def training_s(plan: Any, dout_dlogit: bool) -> float:
        """Estimate all passes, given the forward one."""
        seen = replace(problem, dout_dlogit=dout_dlogit)
        cost = FAMILY.by_name[plan.schedule].cost(seen, "forward", graph, plan, gpu_of(problem.device))
        backward = core.cheapest(FAMILY, core.options(FAMILY, seen, graph, BACKWARD, settings))
        return sum((option.cost.seconds for option in backward), cost.seconds)

    rows = row_split.plan_pass(problem, "forward", graph)
    return training_s(rows, True) < training_s(forward.plan, False)


def _problem_for(
    problem: AttentionProblem, graph: Graph, directions: Sequence[str], settings: Settings
) -> AttentionProblem:
    """Return the problem as passes see it: in backward, with what the forward pass has left."""
    if directions != BACKWARD or problem.dout_dlogit:
        return problem
    return replace(problem, dout_dlogit=leaves_dout_dlogit(problem, graph, settings))


def _prologue(problem: AttentionProblem, direction: str, graph: Graph, plan: Any, gpu: Gpu) -> Mapping[str, float]:
    """Return the time of the inverse norms before a forward pass that does not find them itself."""
    if direction != "forward" or problem.record.node_scalars != "inverse_norm" or plan.constants.get("NORMS"):
        return {}
    return {"norms": graph.num_src * problem.row_bytes / gpu.memory_bytes_per_s + gpu.launch_s}


FAMILY = Family(
    name="attention",
    candidates=MappingProxyType(
        {
            "row_split": row_split,
            "smem": smem,
            "block_mma": block_mma,
        }
    ),
    others=MappingProxyType({"smmf": paper.smmf, "pmf": paper.pmf, **paper.ABLATIONS}),
    rules=MappingProxyType({"paper": paper.rule}),
    unsupported=unsupported_reasons,
    problem_for=_problem_for,
    after_forward=lambda problem, flags: replace(problem, dout_dlogit="dout_dlogit" in flags),
    prologue=_prologue,
)
