"""Single passes of the attention kernels, without the op around them."""

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.functional import op_by_role
from pyg_dfgnn.ops.tuning import example
from pyg_dfgnn.statements.op import Pass
from tests.ops.problems import op_and_shape


def values_of(problem: AttentionProblem, graph: Graph) -> dict[str, Tensor | float | None]:
    """Random inputs of a problem by role, and the inverse norms that some scores read."""
    op, shape = op_and_shape(problem, graph)
    tensors, numbers = example(shape, problem, graph)
    values = dict(zip(op.statement.input_names, tensors, strict=True))
    values |= {number.name: value for number, value in zip(op.statement.numbers, numbers, strict=True)}
    for precomputed in op.statement.precomputed:
        values[precomputed.value.name] = 1 / values[precomputed.source].float().norm(dim=-1)
    return values


def launch(stated: Pass, schedule: str, problem: AttentionProblem, graph: Graph, values: dict) -> dict[str, int]:
    """Run a pass on values by name, emulated; returns the constants of its kernel."""
    op = op_by_role(problem.record)
    plan = FAMILY.by_name[schedule].plan_pass(problem, stated.direction, graph)
    run = op.prepare(problem, stated.direction, plan, graph, frozenset())
    run(graph, tuple(values.get(name) for name in stated.arguments))
    return plan.constants


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory full of NaN."""
    return torch.full(sizes, torch.nan, dtype=dtype)
