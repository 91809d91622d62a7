"""Collect the runs of a sweep: `python -m pyg_dfgnn.training.sweep multirun/2026-01-31_12-00-00 --csv runs.csv`."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def collect(folder: str | Path) -> list[dict[str, Any]]:
    """The metrics of each finished run below a folder, with the overrides it was started with, in run order.

    Raises:
        FileNotFoundError: There is no finished run.
    """
    files = sorted(Path(folder).rglob("metrics.json"), key=lambda file: (len(file.parent.name), str(file)))
    if not files:
        raise FileNotFoundError(f"'folder' needs at least one run with metrics.json (got {folder})")
    rows = []
    for file in files:
        overrides = OmegaConf.load(file.parent / ".hydra" / "overrides.yaml")
        rows.append({"overrides": " ".join(overrides), **json.loads(file.read_text())})
    return rows


def main() -> None:
    """Print mean and standard deviation of the test accuracy, and write one row per run."""
    parser = argparse.ArgumentParser(description="Collect the runs of a sweep.")
    parser.add_argument("folder", help="run folder of the sweep")
    parser.add_argument("--csv", required=True, help="file to write")
    arguments = parser.parse_args()
    rows = collect(arguments.folder)
    with open(arguments.csv, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    accuracies = [100 * row["test_accuracy"] for row in rows]
    spread = f" +- {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    print(f"test accuracy {statistics.mean(accuracies):.2f}{spread} % over {len(rows)} runs: {arguments.csv}")


if __name__ == "__main__":
    main()
