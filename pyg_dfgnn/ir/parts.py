"""A program in three: what comes before its edges, what runs on edges target by target, and what comes after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pyg_dfgnn.ir.domains import D, E, One, S
from pyg_dfgnn.ir.program import RANGED, Builder, Program
from pyg_dfgnn.ir.simplify import remove_dead

_GIVEN = ("input", "const")
"""Operators of what each part that reads it has itself."""


class Parts(NamedTuple):
    """Programs of which each reads inputs of the whole and outputs of those before it, by name.

    Attributes:
        before: What the edges need of nodes and weights.
        edges: What may run on some targets with all of their edges at a time.
        after: What is made of the results.
    """

    before: Program
    edges: Program
    after: Program


def parts_of(program: Program) -> Parts | None:
    """Return a program in three; None if what runs on the edges cannot be split by targets.

    It cannot where edges are added up by something else than their target, or numbers are drawn for each.
    """
    values, live = program.values, program.live
    if any(values[i].domain not in (One, S, D, E) or values[i].op == "dropout_mask" for i in live):
        return None
    of_edges = {i for i in live if values[i].op != "input" and (values[i].domain is E or values[i].attrs[1:2] == (E,))}
    of_edges = {i for i in of_edges if values[i].domain is E or values[i].op in RANGED}
    # What lies between two values of edges, such as a softmax's maxima, is done with them.
    after, before = set[int](), set[int]()
    for i in sorted(live):
        if i in of_edges or not after.isdisjoint(values[i].args):
            after.add(i)
    for i in sorted(live, reverse=True):
        if i in of_edges or i in before:
            before |= {i, *values[i].args}
    edges = {i for i in after & before if values[i].op != "input"}
    if any(values[i].domain not in (D, E) or (values[i].op in RANGED and values[i].attrs != (D, E)) for i in edges):
        return None
    after -= edges
    before = {i for i in live if i not in edges | after}
    outputs = {i for _, i in program.outputs}

    def read(part: Iterable[int], of: set[int]) -> dict[str, int]:
        """The values of another part that a part reads, by name."""
        wanted = {arg for i in part for arg in values[i].args} & of
        return {_name(program, i): i for i in sorted(wanted)}

    made = {i for i in before if values[i].op not in _GIVEN}
    carried = read(edges, made) | read(after, made) | {_name(program, i): i for i in sorted(outputs & made)}
    results = read(after, edges) | {_name(program, i): i for i in sorted(outputs & edges)}
    return Parts(
        _part(program, made, carried),
        _part(program, edges, results),
        _part(program, after, dict(program.outputs)),
    )


def _name(program: Program, i: int) -> str:
    value = program.values[i]
    # No input of a user's is called so, and no buffer.
    return value.attrs[0] if value.op == "input" else f"@{i}"


def _part(program: Program, part: set[int], outputs: dict[str, int]) -> Program:
    """The values of a part, with inputs for what it reads of others."""
    builder, ids = Builder(), dict[int, int]()
    needed = part | {arg for i in part for arg in program.values[i].args} | set(outputs.values())
    for i in sorted(needed):
        value = program.values[i]
        if i in part:
            ids[i] = builder.copy(value, [ids[arg] for arg in value.args])
        elif value.op in _GIVEN:
            ids[i] = builder.copy(value, ())
        else:
            ids[i] = builder.input(_name(program, i), value.domain, value.shape)
    return remove_dead(builder.build(program.name, {name: ids[i] for name, i in outputs.items()}))
