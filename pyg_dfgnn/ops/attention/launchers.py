"""From the plan of an attention pass to its launches, by schedule; and the inverse norms of the cosine score."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.paper import ABLATIONS
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.block_mma import BlockMmaLaunch
from pyg_dfgnn.ops.attention.paper import PaperLaunch
from pyg_dfgnn.ops.attention.row_split import RowSplitLaunch, node_kernel, node_launch
from pyg_dfgnn.ops.attention.smem import SmemLaunch
from pyg_dfgnn.ops.core import PreparedPass
from pyg_dfgnn.runtime.launcher import addresses

LAUNCHERS: Mapping[str, Callable[[AttentionProblem, str, Any, Graph], PreparedPass]] = MappingProxyType(
    {
        "row_split": RowSplitLaunch,
        "smem": SmemLaunch,
        "block_mma": BlockMmaLaunch,
        **dict.fromkeys(("smmf", "pmf", *ABLATIONS), PaperLaunch),
    }
)
"""The class of each schedule of the attention family."""


def prepare(problem: AttentionProblem, direction: str, plan: Any, graph: Graph, flags: frozenset[str]) -> PreparedPass:
    """Return the launches of a pass.

    Args:
        problem: What is computed.
        direction: A pass of the statement, or "dout_dlogit".
        plan: How the pass runs.
        graph: The edges.
        flags: Optional values that the forward pass has left.
    """
    if direction == "targets" and "dout_dlogit" in flags and plan.schedule == FAMILY.fallback:
        return node_launch(plan)
    return LAUNCHERS[plan.schedule](problem, direction, plan, graph)


class InverseNorm:
    """``1 / max(||x||, 1e-12)`` per row and head, [N, H] in float32, of contiguous and aligned rows [N, H, C]."""

    def __init__(self, heads: int, channels: int, dtype: torch.dtype) -> None:
        self.heads = heads
        self.kernel = node_kernel("attention/norm.cu", "attention_inverse_norm", heads, channels, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.size(0)
        norms = x.new_empty((rows, self.heads), dtype=torch.float32)
        self.kernel.launch(rows, x.device, addresses((x, norms)))
        return norms
