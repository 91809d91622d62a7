"""Base class of the attention convs: their problem, the reasons against kernels for it, and its plan."""

from dataclasses import replace
from typing import Any

import torch
import torch_geometric

from pyg_dfgnn.dispatch.attention.family import FAMILY, unsupported_reasons
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem, tf32_allowed
from pyg_dfgnn.dispatch.core import explain
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.gate import FusedConv

_GOES_BY_TYPE = tuple(map(int, torch_geometric.__version__.split(".")[:2])) < (2, 8)


def asks_for_weights(flag: bool | None) -> bool:
    """Return whether `return_attention_weights` of GATConv or GATv2Conv asks for them; in PyG 2.7 False does too."""
    return isinstance(flag, bool) if _GOES_BY_TYPE else bool(flag)


class AttentionConv(FusedConv):
    """A drop-in conv on a fused attention op."""

    _problem_type = AttentionProblem
    _numbers_per_edge_of = staticmethod(lambda question: question[1] * question[2])
    _reasons_against = staticmethod(unsupported_reasons)

    def _plan(self, problem: AttentionProblem, graph: Graph) -> Any:
        problem = replace(problem, tf32=tf32_allowed(problem.dtype))
        return explain(FAMILY, problem, graph, torch.is_grad_enabled())
