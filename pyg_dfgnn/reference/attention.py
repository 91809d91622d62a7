"""Graph attention in plain torch: the slow, obvious version of `pyg_dfgnn.ops.attention`.

All functions share one skeleton and differ in the logit only. For an edge from source `j` to target `i`, per head:

    P_ij = exp(S_ij - max_i) / (sum_j exp(S_ij - max_i) + 1e-16),    O_i = sum_j P_ij D_ij v_ij

with `D` the dropout factor (0 or 1 / (1 - p)). A target without edges gives a row of zeros; duplicate edges each count.
Letters: N nodes, E edges, H heads, C channels per head.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.statements.scores import ADD, COSINE, DOT, GATV2, EdgeOperands, Score


def edge_attention(
    score: Score,
    edge_index: Tensor,
    num_dst: int,
    value: Tensor,
    *,
    target: Tensor | None = None,
    key: Tensor | None = None,
    target_scalars: Tensor | None = None,
    source_scalars: Tensor | None = None,
    parameter: Tensor | float | None = None,
    edge: Tensor | None = None,
    edge_target: Tensor | None = None,
    scale: float | None = None,
    slope: float = 0.2,
    keep: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """Attention over the edges of a graph with the logits that a score states.

    `O_i = sum_j softmax_j(S_ij) D_ij v_ij`, where `v_ij = v_j`, or `v_j + e_ij` if the score says so.

    Args:
        score: The record; operands that it does not take are None.
        edge_index: `[2, E]`, row 0 the source and row 1 the target of each edge.
        num_dst: Number of targets, the rows of the output.
        value: `[N_src, H, C]`.
        target: `[N_dst, H, C]`.
        key: `[N_src, H, C]`.
        target_scalars: `[N_dst, H]`.
        source_scalars: `[N_src, H]`.
        parameter: A number, `[1]` or `[H, C]`.
        edge: `[E, H, C]` or `[E, H]`; with `edge_target` `[E, D]`, further channels of key and value.
        edge_target: `[N_dst, H, D]`, further channels of the target.
        scale: Number that the score may read, `1 / sqrt(C)` by default.
        slope: Number that the score may read.
        keep: `[E, H]` dropout factor of each weight, 0 or `1 / (1 - p)`.

    Returns:
        The output `[N_dst, H, C]` and the weights `[E, H]` after dropout. With `edge_target` the output is a pair, the
        second `[N_dst, H, D]`.
    """
    src, dst = edge_index[0], edge_index[1]
    channels = value.size(-1)

    def at(tensor: Tensor | None, nodes: Tensor) -> Tensor | None:
        return None if tensor is None else tensor.index_select(0, nodes)

    content, targets, keys = value.index_select(0, src), at(target, dst), at(key, src)
    if edge_target is not None:
        assert edge is not None and targets is not None and keys is not None
        rows, edge = edge.unsqueeze(1).expand(-1, value.size(1), -1), None
        targets = torch.cat([targets, edge_target.index_select(0, dst)], dim=-1)
        keys, content = torch.cat([keys, rows], dim=-1), torch.cat([content, rows], dim=-1)
    logits = score.reference(
        EdgeOperands(
            targets,
            keys,
            content,
            at(target_scalars, dst),
            at(source_scalars, src),
            parameter,
            edge,
            max(channels, 1) ** -0.5 if scale is None else scale,
            slope,
        )
    )
    if edge is not None and score.edge_in_value:
        content = content + edge
    out, weights = _aggregate(logits, content, dst, num_dst, keep)
    return out if edge_target is None else (out[..., :channels], out[..., channels:]), weights


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
    return edge_attention(DOT, edge_index, num_dst, value, target=query, key=key, edge=edge, scale=scale, keep=keep)


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
    target = x_src if x_dst is None else x_dst
    return edge_attention(COSINE, edge_index, num_dst, x_src, target=target, parameter=beta, keep=keep)


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
    return edge_attention(
        ADD,
        edge_index,
        num_dst,
        value,
        target_scalars=alpha_dst,
        source_scalars=alpha_src,
        edge=alpha_edge,
        slope=negative_slope,
        keep=keep,
    )


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
    return edge_attention(
        GATV2, edge_index, num_dst, x_src, target=x_dst, parameter=att, edge=edge, slope=negative_slope, keep=keep
    )


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
