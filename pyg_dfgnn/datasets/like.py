"""Generated tasks at the size of published data sets, with made-up features and labels that can be learnt."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.datasets.files import CACHE, cached, unpack
from pyg_dfgnn.datasets.generators import (
    GeneratedEdges,
    generator_of,
    log_normal_chung_lu,
    log_normal_pieces,
    region_adjacency_batch,
    superpixel_batch,
)
from pyg_dfgnn.datasets.task import SPLITS, Task, add_masks, one_graph, progress
from pyg_dfgnn.errors import check_choice, check_integer, check_range
from pyg_dfgnn.graph import Graph

log = logging.getLogger(__name__)

# Raise this number when the same arguments make other graphs, so that cached files of the old graphs are not read.
_RECIPE = 1
# This many graphs are generated at once, which bounds the memory.
_CHUNK = 1000
_SYNTHETIC = "graphs, features and labels: generated at the published numbers of nodes and edges"


@dataclass(frozen=True)
class _Images:
    """The published range and mean of the number of nodes, and the number of colour channels."""

    min_nodes: int
    max_nodes: int
    mean_nodes: float
    channels: int


_IMAGES = {"MNIST": _Images(40, 75, 70.6, 1), "CIFAR10": _Images(85, 150, 117.6, 3)}
# Each entry is the mean number of nodes and the number of classes.
_PHOTOGRAPHS = {"PascalVOC-SP": (479.40, 21), "COCO-SP": (476.88, 81)}


def image_superpixels_like(
    name: str,
    num_train: int,
    num_val: int,
    num_test: int,
    *,
    noise: float = 0.5,
    seed: int = 0,
    cache: str | Path | None = CACHE,
) -> Task:
    """Classify graphs like the superpixels of MNIST or CIFAR10.

    Jittered grid points with edges to their 8 nearest, as many nodes per graph as published. Each class is a smooth
    random picture; a node sees it at its place under noise: `x [N, 3]` or `[N, 5]`, colour and place. `edge_attr
    [E, 1]` is `exp(-(d / s)^2)` with the mean distance s over the edges of the source.

    Args:
        name: "MNIST" or "CIFAR10".
        num_train: Number of training graphs.
        num_val: Number of validation graphs.
        num_test: Number of test graphs.
        noise: Standard deviation added to colours in 0..1.
        seed: Seed of all graphs.
        cache: Folder that keeps the graphs; None: they are not kept.

    Returns:
        The task at graph level, 10 classes.

    Raises:
        ValueError: `name` is unknown, a count is below 1 or `noise` is negative.
    """
    check_choice("name", name, tuple(_IMAGES))
    check_range("noise", noise, 0)
    images, num_classes = _IMAGES[name], 10
    # Waves over the picture: frequency, phase of each class and channel.
    fixed = generator_of(seed, "cpu")
    shape = num_classes, images.channels
    frequency = torch.randint(-2, 3, (*shape, 2), generator=fixed).float()
    phase = 2 * math.pi * torch.rand(shape, generator=fixed)

    def chunk(count: int, chunk_seed: int) -> list[Data]:
        edges = superpixel_batch(
            count, images.min_nodes, images.max_nodes, images.mean_nodes, seed=chunk_seed, device="cpu"
        )
        assert edges.ptr is not None and edges.pos is not None
        generator = generator_of(chunk_seed, "cpu")
        y = torch.randint(num_classes, (count,), generator=generator)
        of_node = y.repeat_interleave(edges.ptr.diff())
        place = edges.pos / edges.pos.max()
        wave = (frequency[of_node] * place[:, None]).sum(dim=2)
        colour = 0.5 + 0.5 * (2 * math.pi * wave + phase[of_node]).sin()
        colour = colour + noise * torch.randn(colour.shape, generator=generator)
        source, target = edges.edge_index
        distance = (edges.pos[source] - edges.pos[target]).norm(dim=1)
        width = torch.zeros(edges.num_nodes).index_add_(0, source, distance) / 8
        weight = (-((distance / width[source]) ** 2)).exp()
        return _graphs(edges, torch.cat([colour, place], dim=1), weight[:, None], y)

    parameters = {"counts": [num_train, num_val, num_test], "noise": noise, "seed": seed, "recipe": _RECIPE}
    stem = f"{name.lower()}_superpixels_like"
    splits = cached(cache, stem, parameters, lambda: _splits(stem, chunk, num_train, num_val, num_test, seed))
    return Task(
        f"{name} superpixels-like", splits, images.channels + 2, num_classes, level="graph", synthetic=_SYNTHETIC
    )


def photograph_superpixels_like(
    name: str,
    num_train: int,
    num_val: int,
    num_test: int,
    *,
    num_objects: int = 3,
    noise: float = 0.1,
    seed: int = 0,
    cache: str | Path | None = CACHE,
) -> Task:
    """Classify the nodes of graphs like PascalVOC-SP or COCO-SP by the object that they belong to.

    Planar grids of regions, as many nodes per graph as published. Discs of random place and size carry a class, the
    rest is class 0. Classes have a colour, which each graph shifts and each node blurs: `x [N, 14]` are mean,
    deviation, maximum and minimum of three colours and the place; `edge_attr [E, 2]` contrast and length of the border.

    Args:
        name: "PascalVOC-SP" or "COCO-SP".
        num_train: Number of training graphs.
        num_val: Number of validation graphs.
        num_test: Number of test graphs.
        num_objects: Discs per graph.
        noise: Standard deviation of colours in 0..1, between graphs and between nodes.
        seed: Seed of all graphs.
        cache: Folder that keeps the graphs; None: they are not kept.

    Returns:
        The task at node level, 21 or 81 classes, scored by macro F1.

    Raises:
        ValueError: `name` is unknown, a count is below 1 or `noise` is negative.
    """
    check_choice("name", name, tuple(_PHOTOGRAPHS))
    check_integer("num_objects", num_objects, 1)
    check_range("noise", noise, 0)
    mean_nodes, num_classes = _PHOTOGRAPHS[name]
    palette = torch.rand(num_classes, 3, generator=generator_of(seed, "cpu"))

    def chunk(count: int, chunk_seed: int) -> list[Data]:
        edges = region_adjacency_batch(count, mean_nodes, seed=chunk_seed, device="cpu")
        assert edges.ptr is not None and edges.pos is not None
        generator = generator_of(chunk_seed, "cpu")
        graph = torch.arange(count).repeat_interleave(edges.ptr.diff())
        side = edges.pos.max() + 1
        place = (edges.pos + torch.rand(edges.pos.shape, generator=generator)) / side

        centre = torch.rand(count, num_objects, 2, generator=generator)
        radius = 0.1 + 0.2 * torch.rand(count, num_objects, generator=generator)
        shown = torch.randint(1, num_classes, (count, num_objects), generator=generator)
        inside = (place[:, None] - centre[graph]).norm(dim=2) < radius[graph]
        first = inside.float().argmax(dim=1, keepdim=True)
        y = torch.where(inside.any(dim=1), shown[graph].gather(1, first).flatten(), 0)

        shift = noise * torch.randn(count, 3, generator=generator)
        mean = palette[y] + shift[graph] + noise * torch.randn(len(y), 3, generator=generator)
        deviation = noise * torch.rand(len(y), 3, generator=generator)
        x = torch.cat([mean, deviation, mean + 2 * deviation, mean - 2 * deviation, place], dim=1)
        source, target = edges.edge_index
        contrast = (mean[source] - mean[target]).norm(dim=1)
        length = 1 + 2 * side * (place[source] - place[target]).abs().amax(dim=1)
        return _graphs(edges, x, torch.stack([contrast, length], dim=1), y)

    parameters = {
        "counts": [num_train, num_val, num_test],
        "num_objects": num_objects,
        "noise": noise,
        "seed": seed,
        "recipe": _RECIPE,
    }
    stem = f"{name.lower().replace('-', '_')}_like"
    splits = cached(cache, stem, parameters, lambda: _splits(stem, chunk, num_train, num_val, num_test, seed))
    return Task(f"{name}-like", splits, 14, num_classes, metric="macro_f1", loss_weights=True, synthetic=_SYNTHETIC)


def log_normal_graph(
    name: str,
    *,
    num_nodes: int,
    mean_degree: float,
    max_degree: float,
    sigma: float,
    num_features: int,
    num_classes: int,
    num_train: int,
    num_val: int,
    scale: float = 1.0,
    num_hubs: int = 8,
    homophily: float = 0.5,
    signal: float = 1.0,
    seed: int = 0,
    cache: str | Path | None = CACHE,
) -> Task:
    r"""Classify the nodes of one large graph with super nodes and the size of a published graph.

    A Chung-Lu graph with log-normal expected degrees. Features are :math:`s\, c_y + \epsilon` with a random unit
    vector per class and normal noise; a share of the edges stays inside the classes, so that neighbours tell more than
    a node itself.

    Args:
        name: Name shown in results with "-like".
        num_nodes: Published number of nodes, multiplied by `scale`.
        mean_degree: Neighbours drawn per node; duplicates fall away.
        max_degree: Expected degree of the hubs, multiplied by `scale`.
        sigma: Standard deviation of the logarithm of degrees, assumed if only mean and maximum are published.
        num_features: Features of a node.
        num_classes: Number of equally likely labels.
        num_train: Number of training nodes, multiplied by `scale`.
        num_val: Number of validation nodes, multiplied by `scale`; the rest are test nodes.
        scale: Share of the nodes; the mean degree and the share of nodes next to a hub stay.
        num_hubs: Number of nodes with `max_degree`.
        homophily: Share of the pairs of light nodes that are moved inside a class.
        signal: s.
        seed: Seed of graph, features and labels.
        cache: Folder that keeps the graphs; None: they are not kept.

    Returns:
        The task: one graph with a mask per split.

    Raises:
        ValueError: A value is out of range; or the scaled graph has no room for its mean degree.

    Source: Chung and Lu, Connected components in random graphs with given expected degree sequences, 2002.
    """
    check_range("scale", scale, 0.0, 1.0)
    check_range("homophily", homophily, 0.0, 1.0)
    nodes, hub_degree = round(scale * num_nodes), scale * max_degree
    if hub_degree < mean_degree:
        need = f"{mean_degree / max_degree:.3g} or a smaller 'mean_degree': hubs would have {hub_degree:.0f} neighbours"
        raise ValueError(f"'scale' needs at least {need} (got {scale})")
    train, val = round(scale * num_train), round(scale * num_val)
    check_range("num_train", train, 1, nodes - 2)
    check_range("num_val", val, 1, nodes - train - 1)
    parameters = {
        **{"nodes": nodes, "mean": mean_degree, "max": hub_degree, "sigma": sigma, "hubs": num_hubs, "seed": seed},
        **{"features": num_features, "classes": num_classes, "homophily": homophily, "signal": signal},
        **{"train": train, "val": val, "recipe": _RECIPE},
    }

    def make() -> dict[str, list[Data]]:
        generator = generator_of(seed, "cpu")
        y = torch.randint(num_classes, (nodes,), generator=generator)
        edges = log_normal_chung_lu(
            nodes, mean_degree, hub_degree, sigma, num_hubs, seed, "cpu", label=y, homophily=homophily
        )
        centre = torch.nn.functional.normalize(torch.randn(num_classes, num_features, generator=generator), dim=1)
        x = torch.randn(nodes, num_features, generator=generator).add_(signal * centre[y])
        data = Data(x=x, edge_index=edges.edge_index, y=y)
        order = torch.randperm(nodes, generator=generator)
        add_masks(data, order.split([train, val, nodes - train - val]))
        return {"graph": [data]}

    stem = f"{name.lower().replace('-', '_')}_like"
    (data,) = cached(cache, stem, parameters, make)["graph"]
    synthetic = f"log-normal Chung-Lu graph (sigma {sigma}), features and labels generated"
    if scale < 1:
        synthetic += f"; {scale:g} of the nodes"
    return one_graph(f"{name}-like", data, num_classes, synthetic=synthetic)


def log_normal_pieces_graph(
    name: str,
    *,
    num_nodes: int,
    num_edges: int,
    max_degree: float,
    sigma: float,
    num_features: int,
    num_classes: int,
    num_train: int,
    num_val: int,
    num_test: int,
    scale: float = 1.0,
    num_hubs: int = 8,
    signal: float = 1.0,
    self_loops: bool = True,
    as_graph: bool = True,
    dtype: str = "bfloat16",
    device: str = "auto",
    piece: int = 1 << 25,
    seed: int = 0,
) -> Task:
    r"""Classify some nodes of one graph that is too large for an int64 `edge_index`; all is made where it is used.

    A directed graph with log-normal expected degrees, made from pieces of its edges. Features are normal noise, at
    labelled nodes :math:`s\, c_y + \epsilon` with a random unit vector per class.

    Args:
        name: Name shown in results with "-like".
        num_nodes: Published number of nodes, multiplied by `scale`.
        num_edges: Published number of edges, multiplied by `scale`.
        max_degree: Expected degree of the hubs, multiplied by `scale`.
        sigma: Standard deviation of the logarithm of degrees.
        num_features: Features of a node.
        num_classes: Number of equally likely labels.
        num_train: Number of training nodes, multiplied by `scale`.
        num_val: Number of validation nodes, multiplied by `scale`.
        num_test: Number of test nodes, multiplied by `scale`; the other nodes have no label.
        scale: Share of nodes and edges.
        num_hubs: Number of nodes with `max_degree`.
        signal: s.
        self_loops: Put one self-loop at each node, as GCNConv and GATConv do, which then keep no second graph.
        as_graph: Hold the edges as a `Graph`, for convs of this package; otherwise as an int64 tensor [2, E].
        dtype: Dtype of the features.
        device: "auto" (a GPU if there is one) or the device to make all of it on.
        piece: Edges of a piece.
        seed: Seed of graph, features and labels.

    Returns:
        The task: one graph with `nodes`, their labels, and a mask of them per split.

    Raises:
        ValueError: A value is out of range, or a dtype is unknown.
    """
    check_range("scale", scale, 0.0, 1.0)
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    check_integer("piece", piece, 1)
    nodes, edges, *counts = (round(scale * n) for n in (num_nodes, num_edges, num_train, num_val, num_test))
    for split, count in zip(SPLITS, counts, strict=True):
        check_range(f"num_{split}", count, 1, nodes)
    check_range("num_train", counts[0], 1, nodes - counts[1] - counts[2])
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    _reset_peak(place)
    pieces = log_normal_pieces(nodes, edges, scale * max_degree, sigma, num_hubs, seed, place, piece=piece)
    edge_index: Any = Graph.of_pieces(pieces, edges, nodes, self_loops=self_loops and as_graph, device=place)
    if not as_graph:
        edge_index = edge_index.edge_index
    _log_peak("graph", place)
    generator = generator_of(seed + 1, place)
    x = torch.randn(nodes, num_features, dtype=getattr(torch, dtype), generator=generator, device=place)
    # A share of the nodes is drawn without a permutation of all of them.
    chosen = torch.rand(nodes, generator=generator, device=place).topk(sum(counts)).indices
    y = torch.randint(num_classes, (sum(counts),), generator=generator, device=place)
    centre = torch.randn(num_classes, num_features, generator=generator, device=place)
    x.index_add_(0, chosen, (signal * torch.nn.functional.normalize(centre, dim=1))[y].to(x.dtype))
    data = Data(x=x, edge_index=edge_index, y=y, nodes=chosen)
    split_of = torch.arange(3, device=place).repeat_interleave(torch.tensor(counts, device=place))
    for number, split in enumerate(SPLITS):
        data[f"{split}_mask"] = split_of == number
    _log_peak("features", place)
    synthetic = f"log-normal directed graph (sigma {sigma}), features and labels generated"
    if scale < 1:
        synthetic += f"; {scale:g} of the nodes"
    return one_graph(f"{name}-like", data, num_classes, synthetic=synthetic)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _log_peak(phase: str, device: torch.device) -> None:
    """Log the memory that a phase needed and what it keeps, and begin the next phase."""
    if device.type == "cuda":
        peak, kept = (f(device) / 1e9 for f in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
        log.info("%s: peak %.1f GB, %.1f GB kept", phase, peak, kept)
        _reset_peak(device)


def _splits(
    name: str, chunk: Callable[[int, int], list[Data]], num_train: int, num_val: int, num_test: int, seed: int
) -> dict[str, list[Data]]:
    counts = dict(zip(SPLITS, (num_train, num_val, num_test)))
    for split, count in counts.items():
        check_integer(f"num_{split}", count, 1)
    splits: dict[str, list[Data]] = {split: [] for split in SPLITS}
    with progress(name, sum(counts.values())) as bar:
        for stream, (split, graphs) in enumerate(splits.items()):
            for start in range(0, counts[split], _CHUNK):
                # Each chunk has its own seed, so that whole chunks do not depend on the number of graphs.
                state = np.random.SeedSequence([seed, stream, start]).generate_state(1, np.uint64)
                size = min(_CHUNK, counts[split] - start)
                graphs += chunk(size, int(state[0]) >> 1)
                bar.update(size)
    return splits


def _graphs(edges: GeneratedEdges, x: Tensor, edge_attr: Tensor, y: Tensor) -> list[Data]:
    """Return the graphs of a batch whose edges are sorted by target, with labels per node or per graph."""
    assert edges.ptr is not None
    sizes = edges.ptr.diff()
    graph = torch.arange(len(sizes)).repeat_interleave(sizes)[edges.edge_index[1]]
    counts = graph.bincount(minlength=len(sizes))
    per_label = sizes if len(y) == edges.num_nodes else torch.ones_like(sizes)
    return unpack(
        {
            "x": (x, sizes),
            "edge_index": (edges.edge_index - edges.ptr[graph], counts),
            "edge_attr": (edge_attr, counts),
            "y": (y, per_label),
        }
    )
