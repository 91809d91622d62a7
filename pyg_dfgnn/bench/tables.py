"""Markdown tables of timing results: every implementation side by side, and the state of the targets."""

from __future__ import annotations

from collections.abc import Sequence

from pyg_dfgnn.bench.results import markdown
from pyg_dfgnn.bench.targets import PEAK_MB, TARGETS, Key, verdict

Rows = Sequence[dict[str, str]]


def latest(rows: Rows) -> dict[tuple[str, ...], dict[str, str]]:
    """The last row of every measured thing; a resumed run appends."""
    names = ("graph", "score", "heads", "channels", "dtype", "implementation", "direction", "state")
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        found[tuple(row[name] for name in names)] = row
    return found


def _cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    return f"{float(row['median_ms']):.4g}" if row["status"] == "ok" else row["status"].split(":")[0]


def times_table(rows: Rows, state: str = "warm") -> str:
    """Median milliseconds: one line per layer, size, direction and implementation, one column per graph."""
    shown = [row for row in latest(rows).values() if row["state"] in (state, "") and row["score"] != "graph"]
    graphs = sorted({row["graph"] for row in shown})
    lines: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in shown:
        size = f"H={row['heads']} d={row['channels']}"
        key = (row["layer"], size, row["direction"], row["implementation"], row["dtype"])
        lines.setdefault(key, {})[row["graph"]] = row
    body = [[*key, *(_cell(line.get(graph)) for graph in graphs)] for key, line in sorted(lines.items())]
    return markdown(["layer", "size", "direction", "implementation", "dtype", *graphs], body)


def targets_table(rows: Rows) -> str:
    """Each target with the measured time and 'reached' or by how much it is missed."""
    found = latest(rows)
    body = []
    for key, by_graph in TARGETS.items():
        for graph, target in by_graph.items():
            row = found.get((graph, key[0], str(key[1]), str(key[2]), key[3], "fused", key[4], "warm"))
            if row is None or row["status"] != "ok":
                continue
            value = float(row["median_ms"])
            levels = [verdict(value, level) for level in (target.first, target.must, target.aim)]
            body.append([_name(key), graph, f"{value:.4g} ms", target.first or "", target.must, target.aim, *levels])
    for (key, graph), limit in PEAK_MB.items():
        row = found.get((graph, key[0], str(key[1]), str(key[2]), key[3], "fused", key[4], "warm"))
        if row is not None and row["peak_mb"]:
            value = float(row["peak_mb"])
            body.append([f"{_name(key)} peak", graph, f"{value:.0f} MB", limit, "", "", verdict(value, limit), "", ""])
    return markdown(["what", "graph", "measured", "first", "must", "aim", "first?", "must?", "aim?"], body)


def _name(key: Key) -> str:
    score, heads, channels, dtype, direction = key
    return f"{score} {direction} {dtype} H={heads} d={channels}"


def print_tables(rows: Rows) -> None:
    if not rows:
        return
    for state, title in (("warm", "Warm"), ("flushed", "L2 flushed"), ("replay", "Replayed CUDA graph")):
        if any(row["state"] == state for row in rows):
            print(f"\n{title}, median ms\n\n{times_table(rows, state)}")
    print(f"\nTargets\n\n{targets_table(rows)}")
    not_run = dict.fromkeys(
        f"({row['graph']}) {row['layer']} H={row['heads']} {row['implementation']} {row['direction']}: {row['status']}"
        for row in latest(rows).values()
        if row["status"] != "ok"
    )
    if not_run:
        print("\nNot timed\n\n" + "\n".join(f"- {line}" for line in not_run))
