"""Bar charts of a timing CSV: ``python -m pyg_dfgnn.bench.plots results/bench/<gpu>.csv`` writes PNGs beside it."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from pyg_dfgnn.bench.tables import Rows, latest

BARS = (
    ("fused", "bfloat16"),
    ("fused", "float32"),
    ("unfused", "float32"),
    ("compile", "float32"),
    ("pyg", "float32"),
)


def plot_times(rows: Rows, direction: str, path: Path) -> Path:
    """One panel per graph: warm median milliseconds of each implementation by layer and size, log scale.

    Args:
        rows: Of a timing CSV.
        direction: 'fwd', 'fwd+bwd' or 'bwd'.
        path: The PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [
        row
        for row in latest(rows).values()
        if row["direction"] == direction
        and row["state"] == "warm"
        and row["status"] == "ok"
        and row["score"] != "graph"
    ]
    graphs = sorted({row["graph"] for row in shown})
    groups = sorted({(row["layer"], int(row["heads"]), int(row["channels"])) for row in shown})
    figure = Figure(figsize=(max(6, 1.3 * len(groups)), 2.6 * max(1, len(graphs))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(graphs)), 1, squeeze=False)[:, 0]
    width = 0.8 / len(BARS)
    for axis, graph in zip(axes, graphs, strict=False):
        for index, (implementation, dtype) in enumerate(BARS):
            places, heights, spreads = [], [], []
            for place, (layer, heads, channels) in enumerate(groups):
                for row in shown:
                    same = (row["layer"], int(row["heads"]), int(row["channels"])) == (layer, heads, channels)
                    if same and (row["graph"], row["implementation"], row["dtype"]) == (graph, implementation, dtype):
                        places.append(place + (index - (len(BARS) - 1) / 2) * width)
                        heights.append(float(row["median_ms"]))
                        spreads.append(float(row["iqr_ms"]) / 2)
            axis.bar(places, heights, width, yerr=spreads, color=f"C{index}", label=f"{implementation} {dtype}")
        axis.set_yscale("log")
        axis.set_ylabel("ms")
        axis.set_title(f"graph ({graph}), {direction}", fontsize="medium")
        axis.set_xticks(range(len(groups)), [f"{layer}\nH={h} d={c}" for layer, h, c in groups], fontsize="small")
    if graphs:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", fontsize="small", ncols=3)
    figure.savefig(path, dpi=130)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    options = parser.parse_args(arguments)
    with options.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for direction in ("fwd", "fwd+bwd"):
        name = f"{options.csv.stem}-{direction.replace('+', '-')}.png"
        print(plot_times(rows, direction, options.csv.with_name(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
