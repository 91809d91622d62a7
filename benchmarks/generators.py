"""Seeded generators of graphs that only timings run on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_geometric.data import Batch

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.datasets.generators import (
    Device,
    GeneratedEdges,
    generator_of,
    nearest,
    offsets,
    sorted_edges,
    symmetric,
    weighted_pairs,
)


def random_graph_batch(
    num_graphs: int, min_nodes: int, max_nodes: int, probability: float, seed: int, device: Device
) -> GeneratedEdges:
    """Return a batch of graphs that have each unordered pair of nodes with one probability, without self-loops.

    Sizes are uniform integers in ``min_nodes..max_nodes``; edges have both directions.
    """
    generator = generator_of(seed, device)
    size = torch.randint(min_nodes, max_nodes + 1, (num_graphs,), generator=generator, device=device)
    ptr = offsets(size)
    drawn = torch.rand(num_graphs, max_nodes, max_nodes, generator=generator, device=device) < probability
    inside = torch.arange(max_nodes, device=device) < size[:, None]
    drawn &= inside[:, :, None] & inside[:, None, :]
    graph, u, v = drawn.triu_(1).nonzero(as_tuple=True)
    num_nodes = int(ptr[-1])
    return GeneratedEdges(symmetric(ptr[graph] + u, ptr[graph] + v, num_nodes), num_nodes, ptr)


def chung_lu(num_nodes: int, mean_degree: float, max_degree: float, seed: int, device: Device) -> GeneratedEdges:
    r"""Return a power-law graph drawn from node weights.

    Weights are :math:`(i + i_0)^{-1/2}` with :math:`i_0 = N / (4 (\max / \mathrm{mean})^2)`, shuffled; ``N * mean / 2``
    pairs are drawn with both ends by weight, then made symmetric without loops and duplicates.

    Source: Chung and Lu, "Connected components in random graphs with given expected degree sequences", 2002.
    """
    generator = generator_of(seed, device)
    offset = num_nodes / (4 * (max_degree / mean_degree) ** 2)
    weight = (torch.arange(num_nodes, device=device, dtype=torch.float64) + offset) ** -0.5
    weight = weight[torch.randperm(num_nodes, generator=generator, device=device)]
    u, v = weighted_pairs(weight, int(num_nodes * mean_degree / 2), generator)
    return GeneratedEdges(symmetric(u, v, num_nodes), num_nodes)


def communities(num_nodes: int, size: int, inside: int, outside: int, seed: int, device: Device) -> GeneratedEdges:
    """Return a graph of communities of ``size`` nodes with random ids.

    Each node draws ``inside`` neighbours in its community and ``outside`` anywhere; edges are made symmetric, without
    loops and duplicates. ``num_nodes`` needs to be a multiple of ``size``.
    """
    generator = generator_of(seed, device)
    label = torch.randperm(num_nodes, generator=generator, device=device)
    node = torch.arange(num_nodes, device=device)
    near = torch.randint(size, (inside, num_nodes), generator=generator, device=device) + node // size * size
    far = torch.randint(num_nodes, (outside, num_nodes), generator=generator, device=device)
    drawn = torch.cat([near, far])
    return GeneratedEdges(symmetric(label[node.repeat(len(drawn))], label[drawn.flatten()], num_nodes), num_nodes)


def chung_lu_with_hub(
    num_nodes: int, mean_degree: float, max_degree: float, hub_degree: int, seed: int, device: Device
) -> GeneratedEdges:
    """Return :func:`chung_lu` with its middle node joined to ``hub_degree`` random nodes besides."""
    source, target = chung_lu(num_nodes, mean_degree, max_degree, seed, device).edge_index
    joined = torch.randperm(num_nodes, generator=generator_of(seed, device), device=device)[:hub_degree]
    hub = torch.full_like(joined, num_nodes // 2)
    return GeneratedEdges(symmetric(torch.cat([source, hub]), torch.cat([target, joined]), num_nodes), num_nodes)


def nearest_neighbour_batch(
    num_graphs: int, num_points: int, num_neighbours: int, seed: int, device: Device
) -> GeneratedEdges:
    """Return a batch of uniform points in the unit square, where each point is a target of its nearest neighbours."""
    generator = generator_of(seed, device)
    point = torch.rand(num_graphs, num_points, 2, generator=generator, device=device)
    near = nearest(point, None, num_neighbours).sort(dim=-1).values
    first = num_points * torch.arange(num_graphs + 1, device=device)
    source = (first[:-1, None, None] + near).reshape(-1)
    target = torch.arange(num_graphs * num_points, device=device).repeat_interleave(num_neighbours)
    return GeneratedEdges(torch.stack([source, target]), num_graphs * num_points, first)


def task_batch(make: Callable[..., Task], num_graphs: int, device: Device, **arguments: int) -> GeneratedEdges:
    """Return the first training graphs of a generated data set, collated by PyG."""
    task = make(num_train=num_graphs, num_val=1, num_test=1, **arguments)
    batch = Batch.from_data_list(task.splits["train"])
    source, target = batch.edge_index.to(device)
    num_nodes = int(batch.num_nodes)
    return GeneratedEdges(sorted_edges(source, target, num_nodes), num_nodes, batch.ptr.to(device))
