"""Bytes that a call has to move: each tensor once, and the rows that a walk along the edges gathers."""

from __future__ import annotations

from math import prod

from pyg_dfgnn.bench.cases.attention import AttentionCase
from pyg_dfgnn.bench.graphs import BenchGraph

INDEX_BYTES = 4

GATHERS = {
    "dot": {"fwd": 2, "bwd": 4},
    "cosine": {"fwd": 1, "bwd": 3},
    "add": {"fwd": 1, "bwd": 1},
    "gatv2": {"fwd": 1, "bwd": 3},
}
"""Feature rows per edge that the leanest passes along the edges read."""

WALK_GATHERS = {
    "forward": {"dot": 2, "cosine": 1, "add": 1, "gatv2": 1},
    "targets": {"dot": 2, "cosine": 1, "add": 1, "gatv2": 1},
    "sources": {"dot": 2, "cosine": 2, "add": 1, "gatv2": 2},
}


def compulsory_bytes(case: AttentionCase, graph: BenchGraph, direction: str, itemsize: int = 4) -> float:
    """Bytes of a call that touches each tensor once: inputs, output, their gradients, and the index of each pass.

    GT forward: ``4 N D b + 4 E + 4 N``; forward and backward three times that, for 12 node tensors and 3 passes.

    Args:
        case: What is computed.
        graph: On which edges.
        direction: 'fwd', 'bwd', 'fwd+bwd', or a walk: 'forward', 'targets', 'sources'.
        itemsize: Bytes b of a feature.
    """
    sides = case.sides(graph.num_src != graph.num_dst)
    sizes = {name: prod(case.shape(name, side, graph)) for name, side in sides.items()}
    inputs = sum(sizes.values())
    output = graph.num_dst * case.heads * case.channels
    of_sources = sum(size for name, size in sizes.items() if sides[name] == "src")
    elements, passes = {
        "fwd": (inputs + output, 1),
        "forward": (inputs + output, 1),
        "bwd": (2 * (inputs + output), 2),
        "fwd+bwd": (3 * (inputs + output), 3),
        "targets": (inputs + 2 * output + inputs - of_sources, 1),
        "sources": (inputs + output + of_sources, 1),
    }[direction]
    return float(itemsize * elements + passes * INDEX_BYTES * (graph.num_edges + graph.num_dst))


def gathered_bytes(case: AttentionCase, graph: BenchGraph, direction: str, itemsize: int = 4) -> float:
    """Bytes that the passes gather edge by edge without reuse: ``gathers (E D b + 4 E)``."""
    if direction in WALK_GATHERS:
        gathers = WALK_GATHERS[direction][case.score]
    else:
        gathers = sum(GATHERS[case.score][part] for part in direction.split("+"))
    return gathers * float(graph.num_edges) * (case.heads * case.channels * itemsize + INDEX_BYTES)
