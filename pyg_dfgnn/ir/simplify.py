"""Common subexpressions and dead values."""

from __future__ import annotations

from pyg_dfgnn.ir.program import Builder, Program, rewrite


def common_subexpressions(program: Program) -> Program:
    """Return the program in which equal values are one."""
    return rewrite(program, lambda builder, i, value, ids: None, share=True)


def remove_dead(program: Program) -> Program:
    """Return the program without the values that no output needs; inputs stay."""
    needed = program.live | set(program.inputs.values())
    builder, ids = Builder(), dict[int, int]()
    for i in sorted(needed):
        value = program.values[i]
        ids[i] = builder.copy(value, [ids[arg] for arg in value.args])
    return builder.build(program.name, [(name, ids[i]) for name, i in program.outputs])
