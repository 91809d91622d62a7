"""The table and the figure of `python -m pyg_dfgnn.bench.table2`, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyg_dfgnn.bench.results import markdown
from pyg_dfgnn.bench.table2_steps import FROM_FLOAT64, PHASES, SUMMED

HEADER = [
    "data", "backend", "transfer", *SUMMED, "sum", "optimizer", "step", "peak, GB", "sum, times faster",
    "step, times faster", "loss", "gradient",
]  # fmt: skip
BASELINE = "pyg"

Row = Mapping[str, Any]


def latest(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The last row of each cell (and of each of the `keys` in it); a resumed run appends."""
    return list({tuple(row[key] for key in ("model", "dataset", "backend", *keys)): row for row in rows}.values())


def faster(rows: Sequence[Row], column: str) -> dict[tuple[str, str], float]:
    """(data set, backend) -> how many times faster than PyG; by sums that were taken in turns where they were."""
    timed = {(row["dataset"], row["backend"]): row for row in rows if row["status"] == "ok"}
    found = {}
    for (dataset, backend), row in timed.items():
        in_turns = row["reference_sum_ms"] if column == "sum_ms" and row["reference"] == BASELINE else ""
        if in_turns:
            found[dataset, backend] = float(in_turns) / float(row[column])
        elif (dataset, BASELINE) in timed:
            found[dataset, backend] = float(timed[dataset, BASELINE][column]) / float(row[column])
    return found


def times_table(rows: Sequence[Row]) -> str:
    """Milliseconds per step, phase by phase, one line per data set and backend; what has no time says why."""
    by_sum, by_step = faster(rows, "sum_ms"), faster(rows, "wall_ms")
    lines = []
    for row in sorted(
        rows, key=lambda row: list(dict.fromkeys(each["dataset"] for each in rows)).index(row["dataset"])
    ):
        key = row["dataset"], row["backend"]
        if row["status"] != "ok":
            lines.append([*key, row["status"], *[""] * (len(HEADER) - 3)])
            continue
        once = " once" if str(row["once"]) == "True" else ""
        cells = {phase: _number(row[f"{phase}_ms"]) for phase in (*PHASES, "sum")}
        lines.append(
            [
                *key,
                cells["transfer"] + once,
                cells["preprocess"] + once,
                *(cells[phase] for phase in ("forward", "backward", "sum", "optimizer")),
                _number(row["wall_ms"]),
                f"{float(row['peak_mb']) / 1e3:.2f}" if row["peak_mb"] else "",
                *(f"{found[key]:.2f}x" if key in found else "" for found in (by_sum, by_step)),
                _loss(row),
                row["gradient_difference"],
            ]
        )
    return markdown(HEADER, lines)


def _number(value: str) -> str:
    return f"{float(value):.3g}" if value else ""


def _loss(row: Row) -> str:
    ours, theirs = (row[name] for name in FROM_FLOAT64)
    from_float64 = f"; from float64 {ours}, {row['reference']} {theirs}" if ours else ""
    return f"{row['loss_difference']}{from_float64}"


def page(rows: Sequence[Row]) -> str:
    """The Markdown page: what was measured, the table, the data sets."""
    first = rows[0]
    products = "products may round to TF32" if str(first["tf32"]) == "True" else "without TF32"
    about = f"""\
Training steps of `{first["model"]}` on {first["gpu"]}, torch {first["torch"]}, PyG {first["pyg"]}: median milliseconds,
float32, {products}.

`sum` is what the paper adds up: preprocess, forward (with the loss) and backward of one step. `once`: one whole graph
stays on the device, so its transfer and preprocess are no part of a step nor of its sum. A captured step pads batches
to a bucket, in its forward phase. `step`: wall time of one step among many, with transfer and optimizer. `times faster`
is against `{BASELINE}`; where one whole graph was timed in turns of some steps of the backend and some of `{BASELINE}`,
of these, which need not take what the line of `{BASELINE}` says: the host's speed changes. `loss`: largest relative
difference of the losses of the first steps from those of the reference; `gradient`: of the first gradient. A backend
beyond the bound of {first["bound"]} has no time, unless it is so in its losses alone and these are within the bound of
those of the reference in float64: then the distances from float64 are given, its own and the reference's."""
    sets = {row["dataset"]: row for row in rows if row.get("task")}
    described = [
        [name, row["task"], row["graphs"], row["nodes"], row["edges"], row["synthetic"]] for name, row in sets.items()
    ]
    header = ["data", "task", "graphs per step", "nodes", "edges", "synthetic"]
    return "\n\n".join([f"# {first['model']}", about, times_table(rows), markdown(header, described)]) + "\n"


def figure(rows: Sequence[Row], losses: Sequence[Row]) -> Any:
    """Above, the phases of a step stacked per backend; below, the losses of all backends: one column per data set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    drawn = Figure(figsize=(2.6 * len(datasets) + 1, 5.2), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(2, len(datasets), squeeze=False)
    for dataset, (above, below) in zip(datasets, axes.T):
        timed = {row["backend"]: row for row in rows if row["dataset"] == dataset and row["status"] == "ok"}
        bottom = dict.fromkeys(timed, 0.0)
        for index, phase in enumerate(PHASES):
            heights = {name: _in_step(row, phase) for name, row in timed.items()}
            places = [backends.index(name) for name in timed]
            above.bar(places, heights.values(), bottom=list(bottom.values()), color=f"C{index}", label=phase)
            bottom = {name: bottom[name] + heights[name] for name in timed}
        above.set_xticks(range(len(backends)), backends, rotation=60, fontsize="x-small")
        above.set_yscale("log" if timed and max(bottom.values()) > 20 * min(bottom.values()) else "linear")
        above.set_title(dataset, fontsize="small")
        for name in backends:
            curve = [row for row in losses if (row["dataset"], row["backend"]) == (dataset, name)]
            if curve:
                steps, values = zip(*sorted((int(row["step"]), float(row["loss"])) for row in curve))
                below.plot(steps, values, label=name, linewidth=1, alpha=0.7)
        below.set_xlabel("step", fontsize="small")
    axes[0, 0].set_ylabel("ms per step")
    axes[1, 0].set_ylabel("loss")
    for first, *_ in axes:
        if first.get_legend_handles_labels()[0]:
            first.legend(fontsize="x-small")
    drawn.suptitle(f"{rows[0]['model']}, {rows[0]['gpu']}", fontsize="medium")
    return drawn


def _in_step(row: Row, phase: str) -> float:
    """Milliseconds of a phase in each step."""
    once = str(row["once"]) == "True" and phase in PHASES[:2]
    return 0.0 if once or not row[f"{phase}_ms"] else float(row[f"{phase}_ms"])


def write(stem: Path, rows: Sequence[Row], losses: Sequence[Row]) -> list[Path]:
    """Write `<stem>.md` and `<stem>.png`; returns both paths."""
    page_path, figure_path = Path(f"{stem}.md"), Path(f"{stem}.png")
    page_path.write_text(page(rows))
    figure(rows, losses).savefig(figure_path, dpi=110)
    return [page_path, figure_path]
