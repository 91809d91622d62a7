"""Collect the runs of sweeps: rows per run, means over seeds beside published numbers, curves.

python -m pyg_dfgnn.training.sweep multirun/2026-01-31_12-00-00.123456
python -m pyg_dfgnn.training.sweep multirun/a multirun/b --csv runs.csv --markdown table.md --png curves.png
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf

KEY = ("task", "model", "metric", "experiment", "convs", "device", "changes")
"""What runs agree in that differ by their seed alone, or by a split that the seed decides."""
PUBLISHED_KEY = ("experiment", "task", "model", "metric")
"""What a run agrees in with a published result; what it was told beside its experiment, its changes, is shown."""
PUBLISHED_FIELDS = (*PUBLISHED_KEY, "mean", "std", "source")
_COLUMNS = 4

Row = dict[str, Any]
Groups = dict[tuple[str, ...], list[Row]]


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


def by_seed(rows: Iterable[Row]) -> Groups:
    """The runs of each setting, which differ by their seed.

    Raises:
        ValueError: Two runs of a setting have the same seed, so they are not what a mean is taken over.
    """
    groups: Groups = {}
    for row in rows:
        words = [word for word in row["overrides"].split() if not word.startswith("seed=")]
        experiment = next((word for word in words if word.startswith("experiment=")), None)
        changes = " ".join(word for word in words if word != experiment) or "-"
        found = {**row, "experiment": experiment.partition("=")[2] if experiment else "-", "changes": changes}
        groups.setdefault(tuple(str(found[name]) for name in KEY), []).append(row)
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
    with open(path, newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) != PUBLISHED_FIELDS:
            raise ValueError(f"'published' needs the columns {', '.join(PUBLISHED_FIELDS)} (got {reader.fieldnames})")
        return {tuple(row[name] for name in PUBLISHED_KEY): row for row in reader}


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


def figure(groups: Groups) -> Figure:
    """Validation metric over the epochs, mean and range over the seeds: one panel per task, model and experiment."""
    panels = list(dict.fromkeys(key[:4] for key in sorted(groups)))
    shape = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    drawn = Figure(figsize=(4.2 * shape[1], 3.6 * shape[0]), layout="constrained")
    places = drawn.subplots(*shape, squeeze=False).flatten()
    for axes, panel in zip(places, panels):
        shown = {key: runs for key, runs in sorted(groups.items()) if key[:4] == panel}
        # What all curves of a panel share needs no label.
        words = [[*key[4:6], *key[6].split()] for key in shown]
        shared = set.intersection(*map(set, words))
        for label, runs in zip(words, shown.values()):
            curves = [_curve(run) for run in runs]
            # Runs that stopped early end the mean where the shortest does.
            epochs = range(1, min(map(len, curves)) + 1)
            steps = list(zip(*curves))
            name = "\n".join(word for word in label if word not in shared) or label[0]
            (line,) = axes.plot(epochs, [statistics.mean(step) for step in steps], label=name)
            axes.fill_between(epochs, list(map(min, steps)), list(map(max, steps)), color=line.get_color(), alpha=0.2)
        axes.set(title=f"{panel[1]} on {panel[0]}", xlabel="epoch", ylabel=f"validation {panel[2]}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    for axes in places[len(panels) :]:
        axes.remove()
    return drawn


def _curve(run: Row) -> list[float]:
    with open(Path(run["run"]) / "metrics.csv", newline="") as stream:
        return [float(row["val_accuracy"]) for row in csv.DictReader(stream)]


def main() -> None:
    """Print mean and standard deviation of the test metric of each setting, and write rows, table and curves."""
    parser = argparse.ArgumentParser(description="Collect the runs of sweeps.")
    parser.add_argument("folders", nargs="+", help="run folders of the sweeps")
    parser.add_argument("--csv", help="file for one row per run, else sweep.csv in the first folder")
    parser.add_argument("--markdown", help="file for one line per setting, over its seeds, else sweep.md there")
    parser.add_argument("--png", help="file for curves of the settings, else sweep.png there")
    parser.add_argument("--published", help=f"CSV with the columns {', '.join(PUBLISHED_FIELDS)}")
    arguments = parser.parse_args()
    first = Path(arguments.folders[0])
    csv_file = Path(arguments.csv or first / "sweep.csv")
    markdown_file = Path(arguments.markdown or first / "sweep.md")
    png_file = Path(arguments.png or first / "sweep.png")
    rows = collect(*arguments.folders)
    groups = by_seed(rows)
    fields = dict.fromkeys(name for row in rows for name in row)
    with open(csv_file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    markdown_file.write_text(markdown(groups, read_published(arguments.published) if arguments.published else {}))
    figure(groups).savefig(png_file, dpi=110)
    for (task, model, metric, _, convs, *_), runs in groups.items():
        values = [run["test_accuracy"] for run in runs]
        print(f"{model} on {task}, {convs}: test {metric} {summary(values)} % over {len(runs)} runs")
    print(f"{csv_file}, {markdown_file}, {png_file}")


if __name__ == "__main__":
    main()
