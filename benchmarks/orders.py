"""Gains of layers from other orders of the nodes, beside the cost of the orders."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.results import Rows, markdown
from benchmarks.tables import TITLES, in_order, label, milliseconds, place_of, timed
from pyg_dfgnn.transforms import break_even_epochs

GAIN = (
    "graph cost_s misses layer size direction implementation before_ms after_ms times_faster break_even_calls".split()
)
"""Columns of a gain."""


def gains(costs: Rows, times: Rows) -> list[dict[str, Any]]:
    """One row per timed layer on a reordered graph, with the columns ``GAIN``.

    Args:
        costs: Rows of ``benchmarks/reorder.py``.
        times: Rows of the experiment, those on the graphs in their own order among them.
    """
    cost_of = {row["graph"]: row for row in costs}
    before = {(*place_of(row), label(row)): milliseconds(row) for row in timed(times)}
    rows = []
    for (layer, size, direction, graph, implementation), after_ms in before.items():
        base = before.get((layer, size, direction, graph.partition("+")[0], implementation))
        if base is None or graph not in cost_of:
            continue
        cost = cost_of[graph]
        calls = break_even_epochs(float(cost["cost_s"]), base / 1e3, after_ms / 1e3)
        misses = f"{float(cost['misses_before']):.1%} to {float(cost['misses_after']):.1%}"
        values = (graph, cost["cost_s"], misses, layer, size, direction, implementation, f"{base:.4g}")
        rows.append(dict(zip(GAIN, (*values, f"{after_ms:.4g}", f"{base / after_ms:.2f}", calls), strict=True)))
    return rows


def gains_table(costs: Rows, times: Rows) -> str:
    """A table: how many times faster forward and backward of each layer is on each reordered graph.

    A cell holds the factor of each dtype, float32 with the calls after which the order has paid for itself.

    Args:
        costs: As for :func:`gains`.
        times: As for :func:`gains`.
    """
    cells: dict[str, dict[str, list[str]]] = {}
    for row in gains(costs, times):
        if row["direction"] != "fwd+bwd":
            continue
        pays = row["implementation"] == TITLES["fused"] and row["break_even_calls"] < math.inf
        text = row["times_faster"] + (f" ({row['break_even_calls']:,})" if pays else "")
        cells.setdefault(row["graph"], {}).setdefault(row["layer"], []).append(text)
    cost_of = {row["graph"]: row for row in costs}
    layers = dict.fromkeys(layer for line in cells.values() for layer in line)
    body = []
    for graph in in_order(cells):
        cost = cost_of[graph]
        misses = f"{float(cost['misses_before']):.0%} to {float(cost['misses_after']):.0%}"
        factors = (", ".join(cells[graph].get(layer, ())) for layer in layers)
        body.append([graph, f"{float(cost['cost_s']):.2g}", misses, *factors])
    return markdown(["graph", "cost, s", "misses", *layers], body)
