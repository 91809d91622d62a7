"""Tables of documents, made from the rows of loops."""

import pytest

from benchmarks import published
from benchmarks.results import Table

FIELDS = ("loop", "size", "model", "implementation", "status", "ms", "ratio", "peak_mb", "baseline")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()

    def rows(*values):
        table = [dict(zip(FIELDS, (*map(str, row), "pyg"), strict=True)) for row in values]
        Table(tmp_path / "results" / "loops.csv", FIELDS).append(table)

    return rows


def test_factors_are_geometric_means_with_their_range(write):
    write(
        ("molecules", "", "gin", "pyg", "ok", 8, "", ""),
        ("molecules", "", "gin", "ours", "ok", 4, 2, ""),
        ("molecules", "", "gat", "pyg", "ok", 2, "", ""),
        ("molecules", "", "gat", "ours", "ok", 0.25, 8, ""),
        ("molecules", "", "gat", "ours_captured", "WRONG", "", "", ""),
    )
    assert published.loops().splitlines()[-1] == "| batches of molecules | 4 | 4 (2 to 8) |"


def test_edge_networks_have_a_time_and_a_peak(write):
    ways = ("pyg", *published.WAYS_TO_TRAIN)
    write(*(("edge_networks", "h64", model, way, "ok", 9.5, 1, 2310 if way == "pyg" else "")
            for model in published.EDGE_NETWORKS for way in ways))  # fmt: skip
    assert "| `NNConv`, 64 | 9.5 / 2,310 | 9.5 | 9.5 | 9.5 | 9.5 |" in published.edge_networks()
