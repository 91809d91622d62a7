"""Brings what tasks have left in folders of their own into ``results/``, and writes what follows from it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyg_dfgnn.bench import check, plots, table2_report
from pyg_dfgnn.bench.results import PACKAGE, Table
from pyg_dfgnn.bench.schedule import Task, is_done

RUNS = "accuracy"
"""Folder of the results that takes finished runs in place of rows."""
CASES = {
    "check/*.csv": "schedule graph score edge heads channels dropout dtype",
    "bench/*-overhead.csv": "graph layer heads channels what gpu",
    "bench/*/profile.csv": "case gpu",
    "bench/*/*.csv": "graph score heads channels dtype implementation schedule direction state gpu",
    "table2/*.csv": "model setting dataset backend gpu",
    "multi_gpu-*.csv": "check model processes quantity",
}
"""By result file: the columns of a case, whose new rows take the place of all earlier ones."""
PARTS = ("step", "kernel")
"""Columns by which the rows of one case differ, where there are such."""


def merge(target: Path, sources: Sequence[Path], case: Sequence[str]) -> int:
    """Brings rows into a result file: those of a case that has new ones go, all others stay.

    Args:
        target: CSV file, made where it is missing.
        sources: CSV files of the new rows; of rows for the same thing the last one counts.
        case: Columns that say what a row is about.

    Returns:
        How many rows came.

    Raises:
        ValueError: The files have different columns.
    """
    head: list[str] = []
    rows: list[list[str]] = []
    earlier: list[list[str]] = []
    for path in (target, *sources):
        if not path.exists():
            continue
        with path.open(newline="") as file:
            columns, *found = list(csv.reader(file)) or [[]]
        if head and columns and columns != head:
            raise ValueError(f"{path} has other columns than {target}; move one of them away")
        head = head or columns
        # A process that was ended may have left half a row.
        (earlier if path == target else rows).extend(row for row in found if len(row) == len(columns))
    if not rows:
        return 0
    places = [head.index(name) for name in case]
    parts = places + [head.index(name) for name in PARTS if name in head]
    new = {tuple(row[at] for at in parts): row for row in rows}
    cases = {tuple(row[at] for at in places) for row in rows}
    kept = [row for row in earlier if tuple(row[at] for at in places) not in cases]
    sample = target if target.exists() else sources[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it first, so that an interrupt leaves the one or the other.
    beside = target.with_suffix(".partial")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n" if b"\r\n" in sample.read_bytes() else "\n")
        writer.writerows([head, *kept, *new.values()])
    beside.replace(target)
    return len(new)


def bring_back(found: Sequence[Task], work: Path, results: Path) -> list[str]:
    """Brings what tasks have left into the results and writes the pages and figures that follow from it.

    Args:
        found: The tasks, done or not: a row counts by itself, a run only when it is finished.
        work: Folder of their folders.
        results: Folder of results.

    Returns:
        What could not be brought back, and why.
    """
    sources: dict[Path, list[Path]] = {}
    for task in found:
        if task.into is not None and task.into != RUNS:
            for path in sorted((work / task.name).rglob("*.csv")):
                sources.setdefault(Path(task.into) / path.relative_to(work / task.name), []).append(path)
    problems, changed = [], []
    for target, paths in sources.items():
        try:
            case = next(columns for pattern, columns in CASES.items() if target.match(pattern))
            print(f"{merge(results / target, paths, case.split())} rows to {results / target}", flush=True)
            changed.append(results / target)
        except ValueError as error:
            problems.append(str(error))
    runs = [str(Path(work.name) / task.name) for task in found if task.into == RUNS and is_done(task, work)]
    if runs:
        problems += _add_runs(runs, work.parent, (results / RUNS).resolve())
    for path in _pages(changed):
        print(path, flush=True)
    return problems


def _add_runs(runs: list[str], folder: Path, target: Path) -> list[str]:
    """Adds runs under their names relative to a folder; what went wrong."""
    target.mkdir(parents=True, exist_ok=True)
    published = target / "published.csv"
    words = ["--add", str(target), *(["--published", str(published)] if published.exists() else [])]
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pyg_dfgnn.training.sweep", *runs, *words]
    ended = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    print(ended.stdout, end="", flush=True)
    return [f"runs: {ended.stderr.strip().splitlines()[-1]}"] if ended.returncode else []


def _pages(changed: Sequence[Path]) -> Iterator[Path]:
    """Writes what follows from result files, and names it."""
    changed = [path for path in changed if path.exists()]
    for path in changed:
        if path.parent.name == "check":
            page = path.with_suffix(".md")
            page.write_text(_check_page(path))
            yield page
        elif path.parent.name == "table2" and not path.stem.endswith("-losses"):
            files = path, path.with_name(f"{path.stem}-losses.csv")
            rows, losses = (Table.read(each) if each.exists() else [] for each in files)
            # Rows of an earlier setting stay in the file; they are no part of this table.
            kept = [[row for row in each if row["setting"] == rows[-1]["setting"]] for each in (rows, losses)]
            latest = table2_report.latest(kept[0]), table2_report.latest(kept[1], "step")
            yield from table2_report.write(path.with_suffix(""), *latest)
    for folder in {path.parent: None for path in changed if path.parent.parent.name == "bench"}:
        page = folder / "README.md"
        page.write_text(plots.page(folder))
        yield page


def _check_page(path: Path) -> str:
    rows = Table.read(path)
    digests = [row["digest"] for row in rows]
    sources = ", ".join(f"`{digest}` ({digests.count(digest)} rows)" for digest in dict.fromkeys(digests))
    text = f"""\
`python -m pyg_dfgnn.bench.check`, sources {sources}. Errors are relative Frobenius norms; each case ran twice and had
to be equal to the last bit. The CSV beside this file has one row per case. A schedule that was asked for and cannot run
a case counts as not run, with the reason in the CSV; `row_split` runs all. The row of a hub is judged on its own too
("worst
hub row"), against the scale of a row of its kind."""
    return f"# Outputs and gradients against float64 on {path.stem}\n\n{text}\n\n{check.summarise(rows)}\n"
