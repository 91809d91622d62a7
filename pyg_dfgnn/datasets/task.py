"""What a data set hands to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch_geometric.data import Data
from tqdm import tqdm

from pyg_dfgnn.errors import check_choice

SPLITS = ("train", "val", "test")
LEVELS = ("node", "graph")
METRICS = ("accuracy", "balanced_accuracy", "roc_auc", "macro_f1")


@dataclass(frozen=True)
class Task:
    """Classification of nodes or graphs: many graphs per split, or one graph with a mask per split.

    Args:
        name: As shown in results.
        splits: "train", "val", "test" -> graphs with `x [N, F]`, `edge_index [2, E]`, perhaps `edge_attr [E, D]`, and
            `y [N]` or, at graph level, `y [1]`. One graph for all splits carries `train_mask`, `val_mask`,
            `test_mask [N]`.
        num_features: F.
        num_classes: Number of labels.
        level: "node" or "graph": what the labels belong to.
        metric: "accuracy", "balanced_accuracy" (mean of the accuracies per class), "roc_auc" (two classes) or
            "macro_f1" (mean of the F1 scores per class).
        loss_weights: Weigh the classes by rarity in the loss.
        synthetic: What of the data was made up, as shown in results; None: nothing.

    Raises:
        ValueError: A split, level or metric is unknown, or the ROC AUC is asked of more than two classes.
    """

    name: str
    splits: dict[str, list[Data]]
    num_features: int
    num_classes: int
    level: str = "node"
    metric: str = "accuracy"
    loss_weights: bool = False
    synthetic: str | None = None

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("splits", split, SPLITS)
        check_choice("level", self.level, LEVELS)
        check_choice("metric", self.metric, METRICS)
        if self.metric == "roc_auc" and self.num_classes != 2:
            raise ValueError(f"'metric' needs another choice than 'roc_auc' for {self.num_classes} classes (needs 2)")

    @property
    def full_graph(self) -> bool:
        """Whether all splits are masks on one graph."""
        return all(len(graphs) == 1 and "train_mask" in graphs[0] for graphs in self.splits.values())

    def map(self, transform: Callable[[Data], Data]) -> Task:
        """The same task with each graph transformed; a graph shared by several splits is transformed once."""
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


def progress(name: str, total: int, unit: str = "graph") -> tqdm:
    """A bar with the estimated time of work on so many graphs, on a terminal and if it takes longer than a moment."""
    return tqdm(desc=name, total=total, unit=unit, disable=None, delay=1.0, dynamic_ncols=True)
