"""Files of a run: environment and metrics as JSON, metrics per epoch as CSV, and curves."""

from __future__ import annotations

import csv
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pyg_dfgnn

# These packages decide the numbers and times of a run; CuPy has two names.
_PACKAGES = (
    "torch",
    "torch_geometric",
    "numpy",
    "hydra-core",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "pyg-lib",
    "torch-sparse",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a run ran on: command, versions of packages, commit of a source tree, and the GPU if it has one."""
    values: dict[str, Any] = {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "pyg_dfgnn": pyg_dfgnn.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--untracked-files=no"),
        "device": str(device),
    }
    for name in _PACKAGES:
        try:
            values[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            values[name] = None
    if device.type == "cuda":
        values |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return values


def _git(*arguments: str) -> str | None:
    """Return the output of git in the source tree of this package; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_metrics(folder: Path, summary: dict[str, Any], history: list[dict[str, float]]) -> tuple[Path, Path]:
    """Write `metrics.json` (the summary) and `metrics.csv` (one row per epoch), and return both paths."""
    json_path, csv_path = folder / "metrics.json", folder / "metrics.csv"
    json_path.write_text(json.dumps(summary, indent=2) + "\n")
    write_rows(csv_path, history[0], history)
    return json_path, csv_path


def write_rows(path: Path, fields: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV with these columns."""
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_curves(path: Path, title: str, history: list[dict[str, float]], best_epoch: int) -> Path:
    """Draw loss and accuracy, or error, over the epochs, training and validation, with the chosen epoch marked."""
    from matplotlib.figure import Figure

    epochs = [row["epoch"] for row in history]
    # A line needs two points.
    marker = "o" if len(epochs) == 1 else None
    # Margins by number: a layout engine would draw everything twice.
    figure = Figure(figsize=(9, 3.6))
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.14, top=0.88, wspace=0.2)
    figure.suptitle(title)
    quantities = ("loss", "error" if "val_error" in history[0] else "accuracy")
    for axes, quantity in zip(figure.subplots(1, 2), quantities):
        for split, label in (("train", "training"), ("val", "validation")):
            axes.plot(epochs, [row[f"{split}_{quantity}"] for row in history], label=label, marker=marker)
        axes.axvline(best_epoch, color="gray", linestyle=":", label=f"best epoch ({best_epoch})")
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    return path
