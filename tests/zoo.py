"""Graphs that break careless code: empty, isolated, duplicated, looped, lopsided, and two ordinary ones."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A graph to test on: `edge_index` int64 [2, E], row 0 sources in [0, num_src), row 1 targets in [0, num_dst)."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int

    def __str__(self) -> str:
        return self.name


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def random(num_src: int, num_dst: int, num_edges: int, seed: int = 0, name: str | None = None) -> Case:
    """Uniform edges, duplicates and self-loops as they fall."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_src, (num_edges,), generator=generator)
    target = torch.randint(num_dst, (num_edges,), generator=generator)
    return Case(name or f"random-{num_src}-{num_dst}-E{num_edges}", torch.stack([source, target]), num_src, num_dst)


def hub(size: int, num_nodes: int = 16) -> Case:
    """One target with `size` edges from few sources, among nodes of degree one: a row that must be split."""
    source = torch.arange(size) % num_nodes
    target = torch.full((size,), num_nodes // 2)
    ring = torch.arange(num_nodes)
    edge_index = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([source, target])], dim=1)
    return Case(f"hub-{size}", edge_index, num_nodes, num_nodes)


def star(size: int, inward: bool = True) -> Case:
    """Node 0 and `size` leaves; all edges go to node 0, or all leave it."""
    leaves = torch.arange(1, size + 1)
    centre = torch.zeros_like(leaves)
    edge_index = torch.stack([leaves, centre] if inward else [centre, leaves])
    return Case(f"star-{'in' if inward else 'out'}-{size}", edge_index, size + 1, size + 1)


def sbm(num_graphs: int = 4, nodes: int = 20, seed: int = 0) -> Case:
    """A batch of two-community graphs, without edges between graphs."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for graph in range(num_graphs):
        community = torch.arange(nodes) % 2
        probability = torch.where(community[:, None] == community, 0.5, 0.1)
        drawn = torch.rand(nodes, nodes, generator=generator) < probability
        parts.append(drawn.fill_diagonal_(False).nonzero().t() + graph * nodes)
    return Case(f"sbm-{num_graphs}x{nodes}", torch.cat(parts, dim=1), num_graphs * nodes, num_graphs * nodes)


def skewed(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Case:
    """Degrees that fall off as a power of the node's number, on both sides: most rows are short, a few are long."""
    generator = torch.Generator().manual_seed(seed)
    ends = [(size * torch.rand(num_edges, generator=generator) ** 1.6).long() for size in (num_src, num_dst)]
    return Case(f"skewed-{num_src}-{num_dst}", torch.stack(ends), num_src, num_dst)


def zoo() -> list[Case]:
    """All kinds, each small enough for a brute-force reference."""
    return [
        Case("no-nodes", _edges(), 0, 0),
        Case("no-edges", _edges(), 5, 5),
        Case("no-sources", _edges(), 0, 3),
        Case("no-targets", _edges(), 3, 0),
        Case("one-node", _edges(), 1, 1),
        Case("one-loop", _edges((0, 0)), 1, 1),
        Case("isolated", _edges((1, 3), (3, 1), (3, 6)), 9, 9),
        Case("duplicates", _edges((0, 1), (0, 1), (2, 1), (0, 1), (1, 0), (1, 0)), 3, 3),
        Case("self-loops", _edges((0, 0), (1, 0), (1, 1), (1, 1), (3, 2), (2, 3), (3, 3)), 5, 5),
        Case("only-loops", _edges((2, 2), (0, 0), (1, 1), (2, 2)), 3, 3),
        random(13, 5, 40, seed=1, name="bipartite-wide"),
        random(5, 13, 40, seed=2, name="bipartite-tall"),
        hub(300),
        star(70),
        star(70, inward=False),
        sbm(),
        random(50, 50, 400, seed=3, name="random"),
    ]
