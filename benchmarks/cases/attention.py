"""Graph attention: which tensors each score takes, and how this package, PyG and others compute it.

All of them take the same projected tensors, so that no linear layer is timed, and the same edges, without added loops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn

from benchmarks.case import DTYPES, Call, Family, Forward, Fused, HeadsCase, Implementation, TorchCompiled
from benchmarks.cases.sparse import Sparse
from pyg_dfgnn import ops
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference import problems
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.problems import OWN_TARGETS, draw_grad_out, draw_inputs
from pyg_dfgnn.reference.zoo import EdgeList

LAYERS = {"dot": "GT", "cosine": "AGNN", "add": "GAT", "gatv2": "GATv2"}
NEGATIVE_SLOPE = 0.2
"""The slope of the leaky scores: the default of PyG, of the operators and of the reference."""


@dataclass(frozen=True)
class AttentionCase(HeadsCase):
    """One score of a number of heads and of channels per head."""

    titles = LAYERS
    family = "attention"
    dispatched = FAMILY

    @property
    def target_rows_of(self) -> dict[str, str]:
        return {"x_dst": "x_src"} if self.op in OWN_TARGETS else {}

    def roles(self, graph: EdgeList) -> dict[str, str]:
        return problems.roles(self.op, own_targets=graph.num_src != graph.num_dst)

    def shapes(self, graph: EdgeList) -> dict[str, tuple[int, ...]]:
        size = graph, self.heads, self.channels
        return {name: problems.shape(name, role, *size) for name, role in self.roles(graph).items()}

    def make_inputs(self, graph: EdgeList) -> Inputs:
        generator = torch.Generator(device=graph.device).manual_seed(0)
        return draw_inputs(self.op, graph, self.heads, self.channels, generator=generator)

    def make_grad_out(self, graph: EdgeList, inputs: Inputs) -> Tensor:
        generator = torch.Generator(device=graph.device).manual_seed(1)
        return draw_grad_out(self.op, graph, self.heads, self.channels, inputs, generator)

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        return getattr(ops, f"{self.op}_attention")(graph, **inputs)

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None = None) -> Tensor:
        return getattr(reference, f"{self.op}_attention")(edge_index, num_dst, **inputs)[0]

    def problem(self, dtype: str, device: torch.device) -> AttentionProblem:
        size, tf32 = (self.op, self.heads, self.channels), dtype == "tf32"
        return AttentionProblem(*size, DTYPES[dtype], device, edge=False, dropout=False, tf32=tf32)


class PyGAttention(Implementation):
    """The attention part of PyG's convs: their own ``propagate`` on given projections."""

    name = "pyg"
    title = "PyG"

    def reasons(self, case: AttentionCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        return ["AGNNConv has one head"] if case.heads > 1 and _PYG_CALLS[case.op][1] is _agnn else []

    def call(self, case: AttentionCase, graph: EdgeList) -> Call:  # type: ignore[override]
        make, run = _PYG_CALLS[case.op]
        conv, edges, size = make(case).to(graph.device), graph.edge_index, (graph.num_src, graph.num_dst)
        return lambda inputs: run(conv, inputs, edges, size).view(-1, case.heads, case.channels)


Size = tuple[int, int]
"""Numbers of sources and of targets."""


def _transformer(conv: Any, inputs: Inputs, edges: Tensor, size: Size) -> Tensor:
    return conv.propagate(edges, **inputs, edge_attr=None, size=size)  # type: ignore[no-any-return]


def _gat(conv: Any, inputs: Inputs, edges: Tensor, size: Size) -> Tensor:
    alpha = conv.edge_updater(edges, alpha=(inputs["alpha_src"], inputs["alpha_dst"]), edge_attr=None, size=size)
    return conv.propagate(edges, x=(inputs["value"], None), alpha=alpha, size=size)  # type: ignore[no-any-return]


def _agnn(conv: Any, inputs: Inputs, edges: Tensor, size: Size) -> Tensor:
    x, conv.beta = inputs["x_src"].flatten(1), inputs["beta"]
    return conv.propagate(edges, x=x, x_norm=F.normalize(x, dim=-1), size=size)  # type: ignore[no-any-return]


def _gatv2(conv: Any, inputs: Inputs, edges: Tensor, size: Size) -> Tensor:
    x, conv.att = (inputs["x_src"], inputs["x_dst"]), inputs["att"][None]
    alpha = conv.edge_updater(edges, x=x, edge_attr=None, size=size)
    return conv.propagate(edges, x=x, alpha=alpha, size=size)  # type: ignore[no-any-return]


def _gatv2_conv(case: AttentionCase) -> Any:
    conv = nn.GATv2Conv(1, case.channels, case.heads, add_self_loops=False)
    # Each call sets it to an input.
    del conv._parameters["att"]
    return conv


_PYG_CALLS: dict[str, tuple[Callable[[AttentionCase], Any], Callable[[Any, Inputs, Tensor, Size], Tensor]]] = {
    "dot": (lambda case: nn.TransformerConv(1, case.channels, case.heads, root_weight=False), _transformer),
    "cosine": (lambda case: nn.AGNNConv(requires_grad=False, add_self_loops=False), _agnn),
    "add": (lambda case: nn.GATConv(1, case.channels, case.heads, add_self_loops=False), _gat),
    "gatv2": (_gatv2_conv, _gatv2),
}
"""Score -> what makes its conv, and what calls the attention part of it."""


class CompiledPyGAttention(TorchCompiled, PyGAttention):
    """``torch.compile`` of the same call."""


class _Dot:
    """<query_i, key_j> C^-0.5."""

    @staticmethod
    def logit(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.sparse.products(query, key) * query.size(1) ** -0.5, value

    @staticmethod
    def gradients(ctx: Any, logit: Tensor, grad: Tensor, grad_value: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, _ = tensors
        grad = grad * query.size(1) ** -0.5
        return ctx.sparse.matrix(grad) @ key, ctx.sparse.transposed(grad) @ query, grad_value


class _Cosine:
    """beta <x_i / |x_i|, x_j / |x_j|>."""

    @staticmethod
    def logit(ctx: Any, value: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        unit = F.normalize(value, dim=-1)
        return beta * ctx.sparse.products(unit, unit), value

    @staticmethod
    def gradients(ctx: Any, logit: Tensor, grad: Tensor, grad_value: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        value, beta = tensors
        unit = F.normalize(value, dim=-1)
        grad_unit = beta * (ctx.sparse.matrix(grad) @ unit + ctx.sparse.transposed(grad) @ unit)
        projected = grad_unit - unit * (unit * grad_unit).sum(-1, keepdim=True)
        grad_value += projected / value.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return grad_value, (grad * logit).sum().reshape(1) / beta


class _Add:
    """LeakyReLU(alpha_src_j + alpha_dst_i)."""

    @staticmethod
    def logit(ctx: Any, value: Tensor, alpha_src: Tensor, alpha_dst: Tensor) -> tuple[Tensor, Tensor]:
        return F.leaky_relu(alpha_src[ctx.sparse.source] + alpha_dst[ctx.sparse.row], ctx.slope), value

    @staticmethod
    def gradients(ctx: Any, logit: Tensor, grad: Tensor, grad_value: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        grad, sparse = torch.where(logit > 0, grad, ctx.slope * grad), ctx.sparse
        by_source = torch.segment_reduce(
            grad[sparse.transpose], "sum", offsets=sparse.transposed_offsets, unsafe=True, initial=0.0
        )
        return grad_value, by_source, sparse.row_sum(grad)


_UNFUSED: dict[str, Any] = {"dot": _Dot, "cosine": _Cosine, "add": _Add}
"""The scores that an SDDMM or a sum of scalars forms."""


class _UnfusedHead(torch.autograd.Function):
    """SDDMM, row softmax, SpMM of one head; the backward is the same three with the transposed CSR."""

    @staticmethod
    def forward(ctx: Any, sparse: Sparse, score: str, slope: float, *tensors: Tensor) -> Tensor:
        ctx.sparse, ctx.score, ctx.slope = sparse, score, slope
        logit, value = _UNFUSED[score].logit(ctx, *tensors)
        weight = sparse.softmax(logit)
        ctx.save_for_backward(*tensors, value, weight, logit)
        return sparse.matrix(weight) @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, value, weight, logit = ctx.saved_tensors
        sparse: Sparse = ctx.sparse
        grad = grad.contiguous()
        grad_value = sparse.transposed(weight) @ grad
        grad_logit = sparse.softmax_backward(weight, sparse.products(grad, value))
        return None, None, None, *_UNFUSED[ctx.score].gradients(ctx, logit, grad_logit, grad_value, *tensors)


def unfused_attention(
    sparse: Sparse, score: str, tensors: Sequence[Tensor], beta: Tensor | None = None, slope: float = NEGATIVE_SLOPE
) -> Tensor:
    """Attention [N_dst, H, C] by SDDMM, row softmax and SpMM, head by head, differentiable once.

    Args:
        sparse: The edges.
        score: 'dot', 'cosine' or 'add'.
        tensors: Query, key and value [N, H, C]; or value [N, H, C]; or value [N, H, C] and the scalars of sources and
            targets [N, H].
        beta: Temperature [1] of the cosine score.
        slope: Of the leaky ReLU of the additive score.
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
    title = "cuSPARSE, unfused"

    def reasons(self, case: AttentionCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        return [] if case.op in _UNFUSED else [f"the {case.layer} score is no inner product, so no SDDMM forms it"]

    def prepare(self, case: AttentionCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        sparse = Sparse(graph.edge_index, graph.num_src, graph.num_dst)
        beta = inputs.get("beta")
        tensors = [tensor for name, tensor in inputs.items() if name != "beta"]
        return lambda: unfused_attention(sparse, case.op, tensors, beta)


class Flex(Implementation):
    """FlexAttention over the nodes as one sequence; blocks of the adjacency without edges are skipped.

    The mask reads a dense adjacency, one per graph of a batch, which has to fit in memory.
    """

    name = "flex"
    title = "FlexAttention"
    dtypes = ("float32", "bfloat16")
    block = 128
    max_mask_bytes = 4e9
    scores = frozenset({"dot"})

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled

    @staticmethod
    def _ptr(graph: EdgeList) -> Tensor:
        return torch.tensor([0, graph.num_src], device=graph.device) if graph.ptr is None else graph.ptr

    def reasons(self, case: AttentionCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        reasons = [] if case.op in self.scores else ["FlexAttention's score is a scaled dot product"]
        sizes = self._ptr(graph).diff()
        num_bytes = len(sizes) * int(sizes.max()) ** 2
        if num_bytes > self.max_mask_bytes:
            reasons.append(f"its mask needs {num_bytes / 1e9:.0f} GB")
        return reasons

    def prepare(self, case: AttentionCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        device, nodes, ptr = graph.device, graph.num_src, self._ptr(graph)
        sizes = ptr.diff()
        count, largest = len(sizes), int(sizes.max())
        member = torch.arange(count, device=device).repeat_interleave(sizes)
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
            torch.compiler.reset()
        attention: Any = torch.compile(flex_attention, dynamic=False) if self.compiled else flex_attention

        def forward() -> Tensor:
            query, key, value = (inputs[name].transpose(0, 1)[None] for name in ("query", "key", "value"))
            return attention(query, key, value, block_mask=block_mask)[0].transpose(0, 1)

        return forward


KINDS = (Fused, PyGAttention, Unfused, CompiledPyGAttention, Flex)
ATTENTION = Family(AttentionCase, {kind.name: kind for kind in KINDS})
