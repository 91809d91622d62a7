"""Writes the numbers of the documents anew from the CSV files in ``results/``, and draws the figure of the README.

python -m benchmarks.published           rewrite README.md and docs/, and draw docs/times_faster.png
python -m benchmarks.published --check   only say which documents differ from the results; exit code 1 if any does

A document holds a number of ours between the lines ``<!-- published: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from benchmarks import table2_report, tables
from benchmarks.orders import gains_table
from benchmarks.results import Table, markdown

ROOT = Path(__file__).resolve().parents[1]
GPU, OTHER_GPU = "nvidia-h200", "nvidia-h100-80gb-hbm3"
"""Where most was measured, and where the rest was."""
FIGURE = ROOT / "docs" / "times_faster.png"
BACKENDS = {
    "auto": "pyg_dfgnn",
    "auto_graph": "pyg_dfgnn, steps in a CUDA graph",
    "pyg_compile": "PyG under torch.compile",
}
"""Backends of the training steps of Table 2."""
MOLECULES = {"pyg": "PyG", "auto": "pyg_dfgnn", "auto_graph": "pyg_dfgnn, captured"}
LOOPS = {
    ("molecules", ""): "batches of molecules",
    ("superpixels", ""): "batches of superpixels",
    ("sampled", ""): "sampled neighbours",
    ("own", "new"): "layers of one's own, new edges",
    ("temporal", ""): "recurrent cells",
    ("dynamic", ""): "neighbours found in each layer",
    ("relations", ""): "relations by masks",
    ("forces", ""): "energies and forces of molecules",
    ("own", "same"): "layers of one's own",
    ("edge_networks", ""): "networks on the edges of a mesh",
    ("small", ""): "a graph like Cora",
    ("large", "arxiv"): "a graph like ogbn-arxiv",
    ("large", "reddit"): "a graph like Reddit, 20M edges",
}
"""What is shown of the loops, each by loop and size."""
DRAWN = {
    ("molecules", ""): "molecules,\nnew batches",
    ("superpixels", ""): "superpixels,\nnew batches",
    ("sampled", ""): "sampled\nneighbours",
    ("edge_networks", ""): "networks\non edges",
    ("small", ""): "a graph\nlike Cora",
    ("large", "arxiv"): "a graph like\nogbn-arxiv",
    ("large", "reddit"): "a graph like\nReddit",
}
"""Those in the figure of the README."""
WAYS_TO_TRAIN = {
    "pyg_compile": "PyG, compiled",
    "ours": "pyg_dfgnn",
    "ours_compile": "pyg_dfgnn, compiled",
    "ours_captured": "pyg_dfgnn, captured",
}
EDGE_NETWORKS = {
    "edgeconv_max": "`EdgeConv`, max",
    "edgeconv_add": "`EdgeConv`, sum",
    "egnn": "EGNN",
    "cfconv": "filters of SchNet",
    "meshgraphnet": "MeshGraphNet",
    "gates": "product of two gates",
    "nnconv": "`NNConv`",
}
"""Models of that loop, with their titles."""
GRAPHS = {
    "a": "PATTERN batch",
    "e": "superpixel batch",
    "b": "Cora-like",
    "d": "proteins-like",
    "c": "Reddit-like",
}
ATTENTION_STACKS = ("transformer_stack", "agnn_stack", "gat_stack")
LAYERS = {"GAT": "GATConv", "GATv2": "GATv2Conv", "GT": "TransformerConv", "AGNN": "AGNNConv"}

WAYS = ("fwd", "fwd+bwd")

Row = Mapping[str, Any]


def timings(name: str) -> list[Row]:
    """Return the rows of an experiment."""
    return [*Table.read(ROOT / "results" / "bench" / GPU / f"{name}.csv")]


def steps_of(model: str) -> list[Row]:
    """Return the rows of the training steps of a model."""
    return table2_report.latest(Table.read(ROOT / "results" / "table2" / f"{model}-{GPU}.csv"))


def both_ways() -> dict[tuple[str, str, str], Row]:
    """Return the rows of forward and backward of one layer, by layer, graph and implementation."""
    rows = [row for row in tables.latest(timings("peers")) if row["size"] == "1x128" and row["dtype"] == "float32"]
    shown = [row for row in rows if row["direction"] in ("fwd+bwd", "") and row["state"] in ("warm", "")]
    return {(row["layer"], row["graph"], row["implementation"]): row for row in shown if row["layer"] in LAYERS}


def layers() -> str:
    """Milliseconds of ours and of PyG's for forward and backward of each layer on each graph."""
    rows = both_ways()
    edges = {row["graph"]: int(row["edges"]) for row in rows.values()}
    body = []
    for layer, name in LAYERS.items():
        cells = []
        for graph in GRAPHS:
            ours, theirs = rows[layer, graph, "fused"], rows.get((layer, graph, "pyg"))
            pygs = f"{tables.milliseconds(theirs):.3g}" if theirs and theirs["status"] == "ok" else "-"
            cells.append(f"{tables.milliseconds(ours):.3g} / {pygs}")
        body.append([f"`{name}`", *cells])
    header = ["ms, ours / PyG's", *(f"{title}, {_count(edges[graph])} edges" for graph, title in GRAPHS.items())]
    return markdown(header, body)


def _count(number: int) -> str:
    if number < 1e5:
        return f"{number:,}"
    return f"{number / 1e6:.2g}M" if number < 1e7 else f"{number / 1e6:.0f}M"


def host() -> str:
    """How long the host takes for eager calls on the small graph."""
    rows = both_ways()

    def span(implementation: str) -> str:
        times = [float(rows[layer, "b", implementation]["host_us"]) / 1e3 for layer in LAYERS]
        return f"{min(times):.2g} to {max(times):.2g} ms"

    return f"The host takes {span('fused')} for an eager forward and backward of ours there, {span('pyg')} for PyG's."


def _factors() -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """Key of :data:`LOOPS` -> way to train -> times faster than PyG's step by size and model; for "pyg" its ms."""
    rows = {
        (row["loop"], row["size"], row["model"], row["implementation"]): row
        for row in Table.read(ROOT / "results" / "loops.csv")
        if row["status"] == "ok"
    }
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for (loop, size, model, way), row in rows.items():
        place = next((key for key in LOOPS if key[0] == loop and key[1] in ("", size)), None)
        if place is None or (way != "pyg" and not row["ratio"]):
            continue
        # Compiled steps are compared with compiled ones in the CSV.
        pyg = rows[loop, size, model, "pyg"]["ms"]
        factor = float(pyg) / float(row["ms"]) if row["baseline"] == "pyg_compile" else float(row["ratio"] or 1)
        found.setdefault(place, {}).setdefault(way, {})[f"{size} {model}"] = float(pyg) if way == "pyg" else factor
    return {place: found[place] for place in LOOPS if place in found}


def _ways() -> dict[str, str]:
    """The ways to train that were measured, with their titles."""
    measured = {way for by_way in _factors().values() for way in by_way}
    return {way: title for way, title in WAYS_TO_TRAIN.items() if way in measured}


def loops() -> str:
    """How many times faster than PyG's the training steps of the loops are: geometric mean, least and most."""
    body, ways = [], _ways()
    for place, by_way in _factors().items():
        cells = []
        for way in ways:
            values = by_way.get(way, {}).values()
            span = f" ({min(values):.2g} to {max(values):.2g})" if len(values) > 1 else ""
            cells.append(f"{geometric_mean(values):.2g}{span}" if values else "-")
        body.append([LOOPS[place], f"{geometric_mean(by_way['pyg'].values()):.3g}", *cells])
    return markdown(["training step", "PyG, ms", *ways.values()], body)


def edge_networks() -> str:
    """Milliseconds of training steps of edge networks, and peak megabytes."""
    rows = {(row["model"], row["implementation"]): row for row in Table.read(ROOT / "results" / "loops.csv")
            if row["loop"] == "edge_networks" and row["status"] == "ok"}  # fmt: skip
    body = []
    for model, title in EDGE_NETWORKS.items():
        cells = [f"{title}, {rows[model, 'pyg']['size'][1:]}"]
        for way in ("pyg", *WAYS_TO_TRAIN):
            row = rows[model, way]
            peak = f" / {float(row['peak_mb']):,.0f}" if row["peak_mb"] else ""
            cells.append(f"{float(row['ms']):.3g}{peak}")
        body.append(cells)
    return markdown(["network, width", "PyG, ms / MB", *WAYS_TO_TRAIN.values()], body)


def molecules() -> str:
    """Mean absolute error of test molecules by backend, over the seeds."""
    errors: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in Table.read(ROOT / "results" / "molecules.csv"):
        setting = row["data"], row["unit"], row["overrides"]
        errors.setdefault(setting, {}).setdefault(row["backend"], []).append(float(row["test_error"]))
    body = []
    for (data, unit, overrides), by_backend in errors.items():
        command = f"`data={data}{' ' if overrides else ''}{overrides}`"
        cells = [f"{mean(values):.3g} ({min(values):.3g} to {max(values):.3g})" for values in by_backend.values()]
        seeds = len(next(iter(by_backend.values())))
        body.append([command, unit, seeds, *(dict(zip(by_backend, cells, strict=True))[name] for name in MOLECULES)])
    return markdown(["run", "unit", "seeds", *MOLECULES.values()], body)


def implementations() -> str:
    """Median milliseconds of every implementation of one layer with one head of 128 channels."""
    rows = [row for row in timings("peers") if row["size"] == "1x128" and row["direction"] in ("fwd", "fwd+bwd")]
    return tables.times_table([row for row in rows if row["dtype"] in ("float32", "bfloat16")])


def builds() -> str:
    """Milliseconds that the sort of a new `edge_index` takes."""
    rows = [row for row in tables.latest(timings("peers")) if row["op"] == "graph"]
    graphs = tables.in_order(row["graph"] for row in rows)
    time = {(row["direction"], row["graph"]): f"{tables.milliseconds(row):.3g}" for row in rows}
    body = [[what, *(time.get((what, graph), "") for graph in graphs)] for what in ("csr", "csc")]
    return markdown(["sort", *graphs], body)


def peers() -> str:
    """Our times beside the fastest right result of another package."""
    return tables.peers_table([row for row in timings("peers") if row["size"] == "1x128"])


def means() -> str:
    """Geometric means of the times faster than unfused calls over the data sets of the paper."""
    return tables.means_table([row for name in ("fig9", "fig10a", "fig10b") for row in timings(name)], "unfused")


def check() -> str:
    """The worst error against float64 by schedule and dtype."""
    rows = [row for row in Table.read(ROOT / "results" / "check" / f"{GPU}.csv") if row["worst_error"]]
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["schedule"]):
        line = errors.setdefault((row["schedule"], row["dtype"]), {})
        line[row["tensors"]] = max(line.get(row["tensors"], 0.0), float(row["worst_error"]))
    columns = list(dict.fromkeys(row["tensors"] for row in rows))
    bounds = {row["dtype"]: row["bound"] for row in rows}
    body = [
        [f"`{schedule}`", dtype, *(f"{line[name]:.1e}" if name in line else "-" for name in columns), bounds[dtype]]
        for (schedule, dtype), line in errors.items()
    ]
    return markdown(["schedule", "dtype", *columns, "bound"], body)


def segment() -> str:
    """Median milliseconds of aggregations of 128 features, forward and with backward."""
    return _measured("segment", tables.times_table)


def segment_peers() -> str:
    """Our times of aggregations beside the fastest right result of another package, on the GPU of those results."""
    return _measured("segment", tables.peers_table, (GPU,))


def lanes() -> str:
    """Milliseconds of sums of few features by what lanes to spare do."""
    return _measured("lanes", tables.times_table)


def reorder() -> str:
    """Times faster of layers on reordered graphs, with the cost of each order and the calls until it has paid."""
    costs = [*Table.read(ROOT / "results" / "bench" / GPU / "reorder-cost.csv")]
    return _measured("reorder", partial(gains_table, costs), (GPU,))


def _measured(name: str, make: Callable[[list[Row]], str], gpus: Sequence[str] = (GPU, OTHER_GPU)) -> str:
    """Return the table of an experiment for each GPU that it was measured on, or how it is measured."""
    folder, parts = ROOT / "results" / "bench", list[str]()
    for path in (folder / gpu / f"{name}.csv" for gpu in gpus):
        if path.exists():
            rows: list[Row] = [row for row in Table.read(path) if row["op"] != "graph"]
            parts.append(f"On {rows[0]['gpu']}:\n\n{make(rows)}")
    if parts:
        return "\n\n".join(parts)
    path = (folder / gpus[0] / f"{name}.csv").relative_to(ROOT)
    return f"Not measured yet: `python -m benchmarks experiment={name}` writes `{path}`."


def relational() -> str:
    """Milliseconds of relational layers, forward and with backward, by schedule and implementation."""
    shown = (
        *(("fused", "replay"), ("fused", "warm"), ("hector_cf", "warm"), ("hector_c", "warm"), ("hector", "warm")),
        *(("pyg", "warm"), ("pyg_fast", "warm"), ("compile", "warm"), ("fasten", "warm")),
    )
    lines = [(*line, "float32") for line in shown]
    lines += [(*line, "tf32") for line in shown if line[0] in ("fused", "fasten")]

    def table(rows: list[Row]) -> str:
        rows = tables.latest(rows)
        times = {
            (
                row["layer"],
                row["implementation"],
                row["state"] or "warm",
                row["dtype"],
                row["graph"],
                row["direction"],
            ): row
            for row in rows
        }
        graphs, layers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("graph", "layer"))
        body = []
        for layer in layers:
            for implementation, state, dtype in lines:
                cells = []
                for graph in graphs:
                    pair = [times.get((layer, implementation, state, dtype, graph, way)) for way in WAYS]
                    cells.append(" / ".join(_time(row) for row in pair) if any(pair) else "")
                if any(cell.strip(" /-") for cell in cells):
                    title = tables.TITLES[implementation] + (", replayed" if state == "replay" else "")
                    title += ", TF32 allowed" if dtype == "tf32" else ""
                    body.append([layer, title, *cells])
        return markdown(["layer", "implementation", *graphs], body)

    return _measured("relational", table)


def _time(row: Row | None) -> str:
    if row is None or row["status"].startswith(("not run", "no result")):
        return "-"
    return f"{tables.milliseconds(row):.3g}" if row["status"] == "ok" else str(row["status"])


def messages() -> str:
    """Milliseconds of compiled layers, forward / with backward, with the times faster than PyG and compiled PyG."""
    return _measured("messages", partial(_messages, "fused", ("pyg", "compile")))


def restated() -> str:
    """Milliseconds of drop-ins whose layers are restated, with the times faster than the compiled messages."""
    return _measured("messages", partial(_messages, "drop_in", ("fused",)))


def _messages(name: str, others: Sequence[str], rows: list[Row]) -> str:
    """Milliseconds of an implementation, forward / with backward, with the times faster than others, by graph."""
    rows = tables.latest(rows)
    times = {(row["layer"], row["graph"], row["implementation"], row["direction"]): row for row in rows}
    graphs, layers = (list(dict.fromkeys(row[column] for row in rows)) for column in ("graph", "layer"))

    def faster(layer: str, graph: str, other: str, way: str) -> str:
        ours, theirs = times.get((layer, graph, name, way)), times.get((layer, graph, other, way))
        if ours is None or theirs is None or not ours["status"] == theirs["status"] == "ok":
            return "-"
        return f"{tables.milliseconds(theirs) / tables.milliseconds(ours):.2g}"

    def cell(layer: str, graph: str) -> str:
        found = [times.get((layer, graph, name, way)) for way in WAYS]
        if not any(found) or (name == "drop_in" and all(row and row["status"].startswith("not run") for row in found)):
            return ""
        factors = [" / ".join(faster(layer, graph, other, way) for way in WAYS) for other in others]
        known = [factor for factor in factors if factor.strip("-/ ")]
        return " / ".join(map(_time, found)) + (f" ({', '.join(known)})" if known else "")

    body = [[layer, *(cell(layer, graph) for graph in graphs)] for layer in layers]
    return markdown(["layer", *graphs], [line for line in body if any(line[1:])])


def message_steps() -> str:
    """Times faster in the wall time of a training step, by graph: geometric means over layers, and what is slower."""
    rows = timings("message-steps")
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    times = {(row["graph"], row["layer"], row["implementation"]): row for row in rows if row["status"] == "ok"}
    body = []
    for ours, way in (("fused", "eager"), ("fused_captured", "in a CUDA graph")):
        for theirs, other in (("pyg", "PyG"), ("compile", "`torch.compile` of it")):
            cells = []
            for graph in graphs:
                factors = {
                    layer: float(times[graph, layer, theirs]["step_ms"]) / float(row["step_ms"])
                    for (place, layer, name), row in times.items()
                    if place == graph and name == ours and (graph, layer, theirs) in times
                }
                slower = sum(factor < 1 for factor in factors.values())
                cells.append(f"{geometric_mean(factors.values()):.2g} ({slower} of {len(factors)})")
            body.append([f"{way}, than {other}", *cells])
    return markdown(["steps", *graphs], body)


def conv_steps() -> str:
    """Milliseconds of a training step and peak memory of the models without attention, by data set and backend."""
    body = []
    for path in sorted((ROOT / "results" / "table2").glob(f"*_stack-{GPU}.csv")):
        model = path.name.removesuffix(f"-{GPU}.csv")
        if model in ATTENTION_STACKS:
            continue
        rows = {(row["dataset"], row["backend"]): row for row in steps_of(model)}
        for dataset in dict.fromkeys(dataset for dataset, _ in rows):
            cells = [_step(rows.get((dataset, backend))) for backend in ("pyg", *BACKENDS)]
            body.append([f"`{model.removesuffix('_stack')}`", dataset, *cells])
    if not body:
        return "Not measured yet: `python -m benchmarks.measure` writes `results/table2/*_stack-*.csv`."
    return markdown(["model", "data set", "PyG", *BACKENDS.values()], body)


def _step(row: Row | None) -> str:
    if row is None or row["status"] != "ok":
        return "" if row is None else str(row["status"]).split(":")[0]
    return f"{float(row['wall_ms']):.3g} ms, {float(row['peak_mb'] or 0) / 1e3:.2g} GB"


def _table2(model: str) -> Callable[[], str]:
    return lambda: table2_report.times_table(steps_of(model))


PUBLISHED: dict[str, Callable[[], str]] = {
    **{
        make.__name__: make
        for make in (layers, host, loops, edge_networks, molecules, implementations, builds, peers, means, check)
    },
    **{make.__name__: make for make in (segment, segment_peers, lanes, reorder)},
    **{make.__name__: make for make in (relational, messages, restated, message_steps, conv_steps)},
    **{model: _table2(model) for model in ATTENTION_STACKS},
}
"""What documents may hold, by name."""

_PLACE = re.compile(r"(<!-- published: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """Return a document with its numbers written anew."""
    return _PLACE.sub(lambda found: found[1] + PUBLISHED[found[2]]() + "\n" + found[3], text)


def documents() -> list[Path]:
    """Return the documents of the project."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def draw(path: Path) -> None:
    """Draw how many times faster than PyG's a training step is, one group of bars per loop."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    factors = {place: by_way for place, by_way in _factors().items() if place in DRAWN}
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    ways = _ways()
    width = 0.8 / len(ways)
    for index, (way, label) in enumerate(ways.items()):
        heights = {k: geometric_mean(by[way].values()) for k, by in enumerate(factors.values()) if way in by}
        places = [place + (index - (len(ways) - 1) / 2) * width for place in heights]
        bars = axis.bar(
            places, [height - 1 for height in heights.values()], width, bottom=1.0, color=f"C{index}", label=label
        )
        axis.bar_label(bars, [f"{height:.2g}x" for height in heights.values()], fontsize="xx-small", padding=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.minorticks_off()
    axis.margins(y=0.12)
    axis.set_xticks(range(len(factors)), [DRAWN[place] for place in factors], fontsize="small")
    axis.set_ylabel("times faster than PyG")
    axis.set_title("A training step, geometric mean over models, float32, one H200", fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    stale = [path for path in documents() if renewed(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the results")
        if not options.check:
            path.write_text(renewed(path.read_text()))
    if not options.check:
        draw(FIGURE)
        print(FIGURE.relative_to(ROOT))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
