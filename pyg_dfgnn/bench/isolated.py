"""One measurement in a process of its own, ended when its time is up: a compiler that does not come back ends alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from pyg_dfgnn.bench.experiment import Experiment, Job
from pyg_dfgnn.bench.results import Rows, Table


def command(experiment: Experiment, job: Job, direction: str, folder: str) -> list[str]:
    """The bench command of this one measurement, with its CSV below ``folder``."""
    values = {
        "graphs": f"[{job.graph}]",
        "scores": f"[{job.case.score}]",
        "sizes": f"[{job.case.heads}x{job.case.channels}]",
        "dtypes": f"[{job.dtype}]",
        "directions": f"[{direction}]",
        "implementations": f"[{job.implementation}]",
        "states": f"[{','.join(experiment.states)}]",
        **{f"pace.{name}": value for name, value in asdict(experiment.pace).items()},
        "isolated.implementations": "[]",
        "device": str(experiment.device),
        "small": str(experiment.small).lower(),
        "limit_s": "inf",
        "workers": 0,
        "folder": f"'{folder}'",
    }
    arguments = [f"{name}={value}" for name, value in values.items()]
    return [sys.executable, "-m", "pyg_dfgnn.bench", "experiment=isolated", *arguments]


def measure(experiment: Experiment, job: Job, direction: str) -> tuple[Rows, str]:
    """The rows that the process wrote; without any, the status says why."""
    limit_s = experiment.isolated.limit_s
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command(experiment, job, direction, folder), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return [], f"no result within {limit_s:g} s"
        finally:
            # The group also holds the compiler's own processes.
            _end(process)
        rows = [row for path in Path(folder).rglob("*.csv") for row in Table.read(path) if row["score"] != "graph"]
        if rows:
            return rows, ""
        output.seek(0)
        lines = output.read().strip().splitlines() or ["no output"]
        return [], f"failed: process ended with {process.returncode}: {lines[-1][:200]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
