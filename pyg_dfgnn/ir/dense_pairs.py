"""The rows of edges that are new: every pair of a node and a relation is one, so that nothing has to be listed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from pyg_dfgnn.ir.domains import D, Domain, E, One, R, S, U, V
from pyg_dfgnn.ir.program import RANGED, Program

NODES = {U: S, V: D}
"""Domain of pairs -> the nodes that they are made of."""


def sizes_of(num_src: int, num_dst: int, relations: int, num_edges: int) -> dict[Domain, int]:
    """Return the numbers of rows of the domains of edges whose every node has a pair with each relation."""
    pairs = {U: relations * num_src, V: relations * num_dst}
    return {One: 1, S: num_src, D: num_dst, R: relations, E: num_edges, **pairs}


class DensePairs:
    """The domains of edges, as :class:`~pyg_dfgnn.ir.index_space.IndexSpace` has them.

    They are made without a wait for the device. Pairs are numbered by relation, then by node; those without edges have
    rows too.

    Args:
        source: Source of each edge, int64 [E], in range.
        target: Target of each edge, int64 [E], in range.
        relation: Relation of each edge, int64 or int32 [E], in range.
        sizes: Numbers of sources, of targets and of relations.

    Attributes:
        sizes: Number of rows of each domain.
        device: Where the edges are.
    """

    def __init__(self, source: Tensor, target: Tensor, relation: Tensor, sizes: tuple[int, int, int]) -> None:
        self.device, self.num_edges = source.device, source.numel()
        self.sizes: Mapping[Domain, int] = sizes_of(*sizes, self.num_edges)
        self._known = {(E, S): source, (E, D): target, (E, R): relation}

    def index(self, row: Domain, other: Domain) -> Tensor:
        """Return the row of `other` that each row of `row` determines, int64 or int32 [rows].

        Raises:
            ValueError: The edges lack a domain.
        """
        for domain in (row, other):
            if domain not in self.sizes:
                raise ValueError(f"'rows' needs a graph with node types for the domain {domain} (got one without)")
        if (row, other) not in self._known:
            # Later calls may save it for backward.
            with torch.inference_mode(False):
                self._known[row, other] = self._make(row, other)
        return self._known[row, other]

    def _make(self, row: Domain, other: Domain) -> Tensor:
        size = self.sizes[row]
        if other is One:
            return torch.zeros(size, dtype=torch.int64, device=self.device)
        if other is row:
            return torch.arange(size, device=self.device)
        if row is E:
            node = NODES[other]
            return torch.add(self._known[E, node], self._known[E, R], alpha=self.sizes[node])
        number = torch.arange(size, device=self.device)
        nodes = max(self.sizes[NODES[row]], 1)
        return number // nodes if other is R else number % nodes

    def by_relation(self, x: Tensor) -> Tensor:
        """Return rows of pairs [R * N, ...] as [R, N, ...]."""
        return x.unflatten(0, (self.sizes[R], -1)) if x.size(0) else x.view(self.sizes[R], 0, *x.shape[1:])

    def spread(self, x: Tensor, domain: Domain, other: Domain) -> Tensor:
        """Return the row of each pair of a domain, of rows of its nodes or of relations, as [R, N, ...]."""
        shape = self.sizes[R], self.sizes[NODES[domain]], *x.shape[1:]
        return (x.unsqueeze(1) if other is R else x.unsqueeze(0)).expand(shape)


@lru_cache(1024)
def takes(program: Program) -> bool:
    """Return whether a program means the same on pairs that no edge has: it reads and returns none, and sums them."""
    values, live = program.values, program.live
    named = {i for _, i in program.outputs} | set(program.inputs.values())
    if any(values[i].domain in NODES for i in named if i in live):
        return False
    for value in (values[i] for i in live):
        if value.op in RANGED and value.attrs[1] in NODES and value.op not in ("sum", "outer"):
            return False
        # Products per edge would be grouped by relation, for which the host waits.
        is_product = value.op in ("linear", "matmul") and R in {values[i].domain for i in value.args}
        if (is_product and value.domain is E) or (value.op == "outer" and value.attrs == (R, E)):
            return False
    return True
