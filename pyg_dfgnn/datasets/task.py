"""What a data set hands to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch_geometric.data import Data

from pyg_dfgnn.errors import check_choice

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class NodeTask:
    """Node classification over many graphs, or over one graph with a mask per split.

    Args:
        name: As shown in results; says so where features are made up.
        splits: "train", "val", "test" -> graphs with `x [N, F]`, `edge_index [2, E]`, `y [N]`. One graph for all splits
            carries `train_mask`, `val_mask`, `test_mask [N]`.
        num_features: F.
        num_classes: Number of labels.
        balanced: Weigh the classes by rarity in the loss and score the mean accuracy per class.
    """

    name: str
    splits: dict[str, list[Data]]
    num_features: int
    num_classes: int
    balanced: bool

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("splits", split, SPLITS)

    @property
    def full_graph(self) -> bool:
        """Whether all splits are masks on one graph."""
        return all(len(graphs) == 1 and "train_mask" in graphs[0] for graphs in self.splits.values())

    def map(self, transform: Callable[[Data], Data]) -> NodeTask:
        """The same task with each graph transformed; a graph shared by several splits is transformed once."""
        done: dict[int, Data] = {}

        def once(graph: Data) -> Data:
            if id(graph) not in done:
                done[id(graph)] = transform(graph)
            return done[id(graph)]

        return replace(self, splits={split: [once(graph) for graph in graphs] for split, graphs in self.splits.items()})
