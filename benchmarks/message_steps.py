"""Wall time of training steps of layers whose messages are compiled, beside PyG's code and torch.compile of it.

The model of a step is one layer of ``python -m benchmarks experiment=messages`` on learnt features of the nodes; a
step is forward, loss, backward and Adam. Four ways run it: PyG's code, ``torch.compile`` of it in the mode that replays
CUDA graphs, the compiled messages, and ``pyg_dfgnn.capture_step`` of them. The optimizer
has a learning rate of zero, so that the gradients of the last step can be compared with those in float64; a way whose
gradients are beyond the bound has no time. The rows go to ``results/bench/<gpu>/message-steps.csv``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch_geometric.data import Data

import pyg_dfgnn
from benchmarks import CONFIGS
from benchmarks.cases.messages import MessageCase, PyG
from benchmarks.graphs import benchmark_graph
from benchmarks.results import Table, environment, markdown, now, parsed
from pyg_dfgnn.reference.zoo import EdgeList

FIELDS = (
    "graph nodes edges op layer size implementation status step_ms n error bound gpu torch cuda pyg cupy commit digest "
    "time"
).split()
WARM_UPS, BLOCKS, BLOCK_S = 6, 7, 0.1
"""Steps before the first that counts, blocks of steps of which the median counts, and seconds of a block."""
DTYPE = "float32"
Step = Callable[[], Any]


class Model(nn.Module):
    """A layer on learnt features of the nodes."""

    def __init__(self, case: MessageCase, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.case, self.layer, self.x = case, layer, nn.Parameter(x.clone())

    def forward(self, edge_index: Tensor, edge: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(*self.case.arguments(edge_index, self.x, edge))
        return out


class Setup:
    """A layer on a graph, with the gradients that a step needs to have.

    Args:
        case: The layer.
        graph: The graph.

    Attributes:
        error_of_pyg: The error of PyG's own step, of which others may have twice as much.
    """

    def __init__(self, case: MessageCase, graph: EdgeList) -> None:
        self.case, self.graph = case, graph
        self.inputs = case.make_inputs(graph)
        self.grad_out = case.make_grad_out(graph, self.inputs)
        self.data = Data(edge_index=graph.edge_index, grad_out=self.grad_out)
        if "edge" in self.inputs:
            self.data.edge = self.inputs["edge"]
        self.expected = case.reference(graph, self.inputs, self.grad_out)
        self.error_of_pyg = 0.0

    def model(self) -> Model:
        """The model with the parameters that all implementations start from."""
        return Model(self.case, self.case.module(self.graph.device), self.inputs["x"])

    def error(self, model: Model) -> float:
        """The largest error of the gradients that the last step has left."""
        named = {"x": model.x, **dict(model.layer.named_parameters())}
        found = {f"grad_{name}": p.grad for name, p in named.items() if p.grad is not None}
        missing = [name for name in named if f"grad_{name}" not in found and self.expected[f"grad_{name}"].any()]
        if missing:
            raise RuntimeError(f"no gradient of {', '.join(missing)}")
        return self.case.errors(self.graph, found, self.expected, self.grad_out).worst[1]


def call(model: Callable[..., Tensor], data: Data) -> Tensor:
    return model(data.edge_index, data.get("edge"))


def loss(out: Tensor, data: Data) -> Tensor:
    return (out * data.grad_out).sum()


def eager(setup: Setup, model: Model, run: Callable[..., Tensor]) -> Step:
    """A step as users write it, of what calls the model."""
    optimizer = optimizer_of(model)

    def step() -> None:
        optimizer.zero_grad()
        loss(call(run, setup.data), setup.data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.0, fused=True)


def captured(setup: Setup, model: Model) -> Step:
    """A step of the package's own capture."""
    return pyg_dfgnn.capture_step(model, loss, optimizer_of(model), setup.data, forward=call)


def compiled(setup: Setup, model: Model) -> Step:
    """A step of ``torch.compile`` of the model."""
    torch._dynamo.reset()
    on_gpu = setup.graph.device.type == "cuda"
    backend: dict[str, Any] = {"mode": "reduce-overhead"} if on_gpu else {"backend": "eager"}
    return eager(setup, model, torch.compile(model, dynamic=False, **backend))


def accelerated(model: Model) -> None:
    """Let the messages of a model be compiled."""
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(model)


IMPLEMENTATIONS: dict[str, tuple[Callable[[Model], None] | None, Callable[[Setup, Model], Step]]] = {
    "pyg": (None, lambda setup, model: eager(setup, model, model)),
    "compile": (None, compiled),
    "fused": (accelerated, lambda setup, model: eager(setup, model, model)),
    "fused_captured": (accelerated, captured),
}
"""Name -> what makes a model ours, None for PyG's, and what makes a step of a setup and a model."""


def wall_ms(step: Step, device: torch.device) -> tuple[float, int]:
    """The median over blocks of steps of the milliseconds of one, the device idle at both ends, and their number."""

    def seconds(steps: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return time.perf_counter() - started

    seconds(WARM_UPS)
    steps = max(3, int(BLOCK_S / seconds(3) * 3))
    return median(1e3 * seconds(steps) / steps for _ in range(BLOCKS)), steps * BLOCKS


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(setup: Setup, name: str) -> dict[str, Any]:
    """The columns of an implementation: its status, time and error, or why there is no time."""
    change, make = IMPLEMENTATIONS[name]
    device, model = setup.graph.device, setup.model()
    fallback = "error" if change is not None and device.type == "cuda" else "silent"
    try:
        with pyg_dfgnn.local_settings(fallback=fallback):
            if change is not None:
                change(model)
            step_ms, n = wall_ms(make(setup, model), device)
        error = setup.error(model)
    except Exception as failure:
        return {"status": " ".join(f"failed: {type(failure).__name__}: {failure}".split())[:300]}
    if name == "pyg":
        setup.error_of_pyg = error
    # As in the experiment: of ours, twice PyG's own error at kinks.
    bound = max(setup.case.bound(DTYPE), 2 * setup.error_of_pyg) if change is not None else PyG.error_bound
    columns = {"error": f"{error:.2e}", "bound": f"{bound:.3g}"}
    return {**columns, "status": "WRONG"} if error > bound else {**columns, "status": "ok", "step_ms": step_ms, "n": n}


def experiment() -> tuple[list[str], list[str]]:
    """The graphs and the layers of the experiment."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("bench", ["experiment=messages"])
        return [*config.graphs], [*config.ops]


def main(arguments: Sequence[str] | None = None) -> int:
    graphs, ops = experiment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=graphs, help="(default: those of the experiment)")
    parser.add_argument("--ops", nargs="+", default=ops, help="(default: those of the experiment)")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    parser.add_argument("--size", default="64", help="features (default: 64)")
    options, device, folder = parsed(parser, arguments)
    table = Table(folder / "message-steps.csv", FIELDS)
    shown = []
    for graph in options.graphs:
        edges = benchmark_graph(graph, device, small=options.small)
        for op in options.ops:
            setup = Setup(MessageCase.of(op, options.size), edges)
            base = {"graph": graph, "nodes": edges.num_src, "edges": edges.num_edges, "op": op}
            base |= {"layer": setup.case.layer, "size": options.size}
            for name in options.implementations:
                columns = measure(setup, name)
                row = {**base, "implementation": name, **columns, "time": now(), **environment(device)}
                if "step_ms" in columns:
                    row["step_ms"] = f"{columns['step_ms']:.4g}"
                table.append([row])
                shown.append(
                    [str(row.get(column, "")) for column in ("graph", "layer", "implementation", "step_ms", "status")]
                )
                print(*shown[-1], flush=True)
    print(markdown(["graph", "layer", "implementation", "step_ms", "status"], shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
