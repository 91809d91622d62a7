"""Figures and the page of a folder of timing results: ``python -m pyg_dfgnn.bench.plots results/bench/<gpu>``.

Only CSV files are read, so figures and tables can be made anew anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyg_dfgnn.bench import tables
from pyg_dfgnn.bench.results import Rows, Table
from pyg_dfgnn.bench.tables import KINDS, in_order, label, milliseconds, size, speedups, timed
from pyg_dfgnn.bench.targets import CHOICE_LOSS, HEADS_RATIO, peers

ALIASES = {"fig15": "fig9", "heads": "peers"}
"""Experiments that draw the rows of another."""

Series = Mapping[str, Mapping[str, float]]
"""Label -> group -> value; a missing group has no bar."""


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each label, ours first, so that all panels of a figure agree."""
    ordered = sorted(dict.fromkeys(names), key=lambda name: not name.startswith("ours"))
    return {name: f"C{index}" for index, name in enumerate(ordered)}


def _bars(
    axis: Any,
    groups: Sequence[str],
    series: Series,
    colours: Mapping[str, str],
    spreads: Series | None = None,
    log: bool = False,
) -> None:
    """Grouped bars with their groups named below, in the order of the colours; dots where a log axis has no zero."""
    shown = [name for name in colours if name in series]
    width = 0.8 / max(1, len(shown))
    for index, name in enumerate(shown):
        values = series[name]
        places = [place for place, group in enumerate(groups) if group in values]
        heights = [values[groups[place]] for place in places]
        errors = None if spreads is None else [spreads.get(name, {}).get(groups[place], 0.0) for place in places]
        shift = (index - (len(shown) - 1) / 2) * width
        shifted = [place + shift for place in places]
        if log:
            axis.errorbar(shifted, heights, errors, fmt="o", color=colours[name], label=name)
        else:
            axis.bar(shifted, heights, width, yerr=errors, color=colours[name], label=name)
    if log:
        axis.set_yscale("log")
    axis.set_xticks(range(len(groups)), groups, fontsize="small")
    axis.grid(axis="y", alpha=0.3)


def _legend(figure: Any, axes: Any) -> None:
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(found.values(), found, loc="outside lower center", fontsize="small", ncols=4)


def _title(name: str, rows: Rows) -> str:
    return f"{name}, {rows[0]['gpu']}"


def speedup_figure(name: str, rows: Rows) -> Any:
    """Per layer and direction: times faster than unfused calls, and below it the share of the bandwidth in use."""
    shown = [row for row in timed(rows) if row["dtype"] == "float32"]
    layers = sorted({row["layer"] for row in shown})
    directions = sorted({row["direction"] for row in shown}, key=len)
    graphs = in_order(row["graph"] for row in shown)
    colours = _colours(map(label, shown))
    figure, axes = _axes(2 * len(directions), len(layers), max(3.4, 0.8 * len(graphs)), 2.3)
    for x, layer in enumerate(layers):
        for y, direction in enumerate(directions):
            mine = [row for row in shown if (row["layer"], row["direction"]) == (layer, direction)]
            factors: dict[str, dict[str, float]] = {}
            for place, factor in speedups(mine).items():
                factors.setdefault(place[4], {})[place[3]] = factor
            used: dict[str, dict[str, float]] = {}
            for row in mine:
                used.setdefault(label(row), {})[row["graph"]] = 100 * float(row["utilisation"])
            above, below = axes[2 * y][x], axes[2 * y + 1][x]
            _bars(above, graphs, factors, colours)
            above.axhline(1.0, color="black", linewidth=0.8)
            above.set_title(f"{layer} {direction}", fontsize="medium")
            _bars(below, graphs, used, colours)
            above.tick_params(axis="x", labelbottom=False)
            below.tick_params(axis="x", rotation=30)
            if not x:
                above.set_ylabel("times faster than\nunfused cuSPARSE")
                below.set_ylabel("compulsory bytes, %\nof copy bandwidth")
    _legend(figure, axes)
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def line_figure(name: str, rows: Rows, number: Callable[[Any], int], what: str) -> Any:
    """Times and speed-ups over a number that the cases differ in."""
    shown = [row for row in timed(rows) if row["dtype"] == "float32"]
    figure, ((left, right),) = _axes(1, 2, 4.0, 3.2)
    base = {number(row): milliseconds(row) for row in shown if row["implementation"] == "unfused"}
    for index, implementation in enumerate(dict.fromkeys(map(label, shown))):
        mine = sorted((row for row in shown if label(row) == implementation), key=number)
        numbers = [number(row) for row in mine]
        left.plot(numbers, [milliseconds(row) for row in mine], marker="o", color=f"C{index}", label=implementation)
        ratios = [(number(row), base[number(row)] / milliseconds(row)) for row in mine if number(row) in base]
        if ratios and mine[0]["implementation"] != "unfused":
            right.plot(*zip(*ratios, strict=True), marker="o", color=f"C{index}")
    for axis, text in ((left, "ms"), (right, "times faster than unfused cuSPARSE")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel(what)
        axis.set_ylabel(text)
        axis.grid(alpha=0.3)
    left.set_yscale("log")
    left.legend(fontsize="small")
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def _channels(row: Any) -> int:
    return int(row["channels"])


def _batch_size(row: Any) -> int:
    return int(row["graph"].partition("@")[2])


def ablation_figure(name: str, rows: Rows) -> Any:
    """Times faster than the first schedule, one bar per schedule."""
    shown = timed(rows)
    schedules = list(dict.fromkeys(row["schedule"] for row in shown))
    times = {(row["schedule"], row["graph"]): milliseconds(row) for row in shown}
    graphs = [g for g in in_order(row["graph"] for row in shown) if (schedules[0], g) in times]
    figure, axes = _axes(1, 1, 7.0, 3.4)
    gains = {
        schedule: {g: times[schedules[0], g] / times[schedule, g] for g in graphs if (schedule, g) in times}
        for schedule in schedules
    }
    _bars(axes[0][0], graphs, gains, _colours(schedules))
    axes[0][0].set_ylabel(f"times faster than\n{schedules[0]}")
    _legend(figure, axes)
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def times_figure(name: str, rows: Rows) -> Any:
    """Milliseconds per graph, one panel per layer, size and direction, one bar per implementation and schedule."""
    shown = timed(rows)
    keys = sorted({(row["layer"], size(row), row["direction"]) for row in shown})
    columns = min(4, len(keys))
    colours = _colours(map(label, shown))
    figure, axes = _axes(-(-len(keys) // columns), columns, 3.6, 2.6)
    for key, axis in zip(keys, axes.flat, strict=False):
        mine = [row for row in shown if (row["layer"], size(row), row["direction"]) == key]
        values: dict[str, dict[str, float]] = {}
        spreads: dict[str, dict[str, float]] = {}
        for row in mine:
            values.setdefault(label(row), {})[row["graph"]] = milliseconds(row)
            spreads.setdefault(label(row), {})[row["graph"]] = float(row["iqr_ms"]) / 2
        _bars(axis, in_order(row["graph"] for row in mine), values, colours, spreads, log=True)
        axis.set_title(" ".join(key), fontsize="medium")
        axis.tick_params(axis="x", rotation=30)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms")
    _legend(figure, axes)
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def heads_figure(name: str, rows: Rows) -> Any:
    """Time of 8 heads of 16 over that of 1 head of 128."""
    shown = [row for row in timed(rows) if label(row) == "ours" and row["direction"] in ("fwd", "fwd+bwd")]
    times = {(row["layer"], row["direction"], row["dtype"], row["graph"], size(row)): row for row in shown}
    panels = sorted({key[1:3] for key in times})
    figure, axes = _axes(1, max(1, len(panels)), 3.4, 3.0)
    for (direction, dtype), axis in zip(panels, axes[0], strict=False):
        ratios: dict[str, dict[str, float]] = {}
        for layer, way, kind, graph, which in times:
            one = times.get((layer, way, kind, graph, "H=1 d=128"))
            if (way, kind, which) == (direction, dtype, "H=8 d=16") and one is not None:
                eight = times[layer, way, kind, graph, which]
                ratios.setdefault(layer, {})[graph] = milliseconds(eight) / milliseconds(one)
        _bars(axis, in_order(row["graph"] for row in shown), ratios, _colours(sorted(ratios)))
        axis.axhline(HEADS_RATIO, color="black", linewidth=0.8)
        axis.set_title(f"{direction} {dtype}", fontsize="medium")
    axes[0][0].set_ylabel("8 heads of 16 / 1 head of 128")
    _legend(figure, axes)
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def choice_figure(name: str, rows: Rows) -> Any:
    """What `auto` loses to the fastest schedule, in percent: one cell per graph, layer and direction."""
    found = tables.choices(rows)
    graphs = in_order(key[0] for key in found)
    columns = sorted({key[1:] for key in found})
    cells = [[getattr(found.get((g, c[0], c[1], c[2], c[3])), "loss", None) for c in columns] for g in graphs]
    figure, axes = _axes(1, 1, max(4.0, 1.1 * len(columns)), max(2.0, 0.3 * len(graphs) + 1.2))
    axis = axes[0][0]
    values = [[float("nan") if cell is None else 100 * cell for cell in line] for line in cells]
    # Without rows of `auto` there is nothing to judge.
    image = axis.imshow(values or [[float("nan")]], aspect="auto", cmap="RdYlGn_r", vmin=0.0, vmax=200 * CHOICE_LOSS)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axis.text(x, y, "-" if value != value else f"{value:.1f}", ha="center", va="center", fontsize="small")
    # Only what differs between columns is named.
    named = [part for part in range(4) if len({column[part] for column in columns}) > 1]
    axis.set_xticks(range(len(columns)), ["\n".join(c[part] for part in named) for c in columns], fontsize="small")
    axis.set_yticks(range(len(graphs)), graphs, fontsize="small")
    figure.colorbar(image, label="% slower than the fastest schedule")
    figure.suptitle(_title(name, rows), fontsize="medium")
    return figure


def peers_figure(name: str, rows: Rows, direction: str) -> Any:
    """Per graph and layer, one head of 128: every implementation in each dtype; crosses are other packages."""
    shown = [row for row in timed(rows) if row["direction"] == direction and size(row) == "H=1 d=128"]
    graphs = in_order(row["graph"] for row in shown)
    scores = {row["layer"]: row["score"] for row in shown}
    colours = _colours(sorted(f"{label(row)} {row['dtype']}" for row in shown))
    figure, axes = _axes(max(1, len(graphs)), 1, max(6.0, 2.2 * len(scores)), 2.4)
    for graph, axis in zip(graphs, axes[:, 0], strict=False):
        values: dict[str, dict[str, float]] = {}
        for row in shown:
            if row["graph"] == graph:
                values.setdefault(f"{label(row)} {row['dtype']}", {})[row["layer"]] = milliseconds(row)
        _bars(axis, list(scores), values, colours, log=True)
        others = [
            (place, peer.time_ms)
            for place, score in enumerate(scores.values())
            for peer in peers()
            if peer.is_right and peer.graph == graph and peer.key == (score, 1, 128, "float32", direction)
        ]
        if others:
            axis.plot(*zip(*others, strict=True), "kx", label="other packages, float32, measured once")
        axis.set_ylabel(f"({graph}) ms")
    _legend(figure, axes)
    figure.suptitle(f"{_title(name, rows)}, {direction}", fontsize="medium")
    return figure


FIGURES: dict[str, dict[str, Callable[[str, Rows], Any]]] = {
    "peers": {
        "-fwd": lambda name, rows: peers_figure(name, rows, "fwd"),
        "-fwd-bwd": lambda name, rows: peers_figure(name, rows, "fwd+bwd"),
    },
    "heads": {"": heads_figure},
    "fig9": {"": speedup_figure},
    "fig10a": {"": speedup_figure},
    "fig10b": {"": speedup_figure},
    "fig11": {"": ablation_figure},
    "fig12": {"": times_figure},
    "fig13": {"": lambda name, rows: line_figure(name, rows, _channels, "features")},
    "fig14": {"": lambda name, rows: line_figure(name, rows, _batch_size, "graphs in the batch")},
    "fig15": {"": speedup_figure},
    "choice": {"": choice_figure},
}
"""The figures of an experiment: suffix of the file name -> what draws it; another experiment gets its times."""


def draw(name: str, rows: Rows, folder: Path) -> list[Path]:
    """Draws the figures of an experiment.

    Args:
        name: Of the experiment.
        rows: Of its CSV.
        folder: Where to write ``<name><suffix>.png``.

    Returns:
        The files written; none where nothing was timed.
    """
    paths = []
    if timed(rows):
        for suffix, figure in FIGURES.get(name, {"": times_figure}).items():
            path = folder / f"{name}{suffix}.png"
            figure(name, rows).savefig(path, dpi=110)
            paths.append(path)
    return paths


def page(folder: Path) -> str:
    """Every table and figure of a folder as one Markdown page; draws the figures."""
    files = {path.stem: Table.read(path) for path in sorted(folder.glob("*.csv"))}
    results = {name: rows for name, rows in files.items() if rows and "median_ms" in rows[0]}
    parts = [f"# Times on {folder.name}", "Made by `python -m pyg_dfgnn.bench.plots` from the CSV files beside it."]
    published = [row for name in ("fig9", "fig10a", "fig10b") for row in results.get(name, [])]
    if timed(published):
        count = len({row["graph"] for row in timed(published)} & set(KINDS["all"]))
        parts += [f"## The {count} data sets together", "Speed-up over unfused cuSPARSE calls, on the device:"]
        parts += [tables.means_table(published), "With the host's time, where that is longer:"]
        parts.append(tables.means_table(published, with_host=True))
    for name in [*(n for n in FIGURES if ALIASES.get(n, n) in results), *(n for n in results if n not in FIGURES)]:
        rows = results[ALIASES.get(name, name)]
        parts.append(f"## {name}")
        parts += [f"![{path.stem}]({path.name})" for path in draw(name, rows, folder)]
        # Goals are no results.
        parts.append(tables.of(name, rows, without=("Targets",)))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds <experiment>.csv files")
    options = parser.parse_args(arguments)
    path = options.folder / "README.md"
    path.write_text(page(options.folder))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
