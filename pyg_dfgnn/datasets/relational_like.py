"""Tasks on seeded graphs with the published numbers of nodes, edges, node types and relations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.datasets.generators import Device, TypedEdges, generator_of, typed_graph, zipf_sizes
from pyg_dfgnn.datasets.relational import link_task
from pyg_dfgnn.datasets.task import SPLITS, Task, one_graph
from pyg_dfgnn.errors import check_choice, check_integer, check_range


@dataclass(frozen=True)
class Published:
    """Published facts about a data set.

    Attributes:
        types: Number of nodes of each type; labelled nodes are of the first.
        relations: Source type, target type and number of edges of each relation, without inverses.
        skew: Exponents of the degrees of sources and targets, chosen to reach the known numbers of distinct pairs.
        inverses: Whether the published edges include inverses.
        num_classes: Number of classes; 0: the task is to predict links.
        num_labelled: Training, validation and test nodes.
        num_features: Features of a node; 0: none.
    """

    types: tuple[int, ...]
    relations: tuple[tuple[int, int, int], ...]
    skew: tuple[float, float]
    inverses: bool = False
    num_classes: int = 0
    num_labelled: tuple[int, int, int] = (0, 0, 0)
    num_features: int = 0


def _linked(types: list[int], sizes: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Draw the types of relations of unknown types: large types have more relations, and no relation is half full."""
    generator, size = generator_of(0, "cpu"), torch.tensor(types, dtype=torch.float64)
    pairs = size[:, None] * size
    relations = []
    for count in sizes:
        weight = (pairs.sqrt() * (pairs > 2 * count)).flatten()
        pair = int(torch.multinomial(weight, 1, generator=generator))
        relations.append((pair // len(types), pair % len(types), count))
    return tuple(relations)


def _rdf(nodes: int, edges: int, types: int, relations: int, num_classes: int, *labelled: int) -> Published:
    """An RDF graph with inverses, of which nodes, edges and the numbers of types and relations are known."""
    sizes = zipf_sizes(nodes, types)
    linked = _linked(sizes, zipf_sizes(edges // 2, relations // 2))
    return Published(tuple(sizes), linked, (0.5, 0.5), True, num_classes, labelled)  # type: ignore[arg-type]


# The node types of BioKG: function, protein, drug, disease, side effect. Its relations, the largest first.
_BIOKG_TYPES = (45_085, 17_499, 10_533, 10_687, 9_969)
_BIOKG_ENDS = [(0, 0), (1, 0), *[(1, 1)] * 8, (2, 4), (2, 1), (3, 1), *[(2, 2)] * 38]


def published(name: str) -> Published:
    """Return what is known of a data set.

    Args:
        name: "AM" and "BGS" (without literals), "ogbn-mag", "ogbl-wikikg2" and "ogbl-biokg" (their training edges).

    Raises:
        ValueError: `name` is unknown.

    Source: Schlichtkrull et al., ESWC 2018 (AM, BGS); Hu et al., Open Graph Benchmark, NeurIPS 2020 (the others).
    """
    check_choice("name", name, LIKE)
    if name == "AM":
        return _rdf(881_680, 5_668_682, 7, 108, 11, 642, 160, 198)
    if name == "BGS":
        return _rdf(94_806, 672_884, 27, 122, 2, 94, 23, 29)
    if name == "ogbn-mag":
        # Paper, author, institution, field of study.
        types = (736_389, 1_134_649, 8_740, 59_965)
        relations = ((1, 2, 1_043_998), (1, 0, 7_145_660), (0, 0, 5_416_271), (0, 3, 7_505_078))
        return Published(types, relations, (0.3, 0.3), False, 349, (629_571, 64_879, 41_939), 128)
    if name == "ogbl-wikikg2":
        return Published((2_500_604,), tuple((0, 0, n) for n in zipf_sizes(16_109_182, 535)), (0.63, 0.68))
    sizes = zipf_sizes(4_762_678, len(_BIOKG_ENDS))
    return Published(_BIOKG_TYPES, tuple((*ends, n) for ends, n in zip(_BIOKG_ENDS, sizes)), (0.5, 0.5))


LIKE = ("AM", "BGS", "ogbn-mag", "ogbl-wikikg2", "ogbl-biokg")


def relational_graph(
    name: str,
    scale: float,
    seed: int,
    device: Device,
    *,
    label: Tensor | None = None,
    homophily: float = 0.0,
    inverses: bool | None = None,
) -> TypedEdges:
    """Return a graph with the published counts of a data set, all multiplied by a scale.

    Args:
        name: As in :func:`published`.
        scale: Share of the nodes of each type and of the edges of each relation, each at least 1.
        seed: Seed of the graph.
        device: Where it is made.
        label: Label of each node [N], inside which edges are matched anew; None: they stay as drawn.
        homophily: Share of the edges that labels match anew.
        inverses: Whether each relation has an inverse; None: where the published edges have them.

    Raises:
        ValueError: `name` is unknown, or `scale` out of range.
    """
    check_range("scale", scale, 0.0, 1.0)
    known = published(name)
    types = [_scaled(size, scale) for size in known.types]
    relations = [(*ends, _scaled(count, scale)) for *ends, count in known.relations]
    edges = typed_graph(types, relations, known.skew, seed, device, label=label, homophily=homophily)  # type: ignore[arg-type]
    return edges.both_ways() if (known.inverses if inverses is None else inverses) else edges


def _scaled(count: int, scale: float) -> int:
    return max(1, round(scale * count))


def entities_like(
    name: str, *, scale: float = 1.0, homophily: float = 0.5, signal: float = 1.0, seed: int = 0, device: str = "auto"
) -> Task:
    r"""Classify entities of a generated graph with the published numbers of nodes and edges of each type.

    Every node has a hidden class, in which a share of its edges is matched. Where the data set has features, they are
    :math:`s\, c_y + \epsilon` at nodes of the labelled type and :math:`\epsilon` elsewhere.

    Args:
        name: "AM", "BGS" or "ogbn-mag".
        scale: Share of nodes, edges and labels.
        homophily: Share of the edges inside a class.
        signal: s.
        seed: Seed of graph, features and labels.
        device: "auto" (a GPU if there is one) or the device to make all of it on.

    Returns:
        The task: one graph with `edge_type`, labelled `nodes` and a mask of these per split.

    Raises:
        ValueError: `name` is unknown, or a value is out of range.
    """
    check_choice("name", name, [like for like in LIKE if published(like).num_classes])
    check_range("scale", scale, 0.0, 1.0)
    check_range("homophily", homophily, 0.0, 1.0)
    known, place = published(name), _place(device)
    generator = generator_of(seed + 1, place)
    sizes = [_scaled(size, scale) for size in known.types]
    label = torch.randint(known.num_classes, (sum(sizes),), generator=generator, device=place)
    edges = relational_graph(name, scale, seed, place, label=label, homophily=homophily)
    counts = [_scaled(count, scale) for count in known.num_labelled]
    nodes = torch.randperm(sizes[0], generator=generator, device=place)[: sum(counts)]
    data = Data(edge_index=edges.edge_index, edge_type=edges.edge_type, nodes=nodes, y=label[nodes])
    data.num_nodes = edges.num_nodes
    if known.num_features:
        shape = (edges.num_nodes, known.num_features)
        data.x = torch.randn(shape, generator=generator, device=place)
        centre = torch.randn(known.num_classes, known.num_features, generator=generator, device=place)
        data.x[: sizes[0]] += signal * torch.nn.functional.normalize(centre, dim=1)[label[: sizes[0]]]
    split_of = torch.arange(3, device=place).repeat_interleave(torch.tensor(counts, device=place))
    for number, split in enumerate(SPLITS):
        data[f"{split}_mask"] = split_of[: nodes.numel()] == number
    features = known.num_features or edges.num_nodes
    synthetic = _synthetic(edges, scale, "classes and features" if known.num_features else "classes")
    options = {"num_features": features, "num_relations": edges.num_relations, "synthetic": synthetic}
    return one_graph(f"{name}-like", data, known.num_classes, **options)


def links_like(
    name: str,
    *,
    num_val: int = 5_000,
    num_test: int = 5_000,
    scale: float = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> Task:
    """Predict missing links of a generated graph with the published number of edges of each relation.

    Args:
        name: "ogbl-wikikg2" or "ogbl-biokg".
        num_val: Number of edges that validation takes, multiplied by `scale`.
        num_test: Number of edges that the test takes, multiplied by `scale`.
        scale: Share of nodes and edges.
        seed: Seed of the graph and of the split.
        device: "auto" (a GPU if there is one) or the device to make all of it on.

    Returns:
        The task: training triples and their inverses as edges, queries in both directions.

    Raises:
        ValueError: `name` is unknown, or a value is out of range.
    """
    check_choice("name", name, [like for like in LIKE if not published(like).num_classes])
    for argument, count in (("num_val", num_val), ("num_test", num_test)):
        check_integer(argument, count, 1)
    place = _place(device)
    edges = relational_graph(name, scale, seed, place, inverses=False)
    source, target = edges.edge_index
    triples = torch.stack([source, edges.edge_type, target], dim=1)
    order = torch.randperm(len(triples), generator=generator_of(seed + 1, place), device=place)
    counts = [_scaled(count, scale) for count in (num_val, num_test)]
    check_range("num_val", counts[0], 1, len(triples) - counts[1] - 1)
    val, test, train = order.split([*counts, len(triples) - sum(counts)])
    parts = {split: triples[ids] for split, ids in zip(SPLITS, (train, val, test))}
    synthetic = _synthetic(edges, scale, "nothing besides")
    return link_task(f"{name}-like", parts, edges.num_nodes, edges.num_relations, synthetic=synthetic)


def _place(device: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def _synthetic(edges: TypedEdges, scale: float, what: str) -> str:
    rho_s, rho_d = edges.compaction()
    text = f"Chung-Lu graph per relation, rho_s {rho_s:.3f}, rho_d {rho_d:.3f}; {what} generated"
    return text + (f"; {scale:g} of the nodes" if scale < 1 else "")
