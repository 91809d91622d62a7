"""Preparation shared by checks and timings: settings in force, inputs rounded to a dtype, kernels to compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import DTYPES, Case
from benchmarks.graphs import compressed
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import RULES, current, settings
from pyg_dfgnn.statements.spec import Spec


@contextmanager
def in_force(schedule: str, dtype: str) -> Iterator[None]:
    """Ask for a schedule and for the precision of a dtype, for the whole process: backward has a thread of its own.

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


def rounded_problem(case: Case, graph: EdgeList, dtypes: Sequence[str]) -> tuple[Inputs, Tensor]:
    """Float32 inputs and output gradient that each of ``dtypes`` holds exactly: one reference serves them all."""

    def rounded(tensor: Tensor) -> Tensor:
        for dtype in dtypes:
            tensor = tensor.to(DTYPES[dtype]).float()
        return tensor

    inputs = case.make_inputs(graph)
    grad_out = rounded(case.make_grad_out(graph, inputs))
    return {name: rounded(tensor) for name, tensor in inputs.items()}, grad_out


def collect_specs(
    cases: Sequence[Case], graphs: Sequence[EdgeList], dtypes: Sequence[str], schedule: str = "auto"
) -> list[Spec]:
    """The kernels that the cases launch, found by running the operations with every launch recorded instead of made."""
    specs: dict[Spec, None] = {}

    def record(spec: Spec, *_: Any) -> None:
        specs[spec] = None

    planned = set()
    with launcher.override(record):
        # Graphs without edges last: they launch little, so another graph must stand for the plan they share with it.
        for graph, case, dtype in product(sorted(graphs, key=lambda graph: graph.num_edges == 0), cases, dtypes):
            with in_force(schedule, dtype):
                key = case, dtype, repr(case.plan(dtype, graph))
                if key in planned:
                    continue
                planned.add(key)
                inputs = {}
                for name in case.roles(graph):
                    shape = case.shape(name, graph)
                    inputs[name] = torch.empty(shape, dtype=DTYPES[dtype], device=graph.device).requires_grad_()
                with suppress(UnsupportedError):
                    out = case.fused(compressed(graph), inputs)
                    torch.autograd.grad(out, list(inputs.values()), torch.empty_like(out))
    return list(specs)
