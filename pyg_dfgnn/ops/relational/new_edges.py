"""Programs on edges that are new: operators of torch on all pairs of a node and a relation, none of which is listed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import log2, prod

import torch
from torch import Tensor

from pyg_dfgnn.errors import IdRangeError, check_shape
from pyg_dfgnn.graph.derived import WeakEntry, version_of
from pyg_dfgnn.graph.hetero import joined
from pyg_dfgnn.ir import D, DensePairs, Domain, E, Program, S, U, V, interpret
from pyg_dfgnn.ir.dense_pairs import takes
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.relational.program import ALL_PASSES, program_for, selected
from pyg_dfgnn.ops.visits import may_not_wait
from pyg_dfgnn.torch_private import cuda_stream

MOST_NUMBERS = 100_000_000
"""Numbers in rows of edges and of pairs from which lists of new edges take less time than operators on all pairs."""
_EDGES, _LEAST_POWER = 1 << 16, -3
"""Edges that programs are made for, and the least power of four that the share of another domain is taken for."""
_in_range: WeakEntry | None = None
"""The last edges and relations that were found in range, with the sizes and the direction."""
_joint: WeakEntry | None = None
"""The last joint edges and their numbers and stream; the layers of a model ask for them in turn."""


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
    versions, facts = (version_of(edge_index), version_of(relation)), (sizes, transposed)
    # Another thread may replace it at any time.
    known = _in_range
    is_known = known is not None and known.is_of((edge_index, relation), versions) and known.value == facts
    if num_edges and not is_known and not may_not_wait(edge_index):
        found = torch.stack([x.long() for part in (source, target, relation) for x in part.aminmax()]).tolist()
        kinds = ("edge_index", "source ids"), ("edge_index", "target ids"), ("edge_type", "relations")
        for (name, what), low, high, size in zip(kinds, found[::2], found[1::2], sizes, strict=True):
            if low < 0 or high >= size:
                raise IdRangeError(f"'{name}' needs {what} in [0, {size}) (got {low} to {high})")
        _in_range = WeakEntry(facts, (edge_index, relation), versions)
    return DensePairs(source, target, relation, sizes)


def _forget(ref: weakref.ref) -> None:
    """Drop the last joint edges where what they were made of is gone."""
    global _joint
    if _joint is not None and any(ref is held for held in _joint.refs):
        _joint = None


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
    facts = numbers, cuda_stream(device.index) if device.type == "cuda" else None
    versions, known = tuple(map(version_of, edge_sets)), _joint
    if known is not None and known.is_of(edge_sets, versions) and known.value[0] == facts:
        return known.value[1]  # type: ignore[no-any-return]
    with torch.inference_mode(False):
        edge_index, relation = joined(edge_sets, numbers)
    source, target = edge_index.unbind(0)
    pairs = DensePairs(source, target, relation, (numbers[0], numbers[0], numbers[1]))
    _joint = None if None in versions else WeakEntry((facts, pairs), edge_sets, versions, _forget)
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
    return interpret(_on_pairs(program_for(program, inputs, outputs), rows.sizes), rows, inputs)


def _on_pairs(program: Program, sizes: Mapping[Domain, int], wrt: tuple[str, ...] | None = None) -> Program:
    """Return a program, or that of some of its gradients, with nothing per edge that pairs may have.

    What the passes choose depends on shares of the edges in powers of four, so that samples of all sizes have few.
    """
    edges = max(sizes[E], 1)

    def share(domain: Domain, most: int) -> int:
        power = round(log2(max(sizes[domain], 1) / edges) / 2)
        return min(int(_EDGES * 4.0 ** max(power, _LEAST_POWER)), most)

    nodes, pairs = {d: share(d, _EDGES) for d in (S, D)}, {d: share(d, _EDGES // 2) for d in (U, V)}
    return _optimised(program, tuple({**sizes, E: _EDGES, **nodes, **pairs}.items()), wrt)


@lru_cache(1024)
def _optimised(program: Program, sizes: tuple[tuple[Domain, int], ...], wrt: tuple[str, ...] | None) -> Program:
    ready = ALL_PASSES.run(program, dict(sizes), wrt or ())
    return ready if wrt is None else selected(ready, ["d_" + name for name in wrt])


def program_on_new(program: Program, sizes: Mapping[Domain, int], wrt: tuple[str, ...] | None) -> Program | None:
    """Return what runs a program on edges that are new; None where lists take less time.

    Args:
        program: The program.
        sizes: Number of rows of each domain.
        wrt: Inputs whose gradients are wanted; None for the outputs.
    """
    if not takes(program):
        return None
    ready = _on_pairs(program, sizes, wrt)
    values = [ready.values[i] for i in ready.live]
    numbers = sum(sizes[value.domain] * prod(value.shape) for value in values if value.domain in (U, V, E))
    return ready if numbers < MOST_NUMBERS and takes(ready) else None
