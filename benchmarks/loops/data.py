"""Batches of the loops, on the host: molecules, and generated graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_dfgnn import datasets
from pyg_dfgnn.datasets.generators import generator_of, nearest

POOL = 10
"""Different batches of a loop; each step takes a fresh copy of one."""
RADIUS = 5.0
EDGE = 8
"""Features of an edge of the graphs that are not named otherwise."""
MAG = (
    *(("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")),
    *(("author", "affiliated", "institution"), ("institution", "rev_affiliated", "author")),
    *(("paper", "topic", "field"), ("field", "rev_topic", "paper")),
)
MAG_NODES = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
KEYS = (
    "review by customer, review of product, order by customer, order of product, product in category, "
    "customer likes category"
)
TABLES = tuple(
    relation
    for child, key, parent in (key.split() for key in KEYS.split(", "))
    for relation in ((child, key, parent), (parent, f"rev_{key}_{child}", child))
)
TABLES_NODES = {"customer": 200_000, "product": 50_000, "review": 2_000_000, "order": 1_000_000, "category": 1_000}
PRODUCTS, PRODUCTS_NODES = (("n", "to", "n"),), {"n": 2_449_029}


@dataclass(frozen=True)
class HostBatches:
    """Batches on the host, one per step and then again from the first; `groups` are the small graphs of each."""

    batches: list[Any]
    groups: list[list[Data]] = field(default_factory=list)
    origin: str = "generated"


def _batched(groups: list[list[Data]], task: datasets.Task | None = None) -> HostBatches:
    for graph in (graph for group in groups for graph in group):
        graph.weight = torch.ones(1)
    origin = "generated" if task is None or task.synthetic else task.name
    return HostBatches([Batch.from_data_list(group) for group in groups], groups, origin)


def _grouped(graphs: Sequence[Data], batch_size: int) -> list[list[Data]]:
    """Graphs in random order, again and again, in groups."""
    count = POOL * batch_size
    rounds = range(-(-count // len(graphs)))
    order = torch.cat([torch.randperm(len(graphs), generator=generator_of(i, "cpu")) for i in rounds])
    return [[graphs[i].clone() for i in part] for part in order[:count].view(POOL, batch_size).tolist()]


@cache
def molecules(batch_size: int) -> HostBatches:
    """Drug-like molecules with bonds, by their elements and the orders of the bonds."""
    task = datasets.solubility()
    graphs = [
        # The last column is the charge.
        Data(x=graph.x[:, :-1].argmax(1), edge_index=graph.edge_index, edge_attr=graph.edge_attr.argmax(1), y=graph.y)
        for graph in task.splits["train"]
    ]
    return _batched(_grouped(graphs, batch_size), task)


@cache
def qm9(batch_size: int, form: str = "functions") -> HostBatches:
    """Molecules of QM9 with edges between atoms within 5 Angstrom.

    The form is "functions" of the lengths of edges, "lengths", as training has them, or "positions" of atoms.
    """
    task = datasets.qm9(radius=RADIUS, num_graphs=min(POOL * batch_size, 20_000))
    centres, graphs = torch.linspace(0, RADIUS, 16), []
    for graph in task.splits["train"]:
        if form == "functions":
            more = {"edge_attr": torch.exp(-2 * (graph.edge_attr - centres) ** 2)}
        else:
            more = {"pos": graph.pos} if form == "positions" else {"edge_attr": graph.edge_attr}
        x = graph.x if form == "lengths" else graph.x.argmax(1)
        graphs.append(Data(x=x, edge_index=graph.edge_index, y=graph.y, **more))
    return _batched(_grouped(graphs, batch_size), task)


@cache
def superpixels(batch_size: int, nodes: int = 75) -> HostBatches:
    """Graphs of superpixels: each of `nodes` random points is joined to its 8 nearest."""
    generator, groups = generator_of(3, "cpu"), []
    for _ in range(POOL):
        points = torch.rand(batch_size, nodes, 2, generator=generator)
        near = torch.cdist(points, points).topk(9, largest=False)
        lengths, source = near.values[:, :, 1:].reshape(batch_size, -1, 1), near.indices[:, :, 1:].flatten(1)
        target = torch.arange(nodes).repeat_interleave(8)
        x = torch.cat([points, torch.rand(batch_size, nodes, 1, generator=generator)], dim=2)
        y = torch.randn(batch_size, 1, generator=generator)
        edges = (torch.stack([each, target]) for each in source)
        parts = zip(x, edges, lengths, y)
        groups.append([Data(x=x, edge_index=edges, edge_attr=length, y=y) for x, edges, length, y in parts])
    return _batched(groups)


Relation = tuple[str, str, str]
Edges = dict[Relation, Tensor]


def sample(
    relations: Sequence[Relation],
    counts: Mapping[str, int],
    seeds: int,
    fans: Sequence[int],
    seed: int,
    blocks: bool,
    log_degree: float,
) -> tuple[dict[str, int], list[dict[str, int]], list[Edges]]:
    """Sample neighbours layer by layer from a graph whose in-degrees are log-normal and whose out-degrees are skewed.

    Seeds are of the type that the first relation points to; `log_degree` is the mean of the logarithm of the in-degree
    per relation. A layer samples for all nodes so far, as bipartite blocks need, or else for the new ones.

    Returns:
        Nodes of each type, nodes before each layer, and edges of each layer; nodes of a layer come before later ones.
    """
    generator, start = generator_of(seed, "cpu"), relations[0][2]
    place = {kind: torch.full((count,), -1) for kind, count in counts.items()}
    sizes = dict.fromkeys(counts, 0)

    def add(kind: str, ids: Tensor) -> Tensor:
        new = ids.unique()
        new = new[place[kind][new] < 0]
        place[kind][new] = torch.arange(sizes[kind], sizes[kind] + len(new))
        sizes[kind] += len(new)
        return place[kind][new]

    frontier = {start: add(start, torch.randperm(counts[start], generator=generator)[:seeds])}
    before, layers = [], []
    for fan in fans:
        before.append(dict(sizes))
        targets = {kind: torch.arange(size) for kind, size in sizes.items()} if blocks else frontier
        layer: Edges = {}
        reached: dict[str, list[Tensor]] = {}
        for relation in relations:
            source, _, kind = relation
            to = targets.get(kind, torch.empty(0, dtype=torch.long))
            degree = torch.randn(len(to), generator=generator).add(log_degree).exp().ceil().clamp(max=fan).long()
            to = to.repeat_interleave(degree)
            ids = (torch.rand(len(to), generator=generator) ** 2 * counts[source]).long()
            reached.setdefault(source, []).append(add(source, ids))
            layer[relation] = torch.stack([place[source][ids], to])
        frontier = {kind: torch.cat(new) for kind, new in reached.items()}
        layers.append(layer)
    return sizes, before, layers


@cache
def sampled(seeds: int, fans: tuple[int, ...], small: bool) -> HostBatches:
    """Bipartite blocks of a graph like ogbn-products, features of 100 and 47 classes."""
    batches = []
    for seed in range(POOL):
        counts = {"n": 2_000} if small else PRODUCTS_NODES
        sizes, before, layers = sample(PRODUCTS, counts, seeds, fans, seed, blocks=True, log_degree=3.0)
        blocks = {f"edge_index_{i}": layer[PRODUCTS[0]] for i, layer in enumerate(layers)}
        rows = {f"rows_{i}": size["n"] for i, size in enumerate(before)}
        generator = generator_of(seed, "cpu")
        x, y = torch.randn(sizes["n"], 100, generator=generator), torch.randint(47, (seeds,), generator=generator)
        batches.append(Data(x=x, y=y, **blocks, **rows))
    return HostBatches(batches)


def _sampled_types(
    relations: Sequence[Relation],
    nodes: Mapping[str, int],
    classes: int,
    seeds: int,
    fans: tuple[int, ...],
    small: bool,
) -> HostBatches:
    """Subgraphs around nodes of the type that the first relation points to, with features of 128 and classes."""
    batches = []
    for seed in range(POOL):
        counts = {kind: 500 for kind in nodes} if small else nodes
        sizes, _, layers = sample(relations, counts, seeds, fans, seed, blocks=False, log_degree=1.2)
        generator, data = generator_of(seed, "cpu"), HeteroData()
        for kind, size in sizes.items():
            data[kind].x = torch.randn(size, 128, generator=generator)
        for relation in relations:
            data[relation].edge_index = torch.cat([layer[relation] for layer in layers], dim=1)
        data.y, data.num_seeds = torch.randint(classes, (seeds,), generator=generator), seeds
        batches.append(data)
    return HostBatches(batches)


sampled_mag = cache(partial(_sampled_types, MAG, MAG_NODES, 349))
"""Subgraphs of a graph like ogbn-mag, features of 128 and 349 classes."""
sampled_tables = cache(partial(_sampled_types, TABLES, TABLES_NODES, 2))
"""Subgraphs of rows of five tables that refer to each other, as in relational databases, and two classes."""


@cache
def sampled_mag_typed(seeds: int, fans: tuple[int, ...], small: bool) -> HostBatches:
    """The subgraphs of :func:`sampled_mag` with all nodes in one tensor, papers first, and a type per edge."""
    subgraphs = sampled_mag(seeds, fans, small).batches
    return HostBatches([subgraph.to_homogeneous(add_node_type=False) for subgraph in subgraphs])


@cache
def graphs(nodes: int, edges: int, width: int, pool: int, relations: int = 1, power: float = 1.0) -> HostBatches:
    """Random graphs with features, edge features, types, classes and numbers to learn; the power skews degrees."""
    batches = []
    for seed in range(pool):
        generator = generator_of(seed, "cpu")
        graph = Data(x=torch.randn(nodes, width, generator=generator))
        graph.edge_index = (torch.rand(2, edges, generator=generator, dtype=torch.float64) ** power * nodes).long()
        graph.edge_attr = torch.randn(edges, EDGE, generator=generator)
        graph.edge_type = torch.randint(relations, (edges,), generator=generator)
        graph.y = torch.randint(7, (nodes,), generator=generator)
        graph.target = torch.randn(nodes, width, generator=generator)
        batches.append(graph)
    return HostBatches(batches)


@cache
def meshes(count: int, nodes: int, width: int, edge_width: int) -> HostBatches:
    """Meshes in one graph, each of points in a square that are joined to their 8 nearest, with features of both."""
    generator = generator_of(5, "cpu")
    points = torch.rand(count, nodes, 2, generator=generator)
    near = nearest(points, None, 8)
    first = torch.arange(count).view(-1, 1, 1) * nodes
    edge_index = torch.stack([(near + first).flatten(), torch.arange(count * nodes).repeat_interleave(8)])
    x = torch.randn(count * nodes, width, generator=generator)
    edge_attr = torch.randn(edge_index.size(1), edge_width, generator=generator)
    target = torch.randn(count * nodes, width, generator=generator)
    pos = points.view(-1, 2)
    return HostBatches([Data(x=x, edge_index=edge_index, pos=pos, edge_attr=edge_attr, target=target)])


@cache
def series(nodes: int, edges: int, batch: int, steps: int) -> HostBatches:
    """Windows of a network of sensors `[batch, steps, nodes, 2]`; the edges are those of the first batch in all."""
    generator = generator_of(4, "cpu")
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    weight = torch.rand(edges, generator=generator)
    batches = []
    for _ in range(POOL):
        x = torch.randn(batch, steps, nodes, 2, generator=generator)
        target = torch.randn(batch, nodes, 1, generator=generator)
        batches.append(Data(x=x, edge_index=edge_index, edge_weight=weight, target=target, num_nodes=nodes))
    return HostBatches(batches)


@cache
def clouds(count: int, points: int) -> HostBatches:
    """Clouds of points `[count * points, 3]` and their classes."""
    batches = []
    for seed in range(POOL):
        generator = generator_of(seed, "cpu")
        x = torch.randn(count * points, 3, generator=generator)
        batches.append(Data(x=x, y=torch.randint(40, (count,), generator=generator), num_clouds=count))
    return HostBatches(batches)
