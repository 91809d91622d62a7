"""Each process's share of the mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from pyg_dfgnn.distributed.group import Group
from pyg_dfgnn.errors import check_range
from pyg_dfgnn.graph import SortEdges
from pyg_dfgnn.graph.batch import BY_SOURCE


def own_share(batch: Tensor, group: Group, costs: Tensor | None = None) -> Tensor:
    """A process's share of the samples of a batch: their numbers differ by at most one, their costs by little.

    Args:
        batch: Indices [B], the same on every process.
        group: The processes.
        costs: What each sample of the data set costs, such as its number of edges; None: all the same.
    """
    if group.size == 1:
        return batch
    if costs is not None:
        batch = batch[costs[batch].argsort(descending=True, stable=True)]
    # Dealt out to and fro: who takes the larger of a round takes the smaller of the next.
    turns = 2 * group.size
    return torch.cat([batch[group.rank :: turns], batch[turns - 1 - group.rank :: turns]])


class SharedBatches(Sampler[list[int]]):
    """The batches of a run on one process, each dealt out to all processes.

    torch's DistributedSampler repeats or drops samples where they do not divide evenly, which changes gradients. Here
    every sample counts once. A process that goes without in a short last batch takes `filler`, which must count for
    nothing: see :func:`empty_graph`.

    Args:
        sampler: Draws the same indices on every process.
        batch_size: Of all processes together.
        group: The processes.
        filler: Index of the sample that fills an empty share.
        costs: As in :func:`own_share`.

    Raises:
        ValueError: `batch_size` is smaller than the number of processes.
    """

    def __init__(
        self, sampler: Sampler[int], batch_size: int, group: Group, filler: int, costs: Tensor | None = None
    ) -> None:
        check_range("batch_size", batch_size, group.size)
        self.batches = BatchSampler(sampler, batch_size, drop_last=False)
        self.group, self.filler, self.costs = group, filler, costs

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield own_share(torch.tensor(batch), self.group, self.costs).tolist() or [self.filler]


def empty_graph(graph: Data, label: int = -100) -> Data:
    """A graph without nodes, of the attributes and dtypes of another, whose own label, if any, is one to ignore."""
    empty = graph.subgraph(torch.zeros(graph.num_nodes or 0, dtype=torch.bool))
    empty.y = torch.full_like(empty.y, label)
    return SortEdges()(empty) if BY_SOURCE in empty else empty


def edges_of(graphs: Sequence[Data]) -> Tensor:
    """The number of edges of each graph [G], what it costs to train on it."""
    return torch.tensor([graph.num_edges for graph in graphs])


def shared_loader(
    graphs: Sequence[Data], group: Group, *, batch_size: int, shuffle: bool, generator: torch.Generator, **options: Any
) -> DataLoader:
    """PyG's DataLoader over this process's shares; what it draws from `generator` is what the loader of one would.

    Args:
        graphs: The same on every process.
        group: The processes.
        batch_size: Of all processes together.
        shuffle: Whether to draw a new order in each epoch.
        generator: In the same state on every process.
        **options: Further arguments of the loader.
    """
    sampler: Sampler[int] = RandomSampler(graphs, generator=generator) if shuffle else SequentialSampler(graphs)
    batches = SharedBatches(sampler, batch_size, group, len(graphs), edges_of(graphs))
    return DataLoader([*graphs, empty_graph(graphs[0])], batch_sampler=batches, generator=generator, **options)
