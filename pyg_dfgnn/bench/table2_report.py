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


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each cell; a resumed run appends."""
    return list({(row["model"], row["dataset"], row["backend"]): row for row in rows}.values())


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


def figure(rows: Sequence[Row]) -> Any:
    """The phases of a step stacked per backend: one column per data set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    drawn = Figure(figsize=(2.6 * len(datasets) + 1, 3.0), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(1, len(datasets), squeeze=False)
    for dataset, axis in zip(datasets, axes[0]):
        timed = {row["backend"]: row for row in rows if row["dataset"] == dataset and row["status"] == "ok"}
        bottom = dict.fromkeys(timed, 0.0)
        for index, phase in enumerate(PHASES):
            heights = {name: _in_step(row, phase) for name, row in timed.items()}
            places = [backends.index(name) for name in timed]
            axis.bar(places, heights.values(), bottom=list(bottom.values()), color=f"C{index}", label=phase)
            bottom = {name: bottom[name] + heights[name] for name in timed}
        axis.set_xticks(range(len(backends)), backends, rotation=60, fontsize="x-small")
        axis.set_yscale("log" if timed and max(bottom.values()) > 20 * min(bottom.values()) else "linear")
        axis.set_title(dataset, fontsize="small")
    axes[0, 0].set_ylabel("ms per step")
    if axes[0, 0].get_legend_handles_labels()[0]:
        axes[0, 0].legend(fontsize="x-small")
    drawn.suptitle(f"{rows[0]['model']}, {rows[0]['gpu']}", fontsize="medium")
    return drawn


def _in_step(row: Row, phase: str) -> float:
    """Milliseconds of a phase in each step."""
    once = str(row["once"]) == "True" and phase in PHASES[:2]
    return 0.0 if once or not row[f"{phase}_ms"] else float(row[f"{phase}_ms"])


def write(stem: Path, rows: Sequence[Row]) -> Path:
    """Draw `<stem>.png`; return its path."""
    path = Path(f"{stem}.png")
    figure(rows).savefig(path, dpi=110)
    return path
