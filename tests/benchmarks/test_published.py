"""The tables of layers without attention, made from results that are there or named where they are missing."""

import pytest

from benchmarks import published, table2
from benchmarks.results import Table
from benchmarks.run import FIELDS


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    return tmp_path / "results"


def test_missing_results_are_named(results):
    assert "experiment=segment" in published.segment() and "experiment=segment" in published.segment_peers()
    assert "benchmarks.measure" in published.conv_steps()


def test_tables_of_aggregations(results):
    base = dict.fromkeys(FIELDS, "") | dict(graph="c", op="max", layer="max", size="128", dtype="float32", state="warm")
    base |= dict(direction="fwd", status="ok", iqr_ms="0.1")
    ours = {**base, "implementation": "fused", "schedule": "auto", "median_ms": "9.2"}
    theirs = {**base, "implementation": "pyg", "median_ms": "587"}
    Table(results / "bench" / published.GPU / "segment.csv", FIELDS).append([ours, theirs])
    assert "| max | 128 | fwd | ours | 9.2 |" in published.segment() and "| 587 |" in published.segment()
    assert "| 9.2 | 10.7 | turbo-gnn | 1.16x |" in published.segment_peers()


def test_table_of_steps(results):
    base = dict.fromkeys(table2.FIELDS, "") | dict(dataset="pattern", status="ok", wall_ms="2.5", peak_mb="1234")
    rows = [{**base, "backend": "auto"}, {**base, "backend": "pyg", "status": "not run: out of memory"}]
    for model in ("gcn_stack", "gat_stack"):
        Table(results / "table2" / f"{model}-{published.GPU}.csv", table2.FIELDS).append(rows)
    (line,) = [line for line in published.conv_steps().splitlines() if "pattern" in line]
    backends = {"pyg": "not run", "auto": "2.5 ms, 1.2 GB"}
    cells = " | ".join(backends.get(name, "") for name in ("pyg", *published.BACKENDS))
    assert line == f"| `gcn` | pattern | {cells} |"
