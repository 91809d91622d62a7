"""The generated kernels of a program, prepared for a graph: traversals and maps."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.relational import StepProblem, holds_heads, piece_of, plan_step, spec_of
from pyg_dfgnn.ir import D, E, Rows
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
    state = kernel.fragments, kernel.head_values, kernel.gathered, kernel.short
    return StepProblem(kernel.kind, kernel.text, *sizes, *state, kernel.is_outer, compares, dtype, device)


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
    # Sums of outer products range over pieces of the edges, by target.
    domain = D if kernel.is_outer else step.domain
    side = rows.pieces(piece_of(rows.sizes[E])) if kernel.is_outer else rows.adjacency(domain, step.over)
    plan = plan_step(problem, side)
    indices = [rows.at_positions(domain, step.over, other) for other in kernel.indices]
    elements = problem.state_elements
    fixed = addresses([*indices, *of_rows])
    places = tuple(range(len(fixed) + len(names)))
    spec, count = spec_of(problem, plan.constants), len(places)
    launch = TraversalLaunch(
        plan, "forward", rows.lists, spec, "relational_traversal", elements, count, places, side=side
    )

    def run(buffers: dict[str, Tensor]) -> None:
        launch(None, (*fixed, *addresses([buffers[name] for name in names])))

    # The rows and their graph keep the arrays; they keep this too, so it does not keep them.
    return _by_pieces(run, step, side.num_rows, dtype, rows.device) if kernel.is_outer else run


def _by_pieces(run: Run, step: Step, pieces: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Return what adds up the sums that a launch leaves for pieces of the edges."""
    outputs = {name: step.program.values[i] for name, i in step.program.outputs}
    shapes = {name: (pieces, *value.shape) for name, value in outputs.items() if value.domain is step.domain}

    def run_pieces(buffers: dict[str, Tensor]) -> None:
        sums = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        run(buffers | sums)
        buffers |= {name: of_pieces.sum(0, keepdim=True).to(dtype) for name, of_pieces in sums.items()}

    return run_pieces
