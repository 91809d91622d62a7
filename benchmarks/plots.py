"""The figure of timing results: how many times faster than a baseline, as bars per graph.

``python -m benchmarks.plots results/bench/<gpu>/fig9.csv --baseline unfused`` draws the PNG beside a CSV anew.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.cases import TITLES
from benchmarks.results import Rows, Table
from benchmarks.tables import in_order, timed, times_faster

DRAWN_DIRECTIONS = ("fwd", "fwd+bwd")
"""Directions that have a row of panels."""

FIGURES = {
    "fig9": "Attention on batches of 1,024 graphs",
    "fig10a": "Attention on citation graphs",
    "fig10b": "Attention on whole graphs with super nodes",
    "fig11": "The optimisations of feature-parallel fusion, one after the other",
    "fig12": "Scores in a kernel of their own (pmf) against one kernel (smmf)",
    "fig13": "Attention on PATTERN by the number of channels",
    "fig14": "Attention on PATTERN by the number of graphs in a batch",
}
"""Stem of a file of the paper's figures -> title."""
WORDS = {
    "fwd": "forward",
    "fwd+bwd": "forward and backward",
    "GT": "TransformerConv",
    "GAT": "GATConv",
    "GATv2": "GATv2Conv",
    "AGNN": "AGNNConv",
    "ours": "pyg_dfgnn",
    "ours paper": "DF-GNN's fusions in pyg_dfgnn",
    "ours pmf": "pmf: scores in a kernel of their own",
    "ours smmf": "+ features read as vectors (smmf)",
    "ours feature_parallel+scores": "+ scores shared evenly by edges",
    "ours feature_parallel+scores+softmax": "+ softmax by edges",
    "smmf": "smmf: one kernel",
    "feature_parallel": "plain feature-parallel fusion",
    "cuSPARSE, unfused": "unfused calls of cuSPARSE",
    "torch.compile of PyG": "PyG under torch.compile",
}
"""Name in the rows -> words of a figure."""
DATA_SETS = {
    "citeseer": "CiteSeer",
    "cora": "Cora",
    "ppa": "ogbl-ppa",
    "proteins": "ogbn-proteins",
    "pubmed": "PubMed",
    "reddit": "Reddit",
    "voc": "PascalVOC",
}
"""Name of a graph without `_like` -> name of its data set, where that is not the same in capitals."""

Panel = Mapping[str, Mapping[str, float]]
"""Group of bars -> label of a bar -> times faster; a group without bars is one where the baseline has no time."""


def words(name: str) -> str:
    """Return the words of a figure for a direction, layer, implementation, graph, batch or size of the rows."""
    if heads_and_channels := re.fullmatch(r"(\d+)x(\d+)", name):
        heads, channels = heads_and_channels.groups()
        return f"{channels} channels" if heads == "1" else f"{heads} heads of {channels}"
    stem, _, count = name.partition("@")
    if count.isdigit():
        return f"{int(count):,} graphs"
    known = stem.removesuffix("_like")
    if known != stem or known in DATA_SETS:
        return DATA_SETS.get(known, known.upper()) + ("-like" if known != stem else "")
    return WORDS.get(name, name)


def draw_bars(axis: Any, groups: Sequence[Mapping[str, float]], labels: Sequence[str]) -> list[Any]:
    """Draw groups of bars that start at 1 on a logarithmic axis; return the bars of each label."""
    width, drawn = 0.8 / max(1, len(labels)), []
    for index, label in enumerate(labels):
        heights = {place: bars[label] for place, bars in enumerate(groups) if label in bars}
        shifted = [place + (index - (len(labels) - 1) / 2) * width for place in heights]
        tops = [height - 1.0 for height in heights.values()]
        drawn.append(axis.bar(shifted, tops, width, bottom=1.0, color=f"C{index}", label=label))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    return drawn


def speedup_figure(panels: Mapping[tuple[str, str], Panel], baseline: str, title: str) -> Any:
    """Return a figure of panels by row and column, whose bars start at 1, the baseline, on a logarithmic axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullLocator

    rows, columns = (list(dict.fromkeys(place[axis] for place in panels)) for axis in (0, 1))
    groups = max(len(panel) for panel in panels.values())
    width_inches = max(6.5, max(3.6, 0.9 * groups) * len(columns))
    figure = Figure(figsize=(width_inches, 2.6 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    found = {label for panel in panels.values() for bars in panel.values() for label in bars}
    labels = sorted(found, key=lambda label: (not label.startswith("ours"), label))
    for (row, column), panel in panels.items():
        axis = axes[rows.index(row)][columns.index(column)]
        draw_bars(axis, list(panel.values()), labels)
        for place, bars in enumerate(panel.values()):
            if not bars:
                axis.text(place, 1.05, "no time to\ncompare with", ha="center", va="bottom", fontsize="xx-small")
        factors = [1.2, *(factor for bars in panel.values() for factor in bars.values())]
        axis.set_ylim(min(0.9, 0.8 * min(factors)), max(2.0, 1.3 * max(factors)))
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xticks(range(len(panel)), map(words, panel), fontsize="small", rotation=20)
        axis.grid(axis="y", alpha=0.3)
        axis.set_title(", ".join(map(words, filter(None, (column, row)))), fontsize="medium")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"times faster than\n{words(baseline)}", fontsize="small")
    handles = [Patch(color=f"C{index}", label=words(label)) for index, label in enumerate(labels)]
    # A legend in as many columns as the figure has room for.
    inches = 0.6 + 0.08 * max(len(words(label)) for label in labels)
    columns_of_legend = max(1, int(width_inches / inches))
    figure.legend(handles=handles, loc="outside lower center", fontsize="small", ncols=columns_of_legend)
    figure.suptitle(title, fontsize="medium")
    return figure


def panels_of(rows: Rows, baseline: str) -> dict[tuple[str, str], Panel]:
    """The bars in float32 of the first size that was measured; of one graph, the bars of every size side by side."""
    rows = [row for row in rows if row["dtype"] == "float32"]
    shown, factors = timed(rows), times_faster(rows, baseline)
    directions = [name for name in DRAWN_DIRECTIONS if name in {row["direction"] for row in shown}]
    sizes = list(dict.fromkeys(row["size"] for row in shown))
    graphs = in_order(row["graph"] for row in shown)
    panels: dict[tuple[str, str], Panel] = {}
    for direction in directions:
        for layer in sorted({row["layer"] for row in shown}):
            if len(graphs) == 1:
                panel = {size: factors.get((layer, size, direction, graphs[0]), {}) for size in sizes}
            else:
                panel = {graph: factors.get((layer, sizes[0], direction, graph), {}) for graph in graphs}
            panels[direction, layer] = panel
    return panels


def figure_of(rows: Rows, baseline: str, name: str) -> Any:
    """Return the figure of the rows of an experiment; None where nothing was timed beside the baseline."""
    panels = panels_of(rows, baseline)
    if not any(bars for panel in panels.values() for bars in panel.values()):
        return None
    return speedup_figure(panels, TITLES.get(baseline, baseline), f"{FIGURES.get(name, name)}, {rows[0]['gpu']}")


def draw(rows: Rows, baseline: str, path: Path) -> Path | None:
    """Draw the figure of an experiment, named by the file; return the path, or None where there is none to draw."""
    figure = figure_of(rows, baseline, path.stem)
    if figure is None:
        return None
    save_figure(figure, path)
    return path


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib in 64 colours, which take fewer bytes than all."""
    from PIL import Image

    with BytesIO() as whole:
        figure.savefig(whole, format="png", dpi=96)
        Image.open(whole).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="of an experiment")
    parser.add_argument("--baseline", default="pyg", help="implementation or schedule (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.csv.is_file():
        parser.error(f"'csv' needs a file that is there (got {options.csv})")
    path = draw(Table.read(options.csv), options.baseline, options.csv.with_suffix(".png"))
    if path is None:
        parser.error(f"{options.csv} has no time beside one of --baseline={options.baseline}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
