"""Seeded generators of graphs and of batches of small graphs, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Device = torch.device | str


class GeneratedEdges(NamedTuple):
    """Edges [2, E] sorted by (target, source), the number of nodes, and for a batch the node offsets of its graphs.

    Graphs in the plane have positions ``pos [N, 2]`` in units of a cell of their grid.
    """

    edge_index: Tensor
    num_nodes: int
    ptr: Tensor | None = None
    pos: Tensor | None = None


class TypedEdges(NamedTuple):
    """Edges [2, E] with their relations [E] between nodes of types that follow each other; `type_ptr` holds the first
    node of each type and the number of nodes.
    """

    edge_index: Tensor
    edge_type: Tensor
    type_ptr: Tensor
    num_relations: int

    @property
    def num_nodes(self) -> int:
        return int(self.type_ptr[-1])

    def compaction(self) -> tuple[float, float]:
        """Distinct (source, relation) pairs and distinct (target, relation) pairs, per edge."""
        pairs = (end * self.num_relations + self.edge_type for end in self.edge_index)
        return tuple(pair.unique().numel() / max(pair.numel(), 1) for pair in pairs)  # type: ignore[return-value]

    def both_ways(self) -> TypedEdges:
        """Return the edges followed by their inverses, of which relation r has the number `num_relations + r`."""
        edge_index = torch.cat([self.edge_index, self.edge_index.flip(0)], dim=1)
        edge_type = torch.cat([self.edge_type, self.edge_type + self.num_relations])
        return TypedEdges(edge_index, edge_type, self.type_ptr, 2 * self.num_relations)


def generator_of(seed: int, device: Device) -> torch.Generator:
    """Return a seeded generator on a device."""
    return torch.Generator(device=device).manual_seed(seed)


def symmetric(u: Tensor, v: Tensor, num_nodes: int) -> Tensor:
    """Return both directions of the pairs (u, v) without loops and duplicates, [2, E] sorted by (target, source)."""
    keep = u != v
    u, v = u[keep], v[keep]
    return sorted_edges(torch.cat([u, v]), torch.cat([v, u]), num_nodes)


def sorted_edges(source: Tensor, target: Tensor, num_nodes: int) -> Tensor:
    """Return edges [2, E] sorted by (target, source) without duplicates."""
    key = torch.unique(target * num_nodes + source, sorted=True)
    return torch.stack([key % num_nodes, key // num_nodes])


def offsets(sizes: Tensor) -> Tensor:
    """Return the offsets `[B + 1]` of groups with these sizes `[B]`."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def log_normal_chung_lu(
    num_nodes: int,
    mean_degree: float,
    max_degree: float,
    sigma: float,
    num_hubs: int,
    seed: int,
    device: Device,
    *,
    label: Tensor | None = None,
    homophily: float = 0.0,
) -> GeneratedEdges:
    """Return a graph with log-normal expected degrees, clipped at ``max_degree``, which a few hubs have.

    With labels ``[N]``, a share ``homophily`` of the pairs with two light ends (at most 4 times the mean degree) is
    matched anew inside the labels, which keeps the number of pairs of each node. Pairs of heavy nodes stay as drawn.

    Source: Chung and Lu, "Connected components in random graphs with given expected degree sequences", 2002.
    """
    generator = generator_of(seed, device)
    weight = log_normal_weights(num_nodes, mean_degree, max_degree, sigma, num_hubs, generator)
    u, v = weighted_pairs(weight, int(num_nodes * mean_degree / 2), generator)
    if label is not None:
        light = weight <= 4 * mean_degree
        free = light[u] & light[v] & (torch.rand(u.numel(), generator=generator, device=device) < homophily)
        u[free], v[free] = (end[free][label[end[free]].argsort(stable=True)] for end in (u, v))
    return GeneratedEdges(symmetric(u, v, num_nodes), num_nodes)


def log_normal_weights(
    num_nodes: int, mean_degree: float, max_degree: float, sigma: float, num_hubs: int, generator: torch.Generator
) -> Tensor:
    """Return log-normal expected degrees with a mean, clipped at ``max_degree``, which a few hubs have, float64 [N]."""
    normal = torch.randn(num_nodes, dtype=torch.float64, generator=generator, device=generator.device)
    weight = normal.mul_(sigma).exp_()
    for _ in range(20):
        weight = weight.mul_(mean_degree / weight.mean()).clamp_(max=max_degree)
    weight[:num_hubs] = max_degree
    return weight


def log_normal_pieces(
    num_nodes: int,
    num_edges: int,
    max_degree: float,
    sigma: float,
    num_hubs: int,
    seed: int,
    device: Device,
    *,
    piece: int = 1 << 25,
) -> Iterator[Tensor]:
    """Yield directed edges in pieces, int32 [2, e] each; loops and duplicates stay.

    Both ends are drawn by log-normal expected degrees. Beside a piece, 24 bytes per edge of a piece and per node live.

    Args:
        num_nodes: Number of nodes.
        num_edges: Edges of all pieces.
        max_degree: Expected degree of the hubs.
        sigma: Standard deviation of the logarithm of degrees.
        num_hubs: Number of hubs.
        seed: Seed of weights and edges.
        device: Where the edges are drawn.
        piece: Edges of a piece, the last of which may have fewer.
    """
    generator = generator_of(seed, device)
    weight = log_normal_weights(num_nodes, num_edges / num_nodes, max_degree, sigma, num_hubs, generator)
    for start in range(0, num_edges, piece):
        pair = weighted_pairs(weight, min(piece, num_edges - start), generator)
        yield torch.stack([end.int() for end in pair])


def weighted_pairs(weight: Tensor, num_pairs: int, generator: torch.Generator) -> list[Tensor]:
    """Return both ends of pairs, drawn by weight."""
    return [weighted_ends(weight, num_pairs, generator) for _ in range(2)]


def weighted_ends(weight: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return positions of weights `[count]`, drawn with replacement by weight."""
    cumulative = torch.cumsum(weight, 0)
    cumulative = cumulative / cumulative[-1]
    drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=weight.device)
    return torch.searchsorted(cumulative, drawn).clamp_(max=weight.numel() - 1)


def zipf_sizes(total: int, count: int) -> list[int]:
    """Return sizes of groups that fall off as `1 / rank` and sum to a total, of which each group has 1 at least.

    Source: Zipf, Human Behavior and the Principle of Least Effort, 1949.
    """
    share = torch.arange(1, count + 1, dtype=torch.float64).reciprocal()
    # Groups end where the cumulated shares are rounded to.
    ends = (share.cumsum(0) / share.sum() * (total - count)).round().long() + torch.arange(1, count + 1)
    return ends.diff(prepend=ends.new_zeros(1)).tolist()  # type: ignore[no-any-return]


def typed_graph(
    type_sizes: Sequence[int],
    relations: Sequence[tuple[int, int, int]],
    skew: tuple[float, float],
    seed: int,
    device: Device,
    *,
    label: Tensor | None = None,
    homophily: float = 0.0,
) -> TypedEdges:
    """Return a graph whose relations are bipartite Chung-Lu graphs between types of nodes; loops and duplicates stay.

    The nodes of a type are drawn as ends of an edge with a chance of `rank^-skew` in one random order of the type, so
    that hubs of one relation are hubs of others. A share `homophily` of the edges of each relation is matched anew
    inside the labels, which keeps the number of edges of each node and relation.

    Args:
        type_sizes: Number of nodes of each type.
        relations: Source type, target type and number of edges of each relation.
        skew: Exponents of sources and of targets.
        seed: Seed of the graph.
        device: Where it is drawn.
        label: Label of each node [N].
        homophily: Share of the edges that labels match anew.

    Source: Chung and Lu, "Connected components in random graphs with given expected degree sequences", 2002.
    """
    generator = generator_of(seed, device)
    type_ptr = offsets(torch.tensor(type_sizes)).to(device)
    order = [torch.randperm(size, generator=generator, device=device) for size in type_sizes]
    rank = [torch.arange(1, size + 1, dtype=torch.float64, device=device) for size in type_sizes]
    parts = []
    for *types, count in relations:
        ends = [
            type_ptr[kind] + order[kind][weighted_ends(rank[kind] ** -exponent, count, generator)]
            for kind, exponent in zip(types, skew)
        ]
        if label is not None:
            free = torch.rand(count, generator=generator, device=device) < homophily
            for end in ends:
                end[free] = end[free][label[end[free]].argsort(stable=True)]
        parts.append(torch.stack(ends))
    counts = torch.tensor([count for *_, count in relations], device=device)
    edge_type = torch.arange(len(relations), device=device).repeat_interleave(counts)
    return TypedEdges(torch.cat(parts, dim=1), edge_type, type_ptr, len(relations))


def nearest(point: Tensor, inside: Tensor | None, count: int) -> Tensor:
    """Return indices [B, n, count] of the nearest other points among those that are ``inside`` [B, n]."""
    distance = torch.cdist(point, point)
    distance.diagonal(dim1=1, dim2=2).fill_(float("inf"))
    if inside is not None:
        distance.masked_fill_(~inside[:, None, :], float("inf"))
    return distance.topk(count, largest=False).indices


def superpixel_batch(
    num_graphs: int, min_nodes: int, max_nodes: int, mean_nodes: float, seed: int, device: Device
) -> GeneratedEdges:
    """Return a batch like the superpixels of MNIST and CIFAR10: points of a jittered grid link to their 8 nearest.

    As in the published sets, out-degrees are 8 and in-degrees vary. Sizes lie in ``min_nodes..max_nodes``; they are
    uniform if the mean is the middle, else they fall off geometrically below the maximum.

    Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, appendix A.2 (the graphs imitated).
    """
    generator = generator_of(seed, device)
    drawn = torch.rand(num_graphs, generator=generator, device=device, dtype=torch.float64)
    deficit = max_nodes - mean_nodes
    if abs(2 * deficit - (max_nodes - min_nodes)) <= 1:
        size = min_nodes + (drawn * (max_nodes - min_nodes + 1)).long()
    else:
        # floor(log(1 - u) / log(1 - p)) is geometric with mean (1 - p) / p.
        rate = torch.tensor(deficit / (deficit + 1.0), dtype=torch.float64, device=device)
        size = max_nodes - (torch.log1p(-drawn) / rate.log()).long()
    size.clamp_(min_nodes, max_nodes)
    ptr = offsets(size)
    side = int(max_nodes**0.5) + 1
    cell = torch.rand(num_graphs, side * side, generator=generator, device=device).argsort(1)[:, :max_nodes]
    jitter = torch.rand(num_graphs, max_nodes, 2, generator=generator, device=device)
    point = torch.stack([cell // side, cell % side], dim=-1) + jitter
    inside = torch.arange(max_nodes, device=device) < size[:, None]
    near = nearest(point, inside, 8)
    graph, node = inside.nonzero(as_tuple=True)
    source = (ptr[graph] + node).repeat_interleave(8)
    target = ptr[graph].repeat_interleave(8) + near[inside].reshape(-1)
    num_nodes = int(ptr[-1])
    return GeneratedEdges(sorted_edges(source, target, num_nodes), num_nodes, ptr, point[inside])


def region_adjacency_batch(num_graphs: int, mean_nodes: float, seed: int, device: Device) -> GeneratedEdges:
    """Return a batch like the region graphs of photographs: grids of regions with one diagonal in each square.

    Rows and columns vary around ``mean_nodes`` regions like the shapes of photographs. The graphs are planar with both
    directions and a mean degree just below 6.

    Source: Dwivedi et al., Long Range Graph Benchmark, NeurIPS 2022, appendix A (the graphs imitated).
    """
    generator = generator_of(seed, device)
    height = torch.randint(18, 23, (num_graphs,), generator=generator, device=device)
    wished = mean_nodes / height
    width = (wished + torch.rand(num_graphs, generator=generator, device=device)).long()
    ptr = offsets(height * width)
    rows, columns = int(height.max()), int(width.max())
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    shape = num_graphs, rows, columns
    falls = torch.rand(shape, generator=generator, device=device) < 0.5
    tall, wide = height[:, None, None], width[:, None, None]
    node = ptr[:-1, None, None] + row * wide + column
    right = (row < tall) & (column + 1 < wide)
    down = (row + 1 < tall) & (column < wide)
    square = (row + 1 < tall) & (column + 1 < wide)
    ends = [
        (node[right], (node + 1)[right]),
        (node[down], (node + wide)[down]),
        (node[square & falls], (node + wide + 1)[square & falls]),
        ((node + 1)[square & ~falls], (node + wide)[square & ~falls]),
    ]
    u, v = (torch.cat(side) for side in zip(*ends, strict=True))
    num_nodes = int(ptr[-1])
    pos = ((row < tall) & (column < wide)).nonzero()[:, 1:]
    return GeneratedEdges(symmetric(u, v, num_nodes), num_nodes, ptr, pos)
