"""Hardware counters of the kernels of single cases, read by Nsight Compute: what limits each.

``python tools/counters.py a:add:8x16:bfloat16 e:dot:1x128:tf32`` prints the counters of forward and backward of the
fused operation; cases that end in ``:forward`` are a forward pass that needs no gradient.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyg_dfgnn.bench.case import DTYPES, Case, forward_backward
from pyg_dfgnn.bench.cases import case_of
from pyg_dfgnn.bench.graphs import benchmark_graph, compressed, recipe_of
from pyg_dfgnn.bench.prepare import in_force, rounded_problem
from pyg_dfgnn.bench.results import markdown
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.settings import SCHEDULES

SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats")
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1 %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared bytes": "launch__shared_mem_per_block_dynamic",
    "blocks": "launch__grid_size",
}
"""Column -> counter of Nsight Compute, in its base units (nanoseconds for `us`)."""
PIPE = re.compile(r"sm__(?:inst_executed_)?pipe_(\w+?)(?:_cycles_active)?\.avg\.pct_of_peak_sustained_active")
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
FORM = "graph:op:size:dtype[:schedule][:forward]"


@dataclass(frozen=True)
class Profiled:
    """What to profile: ``graph:op:size:dtype[:schedule][:forward]``."""

    graph: str
    case: Case
    dtype: str
    schedule: str
    forward_only: bool = False

    @staticmethod
    def of(text: str) -> Profiled:
        """From a command-line word.

        Raises:
            ValueError: The word has another form, or names something unknown.
        """
        match = re.fullmatch(r"([^:]+):(\w+):(\w+):(\w+)(?::(?!forward$)(\w+))?(:forward)?", text)
        if match is None:
            raise ValueError(f"a case needs the form {FORM} (got {text!r})")
        graph, op, size, dtype, schedule = match.groups()[:5]
        recipe_of(graph)
        check_choice("dtype", dtype, tuple(DTYPES))
        check_choice("schedule", schedule or "auto", SCHEDULES)
        return Profiled(graph, case_of(op, size), dtype, schedule or "auto", match[6] is not None)

    def run(self, device: torch.device) -> None:
        """Calls the case twice, the second time under the profiler."""
        graph = benchmark_graph(self.graph, device)
        inputs, grad_out = rounded_problem(self.case, graph, [self.dtype])
        dtype, trained = DTYPES[self.dtype], not self.forward_only
        leaves = {name: tensor.to(dtype).requires_grad_(trained) for name, tensor in inputs.items()}
        with in_force(self.schedule, self.dtype):
            for is_profiled in (False, True):
                torch.cuda.synchronize(device)
                if is_profiled:
                    torch.cuda.profiler.start()
                out = self.case.fused(compressed(graph), leaves)
                if trained:
                    forward_backward(out, leaves, grad_out.to(dtype))
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()


def command(word: str) -> list[str]:
    """Nsight Compute around this program in a process of its own, which runs the case."""
    sections = [part for section in SECTIONS for part in ("--section", section)]
    options = "--csv --page raw --print-units base --clock-control none --profile-from-start off".split()
    return ["ncu", *options, *sections, sys.executable, __file__, "--here", word]


def parse(word: str, output: str) -> list[list[Any]]:
    """One line of the table per kernel, from what Nsight Compute prints.

    Raises:
        ValueError: The output has no table of kernels.
    """
    lines = output.splitlines()
    kernels = list(csv.DictReader(line for line in lines if line.startswith('"')))[1:]  # the first holds the units
    if not kernels:
        tail = "\n".join(lines)[-1500:]
        raise ValueError(f"no kernels came back:\n{tail}")
    table = []
    for counters in kernels:
        values = [_number(counters.get(counter, "")) for counter in COUNTERS.values()]
        values[0] = values[0] / 1e3 if values[0] else values[0]
        table.append([word, counters["Kernel Name"], *values, _largest(PIPE, counters), _largest(STALL, counters)])
    return table


def _number(text: str) -> Any:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return ""
    return int(value) if value == int(value) else round(value, 2)


def _largest(pattern: re.Pattern[str], counters: Mapping[str, str], count: int = 3) -> str:
    """The largest counters of a kind, such as "fma 41, lsu 30"."""
    values: dict[str, float] = {}
    for name, text in counters.items():
        match, value = pattern.fullmatch(name), _number(text)
        if match and value != "" and match[1] != "selected":
            values[match[1]] = max(value, values.get(match[1], 0.0))
    ordered = sorted(values.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {value:.3g}" for name, value in ordered)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar=FORM)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        cases = [Profiled.of(word) for word in options.cases]
    except ValueError as error:
        parser.error(str(error))
    if options.here:
        for case in cases:
            case.run(torch.device("cuda"))
        return 0
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        parser.error("profiling needs an NVIDIA GPU and Nsight Compute's 'ncu' on the PATH")
    lines = []
    for word in options.cases:
        finished = subprocess.run(command(word), capture_output=True, text=True)
        lines += parse(word, finished.stdout + finished.stderr)
    print(markdown(["case", "kernel", *COUNTERS, "pipes", "stalls"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
