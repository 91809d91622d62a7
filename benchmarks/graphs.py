"""The graphs that timings run on, by name: seeded generators and real data files, each with its recorded size.

``a`` to ``e``, ``p`` and ``h`` are the graphs of the targets: like a batch of PATTERN, Cora, Reddit, ogbn-proteins, a
batch of MNIST superpixels, ogbn-products, and a graph with one hub; ``h_flat`` is ``h`` without it. A name that ends in
``_like`` is generated to the published size of that data set; ``name@64`` is a batch of 64 graphs instead of 1,024; the
others are real. ``name+rcm`` is a graph whose nodes are reordered by a method of :mod:`pyg_dfgnn.graph.reorder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch_geometric.data import Batch

from pyg_dfgnn.datasets import Task, cluster, entities, facebook, fb15k237, pattern, planetoid, pubmed_made_features
from pyg_dfgnn.datasets import generators as made
from pyg_dfgnn.datasets.generators import Device, GeneratedEdges, TypedEdges, generator_of, sorted_edges, symmetric
from pyg_dfgnn.datasets.relational_like import relational_graph
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.relations import ratio
from pyg_dfgnn.graph.reorder import METHODS, inverse_of, node_order
from pyg_dfgnn.reference.zoo import EdgeList


def compressed(bench: EdgeList) -> Graph:
    """The package's Graph of a benchmark graph, from its cache."""
    relations: dict[str, Any] = {"num_relations": 0 if bench.edge_type is None else bench.num_relations}
    return Graph.of(bench.edge_index, bench.num_src, bench.num_dst, edge_type=bench.edge_type, **relations)


def random_graph_batch(
    num_graphs: int, min_nodes: int, max_nodes: int, probability: float, seed: int, device: Device
) -> GeneratedEdges:
    """Return a batch of graphs that have each unordered pair of nodes with one probability, without self-loops.

    Sizes are uniform integers in ``min_nodes..max_nodes``; edges have both directions.
    """
    generator = generator_of(seed, device)
    size = torch.randint(min_nodes, max_nodes + 1, (num_graphs,), generator=generator, device=device)
    ptr = made.offsets(size)
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
    u, v = made.weighted_pairs(weight, int(num_nodes * mean_degree / 2), generator)
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
    near = made.nearest(point, None, num_neighbours).sort(dim=-1).values
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


BATCH = 1024
"""Graphs of a batch, unless the name says otherwise."""


@dataclass(frozen=True)
class Recipe:
    """How one graph is made and what it must look like: the published or recorded sizes, edges being directed.

    Attributes:
        max_degree: Largest in-degree; None: not published.
        small: Arguments of a miniature for machines without a GPU, which ``small_build`` makes if not ``build``.
        tolerance: Relative deviation allowed of nodes, edges and largest degree.
        order: Method that reorders the nodes; '' keeps them as they are made.
    """

    build: Callable[..., GeneratedEdges | TypedEdges]
    arguments: dict[str, Any]
    num_nodes: int
    num_edges: int
    max_degree: int | None
    small: dict[str, Any] = field(default_factory=dict)
    small_build: Callable[..., GeneratedEdges | TypedEdges] | None = None
    tolerance: tuple[float, float, float] = (0.0, 5e-3, 0.2)
    order: str = ""

    def miniature(self) -> Recipe:
        arguments = {} if self.small_build else self.arguments
        return replace(self, build=self.small_build or self.build, arguments={**arguments, **self.small})


_TARGET_GRAPHS: dict[str, Recipe] = {
    "a": Recipe(
        random_graph_batch, dict(num_graphs=1024, min_nodes=80, max_nodes=158, probability=0.43, seed=0),
        122_039, 6_441_672, 89, dict(num_graphs=2, min_nodes=8, max_nodes=16),
    ),
    "b": Recipe(
        chung_lu, dict(num_nodes=2708, mean_degree=4.05, max_degree=215, seed=1),
        2_708, 10_880, 205, dict(num_nodes=60, max_degree=20),
    ),
    "c": Recipe(
        chung_lu, dict(num_nodes=232_965, mean_degree=500, max_degree=24_000, seed=2),
        232_965, 115_842_382, 21_937, dict(num_nodes=200, mean_degree=10, max_degree=80),
    ),
    "d": Recipe(
        chung_lu, dict(num_nodes=132_534, mean_degree=607, max_degree=8200, seed=3),
        132_534, 79_880_426, 8_094, dict(num_nodes=150, mean_degree=12, max_degree=60),
    ),
    "e": Recipe(
        nearest_neighbour_batch, dict(num_graphs=1024, num_points=71, num_neighbours=8, seed=0),
        72_704, 581_632, 8, dict(num_graphs=3, num_points=12),
    ),
    "p": Recipe(
        made.log_normal_chung_lu,
        dict(num_nodes=2_449_029, mean_degree=50.75, max_degree=17_600, sigma=1.21, num_hubs=3, seed=7),
        2_449_029, 124_262_288, 17_390, dict(num_nodes=300, mean_degree=8, max_degree=60),
    ),
    "h": Recipe(
        chung_lu_with_hub,
        dict(num_nodes=2_890_331, mean_degree=8.27, max_degree=100_000, hub_degree=1_000_000, seed=9),
        2_890_331, 25_893_690, 1_000_000, dict(num_nodes=300, max_degree=30, hub_degree=200),
    ),
    "h_flat": Recipe(
        chung_lu, dict(num_nodes=2_890_331, mean_degree=8.27, max_degree=100_000, seed=9),
        2_890_331, 23_893_690, None, dict(num_nodes=300, max_degree=30),
    ),
}  # fmt: skip


def _batch(build: Callable[..., GeneratedEdges], nodes: float, edges: float, **arguments: Any) -> Recipe:
    """A batch of graphs with the published mean number of nodes and directed edges."""
    return Recipe(
        build, dict(num_graphs=BATCH, **arguments), round(BATCH * nodes), round(BATCH * edges), None,
        dict(num_graphs=2), tolerance=(0.03, 0.07, 0.0),
    )  # fmt: skip


def _published(recipe: Recipe, nodes: int, edges: int, max_degree: int) -> Recipe:
    """The same graph, measured against the size of the data set that it stands for."""
    return replace(recipe, num_nodes=nodes, num_edges=edges, max_degree=max_degree, tolerance=(0.0, 0.02, 0.05))


def network(load: Callable[..., Task], device: Device, **arguments: Any) -> GeneratedEdges:
    """The edges of a real data set, made symmetric, from raw files below $PYG_DFGNN_DATA, data or ../shared/data."""
    data = _task(load, **arguments).splits["train"][0]
    source, target = data.edge_index.to(device)
    return GeneratedEdges(symmetric(source, target, data.num_nodes), data.num_nodes)


def relational_network(load: Callable[..., Task], device: Device, **arguments: Any) -> TypedEdges:
    """The edges of a real data set with relations; of a task of links the triples of all splits and their inverses."""
    task = _task(load, **arguments)
    graph, type_ptr = task.splits["test"][0].to(device), torch.tensor([0, task.num_features], device=device)
    if task.level != "link":
        return TypedEdges(graph.edge_index, graph.edge_type, type_ptr, task.num_relations)
    key, other = graph.known
    edge_index = torch.stack([key // task.num_relations, other])
    return TypedEdges(edge_index, key % task.num_relations, type_ptr, task.num_relations)


def _task(load: Callable[..., Task], **arguments: Any) -> Task:
    root = os.environ.get("PYG_DFGNN_DATA")
    return load(**arguments, search=[root] if root else ["data", "../shared/data"])


def _real(load: Callable[..., Task], name: str, num_nodes: int, num_edges: int, max_degree: int) -> Recipe:
    arguments = dict(load=load, name=name, download=False)
    small = dict(num_nodes=60, mean_degree=6, max_degree=20, seed=0)
    size = (num_nodes, num_edges, max_degree)
    return Recipe(network, arguments, *size, small, chung_lu, tolerance=(0.0, 0.0, 0.0))


_BATCHES: dict[str, Recipe] = {
    "mnist_like": _batch(made.superpixel_batch, 70.6, 564.0, min_nodes=40, max_nodes=75, mean_nodes=70.6, seed=0),
    "cifar10_like": _batch(made.superpixel_batch, 117.6, 941.0, min_nodes=85, max_nodes=150, mean_nodes=117.6, seed=1),
    "cluster_like": _batch(task_batch, 117.0, 4303.0, make=cluster, seed=0),
    "pattern_like": _batch(task_batch, 119.0, 6079.0, make=pattern, seed=0),
    "voc_like": _batch(made.region_adjacency_batch, 479.40, 2710.48, mean_nodes=479.40, seed=0),
    "coco_like": _batch(made.region_adjacency_batch, 476.88, 2693.67, mean_nodes=476.88, seed=1),
}

_FULL_GRAPHS: dict[str, Recipe] = {
    "reddit_like": _published(_TARGET_GRAPHS["c"], 232_965, 114_615_892, 21_657),
    "proteins_like": _published(_TARGET_GRAPHS["d"], 132_534, 79_122_504, 7_750),
    "ppa_like": Recipe(
        made.log_normal_chung_lu,
        dict(num_nodes=576_289, mean_degree=73.8, max_degree=3_300, sigma=0.80, num_hubs=8, seed=4),
        576_289, 42_463_862, 3_241, dict(num_nodes=150, mean_degree=8, max_degree=40),
        tolerance=(0.0, 0.02, 0.05),
    ),
    # No data set: what an order of the nodes can gain on a graph that is made of communities.
    "communities": Recipe(
        communities, dict(num_nodes=1_000_000, size=200, inside=20, outside=5, seed=5),
        1_000_000, 46_160_000, None, dict(num_nodes=200, size=20, inside=4, outside=1),
    ),
}  # fmt: skip

_REAL: dict[str, Recipe] = {
    "cora": _real(planetoid, "Cora", 2_708, 10_556, 168),
    "citeseer": _real(planetoid, "CiteSeer", 3_327, 9_104, 99),
    # Only its features are made up where its raw files are incomplete.
    "pubmed": replace(_real(planetoid, "PubMed", 19_717, 88_648, 171), arguments=dict(load=pubmed_made_features)),
    "cornell5": _real(facebook, "cornell5", 18_660, 1_581_554, 3_156),
}


def _typed(name: str, num_nodes: int, num_edges: int, max_degree: int | None, scale: float, **load: Any) -> Recipe:
    """A graph with relations: real if it is loaded, else generated; its miniature is a share of a generated one."""
    generated = dict(name=name, scale=1.0, seed=0)
    small = {**generated, "name": "BGS" if load else name, "scale": scale}
    build, arguments = (relational_network, dict(load, download=False)) if load else (relational_graph, generated)
    size = (num_nodes, num_edges, max_degree)
    return Recipe(build, arguments, *size, small, relational_graph, tolerance=(0.0, 0.0, 0.0))


_RELATIONAL: dict[str, Recipe] = {
    "aifb": _typed("AIFB", 8_285, 58_086, 1_247, 1e-3, load=partial(entities, "AIFB")),
    "mutag": _typed("MUTAG", 23_644, 148_454, 6_783, 1e-3, load=partial(entities, "MUTAG")),
    "fb15k237": _typed("FB15k-237", 14_541, 620_232, None, 2e-3, load=fb15k237),
    "bgs_like": _typed("BGS", 94_806, 672_884, None, 1e-3),
    "mag_like": _typed("ogbn-mag", 1_939_743, 21_111_007, None, 5e-5),
    "wikikg2_like": _typed("ogbl-wikikg2", 2_500_604, 16_109_182, None, 4e-5),
}

RECIPES: dict[str, Recipe] = {**_TARGET_GRAPHS, **_BATCHES, **_FULL_GRAPHS, **_REAL, **_RELATIONAL}

TABLE_1 = (*_BATCHES, "cora", "citeseer", "pubmed", "ppa_like", "reddit_like", "proteins_like")
"""The twelve data sets of DF-GNN's Table 1: six batches, six full graphs."""


def recipe_of(name: str) -> Recipe:
    """The recipe of a name; ``name@count`` is a batch of so many graphs, ``name+method`` a graph in that order."""
    whole, _, order = name.partition("+")
    stem, _, count = whole.partition("@")
    check_choice("graphs", stem, tuple(RECIPES))
    recipe = RECIPES[stem]
    if order:
        check_choice("graphs", order, tuple(METHODS))
        if stem in _RELATIONAL:
            raise ValueError(f"'graphs' needs a graph without relations before '+' (got {name!r})")
        if "num_graphs" in recipe.arguments:
            raise ValueError(f"'graphs' needs one whole graph before '+' (got {name!r})")
        return replace(recipe, order=order)
    if not count:
        return recipe
    if "num_graphs" not in recipe.arguments or not count.isdigit() or not int(count):
        raise ValueError(f"'graphs' needs a batch before '@' and a positive count after it (got {name!r})")
    share = int(count) / recipe.arguments["num_graphs"]
    return replace(
        recipe,
        arguments={**recipe.arguments, "num_graphs": int(count)},
        num_nodes=round(share * recipe.num_nodes),
        num_edges=round(share * recipe.num_edges),
        # The mean of fewer graphs strays further.
        tolerance=tuple(t * max(1.0, share**-0.5) for t in recipe.tolerance),  # type: ignore[arg-type]
    )


@lru_cache(maxsize=4)
def benchmark_graph(name: str, device: torch.device | str, *, small: bool = False) -> EdgeList:
    """Builds a graph by its recipe and refuses one whose size is not the recipe's; the last few are kept.

    The recorded sizes of ``a`` to ``e`` belong to the CUDA generator. The size of a small one, a miniature by the same
    code for machines without a GPU, is not compared.

    Raises:
        FileNotFoundError: The graph is a real one and its file is not there.
        ModuleNotFoundError: The package of the method that reorders it is not there.
        RuntimeError: A size is too far from the recorded one.
    """
    recipe = recipe_of(name)
    if recipe.order:
        graph = benchmark_graph(name.partition("+")[0], device, small=small)
        place = inverse_of(node_order(graph.edge_index, graph.num_src, recipe.order))
        source, target = place[graph.edge_index]
        return replace(graph, name=name, edge_index=sorted_edges(source, target, graph.num_src))
    built = recipe.miniature() if small else recipe
    edges = built.build(**built.arguments, device=device)
    graph = EdgeList(name, edges.edge_index, edges.num_nodes, edges.num_nodes)
    if isinstance(edges, TypedEdges):
        sizes = edges.type_ptr.diff()
        node_type = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        graph = replace(graph, edge_type=edges.edge_type, num_relations=edges.num_relations, node_type=node_type)
    else:
        graph = replace(graph, ptr=edges.ptr)
    if not small:
        compare_with_recipe(graph, recipe)
    return graph


def compare_with_recipe(graph: EdgeList, recipe: Recipe) -> str:
    """One line with achieved and recorded sizes, ending in 'identical' or 'equivalent'; raises when neither holds."""
    achieved = (graph.num_src, graph.num_edges, graph.max_degree)
    recorded = (recipe.num_nodes, recipe.num_edges, recipe.max_degree)
    sizes = (
        f"{name} {value:,} / {'-' if wished is None else format(wished, ',')}"
        for name, value, wished in zip(("N", "E", "max degree"), achieved, recorded)
    )
    line = f"graph {graph.name}: {', '.join(sizes)}"
    if graph.edge_type is not None:
        rho = [ratio(compressed(graph), rows) for rows in ("source_relations", "target_relations")]
        line += ", {} relations, rho_s {:.3f}, rho_d {:.3f}".format(graph.num_relations, *rho)
    if achieved[:2] == recorded[:2] and recorded[2] in (None, achieved[2]):
        return f"{line}: identical"
    for value, wished, tolerance in zip(achieved, recorded, recipe.tolerance, strict=True):
        if wished is not None and abs(value - wished) > tolerance * wished:
            reason = "times would not be comparable"
            if graph.device.type != "cuda" and "load" not in recipe.arguments:
                reason = "full-size graphs need a GPU (they are sampled on the CUDA generator), or small=true"
            raise RuntimeError(f"{line} (achieved / recorded): another graph; {reason}")
    return f"{line}: equivalent"
