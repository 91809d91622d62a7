"""Cleanup of a trace of PyG's helpers: a softmax among edges in five steps becomes one operator again."""

from __future__ import annotations

from pyg_dfgnn.ir.domains import Domain
from pyg_dfgnn.ir.interpreter import EPSILON
from pyg_dfgnn.ir.program import Builder, Program, Shape, Value, rewrite, skip_views
from pyg_dfgnn.ir.simplify import remove_dead

_STEPS = ("div", "exp", "add")
"""The last operators of a softmax that is written out, from its end."""


def tidy(program: Program) -> Program:
    """Return the program with exp(x - max) / (sum + 1e-16) as the operator `softmax` and tables on the domain of their
    rows, without dead values.

    The maximum has no gradient, whether or not the code detaches it: the softmax does not depend on it.
    """

    tables = _tables(program)

    def rule(builder: Builder, i: int, value: Value, ids: dict[int, int]) -> int | None:
        if value.op == "input" and i in tables:
            return builder.input(value.attrs[0], *tables[i])
        if value.op == "table_rows" and value.args[0] in tables:
            return ids[value.args[0]]
        matched = _softmax(program, value)
        return None if matched is None else builder.emit("softmax", ids[matched[0]], attrs=matched[1])

    return remove_dead(rewrite(program, rule))


def _tables(program: Program) -> dict[int, tuple[Domain, Shape]]:
    """The inputs whose rows are looked up and that nothing else reads, with the domain and the shape of their rows."""
    readers: dict[int, list[Value]] = {}
    for value in program.values:
        for arg in value.args:
            readers.setdefault(arg, []).append(value)
    returned = {i for _, i in program.outputs}
    return {
        i: (readers[i][0].domain, readers[i][0].shape)
        for i in program.inputs.values()
        if i not in returned and i in readers and all(value.op == "table_rows" for value in readers[i])
    }


def _softmax(program: Program, value: Value) -> tuple[int, tuple] | None:
    """Return x and (domain, over) of a softmax, None if a value is something else."""
    values = program.values

    if value.op != _STEPS[0]:
        return None
    exp, total = values[value.args[0]], values[skip_views(values, value.args[1], "gather")]
    if (value.op, exp.op, total.op) != _STEPS or values[exp.args[0]].op != "sub":
        return None
    x, largest = values[exp.args[0]].args
    parts = [values[arg] for arg in total.args]
    sums = [part for part in parts if part.op == "sum" and values[part.args[0]] == exp]
    constants = [part for part in parts if part.op == "const" and part.attrs == (EPSILON,)]
    most = values[skip_views(values, largest, "gather")]
    if not (sums and constants and most.op == "max" and most.attrs == sums[0].attrs):
        return None
    reached = {values[skip_views(values, j, "detach")] for j in (most.args[0], x)}
    same = len(reached) == 1 and exp.domain is most.attrs[1]
    return (x, most.attrs) if same else None
