"""Tasks of node classification on stochastic block models, PATTERN and CLUSTER, generated from a seed.

Source: Dwivedi et al., Benchmarking Graph Neural Networks, JMLR 2023, section 4.2.3 and appendix A. The published
graphs carry no seed, so these are fresh draws of the same recipe, not the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dfgnn.datasets.files import cached
from pyg_dfgnn.datasets.task import SPLITS, Task, progress
from pyg_dfgnn.errors import check_integer, check_range

# Each split has its own random stream, so that graphs added to one split change no other graph.
_STREAMS = {"train": 1, "val": 2, "test": 3, "patterns": 4}
# Raise this number when the same arguments make other graphs, so that cached files of the old graphs are not read.
_RECIPE = 1


@dataclass(frozen=True)
class _Pattern:
    """A random graph with fixed node signals that is planted in many graphs."""

    adjacency: np.ndarray
    signal: np.ndarray


def pattern(
    num_train: int = 10_000,
    num_val: int = 2_000,
    num_test: int = 2_000,
    *,
    num_patterns: int = 100,
    num_communities: int = 5,
    min_size: int = 5,
    max_size: int = 34,
    p: float = 0.5,
    q: float = 0.35,
    p_pattern: float = 0.5,
    q_pattern: float = 0.5,
    num_signals: int = 3,
    seed: int = 0,
    cache: str | Path | None = None,
) -> Task:
    """Find the nodes of a planted pattern inside a stochastic block model.

    Each graph is a block model with a pattern attached: a random graph whose nodes link to each node of the block model
    with one probability. Node features are random signals as one-hot `[N, num_signals]`, labels 1 inside the pattern.

    Args:
        num_train: Number of training graphs.
        num_val: Number of validation graphs.
        num_test: Number of test graphs.
        num_patterns: Distinct patterns; graph i of each split takes pattern `i % num_patterns`.
        num_communities: Communities of the block model.
        min_size: Smallest number of nodes of a community or pattern.
        max_size: Largest number of nodes of a community or pattern.
        p: Link probability inside a community.
        q: Link probability across communities.
        p_pattern: Link probability inside a pattern.
        q_pattern: Link probability between pattern and block model.
        num_signals: Number of node signals.
        seed: Seed of all graphs.
        cache: Folder that keeps the graphs; None: they are not kept.

    Returns:
        The task, 2 classes.

    Raises:
        ValueError: A probability, size or count is out of range.
    """
    recipe = {name: value for name, value in locals().items() if name != "cache"}
    _check(recipe)

    def make_pattern(index: int) -> _Pattern:
        rng = np.random.default_rng([seed, _STREAMS["patterns"], index])
        size = rng.integers(min_size, max_size, endpoint=True)
        adjacency = _symmetric(rng, np.full((size, size), p_pattern))
        return _Pattern(adjacency, rng.integers(num_signals, size=size))

    patterns = [make_pattern(index) for index in range(num_patterns)]

    def make_graph(split: str, index: int) -> Data:
        rng = np.random.default_rng([seed, _STREAMS[split], index])
        base, communities = _block_model(rng, num_communities, min_size, max_size, p, q)
        planted = patterns[index % num_patterns]
        links = rng.random((len(communities), len(planted.signal))) < q_pattern
        adjacency = np.block([[base, links], [links.T, planted.adjacency]])
        signal = np.concatenate([rng.integers(num_signals, size=len(communities)), planted.signal])
        label = np.repeat([0, 1], [len(communities), len(planted.signal)])
        return _data(adjacency, signal, label, num_signals, rng)

    splits = _splits("PATTERN", make_graph, recipe, cache)
    return _task("PATTERN (generated)", splits, num_signals, num_classes=2)


def cluster(
    num_train: int = 10_000,
    num_val: int = 1_000,
    num_test: int = 1_000,
    *,
    num_communities: int = 6,
    min_size: int = 5,
    max_size: int = 34,
    p: float = 0.55,
    q: float = 0.25,
    seed: int = 0,
    cache: str | Path | None = None,
) -> Task:
    """Find the community of each node of a stochastic block model.

    One random node per community carries its community as signal, the others carry none. Features are one-hot,
    `[N, num_communities + 1]`.

    Args:
        num_train: Number of training graphs.
        num_val: Number of validation graphs.
        num_test: Number of test graphs.
        num_communities: Communities of the block model.
        min_size: Smallest number of nodes of a community.
        max_size: Largest number of nodes of a community.
        p: Link probability inside a community.
        q: Link probability across communities.
        seed: Seed of all graphs.
        cache: Folder that keeps the graphs; None: they are not kept.

    Returns:
        The task, `num_communities` classes.

    Raises:
        ValueError: A probability, size or count is out of range.
    """
    recipe = {name: value for name, value in locals().items() if name != "cache"}
    _check(recipe)

    def make_graph(split: str, index: int) -> Data:
        rng = np.random.default_rng([seed, _STREAMS[split], index])
        adjacency, communities = _block_model(rng, num_communities, min_size, max_size, p, q)
        signal = np.zeros_like(communities)
        for community in range(num_communities):
            signal[rng.choice(np.flatnonzero(communities == community))] = community + 1
        return _data(adjacency, signal, communities, num_communities + 1, rng)

    splits = _splits("CLUSTER", make_graph, recipe, cache)
    return _task("CLUSTER (generated)", splits, num_communities + 1, num_communities)


def _task(name: str, splits: dict[str, list[Data]], num_features: int, num_classes: int) -> Task:
    options: dict[str, Any] = {"metric": "balanced_accuracy", "loss_weights": True}
    return Task(name, splits, num_features, num_classes, **options, synthetic="fresh graphs by the published recipe")


def _check(recipe: dict[str, Any]) -> None:
    """Check the counts, sizes and probabilities of a recipe."""
    for name, value in recipe.items():
        if name.startswith("num_"):
            check_integer(name, value, 1)
        elif name.startswith(("p", "q")):
            check_range(name, value, 0.0, 1.0)
    check_integer("min_size", recipe["min_size"], 1)
    check_integer("max_size", recipe["max_size"], recipe["min_size"])


def _splits(
    name: str, make_graph: Callable[[str, int], Data], recipe: dict[str, Any], cache: str | Path | None
) -> dict[str, list[Data]]:
    counts = {split: recipe[f"num_{split}"] for split in SPLITS}

    def make() -> dict[str, list[Data]]:
        splits: dict[str, list[Data]] = {split: [] for split in SPLITS}
        with progress(name, sum(counts.values())) as bar:
            for split, count in counts.items():
                for index in range(count):
                    splits[split].append(make_graph(split, index))
                    bar.update()
        return splits

    return cached(cache, name.lower(), {**recipe, "recipe": _RECIPE}, make)


def _symmetric(rng: np.random.Generator, probability: np.ndarray) -> np.ndarray:
    """Return a symmetric boolean adjacency without loops, each pair drawn once."""
    upper = np.triu(rng.random(probability.shape) < probability, k=1)
    return upper | upper.T


def _block_model(
    rng: np.random.Generator, num_communities: int, min_size: int, max_size: int, p: float, q: float
) -> tuple[np.ndarray, np.ndarray]:
    sizes = rng.integers(min_size, max_size, size=num_communities, endpoint=True)
    communities = np.repeat(np.arange(num_communities), sizes)
    return _symmetric(rng, np.where(communities[:, None] == communities, p, q)), communities


def _data(
    adjacency: np.ndarray, signal: np.ndarray, label: np.ndarray, num_signals: int, rng: np.random.Generator
) -> Data:
    order = rng.permutation(len(label))
    edge_index = np.stack(np.nonzero(adjacency[np.ix_(order, order)]))
    x = torch.nn.functional.one_hot(torch.from_numpy(signal[order]), num_signals).float()
    return Data(x=x, edge_index=torch.from_numpy(edge_index), y=torch.from_numpy(label[order]))
