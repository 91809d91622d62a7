"""Writes what came of each cell of the matrix to a CSV file: the option `--conformance` of pytest."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.results import MEASURED_ROOMS, Table, source_digest
from tests.proofs.reporter import reason_of

FIELDS = ("conv", "condition", "device", "outcome", "reason", "torch", "digest")
CELL = "conformance"
"""Property of a test: its conv, condition and device."""
PATH = "path"
"""Property of a test that PyG's own code has passed: why."""


class Rows:
    """Collects cells from the reports of tests, also of those that other processes run.

    Args:
        path: Rows of cells that are not run stay in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, ...], dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        properties = dict(report.user_properties)
        if CELL not in properties or (report.when != "call" and not report.failed):
            return
        reason = reason_of(report) or properties.get(PATH, "")
        cell = tuple(properties[CELL])
        digest = source_digest((*MEASURED_ROOMS, "nn", "frontend"))
        values = (*cell, report.outcome, " ".join(reason.split()), torch.__version__, digest)
        self.rows[cell] = dict(zip(FIELDS, values, strict=True))

    def pytest_sessionfinish(self) -> None:
        table = Table(self.path, FIELDS)
        rows = {tuple(row[name] for name in FIELDS[:3]): row for row in table.rows()} | self.rows
        table.keep(rows[cell] for cell in sorted(rows))
