"""Writes the numbers of the documents anew from the CSV files in ``results/``, and draws the figure of the README.

``python -m benchmarks.published`` rewrites README.md and docs/, and draws docs/times_faster.png. A document holds a
number of ours between the lines ``<!-- published: NAME -->`` and ``<!-- end -->``.
"""

import re
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from benchmarks import tables
from benchmarks.plots import draw_bars
from benchmarks.results import Row, Table, markdown
from pyg_dfgnn.nn import DROP_INS

ROOT = Path(__file__).resolve().parents[1]
GPU = "nvidia-h200"
"""Where the figures were measured."""
FIGURE = ROOT / "docs" / "times_faster.png"
LOOPS = {
    ("molecules", ""): ("batches of molecules", "molecules,\nnew batches"),
    ("superpixels", ""): ("batches of superpixels", "superpixels,\nnew batches"),
    ("sampled", ""): ("sampled neighbours", "sampled\nneighbours"),
    ("own", "new"): ("layers of one's own, new edges", ""),
    ("temporal", ""): ("recurrent cells", ""),
    ("dynamic", ""): ("neighbours found in each layer", ""),
    ("relations", ""): ("relations by masks", ""),
    ("forces", ""): ("energies and forces of molecules", ""),
    ("own", "same"): ("layers of one's own", ""),
    ("edge_networks", ""): ("networks on the edges of a mesh", "networks\non edges"),
    ("small", ""): ("a graph like Cora", "a graph\nlike Cora"),
    ("large", "arxiv"): ("a graph like ogbn-arxiv", "a graph like\nogbn-arxiv"),
    ("large", "reddit"): ("a graph like Reddit, 20M edges", "a graph like\nReddit"),
}
"""Loop and size -> words in the table, and those in the figure of the README, where it is drawn."""
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


def _factors() -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """Key of :data:`LOOPS` -> way to train -> times faster than PyG's step by size and model; for "pyg" its ms."""
    rows = {
        (row["loop"], row["size"], row["model"], row["implementation"]): row
        for row in Table.read(ROOT / "results" / "loops.csv")
        if row["status"] == "ok"
    }
    factors: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for (loop, size, model, way), row in rows.items():
        place = next((key for key in LOOPS if key[0] == loop and key[1] in ("", size)), None)
        if place is None or (way != "pyg" and not row["ratio"]):
            continue
        pyg, factor = rows[loop, size, model, "pyg"]["ms"], float(row["ratio"] or 1)
        # In turns with compiled steps of PyG, which were in turns with its others.
        if row["baseline"] == "pyg_compile":
            factor *= float(rows[loop, size, model, "pyg_compile"]["ratio"])
        factors.setdefault(place, {}).setdefault(way, {})[f"{size} {model}"] = float(pyg) if way == "pyg" else factor
    return {place: factors[place] for place in LOOPS if place in factors}


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
        body.append([LOOPS[place][0], f"{geometric_mean(by_way['pyg'].values()):.3g}", *cells])
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


def means() -> str:
    """Geometric means of the times faster than unfused calls over the data sets of the paper."""
    files = (ROOT / "results" / "bench" / GPU / f"{name}.csv" for name in ("fig9", "fig10a", "fig10b"))
    return tables.means_table([row for file in files for row in Table.read(file)], "unfused")


PROOFS = ("faults", "sanitizer", "determinism", "soak")


def _proofs(name: str) -> dict[str, list[Row]]:
    """The rows of a proof by machine."""
    rows_of_machine: dict[str, list[Row]] = {}
    for path in sorted((ROOT / "results" / "proofs").glob(f"{name}-*.csv")):
        rows: list[Row] = [*Table.read(path)]
        # The samples of the soak have no outcome.
        if rows and "outcome" in rows[0]:
            rows_of_machine[path.stem.removeprefix(f"{name}-")] = rows
    return rows_of_machine


def proofs() -> str:
    """What came of each proof on each machine."""
    body = []
    for name in PROOFS:
        for machine, rows in _proofs(name).items():
            counts = [sum(row["outcome"] == outcome for row in rows) for outcome in ("passed", "skipped", "failed")]
            skipped = dict.fromkeys(row["reason"] for row in rows if row["outcome"] == "skipped")
            body.append([name, machine, *counts, "; ".join(skipped) or "-", rows[0]["digest"]])
    return markdown(["proof", "machine", "passed", "skipped", "failed", "why skipped", "digest"], body)


def outcomes(name: str) -> str:
    """The rows of a proof."""
    body = [
        [machine, row["name"], row["outcome"], row["reason"]] for machine, rows in _proofs(name).items() for row in rows
    ]
    return markdown(["machine", "what", "outcome", "reason"], body)


BITS = {
    "run_to_run": "run to run",
    "call_to_call": "call to call",
    "batch": "in another batch",
    "threads": "two threads",
    "device": "another GPU",
}


def determinism() -> str:
    """Which results are equal bit by bit, per layer; layers with the same cells share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for machine, rows in _proofs("determinism").items():
        of_layer: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            of_layer.setdefault((row["setting"], row["op"]), []).append(row)
        for (setting, layer), by_dtype in of_layer.items():
            cells = [_cell({row["dtype"]: row[name] or "not run" for row in by_dtype}) for name in BITS]
            is_pyg = any(row["reason"].startswith("PyG's code") for row in by_dtype)
            groups.setdefault((machine, setting, *cells), []).append(f"{layer} (PyG's code)" if is_pyg else layer)
    # By machine and setting; rows of many layers first.
    ordered = sorted(groups.items(), key=lambda group: (*group[0][:2], -len(group[1])))
    body = [[machine, setting, ", ".join(layers), *cells] for (machine, setting, *cells), layers in ordered]
    return markdown(["machine", "setting", "layers", *BITS.values()], body)


def _cell(by_dtype: dict[str, str]) -> str:
    """One cell for all dtypes, which are named where they differ."""
    if len(set(by_dtype.values())) == 1:
        return next(iter(by_dtype.values()))
    return ", ".join(f"{dtype} {found}" for dtype, found in by_dtype.items())


DEVICES = {"cpu": "On a CPU, kernels emulated", "cuda": "On a GPU"}
"""Devices of the matrix of conformance, with the headings of their tables."""
PASSED, OWN_PATH, NOT_RUN = "✓", "PyG", "—"


def conformance() -> str:
    """The matrix of conformance, a table per device, with the reasons that its cells name by number."""
    rows = Table.read(ROOT / "results" / "conformance.csv")
    reasons: dict[str, int] = {}

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if row["outcome"] == "passed" and not row["reason"]:
            return PASSED
        mark = {"passed": OWN_PATH, "skipped": NOT_RUN}.get(row["outcome"], "FAILED")
        number = reasons.setdefault(row["reason"].removeprefix(f"{OWN_PATH}'s own path: "), len(reasons) + 1)
        return f"{mark} {number}"

    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    parts = []
    for device, heading in DEVICES.items():
        cells = {(row["conv"], row["condition"]): row for row in rows if row["device"] == device}
        if not cells:
            continue
        drop_ins = {upstream.__name__ for upstream in DROP_INS}
        convs = sorted({conv for conv, _ in cells}, key=lambda conv: (conv not in drop_ins, conv))
        body = [[f"`{conv}`", *(cell(cells.get((conv, each))) for each in conditions)] for conv in convs]
        counts = Counter(row["outcome"] for row in cells.values())
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
        parts += [f"### {heading}", f"{len(cells)} cells: {said}.", markdown(["", *conditions], body)]
    # Nothing in a reason is Markdown or HTML.
    plain = {re.sub(r"([\\`*_\[\]<>|])", r"\\\1", reason): number for reason, number in reasons.items()}
    return "\n\n".join([*parts, "### Reasons", "\n".join(f"{number}. {reason}" for reason, number in plain.items())])


_MADE = (loops, edge_networks, means, proofs, determinism, conformance)
PUBLISHED: dict[str, Callable[[], str]] = {
    **{make.__name__: make for make in _MADE},
    **{name: partial(outcomes, name) for name in ("faults", "sanitizer", "soak")},
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
    from matplotlib.figure import Figure

    factors = {place: by_way for place, by_way in _factors().items() if LOOPS[place][1]}
    titles = _ways().items()
    groups = [
        {title: geometric_mean(by[way].values()) for way, title in titles if way in by} for by in factors.values()
    ]
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    axis = figure.subplots()
    for bars in draw_bars(axis, groups, [title for _, title in titles]):
        axis.bar_label(bars, [f"{height + 1:.2g}x" for height in bars.datavalues], fontsize="xx-small", padding=1)
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.minorticks_off()
    axis.margins(y=0.12)
    axis.set_xticks(range(len(factors)), [LOOPS[place][1] for place in factors], fontsize="small")
    axis.set_ylabel("times faster than PyG")
    axis.set_title("A training step, geometric mean over models, float32, one H200", fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write the documents that differ from the results, and the figure."""
    ArgumentParser(prog="python -m benchmarks.published", description=main.__doc__).parse_args()
    for path in documents():
        text = path.read_text()
        if renewed(text) != text:
            print(f"{path.relative_to(ROOT)} differs from the results")
            path.write_text(renewed(text))
    draw(FIGURE)
    print(FIGURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
