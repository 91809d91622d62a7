"""The command that checks several GPUs, on CPUs."""

import csv

import pytest

from benchmarks import multi_gpu

CHECKS = {"partition", "Reddit-like", "products-like", "beyond", "own batches", "throughput", "losses"}


def check(path):
    assert multi_gpu.main(["--device", "cpu", "--small", "--csv", str(path)])


def test_command(launch, tmp_path):
    path = tmp_path / "folder" / "multi_gpu.csv"
    launch(2, check, path)
    with open(path) as stream:
        rows = list(csv.DictReader(stream))
    assert {row["check"] for row in rows} == CHECKS
    judged = [row for row in rows if row["needed"]]
    assert judged and all(row["verdict"] == "ok" for row in judged)


@pytest.mark.parametrize(
    ("quantity", "value", "needed", "verdict"),
    [
        ("speed-up", 1.8, 1.8, "ok"),
        ("speed-up", 1.7, 1.8, "FAILED"),
        ("error of dx", 1e-6, 1e-5, "ok"),
        ("error of dx", 1e-4, 1e-5, "FAILED"),
        ("error of dx", float("nan"), 1e-5, "FAILED"),
        ("graphs per second", 1.0, None, ""),
    ],
)
def test_verdict(quantity, value, needed, verdict):
    assert multi_gpu.Result("check", "model", 2, quantity, value, needed).verdict == verdict
