"""Where values that depend on a node and a relation are computed: once per distinct pair, or once per edge."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from pyg_dfgnn.ir.domains import D, Domain, E, S, U, V, join
from pyg_dfgnn.ir.program import RANGED, Builder, Program, Value, rewrite

MOST_PAIRS = 0.8
"""Compact rows per edge above which the rows are not worth their index."""
_KINDS = ("linear", "inner", "add", "sub", "mul", "view", "permute", "expand", "fold", "concat", "slice", "pad")
"""Operators that are right on rows that no edge reads: without poles, whose gradients there would be NaN."""


def compact(program: Program, sizes: Mapping[Domain, int], most_pairs: float = MOST_PAIRS) -> Program:
    """Return the program with values on the lowest domain that their operands allow, unless that saves too few rows.

    Gathers that a program brings along are looked through. With a ratio of rows to edges above `most_pairs`, values on
    that domain are lifted to the edges, except for outputs and what a sum over pairs reads.

    Args:
        program: The program.
        sizes: Rows of each domain of the graph.
        most_pairs: Largest ratio at which a domain of pairs is used.
    """
    edges = max(sizes[E], 1)
    lifted = {domain for domain in (U, V) if domain in sizes and sizes[domain] / edges > most_pairs}
    outputs, pinned = {i for _, i in program.outputs}, _pinned(program)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op in ("input", "const", "gather") or value.op in RANGED:
            return None
        args = [ids[arg] for arg in value.args]
        if value.domain not in (U, V, E) or (i in outputs and value.op != "linear"):
            return builder.copy(value, args)
        if value.op in _KINDS:
            args = [_through_gather(builder, arg) for arg in args]
        if i in outputs:
            # The gradient of a table is not to be one of a copy per edge.
            return builder.copy(value, args)
        domain = join(*(builder.values[arg].domain for arg in args))
        if value.op not in _KINDS and domain not in (U, V):
            domain = join(domain, value.domain)
        if value.op == "mul" and value.domain is E and domain in (S, D):
            args = [_of_nodes_with_edges(builder, arg) for arg in args]
        return builder.copy(value, args, E if domain in lifted and i not in pinned else domain)

    return rewrite(program, rule)


def decompact(program: Program) -> Program:
    """Return the program with every value on pairs computed per edge, as without compact materialisation."""
    return compact(program, {U: 1, V: 1, E: 1}, most_pairs=0.0)


def _of_nodes_with_edges(builder: Builder, i: int) -> int:
    """Return factors of nodes with 0 for those without edges, of which users' code reads none.

    They may be infinite, such as one over a degree, and a gradient of 0 times that is no number.
    """
    value = builder.values[i]
    if value.domain not in (S, D) or prod(value.shape) != 1:
        return i
    is_used = builder.emit("view", builder.emit("is_used", attrs=(value.domain, E)), attrs=(value.shape,))
    return builder.emit("where", is_used, i, builder.emit("const", attrs=(0.0,)))


def _through_gather(builder: Builder, i: int) -> int:
    value = builder.values[i]
    return value.args[0] if value.op == "gather" else i


def _pinned(program: Program) -> set[int]:
    """The values that must not be lifted to the edges: those that are read on pairs or on nodes."""
    pinned = {i for _, i in program.outputs if program.values[i].domain is not E}
    for i in range(len(program.values) - 1, -1, -1):
        value = program.values[i]
        if value.op in RANGED:
            pinned |= set(value.args) if value.attrs[1] is not E else set()
        elif value.domain is not E and (i in pinned or value.op == "gather"):
            pinned |= set(value.args)
    return pinned
