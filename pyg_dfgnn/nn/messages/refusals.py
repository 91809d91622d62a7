"""Which line of a layer's code it is that no kernel takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyg_dfgnn.ir.domains import D, Domain, E, S
from pyg_dfgnn.ir.lanes import Refusal
from pyg_dfgnn.ir.lowering import Lowered, lower
from pyg_dfgnn.ir.program import Builder, Program
from pyg_dfgnn.ir.torch_front import tidy
from pyg_dfgnn.nn.messages.trace import trace_with
from pyg_dfgnn.ops.relational.backend import stored_reasons
from pyg_dfgnn.ops.relational.chunked import takes_chunks
from pyg_dfgnn.ops.relational.program import ALL_PASSES


def lowered(
    program: Program, sizes: Mapping[Domain, int], wrt: Sequence[str], outputs: Sequence[str]
) -> tuple[Lowered | None, list[str]]:
    """Return the steps for some outputs of a program and their gradients, or None, and what is against them."""
    every = dict(program.outputs)
    program = Program(program.name, program.values, tuple((name, every[name]) for name in outputs))
    try:
        steps = lower(ALL_PASSES.run(program, sizes, tuple(wrt)), list(outputs))
    except Refusal as refusal:
        return None, [str(refusal)]
    if steps.edge_rows and takes_chunks(program, sizes, wrt, ALL_PASSES):
        return steps, []
    return steps, stored_reasons(steps.edge_rows)


def with_lines(
    layer: Any,
    program: Program,
    sizes: Mapping[Domain, int],
    wrt: Sequence[str],
    outputs: Sequence[str],
    reasons: Sequence[str],
) -> list[str]:
    """Return the reasons against a program of a layer, those of its code with the line that brings them in.

    That is the line of the first value of which a function, summed over the edges, is refused.
    """
    trace = trace_with(layer, program)
    if trace is None or trace.drafted is None:
        return list(reasons)
    _, against = lowered(program, sizes, wrt, outputs)
    if not set(against) & set(reasons):
        return list(reasons)
    values, live = trace.drafted.values, trace.drafted.live
    # Weights and numbers are no work of kernels.
    rows = [number for number in live & trace.lines.keys() if values[number].domain in (S, D, E)]
    for number in sorted(rows):
        builder = Builder(values=list(values[: number + 1]))
        root = number
        if values[number].domain is E:
            # A sum alone would be moved in front of a map.
            root = builder.emit("sum", builder.emit("sigmoid", number), attrs=(D, E))
        part = tidy(builder.build(program.name, {"part": root}))
        if lowered(part, sizes, [name for name in wrt if name in part.inputs], ["part"])[1]:
            return [f"{trace.lines[number]}: {reason}" if reason in against else reason for reason in reasons]
    return list(reasons)
