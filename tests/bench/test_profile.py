"""The profile command: its words, and what it reads from Nsight Compute's output."""

import csv
import io
import json
import shutil
import subprocess

import pytest
import torch

from pyg_dfgnn.bench import profile
from pyg_dfgnn.bench.cases.attention import AttentionCase

CASES = ["e:dot:1x128:tf32", "a:add:8x16:bfloat16:block_mma"]
FACTS = [
    {"kernels": 2, "worst": "out", "error": "1.00e-07", "bound": 5e-6},
    {"kernels": 1, "worst": "grad_value", "error": "2.00e-03", "bound": 1e-2},
]
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {
    "ID": ["", "0", "1", "2"],
    "Kernel Name": ["", "attention_forward", "attention_backward_targets", "attention_block_mma_forward"],
    "gpu__time_duration.sum": ["nsecond", "58,016", "72000", "64000.0"],
    "launch__registers_per_thread": ["register/thread", "72", "80", "168"],
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": ["%", "41.5", "20", "10"],
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ["%", "5", "60.25", "70"],
    STALLED.format("long_scoreboard"): ["inst", "6.5", "1", "2"],
    STALLED.format("barrier"): ["inst", "0.5", "3", "1"],
    STALLED.format("selected"): ["inst", "9", "9", "9"],
}


def output(facts=FACTS, rows=4):
    stream = io.StringIO()
    writer = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(list(zip(*COLUMNS.values()))[:rows])
    lines = ["==PROF== Connected", *("profiled " + json.dumps(fact) for fact in facts), stream.getvalue()]
    return "\n".join(lines)


def test_cases_are_read():
    assert profile.Profiled.of(CASES[1]) == profile.Profiled("a", AttentionCase("add", 8, 16), "bfloat16", "block_mma")
    assert profile.Profiled.of(CASES[0]).schedule == "auto"
    alone = profile.Profiled.of("e:add:8x16:float32:forward")
    assert (alone.schedule, alone.forward_only) == ("auto", True)
    alone = profile.Profiled.of("e:add:8x16:float32:row_split:forward")
    assert (alone.schedule, alone.forward_only) == ("row_split", True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a:dot:128:float32", "needs the form"),
        ("a:dots:1x128:float32", "'score' needs"),
        ("a:dot:1x128:float64", "'dtype' needs"),
        ("a:dot:1x128:float32:fast", "'schedule' needs"),
        ("a:dot:1x128:float32:forward:row_split", "needs the form"),
        ("nowhere:dot:1x128:float32", "nowhere"),
    ],
)
def test_wrong_words(word, message, capsys):
    with pytest.raises(SystemExit):
        profile.main([word])
    assert message in capsys.readouterr().err


def test_rows_are_per_kernel():
    rows = list(profile.parse(CASES, output()))
    assert [row["case"] for row in rows] == [CASES[0], CASES[0], CASES[1]]
    assert [row["us"] for row in rows] == [58.016, 72.0, 64.0]
    assert [row["registers"] for row in rows] == [72, 80, 168]
    assert [row["pipes"] for row in rows] == ["fma 41.5, xu 5", "xu 60.2, fma 20", "xu 70, fma 10"]
    assert rows[1]["stalls"] == "barrier 3, long_scoreboard 1"
    assert rows[2]["worst"] == "grad_value" and rows[0]["dram_percent"] == ""
    assert "| attention_block_mma_forward | 64.0 |" in profile.table(rows)


def test_missing_kernels_are_an_error():
    with pytest.raises(ValueError, match="2 kernels of 3 and 2 cases of 2 came back:\n==PROF=="):
        list(profile.parse(CASES, output(rows=3)))


def test_each_case_is_kept_and_a_failed_one_named(monkeypatch, tmp_path, capsys):
    printed = {CASES[0]: "no kernels were profiled", CASES[1]: output(FACTS[1:], rows=2)}
    run = lambda command, **options: subprocess.CompletedProcess(command, 0, printed[command[-1]], "")  # noqa: E731
    monkeypatch.setattr(profile.subprocess, "run", run)
    monkeypatch.setattr(profile.shutil, "which", lambda name: name)
    monkeypatch.setattr(profile, "file_stem", lambda device: "gpu")
    monkeypatch.setattr(profile, "environment", lambda device: {"gpu": "GPU", "torch": "2", "pyg": "2"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert profile.main([*CASES, "--out", str(tmp_path), "--raw", str(tmp_path / "raw.txt")]) == 1
    shown = capsys.readouterr().out
    assert f"{CASES[0]}: 0 kernels of 0 and 0 cases of 1 came back" in shown and "| attention_forward |" in shown
    (row,) = profile.Table.read(tmp_path / "gpu" / "profile.csv")
    assert row["case"] == CASES[1] and row["gpu"] == "GPU" and float(row["us"]) == 58.016
    assert (tmp_path / "raw.txt").read_text().startswith("no kernels")


@pytest.mark.skipif(
    torch.cuda.is_available() and shutil.which("ncu") is not None, reason="there is something to profile with"
)
def test_needs_a_gpu_and_the_profiler(capsys):
    with pytest.raises(SystemExit):
        profile.main(CASES)
    assert "Nsight Compute" in capsys.readouterr().err
