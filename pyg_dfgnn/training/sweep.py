"""Sum up sweeps: `python -m pyg_dfgnn.training.sweep multirun/2026-01-31_12-00-00.123456`.

The command writes one row per run (`sweep.csv`), means over the seeds of each setting (`sweep.md`) and the validation
curves of the settings (`sweep.png`) into the first of the given folders.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from pyg_dfgnn.training.messages import in_one_line
from pyg_dfgnn.training.report import write_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = ("task", "model", "metric", "experiment", "convs", "device", "changes")
"""Facts of a run that make a setting: its runs differ only in their seed, or in a split that the seed decides."""
CURVE_POINTS = 100
"""Largest number of epochs in the curve of a run."""
_COLUMNS = 4

Row = dict[str, Any]
Groups = dict[tuple[str, ...], list[Row]]
Curves = dict[str, dict[int, float]]
"""Validation metric by run, then by epoch; a run may have none."""


def collect(*folders: str | Path) -> list[Row]:
    """Return the metrics, folder and overrides of each finished run below the folders, in the order of the runs.

    Raises:
        FileNotFoundError: A folder has no finished run.
    """
    rows = []
    for folder in folders:
        runs = _runs_with("metrics.json", Path(folder))
        if not runs:
            raise FileNotFoundError(f"'folder' needs at least one run with metrics.json (got {folder})")
        for run in runs:
            overrides = list(OmegaConf.load(run / ".hydra" / "overrides.yaml"))
            results = json.loads((run / "metrics.json").read_text())
            rows.append({"run": str(run), "overrides": " ".join(overrides), **results})
    return rows


def _runs_with(name: str, folder: Path) -> list[Path]:
    """Return the run folders below a folder that hold a file of that name, in the order of the runs."""
    return sorted((file.parent for file in folder.rglob(name)), key=lambda run: (len(run.name), str(run)))


def read_curves(rows: Iterable[Row]) -> Curves:
    """Read the curves of runs from their folders, at every epoch or at each 2nd, 4th, 8th... up to `CURVE_POINTS`."""
    curves: Curves = {}
    for row in rows:
        with open(Path(row["run"]) / "metrics.csv", newline="") as stream:
            history = list(csv.DictReader(stream))
        step = 1
        # With powers of two, runs of different lengths share epochs.
        while len(history) > step * CURVE_POINTS:
            step *= 2
        digits, column = (6, "val_error") if row.get("metric") == "mae" else (4, "val_accuracy")
        curves[row["run"]] = {int(epoch["epoch"]): round(float(epoch[column]), digits) for epoch in history[::step]}
    return curves


def setting(row: Row) -> tuple[str, ...]:
    """Return the values of `KEY` of a run; its changes are the overrides beside seed and experiment."""
    words = [word for word in row["overrides"].split() if not word.startswith("seed=")]
    experiment = next((word for word in words if word.startswith("experiment=")), None)
    changes = " ".join(word for word in words if word != experiment) or "-"
    values = {**row, "experiment": experiment.partition("=")[2] if experiment else "-", "changes": changes}
    return tuple(str(values[name]) for name in KEY)


def by_seed(rows: Iterable[Row]) -> Groups:
    """Group runs by their setting.

    Raises:
        ValueError: Two runs of a setting have the same seed, so that their mean is not one over seeds.
    """
    groups: Groups = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    for key, runs in groups.items():
        seeds = [row["seed"] for row in runs]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"'folders' need runs that differ by their seeds (got {seeds} of {', '.join(key)})")
    return groups


def summary(values: Sequence[float]) -> str:
    """Format mean and sample standard deviation in percent."""
    spread = f" +- {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread}"


def result(runs: Sequence[Row]) -> str:
    """Format the test metric of runs of a setting: in percent, or values in their unit."""
    if runs[0]["metric"] != "mae":
        return summary([run["test_accuracy"] for run in runs])
    values = [run["test_error"] for run in runs]
    spread = f" +- {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread} {runs[0]['unit']}"


def table(groups: Groups) -> list[dict[str, str]]:
    """Return one row per setting: its key, and test metric (with its unit if not in %), last epoch and time."""
    return [
        {
            **dict(zip(KEY, key)),
            "seeds": str(len(runs)),
            "test, %": result(runs),
            "epochs": f"{statistics.mean(run['epochs'] for run in runs):.0f}",
            "s per run": f"{statistics.mean(run['train_time_s'] for run in runs):.0f}",
            "made up": runs[0].get("synthetic") or "-",
        }
        for key, runs in sorted(groups.items())
    ]


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows with the same columns as a table."""
    header = [" | ".join(rows[0]), "|".join(["---"] * len(rows[0]))]
    lines = [f"| {header[0]} |", f"|{header[1]}|", *(f"| {' | '.join(row.values())} |" for row in rows)]
    return "\n".join(lines) + "\n"


def figure(groups: Groups, curves: Curves) -> Figure:
    """Draw the validation metric over the epochs, mean and range over the seeds.

    Each task, model and experiment has a panel. Runs without a curve are left out; at least one run has a curve.
    """
    from matplotlib.figure import Figure

    drawn = {key: [curves[run["run"]] for run in runs if run["run"] in curves] for key, runs in sorted(groups.items())}
    panels = list(dict.fromkeys(key[:4] for key in drawn if drawn[key]))
    shape = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    image = Figure(figsize=(4.2 * shape[1], 3.6 * shape[0]), layout="constrained")
    image.suptitle("Mean (line) and range (band) over seeds", fontsize="medium")
    places = image.subplots(*shape, squeeze=False).flatten()
    for axes, panel in zip(places, panels):
        shown = {key: over_seeds for key, over_seeds in drawn.items() if over_seeds and key[:4] == panel}
        # What all curves of a panel share needs no label.
        words = [[*key[4:6], *key[6].split()] for key in shown]
        shared = set.intersection(*map(set, words))
        for label, over_seeds in zip(words, shown.values()):
            # If runs stop early, the mean ends with the shortest run.
            epochs = sorted(set.intersection(*map(set, over_seeds)))
            steps = [[curve[epoch] for curve in over_seeds] for epoch in epochs]
            name = "\n".join(word for word in label if word not in shared) or label[0]
            means = [statistics.mean(step) for step in steps]
            # A line needs two points.
            (line,) = axes.plot(epochs, means, label=name, marker="o" if len(epochs) == 1 else None)
            axes.fill_between(epochs, list(map(min, steps)), list(map(max, steps)), color=line.get_color(), alpha=0.2)
        axes.set(title=f"{panel[1]} on {panel[0]}", xlabel="epoch", ylabel=f"validation {panel[2]}".replace("_", " "))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    for axes in places[len(panels) :]:
        axes.remove()
    return image


class RunsOfSweep(Callback):
    """Callback of Hydra that keeps the folder of the sweep, which Hydra tells nobody after an error."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Keep the folder, in process 0."""
        if int(os.environ.get("RANK", 0)) == 0:
            RunsOfSweep.folder = Path(config.hydra.sweep.dir)

    @classmethod
    def print_table(cls) -> None:
        """Print one line per finished run of the sweep, if there is one, and the numbers of the others."""
        if cls.folder is None:
            return
        finished = _runs_with("metrics.json", cls.folder)
        if finished:
            print(f"\n{runs_of_sweep(collect(cls.folder))}", end="")
        if others := [run.name for run in _runs_with(".hydra", cls.folder) if run not in finished]:
            print(f"without a result: {', '.join(others)}")


def runs_of_sweep(rows: Iterable[Row]) -> str:
    """Format finished runs as a table: their number, what they change, and their results."""
    return markdown(
        [
            {
                "run": Path(row["run"]).name,
                "changes": row["overrides"] or "-",
                "test metric": f"{row['metric']} {result([row])}{'' if row['metric'] == 'mae' else ' %'}",
                "epochs": str(row["epochs"]),
                "s": f"{row['train_time_s']:.0f}",
            }
            for row in rows
        ]
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print mean and standard deviation of the test metric per setting, and write rows, table and figure."""
    parser = argparse.ArgumentParser(description="Sum up the runs of sweeps.")
    parser.add_argument("folders", nargs="+", help="run folders of the sweeps; the files go to the first one")
    given = [Path(folder) for folder in parser.parse_args(words).folders]
    # A sweep has a file beside its runs, which a pattern such as multirun/*/* names too.
    folders = [folder for folder in given if not folder.is_file()] or given
    # The figure is drawn to a file; the backend of a notebook may be absent here.
    os.environ["MPLBACKEND"] = "agg"
    rows = collect(*folders)
    groups = by_seed(rows)
    files = [folders[0] / f"sweep.{suffix}" for suffix in ("csv", "md", "png")]
    write_rows(files[0], dict.fromkeys(name for row in rows for name in row), rows)
    files[1].write_text(markdown(table(groups)))
    for (task, model, metric, _, convs, *_), runs in groups.items():
        percent = "" if metric == "mae" else " %"
        print(f"{model} on {task}, {convs}: test {metric} {result(runs)}{percent} over {len(runs)} runs")
    try:
        figure(groups, read_curves(rows)).savefig(files[2], dpi=110)
    except Exception as error:
        print(f"{files.pop()} could not be drawn: {error!r}")
    print(", ".join(map(str, files)))


if __name__ == "__main__":
    with in_one_line():
        main()
