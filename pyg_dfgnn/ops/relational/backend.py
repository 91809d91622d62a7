"""Backends for programs of captured layers: kernels, hand-written ones where these compute the same, or the oracle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.ir import interpret
from pyg_dfgnn.ir.domains import D, E, One, R, S, Td, Ts, U, V
from pyg_dfgnn.ir.index_space import IndexSpace
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ops.families import Match, match
from pyg_dfgnn.ops.relational.chunked import chunked_of
from pyg_dfgnn.ops.relational.program import ALL_PASSES, Prepared, prepared_for
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS

Run = Callable[[IndexSpace, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a program: (rows, inputs) -> outputs."""


class Backend(NamedTuple):
    """Backend that runs programs.

    Attributes:
        find: (program, rows, inputs, names of outputs) -> what runs it on such inputs, or why nothing can. The seed may
            be missing among the inputs.
        devices: Types of devices that it runs on; None for any.
    """

    find: Callable[[Program, IndexSpace, Mapping[str, Tensor], Sequence[str]], Run | Sequence[str]]
    devices: Collection[str] | None


_matched: dict[tuple[Any, ...], tuple[Program, Match | None]] = {}
"""Number of a program, and output, dtype and device -> the program, which so stays alive, and its family."""
_MOST_MATCHED = 1024


def match_of(program: Program, dtype: torch.dtype, device: torch.device, outputs: Sequence[str]) -> Match | None:
    """Return the hand-written family that takes a program; None if none does."""
    if len(outputs) != 1:
        return None
    key = id(program), outputs[0], dtype, device
    known = _matched.get(key)
    if known is None:
        family = match(program, outputs[0])
        if family is not None and family.reasons(dtype, device):
            family = None
        if len(_matched) >= _MOST_MATCHED:
            _matched.pop(next(iter(_matched)))
        known = _matched[key] = program, family
    return known[1]


_FEW_LAUNCHES = 6
_OWN_LAUNCHES = 4
_FEW_NUMBERS = 3 << 23
_NARROW, _WIDE = 32, 512
_ROWS = {One: 1, R: 8, Ts: 4, Td: 4, S: 10_000, D: 10_000, U: 20_000, V: 20_000, E: 60_000}
_LAUNCHES = {
    "input": 0,
    "const": 0,
    "view": 0,
    "expand": 0,
    "slice": 0,
    "permute": 0,
    "detach": 0,
    "softmax": 8,
    "max": 6,
}
"""Launches of PyG's code for an operator on edges; of others 1."""


class _Weight(NamedTuple):
    """Work of the host for a program, by PyG's code and by kernels.

    Attributes:
        program: The program, which so stays alive.
        launches: PyG's launches on edges.
        width: Of the widest row of an edge.
        written: Numbers that PyG's code writes for an edge.
        operations: Kernels and operators of torch that its steps run, forward and backward; 0 where a family runs it.
    """

    program: Program
    launches: int
    width: int
    written: int
    operations: int


_weights: dict[int, _Weight] = {}
"""By number of a program."""


def is_small(program: Program, num_edges: int) -> bool:
    """Return whether PyG's launches for a program take less time than what the host does for kernels of it."""
    known = _weight_of(program)
    # The bound is from timings of edge networks and GMMConv on an H200.
    # A family cuts wide rows, and has launches for each piece.
    is_cut = known.operations == 0 and known.width > _WIDE
    if num_edges * (_WIDE if is_cut else max(known.width, _NARROW)) >= _FEW_NUMBERS:
        return False
    # An operation of ours takes the host longer than a launch of PyG's; by how much is from timings.
    return is_cut or known.launches <= _FEW_LAUNCHES or 3 * known.operations > 2 * known.launches + 8


def are_few_numbers(program: Program, num_edges: int) -> bool:
    """Return whether PyG's code takes new edges in less time than it takes to sort them."""
    return num_edges * _weight_of(program).written < MEASURED_NUMBERS


def _weight_of(program: Program) -> _Weight:
    known = _weights.get(id(program))
    if known is None:
        if len(_weights) >= _MOST_MATCHED:
            _weights.clear()
        known = _weights[id(program)] = _weighed(program)
    return known


def _weighed(program: Program) -> _Weight:
    of_edges = [value for value in program.values if value.domain is E]
    # A maximum is one of the rows that edges reach.
    launched = [*of_edges, *(value for value in program.values if value.op == "max")]
    launches = sum(_LAUNCHES.get(value.op, 1) for value in launched)
    # Rows of edges that the layer returns are written by a program of their own.
    launches -= _OWN_LAUNCHES * sum(program.values[i].domain is E for _, i in program.outputs)
    width, operations = max((prod(v.shape) for v in of_edges), default=1), 0
    outputs = [name for name, _ in program.outputs]
    if len(outputs) > 1 or match(program, outputs[0]) is None:
        try:
            steps = lower(ALL_PASSES.run(program, _ROWS, program.features), outputs)
        except LoweringError:
            steps = None
        for step in () if steps is None else (*steps.forward, *steps.backward):
            is_torchs = step.kind == "dense"
            operations += sum(value.op != "input" for value in step.program.values) if is_torchs else 1
    written = sum(prod(v.shape) for v in of_edges if _LAUNCHES.get(v.op, 1))
    return _Weight(program, launches, width, written, operations)


def dtype_of(inputs: Mapping[str, Tensor]) -> torch.dtype:
    """Return the common dtype of the inputs of a program, but for seeds."""
    return next(filter(Tensor.is_floating_point, inputs.values())).dtype


def _kernels_for(
    program: Program, rows: IndexSpace, inputs: Mapping[str, Tensor], outputs: Sequence[str]
) -> Run | Sequence[str]:
    family = match_of(program, dtype_of(inputs), rows.device, outputs)
    if family is not None:
        return lambda rows, inputs: {outputs[0]: family.run(rows.graph, inputs)}
    prepared = prepared_for(program, rows, inputs, outputs)
    if not isinstance(prepared, Prepared) or not prepared.lowered.edge_rows:
        return prepared
    return chunked_of(prepared, rows, dtype_of(inputs)) or prepared


KERNELS = Backend(_kernels_for, fused_device_types)
INTERPRETER = Backend(lambda program, *_: partial(interpret, program), None)
_current = KERNELS


def backend() -> Backend:
    """Return what runs programs now."""
    return _current


@contextmanager
def running(backend: Backend) -> Iterator[None]:
    """Run programs by a backend."""
    global _current
    before, _current = _current, backend
    try:
        yield
    finally:
        _current = before


def interpreted() -> AbstractContextManager[None]:
    """Run programs by the interpreter, on any device and slowly: what tests compare with PyG."""
    return running(INTERPRETER)
