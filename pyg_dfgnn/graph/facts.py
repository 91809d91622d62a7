"""What the host knows of a batch of graphs without asking the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

IN_DEGREE, OUT_DEGREE, BY_SOURCE, FACTS = "csr_in_degree", "csr_out_degree", "csr_by_source", "csr_facts"
_NUM_FACTS = 7


@dataclass(frozen=True)
class BatchFacts:
    """What the host knows of a batch whose graphs went through `SortEdges`, so that nobody asks the device.

    Attributes:
        nodes: Nodes of each graph, int64 [G].
        edges: Edges of each graph, int64 [G].
        loops: Edges from a node to itself of each graph, int64 [G].
        num_edges: Edges of all graphs.
        max_in_degree: Most edges into a node.
        max_out_degree: Most edges out of a node.
        max_kept_in: As `max_in_degree`, loops left out.
        max_kept_out: As `max_out_degree`, loops left out.
        is_simple: Whether no edge occurs twice.
    """

    nodes: Tensor
    edges: Tensor
    loops: Tensor
    num_edges: int
    max_in_degree: int
    max_out_degree: int
    max_kept_in: int
    max_kept_out: int
    is_simple: bool

    @staticmethod
    def of(batch: Any) -> BatchFacts:
        """The facts of a batch; where it has left the host, the host waits for them.

        Raises:
            ValueError: Its graphs did not go through :class:`SortEdges`.
        """
        facts = batch.get(FACTS)
        if not isinstance(facts, Tensor):
            raise ValueError("'batch' needs graphs that went through SortEdges")
        ptr = batch.get("ptr")
        nodes = torch.tensor([batch.num_nodes]) if ptr is None else ptr.to("cpu").diff()
        return BatchFacts.merge(nodes, facts.to("cpu"))

    @staticmethod
    def merge(nodes: Tensor, facts: Tensor) -> BatchFacts:
        """The facts of graphs with so many nodes [G] from the rows [G, 7] that `SortEdges` has stored.

        Raises:
            ValueError: The rows are of another version.
        """
        if facts.size(1) != _NUM_FACTS:
            given = f"(got {facts.size(1)} stored by another version)"
            raise ValueError(
                f"'batch' needs the {_NUM_FACTS} facts that SortEdges keeps of each graph {given}: sort again"
            )
        edges, loops = facts[:, 0].long(), facts[:, 1].long()
        max_in, max_out, kept_in, kept_out, repeated = facts[:, 2:].amax(0).tolist()
        return BatchFacts(nodes, edges, loops, int(edges.sum()), max_in, max_out, kept_in, kept_out, not repeated)

    @cached_property
    def max_nodes(self) -> int:
        """Nodes of the largest graph."""
        return int(self.nodes.max()) if len(self.nodes) else 0

    def with_loops(self) -> BatchFacts:
        """The facts once loops are dropped and each node has got one."""
        edges = self.edges - self.loops + self.nodes
        most = (self.max_kept_in + 1, self.max_kept_out + 1) if int(self.nodes.sum()) else (0, 0)
        return replace(
            self,
            edges=edges,
            loops=self.nodes,
            num_edges=int(edges.sum()),
            max_in_degree=most[0],
            max_out_degree=most[1],
        )
