"""What is timed side by side: the fused op, PyG, the same under torch.compile, unfused cuSPARSE, FlexAttention, DGL.

All take the same projected tensors, so that no linear layer is timed, and the same edges, without added self-loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dfgnn.bench.cases.attention import LAYERS, NEGATIVE_SLOPE, AttentionCase, Inputs, fused
from pyg_dfgnn.bench.graphs import BenchGraph
from pyg_dfgnn.bench.prepare import compressed

Forward = Callable[[], Tensor]

MEMORY_FRACTION = 0.9
"""Of the device's memory that a baseline may be predicted to need; beyond it, it is listed and not tried."""


class Implementation:
    """One way to compute an ``AttentionCase``.

    Attributes:
        name: As in the result files.
        dtypes: Names of what it can be timed in.
        error_bound: Relative error above which its time is not a result, if wider than the contract of the dtype.
    """

    name: str
    dtypes: tuple[str, ...] = ("float32",)
    error_bound = 2e-3

    def message_tensors(self, case: AttentionCase, training: bool) -> float:
        """Number of [E, H, C] tensors alive at the peak."""
        return 0.0

    def edge_tensors(self, case: AttentionCase, training: bool) -> float:
        """Number of [E, H] tensors alive at the peak."""
        return 0.0

    def predicted_bytes(self, case: AttentionCase, num_edges: int, training: bool) -> float:
        """Memory of the tensors that grow with the edges, float32."""
        per_edge = self.message_tensors(case, training) * case.channels + self.edge_tensors(case, training)
        return 4.0 * num_edges * case.heads * per_edge

    def reasons(self, case: AttentionCase, graph: BenchGraph, training: bool, memory_bytes: float) -> list[str]:
        """Why it is not run here, [] when it is."""
        needed = self.predicted_bytes(case, graph.num_edges, training)
        return [f"needs {needed / 1e9:.0f} GB"] if needed > MEMORY_FRACTION * memory_bytes else []

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        """A forward call on ``inputs``; whatever is done once per graph is done here."""
        raise NotImplementedError


class Fused(Implementation):
    """This package's op."""

    name = "fused"
    dtypes = ("float32", "tf32", "bfloat16", "float16")
    error_bound = 0.0

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        edges = compressed(graph)
        return lambda: fused(case, edges, inputs)


class PyG(Implementation):
    """The attention part of PyG's convs: their own ``propagate`` on given projections."""

    name = "pyg"

    def message_tensors(self, case: AttentionCase, training: bool) -> float:
        return {"add": 2.0, "dot": 4.0, "cosine": 4.0, "gatv2": 4.0}[case.score] + (2.0 if training else 0.0)

    def edge_tensors(self, case: AttentionCase, training: bool) -> float:
        return 6.0

    def reasons(self, case: AttentionCase, graph: BenchGraph, training: bool, memory_bytes: float) -> list[str]:
        reasons = super().reasons(case, graph, training, memory_bytes)
        if case.score == "cosine" and case.heads > 1:
            reasons.append("AGNNConv has one head")
        return reasons

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        edges, shape = graph.edge_index, (graph.num_src, graph.num_dst)
        call = _pyg_call(case, edges, shape)
        return lambda: call(inputs)


def _pyg_call(case: AttentionCase, edges: Tensor, size: tuple[int, int]) -> Callable[[Inputs], Tensor]:
    from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, TransformerConv

    heads, channels = case.heads, case.channels
    conv: Any
    if case.score == "dot":
        conv = TransformerConv(1, channels, heads, root_weight=False).to(edges.device)

        def call(t: Inputs) -> Tensor:
            out = conv.propagate(edges, query=t["query"], key=t["key"], value=t["value"], edge_attr=None, size=size)
            return out.view(-1, heads, channels)
    elif case.score == "add":
        conv = GATConv(1, channels, heads, add_self_loops=False, negative_slope=NEGATIVE_SLOPE).to(edges.device)

        def call(t: Inputs) -> Tensor:
            alpha = conv.edge_updater(edges, alpha=(t["alpha_src"], t["alpha_dst"]), edge_attr=None, size=size)
            value = t["value"]
            return conv.propagate(edges, x=(value, None), alpha=alpha, size=size).view(-1, heads, channels)
    elif case.score == "cosine":
        conv = AGNNConv(requires_grad=False, add_self_loops=False).to(edges.device)

        def call(t: Inputs) -> Tensor:
            x = t["x_src"].view(-1, channels)
            conv.beta = t["beta"]
            return conv.propagate(edges, x=x, x_norm=F.normalize(x, p=2.0, dim=-1)).view(-1, 1, channels)
    else:
        conv = GATv2Conv(1, channels, heads, add_self_loops=False, negative_slope=NEGATIVE_SLOPE).to(edges.device)
        del conv._parameters["att"]

        def call(t: Inputs) -> Tensor:
            conv.att = t["att"][None]
            x = t["x_src"], t["x_dst"]
            alpha = conv.edge_updater(edges, x=x, edge_attr=None, size=size)
            return conv.propagate(edges, x=x, alpha=alpha, size=size).view(-1, heads, channels)

    return call


class CompiledPyG(PyG):
    """``torch.compile`` of the same call."""

    name = "compile"

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def message_tensors(self, case: AttentionCase, training: bool) -> float:
        return 0.0

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        torch._dynamo.reset()
        call = _pyg_call(case, graph.edge_index, (graph.num_src, graph.num_dst))
        compiled = torch.compile(call, backend=self.backend, dynamic=False)
        return lambda: compiled(inputs)


class Sparse:
    """The CSR of a graph and of its transpose as index arrays, with the permutation between their edge orders.

    Args:
        edge_index: Sources and targets [2, E].
        num_src: Number of sources.
        num_dst: Number of targets.
    """

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int) -> None:
        source, target = edge_index[:, torch.argsort(edge_index[1], stable=True)]
        self.shape = num_dst, num_src
        self.row, self.col = target, source.int()
        self.row_ptr = _pointer(torch.bincount(target, minlength=num_dst))
        self.row_offsets = self.row_ptr.long()
        self.transpose = torch.argsort(source, stable=True)
        self.transposed_ptr = _pointer(torch.bincount(source, minlength=num_src))
        self.transposed_offsets = self.transposed_ptr.long()
        self.transposed_col = target[self.transpose].int()
        self.source = source

    def matrix(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.row_ptr, self.col, values, self.shape, check_invariants=False)

    def transposed(self, values: Tensor) -> Tensor:
        """The transposed matrix of ``values`` in row order."""
        values = values[self.transpose]
        return torch.sparse_csr_tensor(
            self.transposed_ptr, self.transposed_col, values, self.shape[::-1], check_invariants=False
        )

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """<left_i, right_j> for every edge [E]: the sampled dense-dense product."""
        pattern = self.matrix(left.new_zeros(self.row.numel()))
        return torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0).values()

    def row_sum(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", offsets=self.row_offsets, unsafe=True, initial=0.0)

    def softmax(self, score: Tensor) -> Tensor:
        row_max = torch.segment_reduce(score, "max", offsets=self.row_offsets, unsafe=True, initial=float("-inf"))
        weight = (score - row_max[self.row]).exp()
        return weight / self.row_sum(weight)[self.row]

    def softmax_backward(self, weight: Tensor, grad: Tensor) -> Tensor:
        return weight * (grad - self.row_sum(weight * grad)[self.row])


def _pointer(degree: Tensor) -> Tensor:
    return torch.cat([degree.new_zeros(1), degree.cumsum(0)]).int()


class _UnfusedHead(torch.autograd.Function):
    """SDDMM, row softmax, SpMM of one head; the backward is the same three with the transposed CSR."""

    @staticmethod
    def forward(ctx: Any, sparse: Sparse, score: str, slope: float, *tensors: Tensor) -> Tensor:
        if score == "dot":
            query, key, value = tensors
            logit = sparse.products(query, key) * query.size(1) ** -0.5
        elif score == "cosine":
            value, beta = tensors
            unit = F.normalize(value, dim=-1)
            logit = beta * sparse.products(unit, unit)
        else:
            value, alpha_src, alpha_dst = tensors
            logit = F.leaky_relu(alpha_src[sparse.source] + alpha_dst[sparse.row], slope)
        weight = sparse.softmax(logit)
        ctx.sparse, ctx.score, ctx.slope = sparse, score, slope
        ctx.save_for_backward(*tensors, weight, logit)
        return sparse.matrix(weight) @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, weight, logit = ctx.saved_tensors
        sparse: Sparse = ctx.sparse
        grad = grad.contiguous()
        value = tensors[2] if ctx.score == "dot" else tensors[0]
        grad_value = sparse.transposed(weight) @ grad
        grad_logit = sparse.softmax_backward(weight, sparse.products(grad, value))
        if ctx.score == "dot":
            query, key, _ = tensors
            grad_logit = grad_logit * query.size(1) ** -0.5
            return None, None, None, sparse.matrix(grad_logit) @ key, sparse.transposed(grad_logit) @ query, grad_value
        if ctx.score == "cosine":
            beta = tensors[1]
            unit = F.normalize(value, dim=-1)
            grad_unit = beta * (sparse.matrix(grad_logit) @ unit + sparse.transposed(grad_logit) @ unit)
            tangent = grad_unit - unit * (unit * grad_unit).sum(-1, keepdim=True)
            grad_value += tangent / value.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            return None, None, None, grad_value, (grad_logit * logit).sum().reshape(1) / beta
        grad_logit = torch.where(logit > 0, grad_logit, ctx.slope * grad_logit)
        by_source = torch.segment_reduce(
            grad_logit[sparse.transpose], "sum", offsets=sparse.transposed_offsets, unsafe=True, initial=0.0
        )
        return None, None, None, grad_value, by_source, sparse.row_sum(grad_logit)


def unfused_attention(
    sparse: Sparse, score: str, tensors: Sequence[Tensor], beta: Tensor | None = None, slope: float = NEGATIVE_SLOPE
) -> Tensor:
    """Attention by SDDMM, row softmax and SpMM, head by head, differentiable once.

    Args:
        sparse: The edges.
        score: 'dot', 'cosine' or 'add'.
        tensors: Query, key and value [N, H, C]; or value [N, H, C]; or value [N, H, C] and the scalars of sources and
            targets [N, H].
        beta: Temperature [1] of the cosine score.
        slope: Of the leaky ReLU of the additive score.

    Returns:
        Sums over the neighbours of each target [N_dst, H, C].
    """
    common = () if beta is None else (beta,)
    if tensors[0].size(1) == 1:
        return _UnfusedHead.apply(sparse, score, slope, *(tensor.squeeze(1) for tensor in tensors), *common)[:, None]
    heads = zip(*(tensor.unbind(1) for tensor in tensors), strict=True)
    outs = [_UnfusedHead.apply(sparse, score, slope, *(t.contiguous() for t in head), *common) for head in heads]
    return torch.stack(outs, dim=1)


class Unfused(Implementation):
    """cuSPARSE's SDDMM and SpMM with a row softmax between them, head by head."""

    name = "unfused"

    def edge_tensors(self, case: AttentionCase, training: bool) -> float:
        return 8.0 if training else 6.0

    def reasons(self, case: AttentionCase, graph: BenchGraph, training: bool, memory_bytes: float) -> list[str]:
        reasons = super().reasons(case, graph, training, memory_bytes)
        if case.score == "gatv2":
            reasons.append(f"the {LAYERS[case.score]} score is no inner product, so no SDDMM forms it")
        return reasons

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        sparse = Sparse(graph.edge_index, graph.num_src, graph.num_dst)
        names = {
            "dot": ("query", "key", "value"),
            "cosine": ("x_src",),
            "add": ("value", "alpha_src", "alpha_dst"),
        }[case.score]
        return lambda: unfused_attention(sparse, case.score, [inputs[name] for name in names], inputs.get("beta"))


class Flex(Implementation):
    """FlexAttention over the nodes as one sequence; blocks of the adjacency without edges are skipped.

    The mask reads a dense adjacency, one per graph of a batch, which has to fit in memory.
    """

    name = "flex"
    dtypes = ("float32", "bfloat16")
    block = 128
    max_mask_bytes = 4e9

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled

    @staticmethod
    def _largest(graph: BenchGraph) -> tuple[int, int]:
        """Number of graphs in the batch and nodes of the largest."""
        if graph.ptr is None:
            return 1, graph.num_src
        return graph.ptr.numel() - 1, int(graph.ptr.diff().max())

    def reasons(self, case: AttentionCase, graph: BenchGraph, training: bool, memory_bytes: float) -> list[str]:
        reasons = super().reasons(case, graph, training, memory_bytes)
        if case.score != "dot":
            reasons.append("FlexAttention's score is a scaled dot product")
        count, nodes = self._largest(graph)
        if count * nodes**2 > min(self.max_mask_bytes, MEMORY_FRACTION * memory_bytes):
            reasons.append(f"its mask needs {count * nodes**2 / 1e9:.0f} GB")
        return reasons

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        device, nodes = graph.device, graph.num_src
        count, largest = self._largest(graph)
        ptr = torch.tensor([0, nodes], device=device) if graph.ptr is None else graph.ptr
        member = torch.arange(count, device=device).repeat_interleave(ptr.diff())
        local = torch.arange(nodes, device=device) - ptr[member]
        source, target = graph.edge_index
        linked = torch.zeros(count, largest, largest, dtype=torch.bool, device=device)
        linked[member[target], local[target], local[source]] = True

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            inside = member[query] == member[key]
            return inside & linked[member[query], local[query], local[key]]

        blocks = -(-nodes // self.block)
        used = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
        used[target // self.block, source // self.block] = True
        order = used.int().argsort(dim=1, descending=True, stable=True).int()
        block_mask = BlockMask.from_kv_blocks(
            used.sum(1, dtype=torch.int32)[None, None],
            order[None, None],
            BLOCK_SIZE=self.block,
            mask_mod=mask,
            seq_lengths=(nodes, nodes),
        )
        if self.compiled:
            torch._dynamo.reset()
        attention: Any = torch.compile(flex_attention, dynamic=False) if self.compiled else flex_attention

        def forward() -> Tensor:
            query, key, value = (inputs[name].transpose(0, 1)[None] for name in ("query", "key", "value"))
            return attention(query, key, value, block_mask=block_mask)[0].transpose(0, 1)

        return forward


class Dgl(Implementation):
    """DGL's sparse operators: edge scores, edge softmax, weighted sum. Only where the package is installed."""

    name = "dgl"

    def message_tensors(self, case: AttentionCase, training: bool) -> float:
        return {"gatv2": 4.0 if training else 2.0}.get(case.score, 0.0)

    def edge_tensors(self, case: AttentionCase, training: bool) -> float:
        return 6.0 if training else 3.0

    def reasons(self, case: AttentionCase, graph: BenchGraph, training: bool, memory_bytes: float) -> list[str]:
        reasons = super().reasons(case, graph, training, memory_bytes)
        if find_spec("dgl") is None:
            reasons.append("DGL is not installed")
        if graph.num_src != graph.num_dst:
            reasons.append("sources and targets are different nodes")
        return reasons

    def prepare(self, case: AttentionCase, graph: BenchGraph, inputs: Inputs) -> Forward:
        import dgl
        from dgl.nn.functional import edge_softmax

        edges = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_src)
        edges.create_formats_()

        def forward() -> Tensor:
            if case.score == "dot":
                value = inputs["value"]
                logit = dgl.ops.u_dot_v(edges, inputs["key"], inputs["query"] * case.channels**-0.5)
            elif case.score == "cosine":
                value = inputs["x_src"]
                unit = F.normalize(value, dim=-1)
                logit = inputs["beta"] * dgl.ops.u_dot_v(edges, unit, unit)
            elif case.score == "add":
                value = inputs["value"]
                alpha = (inputs[name][..., None] for name in ("alpha_src", "alpha_dst"))
                logit = F.leaky_relu(dgl.ops.u_add_v(edges, *alpha), NEGATIVE_SLOPE)
            else:
                value = inputs["x_src"]
                hidden = F.leaky_relu(dgl.ops.u_add_v(edges, value, inputs["x_dst"]), NEGATIVE_SLOPE)
                logit = (hidden * inputs["att"]).sum(-1, keepdim=True)
            return dgl.ops.u_mul_e_sum(edges, value, edge_softmax(edges, logit))

        return forward


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    kind.name: kind for kind in (Fused, PyG, Unfused, CompiledPyG, Flex, Dgl)
}  # fmt: skip
