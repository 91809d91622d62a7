"""The task that a data set hands to training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.graph import Graph

SPLITS = ("train", "val", "test")
LEVELS = ("node", "graph", "link")
METRICS = ("accuracy", "balanced_accuracy", "roc_auc", "macro_f1", "mrr", "mae")


@dataclass(frozen=True)
class Task:
    """Classification of nodes or graphs, prediction of their values, or prediction of links.

    There are many graphs per split, or one graph and a mask per split. The splits of a task of links share one graph,
    with inverse edges, and ask for the missing end of triples: `queries [Q, 2]` of a node and a relation, `y [Q]` the
    other end; in validation and test `known [2, K]` holds all true triples, `node * num_relations + relation` in
    ascending order and the other end.

    Args:
        name: Name shown in results.
        splits: "train", "val", "test" -> graphs with `x [N, F]`, `edge_index [2, E]`, perhaps `edge_attr [E, D]`, and
            `y [N]` or, at graph level, `y [1]`. One graph for all splits carries `train_mask`, `val_mask`,
            `test_mask [N]`; if it carries `nodes [M]` too, labels and masks are of these nodes alone, `[M]`. Its
            `edge_index` may be a `Graph`. A graph with relations has `edge_type [E]`, or is a `HeteroData` with labels
            and masks of its first node type as attributes of the whole graph.
        num_features: F, of a `HeteroData` that of each node type; N if the nodes of a graph with relations have no `x`.
        num_classes: Number of classes; of links, N.
        level: Whether labels belong to a "node", a "graph" or a "link".
        metric: "accuracy", "balanced_accuracy" (mean of the accuracies per class), "roc_auc" (two classes), "macro_f1"
            (mean of the F1 scores per class), "mrr" (of links: mean reciprocal rank) or "mae" (of values: mean absolute
            error in their unit, lower being better).
        loss_weights: Weigh the classes by rarity in the loss.
        synthetic: Part of the data that was made up, as shown in results; None: no part.
        num_relations: Number of relations of `edge_type`; 0: edges have no relations, or those of a `HeteroData`.
        unit: Of values: their unit.
        shift: Of values: `y`, float32, is the value less this,
        scale: divided by this; :func:`value_task` takes mean and standard deviation of the training split.

    Raises:
        ValueError: A split, level or metric is unknown, "roc_auc" does not have two classes, or "mrr" is asked of
            anything but links, or links of another metric.
    """

    name: str
    splits: dict[str, list[Data]]
    num_features: int
    num_classes: int
    level: str = "node"
    metric: str = "accuracy"
    loss_weights: bool = False
    synthetic: str | None = None
    num_relations: int = 0
    unit: str | None = None
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("splits", split, SPLITS)
        check_choice("level", self.level, LEVELS)
        check_choice("metric", self.metric, METRICS)
        if self.metric == "roc_auc" and self.num_classes != 2:
            raise ValueError(f"'metric' needs another choice than 'roc_auc' for {self.num_classes} classes (needs 2)")
        if (self.metric == "mrr") != (self.level == "link"):
            raise ValueError(f"'metric' needs 'mrr' for links and for nothing else (got {self.metric!r}, {self.level})")

    @property
    def is_of_values(self) -> bool:
        """Whether labels are values, not classes."""
        return self.metric == "mae"

    @property
    def quantity(self) -> str:
        """Name of the metric in results: "accuracy", higher being better, or "error", lower being better."""
        return "error" if self.is_of_values else "accuracy"

    @property
    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]] | None:
        """Node and edge types of a task on a `HeteroData`; None for other tasks."""
        graph = self.splits["train"][0]
        return graph.metadata() if isinstance(graph, HeteroData) else None

    @property
    def num_edge_features(self) -> int:
        """D, 0 without edge features."""
        graph = self.splits["train"][0]
        return 0 if isinstance(graph, HeteroData) or "edge_attr" not in graph else graph.edge_attr.size(1)

    @property
    def full_graph(self) -> bool:
        """Whether the splits are masks on one graph."""
        return all(len(graphs) == 1 and "train_mask" in graphs[0] for graphs in self.splits.values())

    def degrees(self) -> Tensor:
        """Return the number of nodes of each in-degree in the training graphs, `[D + 1]`, on the CPU."""

        def of_graph(edges: Any, num_nodes: int | None) -> Tensor:
            return edges.csr.rowptr.diff() if isinstance(edges, Graph) else edges[1].bincount(minlength=num_nodes)

        degrees = [of_graph(graph.edge_index, graph.num_nodes) for graph in self.splits["train"]]
        return torch.cat(degrees).bincount().cpu()

    def map(self, transform: Callable[[Data], Data]) -> Task:
        """Return this task with each graph transformed; a graph shared by several splits is transformed once."""
        done: dict[int, Data] = {}
        name = getattr(transform, "__name__", type(transform).__name__)
        with progress(name, sum(map(len, self.splits.values()))) as bar:

            def once(graph: Data) -> Data:
                if id(graph) not in done:
                    done[id(graph)] = transform(graph)
                bar.update()
                return done[id(graph)]

            splits = {split: [once(graph) for graph in graphs] for split, graphs in self.splits.items()}
        return replace(self, splits=splits)

    def read_by(self, model: Any) -> Task:
        """Return this task without edge features if the model does not ask for them by an attribute `edge_channels`."""
        asks = bool(getattr(model, "edge_channels", 0))
        return self if asks or not self.num_edge_features else self.map(_without_edge_features)


def _without_edge_features(graph: Data) -> Data:
    graph = copy(graph)
    del graph.edge_attr
    return graph


def one_graph(name: str, data: Any, num_classes: int, **options: Any) -> Task:
    """Return the task of one graph with a mask per split; further options are those of :class:`Task`."""
    features = options.pop("num_features", data.num_features)
    return Task(name, dict.fromkeys(SPLITS, [data]), features, num_classes, **options)


def value_task(name: str, splits: dict[str, list[Data]], unit: str, **options: Any) -> Task:
    """Return the task of predicting values, which are scaled to mean 0 and deviation 1 of the training split.

    Args:
        name: As in :class:`Task`.
        splits: As in :class:`Task`; the values `y`, float `[N]` or `[1]`, are replaced.
        unit: Unit of the values.
        **options: Further options of :class:`Task`.

    Raises:
        ValueError: Values of the training split are not finite, or all alike.
    """
    train = [graph.y[graph.train_mask] if "train_mask" in graph else graph.y for graph in splits["train"]]
    values = torch.cat(train).double()
    shift, scale = values.mean().item(), values.std(correction=0).item()
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"'splits' needs finite and different training values of {name} (got deviation {scale})")
    # One graph may be that of all splits.
    for graph in {id(graph): graph for graphs in splits.values() for graph in graphs}.values():
        graph.y = ((graph.y.double() - shift) / scale).float()
    features = splits["train"][0].num_features
    return Task(name, splits, features, 1, metric="mae", unit=unit, shift=shift, scale=scale, **options)


def add_masks(data: Any, split_ids: Iterable[Tensor]) -> None:
    """Give a graph a mask per split that marks the labels at these places."""
    for split, ids in zip(SPLITS, split_ids):
        setattr(data, f"{split}_mask", torch.zeros(len(data.y), dtype=torch.bool).index_fill_(0, ids, True))


def add_random_masks(data: Any, labelled: Tensor, shares: tuple[float, float], seed: int) -> None:
    """Divide the labelled nodes at random into training, validation and test nodes."""
    order = labelled[torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed))]
    train, val = (round(share * len(order)) for share in shares)
    add_masks(data, order.split([train, val, len(order) - train - val]))


def progress(name: str, total: int, unit: str = "graph") -> tqdm:
    """Return a progress bar that appears on a terminal when the work takes longer than a second."""
    return tqdm(desc=name, total=total, unit=unit, disable=None, delay=1.0, dynamic_ncols=True)
