"""The command of compute-sanitizer: what it reads in the logs of the tools, on a machine without them."""

import os
import sys

import pytest
import torch

from tests.kernels.nvrtc import compile_cubin, missing
from tests.proofs import planted, sanitizer
from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, TIME_IS_UP

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at attention_forward+0x1b0 in kernel.cu:12
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f2c is out of bounds
========= Error: Race reported between Write access at sm90_gemm+0x70
=========     and Read access at sm90_gemm+0xa0 [124 hazards]
========= Uninitialized __global__ memory read of size 4 bytes
=========     at segment_forward_of_SAGEConv+0x20
=========     by thread (0,0,0) in block (1,0,0)
========= ERROR SUMMARY: 3 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RAN = "sanitized: 20 passed, 0 failed, 0 left"


def test_reports_are_of_kernels_of_ours_or_of_others():
    found = sanitizer.reports(LOG)
    assert len(found) == sanitizer.summed(LOG) == 3 and "Address 0x7f2c" in found[0]
    assert {"attention_forward", "segment_forward", "graph_order", "relational_traversal"} <= {*sanitizer.entries()}
    ours, others = sanitizer.split(found, sanitizer.entries())
    assert ours == [found[0], found[2]] and others == [found[1]]
    assert sanitizer.reports(CLEAN) == [] and sanitizer.summed(CLEAN) == 0


@pytest.mark.parametrize(
    "status, printed, log, outcome, reason",
    [
        (0, RAN, CLEAN, PASSED, "20 calls; 0 reports"),
        (0, RAN, LOG, FAILED, "2 reports; 1 about kernels of others"),
        (0, RAN, "========= ERROR SUMMARY: 2 errors", FAILED, "2 errors of another kind"),
        (1, "sanitized: 19 passed, 1 failed, 0 left", CLEAN, FAILED, "1 calls failed"),
        (1, "ModuleNotFoundError", "", FAILED, "ModuleNotFoundError"),
        (0, "sanitized: 12 passed, 0 failed, 8 left", CLEAN, PASSED, f"8 calls are left: {TIME_IS_UP}"),
        (None, "", "", SKIPPED, TIME_IS_UP),
        (0, "sanitized: 0 passed, 0 failed, 0 left", "", SKIPPED, "nothing can run here"),
    ],
)
def test_outcome_of_calls(status, printed, log, outcome, reason):
    row = sanitizer.judge("memcheck", status, printed, log, 0.0)
    assert row.outcome == outcome and reason in row.reason


def write_tool(folder, text):
    """Write a script in the place of compute-sanitizer, whose log it is given."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys, time\nlog = sys.argv[sys.argv.index('--log-file') + 1]\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_planted_fault_must_be_found(tmp_path):
    write = "open(log, 'w').write('========= Invalid __global__ write\\n=========     at planted_memcheck+0x10\\n')"
    assert sanitizer.planted(write_tool(tmp_path, write), "memcheck").outcome == PASSED
    row = sanitizer.planted(write_tool(tmp_path, "print('no GPU')"), "memcheck")
    assert row.outcome == FAILED and "no GPU" in row.reason


def test_tool_that_does_not_end(tmp_path):
    status, printed, log = sanitizer.run(
        write_tool(tmp_path, "print('begun', flush=True); time.sleep(60)"), "memcheck", [], 1.0
    )
    assert (status, printed, log) == (None, "begun\n", "")


def test_tool_is_found_in_packages_and_in_path(tmp_path, monkeypatch):
    (tmp_path / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    path = write_tool(tmp_path / "nvidia" / "cu13" / "bin", "")
    monkeypatch.setenv("PATH", os.path.dirname(path))
    assert sanitizer.find() == path
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sanitizer, "TOOLKITS", ())
    assert sanitizer.find() == path
    monkeypatch.setattr(sys, "path", [])
    assert sanitizer.find() is None


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_planted_kernels_compile(tool):
    assert compile_cubin(planted.source(tool), "sm_90").cubin_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("tool", ["racecheck", "synccheck", "initcheck"])
def test_planted_kernels_run_without_a_tool(tool):
    """The faults are none that end a process."""
    pytest.importorskip("cupy")
    planted.run(tool)
    assert float(torch.ones(1, device="cuda")) == 1.0
