"""Which nodes of an FX graph become one program: what lies between gathered rows and a reduction, level by level.

A region waits for all that its inputs wait for. What is gathered from the result of a region by the other end, and what
reads a function of it that stays torch's, is of the next level; so regions never wait for each other in a circle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pyg_dfgnn.frontend.derived import derived_nodes
from pyg_dfgnn.frontend.functional import (
    Effects,
    detach_no_grad,
    drop_unread,
    fold_numbers,
    fold_sizes,
    functionalise,
    name_of,
    value_of,
)
from pyg_dfgnn.frontend.gathers import unify_gathers
from pyg_dfgnn.frontend.importer import (
    CONSTANTS,
    FILLS,
    REDUCTIONS,
    VIEWS,
    Draft,
    Ends,
    Mesh,
    expression_of,
    gathered,
)
from pyg_dfgnn.ir.domains import E
from pyg_dfgnn.ir.torch_front import Symbol, TraceError
from pyg_dfgnn.torch_private import free_unbacked_symbols

_OF_NODES = VIEWS | frozenset(
    "add sub rsub mul truediv div neg exp log sqrt pow clamp clamp_min masked_fill where eq reciprocal abs".split()
)
"""Functions of reduced rows that a region may go on with, if edges read them again; others are torch's on nodes."""
_COPIES = frozenset("contiguous clone detach long int to".split())
"""Methods that return edges of the same ids."""
_MOST_ROUNDS = 64


def _find_ends(graph: Graph, pinned: set[Node]) -> dict[Node, Ends]:
    """Return the nodes that are ids of an end of edges, in whatever shape.

    Args:
        graph: The graph.
        pinned: Nodes that share memory with what is edited in place.
    """
    ends: dict[Node, Ends] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
            continue
        name, first, value = name_of(node), node.args[0], value_of(node)
        if not isinstance(value, Tensor):
            continue
        if first in ends and name in VIEWS:
            if value.dtype is value_of(first).dtype:
                ends[node] = ends[first]
            continue
        edges, row = first, node.args[1] if len(node.args) > 1 else None
        if name == "getitem" and isinstance(row, tuple) and row[1:] == (slice(None),):
            row = row[0]
        if name == "select" and len(node.args) == 3 and row == 0:
            row = node.args[2]
        elif name == "getitem" and name_of(first) == "unbind" and len(first.args) == 1:
            edges = first.args[0]  # type: ignore[assignment]
        elif name != "getitem":
            continue
        like = value_of(edges)
        is_list = isinstance(like, Tensor) and like.dim() == 2 and like.dtype in (torch.int64, torch.int32)
        if is_list and type(row) is int and row in (0, 1, -1, -2) and _is_two(like.shape[0]):
            ends[node] = Ends(_copied(edges, pinned), row % 2)
    return ends


def _copied(edges: Node, pinned: set[Node]) -> Node:
    """Return the edges that a node copies, or returns as they are."""
    while edges.op == "call_method" and name_of(edges) in _COPIES and not pinned.intersection((edges, edges.args[0])):
        first = edges.args[0]
        if not isinstance(first, Node) or value_of(first).dtype is not value_of(edges).dtype:
            break
        edges = first
    return edges


def _is_two(size: Any) -> bool:
    """Return whether a size is 2; where it was 2 in the call that is captured, other sizes compile anew."""
    found = expression_of(size)
    if isinstance(found, int):
        return found == 2
    return bool(found.is_symbol and size.node.has_hint() and size.node.hint == 2 and int(size) == 2)


def _reduces(node: Node, ends: dict[Node, Ends]) -> Ends | None:
    """Return the ids that a node reduces by; None if it reduces nothing."""
    if name_of(node) not in REDUCTIONS or node.op not in ("call_function", "call_method"):
        return None
    bound = dict(zip(("input", "dim", "index"), node.args)) | dict(node.kwargs)
    index = bound.get("index")
    return ends.get(index) if isinstance(index, Node) else None


def _is_computed(size: Any) -> bool:
    """Return whether a size is computed from numbers of a tensor."""
    return not isinstance(size, int) and any(free_unbacked_symbols(symbol) for symbol in size.free_symbols)


def _largest(graph: Graph, ends: dict[Node, Ends], own: Ends) -> frozenset[Any]:
    """Return the sizes that are the largest of some ids plus one."""
    found = set()
    for node in graph.nodes:
        most = node.args[0] if name_of(node) == "item" and node.args else None
        if isinstance(most, Node) and name_of(most) == "max" and ends.get(most.args[0]) == own:  # type: ignore[arg-type]
            found.add(expression_of(value_of(node)) + 1)
    return frozenset(found)


def _meshes(graph: Graph, ends: dict[Node, Ends]) -> tuple[dict[Node, Mesh], list[str]]:
    """Return the sizes of each graph some of whose edges are reduced, and why others have no program."""
    sizes: dict[tuple[Node, int], list[Any]] = {}
    reduced: dict[Node, list[int]] = {}
    for node in graph.nodes:
        found, dim = _reduces(node, ends), 0
        if found is not None:
            reduced.setdefault(found.edges, []).append(found.row)
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        elif (place := gathered(node, ends)) is not None:
            found, dim = place
        if found is not None and isinstance(dim, int):
            like = value_of(node if _reduces(node, ends) else node.args[0])
            sizes.setdefault((found.edges, found.row), []).append(like.shape[dim])
    meshes, reasons = {}, list[str]()
    for edges, rows in reduced.items():
        target = max((1, 0), key=rows.count)
        of_rows = [sizes.get((edges, row), sizes[edges, target]) for row in (0, 1)]
        for of_row in of_rows:
            _settle(of_row)
        every = [[expression_of(size) for size in of_row] for of_row in of_rows]
        # Features tell the number of nodes; what is computed from ids may be less.
        by_row = [next((size for size in reversed(each) if not _is_computed(size)), each[-1]) for each in every]
        largest = _largest(graph, ends, Ends(edges, target)) - {by_row[target]}
        count = expression_of(value_of(edges).shape[1])
        if count not in by_row and not any(size in (0, 1) for size in by_row) and not isinstance(count, int):
            meshes[edges] = Mesh(count, (by_row[0], by_row[1]), target, largest)
        elif count not in (0, 1):
            fixed = next((size for size in (count, *by_row) if isinstance(size, int)), count)
            reasons.append(f"{fixed} nodes or edges are fixed in the layer, as a number or a parameter of it")
    return meshes, reasons


def _settle(sizes: list[Any]) -> None:
    """Fix numbers of the same nodes where one of them is fixed: with another number the graph is captured anew."""
    fixed = {expression_of(size) for size in sizes if isinstance(expression_of(size), int)}
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.has_hint() and size.node.hint in fixed:
            int(size)


class Partition:
    """The regions of a graph, which it makes functional.

    Args:
        graph: The graph.
        autocast: Device type and dtype of autocast; None without it.
        device: Device of the edges.
        derives: Whether what depends on the edges alone is kept.

    Attributes:
        kept: Region -> its nodes in their order.
        outputs: Region -> the nodes that something outside of it reads.
        reasons: What of the edges stays torch's, with the line that asks for it.
        groups: What depends on the edges alone, in the order in which it is computed.
        derived: All nodes of these groups.
        is_less: Whether nodes of the graph that nothing reads are gone.
    """

    def __init__(
        self, graph: Graph, autocast: tuple[str, torch.dtype] | None, device: torch.device, derives: bool = True
    ) -> None:
        self.graph, self.autocast, self.device = graph, autocast, device
        detach_no_grad(graph, torch.is_grad_enabled())
        fold_numbers(graph)
        fold_sizes(graph)
        self.effects: Effects = functionalise(graph)
        self.is_less = drop_unread(graph, self.effects)
        for node in graph.nodes:
            if node in self.effects.before or node in self.effects.impure:
                node.meta["random" if name_of(node) == "dropout" else "effect"] = True
        self.ends = _find_ends(graph, self.effects.pinned)
        unify_gathers(graph, self.ends, self.effects.pinned)
        self.meshes, fixed = _meshes(graph, self.ends)
        derives &= not self.effects.context
        self.groups = derived_nodes(graph, self.effects, self.ends) if derives else []
        self.derived = set[Node]().union(*self.groups)
        self.forced: set[Node] = set(self.derived)
        for node in self.derived:
            node.meta["derived"] = True
        self.kept: dict[Draft, list[Node]] = {}
        self.outputs: dict[Draft, list[Node]] = {}
        self.late = dict[Node, int]()
        self.reasons = fixed
        if self.effects.context:
            self.meshes, self.reasons = {}, [f"`{self.effects.context}` inside the graph"]
        for _ in range(_MOST_ROUNDS):
            self._place()
            self._keep()
            lost = self._find_outputs()
            late = self._find_late()
            if not lost and late.keys() <= self.late.keys():
                break
            self.forced |= lost
            # Each moves once, or levels could rise together for ever.
            self.late = late | self.late
        else:
            self.kept.clear()
            self.outputs.clear()

    def refuse(self, draft: Draft, reason: str) -> None:
        """Leave the reductions of a region to torch, and part the graph anew."""
        self.reasons.append(reason)
        self.forced |= {node for node in self.kept[draft] if self.place.get(node) is draft}
        self._place()
        self._keep()
        self._find_outputs()

    # Levels ----------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Find the region of each node, if it has one, by tracing it there."""
        self.drafts: dict[tuple[Node, int], Draft] = {}
        self.place: dict[Node, Draft] = {}
        self.after: dict[Node, int] = {}
        found: list[str] = []
        for node in self.graph.nodes:
            for key in ("place", "light"):
                node.meta.pop(key, None)
            previous = self.effects.before.get(node)
            # Ids wait for the edges, whatever they are expanded like.
            operands = node.all_input_nodes[:1] if node in self.ends else node.all_input_nodes
            waits = max((self.after[x] for x in (*operands, *([previous] if previous else []))), default=0)
            name = name_of(node)
            is_free = node in self.ends or name in CONSTANTS or name in FILLS
            self.after[node] = waits
            if (
                is_free
                or node in self.forced
                or node.op not in ("call_function", "call_method")
                or "effect" in node.meta
            ):
                continue
            try:
                draft = self._traced(node, waits)
            except TraceError as refusal:
                found += refusal.reasons[-1:]
                continue
            if draft is not None:
                self.place[node], node.meta["place"] = draft, draft
                if draft.is_light(node):
                    node.meta["light"] = True
                is_copied = gathered(node, self.ends) is not None and self._is_copied(node)
                self.after[node] = waits if is_copied else draft.level + 1
        self._found = found

    def _traced(self, node: Node, waits: int) -> Draft | None:
        """Trace a node in the region that it belongs to; returns None if it is not on edges."""
        operands = node.all_input_nodes
        edges = [self.ends[x].edges for x in operands if x in self.ends]
        edges += [draft.edges for draft in sorted((self.place[x] for x in operands if x in self.place),
                                                  key=lambda draft: -draft.level)]  # fmt: skip
        edges = [each for each in edges if each in self.meshes]
        value = value_of(node)
        is_tensor = isinstance(value, (Tensor, tuple, list)) and not isinstance(value, torch.Size)
        if not edges or not is_tensor or any(x in self.effects.pinned for x in operands):
            return None
        own = edges[0]
        level, place = 0, gathered(node, self.ends)
        for x in operands:
            draft = self.place.get(x)
            is_here = draft is not None and draft.edges is own
            level = max(level, draft.level if draft is not None and is_here else self.after[x])
        previous = self.effects.before.get(node)
        level = max(level, self.after[previous] if previous is not None else 0, self.late.get(node, 0))
        draft = self._draft(own, level)
        if place is not None:
            first = node.args[0]
            symbol = draft.symbols.get(first) if isinstance(first, Node) else None
            if isinstance(symbol, Symbol) and symbol.rows is not draft.domain(place[0].row):
                draft = self._draft(own, level + 1)
        elif _reduces(node, self.ends) is None:
            symbols = [draft.symbols.get(x) for x in operands if self.place.get(x) is draft]
            rows = [symbol.rows if isinstance(symbol, Symbol) else E for symbol in symbols]
            if E not in rows and name_of(node) not in _OF_NODES:
                return None
        draft.trace(node)
        return draft

    def _draft(self, edges: Node, level: int) -> Draft:
        key = edges, level
        if key not in self.drafts:
            mesh = self.meshes[edges]
            self.drafts[key] = Draft(edges, level, mesh, self.ends, self.device, self.autocast)
        return self.drafts[key]

    # What is kept ----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Keep of each region what a reduction reads."""
        self.kept = {}
        for draft in self.drafts.values():
            kept: set[Node] = set()
            for node in reversed(list(draft.symbols)):
                if node in kept or (self.place.get(node) is draft and _reduces(node, self.ends) is not None):
                    kept |= {node, *draft.reads.get(node, ())}
            if kept:
                self.kept[draft] = [node for node in draft.symbols if node in kept]
        self._said = list(dict.fromkeys(self._found))

    def is_kept(self, node: Node) -> bool:
        """Return whether a region computes a node."""
        draft = self.place.get(node)
        return draft is not None and node in self._sets.get(draft, ())

    def _is_copied(self, node: Node) -> bool:
        """Return whether torch computes anew what a region has: gathered rows, ids, constants and their views."""
        name = name_of(node)
        if node in self.ends or name in CONSTANTS or name in FILLS or gathered(node, self.ends) is not None:
            return True
        return name in VIEWS and isinstance(node.args[0], Node) and self._is_copied(node.args[0])

    def _find_outputs(self) -> set[Node]:
        """Find what others read of each region; returns the nodes that no region can give."""
        self._sets = {draft: set(nodes) for draft, nodes in self.kept.items()}
        self.outputs = {draft: [] for draft in self.kept}
        self.torch: set[Node] = set()
        waiting = [node for node in self.graph.nodes if node.op == "output" or node in self.effects.before]
        waiting = [node for node in waiting if not self.is_kept(node)]
        entered: set[Draft] = set()
        while waiting:
            node = waiting.pop()
            if self.is_kept(node) and not self._is_copied(node):
                draft = self.place[node]
                if node not in self.outputs[draft]:
                    self.outputs[draft].append(node)
                if draft not in entered:
                    entered.add(draft)
                    waiting += self.needed(draft)
            elif node not in self.torch:
                self.torch.add(node)
                waiting += node.all_input_nodes
        self.outputs = {draft: nodes for draft, nodes in self.outputs.items() if nodes}
        return {node for draft, nodes in self.outputs.items() for node in nodes if not _is_output(node, draft)}

    def _find_late(self) -> dict[Node, int]:
        """Return the nodes on edges that only regions of later levels read, with the first of these levels."""
        late = dict[Node, int]()
        for node in reversed(self.graph.nodes):
            draft = self.place.get(node)
            if draft is None or node not in self.torch or self.is_kept(node) or self._is_copied(node):
                continue
            if not draft.is_row_of_edge(node):
                continue
            others = [self.place[user] for user in node.users if self.is_kept(user)]
            levels = [late[user] for user in node.users if user in late]
            levels += [other.level for other in others if other.edges is draft.edges and other.level > draft.level]
            # What torch makes of it may be what these regions wait for.
            if levels and len(levels) == sum(user.op != "output" for user in node.users):
                late[node] = min(levels)
        return late

    def needed(self, draft: Draft) -> list[Node]:
        """Return the nodes that a region is called with: what its nodes read, in the rest of the graph."""
        needed: list[Node] = []
        waiting, seen = [draft.edges, *self.kept[draft]], set[Node]()
        own = self._sets[draft]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in own or (node is not draft.edges and self._is_made_here(node, draft)):
                waiting += node.all_input_nodes
            else:
                needed.append(node)
        return [node for node in self.graph.nodes if node in set(needed)]

    def _is_made_here(self, node: Node, draft: Draft) -> bool:
        return node in self.ends or ((name_of(node) in CONSTANTS or name_of(node) in FILLS) and node in draft.symbols)

    def counts(self) -> tuple[int, int]:
        """Return how many gathers and reductions by ends of edges there are, and how many are in regions.

        What is derived from the edges alone is left out, and what nothing reads.
        """
        inside = {node for draft in self.outputs for node in self._sets[draft]}
        uses = [node for node in (inside | self.torch) - self.derived if node.users]
        uses = [node for node in uses if gathered(node, self.ends) or _reduces(node, self.ends)]
        return len(uses), sum(node in inside for node in uses)

    def against(self) -> list[str]:
        """Return why parts of what is on edges stay torch's."""
        return [*self.reasons, *self._said]


def _is_output(node: Node, draft: Draft) -> bool:
    """Return whether a program can return the numbers of a node."""
    symbol = draft.symbols[node]
    if not isinstance(symbol, Symbol) or symbol.number is None or not symbol.dtype.is_floating_point:
        return False
    # Kernels join no rows that are stacked in front of them.
    return name_of(node) != "stack" or symbol.lead == 0
