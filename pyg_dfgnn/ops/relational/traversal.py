"""The generated kernels of a program, prepared for a graph: traversals and maps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pyg_dfgnn.dispatch.relational import StepProblem, holds_heads, piece_of, plan_step, spec_of
from pyg_dfgnn.dispatch.traversal import RowSplitPlan
from pyg_dfgnn.ir import D, E, IndexSpace
from pyg_dfgnn.ir.codegen import KernelSource, generate
from pyg_dfgnn.ir.kernel_steps import KernelStep
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ops.traversal import NodeKernel, TraversalLaunch
from pyg_dfgnn.runtime.launcher import addresses
from pyg_dfgnn.statements.spec import Spec


class PreparedLaunch(NamedTuple):
    """A traversal or a map that is ready to run.

    Attributes:
        run: Called with None and the arguments: `fixed`, then the buffers, as kernels take them.
        fixed: Arguments that hold for the graph.
        names: Names of the buffers, in the order of the arguments.
        pieces: Name of a buffer -> shape of the float32 sums that the launch leaves for pieces of the edges in place of
            it: what is to be written is their sum.
    """

    run: Callable[[Any, Sequence[Any]], None]
    fixed: tuple[Any, ...]
    names: tuple[str, ...]
    pieces: Mapping[str, tuple[int, ...]]


def problem_of(kernel: KernelSource, compares: bool, dtype: torch.dtype, device: torch.device) -> StepProblem:
    """Return the problem of a generated kernel; `compares` as for :func:`prepare`."""
    sizes = kernel.heads, kernel.channels, len(kernel.indices)
    state = kernel.fragments, kernel.head_values, kernel.gathered, kernel.short
    return StepProblem(kernel.kind, kernel.text, *sizes, *state, kernel.is_outer, kernel.unit, compares, dtype, device)


def _spec(step: KernelStep, problem: StepProblem, plan: RowSplitPlan) -> Spec:
    """Return what is compiled, which has the name of the program."""
    return replace(spec_of(problem, plan.constants), label=step.program.name.removesuffix("_backward"))


def prepare(
    step: KernelStep, exact: Collection[str], compares: bool, rows: IndexSpace, dtype: torch.dtype
) -> PreparedLaunch:
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
        raise LoweringError(
            f"{kernel.heads} heads of {kernel.channels} channels are joined, which no group of lanes holds"
        )
    names = (*kernel.reads, *kernel.writes)
    of_rows = [rows.at_rows(step.domain, domain) for domain in kernel.row_indices]
    if step.kind == "map":
        launch_map = NodeKernel(_spec(step, problem, plan_step(problem, None)), "relational_map")
        num_rows, device = rows.sizes[step.domain], rows.device

        def run_map(_: Any, arguments: Sequence[Any]) -> None:
            launch_map.launch(num_rows, device, arguments)

        return PreparedLaunch(run_map, addresses(of_rows), names, {})
    # Sums of outer products range over pieces of the edges, by target.
    domain = D if kernel.is_outer else step.domain
    side = rows.pieces(piece_of(rows.sizes[E])) if kernel.is_outer else rows.adjacency(domain, step.over)
    plan = plan_step(problem, side)
    indices = [rows.at_positions(domain, step.over, other) for other in kernel.indices]
    elements = problem.state_elements
    fixed = addresses([*indices, *of_rows])
    places = tuple(range(len(fixed) + len(names)))
    spec, count = _spec(step, problem, plan), len(places)
    launch = TraversalLaunch(
        plan, "forward", rows.lists, spec, "relational_traversal", elements, count, places, side=side
    )

    outputs = {name: step.program.values[i] for name, i in step.program.outputs} if kernel.is_outer else {}
    pieces = {n: (side.num_rows, *value.shape) for n, value in outputs.items() if value.domain is step.domain}
    # The rows and their graph keep the arrays; they keep this too, so it does not keep them.
    return PreparedLaunch(launch, fixed, names, pieces)
