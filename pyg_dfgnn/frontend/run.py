"""A region of a captured graph when it is called: its program on the rows of the edges, or torch's own nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph.made import Seen, graph_of
from pyg_dfgnn.graph.unmeasured import MEASURED_EDGES, VISITS
from pyg_dfgnn.ir.program import SEED, Program
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.ops.relational.backend import backend, is_small
from pyg_dfgnn.ops.relational.program import rows_of
from pyg_dfgnn.settings import current

_MOST_VISITS = 64


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

    Attributes:
        reasons: Why torch ran the last call; empty if the program did.
    """

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
    ) -> None:
        self.program, self.edges, self.sizes, self.transposed, self.types = program, edges, sizes, transposed, types
        self.inputs = [(name, *place) for name, place in inputs.items()]
        self.dtype, self.results, self.autocast, self.by_torch = dtype, results, autocast, by_torch
        self.names = [name for name, _ in program.outputs]
        self.is_plain = all(kind is dtype and axis == 0 for kind, axis in results)
        self.has_seed = SEED in program.inputs
        self.reasons: Sequence[str] = ()
        self._seen: Seen = {}
        self._visits: dict[int, list[Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Return the outputs."""
        runs, edges = backend(), args[self.edges]
        if runs.devices is not None and edges.device.type not in runs.devices:
            return self._by_torch(args, ("the device has no kernels",))
        if edges.is_cuda and self._is_left(edges):
            return self._by_torch(args, ("the edges are new or few",))
        (source, axis), (target, other) = self.sizes
        num_src = args[source] if axis is None else args[source].size(axis)
        num_dst = args[target] if other is None else args[target].size(other)
        types = None if self.types is None else (args[self.types[0].argument], self.types[1])
        graph = graph_of(self._seen, edges, num_src, num_dst, self.transposed, types)
        if graph is None:
            return self._by_torch(args, ("the edges are new in a capture",))
        dtype, inputs = self.dtype, dict[str, Tensor]()
        for name, argument, rows_axis in self.inputs:
            tensor = args[argument]
            if rows_axis:
                tensor = tensor.movedim(rows_axis, 0)
            inputs[name] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        rows = rows_of(graph)
        run = runs.find(self.program, rows, inputs, self.names)
        if not callable(run):
            return self._by_torch(args, run)
        if self.has_seed:
            inputs[SEED] = draw_seed(edges.device)
        self.reasons = ()
        if self.autocast:
            with torch.autocast(self.autocast, enabled=False):
                outputs = run(rows, inputs)
        else:
            outputs = run(rows, inputs)
        results = [outputs[name] for name in self.names]
        if not self.is_plain:
            results = [
                (x.movedim(0, axis).contiguous() if axis else x).to(kind)
                for x, (kind, axis) in zip(results, self.results)
            ]
        return results

    def _is_left(self, edges: Tensor) -> bool:
        """Note a call, and return whether torch takes edges that are new, or a few launches on few edges."""
        count = edges.size(1)
        if count >= MEASURED_EDGES or not current().leaves_few:
            return False
        known = self._visits.get(id(edges))
        if known is None or known[0]() is not edges:
            if len(self._visits) >= _MOST_VISITS:
                self._visits.clear()
            known = self._visits[id(edges)] = [weakref.ref(edges), 0]
        known[1] += 1
        return known[1] <= VISITS or is_small(self.program, count)

    def _by_torch(self, args: Sequence[Any], reasons: Sequence[str]) -> Any:
        self.reasons = reasons
        return self.by_torch(*args)
