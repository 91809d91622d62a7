"""A region of a captured graph when it is called: its program on the rows of the edges, or torch's own nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.fallback import FEW, NO_DEVICE, report_fallback
from pyg_dfgnn.graph.ends import PartitionedEdges
from pyg_dfgnn.graph.equal_edges import Seen, graph_of
from pyg_dfgnn.ir.domains import D, E, S, Ts, U, V
from pyg_dfgnn.ir.interpreter import interpret
from pyg_dfgnn.ir.program import RANGED, SEED, Program
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.ops.graph import may_run_again, unmeasured_graph
from pyg_dfgnn.ops.relational.backend import KERNELS, are_few_numbers, backend, dtype_of, is_small, match_of
from pyg_dfgnn.ops.relational.program import index_space_of
from pyg_dfgnn.ops.visits import MANY_EDGES, may_be_left, new_visit
from pyg_dfgnn.settings import current

_OF_SOURCES = {S, U, Ts}
_TO_TARGETS = ((D, E), (V, E), (D, V))
"""Rows that a program reduces to, and from, where it gives nothing to remote sources."""


def _takes_parts(program: Program) -> bool:
    """Return whether a program gives nothing to sources, and reduces to no more than the rows of targets."""
    live = [program.values[i] for i in program.live]
    named = [value for value in live if value.op in RANGED or not _OF_SOURCES.isdisjoint(value.attrs)]
    outputs = {program.values[i].domain for _, i in program.outputs}
    return all(value.op == "gather" or value.attrs in _TO_TARGETS for value in named) and outputs <= {D, E}


class Place(NamedTuple):
    """Where a call of a region has something.

    Attributes:
        argument: Place among the arguments.
        axis: Dimension of the rows, or that a size is read from; None for a number.
    """

    argument: int
    axis: int | None


class Region:
    """A program with the places of its inputs in a call.

    Args:
        program: The program, whose outputs are "0", "1", ...
        edges: Place of the edges.
        inputs: Name of an input -> its place.
        sizes: Places of the numbers of sources and of targets.
        transposed: Whether row 0 of the edges holds the targets.
        types: Place of the types of edges, and their number; None without.
        dtype: Dtype of the features.
        results: Dtype and dimension of the rows of each output.
        autocast: Type of the device if autocast was on while the graph was captured; empty if not.
        by_torch: What the nodes of the region were: arguments to outputs.
        line: Line of the code that kernels may not take.

    Attributes:
        of_sources: Names of the inputs with a row per source.
        takes_parts: Whether the program reduces to targets alone, so that of a part of a graph it needs the features of
            remote sources, and gives nothing to them.
        reasons: Why torch ran the last call; empty if the program did.
        turn: Number of the last call of its layer.
        is_small: Whether torch ran that call since the edges are few, new or not.
        is_refused: Whether torch ran it since kernels do not take the program.
        caller: What has compiled the graph, which knows the layer that is being called.
    """

    caller: Any

    def __init__(
        self,
        program: Program,
        edges: int,
        inputs: dict[str, Place],
        sizes: tuple[Place, Place],
        transposed: bool,
        types: tuple[Place, int] | None,
        dtype: torch.dtype,
        results: Sequence[tuple[torch.dtype, int]],
        autocast: str,
        by_torch: Callable[..., Any],
        line: str,
    ) -> None:
        self.program, self.edges, self.sizes, self.transposed, self.types = program, edges, sizes, transposed, types
        self.inputs = [(name, *place) for name, place in inputs.items()]
        self.dtype, self.results, self.autocast, self.by_torch = dtype, results, autocast, by_torch
        self.line = line
        self.names = tuple(name for name, _ in program.outputs)
        self.is_plain = all(kind is dtype and axis == 0 for kind, axis in results)
        self.has_seed = SEED in program.inputs
        self.reasons: Sequence[str] = ()
        self.turn, self.is_small, self.is_refused = -1, False, False
        values = program.values
        self.of_sources = [name for name, i in program.inputs.items() if values[i].domain is S]
        self.takes_parts = not transposed and _takes_parts(program)
        self.kind = str(id(self))
        self._seen: Seen = {}

    def __call__(self, *args: Any) -> Any:
        """Return the outputs."""
        runs, edges = backend(), args[self.edges]
        if isinstance(edges, PartitionedEdges):
            return self._on_part(args, edges)
        if runs.devices is not None and edges.device.type not in runs.devices:
            return self._by_torch(args, (NO_DEVICE,))
        if self._is_left(edges):
            return self._by_torch(args, FEW)
        num_src, num_dst, types, inputs = self.read(args)
        if edges is self.caller.edges and edges.size(1) >= MANY_EDGES and types is None:
            output = self._on_new(edges, num_src, num_dst, inputs)
            if output is not None:
                return self.returned([output])
        graph = graph_of(self._seen, edges, num_src, num_dst, self.transposed, types)
        if graph is None:
            return self._by_torch(args, ("the edges are new in a capture",))
        rows = index_space_of(graph)
        run = runs.find(self.program, rows, inputs, self.names)
        self.is_refused = not callable(run)
        if not callable(run):
            return self._by_torch(args, [f"{self.line}: {reason}" for reason in run])
        if self.has_seed:
            inputs[SEED] = draw_seed(edges.device)
        self.reasons = ()
        if self.autocast:
            with torch.autocast(self.autocast, enabled=False):
                outputs = run(rows, inputs)
        else:
            outputs = run(rows, inputs)
        return self.returned([outputs[name] for name in self.names])

    def _on_new(self, edges: Tensor, num_src: int, num_dst: int, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return the only output on edges that are too new to be measured; None where no family does without."""
        caller, layer, kind = self.caller, self.caller.layer, dtype_of(inputs)
        family = match_of(self.program, kind, edges.device, self.names) if backend() is KERNELS else None
        if family is None or layer is None or not current().leaves_new:
            return None
        # All regions of a call are one visit.
        counts = caller.visited != caller.turn and not may_run_again(layer.training)
        caller.visited = caller.turn
        graph = unmeasured_graph(id(layer), edges, num_src, num_dst, False, self.transposed, counts=counts)
        if graph is None:
            return None
        self.reasons, self.is_refused = (), False
        if self.has_seed:
            inputs[SEED] = draw_seed(edges.device)
        with torch.autocast(edges.device.type, enabled=False):
            return family.run(graph, inputs)

    def _on_part(self, args: tuple[Any, ...], edges: PartitionedEdges) -> Any:
        """Return the outputs on a part of a graph, for which the features of remote sources are fetched.

        What is fetched depends on the program alone, so that all processes make the same calls.
        """
        self.reasons, self.turn = (), self.caller.turn
        if not self.takes_parts or edges.row != 0:
            self.reasons = (f"{self.line}: it gives numbers to sources, which may be of other processes",)
            return self.by_torch(*args)
        plain = edges.part.edge_index if edges.is_whole else edges.ids
        _, num_dst, types, inputs = self.read((*args[: self.edges], plain, *args[self.edges + 1 :]))
        graph = graph_of(self._seen, plain, edges.part.num_sources, num_dst, False, types)
        if graph is None:
            return self._by_torch(args, ("the edges are new in a capture",))
        fetched: dict[int, Tensor] = {}
        for name in self.of_sources:
            own = inputs[name]
            if id(own) not in fetched:
                fetched[id(own)] = edges.part.exchange(own)
            inputs[name] = fetched[id(own)]
        rows = index_space_of(graph)
        run = backend().find(self.program, rows, inputs, self.names)
        if self.has_seed:
            inputs[SEED] = draw_seed(edges.device)
        if not callable(run):
            self.reasons = [f"{self.line}: {reason}" for reason in run]
            report_fallback(self.caller.name, self.reasons)
            run = partial(interpret, self.program)
        with torch.autocast(edges.device.type, enabled=False):
            outputs = run(rows, inputs)
        return self.returned([outputs[name] for name in self.names])

    def forget(self) -> None:
        """Drop the graphs of earlier calls."""
        self._seen.clear()

    def read(self, args: Sequence[Any]) -> tuple[Any, Any, tuple[Tensor, int] | None, dict[str, Tensor]]:
        """Return the numbers of sources and targets, types with their number, and inputs of a call."""
        (source, axis), (target, other) = self.sizes
        num_src = args[source] if axis is None else args[source].size(axis)
        num_dst = args[target] if other is None else args[target].size(other)
        types = None if self.types is None else (args[self.types[0].argument], self.types[1])
        dtype, inputs = self.dtype, dict[str, Tensor]()
        for name, argument, rows_axis in self.inputs:
            tensor = args[argument]
            if rows_axis:
                tensor = tensor.movedim(rows_axis, 0)
            inputs[name] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        return num_src, num_dst, types, inputs

    def returned(self, results: list[Tensor]) -> list[Tensor]:
        """Return the results of the program as the graph has them."""
        if self.is_plain:
            return results
        return [
            (x.movedim(0, axis).contiguous() if axis else x).to(kind) for x, (kind, axis) in zip(results, self.results)
        ]

    def _is_left(self, edges: Tensor) -> bool:
        """Return whether torch takes edges that are new, or a few launches on few edges."""
        caller, layer = self.caller, self.caller.layer
        self.turn, self.is_refused = caller.turn, False
        self.is_small = is_small(self.program, edges.size(1)) and may_be_left(edges)
        if self.is_small or layer is None:
            return self.is_small
        # Edges that the layer has made itself have no way to be sorted without being measured.
        is_made = edges is not caller.edges and are_few_numbers(self.program, edges.size(1))
        return new_visit(layer, edges, self.kind, caller.turn, many=sys.maxsize if is_made else MANY_EDGES) > 0

    def _by_torch(self, args: Sequence[Any], reasons: Sequence[str]) -> Any:
        self.reasons = reasons
        if reasons is not FEW:
            report_fallback(self.caller.name, reasons)
        return self.by_torch(*args)
