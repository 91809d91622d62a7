"""Sampled rows of every convolution on a graph that fills a GPU, against PyG's convolution in float64.

``python -m benchmarks.large_graph gcn_papers100m_like data.task.scale=0.1`` makes data and model of an experiment of
``train.py``, runs the model once, and compares 256 random rows of each convolution, and the one with most edges, with
float64. ``train.py experiment=...`` measures seconds and memory of the epochs. Exit code: 0 within the bound, 1 not.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from benchmarks.results import markdown
from benchmarks.training_config import training_config
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import relative_error, tolerance
from pyg_dfgnn.training.run import choose_device, import_convs, make_model
from pyg_dfgnn.training.step import PRECISIONS

ROWS = 256


def sampled_rows(graph: Graph, count: int = ROWS) -> Tensor:
    """Return the target with most edges and others at random."""
    degree = graph.csr.rowptr.diff()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(graph.num_dst, (min(count, graph.num_dst),), generator=generator)
    return torch.cat([degree.argmax().view(1), drawn.to(degree.device)]).unique()


def edges_of(graph: Graph, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return sources and targets of all edges to these targets."""
    first, count = graph.csr.rowptr[rows].long(), graph.csr.rowptr.diff()[rows].long()
    target = rows.repeat_interleave(count)
    begin = (count.cumsum(0) - count).repeat_interleave(count)
    place = torch.arange(len(target), device=rows.device) - begin + first.repeat_interleave(count)
    return graph.csr.col[place].long(), target


def rows_in_float64(conv: Any, x: Tensor, graph: Graph, rows: Tensor) -> Tensor:
    """Return rows of PyG's convolution in float64 on a graph that has its self-loops, if the convolution adds them."""
    source, target = edges_of(graph, rows)
    nodes, place = torch.cat([source, target, rows]).unique(return_inverse=True)
    ends, own = place[: -len(rows)].view(2, -1), place[-len(rows) :]
    exact = copy.deepcopy(conv).double()
    exact.__class__ = next(kind for kind in type(conv).__mro__ if kind.__module__.startswith("torch_geometric"))
    exact.add_self_loops = False
    # The copy has the hook that has called.
    exact._forward_hooks.clear()
    weight: tuple[Tensor, ...] = ()
    if getattr(exact, "normalize", False):
        # Degrees are those of the whole graph.
        exact.normalize = False
        root = graph.csr.rowptr.diff().double().rsqrt()
        weight = (root[source] * root[target],)
    return exact(x[nodes].double(), ends, *weight)[own]


def errors(model: Any, x: Tensor, graph: Graph, precision: str) -> list[float]:
    """Return the relative error of the sampled rows of each convolution, given what it received in that precision."""
    rows, relative = sampled_rows(graph), []

    def compare(conv: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
        with torch.autocast(x.device.type, enabled=False):
            relative.append(relative_error(out[rows], rows_in_float64(conv, inputs[0], graph, rows)))

    handles = [conv.register_forward_hook(compare) for conv in model.convs]
    dtype = PRECISIONS[precision]
    with torch.no_grad(), torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        model.eval()(x, graph, nodes=rows[:1])
    for handle in handles:
        handle.remove()
    return relative


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="of configs/experiment, with a Graph, such as gcn_papers100m_like")
    parser.add_argument("overrides", nargs="*", help="such as data.task.scale=0.1")
    options = parser.parse_args(arguments)
    cfg = training_config([f"experiment={options.experiment}", "paths.run=unused", *options.overrides])
    device, precision = choose_device(cfg.device), cfg.trainer.precision
    torch.manual_seed(cfg.seed)
    task = instantiate(cfg.data.task, _partial_=True)()
    model = make_model(partial(instantiate(cfg.model, _partial_=True), convs=import_convs(cfg.backend.convs)), task)
    data = task.splits["train"][0]
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    bound = tolerance(dtype, op="segment").relative
    relative = errors(model.to(device), data.x, data.edge_index, precision)
    kinds = [type(conv).__name__ for conv in model.convs]
    print(f"{task.name}: {data.num_nodes:,} nodes, {data.edge_index.num_edges:,} edges, {precision}\n")
    print(markdown(["layer", "error", "bound"], ([kind, f"{e:.2e}", bound] for kind, e in zip(kinds, relative))))
    return int(max(relative) > bound)


if __name__ == "__main__":
    sys.exit(main())
