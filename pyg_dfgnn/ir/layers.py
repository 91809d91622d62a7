"""The message passing of RGCN, RGAT and HGT as programs; parameters, root terms and biases are their layers'."""

# Domains stand where types do.
# mypy: disable-error-code="valid-type,operator"

from __future__ import annotations

from functools import cache
from math import sqrt

from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.ir.domains import D, One, R, S, Td, Ts, V
from pyg_dfgnn.ir.trace import Relational, dot, leaky_relu, mean_to, relational, softmax, sum_to


@relational
def rgcn_mean(x: S, weight: R):
    """Sum over relations of the mean of W_r x_j over the edges of a relation into a target."""
    return sum_to(D, mean_to(V, x @ weight), over=V)


@relational
def rgcn_sum(x: S, weight: R):
    """Sum of W_r x_j over the edges into a target."""
    return sum_to(D, x @ weight)


@relational
def rgcn_bases(x: S, basis: One, comp: R):
    """As :func:`rgcn_mean` with W_r = sum_b comp_rb basis_b for a basis [B, K, N]: the bases are applied first."""
    return sum_to(D, mean_to(V, dot((x @ basis).permute(1, 0), comp)), over=V)


@cache
def rgat(heads: int, mode: str, mechanism: str) -> Relational:
    """Return the program of RGAT.

    Args:
        heads: Number of heads H; `q` and `k` are [H * C, H * dim].
        mode: How queries and keys become logits, "additive-self-attention" or "multiplicative-self-attention".
        mechanism: Where the softmax is taken, "across-relation" or "within-relation".
    """
    check_choice("mode", mode, ("additive-self-attention", "multiplicative-self-attention"))
    check_choice("mechanism", mechanism, ("across-relation", "within-relation"))

    @relational
    def rgat(x: S, xd: D, weight: R, q: One, k: One):
        z, query = x @ weight, (xd @ weight) @ q
        logits = leaky_relu(query + z @ k, 0.2) if mode.startswith("additive") else query * (z @ k)
        alpha = softmax(logits, among=D if mechanism == "across-relation" else V)
        out = sum_to(D, alpha.view(heads, -1, 1) * z.view(heads, 1, -1))
        return {"out": out.view(-1), "alpha": alpha}

    return rgat


@cache
def hgt(heads: int) -> Relational:
    """Return the program of HGT up to its output map.

    Args:
        heads: Number of heads H; the weights by node type are [K, H * C], those by relation [H, C, C], `scale` is [H].
    """

    @relational
    def hgt(x: S, xd: D, wk: Ts, bk: Ts, wq: Td, bq: Td, wv: Ts, bv: Ts, key: R, value: R, scale: R):
        k = (x @ wk + bk).view(heads, -1) @ key
        v = (x @ wv + bv).view(heads, -1) @ value
        q = (xd @ wq + bq).view(heads, -1)
        alpha = softmax(dot(q, k) * scale / sqrt(q.shape[-1]), among=D)
        return sum_to(D, alpha[..., None] * v).view(-1)

    return hgt
