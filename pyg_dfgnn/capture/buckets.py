"""Batches of graphs at fixed addresses and sizes, so that one captured step serves many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import norm as graph_norms

from pyg_dfgnn.errors import check_device, check_dtype, check_range, check_shape
from pyg_dfgnn.graph import DeviceDataset, RefilledGraph, StaticGroups
from pyg_dfgnn.graph.forms import INDEX_DTYPES
from pyg_dfgnn.ops.graph import refill, reports
from pyg_dfgnn.ops.masked_norm import RowMask, Running, masked_norm
from pyg_dfgnn.ops.visits import refilled
from pyg_dfgnn.torch_private import BatchNormBase, InstanceNormBase, foreach_copy, tree_map_only

IGNORED = -100
"""Label that losses and metrics leave out, such as of padding; torch's default `ignore_index`."""
# A bucket has edges of its own, and no offsets of graphs.
_NOT_COPIED = ("edge_index", "num_nodes", "ptr")
# A bucket exceeds the mean batch by this many standard deviations plus this share of it, doubled with each level.
_DEVIATIONS, _SHARE = 3.0, 1 / 64
# These norms compare the nodes of a graph or batch, so that padding would change their statistics.
_REFUSED = (
    BatchNormBase,
    InstanceNormBase,
    graph_norms.GraphNorm,
    graph_norms.PairNorm,
    graph_norms.MeanSubtractionNorm,
    graph_norms.DiffGroupNorm,
)


class MaskedBatchNorm(nn.BatchNorm1d):
    """`BatchNorm1d` whose statistics in training leave out padding; :class:`Buckets` turns a model's norms into it.

    Attributes:
        mask: Which rows hold the batch; None: all.
    """

    mask: RowMask | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [N, C]`."""
        if self.mask is None or not self.training:
            return super().forward(x)
        running = None
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            running = Running(self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)
        return masked_norm(x, self.weight, self.bias, self.mask, running, self.eps)


@dataclass(frozen=True)
class Capacity:
    """Sizes of the batches of a data set, which decide the sizes of its buckets in every run alike.

    Attributes:
        num_graphs: Largest number of graphs in a batch.
        nodes: Mean and standard deviation of the number of nodes in such a batch.
        edges: Mean and standard deviation of the number of edges in such a batch.
    """

    num_graphs: int
    nodes: tuple[float, float]
    edges: tuple[float, float]

    @staticmethod
    def of(graphs: Sequence[Data] | DeviceDataset, batch_size: int) -> Capacity:
        """Return the capacity for batches of `batch_size` graphs drawn at random from these.

        Raises:
            ValueError: There are no graphs, or `batch_size` is below 1.
        """
        check_range("batch_size", batch_size, 1)
        check_range("len(graphs)", len(graphs), 1)
        if isinstance(graphs, DeviceDataset):
            sizes = torch.stack([graphs.nodes, graphs.edges], dim=1).double()
        else:
            sizes = torch.tensor([[graph.num_nodes, graph.num_edges] for graph in graphs], dtype=torch.float64)
        means = (batch_size * sizes.mean(dim=0)).tolist()
        deviations = (batch_size**0.5 * sizes.std(dim=0, correction=0)).tolist()
        nodes, edges = zip(means, deviations)
        return Capacity(batch_size, nodes, edges)

    def sizes(self, level: int) -> tuple[int, int]:
        """Return nodes and edges of the buckets of a level; nearly every batch fits level 0."""
        nodes, edges = (
            -(-int(mean + 2**level * (_DEVIATIONS * deviation + _SHARE * mean) + 1) // 64) * 64
            for mean, deviation in (self.nodes, self.edges)
        )
        return nodes, edges

    def level(self, batch: Data) -> int:
        """Return the lowest level whose buckets hold a batch and one more node."""
        assert batch.num_nodes is not None
        level = 0
        while batch.num_nodes >= self.sizes(level)[0] or batch.num_edges > self.sizes(level)[1]:
            level += 1
        return level


def levels_of(batch: Data) -> dict[str, str]:
    """Return along what each tensor of a batch that buckets copy has its rows: "node", "edge" or "graph".

    Raises:
        ValueError: A tensor has its rows along nothing of these.
    """
    sizes = {"node": batch.num_nodes, "graph": batch.num_graphs, "edge": batch.num_edges}
    levels = {}
    for name, value in batch:
        if isinstance(value, Tensor) and name not in _NOT_COPIED:
            order = ("edge", "node", "graph") if "edge" in name else ("node", "graph", "edge")
            matching = [level for level in order if value.dim() and value.size(0) == sizes[level]]
            if not matching:
                need = "one row per node, edge or graph, or to be removed from graphs whose batches are padded"
                raise ValueError(f"'data.{name}' needs {need} (got {list(value.shape)})")
            levels[name] = matching[0]
    return levels


class Bucket:
    """Tensors of fixed size that hold one batch after another; padding stands for isolated nodes without labels.

    Args:
        batch: The first batch, whose attributes the bucket has.
        capacity: Sizes of the batches.
        level: Level of the bucket in `capacity`.

    Attributes:
        batch: Padded batch that a step is captured on.
        is_checked: Whether the loss was seen to leave out padding.
    """

    def __init__(self, batch: Data, capacity: Capacity, level: int) -> None:
        self.is_checked = False
        self.num_nodes, self.num_edges = capacity.sizes(level)
        # The last graph holds the padding. Rows tell by their number whether they are nodes or graphs.
        self.num_graphs = capacity.num_graphs + (2 if capacity.num_graphs + 1 == self.num_nodes else 1)
        self.levels = levels_of(batch)
        self.sizes = {"node": self.num_nodes, "edge": self.num_edges, "graph": self.num_graphs}
        self.filled = dict(self.sizes)
        self.batch = Batch(_base_cls=Data, edge_index=batch.edge_index.new_empty(2, self.num_edges))
        for name, kind in self.levels.items():
            self.batch[name] = batch[name].new_empty(self.sizes[kind], *batch[name].shape[1:])
        # Attributes of a batch are looked up slowly.
        self.rooms = [(name, kind, self.batch[name]) for name, kind in self.levels.items()]
        self.batch.num_nodes, self.batch._num_graphs = self.num_nodes, self.num_graphs
        self.groups = StaticGroups(self.batch.batch, self.num_graphs)
        self.batch_sizes = self.batch.edge_index.new_zeros(2, dtype=torch.int64)
        self.mask = RowMask(self.num_nodes, self.batch_sizes[1:])
        self.graphs: list[RefilledGraph] = []
        edge_index = self.batch.edge_index
        if edge_index.dtype in INDEX_DTYPES:
            sizes = self.batch_sizes, self.num_nodes
            kinds = [(loops, transposed) for loops in (False, True) for transposed in (False, True)]
            self.graphs = [RefilledGraph(edge_index, *sizes, *kind, refill) for kind in kinds]

    def __repr__(self) -> str:
        return f"Bucket({self.num_graphs} graphs, {self.num_nodes} nodes, {self.num_edges} edges)"

    def put(self, batch: Data) -> None:
        """Copy a batch of the bucket's level into the tensors, and fill the rest with padding.

        Raises:
            TypeError: An attribute of the first batch is missing, or of another dtype.
            ValueError: It has another shape.
        """
        counts = {"node": batch.num_nodes, "edge": batch.num_edges, "graph": batch.num_graphs}
        edge_index = self.batch.edge_index
        rooms, values = [edge_index[:, : counts["edge"]]], [batch.edge_index]
        for name, kind, room in self.rooms:
            value, rows = batch.get(name), counts[kind]
            if not isinstance(value, Tensor) or value.shape != (rows, *room.shape[1:]):
                spec = f"{[rows, *room.shape[1:]]}, as in the first batch"
                check_shape(f"data.{name}", value, (rows, *room.shape[1:]), spec)
            check_dtype(f"data.{name}", value, room.dtype)
            rooms.append(room[:rows])
            values.append(value)
        foreach_copy(rooms, values)
        # Rows behind the previous batch hold padding already.
        for name, kind, room in self.rooms:
            if counts[kind] < self.filled[kind]:
                room[counts[kind] : self.filled[kind]] = self._padding(name, room)
        if counts["edge"] < self.filled["edge"]:
            edge_index[:, counts["edge"] : self.filled["edge"]] = self.num_nodes - 1
        self.filled = counts
        for place, kind in enumerate(("edge", "node")):
            self.batch_sizes[place].fill_(counts[kind])

    def register(self) -> None:
        """Let layers find what belongs to the tensors as they are now."""
        self.groups.register(self.batch.batch)
        for graph in self.graphs:
            graph.register()

    def refill(self) -> None:
        """Launch what each step, also a replayed one, makes of a batch before its layers."""
        self.groups.refill(self.batch.batch)
        for graph in self.graphs:
            graph.refill()

    def rows(self, output: Any, batch: Data) -> Any:
        """Return the rows of an output on the bucket that belong to a batch."""
        counts = {self.num_nodes: batch.num_nodes, self.num_graphs: batch.num_graphs}
        return tree_map_only(Tensor, lambda t: t[: counts.get(t.size(0))] if t.dim() else t, output)

    def _padding(self, name: str, room: Tensor) -> int:
        if name == "batch":
            return self.num_graphs - 1
        is_label = name == "y" and room.dtype != torch.bool and not room.is_floating_point()
        return IGNORED if is_label else 0


class Buckets:
    """The buckets of a run; each batch goes to a bucket of its own level.

    The padded sizes of a batch, and with them the random numbers drawn for it, do not depend on earlier batches.

    Args:
        model: Model whose batch norms become :class:`MaskedBatchNorm`, in place.
        capacity: Sizes of the batches.

    Raises:
        ValueError: A norm of the model compares nodes in a way that padding would change.
    """

    def __init__(self, model: nn.Module, capacity: Capacity) -> None:
        for module in model.modules():
            if type(module) is nn.BatchNorm1d:
                module.__class__ = MaskedBatchNorm
        self.norms = [module for module in model.modules() if isinstance(module, MaskedBatchNorm)]
        for module in model.modules():
            if isinstance(module, _REFUSED) and module not in self.norms:
                raise ValueError(f"'model' needs BatchNorm1d or LayerNorm with padding (got {type(module).__name__})")
        self.device = next(model.parameters()).device
        self.capacity = capacity
        self.buckets: dict[int, Bucket] = {}

    def move(self, batch: Data) -> Data:
        """Return a batch on the model's device; one that is on another GPU stays there."""
        return batch.to(self.device, non_blocking=True) if batch.edge_index.device.type == "cpu" else batch

    def place(self, batch: Data) -> Bucket:
        """Put a batch on the device into a bucket.

        Raises:
            TypeError: An attribute is missing or of another dtype than in the first batch, or it is no Batch.
            ValueError: The batch has too many graphs or tensors of other shapes.
            IdRangeError: An id of an earlier batch is out of range.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"'data' needs a Batch of graphs (got {type(batch).__name__})")
        check_device("data.edge_index", batch.edge_index, self.device)
        check_range("num_graphs", batch.num_graphs, 1, self.capacity.num_graphs)
        reports(self.device.type).check()
        level = self.capacity.level(batch)
        bucket = self.buckets.get(level)
        if bucket is None:
            bucket = self.buckets[level] = Bucket(batch, self.capacity, level)
        bucket.put(batch)
        return bucket

    @contextmanager
    def active(self, bucket: Bucket) -> Iterator[Data]:
        """A block in which the model leaves out the padding of a bucket; yields the padded batch."""
        bucket.register()
        for module in self.norms:
            module.mask = bucket.mask
        try:
            with refilled():
                yield bucket.batch
        finally:
            for module in self.norms:
                module.mask = None
