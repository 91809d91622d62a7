"""The table of `python -m benchmarks.table2`, from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import Row, markdown
from benchmarks.table2_steps import PHASES, STEP_BY_STEP, SUMMED

HEADER = [
    "data", "backend", "transfer", *SUMMED, "sum", "optimizer", "step", "peak, GB", "sum, times faster",
    "step, times faster", "loss", "gradient",
]  # fmt: skip
BASELINE = "pyg"


def faster(rows: Sequence[Row], column: str) -> dict[tuple[str, str], float]:
    """(data set, backend) -> how many times faster than PyG; by sums that were taken in turns where they were."""
    timed = {(row["dataset"], row["backend"]): row for row in rows if row["status"] == "ok"}
    factors = {}
    for (dataset, backend), row in timed.items():
        in_turns = row["reference_sum_ms"] if column == "sum_ms" and row["reference"] == BASELINE else ""
        if in_turns:
            factors[dataset, backend] = float(in_turns) / float(row[column])
        elif (dataset, BASELINE) in timed:
            factors[dataset, backend] = float(timed[dataset, BASELINE][column]) / float(row[column])
    return factors


def times_table(rows: Sequence[Row]) -> str:
    """Milliseconds per step, phase by phase, one line per data set and backend; what has no time says why.

    `once` marks the transfer and preparation of one whole graph, which are no part of a step. `sum` is preprocess,
    forward (with the loss) and backward; `step` is the wall time of one step among many, with transfer and optimizer.
    """
    by_sum, by_step = faster(rows, "sum_ms"), faster(rows, "wall_ms")
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines = []
    for row in sorted(rows, key=lambda row: datasets.index(row["dataset"])):
        key = row["dataset"], row["backend"]
        if row["status"] != "ok":
            lines.append([*key, row["status"], *[""] * (len(HEADER) - 3)])
            continue
        once = " once" if str(row["once"]) == "True" else ""
        ms = {phase: _number(row[f"{phase}_ms"]) for phase in (*PHASES, "sum")}
        peak_gb = f"{float(row['peak_mb']) / 1e3:.2f}" if row["peak_mb"] else ""
        factors = (f"{by[key]:.2f}x" if key in by else "" for by in (by_sum, by_step))
        before = [ms["transfer"] + once, ms["preprocess"] + once]
        phases = [ms[phase] for phase in ("forward", "backward", "sum", "optimizer")]
        loss, gradient, update = (row[name] for name in STEP_BY_STEP)
        stepped = (f"; step by step {loss}", f"; step by step {gradient}, update {update}") if loss else ("", "")
        differences = [row["loss_difference"] + stepped[0], row["gradient_difference"] + stepped[1]]
        lines.append([*key, *before, *phases, _number(row["wall_ms"]), peak_gb, *factors, *differences])
    return markdown(HEADER, lines)


def _number(value: str) -> str:
    return f"{float(value):.3g}" if value else ""
