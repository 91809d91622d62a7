"""Markdown tables of timing results: times side by side, times faster than a baseline, other packages."""

from collections.abc import Iterable
from statistics import geometric_mean

from benchmarks import CONFIGS
from benchmarks.cases import TITLES
from benchmarks.graphs import RECIPES, TABLE_1
from benchmarks.results import Row, Rows, Table, latest, markdown

NAMES = ("graph", "op", "size", "dtype", "implementation", "schedule", "direction", "state")
STATES = {"warm": "Warm", "flushed": "L2 flushed", "replay": "Replayed CUDA graph"}
KINDS = {"batches": TABLE_1[:6], "whole graphs": TABLE_1[6:], "all": TABLE_1}
"""The data sets of DF-GNN's Table 1, over which means are taken."""
PACKAGES = CONFIGS.parents[1] / "results" / "bench" / "nvidia-h200" / "packages.csv"
"""Medians of other packages, measured once; results/README.md says how."""


def timed(rows: Rows) -> list[Row]:
    """The last rows with a time in a warm cache."""
    right = [row for row in latest(rows, NAMES) if row["status"] == "ok" and row["op"] != "graph"]
    return [row for row in right if row["state"] == "warm"]


def label(row: Row) -> str:
    """The implementation; ours with the schedule that was asked for, all but float32 with the dtype."""
    name = TITLES[row["implementation"]]
    schedule = "" if row["schedule"] in ("", "auto") else f" {row['schedule']}"
    dtype = "" if row["dtype"] == "float32" else f" {row['dtype']}"
    return f"{name}{schedule}{dtype}"


def is_baseline(row: Row, baseline: str) -> bool:
    """Whether a row is what others are compared with: an implementation, or a schedule of ours, in float32."""
    return row["dtype"] == "float32" and baseline in (row["implementation"], row["schedule"])


def milliseconds(row: Row) -> float:
    """The time of a row."""
    return float(row["median_ms"])


def in_order(names: Iterable[str]) -> list[str]:
    """Graphs without repetition, as the recipes list them; batches of other sizes by their count, orders by name."""
    listed = list(RECIPES)

    def place(name: str) -> tuple[int, int, str]:
        whole, _, order = name.partition("+")
        stem, _, count = whole.partition("@")
        return listed.index(stem), int(count or 0), order

    return sorted(dict.fromkeys(names), key=place)


def place_of(row: Row) -> tuple[str, str, str, str]:
    """Return the layer, size, direction and graph of a row; rows that agree in these are compared with each other."""
    return row["layer"], row["size"], row["direction"], row["graph"]


def times_faster(rows: Rows, baseline: str) -> dict[tuple[str, str, str, str], dict[str, float]]:
    """Place -> label -> how many times faster than the baseline, warm, on the device."""
    shown = timed(rows)
    base = {place_of(row): milliseconds(row) for row in shown if is_baseline(row, baseline)}
    factors: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in shown:
        place = place_of(row)
        if place in base and not is_baseline(row, baseline):
            factors.setdefault(place, {})[label(row)] = base[place] / milliseconds(row)
    return factors


def times_table(rows: Rows, state: str, baseline: str) -> str:
    """Median milliseconds by graph, where they are warm with the times faster than the baseline, '' for none.

    What was run on no graph has no line.
    """
    shown = [row for row in latest(rows, NAMES) if row["state"] in (state, "") and row["op"] != "graph"]
    factors = times_faster(rows, baseline) if baseline and state == "warm" else {}
    graphs = in_order(row["graph"] for row in shown)
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in shown:
        lines.setdefault((*place_of(row)[:3], label(row)), {})[row["graph"]] = row

    def cell(row: Row | None) -> str:
        if row is None or row["status"] != "ok":
            return "" if row is None else str(row["status"]).split(":")[0]
        factor = factors.get(place_of(row), {}).get(label(row))
        return f"{milliseconds(row):.4g}" + (f" ({factor:.2f}x)" if factor else "")

    body = [
        [*key, *(cell(line.get(graph)) for graph in graphs)]
        for key, line in sorted(lines.items())
        if not all(row["status"].startswith("not run") for row in line.values())
    ]
    return markdown(["layer", "size", "direction", "implementation", *graphs], body)


def means_table(rows: Rows, baseline: str) -> str:
    """Geometric means of the times faster over the data sets of DF-GNN's Table 1; '' where none was measured."""
    by_line: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for (layer, size, direction, graph), factors in times_faster(rows, baseline).items():
        for name, factor in factors.items():
            if graph in TABLE_1:
                by_line.setdefault((layer, size, direction, name), {})[graph] = factor
    body = []
    for line, by_graph in sorted(by_line.items()):
        cells = []
        for graphs in KINDS.values():
            values = [by_graph[graph] for graph in graphs if graph in by_graph]
            cells.append(f"{geometric_mean(values):.2f}x ({len(values)} of {len(graphs)})" if values else "")
        slowest = min(by_graph, key=lambda graph: by_graph[graph])
        body.append([*line, *cells, f"{by_graph[slowest]:.2f}x ({slowest})"])
    return markdown(["layer", "size", "direction", "implementation", *KINDS, "least"], body) if body else ""


def peers_table(rows: Rows) -> str:
    """Our times beside the fastest right result of another package; '' where no package was measured.

    The two 16-bit types count as one.
    """

    def case_of_row(row: Row) -> tuple[str, ...]:
        dtype = "16 bits" if row["dtype"] in ("bfloat16", "float16") else row["dtype"]
        return row["op"], row["size"], row["direction"], row["graph"], dtype

    right = [row for row in Table.read(PACKAGES) if row["status"] == "ok"]
    fastest = {case_of_row(row): row for row in reversed(sorted(right, key=milliseconds))}
    body = []
    for row in sorted(timed(rows), key=lambda row: (*place_of(row), row["dtype"])):
        peer = fastest.get(case_of_row(row))
        if row["implementation"] == "fused" and row["schedule"] == "auto" and peer is not None:
            ours, theirs = milliseconds(row), milliseconds(peer)
            package = peer["package"] if peer["dtype"] == row["dtype"] else f"{peer['package']} ({peer['dtype']})"
            times = f"{ours:.4g}", f"{theirs:.4g}", package, f"{theirs / ours:.2f}x"
            body.append([*place_of(row), row["dtype"], *times])
    header = ["layer", "size", "direction", "graph", "dtype", "ours", "peer", "package", "faster"]
    return markdown(header, body) if body else ""


def not_timed(rows: Rows) -> str:
    """List rows without a time and their reasons; the same reason on several graphs or directions takes one line."""
    graphs: dict[tuple[str, str], dict[str, None]] = {}
    for row in latest(rows, NAMES):
        if row["status"] == "ok":
            continue
        what = f"{row['layer']} {row['size']}, {label(row)}"
        if not row["status"].startswith("not run"):
            what += f", {row['direction']}"
        graphs.setdefault((what, row["status"]), {})[row["graph"]] = None
    return "\n".join(f"- {', '.join(names)}: {what}: {status}" for (what, status), names in graphs.items())


def line(row: Row) -> str:
    """One row for the terminal."""
    what = f"{row['graph']}: {row['layer']} {row.get('size', '')} {row['dtype']}"
    how = f"{TITLES[row['implementation']]} {row.get('schedule', '')} {row['direction']}".replace("  ", " ")
    if row["status"] != "ok":
        return f"{what} {how}: {row['status']} {row.get('worst', '')} {row.get('error', '')}".strip()
    extra = [f"iqr {row['iqr_ms']}", f"n {row['n']}"]
    extra += [f"{name} {row[key]}" for name, key in (("error", "error"), ("peak MB", "peak_mb")) if row.get(key)]
    return f"{what} {how}: {row['state']} {row['median_ms']} ms, {', '.join(extra)}"


def summary(rows: Rows, baseline: str) -> str:
    """Return all tables of the rows of an experiment; with '' as the baseline those that compare with none."""
    states, beside = {row["state"] for row in rows}, TITLES.get(baseline, baseline)
    titles = {state: f"{title}, median ms" for state, title in STATES.items() if state in states}
    if baseline and "warm" in titles:
        titles["warm"] += f" (times faster than {beside})"
    parts = [(title, times_table(rows, state, baseline)) for state, title in titles.items()]
    if baseline:
        parts.append(("Geometric means over the data sets of DF-GNN's Table 1", means_table(rows, baseline)))
        parts.append(("Other packages, as measured once", peers_table(rows)))
    parts.append(("Not timed", not_timed(rows)))
    return "\n\n".join(f"#### {title}\n\n{text}" for title, text in parts if text)
