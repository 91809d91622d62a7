"""The graphs of the correctness grid: small and adversarial, edges in shuffled order so that edge ids matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyg_dfgnn.bench.graphs import BenchGraph, benchmark_graph
from pyg_dfgnn.datasets.generators import generator_of


def _shuffled(
    name: str, edge_index: Tensor, num_src: int, num_dst: int, seed: int = 0, ptr: Tensor | None = None
) -> BenchGraph:
    order = torch.randperm(edge_index.size(1), generator=generator_of(seed, "cpu")).to(edge_index.device)
    return BenchGraph(name, edge_index[:, order].contiguous(), num_src, num_dst, ptr)


def _random_edges(num_src: int, num_dst: int, num_edges: int, seed: int) -> Tensor:
    generator = generator_of(seed, "cpu")
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


def _skewed(small: bool) -> BenchGraph:
    """Degrees fall off as a power of the node's number: most rows are short and packed, a few are long."""
    num_src, num_dst, num_edges = (40, 50, 300) if small else (9_000, 12_000, 30_000)
    generator = generator_of(8, "cpu")
    ends = [(size * torch.rand(num_edges, generator=generator) ** 1.6).long() for size in (num_src, num_dst)]
    return _shuffled("skewed", torch.stack(ends), num_src, num_dst)


def _block_model(small: bool) -> BenchGraph:
    """A batch of stochastic block models: five communities, pairs kept with 0.5 inside and 0.2 across."""
    generator = generator_of(7, "cpu")
    edges, ptr = [], [0]
    for size in torch.randint(*((10, 20) if small else (80, 159)), (2 if small else 16,), generator=generator).tolist():
        community = torch.randint(5, (size,), generator=generator)
        probability = torch.where(community[:, None] == community, 0.5, 0.2)
        pairs = (torch.rand(size, size, generator=generator) < probability).triu(1).nonzero().t() + ptr[-1]
        edges += [pairs, pairs.flip(0)]
        ptr.append(ptr[-1] + size)
    return _shuffled("block_model", torch.cat(edges, 1), ptr[-1], ptr[-1], ptr=torch.tensor(ptr))


def _real(name: str, small: bool) -> BenchGraph:
    graph = benchmark_graph(name, "cpu", small=small)
    return _shuffled(name, graph.edge_index, graph.num_src, graph.num_dst)


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
    "cora": partial(_real, "cora"),
    "hub": _hub,
    "skewed": _skewed,
    "cornell5": partial(_real, "cornell5"),
}


def check_graph(name: str, device: torch.device | str, *, small: bool = False) -> BenchGraph:
    """Builds one graph of the correctness grid on ``device``; a batch keeps its node offsets.

    Raises:
        FileNotFoundError: If the graph is a real one and its raw file is not there; the message says where to put it.
    """
    graph = CHECK_GRAPHS[name](small)
    ptr = None if graph.ptr is None else graph.ptr.to(device)
    return BenchGraph(graph.name, graph.edge_index.to(device), graph.num_src, graph.num_dst, ptr)
