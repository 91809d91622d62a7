"""Host microseconds of one launch, and of a forward and a forward+backward of the op and of the conv, on small graphs.

A forward pass is timed without gradient, as in evaluation, and once more where a gradient will follow ("fwd, grad").
"replay, per layer" is the device time of a layer's forward in a CUDA graph of eight; "torch product" the host's for one
product of two tensors, to compare hosts by.

``python -m pyg_dfgnn.bench.overhead`` appends to ``results/bench/<gpu>-overhead.csv`` and prints the table. Without a
GPU every launch goes nowhere: what is left is the host's part without the driver; it goes to ``outputs/bench``.
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

from pyg_dfgnn import nn
from pyg_dfgnn.bench.cases.attention import LAYERS, SCORES, AttentionCase, fused, make_grad_out, make_inputs
from pyg_dfgnn.bench.graphs import BenchGraph, benchmark_graph
from pyg_dfgnn.bench.prepare import Prepared
from pyg_dfgnn.bench.results import Table, default_folder, environment, file_stem, markdown, now
from pyg_dfgnn.bench.timing import Timer
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.runtime import launcher

FIELDS = "graph layer heads channels what kernels us us_per_kernel gpu torch cuda pyg cupy commit digest time".split()
REPETITIONS = 300
REPLAYED_LAYERS = 8
CONVS = {"dot": nn.TransformerConv, "cosine": nn.AGNNConv, "add": nn.GATConv, "gatv2": nn.GATv2Conv}

Call = Callable[[], Tensor]


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


def op_call(case: AttentionCase, graph: Prepared) -> tuple[Call, list[Tensor], Tensor]:
    """A call of the op, what it may be differentiated by, and a gradient of its output."""
    inputs = {name: tensor.requires_grad_() for name, tensor in make_inputs(case, graph.bench).items()}
    grad_out = make_grad_out(case, graph.bench, {name: tensor.detach() for name, tensor in inputs.items()})
    return partial(fused, case, graph.fused, inputs), list(inputs.values()), grad_out


def conv_call(case: AttentionCase, graph: BenchGraph) -> tuple[Call, list[Tensor], Tensor] | None:
    """As :func:`op_call` for the drop-in conv; None where it has no such layer."""
    if case.score == "cosine" and case.heads > 1:
        return None
    width = case.heads * case.channels
    arguments = () if case.score == "cosine" else (width, case.channels, case.heads)
    conv = CONVS[case.score](*arguments).to(graph.device)
    x = torch.randn(graph.num_dst, width, device=graph.device)
    return partial(conv, x, graph.edge_index), list(conv.parameters()), torch.ones_like(x)


def count(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
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


def measure(case: AttentionCase, graph: Prepared, timer: Timer, repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """Rows for one launch of the forward kernel, and for forward and forward+backward of the op and of the conv.

    On a GPU also for a layer of a CUDA graph.

    Args:
        case: The layer.
        graph: Small, so that the device never holds the host up.
        timer: The clock.
        repetitions: Calls per median.
    """
    device = graph.bench.device
    rows = []
    for name, made in (("", op_call(case, graph)), ("conv ", conv_call(case, graph.bench))):
        if made is None:
            continue
        call, leaves, grad_out = made

        def both(call: Call = call, leaves: Any = leaves, grad_out: Tensor = grad_out) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(), leaves, grad_out)

        both()
        with torch.no_grad():
            launches = count(call)
        if not name:
            for spec, entry, grid, block, arguments, shared_bytes in launches:
                if "forward" in spec.path:
                    kernel, raw = launcher.Kernel(spec, entry), launcher.addresses(arguments)
                    launch = partial(launcher.launch, kernel, grid, block, raw, device, shared_bytes)
                    rows.append(("launch", 1, timer.host_us(launch, repetitions)))
                    break
            if timer.on_gpu:
                rows.append(("replay, per layer", len(launches), replayed_us(call, timer)))
            factors = leaves[0].detach(), torch.ones_like(leaves[0])
            rows.append(("torch product", 1, timer.host_us(partial(torch.mul, *factors), repetitions)))
        with torch.no_grad():
            rows.append((f"{name}fwd", len(launches), timer.host_us(call, repetitions)))
        rows.append((f"{name}fwd, grad", len(launches), timer.host_us(call, repetitions)))
        rows.append((f"{name}fwd+bwd", len(count(both)), timer.host_us(both, repetitions)))
    base = {"graph": graph.bench.name, "layer": LAYERS[case.score], "heads": case.heads, "channels": case.channels}
    base |= {"time": now(), **environment(device)}
    return [
        {
            **base,
            "what": what,
            "kernels": kernels,
            "us": f"{us:.2f}",
            "us_per_kernel": f"{us / kernels:.2f}" if kernels else "",
        }
        for what, kernels, us in rows
    ]


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
    timer = Timer(device)
    count = 0
    shown = FIELDS[: FIELDS.index("gpu")]
    for name in options.graphs:
        try:
            graph = Prepared.of(benchmark_graph(name, device, small=options.small))
        except FileNotFoundError as error:
            print(f"skipped graph {name}: {error}")
            continue
        rows = []
        with fused_anywhere(device):
            for score, (heads, channels) in product(options.scores, ((1, 128), (8, 16))):
                rows += measure(AttentionCase(score, heads, channels), graph, timer, options.repetitions)
        table.append(rows)
        count += len(rows)
        print(markdown(shown, ([row[column] for column in shown] for row in rows)), flush=True)
    print(f"{count} rows in {table.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
