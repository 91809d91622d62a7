"""The graphs that timings and checks run on: seeded generators, small adversarial graphs, and two real ones."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BenchGraph:
    """One edge set: row 0 of ``edge_index [2, E]`` holds sources, row 1 targets, any order."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    @cached_property
    def in_degree(self) -> Tensor:
        return torch.bincount(self.edge_index[1], minlength=self.num_dst)

    @cached_property
    def out_degree(self) -> Tensor:
        return torch.bincount(self.edge_index[0], minlength=self.num_src)

    @cached_property
    def max_degree(self) -> int:
        return int(self.in_degree.max()) if self.num_dst else 0

    @cached_property
    def hubs(self) -> dict[str, tuple[int, int]]:
        """Side -> (node, number of edges) of the node with most edges on the 'dst' and 'src' side."""
        degrees = {"dst": self.in_degree, "src": self.out_degree}
        return {side: (int(d.argmax()), int(d.max())) for side, d in degrees.items() if d.numel()}

    @cached_property
    def row_ptr(self) -> Tensor:
        """First edge of each target in ``by_target`` [N_dst + 1], on the CPU."""
        return torch.cat([self.in_degree.new_zeros(1), self.in_degree.cumsum(0)]).cpu()

    @cached_property
    def by_target(self) -> Tensor:
        """Edge positions grouped by target [E]; independent of the package's own CSR."""
        return torch.argsort(self.edge_index[1], stable=True)


def _generator(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _symmetric(u: Tensor, v: Tensor, num_nodes: int) -> Tensor:
    """Both directions of the pairs (u, v) without loops and duplicates, sorted by (row, column), as [2, E]."""
    keep = u != v
    u, v = u[keep], v[keep]
    key = torch.cat([u * num_nodes + v, v * num_nodes + u])
    key = torch.unique(key, sorted=True)
    return torch.stack([key % num_nodes, key // num_nodes])


def random_graph_batch(
    num_graphs: int, min_nodes: int, max_nodes: int, probability: float, seed: int, device: torch.device | str
) -> tuple[Tensor, int]:
    """A batch of graphs that keep each unordered pair with one probability; returns ([2, E], N).

    Sizes are uniform integers in ``min_nodes..max_nodes``; both directions are present, no self-loops.
    """
    generator = _generator(seed, device)
    size = torch.randint(min_nodes, max_nodes + 1, (num_graphs,), generator=generator, device=device)
    first = torch.cumsum(size, 0) - size
    drawn = torch.rand(num_graphs, max_nodes, max_nodes, generator=generator, device=device) < probability
    inside = torch.arange(max_nodes, device=device) < size[:, None]
    drawn &= inside[:, :, None] & inside[:, None, :]
    graph, u, v = drawn.triu_(1).nonzero(as_tuple=True)
    num_nodes = int(size.sum())
    return _symmetric(first[graph] + u, first[graph] + v, num_nodes), num_nodes


def chung_lu(
    num_nodes: int, mean_degree: float, max_degree: float, seed: int, device: torch.device | str
) -> tuple[Tensor, int]:
    r"""A power-law graph from node weights; returns ([2, E], N).

    Weights are :math:`(i + i_0)^{-1/2}` with :math:`i_0 = N / (4 (\max / \mathrm{mean})^2)`, shuffled; ``N * mean / 2``
    pairs are drawn with both ends by weight, then made symmetric without loops and duplicates.

    Source: Chung and Lu, "Connected components in random graphs with given expected degree sequences", 2002.
    """
    generator = _generator(seed, device)
    offset = num_nodes / (4 * (max_degree / mean_degree) ** 2)
    weight = (torch.arange(num_nodes, device=device, dtype=torch.float64) + offset) ** -0.5
    weight = weight[torch.randperm(num_nodes, generator=generator, device=device)]
    cumulative = torch.cumsum(weight, 0)
    cumulative = cumulative / cumulative[-1]
    num_pairs = int(num_nodes * mean_degree / 2)
    ends = []
    for _ in range(2):
        drawn = torch.rand(num_pairs, dtype=torch.float64, generator=generator, device=device)
        ends.append(torch.searchsorted(cumulative, drawn).clamp_(max=num_nodes - 1))
    return _symmetric(ends[0], ends[1], num_nodes), num_nodes


def nearest_neighbour_batch(
    num_graphs: int, num_points: int, num_neighbours: int, seed: int, device: torch.device | str
) -> tuple[Tensor, int]:
    """A batch of uniform point sets in the unit square, each point a target of its nearest neighbours; ([2, E], N)."""
    generator = _generator(seed, device)
    point = torch.rand(num_graphs, num_points, 2, generator=generator, device=device)
    distance = torch.cdist(point, point)
    distance.diagonal(dim1=1, dim2=2).fill_(float("inf"))
    near = distance.topk(num_neighbours, largest=False).indices.sort(dim=-1).values
    first = num_points * torch.arange(num_graphs, device=device)
    source = (first[:, None, None] + near).reshape(-1)
    target = torch.arange(num_graphs * num_points, device=device).repeat_interleave(num_neighbours)
    return torch.stack([source, target]), num_graphs * num_points


@dataclass(frozen=True)
class Recipe:
    """How one benchmark graph is made and what it must look like; ``small`` overrides give a miniature for tests."""

    stands_for: str
    build: Callable[..., tuple[Tensor, int]]
    arguments: dict[str, Any]
    num_nodes: int
    num_edges: int
    max_degree: int
    small: dict[str, Any] = field(default_factory=dict)


RECIPES: dict[str, Recipe] = {
    "a": Recipe(
        "PATTERN batch",
        random_graph_batch,
        dict(num_graphs=1024, min_nodes=80, max_nodes=158, probability=0.43, seed=0),
        122_039,
        6_441_672,
        89,
        dict(num_graphs=2, min_nodes=8, max_nodes=16),
    ),
    "b": Recipe(
        "Cora", chung_lu, dict(num_nodes=2708, mean_degree=4.05, max_degree=215, seed=1), 2_708, 10_880, 205,
        dict(num_nodes=60, max_degree=20),
    ),
    "c": Recipe(
        "Reddit", chung_lu, dict(num_nodes=232_965, mean_degree=500, max_degree=24_000, seed=2), 232_965, 115_842_382,
        21_937, dict(num_nodes=200, mean_degree=10, max_degree=80),
    ),
    "d": Recipe(
        "ogbn-proteins", chung_lu, dict(num_nodes=132_534, mean_degree=607, max_degree=8200, seed=3), 132_534,
        79_880_426, 8_094, dict(num_nodes=150, mean_degree=12, max_degree=60),
    ),
    "e": Recipe(
        "MNIST superpixel batch", nearest_neighbour_batch,
        dict(num_graphs=1024, num_points=71, num_neighbours=8, seed=0),
        72_704, 581_632, 8, dict(num_graphs=3, num_points=12),
    ),
}  # fmt: skip

EDGE_TOLERANCE = 5e-3
MAX_DEGREE_TOLERANCE = 0.2


def benchmark_graph(name: str, device: torch.device | str, *, small: bool = False) -> BenchGraph:
    """Builds benchmark graph ``a``..``e`` by its recipe and refuses one whose statistics are not the recipe's.

    Args:
        name: A key of ``RECIPES``.
        device: Where to sample and keep the graph; the recorded sizes belong to the CUDA generator.
        small: A miniature by the same code, for machines without a GPU; its statistics are not compared.

    Raises:
        RuntimeError: If N differs, or E or the maximum degree is too far from the recorded graph.
    """
    recipe = RECIPES[name]
    arguments = {**recipe.arguments, **(recipe.small if small else {})}
    edge_index, num_nodes = recipe.build(**arguments, device=device)
    graph = BenchGraph(name, edge_index, num_nodes, num_nodes)
    if not small:
        compare_with_recipe(graph, recipe)
    return graph


def compare_with_recipe(graph: BenchGraph, recipe: Recipe) -> str:
    """One line with achieved and recorded sizes, ending in 'identical' or 'equivalent'; raises when neither holds."""
    achieved = (graph.num_src, graph.num_edges, graph.max_degree)
    recorded = (recipe.num_nodes, recipe.num_edges, recipe.max_degree)
    line = "graph ({}): N {:,} / {:,}, E {:,} / {:,}, max degree {:,} / {:,}".format(
        graph.name, *(value for pair in zip(achieved, recorded, strict=True) for value in pair)
    )
    if achieved == recorded:
        return f"{line}: identical"
    edges_off = abs(achieved[1] - recorded[1]) / recorded[1]
    degree_off = abs(achieved[2] - recorded[2]) / recorded[2]
    if achieved[0] != recorded[0] or edges_off > EDGE_TOLERANCE or degree_off > MAX_DEGREE_TOLERANCE:
        raise RuntimeError(f"{line} (achieved / recorded): another graph, times would not be comparable")
    return f"{line}: equivalent"


# Check graphs: small and adversarial, edges in shuffled order so that edge ids matter.


def _shuffled(name: str, edge_index: Tensor, num_src: int, num_dst: int, seed: int = 0) -> BenchGraph:
    order = torch.randperm(edge_index.size(1), generator=_generator(seed, "cpu")).to(edge_index.device)
    return BenchGraph(name, edge_index[:, order].contiguous(), num_src, num_dst)


def _random_edges(num_src: int, num_dst: int, num_edges: int, seed: int) -> Tensor:
    generator = _generator(seed, "cpu")
    source = torch.randint(num_src, (num_edges,), generator=generator)
    target = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([source, target])


def _empty(small: bool) -> BenchGraph:
    return BenchGraph("empty", torch.empty(2, 0, dtype=torch.long), 0, 0)


def _no_edges(small: bool) -> BenchGraph:
    return BenchGraph("no_edges", torch.empty(2, 0, dtype=torch.long), 5, 5)


def _one_node(small: bool) -> BenchGraph:
    return BenchGraph("one_node", torch.zeros(2, 1, dtype=torch.long), 1, 1)


def _isolated(small: bool) -> BenchGraph:
    half = 20 if small else 300
    return _shuffled("isolated", 2 * _random_edges(half, half, 5 * half, seed=1), 2 * half, 2 * half)


def _duplicates(small: bool) -> BenchGraph:
    nodes = 15 if small else 200
    return _shuffled("duplicates", _random_edges(nodes, nodes, 4 * nodes, seed=2).repeat(1, 3), nodes, nodes)


def _self_loops(small: bool) -> BenchGraph:
    nodes = 15 if small else 200
    loops = torch.arange(nodes).expand(2, -1)
    return _shuffled("self_loops", torch.cat([_random_edges(nodes, nodes, 4 * nodes, seed=3), loops], 1), nodes, nodes)


def _bipartite_wide(small: bool) -> BenchGraph:
    num_src, num_dst = (30, 7) if small else (700, 90)
    return _shuffled("bipartite_wide", _random_edges(num_src, num_dst, 4 * num_src, seed=4), num_src, num_dst)


def _bipartite_tall(small: bool) -> BenchGraph:
    num_src, num_dst = (7, 30) if small else (90, 700)
    return _shuffled("bipartite_tall", _random_edges(num_src, num_dst, 4 * num_dst, seed=5), num_src, num_dst)


def _hub(small: bool) -> BenchGraph:
    """Node 0 is joined both ways to every other node; the others also have a few random neighbours."""
    leaves = 300 if small else 100_000
    leaf = torch.arange(1, leaves + 1)
    hub = torch.zeros_like(leaf)
    both_ways = torch.cat([torch.stack([leaf, hub]), torch.stack([hub, leaf])], 1)
    others = 1 + _random_edges(leaves, leaves, 3 * leaves, seed=6)
    return _shuffled("hub", torch.cat([both_ways, others], 1), leaves + 1, leaves + 1)


def _block_model(small: bool) -> BenchGraph:
    """A batch of stochastic block models: five communities, pairs kept with 0.5 inside and 0.2 across."""
    generator = _generator(7, "cpu")
    edges, first = [], 0
    for size in torch.randint(*((10, 20) if small else (80, 159)), (2 if small else 16,), generator=generator).tolist():
        community = torch.randint(5, (size,), generator=generator)
        probability = torch.where(community[:, None] == community, 0.5, 0.2)
        pairs = (torch.rand(size, size, generator=generator) < probability).triu(1).nonzero().t() + first
        edges += [pairs, pairs.flip(0)]
        first += size
    return _shuffled("block_model", torch.cat(edges, 1), first, first)


def find_raw_file(name: str) -> Path:
    """The data file ``name`` below $PYG_DFGNN_DATA, ``data/`` or ``../shared/data``, the first that has it."""
    given = os.environ.get("PYG_DFGNN_DATA")
    roots = [Path(given)] if given else [Path("data"), Path("../shared/data")]
    for root in roots:
        if (root / name).is_file():
            return root / name
    raise FileNotFoundError(
        f"no {name} below {', '.join(map(str, roots))}; set PYG_DFGNN_DATA to the folder that has it"
    )


def _cora(small: bool) -> BenchGraph:
    path = find_raw_file("planetoid/Cora/raw/ind.cora.graph")
    edges = read_planetoid_edges(path)
    return _shuffled("cora", edges, 2708, 2708)


def _cornell5(small: bool) -> BenchGraph:
    from scipy.io import loadmat  # an optional dependency of this graph alone

    adjacency = loadmat(str(find_raw_file("linkx/cornell5/raw/data.mat")))["A"].tocoo()
    edges = torch.stack([torch.from_numpy(adjacency.row).long(), torch.from_numpy(adjacency.col).long()])
    return _shuffled("cornell5", edges, adjacency.shape[0], adjacency.shape[0])


def read_planetoid_edges(path: Path) -> Tensor:
    """The directed edges [2, E] of a Planetoid ``ind.*.graph`` file, without loops and duplicates."""
    with path.open("rb") as file:
        neighbours: dict[int, list[int]] = pickle.load(file, encoding="latin1")
    source = torch.tensor([node for node, others in neighbours.items() for _ in others])
    target = torch.tensor([other for others in neighbours.values() for other in others])
    return _symmetric(source, target, max(neighbours) + 1)


CHECK_GRAPHS: dict[str, Callable[[bool], BenchGraph]] = {
    "empty": _empty,
    "no_edges": _no_edges,
    "one_node": _one_node,
    "isolated": _isolated,
    "duplicates": _duplicates,
    "self_loops": _self_loops,
    "bipartite_wide": _bipartite_wide,
    "bipartite_tall": _bipartite_tall,
    "block_model": _block_model,
    "cora": _cora,
    "hub": _hub,
    "cornell5": _cornell5,
}


def check_graph(name: str, device: torch.device | str, *, small: bool = False) -> BenchGraph:
    """Builds one graph of the correctness grid on ``device``.

    Raises:
        FileNotFoundError: If the graph is a real one and its raw file is not there; the message says where to put it.
    """
    graph = CHECK_GRAPHS[name](small)
    return BenchGraph(graph.name, graph.edge_index.to(device), graph.num_src, graph.num_dst)
