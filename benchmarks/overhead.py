"""Host microseconds of attention on small graphs: of one launch, and of calls of the operator and of the conv.

A forward pass is timed without gradient, as in evaluation, and once more where a gradient follows ("fwd, grad").
"replay, per layer" is the device time of a layer's forward in a CUDA graph of eight; "torch product" is the host's time
for one product of two tensors, to compare hosts by.

``python -m benchmarks.overhead`` adds to ``results/bench/<gpu>-overhead.csv`` what is not there yet for these sources.
Without a GPU every launch goes nowhere: what is left is the host's part without the driver, in ``outputs/bench``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.attention.case import SCORES, AttentionCase
from benchmarks.graphs import benchmark_graph, compressed
from benchmarks.results import Table, default_folder, environment, file_stem, markdown, now
from benchmarks.timing import Timer
from pyg_dfgnn import nn
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.runtime import launcher

FIELDS = "graph layer heads channels what kernels us us_per_kernel gpu torch cuda pyg cupy commit digest time".split()
KEY = ("graph", "layer", "heads", "channels", "what")
REPETITIONS = 300
REPLAYED_LAYERS = 8
SIZES = ((1, 128), (8, 16))
CONVS = {
    "dot": lambda case: nn.TransformerConv(case.width, case.channels, case.heads),
    "cosine": lambda case: nn.AGNNConv() if case.heads == 1 else None,
    "add": lambda case: nn.GATConv(case.width, case.channels, case.heads),
    "gatv2": lambda case: nn.GATv2Conv(case.width, case.channels, case.heads),
}

Call = Callable[[], Tensor]
Timed = tuple[Call, list[Tensor], Tensor]
"""A call, what its output may be differentiated by, and a gradient of the output."""


@contextmanager
def fused_anywhere(device: torch.device) -> Iterator[None]:
    """The fused path also on a CPU, with every launch left out."""
    if device.type in fused_device_types:
        yield
        return
    fused_device_types.add(device.type)
    try:
        with launcher.override(lambda *launch: None):
            yield
    finally:
        fused_device_types.discard(device.type)


def operator_call(case: AttentionCase, graph: EdgeList) -> Timed:
    """A call of the operator."""
    inputs = case.make_inputs(graph)
    grad_out = case.make_grad_out(graph, inputs)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    return partial(case.fused, compressed(graph), leaves), list(leaves.values()), grad_out


def conv_call(case: AttentionCase, graph: EdgeList) -> Timed | None:
    """A call of the drop-in conv; None where there is none of that size."""
    conv = CONVS[case.score](case)
    if conv is None:
        return None
    x = torch.randn(graph.num_dst, case.width, device=graph.device)
    return partial(conv.to(graph.device), x, graph.edge_index), list(conv.parameters()), torch.ones_like(x)


def launches_of(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """The launches of a call, recorded instead of made."""
    launches: list[tuple[Any, ...]] = []
    with launcher.override(lambda *launch: launches.append(launch)):
        call()
    return launches


def replayed_us(call: Call, timer: Timer) -> float:
    """Device time of one of the calls that follow each other in a CUDA graph, without gradient."""

    def layers() -> None:
        for _ in range(REPLAYED_LAYERS):
            call()

    with torch.no_grad():
        return 1e3 * timer.time(timer.replay(layers)).median_ms / REPLAYED_LAYERS


def measure(case: AttentionCase, graph: EdgeList, timer: Timer, repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Rows of one launch of the forward kernel, and of forward and forward+backward of the operator and of the conv.

    Args:
        case: The layer.
        graph: A graph so small that the device never holds the host up.
        timer: The clock.
        repetitions: Calls per median.
    """
    host_us = partial(timer.host_us, repetitions=repetitions)
    times: list[tuple[str, int, float]] = []
    for prefix, timed in (("", operator_call(case, graph)), ("conv ", conv_call(case, graph))):
        if timed is None:
            continue
        call, leaves, grad_out = timed

        def both(call: Call = call, leaves: list[Tensor] = leaves, grad_out: Tensor = grad_out) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(), leaves, grad_out)

        both()
        with torch.no_grad():
            launches = launches_of(call)
        if not prefix:
            spec, entry, grid, block, arguments, shared_bytes = next(
                launch for launch in launches if "forward" in launch[0].path
            )
            kernel, raw = launcher.Kernel(spec, entry), launcher.addresses(arguments)
            launch = partial(launcher.launch, kernel, grid, block, raw, graph.device, shared_bytes)
            times.append(("launch", 1, host_us(launch)))
            if timer.on_gpu:
                times.append(("replay, per layer", len(launches), replayed_us(call, timer)))
            factor = leaves[0].detach()
            times.append(("torch product", 1, host_us(partial(torch.mul, factor, torch.ones_like(factor)))))
        with torch.no_grad():
            times.append((f"{prefix}fwd", len(launches), host_us(call)))
        times.append((f"{prefix}fwd, grad", len(launches), host_us(call)))
        times.append((f"{prefix}fwd+bwd", len(launches_of(both)), host_us(both)))
    base = {"graph": graph.name, "layer": case.layer, "heads": case.heads, "channels": case.channels}
    base |= {"time": now(), **environment(graph.device)}
    rows = []
    for what, kernels, us in times:
        per_kernel = f"{us / kernels:.2f}" if kernels else ""
        rows.append({**base, "what": what, "kernels": kernels, "us": f"{us:.2f}", "us_per_kernel": per_kernel})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", nargs="+", default=["b", "cora", "citeseer"], help="real ones where their files are"
    )
    parser.add_argument("--scores", nargs="+", default=list(SCORES), choices=SCORES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--out", type=Path, help="folder (default: results/bench; outputs/bench if small or on a CPU)")
    parser.add_argument("--small", action="store_true", help="a miniature graph")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    folder = options.out or default_folder("bench", device, options.small)
    table = Table(folder / f"{file_stem(device, options.small)}-overhead.csv", FIELDS)
    timer, shown = Timer(device), FIELDS[: FIELDS.index("gpu")]
    done = {tuple(row[column] for column in (*KEY[:-1], "digest")) for row in table.rows()}
    for name in options.graphs:
        try:
            graph = benchmark_graph(name, device, small=options.small)
        except FileNotFoundError as error:
            print(f"skipped graph {name}: {error}")
            continue
        rows = []
        with fused_anywhere(device):
            for score, size in product(options.scores, SIZES):
                case = AttentionCase(score, *size)
                if (name, case.layer, *map(str, size), environment(device)["digest"]) not in done:
                    rows += measure(case, graph, timer, options.repetitions)
        table.append(rows)
        print(markdown(shown, ([row[column] for column in shown] for row in rows)), flush=True)
    # A run with other sources leaves rows behind that its own replace.
    table.keep({tuple(row[column] for column in KEY): row for row in table.rows()}.values())
    print(table.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
