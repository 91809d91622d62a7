"""The files a run leaves behind: metrics as JSON and CSV, and curves."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def write_metrics(folder: Path, summary: dict[str, Any], history: list[dict[str, float]]) -> tuple[Path, Path]:
    """Write `metrics.json` (the summary) and `metrics.csv` (one row per epoch); returns both paths."""
    json_path, csv_path = folder / "metrics.json", folder / "metrics.csv"
    json_path.write_text(json.dumps(summary, indent=2) + "\n")
    with open(csv_path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows(history)
    return json_path, csv_path


def plot_curves(path: Path, title: str, history: list[dict[str, float]], best_epoch: int) -> Path:
    """Draw loss and accuracy over the epochs, training and validation, with the chosen epoch marked."""
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title)
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        for split, label in (("train", "training"), ("val", "validation")):
            axes.plot(epochs, [row[f"{split}_{quantity}"] for row in history], label=label)
        axes.axvline(best_epoch, color="gray", linestyle=":", label=f"best epoch ({best_epoch})")
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    return path
