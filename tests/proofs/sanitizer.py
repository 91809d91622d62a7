"""Run calls of each family of kernels under NVIDIA's compute-sanitizer, after planted faults that each tool must find.

A report about a kernel of this package is a failure. Reports about kernels of others, such as cuBLAS, are named. On a
CPU the emulator of the tests runs the calls, each array between pages that cannot be touched.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from pyg_dfgnn.paths import kernels_dir
from tests.proofs.outcomes import FAILED, PASSED, SKIPPED, TIME_IS_UP, Outcome, finish, options
from tests.proofs.planted import FAULTS
from tests.proofs.reporter import Reporter

TOOLS = tuple(FAULTS)
TOOLKITS = ("/usr/local", "/opt/nvidia")
"""Folders in which toolkits of CUDA lie."""
CALLS = Path(__file__).with_name("test_sanitized.py")
REPORT = re.compile(r"Invalid |Race reported|Barrier error|Uninitialized |Misaligned|Potential |Out-of-range|Leaked ")
"""The first line of a report; what follows it is indented."""
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^\n]*\)\s+)?(\w+)\(')
TESTS = re.compile(r"sanitized: (\d+) passed, (\d+) failed, (\d+) left")
PLANTED_SECONDS = 60.0
PLANTED, WORK = "a planted fault is found", "calls of each family"


def find() -> str | None:
    """The path of compute-sanitizer: in PATH, in a toolkit of CUDA, or in a package of NVIDIA's."""
    places = [*TOOLKITS, *(f"{place}/nvidia" for place in sys.path)]
    folders = [
        folder for place in places for name in ("bin", "compute-sanitizer") for folder in Path(place).glob(f"*/{name}")
    ]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


def entries() -> list[str]:
    """The names of the kernels of this package."""
    return sorted({name for path in kernels_dir().rglob("*.cu") for name in ENTRY.findall(path.read_text())})


def reports(log: str) -> list[str]:
    """The reports in a log, each with the indented lines that follow its first."""
    found: list[str] = []
    is_open = False
    for line in log.splitlines():
        text = line.removeprefix("=========").removeprefix(" ")
        if line.startswith("=========") and REPORT.search(text) and not text.startswith("  "):
            found.append(text)
            is_open = True
        elif is_open and line.startswith("=========") and text.startswith("  "):
            found[-1] += "\n" + text
        else:
            is_open = False
    return found


def summed(log: str) -> int:
    """The number of errors that the log ends with; those of several processes are added up."""
    return sum(map(int, SUMMARY.findall(log)))


def split(found: Iterable[str], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split reports into those about kernels of these names and about others."""
    own = re.compile(r"\b(?:" + "|".join(names) + r")")
    ours, others = [], []
    for report in found:
        (ours if own.search(report) else others).append(report)
    return ours, others


def run(command: str, tool: str, words: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Run Python under a tool.

    Returns:
        The exit status, None where time was up, what was printed, and the log of the tool.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        # Each tensor has an allocation of its own, so that what is behind its end is nobody's.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        before = [command, "--tool", tool, "--report-api-errors", "no", "--print-limit", "200", "--log-file", str(log)]
        with subprocess.Popen(
            [*before, sys.executable, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, status = process.communicate(timeout=seconds)[0], process.returncode
            except subprocess.TimeoutExpired:
                # The tool starts Python as a process of its own.
                os.killpg(process.pid, signal.SIGKILL)
                printed, status = process.communicate()[0], None
        return status, printed, log.read_text() if log.exists() else ""


def planted(command: str, tool: str) -> Outcome:
    """Run the kernel with the fault that a tool must find."""
    started = time.perf_counter()
    status, printed, log = run(command, tool, ["-m", "tests.proofs.planted", tool], PLANTED_SECONDS)
    ours, _ = split(reports(log), [f"planted_{tool}"])
    reason = "" if ours else f"not found; exit status {status}, {(log or printed)[-200:]}"
    seconds = f"{time.perf_counter() - started:.0f}"
    return Outcome(f"{tool}: {PLANTED}", PASSED if ours else FAILED, reason, seconds)


def calls(command: str, tool: str, seconds: float) -> Outcome:
    """Run the calls under a tool for at most some seconds."""
    started = time.perf_counter()
    words = ["-m", "tests.proofs.sanitizer", "--inside", f"{0.8 * seconds:.0f}"]
    return judge(f"{tool}: {WORK}", *run(command, tool, words, seconds), started)


def judge(name: str, status: int | None, printed: str, log: str, started: float) -> Outcome:
    """Make a row of calls that have run.

    Args:
        name: Of the row.
        status: The exit status, None where time was up.
        printed: What :func:`inside` has printed, and pytest.
        log: The log of the tool.
        started: When the calls have started.
    """
    ours, others = split(reports(log), entries())
    counts = TESTS.search(printed)
    passed, failed, left = map(int, counts.groups()) if counts else (0, 0, 0)
    parts, outcome = [f"{passed} calls", f"{len(ours)} reports"], PASSED
    if others:
        first = Counter(report.splitlines()[0][:80] for report in others).most_common(1)[0][0]
        parts.append(f"{len(others)} about kernels of others ({first})")
    if ours:
        outcome = FAILED
        parts.append(" ".join(ours[0].split())[:250])
    elif summed(log) and not others:
        outcome = FAILED
        parts.append(f"the tool counts {summed(log)} errors of another kind: {log[-200:]}")
    elif failed or (counts is None and status is not None):
        outcome = FAILED
        parts.append(f"{failed} calls failed, exit status {status}: {printed[-250:]}")
    elif left or status is None:
        outcome = PASSED if passed else SKIPPED
        parts.append(f"{left or 'some'} calls are left: {TIME_IS_UP}")
    elif not passed:
        outcome = SKIPPED
        parts.append("nothing can run here")
    return Outcome(name, outcome, "; ".join(parts), f"{time.perf_counter() - started:.0f}")


def inside(seconds: float) -> int:
    """Run the calls in this process, and print how many have passed, failed, and are left."""
    reporter = Reporter(time.perf_counter() + seconds)
    mark = "cuda" if torch.cuda.is_available() else "not cuda"
    words = ["-q", "-p", "no:cacheprovider", "--no-poison", "--tb=short", "-m", mark, str(CALLS)]
    status = pytest.main(words, plugins=[reporter])
    counts = Counter(row.outcome for row in reporter.rows.values())
    left = sum(row.reason == TIME_IS_UP for row in reporter.rows.values())
    print(f"sanitized: {counts[PASSED]} passed, {counts[FAILED]} failed, {left} left", flush=True)
    return int(status) if counts[FAILED] or not reporter.rows else 0


def main(arguments: list[str] | None = None) -> int:
    given = options(
        arguments,
        __doc__,
        560.0,
        ("--tools", {"nargs": "+", "default": TOOLS, "choices": TOOLS, "help": "all by default"}),
        ("--inside", {"type": float, "help": "run the calls in this process for some seconds, without a tool"}),
    )
    if given.inside is not None:
        return inside(given.inside)
    started = time.perf_counter()
    # Compiles what is not on disk yet: the tools slow the host down too.
    first = subprocess.run(
        [sys.executable, "-m", "tests.proofs.sanitizer", "--inside", f"{given.limit_seconds / 3:.0f}"],
        capture_output=True,
        text=True,
    )
    what = "no tool" if torch.cuda.is_available() else "emulator"
    rows = [judge(f"{what}: {WORK}", first.returncode, first.stdout, "", started)]
    command = find()
    if command is None or not torch.cuda.is_available():
        reason = "compute-sanitizer is not installed" if torch.cuda.is_available() else "needs an NVIDIA GPU"
        rows += [Outcome(f"{tool}: {work}", SKIPPED, reason) for tool in given.tools for work in (PLANTED, WORK)]
        return finish("sanitizer", rows, given.out, started)
    rows += [planted(command, tool) for tool in given.tools]
    for number, tool in enumerate(given.tools):
        left = given.limit_seconds - (time.perf_counter() - started)
        rows.append(calls(command, tool, max(20.0, left / (len(given.tools) - number))))
    return finish("sanitizer", rows, given.out, started)


if __name__ == "__main__":
    sys.exit(main())
