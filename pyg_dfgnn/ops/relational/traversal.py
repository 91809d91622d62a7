"""The generated kernels of a program, prepared for a graph: traversals and maps."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.relational import StepProblem, holds_heads, plan_step, spec_of
from pyg_dfgnn.ir import Rows
from pyg_dfgnn.ir.codegen import Kernel, generate
from pyg_dfgnn.ir.lanes import Refusal
from pyg_dfgnn.ir.steps import Step
from pyg_dfgnn.ops.traversal import NodeKernel, TraversalLaunch
from pyg_dfgnn.runtime.launcher import addresses

Run = Callable[[dict[str, Tensor]], None]
"""Runs a step on buffers by name, of which it writes some."""


def problem_of(kernel: Kernel, compares: bool, dtype: torch.dtype, device: torch.device) -> StepProblem:
    """Return the problem of a generated kernel; `compares` as for :func:`prepare`."""
    sizes = kernel.heads, kernel.channels, len(kernel.indices)
    state = kernel.fragments, kernel.head_values, kernel.gathered
    return StepProblem(kernel.kind, kernel.text, *sizes, *state, compares, dtype, device)


def prepare(step: Step, exact: Collection[str], compares: bool, rows: Rows, dtype: torch.dtype) -> Run:
    """Return the launch of a traversal or a map.

    Args:
        step: The step.
        exact: Names of the buffers that are float32.
        compares: Whether the program compares numbers that several kernels compute.
        rows: The rows of the domains.
        dtype: Dtype of the features.

    Raises:
        Refusal: The values do not fit the lanes of one kernel.
    """
    kernel = generate(step, exact)
    problem = problem_of(kernel, compares, dtype, rows.device)
    if kernel.joins_heads and not holds_heads(problem):
        raise Refusal(f"{kernel.heads} heads of {kernel.channels} channels are joined, which no group of lanes holds")
    names = (*kernel.reads, *kernel.writes)
    of_rows = [rows.at_rows(step.domain, domain) for domain in kernel.row_indices]
    if step.kind == "map":
        launch_map = NodeKernel(spec_of(problem, plan_step(problem, None).constants), "relational_map")
        num_rows, device, lists = rows.sizes[step.domain], rows.device, addresses(of_rows)

        def run_map(buffers: dict[str, Tensor]) -> None:
            launch_map.launch(num_rows, device, (*lists, *addresses([buffers[name] for name in names])))

        return run_map
    side = rows.adjacency(step.domain, step.over)
    plan = plan_step(problem, side)
    indices = [rows.at_positions(step.domain, step.over, domain) for domain in kernel.indices]
    elements = problem.state_elements
    fixed = addresses([*indices, *of_rows])
    places = tuple(range(len(fixed) + len(names)))
    spec, count = spec_of(problem, plan.constants), len(places)
    launch = TraversalLaunch(plan, "forward", rows, spec, "relational_traversal", elements, count, places, side=side)

    def run(buffers: dict[str, Tensor]) -> None:
        launch((*fixed, *addresses([buffers[name] for name in names])))

    # The rows and their graph keep the arrays; they keep this too, so it does not keep them.
    return run
