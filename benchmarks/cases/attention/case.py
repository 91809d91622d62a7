"""The attention family as data: which tensors each score takes, and how the fused op and the reference are called."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.case import DTYPES, Case, HeadsCase
from pyg_dfgnn import ops
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference import problems
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.reference.problems import EDGE_INPUTS, OWN_TARGETS, draw_grad_out, draw_inputs
from pyg_dfgnn.reference.zoo import EdgeList

LAYERS = {"dot": "GT", "cosine": "AGNN", "add": "GAT", "gatv2": "GATv2"}
SCORES = tuple(LAYERS)
NEGATIVE_SLOPE = 0.2
"""The slope of the leaky scores: the default of PyG, of the operators and of the reference."""

CHECKED_HEADS = (1, 3, 8)
CHECKED_CHANNELS = (1, 7, 16, 32, 40, 64, 128, 256)
CHECKED_DROPOUTS = (0.0, 0.5)


@dataclass(frozen=True)
class AttentionCase(HeadsCase):
    """One point of the grid of scores, heads, channels per head, edge features and dropout."""

    edge: bool = False
    dropout: float = 0.0

    titles = LAYERS
    family = "attention"
    dispatched = FAMILY

    @property
    def target_rows_of(self) -> dict[str, str]:
        return {"x_dst": "x_src"} if self.op in OWN_TARGETS else {}

    def __str__(self) -> str:
        edge = "-edge" if self.edge else ""
        dropout = f"-p{self.dropout}" if self.dropout else ""
        return f"{self.op}-H{self.heads}-C{self.channels}{edge}{dropout}"

    def roles(self, graph: EdgeList) -> dict[str, str]:
        return problems.roles(self.op, self.edge, own_targets=graph.num_src != graph.num_dst)

    def shape(self, name: str, graph: EdgeList) -> tuple[int, ...]:
        return problems.shape(name, self.roles(graph)[name], graph, self.heads, self.channels)

    def make_inputs(self, graph: EdgeList) -> Inputs:
        generator = torch.Generator(device=graph.device).manual_seed(0)
        return draw_inputs(self.op, graph, self.heads, self.channels, self.edge, generator=generator)

    def make_grad_out(self, graph: EdgeList, inputs: Inputs) -> Tensor:
        generator = torch.Generator(device=graph.device).manual_seed(1)
        return draw_grad_out(self.op, graph, self.heads, self.channels, inputs, generator)

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        attention = getattr(ops, f"{self.op}_attention")
        return attention(graph, **inputs, dropout_p=self.dropout)

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None) -> Tensor:
        attention = getattr(reference, f"{self.op}_attention")
        return attention(edge_index, num_dst, **inputs, keep=keep)[0]

    def keep(self, graph: EdgeList) -> Tensor | None:
        if not self.dropout:
            return None
        ids = torch.arange(graph.num_edges, device=graph.device)
        return dropout_factor(ids, self.heads, self.dropout, draw_seed(graph.device))

    def problem(self, dtype: str, device: torch.device) -> AttentionProblem:
        """Return the problem of this case for dispatch, in the dtype of that name."""
        size = self.op, self.heads, self.channels
        has_dropout, tf32 = self.dropout > 0, dtype == "tf32"
        return AttentionProblem(*size, DTYPES[dtype], device, self.edge, has_dropout, tf32=tf32)


def check_groups() -> dict[str, list[Case]]:
    """The correctness grid: every score with and without edge features, of each size, with and without dropout."""
    groups: dict[str, list[Case]] = {}
    for score in SCORES:
        for edge in (False, True) if score in EDGE_INPUTS else (False,):
            sizes = product(CHECKED_HEADS, CHECKED_CHANNELS, CHECKED_DROPOUTS)
            name = f"{score} with edge features" if edge else score
            groups[name] = [AttentionCase(score, heads, channels, edge, p) for heads, channels, p in sizes]
    return groups
