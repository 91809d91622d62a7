"""Batches for training: one whole graph, graphs collated on host or device, sampled neighbours, or queries of links."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch.utils.data import RandomSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader

from pyg_dfgnn.datasets import Task
from pyg_dfgnn.distributed import Group, SharedBatches, edges_of, empty_graph, own_share, shared_loader
from pyg_dfgnn.errors import check_integer, how_to_install
from pyg_dfgnn.graph import DeviceDataset
from pyg_dfgnn.training.metrics import IGNORED

# Graphs stay on a GPU by default if they take at most this share of its memory.
_RESIDENT_SHARE = 0.25
READ = ("x", "pe", "edge_index", "edge_attr", "y")
"""Attributes of a graph that a step reads, edge features only where the model takes them."""


class Batches:
    """The batches of a split, on the device that uses them.

    Args:
        source: Iterable of batches on the host or on the device.
        prepare: Function that moves a batch to the device and completes it.
        device: Device that uses the batches.
        prefetch: Make each batch on a separate stream while the device works on the previous one.

    Attributes:
        host_s: Seconds that the host has spent on making batches.
    """

    def __init__(
        self, source: Any, prepare: Callable[[Data], Data], device: torch.device, *, prefetch: bool = False
    ) -> None:
        self.source, self.prepare, self.device = source, prepare, device
        self.stream = torch.cuda.Stream(device) if prefetch and device.type == "cuda" else None
        self.host_s = 0.0

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Data]:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        source = iter(self.source)
        while True:
            started = time.perf_counter()
            # The host does not wait for the step on the previous batch, which is running.
            with torch.cuda.stream(self.stream):
                batch = next(source, None)
                if batch is None:
                    return
                batch = self.prepare(batch)
            if self.stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self.stream)
                # The memory belongs to the other stream, which must not reuse it while this one reads.
                batch.record_stream(current)
            self.host_s += time.perf_counter() - started
            yield batch


class DeviceLoader:
    """Batches of graphs that stay on the device; only the indices of a batch are moved there.

    Args:
        graphs: Graphs of one split.
        batch_size: Graphs of a batch; the last batch may have fewer.
        device: Device of the graphs.
        order: Generator of the permutation of each epoch; None keeps the order.
        group: Processes that share each batch.

    Raises:
        ValueError: `batch_size` is smaller than the number of processes.
    """

    def __init__(
        self,
        graphs: list[Data],
        batch_size: int,
        device: torch.device,
        order: torch.Generator | None = None,
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        check_integer("batch_size", batch_size, self.group.size)
        self.count, self.batch_size, self.order = len(graphs), batch_size, order
        self.costs = edges_of(graphs)
        # A process without a share of a short last batch takes the empty graph.
        self.graphs = DeviceDataset(graphs if self.group.size == 1 else [*graphs, empty_graph(graphs[0])], device)

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Data]:
        ids = torch.arange(self.count) if self.order is None else torch.randperm(self.count, generator=self.order)
        for batch in ids.split(self.batch_size):
            own = own_share(batch, self.group, self.costs)
            yield self.graphs.batch(own if len(own) else torch.tensor([self.count]))


def whole_graph(task: Task, device: torch.device) -> dict[str, Any]:
    """Return the one graph of a task on the device, once per split with only the labels of that split."""
    # PyG moves a graph in place, but a sampler needs it on the host.
    on_device = task.map(lambda graph: copy.copy(graph).to(device))
    return {split: [labelled(graph, split)] for split, (graph,) in on_device.splits.items()}


def labelled(graph: Data, split: str) -> Data:
    """Return the graph with only the labels of one split; other tensors are shared."""
    graph, mask = copy.copy(graph), getattr(graph, f"{split}_mask")
    graph.y = graph.y.masked_fill(~mask.view(-1, *[1] * (graph.y.dim() - 1)), no_label(graph.y))
    return graph


def no_label(y: Tensor) -> float:
    """Return what stands for no label: -100 among classes, and a weight of 0 among values."""
    return 0.0 if y.is_floating_point() else IGNORED


def weighted(graph: Data) -> Data:
    """Return a graph whose values `y [N]` come with their weights, 1 each, `[N, 2]`: what is not a label has 0."""
    graph = copy.copy(graph)
    graph.y = torch.stack([graph.y, torch.ones_like(graph.y)], dim=1)
    return graph


class QueryLoader:
    """Batches of queries for links, each with the whole graph on the device.

    Args:
        graph: Graph of one split of a task of links, on the device.
        batch_size: Queries of a batch; the last batch may have fewer.
        num_relations: Number of relations.
        order: Generator of the permutation of each epoch; None keeps the order.
    """

    def __init__(self, graph: Data, batch_size: int, num_relations: int, order: torch.Generator | None = None) -> None:
        self.graph, self.batch_size, self.num_relations, self.order = graph, batch_size, num_relations, order

    def __len__(self) -> int:
        return -(-self.graph.y.numel() // self.batch_size)

    def __iter__(self) -> Iterator[Data]:
        count, device = self.graph.y.numel(), self.graph.y.device
        ids = torch.arange(count) if self.order is None else torch.randperm(count, generator=self.order)
        for part in ids.split(self.batch_size):
            batch, rows = copy.copy(self.graph), part.to(device)
            batch.queries, batch.y = self.graph.queries[rows], self.graph.y[rows]
            if "known" in batch:
                batch.known = self._known(batch)
            yield batch

    def _known(self, batch: Data) -> Tensor:
        """The true answers of each query but the one that is asked for: positions in the scores `[Q, N]`, [2, K]."""
        keys, answers = batch.known
        node, relation = batch.queries.unbind(dim=1)
        wanted = node * self.num_relations + relation
        first, last = (torch.searchsorted(keys, wanted, right=right) for right in (False, True))
        counts = last - first
        row = torch.arange(len(wanted), device=wanted.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        answer = answers[first[row] + place]
        return torch.stack([row, answer])[:, answer != batch.y[row]]


def query_batches(
    task: Task, device: torch.device, options: Mapping[str, Any], order: torch.Generator
) -> dict[str, Batches]:
    """Return batches of the queries of each split.

    Args:
        task: Task of links.
        device: Device that uses the batches.
        options: `batch_size`, the number of queries of a batch.
        order: Generator of the order of the training queries.
    """
    on_device = task.map(lambda graph: copy.copy(graph).to(device))
    # The splits have the edges of one tensor, so that what is derived from them is made once.
    edges = {name: on_device.splits["train"][0][name] for name in ("edge_index", "edge_type")}
    batches = {}
    for split, (graph,) in on_device.splits.items():
        graph.update(edges)
        loader = QueryLoader(graph, options["batch_size"], task.num_relations, order if split == "train" else None)
        batches[split] = Batches(loader, _unchanged, device)
    return batches


def graph_batches(
    task: Task,
    device: torch.device,
    options: Mapping[str, Any],
    order: torch.Generator,
    group: Group,
    *,
    resident: bool | None,
    prefetch: bool,
) -> dict[str, Batches]:
    """Return mini-batches of the graphs of each split.

    Args:
        task: Task of many graphs.
        device: Device that uses the batches.
        options: Arguments of PyG's DataLoader.
        order: Generator of the order of the training graphs.
        group: Processes that share each batch.
        resident: Keep all graphs on the device and gather batches there; None: if a GPU has enough memory.
        prefetch: As in :class:`Batches`.
    """
    # What no step reads is neither gathered nor padded.
    task = task.map(lambda graph: Data(**{name: graph[name] for name in READ if name in graph}))
    if resident is None:
        resident = device.type == "cuda" and _fits(task, device)
    if resident:
        size, prepare = options["batch_size"], _unchanged
        sources: dict[str, Any] = {
            split: DeviceLoader(graphs, size, device, order if split == "train" else None, group)
            for split, graphs in task.splits.items()
        }
    else:
        options = {"pin_memory": device.type == "cuda", "generator": order, **options}
        make = DataLoader if group.size == 1 else partial(shared_loader, group=group)
        sources = {split: make(graphs, shuffle=split == "train", **options) for split, graphs in task.splits.items()}
        prepare = partial(Data.to, device=device, non_blocking=True)
    return {split: Batches(source, prepare, device, prefetch=prefetch) for split, source in sources.items()}


def check_sampling() -> None:
    """Check that PyG has a library to sample neighbours with.

    Raises:
        ValueError: It has none.
    """
    if not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE):
        what = "'trainer.sampler' needs pyg-lib or torch_sparse for PyG's NeighborLoader (neither is installed)"
        raise ValueError(f"{what}: {how_to_install('sparse')}")


def sampled(
    graph: Data, device: torch.device, options: Mapping[str, Any], order: torch.Generator, group: Group
) -> NeighborLoader:
    """Return mini-batches of training nodes with sampled neighbours.

    Args:
        graph: Whole graph on the CPU.
        device: Device that uses the batches.
        options: `num_neighbors`, `batch_size` and other arguments of PyG's NeighborLoader.
        order: Generator of the order of the training nodes.
        group: Processes that share each batch of training nodes.

    Raises:
        ValueError: PyG has no library to sample with.
    """
    check_sampling()
    options = {"pin_memory": device.type == "cuda", "generator": order, **options}
    nodes = graph.train_mask.nonzero().view(-1)
    if group.size == 1:
        return NeighborLoader(graph, input_nodes=nodes, shuffle=True, **options)
    # A process without a share of a short last batch takes the additional node, which Seeds ignores.
    sampler = RandomSampler(range(len(nodes)), generator=order)
    batches = SharedBatches(sampler, options.pop("batch_size"), group, filler=len(nodes))
    return NeighborLoader(graph, input_nodes=torch.cat([nodes, nodes[:1]]), batch_sampler=batches, **options)


class Seeds:
    """Move a batch of sampled neighbours to the device and drop the labels of the neighbours.

    Args:
        device: Device that uses the batch.
        count: Number of training nodes; a seed with this index is a filler whose label is dropped too.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.count = device, count

    def __call__(self, batch: Data) -> Data:
        seeds = 0 if int(batch.input_id[0]) == self.count else batch.batch_size
        batch = batch.to(self.device, non_blocking=True)
        batch.y = batch.y.clone()
        batch.y[seeds:] = no_label(batch.y)
        return batch


def _unchanged(batch: Data) -> Data:
    return batch


def _fits(task: Task, device: torch.device) -> bool:
    """Return whether all graphs take a small share of the device's memory."""
    graphs = [graph for part in task.splits.values() for graph in part]
    num_bytes = sum(value.nbytes for graph in graphs for _, value in graph if isinstance(value, torch.Tensor))
    return num_bytes <= _RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory
