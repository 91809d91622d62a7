"""The rows of the matrix: what they are made of, the table of the page, and that a planted fault is seen."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyg_dfgnn
from benchmarks import published
from benchmarks.results import Table
from tests.conformance.conditions import CONDITIONS
from tests.conformance.layers import CASES, Conv
from tests.conformance.rows import CELL, PATH, Rows

FILE = Path(__file__).parents[2] / "results" / "conformance.csv"


def report(cell, outcome, when="call", path=None, text=""):
    properties = [(CELL, cell), *([(PATH, path)] if path else [])]
    longrepr = ("file", 1, f"Skipped: {text}") if outcome == "skipped" else text
    states = {name: name == outcome for name in ("passed", "skipped", "failed")}
    return SimpleNamespace(
        user_properties=properties, outcome=outcome, when=when, longrepr=longrepr, nodeid="test", **states
    )


def test_rows_of_cells_that_are_not_run_stay(tmp_path, monkeypatch):
    path = tmp_path / "results" / "conformance.csv"
    for reports in (
        [report(("GATConv", "eager", "cpu"), "passed"), report(("GATConv", "eager", "cpu"), "passed", "teardown")],
        [report(("GATConv", "compile", "cpu"), "skipped", text="PyG's own\nlayer raises")],
        [report(("SAGEConv", "eager", "cpu"), "passed", path="PyG's own path: a | b")],
        [
            report(("SAGEConv", "compile", "cpu"), "failed", text="long\nlast"),
            report(("other",), "passed", "setup"),
        ],
    ):
        rows = Rows(path)
        for each in reports:
            rows.pytest_runtest_logreport(each)
        rows.pytest_sessionfinish()
    assert [(*map(row.get, ("conv", "condition", "outcome", "reason")),) for row in Table.read(path)] == [
        ("GATConv", "compile", "skipped", "PyG's own layer raises"),
        ("GATConv", "eager", "passed", ""),
        ("SAGEConv", "compile", "failed", "test: last"),
        ("SAGEConv", "eager", "passed", "PyG's own path: a | b"),
    ]
    monkeypatch.setattr(published, "ROOT", tmp_path)
    text = published.conformance()
    assert "| `GATConv` | — 1 | ✓ |\n| `SAGEConv` | FAILED 2 | PyG 3 |" in text
    assert "4 cells: 2 passed, 1 skipped, 1 failed." in text and "3. a \\| b" in text


def test_the_file_has_every_cell_and_none_failed():
    rows = Table.read(FILE)
    for device in {row["device"] for row in rows}:
        cells = {(row["conv"], row["condition"]) for row in rows if row["device"] == device}
        assert cells == set(product(CASES, CONDITIONS))
    assert [row for row in rows if row["outcome"] == "failed"] == []


@pytest.mark.parametrize("condition", ["eager", "no gradient", "save and load"])
def test_a_planted_fault_is_seen(condition, monkeypatch, plain_torch):
    accelerate = pyg_dfgnn.accelerate

    def wrong(layer):
        with torch.no_grad():
            next(layer.parameters()).mul_(1.0001)
        return accelerate(layer)

    monkeypatch.setattr(pyg_dfgnn, "accelerate", wrong)
    with pytest.raises(AssertionError, match="Excess"):
        CONDITIONS[condition](Conv("GCNConv", "cpu", emulates=False))
