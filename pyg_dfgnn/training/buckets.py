"""Batches of graphs at fixed addresses and sizes, so that one captured step serves many of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import norm as graph_norms

from pyg_dfgnn.graph import Frame, Graph
from pyg_dfgnn.nn.fused import FusedConv
from pyg_dfgnn.training.metrics import IGNORED

# Room of a bucket beyond its first batch: this many standard deviations of a sum of so many graphs, and this share.
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


class CountedBatchNorm(nn.BatchNorm1d):
    """`BatchNorm1d` whose statistics in training are those of the rows that count; made by :class:`Buckets`.

    Attributes:
        counted: 1 for rows that count and 0 for others, [N, 1]; None: all rows count.
    """

    counted: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalised `x [N, C]`."""
        if self.counted is None or not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = self.counted.sum()
        mean = (wide * self.counted).sum(dim=0) / count
        centred = (wide - mean) * self.counted
        variance = centred.square().sum(dim=0) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                self.running_mean += momentum * (mean - self.running_mean)
                self.running_var += momentum * (variance * count / (count - 1) - self.running_var)
        normal = centred * (variance + self.eps).rsqrt()
        return (normal * self.weight + self.bias if self.affine else normal).to(x.dtype)


class Bucket:
    """Room for batches: tensors of fixed size whose rows behind a batch stand for isolated nodes without labels.

    Args:
        batch: The first batch; decides how much room there is.
        graph: Its graph, if the convs are ours.
        graph_level: Whether labels belong to graphs.

    Attributes:
        batch: What a step is captured on.
    """

    def __init__(self, batch: Data, graph: Graph | None, graph_level: bool) -> None:
        sizes = batch.ptr.diff().double()
        count = sizes.numel()
        # Edges of dense graphs vary twice as much as nodes.
        spread = float(sizes.std() / sizes.mean()) if count > 1 else 1.0
        slack = _DEVIATIONS * spread / count**0.5 + _SHARE
        assert batch.num_nodes is not None
        self.num_nodes = -(-int(batch.num_nodes * (1 + slack) + 1) // 64) * 64
        self.num_edges = -(-int(batch.num_edges * (1 + 2 * slack) + 1) // 64) * 64
        # The last graph holds what is behind the batch.
        self.num_graphs = count + 1
        self.graph_level = graph_level
        self.batch = Data(edge_index=batch.edge_index.new_empty(2, self.num_edges))
        for name in ("x", "pe"):
            if name in batch:
                self.batch[name] = batch[name].new_zeros(self.num_nodes, *batch[name].shape[1:])
        self.batch.y = batch.y.new_empty(self.num_graphs if graph_level else self.num_nodes)
        if graph_level:
            self.batch.batch = batch.batch.new_empty(self.num_nodes)
        self.counted = torch.zeros(self.num_nodes, 1, device=batch.x.device)
        self.frame = None
        if graph is not None:
            self.frame = Frame(graph, self.batch.edge_index, self.num_nodes, self.num_graphs)

    def takes(self, batch: Data, graph: Graph | None) -> bool:
        """Whether a batch has room."""
        assert batch.num_nodes is not None
        return (
            batch.num_nodes < self.num_nodes
            and batch.num_edges <= self.num_edges
            and batch.num_graphs < self.num_graphs
            and (self.frame is None or graph is None or self.frame.takes(graph))
        )

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
        self.counted[: batch.num_nodes] = 1
        self.counted[batch.num_nodes :] = 0
        if self.frame is not None:
            assert graph is not None
            self.frame.put(graph)


class Buckets:
    """The buckets of a run: each batch goes to the smallest one that has room, or to a new one.

    Args:
        model: Its batch norms become :class:`CountedBatchNorm`, in place.
        graph_level: Whether labels belong to graphs.

    Raises:
        ValueError: A layer of the model compares nodes in a way that isolated ones would change.
    """

    def __init__(self, model: nn.Module, graph_level: bool) -> None:
        for module in model.modules():
            if type(module) is nn.BatchNorm1d:
                module.__class__ = CountedBatchNorm
        self.norms = [module for module in model.modules() if isinstance(module, CountedBatchNorm)]
        for module in model.modules():
            if isinstance(module, _REFUSED) and module not in self.norms:
                raise ValueError(f"'model' needs BatchNorm1d or LayerNorm with padding (got {type(module).__name__})")
        self.graph_level = graph_level
        self.has_kernels = any(isinstance(module, FusedConv) for module in model.modules())
        self.found: list[Bucket] = []

    def place(self, batch: Data) -> Bucket:
        """Put a batch into a bucket.

        Raises:
            ValueError: The model's convs are ours, and the graphs did not go through `SortEdges`.
        """
        graph = Graph.of_batch(batch) if self.has_kernels else None
        able = [bucket for bucket in self.found if bucket.takes(batch, graph)]
        if not able:
            able = [Bucket(batch, graph, self.graph_level)]
            self.found += able
        bucket = min(able, key=lambda each: (each.num_nodes, each.num_edges))
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
