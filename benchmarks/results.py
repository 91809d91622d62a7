"""Result files: one tidy CSV per kind of measurement and GPU; rows are appended, so a run can be resumed."""

import csv
import hashlib
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pyg_dfgnn
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.paths import kernels_dir

PACKAGE = Path(pyg_dfgnn.__file__).resolve().parent
MEASURED_ROOMS = ("ops", "dispatch", "statements", "runtime", "graph", "ir")
"""Rooms whose text, with that of the kernels, decides what a measurement is about."""

OUT_OF_MEMORY = "not run: out of memory"

Row = Mapping[str, Any]
Rows = Sequence[Row]


@cache
def source_digest(rooms: tuple[str, ...] = MEASURED_ROOMS) -> str:
    """Eight hex digits over the text of the kernels and rooms: rows of other code are never mixed in."""
    digest = hashlib.sha256()
    for folder in (kernels_dir(), *(PACKAGE / room for room in rooms)):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


@cache
def commit() -> str:
    """The short git commit of the checkout, '' outside one."""
    command = ["git", "-C", str(PACKAGE), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def file_stem(device: torch.device, small: bool = False) -> str:
    """The device's name as a file name; results on miniature graphs have one of their own."""
    return device_name(device).lower().replace(" ", "-") + ("-small" if small else "")


def default_folder(kind: str, device: torch.device, small: bool = False) -> Path:
    """Return the default folder of a kind of results: ``results`` has those of a GPU, ``outputs`` the rest."""
    return Path("results" if device.type == "cuda" and not small else "outputs") / kind


def _version(*names: str) -> str:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def environment(device: torch.device) -> dict[str, str]:
    """Return the GPU of a measurement, the versions of its libraries, and the commit and digest of its sources."""
    return {
        "gpu": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "pyg": _version("torch_geometric", "torch-geometric"),
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "commit": commit(),
        "digest": source_digest(),
    }


def reason(error: Exception) -> str:
    """The status of what has no time because of an error."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, UnsupportedError):
        return "not run: " + "; ".join(error.reasons)
    return f"failed: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"


def latest(rows: Rows, names: Sequence[str]) -> list[Row]:
    """Return the last of the rows that agree in these columns; a resumed run appends."""
    return list({tuple(str(row[name]) for name in names): row for row in rows}.values())


def device_of(name: str) -> torch.device:
    """Return the device that a config names; `auto` is a GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


class Progress:
    """Lines of a command with the seconds that it has taken, and the limit after which it starts nothing more."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.started = limit_s, time.perf_counter()

    def print(self, text: str) -> None:
        """Print a line."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def is_over(self) -> bool:
        """Return whether the time is up, and say so."""
        is_over = time.perf_counter() - self.started > self.limit_s
        if is_over:
            print(f"stopped after {self.limit_s:g} s; run again to resume")
        return is_over


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Table:
    """A CSV file with fixed columns that grows by rows; a ValueError where it exists with others."""

    def __init__(self, path: Path, fields: Iterable[str]) -> None:
        self.path, self.fields = path, list(fields)
        if path.exists():
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header and header != self.fields:
                raise ValueError(f"{path} has other columns than this version writes; move it away or start over")

    @staticmethod
    def read(path: Path) -> list[dict[str, str]]:
        """The rows of any CSV file."""
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def rows(self) -> list[dict[str, str]]:
        return self.read(self.path) if self.path.exists() else []

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.fields)
            if new:
                writer.writeheader()
            writer.writerows(rows)

    def keep(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the content by ``rows``."""
        self.path.unlink(missing_ok=True)
        self.append(rows)


def markdown(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
