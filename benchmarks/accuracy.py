"""Keep the accuracies of sweeps: `python -m benchmarks.accuracy results/accuracy [multirun/a multirun/b]`.

The folder holds one row per run (`runs.csv`) and the curves of the runs (`curves.csv`), so that results of several
machines come together. The command adds the runs of the sweeps to both files and writes a table beside published
results (`table.md`, from `published.csv`) and a figure (`curves.png`) from them.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure
from benchmarks.results import Table
from pyg_dfgnn.training import sweep
from pyg_dfgnn.training.report import write_rows
from pyg_dfgnn.training.sweep import Curves, Groups, Row, setting

PUBLISHED_KEY = ("experiment", "task", "model", "metric")
"""Columns in which a run agrees with the published result that it is compared with."""
CURVE_FIELDS = ("run", "epoch", "val_accuracy")
_NUMBERS: dict[str, Callable[[str], Any]] = {"seed": int, "test_accuracy": float, "epochs": int, "train_time_s": float}


def add(folder: Path, rows: list[Row], curves: Curves) -> tuple[list[Row], Curves]:
    """Return the earlier results of a folder, in which new runs replace those of the same setting and seed.

    Raises:
        FileNotFoundError: There are neither new runs nor earlier ones.
        ValueError: A new run is named as an earlier one of another setting or seed.
    """
    new = {(setting(row), row["seed"]) for row in rows}
    earlier: list[Row] = []
    for row in _read(folder / "runs.csv"):
        row |= {name: kind(row[name]) for name, kind in _NUMBERS.items()}
        earlier += [] if (setting(row), row["seed"]) in new else [row]
    if not rows and not earlier:
        raise FileNotFoundError(f"'results' needs a folder with runs.csv where no sweeps are given (got {folder})")
    # A curve is found by the name of its run.
    names = {row["run"] for row in earlier}
    if twice := sorted({row["run"] for row in rows} & names):
        raise ValueError(f"'sweeps' need other names than earlier runs of other settings or seeds (got {twice})")
    kept: Curves = {}
    for point in _read(folder / "curves.csv"):
        if point["run"] in names:
            kept.setdefault(point["run"], {})[int(point["epoch"])] = float(point["val_accuracy"])
    return [*earlier, *rows], {**kept, **curves}


def _read(path: Path) -> list[dict[str, Any]]:
    return [*Table.read(path)] if path.exists() else []


def beside_published(groups: Groups, path: Path) -> str:
    """Return the table of the settings, each with its published result in a CSV and the source of that."""
    published = {tuple(row[name] for name in PUBLISHED_KEY): row for row in _read(path)}
    rows = []
    for row in sweep.table(groups):
        known = published.get(tuple(row[name] for name in PUBLISHED_KEY))
        synthetic = row.pop("made up")
        result = f"{known['mean']} +- {known['std']}" if known else "-"
        rows.append({**row, "published, %": result, "source": known["source"] if known else "-", "made up": synthetic})
    return sweep.markdown(rows)


def compared(groups: Groups, curves: Curves) -> Groups:
    """Return the settings with curves that share task, model, metric and experiment with another such setting."""
    drawn = {key: runs for key, runs in groups.items() if any(run["run"] in curves for run in runs)}
    settings = Counter(key[:4] for key in drawn)
    return {key: runs for key, runs in drawn.items() if settings[key[:4]] > 1}


def main(words: Sequence[str] | None = None) -> None:
    """Add the runs of sweeps to a folder, and write its table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder with runs.csv, curves.csv and published.csv")
    parser.add_argument("sweeps", nargs="*", help="run folders of sweeps")
    chosen = parser.parse_args(words)
    folder, new = chosen.results, sweep.collect(*chosen.sweeps)
    rows, curves = add(folder, new, sweep.read_curves(new))
    groups = sweep.by_seed(rows)
    write_rows(folder / "runs.csv", dict.fromkeys(name for row in rows for name in row), rows)
    points = ((run, *point) for run, curve in curves.items() for point in curve.items())
    write_rows(folder / "curves.csv", CURVE_FIELDS, (dict(zip(CURVE_FIELDS, point)) for point in points))
    (folder / "table.md").write_text(beside_published(groups, folder / "published.csv"))
    # Earlier results may have no curves, and a curve alone compares nothing.
    if shown := compared(groups, curves):
        save_figure(sweep.figure(shown, curves), folder / "curves.png")
    print(f"{len(groups)} settings of {len(rows)} runs: {folder / 'table.md'}")


if __name__ == "__main__":
    main()
