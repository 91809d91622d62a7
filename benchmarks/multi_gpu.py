"""Check and time training on several GPUs: `torchrun --nproc_per_node=2 -m benchmarks.multi_gpu`.

The command compares all processes with process 0 alone in three ways: the time of a training step on the same batch,
forward and backward over a graph with partitioned nodes, and the losses of runs of `train.py` at the same global batch.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import pyg_dfgnn
import pyg_dfgnn.nn as convs
from benchmarks.generators import chung_lu
from benchmarks.timing import Timer
from benchmarks.training_config import training_config
from pyg_dfgnn import models
from pyg_dfgnn.capture import CapturedStep, Recorder, Step
from pyg_dfgnn.datasets import pattern
from pyg_dfgnn.distributed import Group, PartitionedGraph, edges_of, own_share, partition, wrap
from pyg_dfgnn.training.report import write_rows
from pyg_dfgnn.training.run import train
from pyg_dfgnn.training.step import make_step

LOSS_TOLERANCE = 1e-3
"""Relative difference of a mean loss over an epoch; optimizers make differences of rounding grow."""
GRADIENT_TOLERANCE = 5e-5
"""Relative error by the Frobenius norm in float32, over all layers of a model."""
EFFICIENCY = 0.9
"""Share of the ideal speed-up that a step needs; on two GPUs it needs 1.8."""


@dataclass(frozen=True)
class Result:
    """A measured number, which needs to be at most `needed`, or at least `needed` for a speed-up."""

    check: str
    model: str
    processes: int
    quantity: str
    value: float
    needed: float | None = None

    @property
    def verdict(self) -> str:
        """ "ok" or "FAILED"; empty if no number is needed."""
        if self.needed is None:
            return ""
        good = self.value >= self.needed if self.quantity.startswith("speed-up") else self.value <= self.needed
        return "ok" if good else "FAILED"


def same_losses(group: Group, small: bool) -> list[Result]:
    """Runs of all processes and of one, on batches that do not divide evenly: largest relative difference of a loss."""
    graphs, max_size = (10, 8) if small else (299, 34)
    overrides = ["data=pattern_small", f"data.task.num_train={graphs}", "data.task.num_val=9", "data.task.num_test=3"]
    overrides += [f"trainer.loader.batch_size={max(group.size, graphs // 3)}", "trainer.epochs=3"]
    overrides += [f"data.task.max_size={max_size}", "trainer.progress=false", f"device={group.device.type}"]
    results = []
    for model in ("gt_small", "transformer_stack"):
        losses = [
            _losses([f"model={model}", *overrides], party) if party is group or group.is_main else None
            for party in (group, Group(device=group.device))
        ]
        group.barrier()
        if group.is_main:
            shared, alone = (torch.tensor(loss) for loss in losses)
            difference = float(((shared - alone) / alone).abs().max())
            results.append(Result("losses", model, group.size, "relative difference", difference, LOSS_TOLERANCE))
    return results


def _losses(overrides: list[str], group: Group) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        train(training_config([*overrides, f"paths.run={folder}"]), group)
        if not group.is_main:
            return []
        with open(Path(folder) / "metrics.csv") as stream:
            return [[float(row["train_loss"]), float(row["val_loss"])] for row in csv.DictReader(stream)]


def same_partitioned(group: Group, small: bool) -> list[Result]:
    """Forward and backward over a partitioned graph and over the whole one: errors, times and what is exchanged."""
    num_nodes, mean, most = (500, 8.0, 50.0) if small else (100_000, 50.0, 5_000.0)
    edge_index = chung_lu(num_nodes, mean, most, 0, "cpu").edge_index
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_nodes, 64, generator=generator), torch.randint(8, (num_nodes,), generator=generator)
    part = partition(edge_index, num_nodes, group)
    makers: dict[str, Callable[[], nn.Module]] = {
        "GT": lambda: models.TransformerStack(64, 8, convs, layers=3),
        "GAT": lambda: models.GAT(64, 8, convs, hidden_channels=16, layers=3, dropout=0.0),
        "AGNN": lambda: models.AGNN(64, 8, convs, hidden_channels=128, layers=3, dropout=0.0),
        "GCN": lambda: models.GCN(64, 8, convs, hidden_channels=128, layers=3, dropout=0.0),
        "SAGE": lambda: models.SAGE(64, 8, convs, hidden_channels=128, layers=3, dropout=0.0),
        # Of a layer without a drop-in, whose own code runs on a part.
        "GEN": lambda: pyg_dfgnn.accelerate(
            pyg.Sequential("x, edges", [(_gen(o), "x, edges -> x") for o in (64, 64, 8)])
        ),
    }
    results = []
    for name, make in makers.items():
        for mode in modes(group):
            torch.manual_seed(0)
            single = make().to(group.device)
            model = copy.deepcopy(single)
            recorder = Recorder(group.device) if mode else None
            wrapped = wrap(model, group, recorder.stream if recorder else None)
            shared = _Pass(wrapped, part, part.local(x), part.local(y), group, recorder)
            shared_ms = group_time_ms(shared, group, small)
            rows = shared(), shared.x_grad() / group.size
            computed = [*map(group.gather, rows), _flat_grad(model)]
            group.barrier()
            if group.is_main:
                whole = edge_index.to(group.device)
                recorder = Recorder(group.device) if mode else None
                own = Group(device=group.device)
                alone = _Pass(single, whole, x.to(group.device), y.to(group.device), own, recorder)
                alone_ms = group_time_ms(alone, own, small)
                expected = [alone(), alone.x_grad(), _flat_grad(single)]
                for quantity, left, right in zip(("logits", "dx", "dW"), computed, expected):
                    error = float((left - right).norm() / right.norm())
                    quantity = f"error of {quantity}{mode}"
                    results.append(Result("partition", name, group.size, quantity, error, GRADIENT_TOLERANCE))
                for size, time_ms in {1: alone_ms, group.size: shared_ms}.items():
                    results.append(Result("partition", name, size, f"ms both ways{mode}", time_ms))
            group.barrier()
    halo, edges = group.counts(part.num_halo), group.counts(part.edge_index.size(1))
    results.append(Result("partition", "graph", group.size, "halo per own node", sum(halo) / num_nodes))
    results.append(Result("partition", "graph", group.size, "largest part of the edges", max(edges) / sum(edges)))
    return results


def _gen(outputs: int) -> nn.Module:
    return pyg.GENConv(64, outputs, norm=None)


def modes(group: Group) -> tuple[str, ...]:
    """How steps are launched: one by one, and on GPUs also as a CUDA graph."""
    return ("", ", captured") if group.device.type == "cuda" else ("",)


class _Pass:
    """Forward and backward of a model over a graph, captured if there is a recorder; all processes make the calls."""

    def __init__(
        self,
        model: nn.Module,
        edges: Tensor | PartitionedGraph,
        x: Tensor,
        y: Tensor,
        group: Group,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.edges, self.y, self.group = model, edges, y, group
        self.x = x.clone().requires_grad_()
        self.recording = None
        if recorder is not None:
            for _ in range(CapturedStep.SHARED_WARM_UPS):
                recorder.run(self.launch)
            self.recording = recorder.record(self.launch)

    def launch(self) -> tuple[Tensor, Tensor]:
        """Loss and logits; the gradients of `x` and of the parameters are set."""
        self.model.zero_grad()
        self.x.grad = None
        logits = self.model(self.x, self.edges)
        loss = self.group.mean(F.cross_entropy(logits, self.y, reduction="sum"), self.y.numel())
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach(), logits.detach()

    def __call__(self) -> Tensor:
        return (self.launch() if self.recording is None else self.recording.replay())[1]

    def x_grad(self) -> Tensor:
        assert self.x.grad is not None
        return self.x.grad


def _flat_grad(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def throughput(group: Group, small: bool) -> list[Result]:
    """Graphs per second of training steps on one batch of PATTERN graphs, resident on the GPUs."""
    num_graphs = 4 * group.size if small else 2048
    makers: dict[str, Callable[[], nn.Module]] = {
        "GT, 8 attention layers": lambda: models.TransformerStack(3, 2, convs, layers=2 if small else 8),
        "GT, 10 blocks": lambda: models.GraphTransformer(3, 2, convs, layers=1 if small else 10),
    }
    graphs = pattern(num_graphs, 1, 1, max_size=8 if small else 34).splits["train"]
    for graph in graphs:
        # In place of encodings, which take long to make.
        graph.pe = torch.randn(graph.x.size(0), 2)
    parties = [Group(device=group.device), group] if group.is_main else [group]
    batches = [_share(graphs, party) for party in parties]
    results = []
    for name, make in makers.items():
        for mode in modes(group):
            rates = []
            for party, batch in zip(parties, batches):
                if party is group:
                    group.barrier()
                torch.manual_seed(0)
                inputs = copy.copy(batch)
                if "attention" in name:
                    del inputs.pe
                step = _make_step(make().to(group.device), inputs, party, captured=bool(mode))
                rates.append(1e3 * num_graphs / group_time_ms(partial(step, inputs), party, small))
            if group.is_main:
                for size, rate in zip((1, group.size), rates):
                    results.append(Result("throughput", name, size, f"graphs per second{mode}", rate))
                needed = EFFICIENCY * group.size if group.device.type == "cuda" else None
                results.append(Result("throughput", name, group.size, f"speed-up{mode}", rates[1] / rates[0], needed))
    return results


def _share(graphs: list[Data], group: Group) -> Any:
    """This process's share of a batch, on its device."""
    share = own_share(torch.arange(len(graphs)), group, edges_of(graphs)).tolist()
    return Batch.from_data_list([graphs[index] for index in share]).to(group.device)


def _make_step(model: nn.Module, data: Data, group: Group, *, captured: bool) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=group.device.type == "cuda")
    recorder = Recorder(group.device) if captured else None
    parallel = model if group.size == 1 else wrap(model, group, recorder.stream if recorder else None)
    return make_step(parallel, optimizer, data, captured=captured, recorder=recorder, loss_weights=True, group=group)


def group_time_ms(call: Callable[[], Any], group: Group, small: bool) -> float:
    """Mean wall time of a call in a loop, of the slowest process."""
    # In its first ten steps DistributedDataParallel waits for the device.
    warm_ups = 1 + (CapturedStep.WARM_UPS if group.size == 1 else CapturedStep.SHARED_WARM_UPS)
    warm_ups, calls = (1, 2) if small else (warm_ups, 15)
    timer = Timer(group.device)
    for _ in range(warm_ups):
        call()
    timer.synchronize()
    group.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    timer.synchronize()
    return max(group.counts(round(1e9 * (time.perf_counter() - start)))) / 1e6 / calls


def _write(path: Path, results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [*(field.name for field in fields(Result)), "verdict"]
    write_rows(path, columns, ({**asdict(result), "verdict": result.verdict} for result in results))


def main(arguments: list[str] | None = None) -> bool:
    """Run all checks; process 0 prints a table and writes a CSV. Returns whether everything was as needed."""
    parser = argparse.ArgumentParser(description="Check and time training on several GPUs.")
    parser.add_argument("--csv", default="outputs/multi_gpu.csv", help="file to write (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="miniature graphs, to try it on a CPU")
    chosen = parser.parse_args(arguments)
    group = Group.of_environment(chosen.device)
    results: list[Result] = []
    for check in (throughput, same_partitioned, same_losses):
        start = time.perf_counter()
        measured = check(group, chosen.small)
        if group.is_main:
            results += measured
            for result in measured:
                needed = "" if result.needed is None else f"(needs {result.needed:g})"
                print(
                    f"{result.check:11}{result.model:24}{result.processes:2}  {result.quantity:28}"
                    f"{result.value:12.4g}  {needed:16}{result.verdict}"
                )
            print(f"{check.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
            _write(Path(chosen.csv), results)
    if group.is_main:
        print(chosen.csv)
    failed = sum(result.verdict == "FAILED" for result in results)
    return sum(group.counts(failed)) == 0


if __name__ == "__main__":
    good = main()
    Group.close()
    sys.exit(not good)
