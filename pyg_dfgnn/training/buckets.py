"""Batches of graphs at fixed addresses and sizes, so that one captured step serves many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.data import Data
from torch_geometric.nn import norm as graph_norms

from pyg_dfgnn.errors import check_range
from pyg_dfgnn.graph import Frame, Graph
from pyg_dfgnn.nn.gate import FusedConv
from pyg_dfgnn.training.metrics import IGNORED

# Room beyond the mean batch: this many standard deviations and this share of it, and twice as much per level.
_DEVIATIONS, _SHARE = 3.0, 1 / 64
# These compare the nodes of a graph or batch, isolated ones included.
_REFUSED = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    graph_norms.GraphNorm,
    graph_norms.PairNorm,
    graph_norms.MeanSubtractionNorm,
    graph_norms.DiffGroupNorm,
)


class Counted:
    """Which rows of a bucket hold a batch, in the forms that norms need; always at the same addresses.

    Args:
        num_rows: Rows of the bucket.
        like: Of the features; low precision counts in float32.

    Attributes:
        rows: 1 for rows that count and 0 for others, [N, 1].
        share: `rows` over their number n, [N, 1].
        inverse: 1 / n, [].
        unbiased: n / (n - 1), [].
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        options: dict[str, Any] = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        self.rows, self.share = (torch.zeros(num_rows, 1, **options) for _ in range(2))
        self.inverse, self.unbiased = (torch.zeros((), **options) for _ in range(2))

    def set(self, count: int) -> None:
        """Let the first rows count."""
        for tensor, value in ((self.rows, 1.0), (self.share, 1 / count)):
            tensor[:count] = value
            tensor[count:] = 0
        self.inverse.fill_(1 / count)
        self.unbiased.fill_(count / max(count - 1, 1))


class CountedBatchNorm(nn.BatchNorm1d):
    """`BatchNorm1d` whose statistics in training are those of the rows that count; made by :class:`Buckets`.

    Attributes:
        counted: Which rows count; None: all.
    """

    counted: Counted | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalised `x [N, C]`."""
        if self.counted is None or not self.training:
            return super().forward(x)
        out, mean, variance = _Normalize.apply(x, self.weight, self.bias, self.counted, self.eps)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((variance * self.counted.unbiased).to(self.running_var.dtype), momentum)
        return out


class _Normalize(torch.autograd.Function):
    """Few kernels each way: there are many norms in a step on little data. Rows that do not count get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, counted: Counted, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(counted.rows.dtype)
        mean = (wide * counted.share).sum(dim=0)
        centred = (wide - mean).mul_(counted.rows)
        variance = torch.linalg.vector_norm(centred, dim=0).square_().mul_(counted.inverse)
        deviation = (variance + eps).rsqrt_()
        scale = deviation if weight is None else deviation * weight
        out = centred * scale if bias is None else torch.addcmul(bias, centred, scale)
        ctx.save_for_backward(centred, deviation, scale)
        ctx.counted = counted
        ctx.mark_non_differentiable(mean, variance)
        return out.to(x.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        centred, deviation, scale = ctx.saved_tensors
        counted, needed = ctx.counted, ctx.needs_input_grad
        grad_out = grad * counted.rows
        total, along = grad_out.sum(dim=0), (grad_out * centred).sum(dim=0)
        grad_x = None
        if needed[0]:
            slope = deviation.square().mul_(along).mul_(counted.inverse)
            grad_x = torch.addcmul(grad_out, centred, slope, value=-1)
            grad_x = grad_x.addcmul_(counted.share, total, value=-1).mul_(scale).to(grad.dtype)
        return grad_x, along * deviation if needed[1] else None, total if needed[2] else None, None, None


@dataclass(frozen=True)
class Room:
    """What batches of some graphs need, which decides the sizes of their buckets: in each run the same.

    Attributes:
        num_graphs: Most graphs of a batch.
        nodes: Mean and standard deviation of the nodes of such a batch.
        edges: The same of its edges.
    """

    num_graphs: int
    nodes: tuple[float, float]
    edges: tuple[float, float]

    @staticmethod
    def of(graphs: Sequence[Data], batch_size: int) -> Room:
        """The room of batches of so many graphs out of these, drawn at random.

        Raises:
            ValueError: There are no graphs, or `batch_size` is below 1.
        """
        check_range("batch_size", batch_size, 1)
        check_range("len(graphs)", len(graphs), 1)
        sizes = torch.tensor([[graph.num_nodes, graph.num_edges] for graph in graphs], dtype=torch.float64)
        means = (batch_size * sizes.mean(dim=0)).tolist()
        deviations = (batch_size**0.5 * sizes.std(dim=0, correction=0)).tolist()
        nodes, edges = zip(means, deviations)
        return Room(batch_size, nodes, edges)

    def sizes(self, level: int) -> tuple[int, int]:
        """Nodes and edges of the buckets of a level, of which 0 takes nearly every batch."""
        nodes, edges = (
            -(-int(mean + 2**level * (_DEVIATIONS * deviation + _SHARE * mean) + 1) // 64) * 64
            for mean, deviation in (self.nodes, self.edges)
        )
        return nodes, edges

    def level(self, batch: Data) -> int:
        """The first level with room for a batch and for one more node."""
        assert batch.num_nodes is not None
        level = 0
        while batch.num_nodes >= self.sizes(level)[0] or batch.num_edges > self.sizes(level)[1]:
            level += 1
        return level


class Bucket:
    """Room for batches: tensors of fixed size whose rows behind a batch stand for isolated nodes without labels.

    Args:
        batch: The first batch.
        graph: Its graph, if the convs are ours.
        graph_level: Whether labels belong to graphs.
        room: Of all batches.
        level: How much of it.

    Attributes:
        batch: What a step is captured on.
    """

    def __init__(self, batch: Data, graph: Graph | None, graph_level: bool, room: Room, level: int) -> None:
        self.level = level
        self.num_nodes, self.num_edges = room.sizes(level)
        # The last graph holds what is behind the batch.
        self.num_graphs = room.num_graphs + 1
        self.graph_level = graph_level
        self.batch = Data(edge_index=batch.edge_index.new_empty(2, self.num_edges))
        for name in ("x", "pe"):
            if name in batch:
                self.batch[name] = batch[name].new_zeros(self.num_nodes, *batch[name].shape[1:])
        self.batch.y = batch.y.new_empty(self.num_graphs if graph_level else self.num_nodes)
        if graph_level:
            self.batch.batch = batch.batch.new_empty(self.num_nodes)
        self.counted = Counted(self.num_nodes, batch.x)
        self.frame = None
        if graph is not None:
            self.frame = Frame(graph, self.batch.edge_index, self.num_nodes, self.num_graphs)

    def takes(self, graph: Graph | None, level: int) -> bool:
        """Whether it is of the level of a batch with this graph and has room."""
        return level == self.level and (self.frame is None or graph is None or self.frame.takes(graph))

    def put(self, batch: Data, graph: Graph | None) -> None:
        """Put a batch in that :meth:`takes` has nothing against."""
        fill = {"x": 0, "pe": 0, "y": IGNORED, "batch": self.num_graphs - 1}
        for name, rest in fill.items():
            if name in self.batch:
                mine, theirs = self.batch[name], batch[name]
                mine[: theirs.size(0)] = theirs
                mine[theirs.size(0) :] = rest
        self.batch.edge_index[:, : batch.num_edges] = batch.edge_index
        self.batch.edge_index[:, batch.num_edges :] = self.num_nodes - 1
        assert batch.num_nodes is not None
        self.counted.set(batch.num_nodes)
        if self.frame is not None:
            assert graph is not None
            self.frame.put(graph)


class Buckets:
    """The buckets of a run: each batch goes to one of its level that has room, or to a new one.

    So the sizes that a model sees for a batch, and what it draws for them, do not depend on the batches before.

    Args:
        model: Its batch norms become :class:`CountedBatchNorm`, in place.
        graph_level: Whether labels belong to graphs.
        room: Of all batches.

    Raises:
        ValueError: A layer of the model compares nodes in a way that isolated ones would change.
    """

    def __init__(self, model: nn.Module, graph_level: bool, room: Room) -> None:
        for module in model.modules():
            if type(module) is nn.BatchNorm1d:
                module.__class__ = CountedBatchNorm
        self.norms = [module for module in model.modules() if isinstance(module, CountedBatchNorm)]
        for module in model.modules():
            if isinstance(module, _REFUSED) and module not in self.norms:
                raise ValueError(f"'model' needs BatchNorm1d or LayerNorm with padding (got {type(module).__name__})")
        self.graph_level, self.room = graph_level, room
        self.has_kernels = any(isinstance(module, FusedConv) for module in model.modules())
        self.found: list[Bucket] = []

    def place(self, batch: Data) -> Bucket:
        """Put a batch into a bucket.

        Raises:
            ValueError: The batch has more graphs than there is room for, or the model's convs are ours and the graphs
                did not go through `SortEdges`.
        """
        check_range("num_graphs", batch.num_graphs, 1, self.room.num_graphs)
        graph = Graph.of_batch(batch) if self.has_kernels else None
        level = self.room.level(batch)
        bucket = next((bucket for bucket in self.found if bucket.takes(graph, level)), None)
        if bucket is None:
            bucket = Bucket(batch, graph, self.graph_level, self.room, level)
            self.found.append(bucket)
        bucket.put(batch, graph)
        return bucket

    @contextmanager
    def active(self, bucket: Bucket) -> Iterator[Data]:
        """What a model computes on the bucket's batch here leaves out what is behind it."""
        if bucket.frame is not None:
            bucket.frame.register()
        for module in self.norms:
            module.counted = bucket.counted
        try:
            yield bucket.batch
        finally:
            for module in self.norms:
                module.counted = None
