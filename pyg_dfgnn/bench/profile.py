"""Hardware counters of the kernels of single cases, read by Nsight Compute: what limits each.

``python -m pyg_dfgnn.bench.profile a:add:8x16:bfloat16 e:dot:1x128:tf32`` profiles forward and backward of the fused
op, of cases that end in ``:forward`` a forward pass that needs no gradient. It appends to
``results/bench/<gpu>/profile.csv`` and prints the table. Each case is also checked against float64.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.bench.cases.attention import SCORES, AttentionCase, forward_backward, fused
from pyg_dfgnn.bench.graphs import benchmark_graph, recipe_of
from pyg_dfgnn.bench.oracle import BOUNDS, compare, float64_reference
from pyg_dfgnn.bench.prepare import DTYPES, compressed, in_force, rounded_problem
from pyg_dfgnn.bench.results import Table, environment, file_stem, markdown, now
from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import SCHEDULES

SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats")
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "blocks": "launch__grid_size",
}
"""Column -> counter of Nsight Compute, in its base units (nanoseconds for `us`)."""
PIPE = re.compile(r"sm__(?:inst_executed_)?pipe_(\w+?)(?:_cycles_active)?\.avg\.pct_of_peak_sustained_active")
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
FIELDS = ("case", "kernel", *COUNTERS, *"pipes stalls worst error bound gpu torch commit digest time".split())
_FORM = "graph:score:HxC:dtype[:schedule][:forward]"
_MARK = "profiled "


@dataclass(frozen=True)
class Profiled:
    """What to profile: ``graph:score:heads x channels:dtype[:schedule][:forward]``."""

    graph: str
    case: AttentionCase
    dtype: str
    schedule: str
    forward_only: bool = False

    @staticmethod
    def of(text: str) -> Profiled:
        """From a command-line word.

        Raises:
            ValueError: The word has another form, or names something unknown.
        """
        match = re.fullmatch(r"([^:]+):(\w+):(\d+)x(\d+):(\w+)(?::(?!forward$)(\w+))?(:forward)?", text)
        if match is None:
            raise ValueError(f"a case needs the form {_FORM} (got {text!r})")
        graph, score, heads, channels, dtype = match.groups()[:5]
        schedule, forward_only = match[6] or "auto", match[7] is not None
        recipe_of(graph)
        check_choice("score", score, SCORES)
        check_choice("dtype", dtype, tuple(DTYPES))
        check_choice("schedule", schedule, SCHEDULES)
        return Profiled(graph, AttentionCase(score, int(heads), int(channels)), dtype, schedule, forward_only)

    def run(self, device: torch.device) -> dict[str, Any]:
        """Checks the case, then calls it once under the profiler; the number of launches and the worst error."""
        bench = benchmark_graph(self.graph, device)
        graph = compressed(bench)
        inputs, grad_out = rounded_problem(self.case, bench, [DTYPES[self.dtype]])
        trained = not self.forward_only
        leaves = {name: tensor.to(DTYPES[self.dtype]).requires_grad_(trained) for name, tensor in inputs.items()}
        output_grad = grad_out.to(DTYPES[self.dtype])

        def call() -> dict[str, Tensor]:
            out = fused(self.case, graph, leaves)
            return forward_backward(out, leaves, output_grad) if trained else {"out": out}

        launches: list[str] = []
        with in_force(self.schedule, self.dtype):
            result = call()
            with launcher.override(lambda spec, entry, *_: launches.append(entry)):
                call()
            torch.cuda.synchronize(device)
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize(device)
            torch.cuda.profiler.stop()
        expected = float64_reference(self.case, bench, inputs, grad_out)
        errors = compare(self.case, bench, result, {name: expected[name] for name in result}, output_grad)
        worst, error = errors.worst
        return {"kernels": len(launches), "worst": worst, "error": f"{error:.2e}", "bound": BOUNDS[self.dtype]}


def command(cases: Sequence[str]) -> list[str]:
    """Nsight Compute around this module in a process of its own, which runs the cases."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    options = [
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
    ]
    kernels = ["--kernel-name", "regex:^attention"]
    return ["ncu", *options, *kernels, *sections, sys.executable, "-m", "pyg_dfgnn.bench.profile", "--here", *cases]


def parse(cases: Sequence[str], output: str) -> Iterator[dict[str, Any]]:
    """One row per kernel from what Nsight Compute and the profiled process print.

    Raises:
        ValueError: The output has no table of kernels, or not as many as the cases launched.
    """
    lines = output.splitlines()
    facts = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    table = [line for line in lines if line.startswith('"')]
    kernels = list(csv.DictReader(table))[1:]  # the first holds the units
    needed = sum(fact["kernels"] for fact in facts)
    if len(facts) != len(cases) or len(kernels) != needed:
        tail = "\n".join(line for line in lines if not line.startswith('"'))[-1500:]
        raise ValueError(
            f"{len(kernels)} kernels of {needed} and {len(facts)} cases of {len(cases)} came back:\n{tail}"
        )
    measured = iter(kernels)
    for case, fact in zip(cases, facts, strict=True):
        for _ in range(fact["kernels"]):
            counters = next(measured)
            row = {name: _number(counters.get(counter, "")) for name, counter in COUNTERS.items()}
            row["us"] = row["us"] / 1e3 if row["us"] else row["us"]
            yield {
                **{"case": case, "kernel": counters["Kernel Name"], **row},
                "pipes": _largest(PIPE, counters, 3),
                "stalls": _largest(STALL, counters, 3),
                **{name: fact[name] for name in ("worst", "error", "bound")},
            }


def _number(text: str) -> Any:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return ""
    return int(value) if value == int(value) else round(value, 2)


def _largest(pattern: re.Pattern[str], counters: dict[str, str], count: int) -> str:
    """The largest counters of a family, such as "fma 41, lsu 30"."""
    found: dict[str, float] = {}
    for name, text in counters.items():
        match = pattern.fullmatch(name)
        value = _number(text)
        if match and value != "" and match.group(1) != "selected":
            found[match.group(1)] = max(value, found.get(match.group(1), 0.0))
    ordered = sorted(found.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {value:.3g}" for name, value in ordered)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line per kernel; utilisation in percent, stalls in cycles per instruction."""
    shown = ("case", "kernel", *COUNTERS, "pipes", "stalls", "error")
    return markdown(list(shown), ([row[name] for name in shown] for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar=_FORM)
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder (default: %(default)s)")
    parser.add_argument("--raw", type=Path, help="also keep what Nsight Compute prints")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        cases = [Profiled.of(text) for text in options.cases]
    except ValueError as error:
        parser.error(str(error))
    if options.here:
        for case in cases:
            print(_MARK + json.dumps(case.run(torch.device("cuda"))), flush=True)
        return 0
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        parser.error("profiling needs an NVIDIA GPU and Nsight Compute's 'ncu' on the PATH")
    device = torch.device("cuda")
    facts = {name: value for name, value in environment(device).items() if name in FIELDS}
    kept = Table(options.out / file_stem(device) / "profile.csv", FIELDS)
    good = True
    for case in options.cases:
        done = subprocess.run(command([case]), capture_output=True, text=True)
        output = done.stdout + done.stderr
        if options.raw:
            with options.raw.open("a") as file:
                file.write(output)
        try:
            rows = [{**row, **facts, "time": now()} for row in parse([case], output)]
        except ValueError as error:
            print(f"{case}: {error}", flush=True)
            good = False
            continue
        kept.append(rows)
        print(table(rows), flush=True)
        good = good and all(float(row["error"]) <= row["bound"] for row in rows)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
