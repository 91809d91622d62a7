"""The pipeline: all passes in their order, each of which can be switched off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from math import log2
from typing import NamedTuple

from pyg_dfgnn.errors import check_choice
from pyg_dfgnn.ir.domains import Domain, E, U, V
from pyg_dfgnn.ir.lowering import lower
from pyg_dfgnn.ir.passes.compact import MOST_PAIRS, compact, decompact
from pyg_dfgnn.ir.passes.differentiate import differentiate
from pyg_dfgnn.ir.passes.linear import aggregate_first, reorder, scale_first
from pyg_dfgnn.ir.passes.parts import join_pads, push_slices, split_concats
from pyg_dfgnn.ir.passes.sums import share_sums
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ir.simplify import common_subexpressions, remove_dead

ProgramPass = Callable[[Program, Mapping[Domain, int]], Program]
PASSES: dict[str, ProgramPass] = {
    "common": lambda program, sizes: common_subexpressions(program),
    "push_slices": lambda program, sizes: push_slices(program),
    "join_pads": lambda program, sizes: join_pads(program),
    "split_concats": lambda program, sizes: split_concats(program),
    "share_sums": lambda program, sizes: share_sums(program),
    "reorder": reorder,
    "aggregate_first": aggregate_first,
    "scale_first": lambda program, sizes: scale_first(program),
    "compact": compact,
    "dead": lambda program, sizes: remove_dead(program),
}
"""Name -> pass, in the order in which they run."""


class Passes(NamedTuple):
    """Which passes run, for ablations.

    Attributes:
        off: Passes of :data:`PASSES` that are left out.
        pairs: Domains of pairs on which values are compact, however many pairs there are, while the other one has a row
            per edge; None: both, where there are few enough pairs.
    """

    off: frozenset[str] = frozenset()
    pairs: frozenset[Domain] | None = None

    def run(self, program: Program, sizes: Mapping[Domain, int], wrt: Sequence[str] = ()) -> Program:
        """Return what :func:`optimise` makes of a program by these passes.

        Without `aggregate_first` if the steps of the whole, of both directions with `wrt`, then move fewer numbers: the
        pass knows nothing of what it leaves to other steps.
        """
        if self.pairs is not None:
            most = int(MOST_PAIRS * sizes[E])
            pairs = {domain: min(sizes[domain], most) if domain in self.pairs else sizes[E] for domain in (U, V)}
            sizes = {**sizes, **pairs}
        return _optimised(program, rounded(sizes), tuple(wrt), self.off)


RowCounts = tuple[tuple[Domain, int], ...]
_SMALL_EDGES = 1 << 20
"""Edges up to which graphs of about a size share a program: to optimise it takes longer than a pass over them."""


def rounded(sizes: Mapping[Domain, int]) -> RowCounts:
    """Return the rows of each domain for which programs are made: those of small graphs are half powers of two."""
    if sizes[E] > _SMALL_EDGES:
        return tuple(sizes.items())
    return tuple((domain, size and round(2 ** (round(2 * log2(size)) / 2))) for domain, size in sizes.items())


_OPTIONAL = frozenset({"aggregate_first"})
"""Passes without which all steps of a program may move fewer numbers."""


@lru_cache(1024)
def _optimised(program: Program, sizes: RowCounts, wrt: tuple[str, ...], off: frozenset[str]) -> Program:
    known = dict(sizes)
    ways = dict.fromkeys(optimise(program, known, wrt=wrt, off=names)[-1].program for names in (off, off | _OPTIONAL))
    if len(ways) == 1:
        return next(iter(ways))
    costs: dict[Program, tuple[bool, int]] = {}
    for way in ways:
        try:
            steps = lower(way, dict(program.outputs))
        except LoweringError:
            continue
        costs[way] = bool(steps.edge_rows), steps.traffic_elements(known)
    return min(costs, key=costs.__getitem__, default=next(iter(ways)))


class Stage(NamedTuple):
    """A program as a pass has left it; `str` gives its dump under the name of the pass."""

    name: str
    program: Program

    def __str__(self) -> str:
        return f"# {self.name}\n{self.program}"


def optimise(
    program: Program, sizes: Mapping[Domain, int], *, wrt: Sequence[str] = (), off: Collection[str] = ()
) -> list[Stage]:
    """Run the passes and, with `wrt`, differentiate the result and run them on the joint program again.

    Args:
        program: The program as it was traced.
        sizes: Rows of each domain of the graph, :attr:`~pyg_dfgnn.ir.index_space.IndexSpace.sizes`.
        wrt: Inputs whose gradients the program is to return as well.
        off: Passes of :data:`PASSES` that are left out. Without "compact" every value on pairs is computed per edge.

    Returns:
        The program as traced and after each pass; the last is the result.

    Raises:
        ValueError: An unknown pass or input.
    """
    for name in off:
        check_choice("off", name, tuple(PASSES))
    stages = [Stage("traced", program)]

    def run(names: Collection[str]) -> None:
        for name in names:
            if name not in off:
                stages.append(Stage(name, PASSES[name](stages[-1].program, sizes)))
            elif name == "compact":
                stages.append(Stage("decompact", decompact(stages[-1].program)))

    run(PASSES)
    if wrt:
        stages.append(Stage("differentiate", differentiate(stages[-1].program, wrt)))
        run(PASSES)
    return stages
