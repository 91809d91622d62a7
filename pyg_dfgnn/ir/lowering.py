"""Lowering: a program becomes a list of steps, each of which one kernel, one product or torch runs.

============ ==========================================================================================================
kind         what the step computes
============ ==========================================================================================================
traversal    reductions over the rows of one domain that belong to each row of another, what follows from them on that
             row, and numbers per head that later steps read on the rows reduced over
map          values on the rows of one domain
linear       a linear map of rows, each by the weight of its relation or type
outer        sums of outer products, the gradient of such weights
dense        values with few rows, such as products of weights, and maps of rows by one weight: torch runs them
============ ==========================================================================================================

What lies between is computed in registers where it is read: a value on edges is stored only if it is a linear map, an
output, or at most a number per head: one that several steps read, that one reads while another has its rows at hand, or
that much arithmetic makes of features of edges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from math import prod

from pyg_dfgnn.ir.decompose import decompose
from pyg_dfgnn.ir.domains import FEW, Domain, E, One, U, V, determines
from pyg_dfgnn.ir.kernel_steps import Buffer, KernelStep, Lowered
from pyg_dfgnn.ir.materialize import Materialization
from pyg_dfgnn.ir.patterns import statistic, weighted
from pyg_dfgnn.ir.pointwise import COMPARISONS
from pyg_dfgnn.ir.program import Builder, Program
from pyg_dfgnn.ir.register_layout import LoweringError, infer_layout, is_of_heads, is_of_parts, lane_numbers
from pyg_dfgnn.ir.register_matmul import MAX_OUTER, is_wide
from pyg_dfgnn.ir.unroll import unrolled

MAX_SUMS = 56
"""Numbers that a lane adds up where sums are written out: with more, their terms would leave no registers."""
_PRODUCTS = ("linear", "matmul", "fold")
"""Operators of torch that add; the others move numbers."""
_STORED_READS = 5
"""Rows that a step gathers for a number per head from which that is rather stored for each edge."""


def lower(program: Program, outputs: Collection[str]) -> Lowered:
    """Return the steps of a program.

    Args:
        program: As the passes have left it; with gradients if it was differentiated.
        outputs: Names of the outputs that the forward pass gives; all others are gradients.

    Raises:
        Refusal: Some value has no kernel.
    """
    return _lowered(program, frozenset(outputs))


# Batches of a kind have the same program: it is lowered once.
@lru_cache(256)
def _lowered(program: Program, outputs: frozenset[str]) -> Lowered:
    decomposed, refusals = decompose(program), []
    ways = chain(
        [(decomposed, False, False)],
        ((way, False, False) for way in unrolled(decomposed)),
        [(decomposed, True, False)],
        [(decomposed, True, True)] if any(is_of_parts(program.values, i) for i in program.live) else [],
    )
    for way, joins_apart, joins_by_torch in ways:
        try:
            return _Lowering(way, outputs, joins_apart, joins_by_torch).lowered()
        except LoweringError as refusal:
            refusals.append(refusal.with_traceback(None))
    # Not kept by a name: with its traceback it would keep the frames of all callers.
    raise refusals.pop(0)


class _Draft:
    """A step while it is collected: what it computes, in any order."""

    def __init__(self, kind: str, domain: Domain, over: Domain, targets: Iterable[int]) -> None:
        self.kind, self.domain, self.over, self.targets = kind, domain, over, set(targets)


class _Lowering(Materialization):
    """The steps of a program while they are found."""

    # In which order ------------------------------------------------------------------------------------------------

    def lowered(self) -> Lowered:
        self._schedule()
        self._store_numbers()
        self._schedule()
        return self._finish()

    def _schedule(self) -> None:
        """Put all values that are stored into steps."""
        # Sums that a softmax weights and that its pass takes along, one for each softmax: to the sum of exp.
        self._weighted: dict[int, int] = {}
        self.drafts: dict[str, list[_Draft]] = {"static": [], "forward": [], "backward": []}
        fixed = {i for i in self.ids if self.kinds[i] == "static"}
        self.home: dict[int, _Draft | None] = {i: None for i in self.ids if self.kinds[i] == "input"}
        if fixed:
            self._add("static", _Draft("dense", One, One, fixed))
        for part, ids in (("forward", self.forward), ("backward", set(self.ids) - self.forward)):
            todo = {i for i in ids & self.kept if i not in self.home}
            self._schedule_part(part, todo)

    def _add(self, part: str, draft: _Draft) -> None:
        self.drafts[part].append(draft)
        for i in draft.targets:
            self.home[i] = draft

    def _is_ready(self, i: int, also: Collection[int] = ()) -> bool:
        """Whether all that a value is computed from is there; what is stored per edge may be computed instead."""
        known = self.kept - (self.stored - self.home.keys())
        return all(leaf in self.home or leaf in also for leaf in self.leaves(i, known))

    def _statistic(self, i: int) -> int | None:
        """The maximum that one pass over the rows gives together with a sum; None if a value is no such sum."""
        parts = statistic(self.values, i)
        return None if parts is None or parts.exp in self.kept else parts.most

    def _joins(self, i: int, ready: set[int]) -> bool:
        """Whether a pass over the rows that gives the maximum and the sum of a softmax gives what it weights too."""
        parts = weighted(self.values, i)
        if parts is None or not {parts.most, parts.total} <= ready or {parts.alpha, self.values[i].args[0]} & self.kept:
            return False
        if parts.total in self._weighted.values():
            return self._weighted.get(i) == parts.total
        vector = parts.vector
        is_there = vector in self.home if vector in self.kept else self._is_ready(vector)
        if is_there:
            self._weighted[i] = parts.total
        return is_there

    def _schedule_part(self, part: str, todo: set[int]) -> None:
        while todo:
            while self._schedule_products(part, todo):
                todo -= self.home.keys()
            todo -= self.home.keys()
            reductions = {i for i in todo if self.kinds[i] == "traversal"}
            ready = {i for i in reductions if self._is_ready(i)}
            ready |= {i for i in reductions if (m := self._statistic(i)) in ready and self._is_ready(i, {m})}
            ready |= {i for i in sorted(reductions) if self._joins(i, ready)}
            if ready:
                self._schedule_reductions(part, ready, todo)
            elif todo:
                rest = {i for i in todo if self._is_ready(i)}
                if not rest:
                    raise LoweringError(f"nothing of the values {sorted(todo)} can be computed before the others")
                self._schedule_maps(part, rest)
            todo -= self.home.keys()

    def _schedule_products(self, part: str, todo: set[int]) -> bool:
        """Add what is ready and no reduction; False if nothing is."""
        todo = todo - self.home.keys()
        ready = {i for i in todo if self.kinds[i] != "traversal" and self._is_ready(i)}
        dense = {i for i in ready if self.kinds[i] == "dense"}
        products = [i for i in sorted(ready) if self.kinds[i] in ("linear", "outer")]
        # Of the edges, what only the user reads may come with a later traversal.
        maps = {i for i in ready - self.stored if self.kinds[i] == "inline"}
        if dense:
            self._add(part, _Draft("dense", One, One, dense))
        self._schedule_maps(part, maps)
        for i in products:
            self._add(part, _Draft(self.kinds[i], self.values[i].domain, self._range(i), {i}))
        return bool(dense or products or maps)

    def _schedule_maps(self, part: str, ids: set[int]) -> None:
        for domain in Domain:
            for group in self._fitting({i for i in ids if self.values[i].domain is domain}, domain, domain):
                self._add(part, _Draft("map", domain, domain, group))

    def _fitting(self, ids: Collection[int], domain: Domain, over: Domain) -> list[set[int]]:
        """Split values into groups whose rows have the same lanes."""
        groups: list[set[int]] = []
        for i in sorted(ids, key=lambda i: (-prod(self.values[i].shape), i)):
            for group in groups:
                if self._fits(group | {i}):
                    group.add(i)
                    break
            else:
                self._find_lanes({i})
                groups.append({i})
        return groups

    def _find_lanes(self, targets: set[int]) -> None:
        infer_layout(self._piece(targets)[0])

    def _fits(self, targets: set[int]) -> bool:
        if sum(prod(self.values[i].shape) for i in targets & self.products.outer) > MAX_OUTER:
            return False
        sums = [self.values[i].shape for i in targets if self.kinds[i] == "traversal"]
        if self.is_unrolled and sum(map(lane_numbers, sums)) > MAX_SUMS:
            return False
        try:
            self._find_lanes(targets)
        except LoweringError:
            return False
        return True

    def _schedule_reductions(self, part: str, ready: set[int], todo: set[int]) -> None:
        groups: dict[tuple[Domain, Domain], set[int]] = {}
        for i in sorted(ready):
            groups.setdefault(self.values[i].attrs, set()).add(i)
        late = {attrs for attrs, group in groups.items() if self._waits(attrs, group, todo - ready)}
        for number, (attrs, group) in enumerate(groups.items()):
            if attrs in late and (len(late) < len(groups) or number > 0):
                continue
            for targets in self._fitting(group, *attrs):
                self._complete(targets, attrs, todo)
                self._add(part, _Draft("traversal", *attrs, targets))

    def _waits(self, attrs: tuple[Domain, Domain], group: set[int], later: set[int]) -> bool:
        """Whether other sums over the same rows come later and none of these is needed for them."""
        others = {i for i in later if self.kinds[i] == "traversal" and self.values[i].attrs == attrs}
        return any(not group & Program("", self.values, (("", i),)).live for i in others)

    def _complete(self, targets: set[int], attrs: tuple[Domain, Domain], todo: set[int]) -> None:
        """Add to reductions what follows from them on their rows, and what is stored of the rows that they read, or is
        made of what they and their rows read anyway.
        """
        domain, over = attrs
        reached = Program("", self.values, tuple(("", i) for i in targets)).live
        read = {leaf for i in targets for leaf in self.leaves(i, self.kept)}
        for i in sorted(todo - targets - self.home.keys()):
            value = self.values[i]
            if self.kinds[i] != "inline" or i in targets:
                continue
            follows = value.domain is domain and self.leaves(i, self.kept | targets) & targets
            is_read = value.domain is over and (i in reached or self._is_at_hand(i, domain, targets, read))
            if (follows or is_read) and self._is_ready(i, targets) and self._fits(targets | {i}):
                targets.add(i)

    def _is_at_hand(self, i: int, domain: Domain, targets: set[int], read: set[int]) -> bool:
        """Whether a traversal reads all that a value of its positions is made of, or its rows determine it."""
        leaves = self.leaves(i, self.kept | targets)
        return not leaves & targets and all(j in read or determines(domain, self.values[j].domain) for j in leaves)

    # What is stored of numbers per head ----------------------------------------------------------------------------

    def _store_numbers(self) -> None:
        """Choose numbers per head that are stored for each edge or pair: what is read by several steps, or by one while
        another has all at hand, where one would gather vectors or many numbers for it alone.
        """
        candidates = [i for i in self.ids if self._is_narrow(i)]
        for is_first in (True, False):
            for i in candidates if is_first else reversed(candidates):
                readers = self._steps_reading(i)
                # The first step computes it in any case.
                others = readers if is_first and self._is_at_hand_before(i, readers) else readers[1:]
                costs = [self._read_for(i, draft) for draft in others]
                if is_first:
                    is_costly = is_of_heads(self.values, i) and any(width > self.narrow for width, _ in costs)
                else:
                    is_costly = any(count >= _STORED_READS for _, count in costs)
                if is_costly and i not in self.kept:
                    on_edges = (self.stored, self.per_edge) if self.values[i].domain is E else ()
                    for chosen in (self.kept, *on_edges):
                        chosen.add(i)

    def _is_at_hand_before(self, i: int, readers: Sequence[_Draft]) -> bool:
        """Whether a traversal before the one that reads a number of an edge has all at hand that it is made of."""
        if self.values[i].domain is not E or len(readers) != 1:
            return False
        for draft in chain(self.drafts["forward"], self.drafts["backward"]):
            if draft is readers[0]:
                break
            if draft.kind == "traversal" and draft.over is E:
                read = {leaf for target in draft.targets for leaf in self.leaves(target, self.kept)}
                if self._is_at_hand(i, draft.domain, draft.targets, read):
                    return True
        return False

    def _read_for(self, i: int, draft: _Draft) -> tuple[int, int]:
        """Return the gathers of a step only for a value of edges or pairs: the largest row size, number of rows."""
        known = self.kept | {i}
        read = {leaf for target in draft.targets for leaf in self.leaves(target, known)}
        rows = [self.values[leaf] for leaf in self.leaves(i, self.kept) - read]
        widths = [prod(row.shape) for row in rows if not determines(draft.domain, row.domain)]
        return max(widths, default=0), len(widths)

    def _is_narrow(self, i: int) -> bool:
        value = self.values[i]
        is_kind = self.kinds[i] == "inline" and value.op not in ("view", "gather", "expand")
        is_kind &= value.domain in (E, U, V)
        if is_wide(value.shape, self.width) and prod(value.shape) > 1:
            return False
        width = max(map(prod, (self.values[leaf].shape for leaf in self.leaves(i, self.kept))), default=0)
        return is_kind and (is_of_heads(self.values, i) or prod(value.shape) <= self.narrow < max(width, 2) + 1)

    @cached_property
    def narrow(self) -> int:
        """Numbers of a row that are float32 and stored for edges: a number per head of what softmaxes range over."""
        return max([1, *(prod(self.values[i].shape) for i in self.ids if self._statistic(i) is not None)])

    def _steps_reading(self, i: int) -> list[_Draft]:
        """The kernels that compute a number of a pair, or the traversals that compute one of an edge."""
        is_of_edge, drafts = self.values[i].domain is E, []
        for part in ("forward", "backward"):
            for draft in self.drafts[part]:
                is_kernel = draft.kind == "traversal" and (draft.over is E or not is_of_edge)
                is_kernel |= draft.kind == "map" and not is_of_edge
                if is_kernel and i in self._needed(draft.targets, self.kept - draft.targets):
                    drafts.append(draft)
        return drafts

    # Steps ---------------------------------------------------------------------------------------------------------

    def _name(self, i: int) -> str:
        value = self.values[i]
        return value.attrs[0] if value.op == "input" else f"%{i}"

    def _piece(self, targets: Collection[int], writes: Collection[int] | None = None) -> tuple[Program, set[int]]:
        """Return the program of some targets and the stored values that it reads."""
        roots, known = targets if writes is None else writes, self.home.keys() - targets
        needed = self._needed(roots, known)
        # With all in registers that a costly number is made of, little of it is left to compute.
        known -= {i for i in self.costly & needed & known if self.leaves(i, self.kept) <= needed}
        needed = self._needed(roots, known)
        builder, ids = Builder(), dict[int, int]()
        for j in sorted(needed):
            value = self.values[j]
            if j in known:
                is_input, name = value.op == "input", self._name(j)
                ids[j] = builder.copy(value, ()) if is_input else builder.input(name, value.domain, value.shape)
            else:
                ids[j] = builder.copy(value, [ids[arg] for arg in value.args])
        outputs = {self._name(j): ids[j] for j in sorted(roots)}
        return builder.build(self.program.name, outputs), needed & known

    def _needed(self, targets: Collection[int], known: Collection[int]) -> set[int]:
        """Return the values that targets are made of, back to known ones."""
        needed: set[int] = set()
        waiting = list(targets)
        while waiting:
            j = waiting.pop()
            if j not in needed:
                needed.add(j)
                if j not in known:
                    waiting += self.values[j].args
        return needed

    def _finish(self) -> Lowered:
        known, self.home = self.home, {i: d for i, d in self.home.items() if d is None}
        order = [draft for part in ("static", "forward", "backward") for draft in self.drafts[part]]
        position = {id(draft): n for n, draft in enumerate(order)}
        result = {self.base(i) for _, i in self.program.outputs}
        read: set[int] = set()
        steps: dict[int, KernelStep] = {}
        # From the end, so that what a step writes is what later ones read.
        for draft in reversed(order):
            self.home = {i: d for i, d in known.items() if d is None or position[id(d)] < position[id(draft)]}
            writes = draft.targets & (read | result)
            if not writes:
                continue
            program, reads = self._piece(draft.targets, writes)
            read |= reads
            names = tuple(self._name(i) for i in sorted(reads)), tuple(self._name(i) for i in sorted(writes))
            steps[id(draft)] = KernelStep(draft.kind, draft.domain, draft.over, *names, program)
        parts = {part: tuple(steps[id(d)] for d in self.drafts[part] if id(d) in steps) for part in self.drafts}
        stored = {i for i in known if i in read | result}
        compared = self._compared(stored) - result
        buffers = {self._name(i): self._buffer(i, i in compared) for i in sorted(stored)}
        outputs = {name: (self._name(self.base(i)), self.values[i].shape) for name, i in self.program.outputs}
        return Lowered(self.program.name, **parts, buffers=buffers, outputs=outputs)

    def _compared(self, stored: set[int]) -> set[int]:
        """Return the products of rows which, joined with others, decide the branch that a gradient takes.

        Rounded, a number next to a kink lies on the wrong side of it, and its whole gradient is another one.
        """
        compared, waiting = set[int](), set[int]()
        for i in self.ids:
            if self.values[i].op in COMPARISONS:
                read = {j for j in self.leaves(i, stored) if self.values[j].op != "max"}
                waiting |= read if len(read) > 1 else set[int]()
        while waiting:
            i = waiting.pop()
            if self.kinds[i] in ("dense", "linear") and self.values[i].domain not in FEW and i not in compared:
                compared.add(i)
                is_product = self.kinds[i] == "linear" or self.values[i].op in _PRODUCTS
                waiting |= set[int]() if is_product else self.leaves(i, stored)
        return compared

    def _buffer(self, i: int, is_compared: bool) -> Buffer:
        value, kind = self.values[i], self.kinds[i]
        is_row = kind in ("traversal", "inline") and value.domain not in FEW
        is_narrow = prod(value.shape) <= self.narrow or value.op == "max" or i in self.per_edge
        is_exact = kind == "static" or (is_row and is_narrow) or is_compared
        return Buffer(self._name(i), value.domain, value.shape, is_exact)
