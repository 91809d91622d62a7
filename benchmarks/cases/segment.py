"""The aggregation family as data: what each operation computes of the edges, and how other packages compute it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MultiAggregation
from torch_geometric.nn.resolver import aggregation_resolver

from benchmarks.case import DTYPES, Call, Case, Family, Forward, Fused, Implementation, TorchCompiled
from benchmarks.cases.sparse import Sparse
from pyg_dfgnn.dispatch.segment import FAMILY, SegmentProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.segment import aggregate
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.statements.segment import SUMS

DTYPES_OF_BASELINES = ("float32", "bfloat16")
AGGREGATIONS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("sum", "mean", "max")},
    "statistics": ("mean", "max", "min", "std"),
    "weight": ("sum",),
}
"""Name of an operation -> statistics that are asked for; 'weight' gives each edge a weight with a gradient."""


@dataclass(frozen=True)
class SegmentCase(Case):
    """One operation on features of one width."""

    form = r"[1-9]\d*", "numbers of features, such as [64,128]"
    titles = {name: "+".join(stats) for name, stats in AGGREGATIONS.items()} | {"weight": "weighted sum"}
    family = "segment"
    dispatched = FAMILY
    backward = ("sources",)

    @property
    def stats(self) -> tuple[str, ...]:
        return AGGREGATIONS[self.op]

    @property
    def message(self) -> str:
        return "weight" if self.op == "weight" else "copy"

    @property
    def channels(self) -> int:
        return int(self.size)

    @property
    def width(self) -> int:
        return self.channels * len(self.stats)

    @property
    def reads_inputs_again(self) -> bool:
        return self.message == "weight" or not set(self.stats) <= set(SUMS)

    def roles(self, graph: EdgeList) -> dict[str, str]:
        return {"x": "src", "edge": "edge"} if self.message == "weight" else {"x": "src"}

    def shapes(self, graph: EdgeList) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"x": (graph.num_src, self.channels), "edge": (graph.num_edges,)}
        return {name: shapes[name] for name in self.roles(graph)}

    def make_inputs(self, graph: EdgeList) -> Inputs:
        """Multiples of 1/64 without 0.

        Then few deviations are small enough for their gradient, which grows like their inverse, to lose all digits; and
        no extreme is 0, where torch's scatter_reduce shares the gradient with its initial value.
        """
        generator = torch.Generator(device=graph.device).manual_seed(0)
        inputs = {}
        for name, shape in self.shapes(graph).items():
            drawn = torch.randn(shape, generator=generator, device=graph.device)
            drawn = drawn.mul_(64).round_().div_(64)
            inputs[name] = drawn.masked_fill_(drawn == 0, 1 / 64)
        return inputs

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        out = aggregate(graph, inputs["x"], self.stats, message=self.message, edge=inputs.get("edge"))
        return out.flatten(1)

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None = None) -> Tensor:
        messages = self.messages(edge_index, inputs)
        outputs = [aggregation_resolver(stat)(messages, edge_index[1], dim_size=num_dst) for stat in self.stats]
        return torch.cat(outputs, dim=1)

    def messages(self, edge_index: Tensor, inputs: Inputs) -> Tensor:
        """The message of each edge [E, F]."""
        sent = inputs["x"].index_select(0, edge_index[0])
        return sent * inputs["edge"].unsqueeze(1) if self.message == "weight" else sent

    def problem(self, dtype: str, device: torch.device) -> SegmentProblem:
        return SegmentProblem(self.message, self.stats, self.channels, DTYPES[dtype], device)


class PyGSegment(Implementation):
    """PyG's aggregation modules on gathered messages."""

    name = "pyg"
    title = "PyG"
    dtypes = DTYPES_OF_BASELINES

    def call(self, case: SegmentCase, graph: EdgeList) -> Call:  # type: ignore[override]
        stats = list(case.stats)
        module = MultiAggregation(stats) if len(stats) > 1 else aggregation_resolver(stats[0])
        module.to(graph.device)

        def call(inputs: Inputs) -> Tensor:
            messages = case.messages(graph.edge_index, inputs)
            return module(messages, graph.edge_index[1], dim_size=graph.num_dst)  # type: ignore[no-any-return]

        return call


class CompiledPyGSegment(TorchCompiled, PyGSegment):
    """``torch.compile`` of the same call."""


class _Product(torch.autograd.Function):
    """A product with a CSR matrix whose transpose is there; its values may have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, sparse: Sparse, values: Tensor, matrix: Tensor | None, transposed: Tensor | None, x: Tensor
    ) -> Tensor:
        ctx.sparse, ctx.transposed = sparse, transposed
        ctx.save_for_backward(values, x)
        return (sparse.matrix(values) if matrix is None else matrix) @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, x = ctx.saved_tensors
        grad = grad.contiguous()
        grad_values = ctx.sparse.products(grad, x) if ctx.needs_input_grad[1] else None
        transposed = ctx.sparse.transposed(values) if ctx.transposed is None else ctx.transposed
        return None, grad_values, None, None, transposed @ grad


class TorchCsr(Implementation):
    """torch's product of a CSR matrix and features, forward and with a transpose made once, by cuSPARSE on a GPU."""

    name = "csr"
    title = "torch CSR, transpose kept"
    dtypes = DTYPES_OF_BASELINES
    ops = ("sum", "mean", "weight")

    def prepare(self, case: SegmentCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        sparse = Sparse(graph.edge_index, graph.num_src, graph.num_dst)
        if case.message == "weight":
            return lambda: _Product.apply(sparse, inputs["edge"].index_select(0, sparse.order), None, None, inputs["x"])
        values = constant_values(case, sparse, inputs["x"].dtype)
        matrix, transposed = sparse.matrix(values), sparse.transposed(values)
        return lambda: _Product.apply(sparse, values, matrix, transposed, inputs["x"])


class TorchMm(Implementation):
    """``torch.sparse.mm`` of a CSR matrix: nothing is kept from call to call, the transpose neither."""

    name = "sparse_mm"
    title = "torch.sparse.mm, nothing kept"
    dtypes = DTYPES_OF_BASELINES
    ops = ("sum", "mean")

    def prepare(self, case: SegmentCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        sparse = Sparse(graph.edge_index, graph.num_src, graph.num_dst)
        matrix = sparse.matrix(constant_values(case, sparse, inputs["x"].dtype))
        return lambda: torch.sparse.mm(matrix, inputs["x"])


def constant_values(case: SegmentCase, sparse: Sparse, dtype: torch.dtype) -> Tensor:
    """The values of the matrix of a sum or a mean, in the order of its rows."""
    if case.op == "sum":
        return torch.ones(sparse.row.numel(), dtype=dtype, device=sparse.row.device)
    return sparse.row_offsets.diff().clamp(min=1).double().reciprocal()[sparse.row].to(dtype)


class SegmentReduce(Implementation):
    """``torch.segment_reduce`` of gathered messages in the order of their targets."""

    name = "segment_reduce"
    title = "torch.segment_reduce"
    dtypes = DTYPES_OF_BASELINES
    ops = ("sum", "mean", "max")

    def prepare(self, case: SegmentCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        sparse = Sparse(graph.edge_index, graph.num_src, graph.num_dst)
        is_empty = (sparse.row_offsets.diff() == 0).unsqueeze(1)
        (stat,) = case.stats

        def forward() -> Tensor:
            messages = inputs["x"].index_select(0, sparse.col)
            out = torch.segment_reduce(messages, stat, offsets=sparse.row_offsets, unsafe=True)
            return out.masked_fill(is_empty, 0.0)

        return forward


KINDS = (Fused, PyGSegment, CompiledPyGSegment, TorchCsr, TorchMm, SegmentReduce)
SEGMENT = Family(SegmentCase, {kind.name: kind for kind in KINDS})
