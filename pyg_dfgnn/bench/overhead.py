"""Host microseconds of one kernel launch, and of a forward and a forward+backward through autograd, on graph (b).

``python -m pyg_dfgnn.bench.overhead`` appends to ``results/bench/<gpu>-overhead.csv`` and prints the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pyg_dfgnn.bench.cases.attention import LAYERS, SCORES, AttentionCase, fused, make_grad_out, make_inputs
from pyg_dfgnn.bench.graphs import benchmark_graph
from pyg_dfgnn.bench.prepare import Prepared
from pyg_dfgnn.bench.results import Table, environment, file_stem, markdown, now
from pyg_dfgnn.bench.timing import Timer
from pyg_dfgnn.runtime import launcher

FIELDS = (
    "layer heads channels what kernels host_us host_us_per_kernel gpu torch cuda pyg cupy commit digest time".split()
)
REPETITIONS = 300


def measure(case: AttentionCase, graph: Prepared, timer: Timer, repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Rows for one launch of the forward kernel, one forward, one forward+backward: the host's time, device idle.

    Args:
        case: The layer.
        graph: Small, so that the device never holds the host up.
        timer: The clock.
        repetitions: Calls per median.
    """
    inputs = {name: tensor.requires_grad_() for name, tensor in make_inputs(case, graph.bench).items()}
    grad_out = make_grad_out(case, graph.bench, {name: tensor.detach() for name, tensor in inputs.items()})
    leaves = list(inputs.values())

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return fused(case, graph.fused, inputs)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(fused(case, graph.fused, inputs), leaves, grad_out)

    both()
    launches: list[tuple[Any, ...]] = []
    with launcher.override(lambda *launch: launches.append(launch)):
        forward()
        forward_kernels = len(launches)
        both()
    rows = []
    for spec, entry, grid, block, arguments, shared_bytes in launches[:forward_kernels]:
        if "forward" in spec.path:
            kernel, device = launcher.Kernel(spec, entry), graph.bench.device
            launch = partial(launcher.launch, kernel, grid, block, launcher.addresses(arguments), device, shared_bytes)
            rows.append(("launch", 1, timer.host_us(launch, repetitions)))
            break
    rows.append(("fwd", forward_kernels, timer.host_us(forward, repetitions)))
    rows.append(("fwd+bwd", len(launches) - forward_kernels, timer.host_us(both, repetitions)))
    base = {"layer": LAYERS[case.score], "heads": case.heads, "channels": case.channels, "time": now()}
    base |= environment(graph.bench.device)
    return [
        {
            **base,
            "what": what,
            "kernels": kernels,
            "host_us": f"{host_us:.2f}",
            "host_us_per_kernel": f"{host_us / kernels:.2f}" if kernels else "",
        }
        for what, kernels, host_us in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", nargs="+", default=list(SCORES), choices=SCORES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--small", action="store_true", help="a miniature graph")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    graph = Prepared.of(benchmark_graph("b", device, small=options.small))
    timer = Timer(device)
    rows = []
    for score, (heads, channels) in ((s, size) for s in options.scores for size in ((1, 128), (8, 16))):
        rows += measure(AttentionCase(score, heads, channels), graph, timer, options.repetitions)
    Table(options.out / f"{file_stem(device)}-overhead.csv", FIELDS).append(rows)
    shown = FIELDS[: FIELDS.index("gpu")]
    print(markdown(shown, ([row[name] for name in shown] for row in rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
