"""What checks and timings share: a graph with its compressed form, inputs rounded to a dtype, kernels to compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.bench.cases.attention import AttentionCase, Inputs, fused, make_grad_out, make_inputs
from pyg_dfgnn.bench.graphs import BenchGraph
from pyg_dfgnn.dispatch.core import AttentionProblem, plan, unsupported_reasons
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.settings import RULES, current, settings

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Name -> storage type; ``tf32`` is float32 whose products may be rounded to TF32."""


@contextmanager
def in_force(schedule: str, dtype: str) -> Iterator[None]:
    """Asks for a schedule and for the precision of a dtype, for the whole process: backward has a thread of its own.

    A schedule that is asked for by name raises `UnsupportedError` where it cannot run.
    """
    before, precision = current(), torch.get_float32_matmul_precision()
    settings(schedule=schedule, fallback=before.fallback if schedule in RULES else "error")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        settings(schedule=before.schedule, fallback=before.fallback)
        torch.set_float32_matmul_precision(precision)


@dataclass
class Prepared:
    """A graph on the device with the package's Graph of it."""

    bench: BenchGraph
    fused: Graph

    @staticmethod
    def of(bench: BenchGraph) -> Prepared:
        return Prepared(bench, compressed(bench))


def compressed(bench: BenchGraph) -> Graph:
    """The package's Graph of a benchmark graph, from its cache; a batch is announced with its node offsets."""
    if bench.ptr is None:
        return Graph.of(bench.edge_index, bench.num_src, bench.num_dst)
    return Graph.of_batch(Data(edge_index=bench.edge_index, num_nodes=bench.num_src, ptr=bench.ptr))


def rounded_problem(case: AttentionCase, graph: BenchGraph, dtypes: Sequence[torch.dtype]) -> tuple[Inputs, Tensor]:
    """Float32 inputs and output gradient that each of ``dtypes`` holds exactly: one reference serves them all."""

    def rounded(tensor: Tensor) -> Tensor:
        for dtype in dtypes:
            tensor = tensor.to(dtype).float()
        return tensor

    inputs = make_inputs(case, graph)
    grad_out = rounded(make_grad_out(case, graph, inputs))
    return {name: rounded(tensor) for name, tensor in inputs.items()}, grad_out


def problem_of(case: AttentionCase, dtype: str, device: torch.device) -> AttentionProblem:
    """What dispatch is asked for a case in the dtype of that name."""
    return AttentionProblem(
        case.score,
        case.heads,
        case.channels,
        DTYPES[dtype],
        device,
        case.edge,
        case.dropout > 0,
        needs_grad=True,
        tf32=dtype == "tf32",
    )


def unbounded_reasons(problem: AttentionProblem) -> list[str]:
    """Why no error bound holds for a problem.

    The bounds are those of the fused kernels, whose sums are float32. The reference, which runs without them, keeps
    them in float32; in 16 bits it rounds each term and each sum, and the gradients of scores cancel.

    Args:
        problem: What is computed.

    Returns:
        One sentence per reason, [] when a bound holds.
    """
    reasons = unsupported_reasons(problem)
    if reasons and problem.dtype.itemsize == 2:
        return ["the reference rounds every step to 16 bits, no bound holds for it", *reasons]
    return []


def collect_specs(
    cases: Sequence[AttentionCase], graphs: Sequence[Prepared], dtypes: Sequence[str], schedule: str = "auto"
) -> list[Spec]:
    """The kernels that the cases launch, found by running the ops with every launch recorded instead of made."""
    specs: dict[Spec, None] = {}

    def record(spec: Spec, *_: Any) -> None:
        specs[spec] = None

    planned = set()
    with launcher.override(record):
        # Graphs without edges last: they launch little, so another graph must stand for the plan they share with it.
        for graph, case, name in product(sorted(graphs, key=lambda g: g.bench.num_edges == 0), cases, dtypes):
            with in_force(schedule, name):
                problem = problem_of(case, name, graph.bench.device)
                key = problem, repr(plan(problem, graph.fused))
                if key in planned:
                    continue
                planned.add(key)
                sides = case.sides(graph.bench.num_src != graph.bench.num_dst)
                inputs = {
                    tensor: torch.empty(
                        case.shape(tensor, side, graph.bench), dtype=DTYPES[name], device=graph.bench.device
                    ).requires_grad_()
                    for tensor, side in sides.items()
                }
                with suppress(UnsupportedError):
                    out = fused(case, graph.fused, inputs)
                    torch.autograd.grad(out, list(inputs.values()), torch.empty_like(out))
    return list(specs)
