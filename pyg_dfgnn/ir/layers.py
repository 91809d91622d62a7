"""The message passing of relational layers as programs; root terms and parameters of nodes are the layers' own."""

# Domains stand where types do.
# mypy: disable-error-code="valid-type,operator,attr-defined,index"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import Any

from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.ir.domains import D, E, One, R, S, Td, Ts, U, V
from pyg_dfgnn.ir.trace import (
    Relational,
    Var,
    dot,
    leaky_relu,
    logsumexp_to,
    max_to,
    mean_to,
    relational,
    softmax,
    sum_to,
)

REDUCE_TO = {"mean": mean_to, "sum": sum_to, "max": max_to}


def mapped(x: Var, weight: Var) -> Var:
    """Return x W of a weight [K, N], or of one in blocks [B, K / B, N / B] on the diagonal."""
    return x @ weight if len(weight.shape) == 2 else (x.view(weight.shape[0], -1) @ weight).view(-1)


@relational
def rgcn_mean(x: S, weight: R):
    """Sum over relations of the mean of W_r x_j over the edges of a relation into a target."""
    return sum_to(D, mean_to(V, mapped(x, weight)), over=V)


@relational
def rgcn_sum(x: S, weight: R):
    """Sum of W_r x_j over the edges into a target."""
    return sum_to(D, mapped(x, weight))


@relational
def rgcn_max(x: S, weight: R):
    """Sum over relations of W_r times the maximum of x_j over the edges of a relation into a target."""
    return sum_to(D, mapped(max_to(V, x), weight), over=V)


@relational
def rgcn_bases(x: S, basis: One, comp: R):
    """The :func:`rgcn_mean` with W_r = sum_b comp_rb basis_b for a basis [B, K, N]: the bases are applied first."""
    return sum_to(D, mean_to(V, dot((x @ basis).permute(1, 0), comp)), over=V)


@cache
def rgcn_rows(aggr: str) -> Relational:
    """Return the program of RGCN on rows of the weights, which pairs of (source, relation) have in place of W_r x_j.

    Args:
        aggr: Reduction over the edges of a relation into a target, "mean", "sum" or "max".
    """

    @relational
    def rgcn_rows(z: U):
        return sum_to(D, REDUCE_TO[aggr](V, z), over=V)

    return rgcn_rows


@cache
def rgat(heads: int, mode: str, mechanism: str, slope: float = 0.2) -> Relational:
    """Return the program of RGAT.

    Args:
        heads: Number of heads H; `q` and `k` are [H * C, H * dim], `edge` is the part of the logits that features of
            edges have, and `keep` what dropout multiplies the weights by, both [H * dim].
        mode: How queries and keys become logits, "additive-self-attention" or "multiplicative-self-attention".
        mechanism: Where the softmax is taken, "across-relation" or "within-relation".
        slope: Slope of the leaky ReLU below 0.
    """
    check_choice("mode", mode, ("additive-self-attention", "multiplicative-self-attention"))
    check_choice("mechanism", mechanism, ("across-relation", "within-relation"))

    @relational
    def rgat(x: S, xd: D, weight: R, q: One, k: One, edge: E = None, keep: E = None):
        z, query = mapped(x, weight), mapped(xd, weight) @ q
        if mode.startswith("additive"):
            logits = leaky_relu(query + z @ k if edge is None else query + z @ k + edge, slope)
        else:
            logits = query * (z @ k) if edge is None else query * (z @ k) * edge
        alpha = softmax(logits, among=D if mechanism == "across-relation" else V)
        kept = alpha if keep is None else alpha * keep
        return {"out": sum_to(D, kept.view(heads, -1, 1) * z.view(heads, 1, -1)).view(-1), "alpha": alpha}

    return rgat


def attend(k: Var, q: Var, v: Var, key: Var, value: Var, scale: Var) -> Var:
    """Return the attention of HGT among keys and values mapped by relation, and queries, all [H, C]."""
    alpha = softmax(dot(q, k @ key) * scale / sqrt(q.shape[-1]), among=D)
    return sum_to(D, alpha[..., None] * (v @ value)).view(-1)


@relational
def hgt_attention(k: S, q: D, v: S, key: R, value: R, scale: R):
    """The attention of HGT among keys, queries and values [H, C]; `scale` is [H]."""
    return attend(k, q, v, key, value, scale)


@relational
def hgt_features(x: S, xd: D, query: R, query_bias: R, target: R, offset: R, value: R, value_bias: R):
    """The attention of HGT on features x [1, K], whose maps are multiplied with those of relations.

    Logits are `<x_i Q_r + b_r, x_j> + <x_i, c_r> + d_r` and messages `x_j M_r + m_r`, for Q_r = `query` [1, K, K],
    b_r = `query_bias` [1, K], c_r = `target` [1, K], d_r = `offset` [1], M_r = `value` [1, K, C], m_r = `value_bias`
    [1, C]. The softmax is one among the sources of each relation, then one among the relations of a target.
    """
    logits = dot(xd @ query + query_bias, x)
    mixed = sum_to(V, softmax(logits, among=V)[..., None] * x)
    # What a target adds to all logits of a relation does not matter among these.
    share = softmax(logsumexp_to(V, logits) + dot(xd, target) + offset, among=D, over=V)
    return sum_to(D, share[..., None] * (mixed @ value + value_bias), over=V).view(-1)


@cache
def hgt(heads: int) -> Relational:
    """Return the program of HGT up to its output map.

    Args:
        heads: Number of heads H; the weights by node type are [K, H * C], those by relation [H, C, C], `scale` is [H].
    """

    @relational
    def hgt(x: S, xd: D, wk: Ts, bk: Ts, wq: Td, bq: Td, wv: Ts, bv: Ts, key: R, value: R, scale: R):
        k, q, v = (rows.view(heads, -1) for rows in (x @ wk + bk, xd @ wq + bq, x @ wv + bv))
        return attend(k, q, v, key, value, scale)

    return hgt


@cache
def heat_nodes(slope: float) -> Relational:
    """Return the attention of HEAT, and its sum of the sources [C], which all heads share.

    `on_edge` is the part of the logits that features of edges have, and `keep` what dropout multiplies by, both [H].

    Args:
        slope: Slope of the leaky ReLU below 0.
    """

    @relational
    def heat_nodes(x: S, xd: D, on_edge: E, source: One, target: One, types: R, keep: E = None):
        alpha = softmax(leaky_relu(x @ source + xd @ target + types + on_edge, slope), among=D)
        alpha = alpha if keep is None else alpha * keep
        return {"out": sum_to(D, alpha[..., None] * x.view(1, -1)), "alpha": alpha}

    return heat_nodes


@relational
def heat_edges(alpha: E, edge: E):
    """The sum of features of edges [H, F], with a copy for each head, by their weights [H]."""
    return sum_to(D, alpha[..., None] * edge)


@cache
def han_nodes(slope: float) -> Relational:
    """Return the attention of HAN to the sources of one relation, for each pair of target and relation.

    Args:
        slope: Slope of the leaky ReLU below 0.
    """

    @relational
    def han_nodes(x: S, xd: D, source: R, target: R, keep: E = None):
        alpha = softmax(leaky_relu(dot(x, source) + dot(xd, target), slope), among=V)
        kept = alpha if keep is None else alpha * keep
        return sum_to(V, kept[..., None] * x).view(-1).apply("relu")

    return han_nodes


@relational
def han_scores(z: V, weight: One, bias: One, q: One):
    """Sum over the targets of a relation of q tanh(W z + b)."""
    return sum_to(R, dot((z @ weight + bias).apply("tanh"), q), over=V)


@relational
def han_mean(z: V, share: R):
    """Sum over relations of their shares of z."""
    return sum_to(D, share * z, over=V)


@cache
def film(aggr: str, act: str | None, *attrs: float) -> Relational:
    """Return the program of FiLM without its own relation of each node to itself.

    Args:
        aggr: Reduction over the edges of a relation into a target, "mean", "sum" or "max".
        act: Activation of :data:`~pyg_dfgnn.ir.pointwise.POINTWISE`; None for none.
        attrs: Its attributes.
    """

    @relational
    def film(x: S, xd: D, weight: R, gamma: R, gamma_bias: R, beta: R, beta_bias: R):
        message = (xd @ gamma + gamma_bias) * (x @ weight) + (xd @ beta + beta_bias)
        message = message if act is None else message.apply(act, attrs=attrs)
        return sum_to(D, REDUCE_TO[aggr](V, message), over=V)

    return film


@relational
def hetero_linear(x: S, weight: Ts, bias: Ts = None):
    """The map of each row by the weight of its type."""
    return x @ weight if bias is None else x @ weight + bias


Layer = tuple[Any, ...]
"""Key of a layer: the name of its function in :data:`LAYERS` and, of one that returns the program, arguments."""
LAYERS: dict[str, Relational | Callable[..., Relational]] = {
    "film": film,
    "han_mean": han_mean,
    "han_nodes": han_nodes,
    "han_scores": han_scores,
    "heat_edges": heat_edges,
    "heat_nodes": heat_nodes,
    "hetero_linear": hetero_linear,
    "hgt_attention": hgt_attention,
    "hgt_features": hgt_features,
    "rgat": rgat,
    "rgcn_bases": rgcn_bases,
    "rgcn_max": rgcn_max,
    "rgcn_mean": rgcn_mean,
    "rgcn_rows": rgcn_rows,
    "rgcn_sum": rgcn_sum,
}
"""Name -> a program's front end, or what returns one."""


def layer_of(layer: Layer) -> Relational:
    """Return the front end of a layer, the same object each time."""
    known = LAYERS[layer[0]]
    return known if isinstance(known, Relational) else known(*layer[1:])
