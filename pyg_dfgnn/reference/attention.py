"""Graph attention in plain torch: the slow, obvious version of `pyg_dfgnn.ops.attention`.

All four functions share one skeleton and differ in the logit only. For an edge from source `j` to target `i`, per head:

    P_ij = exp(S_ij - max_i) / (sum_j exp(S_ij - max_i) + 1e-16),    O_i = sum_j P_ij D_ij v_ij

with `D` the dropout factor (0 or 1 / (1 - p)). A target without edges gives a row of zeros; duplicate edges each count.
Letters: N nodes, E edges, H heads, C channels per head.
"""

import math

import torch.nn.functional as F
from torch import Tensor


def dot_attention(
    edge_index: Tensor,
    num_dst: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    edge: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention over the edges of a graph.

    `S_ij = scale * <q_i, k_j + e_ij>`, `v_ij = v_j + e_ij`.

    Args:
        edge_index: `[2, E]`, row 0 the source and row 1 the target of each edge.
        num_dst: Number of targets, the rows of the output.
        query: `[N_dst, H, C]`.
        key: `[N_src, H, C]`.
        value: `[N_src, H, C]`.
        edge: `[E, H, C]`, added to key and to value.
        scale: Factor of the logits, `1 / sqrt(C)` by default.
        keep: `[E, H]` dropout factor of each weight, 0 or `1 / (1 - p)`.

    Returns:
        The output `[N_dst, H, C]` and the weights `[E, H]` after dropout.

    Source: Shi et al., "Masked Label Prediction", 2021, equations 3 and 4.
    """
    src, dst = edge_index[0], edge_index[1]
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    key, value = key.index_select(0, src), value.index_select(0, src)
    if edge is not None:
        key, value = key + edge, value + edge
    score = (query.index_select(0, dst) * key).sum(dim=-1) * scale
    return _aggregate(score, value, dst, num_dst, keep)


def cosine_attention(
    edge_index: Tensor,
    num_dst: int,
    x_src: Tensor,
    x_dst: Tensor | None = None,
    *,
    beta: Tensor | float,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine-similarity attention over the edges of a graph.

    `S_ij = beta * <x_i / max(|x_i|, 1e-12), x_j / max(|x_j|, 1e-12)>`, `v_ij = x_j` (not normalised).

    Args:
        edge_index: `[2, E]`, row 0 the source and row 1 the target of each edge.
        num_dst: Number of targets, the rows of the output.
        x_src: `[N_src, H, C]`.
        x_dst: `[N_dst, H, C]`, `x_src` by default.
        beta: Temperature, a number or a tensor `[1]`.
        keep: `[E, H]` dropout factor of each weight, 0 or `1 / (1 - p)`.

    Returns:
        The output `[N_dst, H, C]` and the weights `[E, H]` after dropout.

    Source: Thekumparampil et al., "Attention-based Graph Neural Network for Semi-Supervised Learning", 2018, eq. 4.
    """
    src, dst = edge_index[0], edge_index[1]
    unit_src = F.normalize(x_src, p=2.0, dim=-1)
    unit_dst = unit_src if x_dst is None else F.normalize(x_dst, p=2.0, dim=-1)
    score = beta * (unit_dst.index_select(0, dst) * unit_src.index_select(0, src)).sum(dim=-1)
    return _aggregate(score, x_src.index_select(0, src), dst, num_dst, keep)


def add_attention(
    edge_index: Tensor,
    num_dst: int,
    value: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None = None,
    *,
    alpha_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Additive attention over the edges of a graph.

    `S_ij = leaky_relu(alpha_src_j + alpha_dst_i + alpha_edge_ij)`, `v_ij = v_j`.

    Args:
        edge_index: `[2, E]`, row 0 the source and row 1 the target of each edge.
        num_dst: Number of targets, the rows of the output.
        value: `[N_src, H, C]`.
        alpha_src: `[N_src, H]`, the source's part of the logit.
        alpha_dst: `[N_dst, H]`, the target's part.
        alpha_edge: `[E, H]`, the edge's part.
        negative_slope: Slope of the leaky ReLU below zero.
        keep: `[E, H]` dropout factor of each weight, 0 or `1 / (1 - p)`.

    Returns:
        The output `[N_dst, H, C]` and the weights `[E, H]` after dropout.

    Source: Velickovic et al., "Graph Attention Networks", 2018, equation 3.
    """
    src, dst = edge_index[0], edge_index[1]
    score = alpha_src.index_select(0, src)
    if alpha_dst is not None:
        score = score + alpha_dst.index_select(0, dst)
    if alpha_edge is not None:
        score = score + alpha_edge
    score = F.leaky_relu(score, negative_slope)
    return _aggregate(score, value.index_select(0, src), dst, num_dst, keep)


def gatv2_attention(
    edge_index: Tensor,
    num_dst: int,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    *,
    edge: Tensor | None = None,
    negative_slope: float = 0.2,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dynamic additive attention over the edges of a graph.

    `S_ij = <att, leaky_relu(x_src_j + x_dst_i + e_ij)>`, `v_ij = x_src_j`.

    Args:
        edge_index: `[2, E]`, row 0 the source and row 1 the target of each edge.
        num_dst: Number of targets, the rows of the output.
        x_src: `[N_src, H, C]`.
        x_dst: `[N_dst, H, C]`.
        att: `[H, C]`, the attention vector of each head.
        edge: `[E, H, C]`, added before the nonlinearity.
        negative_slope: Slope of the leaky ReLU below zero.
        keep: `[E, H]` dropout factor of each weight, 0 or `1 / (1 - p)`.

    Returns:
        The output `[N_dst, H, C]` and the weights `[E, H]` after dropout.

    Source: Brody et al., "How Attentive are Graph Attention Networks?", 2022, equation 7.
    """
    src, dst = edge_index[0], edge_index[1]
    value = x_src.index_select(0, src)
    hidden = x_dst.index_select(0, dst) + value
    if edge is not None:
        hidden = hidden + edge
    score = (F.leaky_relu(hidden, negative_slope) * att).sum(dim=-1)
    return _aggregate(score, value, dst, num_dst, keep)


def _aggregate(score: Tensor, value: Tensor, dst: Tensor, num_dst: int, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of `score [E, H]` over the edges of each target, then the weighted sum of `value [E, H, C]`."""
    heads = score.size(1)
    # The maximum only guards against overflow and cancels in the quotient: no gradient through it.
    row_max = score.new_zeros(num_dst, heads).scatter_reduce(
        0, dst.unsqueeze(-1).expand(-1, heads), score.detach(), reduce="amax", include_self=False
    )
    weight = (score - row_max.index_select(0, dst)).exp()
    row_sum = weight.new_zeros(num_dst, heads).index_add(0, dst, weight) + 1e-16
    weight = weight / row_sum.index_select(0, dst)
    if keep is not None:
        weight = weight * keep.to(weight.dtype)
    message = weight.unsqueeze(-1) * value
    out = message.new_zeros(num_dst, heads, value.size(2)).index_add(0, dst, message)
    return out, weight
