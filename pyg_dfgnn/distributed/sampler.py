"""Shares of mini-batches for several processes."""

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


def own_share(batch: Tensor, group: Group, costs: Tensor | None = None) -> Tensor:
    """Return a process's share of the samples of a batch; sizes of shares differ by at most one, costs by little.

    Args:
        batch: Indices [B], equal on every process.
        group: Processes that share the batch.
        costs: Cost of each sample of the data set, such as its number of edges; None: equal costs.
    """
    if group.size == 1:
        return batch
    if costs is not None:
        batch = batch[costs[batch].argsort(descending=True, stable=True)]
    # The process that takes the largest sample of a round takes the smallest of the next.
    turns = 2 * group.size
    return torch.cat([batch[group.rank :: turns], batch[turns - 1 - group.rank :: turns]])


class SharedBatches(Sampler[list[int]]):
    """This process's share of each batch of a run.

    torch's DistributedSampler repeats or drops samples that do not divide evenly, which changes gradients. Here every
    sample occurs once. A process without a share of a short last batch takes `filler`, whose loss and gradient must be
    0: see :func:`empty_graph`.

    Args:
        sampler: Sampler that draws the same indices on every process.
        batch_size: Batch size of all processes together.
        group: Processes that share each batch.
        filler: Index of the sample for an empty share.
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


def empty_graph(graph: Data) -> Data:
    """Return a graph without nodes, with the attributes and dtypes of another; a label of the graph is -100.

    Values, which come with weights, have a weight of 0.
    """
    empty = graph.subgraph(torch.zeros(graph.num_nodes or 0, dtype=torch.bool))
    empty.y = torch.full_like(empty.y, 0.0 if empty.y.is_floating_point() else -100)
    return empty


def edges_of(graphs: Sequence[Data]) -> Tensor:
    """Return the number of edges of each graph [G], the cost of training on it."""
    return torch.tensor([graph.num_edges for graph in graphs])


def shared_loader(
    graphs: Sequence[Data], group: Group, *, batch_size: int, shuffle: bool, generator: torch.Generator, **options: Any
) -> DataLoader:
    """Return PyG's DataLoader over this process's shares; it draws from `generator` as the loader of one process does.

    Args:
        graphs: Graphs, equal on every process.
        group: Processes that share each batch.
        batch_size: Batch size of all processes together.
        shuffle: Whether each epoch has a new order.
        generator: Generator in the same state on every process.
        **options: Further arguments of the loader.
    """
    sampler: Sampler[int] = RandomSampler(graphs, generator=generator) if shuffle else SequentialSampler(graphs)
    batches = SharedBatches(sampler, batch_size, group, len(graphs), edges_of(graphs))
    return DataLoader([*graphs, empty_graph(graphs[0])], batch_sampler=batches, generator=generator, **options)
