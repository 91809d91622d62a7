"""The graphs that tests and bench check results on: empty, isolated, duplicated, looped, lopsided, and ordinary ones.

Import ``ZOO`` for all kinds by name (``ZOO["hub"]()``, at a GPU's size ``ZOO["hub"](full=True)``), ``zoo()`` for the
small ones as a list, ``EdgeList`` for the type, and ``random``, ``hub``, ``star``, ``sbm`` and ``skewed`` for others of
a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class EdgeList:
    """A graph as its edges alone, with nothing that the package derives from them; ``str`` gives its name.

    Attributes:
        name: What the graph is called.
        edge_index: int64 [2, E], row 0 sources in [0, num_src), row 1 targets in [0, num_dst).
        num_src: Number of sources.
        num_dst: Number of targets.
        ptr: First node of each graph of a batch and the number of nodes, int64 [B + 1]; None: no batch.
        edge_type: Relation of each edge, int64 [E]; None: all edges are of one relation.
        num_relations: Number of relations, some of which may have no edges.
        node_type: Type of each node, ascending, int64 [N]; None: all nodes are of one type.
    """

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int
    ptr: Tensor | None = None
    edge_type: Tensor | None = None
    num_relations: int = 1
    node_type: Tensor | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def to(self, device: torch.device | str) -> EdgeList:
        """Return the graph on another device."""
        optional = (self.ptr, self.edge_type, self.node_type)
        ptr, edge_type, node_type = (None if tensor is None else tensor.to(device) for tensor in optional)
        edge_index = self.edge_index.to(device)
        return replace(self, edge_index=edge_index, ptr=ptr, edge_type=edge_type, node_type=node_type)

    @cached_property
    def in_degree(self) -> Tensor:
        return torch.bincount(self.edge_index[1], minlength=self.num_dst)

    @cached_property
    def out_degree(self) -> Tensor:
        return torch.bincount(self.edge_index[0], minlength=self.num_src)

    @cached_property
    def max_degree(self) -> int:
        """Largest number of edges of a target."""
        return int(self.in_degree.max()) if self.num_dst else 0

    @cached_property
    def hubs(self) -> dict[str, tuple[int, int]]:
        """Side -> (node, number of edges) of the node with most edges on the 'dst' and the 'src' side."""
        degrees = {"dst": self.in_degree, "src": self.out_degree}
        return {side: (int(degree.argmax()), int(degree.max())) for side, degree in degrees.items() if degree.numel()}

    @cached_property
    def row_ptr(self) -> Tensor:
        """First edge of each target in :attr:`by_target`, [N_dst + 1] on the CPU."""
        return torch.cat([self.in_degree.new_zeros(1), self.in_degree.cumsum(0)]).cpu()

    @cached_property
    def by_target(self) -> Tensor:
        """Edge positions grouped by target, [E]."""
        return torch.argsort(self.edge_index[1], stable=True)

    def shuffled(self, seed: int = 0) -> EdgeList:
        """Return the graph with its edges in random order, so that the order of edge features matters."""
        order = torch.randperm(self.num_edges, generator=_generator(seed)).to(self.device)
        edge_type = None if self.edge_type is None else self.edge_type[order]
        return replace(self, edge_index=self.edge_index[:, order].contiguous(), edge_type=edge_type)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def edges(name: str, pairs: list[tuple[int, int]], num_src: int, num_dst: int | None = None) -> EdgeList:
    """The graph of these pairs (source, target); its sources are its targets if `num_dst` is None."""
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()
    return EdgeList(name, edge_index, num_src, num_src if num_dst is None else num_dst)


def random(num_src: int, num_dst: int, num_edges: int, seed: int = 0, name: str | None = None) -> EdgeList:
    """Uniform edges, duplicates and self-loops as they fall."""
    generator = _generator(seed)
    source = torch.randint(num_src, (num_edges,), generator=generator)
    target = torch.randint(num_dst, (num_edges,), generator=generator)
    return EdgeList(name or f"random-{num_src}-{num_dst}-E{num_edges}", torch.stack([source, target]), num_src, num_dst)


def hub(size: int, num_nodes: int = 16) -> EdgeList:
    """One target with `size` edges from few sources, among nodes of degree one: a row that must be split."""
    source = torch.arange(size) % num_nodes
    target = torch.full((size,), num_nodes // 2)
    ring = torch.arange(num_nodes)
    edge_index = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([source, target])], dim=1)
    return EdgeList(f"hub-{size}", edge_index, num_nodes, num_nodes)


def star(size: int, inward: bool = True) -> EdgeList:
    """Node 0 and `size` leaves; all edges go to node 0, or all leave it."""
    leaves = torch.arange(1, size + 1)
    centre = torch.zeros_like(leaves)
    edge_index = torch.stack([leaves, centre] if inward else [centre, leaves])
    return EdgeList(f"star-{'in' if inward else 'out'}-{size}", edge_index, size + 1, size + 1)


def two_way_hub(leaves: int) -> EdgeList:
    """Node 0 is joined both ways to every other node; the others also have a few random neighbours."""
    both_ways = torch.cat([star(leaves).edge_index, star(leaves, inward=False).edge_index], dim=1)
    others = 1 + random(leaves, leaves, 3 * leaves, seed=6).edge_index
    return EdgeList(f"hub-{leaves}", torch.cat([both_ways, others], dim=1), leaves + 1, leaves + 1)


def sbm(num_graphs: int = 4, nodes: int = 20, seed: int = 0) -> EdgeList:
    """A batch of two-community graphs, without edges between graphs."""
    generator = _generator(seed)
    parts = []
    for graph in range(num_graphs):
        community = torch.arange(nodes) % 2
        probability = torch.where(community[:, None] == community, 0.5, 0.1)
        drawn = torch.rand(nodes, nodes, generator=generator) < probability
        parts.append(drawn.fill_diagonal_(False).nonzero().t() + graph * nodes)
    num_nodes = num_graphs * nodes
    ptr = torch.arange(num_graphs + 1) * nodes
    return EdgeList(f"sbm-{num_graphs}x{nodes}", torch.cat(parts, dim=1), num_nodes, num_nodes, ptr)


def block_model(num_graphs: int, least: int, most: int, seed: int = 7) -> EdgeList:
    """A batch of stochastic block models of `least` to `most - 1` nodes: five communities, undirected edges."""
    generator = _generator(seed)
    parts, ptr = [], [0]
    for size in torch.randint(least, most, (num_graphs,), generator=generator).tolist():
        community = torch.randint(5, (size,), generator=generator)
        probability = torch.where(community[:, None] == community, 0.5, 0.2)
        pairs = (torch.rand(size, size, generator=generator) < probability).triu(1).nonzero().t() + ptr[-1]
        parts += [pairs, pairs.flip(0)]
        ptr.append(ptr[-1] + size)
    return EdgeList("block-model", torch.cat(parts, dim=1), ptr[-1], ptr[-1], torch.tensor(ptr))


def skewed(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> EdgeList:
    """Degrees that fall off as a power of the node's number, on both sides: most rows are short, a few are long."""
    generator = _generator(seed)
    ends = [(size * torch.rand(num_edges, generator=generator) ** 1.6).long() for size in (num_src, num_dst)]
    return EdgeList(f"skewed-{num_src}-{num_dst}", torch.stack(ends), num_src, num_dst)


def many_relations(num_nodes: int, num_relations: int, num_edges: int, seed: int = 8) -> EdgeList:
    """Edges whose relations fall off as a power: the first has most, the last but one has one, the last has none."""
    graph = random(num_nodes, num_nodes, num_edges, seed)
    drawn = torch.rand(num_edges, generator=_generator(seed)) ** 3
    edge_type = ((num_relations - 2) * drawn).long()
    edge_type[num_edges // 2] = num_relations - 2
    return replace(graph, name=f"relations-{num_relations}", edge_type=edge_type, num_relations=num_relations)


def _with_loops(nodes: int) -> EdgeList:
    loops = torch.arange(nodes).expand(2, -1)
    drawn = random(nodes, nodes, 4 * nodes, seed=3)
    return replace(drawn, edge_index=torch.cat([drawn.edge_index, loops], dim=1))


def _repeated(graph: EdgeList, times: int) -> EdgeList:
    return replace(graph, edge_index=graph.edge_index.repeat(1, times))


def _every_second(graph: EdgeList) -> EdgeList:
    """The same edges between the even ones of twice as many nodes."""
    return replace(graph, edge_index=2 * graph.edge_index, num_src=2 * graph.num_src, num_dst=2 * graph.num_dst)


_SMALL: dict[str, Callable[[], EdgeList]] = {
    "no-nodes": lambda: edges("", [], 0),
    "no-edges": lambda: edges("", [], 5),
    "no-sources": lambda: edges("", [], 0, 3),
    "no-targets": lambda: edges("", [], 3, 0),
    "one-node": lambda: edges("", [], 1),
    "one-loop": lambda: edges("", [(0, 0)], 1),
    "isolated": lambda: edges("", [(1, 3), (3, 1), (3, 6)], 9),
    "duplicates": lambda: edges("", [(0, 1), (0, 1), (2, 1), (0, 1), (1, 0), (1, 0)], 3),
    "self-loops": lambda: edges("", [(0, 0), (1, 0), (1, 1), (1, 1), (3, 2), (2, 3), (3, 3)], 5),
    "only-loops": lambda: edges("", [(2, 2), (0, 0), (1, 1), (2, 2)], 3),
    "bipartite-wide": lambda: random(13, 5, 40, seed=1),
    "bipartite-tall": lambda: random(5, 13, 40, seed=2),
    "hub": lambda: hub(300),
    "star-in": lambda: star(70),
    "star-out": lambda: star(70, inward=False),
    "batch": sbm,
    "skewed": lambda: skewed(40, 50, 300),
    "many-relations": lambda: many_relations(50, 12, 400),
}
# What a GPU checks; kinds that are small by nature stay as they are. Edges are shuffled.
_FULL: dict[str, Callable[[], EdgeList]] = {
    "isolated": lambda: _every_second(random(300, 300, 1500, seed=1)),
    "duplicates": lambda: _repeated(random(200, 200, 800, seed=2), 3),
    "self-loops": lambda: _with_loops(200),
    "bipartite-wide": lambda: random(700, 90, 2800, seed=4),
    "bipartite-tall": lambda: random(90, 700, 2800, seed=5),
    "hub": lambda: two_way_hub(100_000),
    "batch": lambda: block_model(16, 80, 159),
    "skewed": lambda: skewed(9_000, 12_000, 30_000, seed=8),
    "many-relations": lambda: many_relations(5_000, 60, 40_000),
}


def _kind(name: str) -> Callable[[bool], EdgeList]:
    def build(full: bool = False) -> EdgeList:
        if full and name in _FULL:
            return replace(_FULL[name](), name=name).shuffled()
        return replace(_SMALL[name](), name=name)

    return build


ZOO: dict[str, Callable[..., EdgeList]] = {name: _kind(name) for name in _SMALL}
"""Name -> builder of a graph: small enough for a brute-force reference, or with ``full=True`` at a GPU's size."""


def zoo() -> list[EdgeList]:
    """All kinds, each small enough for a brute-force reference."""
    return [build() for build in ZOO.values()]
