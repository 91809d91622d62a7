"""What tests of timings share: quick runs on a CPU, their rows, and an implementation beside float64."""

import csv

import torch
from omegaconf import OmegaConf

from benchmarks import CONFIGS
from benchmarks.case import forward_backward, rounded_problem
from benchmarks.graphs import benchmark_graph
from pyg_dfgnn.reference.zoo import ZOO
from tests.configs import compose

QUICK = ["pace.sampling_ms=0", "pace.min_repetitions=3", "pace.max_repetitions=3", "device=cpu", "small=true"]


def composed(*overrides):
    cfg = compose.composed(CONFIGS, "bench", *overrides)
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def read(folder):
    """The rows of the only result file."""
    (path,) = folder.glob("*/*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def layers_in(folder):
    """Its rows without those of the graph's build."""
    return [row for row in read(folder) if row["op"] != "graph"]


def graph_of(name):
    return ZOO[name]().shuffled() if name in ZOO else benchmark_graph(name, "cpu", small=True)


def results(implementation, case, graph, dtype="float32"):
    """Output and gradients of an implementation, those of the reference, and the errors."""
    inputs, grad_out = rounded_problem(case, graph, "float32")
    expected = case.reference(graph, inputs, grad_out)
    leaves = {name: tensor.to(getattr(torch, dtype)).requires_grad_() for name, tensor in inputs.items()}
    out = implementation.prepare(case, graph, leaves)()
    actual = forward_backward(out, leaves, grad_out.to(out.dtype))
    return actual, expected, case.errors(graph, actual, expected, grad_out)
