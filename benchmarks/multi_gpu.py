"""Check and time training on several GPUs: `torchrun --nproc_per_node=2 -m benchmarks.multi_gpu`.

The command compares all processes with process 0 alone: three layers over a graph with partitioned nodes, a graph that
one GPU cannot hold, steps on batches of their own, steps on one shared batch, and the losses of runs of `train.py`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import pyg_dfgnn
import pyg_dfgnn.nn as convs
from benchmarks.graphs import benchmark_graph, chung_lu, recipe_of
from benchmarks.loops.cases import LOOPS, LoopCase
from benchmarks.multi_gpu_models import CAPTURED, CLASSES, LARGE, LAYERS, RELATIONS, TYPES, WIDTH, HeteroStack, Stack
from benchmarks.results import MEASURED_ROOMS, source_digest
from benchmarks.timing import Timer
from benchmarks.training import flat_gradient, training_config
from pyg_dfgnn import models
from pyg_dfgnn.capture import CapturedStep, Recorder
from pyg_dfgnn.datasets import pattern
from pyg_dfgnn.distributed import Group, PartitionedGraph, PartitionedHeteroGraph, partition, partition_hetero, wrap
from pyg_dfgnn.distributed.sampler import edges_of, own_share
from pyg_dfgnn.reference.tolerances import relative_error
from pyg_dfgnn.training.report import write_rows
from pyg_dfgnn.training.run import train
from pyg_dfgnn.training.step import make_step

LOSS_TOLERANCE = 1e-3
"""Relative difference of a mean loss over an epoch; optimizers make differences of rounding grow."""
GRADIENT_TOLERANCE = 5e-5
"""Relative error by the Frobenius norm in float32, over all layers of a model: against float64, where twice that of one
process is allowed too, and on graphs that are too large for float64 against one process."""
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
        parties = [group, Group(device=group.device)] if group.is_main else [group]
        losses = [torch.tensor(_losses([f"model={model}", *overrides], party)) for party in parties]
        group.barrier()
        if group.is_main:
            shared, alone = losses
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


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model for a graph or a part of one, with the labels of its nodes, of the first type if typed."""

    x: Tensor | dict[str, Tensor]
    edges: Any
    y: Tensor
    more: tuple[Tensor, ...] = ()

    def of_part(self, part: PartitionedGraph | PartitionedHeteroGraph) -> Inputs:
        """What the process of a part takes of it."""
        if isinstance(part, PartitionedHeteroGraph):
            assert isinstance(self.x, dict)
            return Inputs(part.local(self.x), part, part.local({TYPES[0]: self.y})[TYPES[0]])
        assert isinstance(self.x, Tensor)
        more = tuple(each[part.edge_ids].to(self.y.device) for each in self.more)
        return Inputs(part.local(self.x), part, part.local(self.y), more)


def _from_main(group: Group, make: Callable[[], Tensor]) -> Tensor:
    """Return edges [2, E] that process 0 makes; sums of floating-point numbers on GPUs may differ between two."""
    edges = make().contiguous() if group.is_main else torch.empty(2, 0, dtype=torch.long, device=group.device)
    if group.size > 1:
        count = sum(group.counts(edges.size(1)))
        edges = edges if group.is_main else edges.new_empty(2, count)
        dist.broadcast(edges, 0)
    return edges


def _typed(edge_index: Tensor, num_nodes: int) -> tuple[dict[Any, Tensor], dict[str, int]]:
    """Return the edges of a graph by the types of their ends, its halves, and the sizes of these."""
    half = num_nodes // 2
    node_type = (torch.arange(num_nodes, device=edge_index.device) >= half).long()
    edge_type = 2 * node_type[edge_index[0]] + node_type[edge_index[1]]
    names = [(source, "to", target) for source, target in product(TYPES, TYPES)]
    graph = Data(edge_index=edge_index, num_nodes=num_nodes).to_heterogeneous(node_type, edge_type, [*TYPES], names)
    return graph.edge_index_dict, dict(zip(TYPES, (half, num_nodes - half)))


def _power_law(group: Group, small: bool) -> tuple[Tensor, int]:
    """Return the edges and the number of nodes of a graph on which float64 is compared with."""
    num_nodes, mean, most = (500, 8.0, 50.0) if small else (100_000, 50.0, 5_000.0)
    return _from_main(group, lambda: chung_lu(num_nodes, mean, most, 0, group.device).edge_index), num_nodes


def same_partitioned(group: Group, small: bool) -> list[Result]:
    """Three layers of each kind, forward and backward, over a partitioned graph and over the whole one."""
    return _compared("partition", LAYERS, *_power_law(group, small), group, small)


def same_hetero(group: Group, small: bool) -> list[Result]:
    """Three layers over a partitioned graph of two node types and over the whole one."""
    edge_index, num_nodes = _power_law(group, small)
    edges, sizes = _typed(edge_index, num_nodes)
    x, y = _features(num_nodes, WIDTH, group)
    whole = Inputs(dict(zip(sizes, x.split([*sizes.values()]))), edges, y[: sizes[TYPES[0]]])
    part = partition_hetero(edges, sizes, group)
    make = partial(HeteroStack, ([*sizes], [*edges]))
    return _beside_one("partition", "HGT", make, whole, whole.of_part(part), group, small)


def large(group: Group, small: bool) -> list[Result]:
    """Three layers on graphs like Reddit and ogbn-products."""
    results = []
    for name, graph in (("Reddit-like", "reddit_like"), ("products-like", "p")):
        nodes = recipe_of(graph).num_nodes if not small else recipe_of(graph).miniature().arguments["num_nodes"]
        edge_index = _from_main(group, lambda: benchmark_graph(graph, group.device, small=small).edge_index)  # noqa: B023
        results += _compared(name, {each: LAYERS[each] for each in LARGE}, edge_index, nodes, group, small)
    return results


def _features(num_nodes: int, width: int, group: Group) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(group.device).manual_seed(0)
    x = torch.randn(num_nodes, width, generator=generator, device=group.device)
    return x, torch.randint(CLASSES, (num_nodes,), generator=generator, device=group.device)


def _compared(
    check: str, layers: dict[str, Any], edge_index: Tensor, num_nodes: int, group: Group, small: bool
) -> list[Result]:
    """Compare layers on a graph of one node type, with edges of some relations."""
    x, y = _features(num_nodes, WIDTH, group)
    part = partition(edge_index, num_nodes, group)
    types = torch.arange(edge_index.size(1), device=group.device) % RELATIONS
    histogram = edge_index[1].bincount(minlength=num_nodes).bincount().cpu()
    results = []
    for name, make in layers.items():
        whole = Inputs(x, edge_index, y, (types,) if name == "RGCN" else ())
        results += _beside_one(check, name, partial(make, histogram), whole, whole.of_part(part), group, small)
    edges, share = group.counts(part.edge_index.size(1)), part.remote_share()
    results.append(Result(check, "graph", group.size, "share of remote rows", share))
    results.append(Result(check, "graph", group.size, "largest part of the edges", max(edges) / sum(edges)))
    return results


def _beside_one(
    check: str, name: str, make: Callable[[], nn.Module], whole: Inputs, own: Inputs, group: Group, small: bool
) -> list[Result]:
    """Compare a model on a part with the same model of one process on the whole graph: errors and times."""
    results = []
    for mode in modes(group) if name in CAPTURED and check == "partition" else ("",):
        torch.manual_seed(0)
        single = make().to(group.device)
        model = copy.deepcopy(single)
        recorder = Recorder(group.device) if mode else None
        wrapped = wrap(model, group, recorder.stream if recorder else None)
        timer = Timer(group.device)
        shared = _Pass(wrapped, own, group, recorder)
        shared_ms = group_time_ms(shared, group, small)
        rows = [shared(), *(grad / group.size for grad in shared.x_grads())]
        computed = [*map(group.gather, rows), flat_gradient(model)]
        del shared, wrapped
        timer.release()
        group.barrier()
        if group.is_main:
            recorder, alone = Recorder(group.device) if mode else None, Group(device=group.device)
            reference = _Pass(single, whole, alone, recorder)
            alone_ms = group_time_ms(reference, alone, small)
            expected = [reference(), *reference.x_grads(), flat_gradient(single)]
            allowed = dict.fromkeys(("logits", "dx", "dW"), GRADIENT_TOLERANCE)
            if check == "partition":
                exact = _in_float64(make, whole, alone)
                allowed = {key: max(allowed[key], 2 * error) for key, error in _errors(expected, exact).items()}
                expected = exact
            for quantity, error in _errors(computed, expected).items():
                results.append(Result(check, name, group.size, f"error of {quantity}{mode}", error, allowed[quantity]))
            for size, time_ms in {1: alone_ms, group.size: shared_ms}.items():
                results.append(Result(check, name, size, f"ms both ways{mode}", time_ms))
            del reference, expected
        del computed
        timer.release()
        group.barrier()
    return results


def _in_float64(make: Callable[[], nn.Module], inputs: Inputs, alone: Group) -> list[Tensor]:
    """Logits and gradients in float64, of one process."""
    torch.manual_seed(0)
    x = inputs.x
    double = {name: each.double() for name, each in x.items()} if isinstance(x, dict) else x.double()
    model = make().to(alone.device).double()
    run = _Pass(model, replace(inputs, x=double), alone)
    return [run(), *run.x_grads(), flat_gradient(model)]


def _errors(computed: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Relative errors by the Frobenius norm of logits, of the gradients of all features, and of all parameters."""
    places = {"logits": slice(0, 1), "dx": slice(1, -1), "dW": slice(-1, None)}
    return {
        name: relative_error(*(torch.cat([each.flatten() for each in part[place]]) for part in (computed, expected)))
        for name, place in places.items()
    }


def beyond(group: Group, small: bool) -> list[Result]:
    """Training steps on a graph that one GPU cannot hold: eight like ogbn-products, joined by some of their edges."""
    recipe = recipe_of("p").miniature() if small else recipe_of("p")
    nodes, width, blocks, crossing = recipe.arguments["num_nodes"], 16 if small else 256, 8, 0.002
    num_nodes = nodes * blocks

    def joined() -> Tensor:
        parts = []
        for block in range(blocks):
            arguments = {**recipe.arguments, "seed": block}
            parts.append(recipe.build(device=group.device, **arguments).edge_index + block * nodes)
        edges = torch.cat(parts, dim=1)
        generator = torch.Generator(group.device).manual_seed(0)
        size = (int(crossing * edges.size(1)),)
        places = torch.randint(edges.size(1), size, generator=generator, device=group.device)
        edges[0, places] = torch.randint(num_nodes, size, generator=generator, device=group.device)
        return edges

    edge_index = _from_main(group, joined)
    part = partition(edge_index, num_nodes, group)
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x = torch.randn(part.num_nodes, width, generator=generator, device=group.device)
    y = torch.randint(CLASSES, (part.num_nodes,), generator=generator, device=group.device)
    make = partial(Stack, convs.SAGEConv, width, width)
    count, share, timer = edge_index.size(1), part.remote_share(), Timer(group.device)
    whole = edge_index.cpu() if group.is_main else None
    del edge_index
    timer.release()
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)
    torch.manual_seed(0)
    step = _TrainStep(make().to(group.device), Inputs(x, part, y), group)
    time_ms = group_time_ms(step, group, True)
    peak = max(group.counts(torch.cuda.max_memory_allocated(group.device) if group.device.type == "cuda" else 0)) / 1e6
    losses = [float(group.average(loss)) for loss in step.losses]
    del step, x, y, part
    timer.release()
    group.barrier()
    results = []
    if whole is not None:
        name = "SAGE, eight like ogbn-products"
        values = {"edges": count, "share of remote rows": share, "ms of a step": time_ms, "peak MB of a process": peak}
        results = [Result("beyond", name, group.size, quantity, value) for quantity, value in values.items()]
        results.append(Result("beyond", name, group.size, "loss after over before", losses[-1] / losses[0], 1.0))
        results.append(Result("beyond", name, 1, "runs on one GPU", _fits_alone(make, whole, num_nodes, width, group)))
    group.barrier()
    return results


class _TrainStep:
    """Steps of Adam over a part of a graph, and the losses of this process."""

    def __init__(self, model: nn.Module, inputs: Inputs, group: Group) -> None:
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.passes = _Pass(wrap(model, group), inputs, group, has_x_grad=False)
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        self.losses.append(self.passes.launch()[0])
        self.optimizer.step()


def _fits_alone(make: Callable[[], nn.Module], edge_index: Tensor, num_nodes: int, width: int, group: Group) -> float:
    """Return 1 if a process alone can take a step on a graph, 0 if its memory does not suffice."""
    alone = Group(device=group.device)
    try:
        x, y = _features(num_nodes, width, alone)
        step = _Pass(make().to(group.device), Inputs(x, edge_index.to(group.device), y), alone, has_x_grad=False)
        step.launch()
        Timer(group.device).synchronize()
    except torch.OutOfMemoryError:
        return 0.0
    return 1.0


def modes(group: Group) -> tuple[str, ...]:
    """How steps are launched: one by one, and on GPUs also as a CUDA graph."""
    return ("", ", captured") if group.device.type == "cuda" else ("",)


class _Pass:
    """Forward and backward of a model over a graph, captured if there is a recorder; all processes make the calls."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        group: Group,
        recorder: Recorder | None = None,
        *,
        has_x_grad: bool = True,
    ) -> None:
        self.model, self.inputs, self.group = model, inputs, group
        self.x, x = inputs.x, inputs.x
        self.leaves: list[Tensor] = []
        if has_x_grad:
            self.leaves = [each.clone().requires_grad_() for each in (x.values() if isinstance(x, dict) else [x])]
            self.x = dict(zip(x, self.leaves)) if isinstance(x, dict) else self.leaves[0]
        self.recording = None
        if recorder is not None:
            for _ in range(CapturedStep.SHARED_WARM_UPS):
                recorder.run(self.launch)
            self.recording = recorder.record(self.launch)

    def launch(self) -> tuple[Tensor, Tensor]:
        """Loss and logits; the gradients of features and parameters are set."""
        self.model.zero_grad()
        for leaf in self.leaves:
            leaf.grad = None
        logits, y = self.model(self.x, self.inputs.edges, *self.inputs.more), self.inputs.y
        loss = self.group.mean(F.cross_entropy(logits, y, reduction="sum"), y.numel())
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return loss.detach(), logits.detach()

    def __call__(self) -> Tensor:
        return (self.launch() if self.recording is None else self.recording.replay())[1]

    def x_grads(self) -> list[Tensor]:
        return [leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad for leaf in self.leaves]


def _rates(
    check: str, name: str, quantity: str, mode: str, measure: Callable[[Group], float], group: Group
) -> list[Result]:
    """Measure a number per second of process 0 alone and of all, and the speed-up, which on GPUs has to be good."""
    rates = []
    for party in [Group(device=group.device), group] if group.is_main else [group]:
        if party is group:
            group.barrier()
        torch.manual_seed(0)
        rates.append(measure(party))
    if not group.is_main:
        return []
    results = [Result(check, name, size, quantity + mode, rate) for size, rate in zip((1, group.size), rates)]
    needed = EFFICIENCY * group.size if group.device.type == "cuda" else None
    return [*results, Result(check, name, group.size, "speed-up" + mode, rates[1] / rates[0], needed)]


def throughput(group: Group, small: bool) -> list[Result]:
    """Graphs per second of training steps on one batch of PATTERN graphs, resident on the GPUs."""
    num_graphs = 4 * group.size if small else 2048
    makers: dict[str, Callable[[], nn.Module]] = {
        "GT, 8 attention layers": lambda: models.TransformerStack(3, 2, convs, layers=2 if small else 8),
        "GT, 10 blocks": lambda: models.GraphTransformer(3, 2, convs, layers=1 if small else 10),
    }
    graphs = pattern(num_graphs, 1, 1, max_size=8 if small else 34).splits["train"]

    def measure(name: str, captured: bool, party: Group) -> float:
        model, device = makers[name]().to(party.device), party.device
        share = own_share(torch.arange(len(graphs)), party, edges_of(graphs)).tolist()
        batch: Any = Batch.from_data_list([graphs[index] for index in share]).to(device)
        if "blocks" in name:
            # In place of encodings, which take long to make.
            batch.pe = torch.randn(batch.num_nodes, 2, device=device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=device.type == "cuda")
        recorder = Recorder(device) if captured else None
        parallel = model if party.size == 1 else wrap(model, party, recorder.stream if recorder else None)
        how: dict[str, Any] = {"captured": captured, "recorder": recorder, "loss_weights": True, "group": party}
        step = make_step(parallel, optimizer, batch, **how)
        return 1e3 * num_graphs / group_time_ms(partial(step, batch), party, small)

    results = []
    for name, mode in product(makers, modes(group)):
        results += _rates("throughput", name, "graphs per second", mode, partial(measure, name, bool(mode)), group)
    return results


BATCHES = {
    False: ("molecules gine sol-b1024-h64", "sampled sage s1024-h256", "sampled to_hetero_sage s1024-h64"),
    True: ("molecules gine sol-b8-h16", "sampled sage s16-h16", "sampled to_hetero_sage s16-h16"),
}
"""Cases of the bench of loops, by whether they are miniatures."""


def own_batches(group: Group, small: bool) -> list[Result]:
    """Steps on batches of each process's own: batches per second of all processes beside one."""
    cases = {f"{case.loop} {case.model} {case.size}": case for loop in LOOPS.values() for case in loop(small)}

    def measure(name: str, party: Group) -> float:
        return 1e3 * party.size / group_time_ms(_BatchStep(cases[name], party), party, small, calls=60)

    results = []
    for name in BATCHES[small]:
        results += _rates("own batches", name, "batches per second", "", partial(measure, name), group)
    return results


class _BatchStep:
    """Steps of Adam on this process's batches of a case, a fresh copy for each step."""

    def __init__(self, case: LoopCase, group: Group) -> None:
        batches = [batch.clone().to(group.device) for batch in case.source().batches]
        self.case, self.batches, self.count = case, batches[group.rank :: group.size], 0
        model = pyg_dfgnn.accelerate(case.make(batches[0]).to(group.device))
        # The first call makes lazy parameters.
        case.forward(model, batches[0].clone())
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=group.device.type == "cuda")
        self.model = wrap(model, group)

    def __call__(self) -> None:
        batch = self.batches[self.count % len(self.batches)].clone()
        self.count += 1
        self.optimizer.zero_grad()
        self.case.loss(self.case.forward(self.model, batch), batch).backward()
        self.optimizer.step()


def group_time_ms(call: Callable[[], Any], group: Group, small: bool, calls: int = 15) -> float:
    """Mean wall time of a call in a loop, of the slowest process."""
    # In its first ten steps DistributedDataParallel waits for the device.
    warm_ups = 1 + (CapturedStep.WARM_UPS if group.size == 1 else CapturedStep.SHARED_WARM_UPS)
    warm_ups, calls = (1, 2) if small else (warm_ups, calls)
    timer = Timer(group.device)
    for _ in range(warm_ups):
        call()
    timer.synchronize()
    group.barrier()
    return max(group.counts(round(1e6 * timer.wall_ms(call, calls)))) / 1e6


CHECKS = (same_hetero, same_partitioned, large, own_batches, throughput, same_losses, beyond)


def main(arguments: list[str] | None = None) -> bool:
    """Run the checks; process 0 prints a table and writes a CSV. Returns whether everything was as needed."""
    parser = argparse.ArgumentParser(description="Check and time training on several GPUs.")
    parser.add_argument("--csv", default="outputs/multi_gpu.csv", help="file to write (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="miniature graphs, to try it on a CPU")
    chosen = parser.parse_args(arguments)
    path, group = Path(chosen.csv), Group.of_environment(chosen.device)
    columns = [*(field.name for field in fields(Result)), "verdict", "digest"]
    digest = source_digest((*MEASURED_ROOMS, "nn", "distributed"))
    results: list[Result] = []
    for check in CHECKS:
        start = time.perf_counter()
        measured = check(group, chosen.small)
        if group.is_main:
            results += measured
            for each in measured:
                needed = "" if each.needed is None else f"(needs {each.needed:g})"
                name = f"{each.check:14}{each.model:32}{each.processes:2}  {each.quantity:28}"
                print(f"{name}{each.value:12.4g}  {needed:16}{each.verdict}")
            print(f"{check.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rows(path, columns, ({**asdict(each), "verdict": each.verdict, "digest": digest} for each in results))
    if group.is_main:
        print(path)
    failed = sum(result.verdict == "FAILED" for result in results)
    return sum(group.counts(failed)) == 0


if __name__ == "__main__":
    good = main()
    Group.close()
    sys.exit(not good)
