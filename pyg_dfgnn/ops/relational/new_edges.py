"""Programs on edges that are new: operators of torch on all pairs of a node and a relation, none of which is listed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import IdRangeError, check_shape
from pyg_dfgnn.graph.derived import version_of
from pyg_dfgnn.graph.hetero import joined
from pyg_dfgnn.ir import DensePairs, E, Program, U, V, interpret
from pyg_dfgnn.ir.dense_pairs import takes
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.relational.program import ALL_PASSES, program_for, selected
from pyg_dfgnn.ops.visits import may_not_wait
from pyg_dfgnn.torch_private import cuda_stream

MOST_NUMBERS = 100_000_000
"""Numbers in rows of edges and of pairs from which lists of new edges take less time than operators on all pairs."""
_in_range: tuple[Any, ...] = ()
"""The last edges and relations that were found in range, and their versions, the sizes and the direction."""


def pairs_of(edge_index: Tensor, relation: Tensor, sizes: tuple[int, int, int], transposed: bool = False) -> DensePairs:
    """Return all pairs of edges that are new; one wait for the device tells whether their ids are in range.

    Args:
        edge_index: int64 [2, E].
        relation: Relation of each edge, int64 or int32 [E].
        sizes: Numbers of sources, of targets and of relations.
        transposed: Whether row 0 holds the targets.

    Raises:
        IdRangeError: An id or a relation is out of range.
        ValueError: There are other numbers of relations than of edges.
    """
    global _in_range
    num_edges = edge_index.size(1)
    check_shape("edge_type", relation, (num_edges,), f"[E={num_edges}]")
    first, second = edge_index.unbind(0)
    source, target = (second, first) if transposed else (first, second)
    facts = version_of(edge_index), version_of(relation), sizes, transposed
    is_known = len(_in_range) == 3 and _in_range[0]() is edge_index and _in_range[1]() is relation
    if num_edges and not (is_known and _in_range[2] == facts) and not may_not_wait(edge_index):
        found = torch.stack([x.long() for part in (source, target, relation) for x in part.aminmax()]).tolist()
        kinds = ("edge_index", "source ids"), ("edge_index", "target ids"), ("edge_type", "relations")
        for (name, what), low, high, size in zip(kinds, found[::2], found[1::2], sizes, strict=True):
            if low < 0 or high >= size:
                raise IdRangeError(f"'{name}' needs {what} in [0, {size}) (got {low} to {high})")
        _in_range = weakref.ref(edge_index), weakref.ref(relation), facts
    return DensePairs(source, target, relation, sizes)


_joint: tuple[Any, ...] = ()
"""The last joint edges, with what they were made of; the layers of a model ask for them in turn."""


def joint_pairs_of(edge_sets: Sequence[Tensor], numbers: tuple[int, ...]) -> DensePairs:
    """Return all pairs of several sets of new edges between node types, as one graph with a relation for each.

    Args:
        edge_sets: int64 [2, E] of each set.
        numbers: As :func:`~pyg_dfgnn.graph.hetero.joint_graph` takes them.

    Raises:
        ValueError: An id is out of range, or edges have another shape.
    """
    global _joint
    device = edge_sets[0].device
    stream = cuda_stream(device.index) if device.type == "cuda" else None
    facts = numbers, stream, tuple(map(version_of, edge_sets))
    if _joint and _joint[0] == facts and all(ref() is edges for ref, edges in zip(_joint[1], edge_sets, strict=True)):
        return _joint[2]  # type: ignore[no-any-return]
    with torch.inference_mode(False):
        edge_index, relation = joined(edge_sets, numbers)
    source, target = edge_index.unbind(0)
    pairs = DensePairs(source, target, relation, (numbers[0], numbers[0], numbers[1]))
    _joint = facts, [weakref.ref(edges) for edges in edge_sets], pairs
    return pairs


def apply_to_new(
    program: Program | Relational,
    rows: DensePairs,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Run a program with gradients on edges that are new.

    Arguments and results are those of :func:`~pyg_dfgnn.ops.relational.apply`.
    """
    return interpret(_on_pairs(program_for(program, inputs, outputs), rows), rows, inputs)


def _on_pairs(program: Program, rows: DensePairs, wrt: Sequence[str] = ()) -> Program:
    """Return a program, and its gradients if asked for, with nothing per edge that pairs may have."""
    half = rows.sizes[E] // 2
    sizes = {**rows.sizes, **{domain: min(rows.sizes[domain], half) for domain in (U, V)}}
    return ALL_PASSES.run(program, sizes, wrt)


def run_on_new(
    program: Program, rows: DensePairs, inputs: Mapping[str, Tensor], wrt: tuple[str, ...] | None
) -> list[Tensor] | None:
    """Return the outputs of a program on edges that are new, or some of its gradients; None where lists take less time.

    Args:
        program: The program.
        rows: The rows of the edges.
        inputs: As for :func:`~pyg_dfgnn.ops.relational.program.run`.
        wrt: Inputs whose gradients are wanted; None for the outputs.
    """
    ready = _on_pairs(program, rows, wrt or ())
    if wrt is not None:
        ready = selected(ready, ["d_" + name for name in wrt])
    values = [ready.values[i] for i in ready.live]
    numbers = sum(rows.sizes[value.domain] * prod(value.shape) for value in values if value.domain in (U, V, E))
    if numbers >= MOST_NUMBERS or not takes(ready):
        return None
    return list(interpret(ready, rows, {name: inputs[name] for name in ready.inputs}).values())
