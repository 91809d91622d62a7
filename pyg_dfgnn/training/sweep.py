"""Collect the runs of sweeps: rows per run, means over seeds beside published numbers, curves.

python -m pyg_dfgnn.training.sweep multirun/2026-01-31_12-00-00.123456
python -m pyg_dfgnn.training.sweep multirun/a multirun/b --csv runs.csv --markdown table.md --png curves.png
python -m pyg_dfgnn.training.sweep multirun/c --add results/accuracy
python -m pyg_dfgnn.training.sweep --add results/accuracy

The last two go on from `runs.csv` and `curves.csv` of a folder and write them, `table.md` and `curves.png` there anew:
results of several machines come together, and table and figure need no run folders.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf

KEY = ("task", "model", "metric", "experiment", "convs", "device", "changes")
"""What runs agree in that differ by their seed alone, or by a split that the seed decides."""
PUBLISHED_KEY = ("experiment", "task", "model", "metric")
"""What a run agrees in with a published result; what it was told beside its experiment, its changes, is shown."""
PUBLISHED_FIELDS = (*PUBLISHED_KEY, "mean", "std", "source")
CURVE_FIELDS = ("run", "epoch", "val_accuracy")
CURVE_POINTS = 100
"""The most epochs of a run that its curve has."""
_NUMBERS: dict[str, Callable[[str], Any]] = {"seed": int, "test_accuracy": float, "epochs": int, "train_time_s": float}
_ROW_FIELDS = ("run", "overrides", "task", "model", "metric", "convs", "device", *_NUMBERS)
_FILES = {
    "csv": ("sweep.csv", "runs.csv"),
    "curves": ("sweep-curves.csv", "curves.csv"),
    "markdown": ("sweep.md", "table.md"),
    "png": ("sweep.png", "curves.png"),
}
"""By option: the file in the first run folder, and in a folder that runs are added to."""
_COLUMNS = 4

Row = dict[str, Any]
Groups = dict[tuple[str, ...], list[Row]]
Curves = dict[str, dict[int, float]]
"""Validation metric by run, then by epoch; a run may have none."""


def collect(*folders: str | Path) -> list[Row]:
    """The metrics of each finished run below the folders, with its own folder and overrides, in run order.

    Raises:
        FileNotFoundError: A folder has no finished run.
    """
    rows = []
    for folder in folders:
        files = sorted(Path(folder).rglob("metrics.json"), key=lambda file: (len(file.parent.name), str(file)))
        if not files:
            raise FileNotFoundError(f"'folder' needs at least one run with metrics.json (got {folder})")
        for file in files:
            overrides = list(OmegaConf.load(file.parent / ".hydra" / "overrides.yaml"))
            rows.append({"run": str(file.parent), "overrides": " ".join(overrides), **json.loads(file.read_text())})
    return rows


def read_curves(rows: Iterable[Row]) -> Curves:
    """The curves of runs, from their folders: of every epoch, or of each 2nd, 4th, 8th... up to `CURVE_POINTS`."""
    curves: Curves = {}
    for row in rows:
        with open(Path(row["run"]) / "metrics.csv", newline="") as stream:
            history = list(csv.DictReader(stream))
        step = 1
        # Powers of two, so that runs of other lengths still share epochs.
        while len(history) > step * CURVE_POINTS:
            step *= 2
        curves[row["run"]] = {int(epoch["epoch"]): round(float(epoch["val_accuracy"]), 4) for epoch in history[::step]}
    return curves


def add(folder: str | Path, rows: list[Row], curves: Curves) -> tuple[list[Row], Curves]:
    """Earlier results, in which new runs take the place of those of the same setting and seed.

    Args:
        folder: Of `runs.csv` and `curves.csv`; either may be missing.
        rows: Of the new runs.
        curves: Of the new runs.

    Raises:
        FileNotFoundError: There are neither new runs nor earlier ones.
        ValueError: A file lacks a column, or a new run is named as an earlier one of another setting or seed.
    """
    runs_file, curves_file = Path(folder) / "runs.csv", Path(folder) / "curves.csv"
    earlier: list[Row] = _records("runs.csv", runs_file, _ROW_FIELDS, more=True) if runs_file.exists() else []
    if not rows and not earlier:
        raise FileNotFoundError(f"'add' needs a folder with runs.csv where no runs are given (got {folder})")
    for row in earlier:
        row.update({name: kind(row[name]) for name, kind in _NUMBERS.items()})
    new = {(_setting(row), row["seed"]) for row in rows}
    earlier = [row for row in earlier if (_setting(row), row["seed"]) not in new]
    # A curve is found by the name of its run.
    twice = sorted({row["run"] for row in rows} & {row["run"] for row in earlier})
    if twice:
        raise ValueError(f"'folders' need other names than earlier runs of other settings or seeds (got {twice})")
    names, kept = {row["run"] for row in earlier}, Curves()
    for point in _records("curves.csv", curves_file, CURVE_FIELDS) if curves_file.exists() else []:
        if point["run"] in names:
            kept.setdefault(point["run"], {})[int(point["epoch"])] = float(point["val_accuracy"])
    return [*earlier, *rows], {**kept, **curves}


def _records(name: str, path: str | Path, fields: Sequence[str], more: bool = False) -> list[dict[str, Any]]:
    """The rows of a CSV with these columns, or with `more` of them."""
    with open(path, newline="") as stream:
        reader = csv.DictReader(stream)
        given = tuple(reader.fieldnames or ())
        if not (set(fields) <= set(given) if more else given == tuple(fields)):
            raise ValueError(f"'{name}' needs the columns {', '.join(fields)} (got {reader.fieldnames})")
        return list(reader)


def _setting(row: Row) -> tuple[str, ...]:
    words = [word for word in row["overrides"].split() if not word.startswith("seed=")]
    experiment = next((word for word in words if word.startswith("experiment=")), None)
    changes = " ".join(word for word in words if word != experiment) or "-"
    found = {**row, "experiment": experiment.partition("=")[2] if experiment else "-", "changes": changes}
    return tuple(str(found[name]) for name in KEY)


def by_seed(rows: Iterable[Row]) -> Groups:
    """The runs of each setting, which differ by their seed.

    Raises:
        ValueError: Two runs of a setting have the same seed, so they are not what a mean is taken over.
    """
    groups: Groups = {}
    for row in rows:
        groups.setdefault(_setting(row), []).append(row)
    for key, runs in groups.items():
        seeds = [row["seed"] for row in runs]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"'folders' need runs that differ by their seeds (got {seeds} of {', '.join(key)})")
    return groups


def summary(values: Sequence[float]) -> str:
    """Mean and sample standard deviation in percent."""
    spread = f" +- {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread}"


def read_published(path: str | Path) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Published results by `PUBLISHED_KEY`, from a CSV with the columns `PUBLISHED_FIELDS`, in percent.

    Raises:
        ValueError: The file has other columns.
    """
    rows = _records("published", path, PUBLISHED_FIELDS)
    return {tuple(row[name] for name in PUBLISHED_KEY): row for row in rows}


def markdown(groups: Groups, published: Mapping[tuple[str, ...], Mapping[str, str]]) -> str:
    """One line per setting: test metric over seeds, best epoch, time, and the published result with its source."""
    lines = [
        f"| {' | '.join(KEY)} | seeds | test, % | epochs | s per run | published, % | source | made up |",
        "|---" * (len(KEY) + 7) + "|",
    ]
    for key, runs in sorted(groups.items()):
        known = published.get(tuple(dict(zip(KEY, key))[name] for name in PUBLISHED_KEY))
        cells = [
            *key,
            len(runs),
            summary([run["test_accuracy"] for run in runs]),
            f"{statistics.mean(run['epochs'] for run in runs):.0f}",
            f"{statistics.mean(run['train_time_s'] for run in runs):.0f}",
            f"{known['mean']} +- {known['std']}" if known else "-",
            known["source"] if known else "-",
            runs[0].get("synthetic") or "-",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def figure(groups: Groups, curves: Curves) -> Figure:
    """Validation metric over the epochs, mean and range over the seeds: one panel per task, model and experiment.

    Runs without a curve are left out; at least one has one.
    """
    found = {key: [curves[run["run"]] for run in runs if run["run"] in curves] for key, runs in sorted(groups.items())}
    panels = list(dict.fromkeys(key[:4] for key in found if found[key]))
    shape = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    drawn = Figure(figsize=(4.2 * shape[1], 3.6 * shape[0]), layout="constrained")
    places = drawn.subplots(*shape, squeeze=False).flatten()
    for axes, panel in zip(places, panels):
        shown = {key: over_seeds for key, over_seeds in found.items() if over_seeds and key[:4] == panel}
        # What all curves of a panel share needs no label.
        words = [[*key[4:6], *key[6].split()] for key in shown]
        shared = set.intersection(*map(set, words))
        for label, over_seeds in zip(words, shown.values()):
            # Runs that stopped early end the mean where the shortest does.
            epochs = sorted(set.intersection(*map(set, over_seeds)))
            steps = [[curve[epoch] for curve in over_seeds] for epoch in epochs]
            name = "\n".join(word for word in label if word not in shared) or label[0]
            means = [statistics.mean(step) for step in steps]
            # A line needs two points.
            (line,) = axes.plot(epochs, means, label=name, marker="o" if len(epochs) == 1 else None)
            axes.fill_between(epochs, list(map(min, steps)), list(map(max, steps)), color=line.get_color(), alpha=0.2)
        axes.set(title=f"{panel[1]} on {panel[0]}", xlabel="epoch", ylabel=f"validation {panel[2]}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    for axes in places[len(panels) :]:
        axes.remove()
    return drawn


def main() -> None:
    """Print mean and standard deviation of the test metric per setting, and write rows, curves, table and figure."""
    parser = argparse.ArgumentParser(description="Collect the runs of sweeps.")
    parser.add_argument("folders", nargs="*", help="run folders of the sweeps")
    parser.add_argument("--add", help="folder with runs.csv and curves.csv that the runs are added to, in place")
    parser.add_argument("--csv", help="file for one row per run, else sweep.csv in the first folder")
    parser.add_argument("--curves", help="file for the curves of the runs, else sweep-curves.csv there")
    parser.add_argument("--markdown", help="file for one line per setting, over its seeds, else sweep.md there")
    parser.add_argument("--png", help="file for curves of the settings, else sweep.png there")
    parser.add_argument("--published", help=f"CSV with the columns {', '.join(PUBLISHED_FIELDS)}")
    arguments = parser.parse_args()
    if not arguments.folders and not arguments.add:
        parser.error("folders or --add are required")
    there = Path(arguments.add or arguments.folders[0])
    csv_file, curves_file, markdown_file, png_file = (
        Path(getattr(arguments, option) or there / names[bool(arguments.add)]) for option, names in _FILES.items()
    )
    rows = collect(*arguments.folders)
    curves = read_curves(rows)
    if arguments.add:
        rows, curves = add(arguments.add, rows, curves)
    groups = by_seed(rows)
    table = markdown(groups, read_published(arguments.published) if arguments.published else {})
    _write(csv_file, dict.fromkeys(name for row in rows for name in row), rows)
    points = ((run, *point) for run, curve in curves.items() for point in curve.items())
    _write(curves_file, CURVE_FIELDS, (dict(zip(CURVE_FIELDS, point)) for point in points))
    markdown_file.write_text(table)
    # Earlier results may have no curves.
    if curves:
        figure(groups, curves).savefig(png_file, dpi=110)
    for (task, model, metric, _, convs, *_), runs in groups.items():
        values = [run["test_accuracy"] for run in runs]
        print(f"{model} on {task}, {convs}: test {metric} {summary(values)} % over {len(runs)} runs")
    print(", ".join(map(str, (csv_file, curves_file, markdown_file, *([png_file] if curves else [])))))


def _write(path: Path, fields: Iterable[str], rows: Iterable[Row]) -> None:
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
