"""Programs that make rows of edges, run on some targets with all of their edges at a time.

What a program stores for every edge, such as the layers of a network on `[x_i, x_j, e]`, so takes memory for the edges
of one chunk. The backward pass computes a chunk anew: saved are inputs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.adjacency import outside_capture
from pyg_dfgnn.graph.build import Built
from pyg_dfgnn.ir import D, E, IndexSpace, One, Program, S
from pyg_dfgnn.ir.kernel_steps import Lowered
from pyg_dfgnn.ir.parts import Parts, parts_of
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.register_layout import LoweringError
from pyg_dfgnn.ops.eager import apply_of, differentiable, unpack_saved
from pyg_dfgnn.ops.relational.program import Prepared, again, apply, index_space_of
from pyg_dfgnn.settings import current

_CHUNK, _LEAST_EDGES = 1 << 26, 1 << 12
"""Numbers that are stored for the edges of a chunk, forward and backward, and the fewest edges of one."""


class Chunk:
    """Some targets with all of their edges.

    Attributes:
        rows: The rows of the graph of these edges, whose input order is the one by target.
        targets: Range of the targets.
        edges: Range of the edges, by target.
        order: Place of each edge in the input order; None where that is the one by target.
    """

    def __init__(self, graph: Graph, first: int, last: int, begin: int, end: int, is_sorted: bool) -> None:
        csr = graph.csr
        rowptr, col = csr.rowptr[first : last + 1] - begin, csr.col[begin:end].clone()
        own = Adjacency(rowptr, col, torch.arange(end - begin, dtype=torch.int32, device=col.device), csr.num_cols,
                        csr.max_degree)  # fmt: skip
        self.rows = index_space_of(Graph(Built(own)))
        self.targets, self.edges = slice(first, last), slice(begin, end)
        self.order = None if is_sorted else csr.perm[begin:end]

    def take(self, tensor: Tensor, domain: Any) -> Tensor:
        """The rows of a tensor that belong to the chunk."""
        if domain is D:
            return tensor[self.targets]
        if domain is E:
            return tensor[self.edges] if self.order is None else tensor.index_select(0, self.order)
        return tensor

    def put(self, whole: Tensor, part: Tensor, domain: Any) -> None:
        """Write the rows of the chunk, or add what it gives to rows that all chunks have."""
        if domain is D:
            whole[self.targets] = part
        elif domain is E:
            where = slice(self.edges.start, self.edges.stop) if self.order is None else self.order.long()
            whole[where] = part
        else:
            whole += part


def chunks_of(rows: IndexSpace, num_edges: int) -> Sequence[Chunk]:
    """Return the chunks of a graph of about so many edges, which the graph keeps."""
    graph = rows.graph

    def make() -> list[Chunk]:
        csr = graph.csr
        outside_capture(csr.rowptr)
        ends = torch.arange(
            num_edges, max(csr.num_edges, num_edges), num_edges, dtype=torch.int32, device=csr.rowptr.device
        )
        is_sorted = (csr.perm == torch.arange(csr.num_edges, dtype=torch.int32, device=csr.perm.device)).all()
        firsts = torch.searchsorted(csr.rowptr, ends, right=True) - 1
        firsts = torch.cat([firsts.new_zeros(1), firsts, firsts.new_full((1,), csr.num_rows)]).unique()
        begins = csr.rowptr[firsts].tolist()
        places, keeps_order = firsts.tolist(), bool(is_sorted)
        spans = zip(places, places[1:], begins, begins[1:])
        return [Chunk(graph, *span, keeps_order) for span in spans]

    return rows.derived(("chunks", num_edges), make)  # type: ignore[no-any-return]


class Chunked:
    """A program on a graph, ready to run in chunks on tensors of a dtype.

    Args:
        program: The program.
        parts: It in three.
        rows: The rows of its domains.
        dtype: Dtype of the inputs.
        wrt: Inputs whose gradients will be asked for.
        passes: The passes that make the steps.

    Attributes:
        lowered: The steps of the edges.
        inputs: Names of the inputs.
        chunk: Edges of a chunk, about.

    Raises:
        Refusal: Some value has no kernel.
    """

    def __init__(
        self, program: Program, parts: Parts, rows: IndexSpace, dtype: torch.dtype, wrt: Sequence[str], passes: Passes
    ) -> None:
        self.program, self.parts, self.dtype, self.passes = program, parts, dtype, passes
        self.domains = {name: parts.edges.values[i].domain for name, i in parts.edges.inputs.items()}
        self.results = {name: parts.edges.values[i] for name, i in parts.edges.outputs}
        reached = _reached(parts.before, wrt)
        self.wrt = tuple(name for name in parts.edges.inputs if name in wrt or name in reached)
        # On all edges at once: for what the chunks have in common, and for second derivatives.
        self.whole = Prepared(parts.edges, rows, dtype, self.wrt, passes)
        self.chunk = edges_of_chunk(self.whole.lowered, self.domains)
        self.lowered, self.inputs = self.whole.lowered, list(program.inputs)

    def __call__(self, rows: IndexSpace, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, with gradients, as :meth:`Prepared.__call__`."""
        known = dict(inputs)
        known |= self._apply(self.parts.before, rows, known)
        tensors = [known[name] for name in self.whole.inputs]
        tensors = [x if name in self.wrt else x.detach() for name, x in zip(self.whole.inputs, tensors)]
        known |= zip(self.whole.outputs, _run(self, rows, *tensors))
        return self._apply(self.parts.after, rows, known)

    def _apply(self, program: Program, rows: IndexSpace, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a part that has no edges."""
        if all(value.op == "input" for value in program.values):
            return {name: known[program.values[i].attrs[0]] for name, i in program.outputs}
        return apply(program, rows, {name: known[name] for name in program.inputs}, passes=self.passes)

    def prepared(self, chunk: Chunk) -> Prepared:
        """Return the prepared program that runs the edges of a chunk."""
        key = "chunk", id(self.parts.edges), self.dtype, self.wrt
        # With the program, whose number the key has.
        kept = chunk.rows.derived(
            key, lambda: (self.parts, Prepared(self.parts.edges, chunk.rows, self.dtype, self.wrt, self.passes))
        )
        return kept[1]  # type: ignore[no-any-return]

    def walk(self, rows: IndexSpace) -> Iterator[tuple[Chunk, Prepared]]:
        """The chunks with what runs each."""
        for chunk in chunks_of(rows, self.chunk):
            chunk.rows.graph.on_this_stream()
            chunk.rows.lists.on_this_stream()
            yield chunk, self.prepared(chunk)

    def part(self, chunk: Chunk, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of a chunk."""
        return [chunk.take(x, self.domains[name]) for name, x in zip(self.whole.inputs, inputs)]


def edges_of_chunk(lowered: Lowered, inputs: Collection[str]) -> int:
    """Return the edges whose rows, as steps store them beside those of inputs, are a chunk."""
    stored = [buffer.shape for name, buffer in lowered.buffers.items() if buffer.domain is E and name not in inputs]
    return max(_LEAST_EDGES, _CHUNK // max(sum(map(prod, stored)), 1))


def chunked_of(prepared: Prepared, rows: IndexSpace, dtype: torch.dtype) -> Chunked | None:
    """Return what runs a program in chunks, which the rows keep; None where settings do not ask for chunks, where it
    has too few edges for two, or where it cannot be split by targets.

    Args:
        prepared: What runs it on all edges at once, which the rows keep.
        rows: The rows.
        dtype: Dtype of the inputs.
    """
    if not current().edge_chunks:
        return None

    def make() -> tuple[Prepared, Chunked | None]:
        parts = parts_of(prepared.passes.run(prepared.program, rows.sizes))
        if parts is None:
            return prepared, None
        try:
            chunked = Chunked(prepared.program, parts, rows, dtype, prepared.wrt, prepared.passes)
        except LoweringError:
            return prepared, None
        return prepared, chunked if rows.sizes[E] >= 2 * chunked.chunk else None

    kept: tuple[Prepared, Chunked | None] = rows.derived(("chunked", id(prepared)), make)
    return kept[1]


def _reached(program: Program, wrt: Sequence[str]) -> set[str]:
    """Names of the outputs that have a gradient in one of the inputs."""
    return {name for name, names in program.differentiable_inputs.items() if not names.isdisjoint(wrt)}


def _again(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    chunked, rows = ctx.call
    return None, None, *again(chunked.whole, rows, ctx.saved_tensors, grads)


class _ChunkedFunction(Function):
    """The edges of a program in chunks: (chunked, rows, inputs) to the outputs."""

    @staticmethod
    def forward(ctx: Any, chunked: Chunked, rows: IndexSpace, *tensors: Tensor) -> Any:
        whole = chunked.whole
        outputs = []
        for name in whole.outputs:
            value = chunked.results[name]
            outputs.append(tensors[0].new_empty((rows.sizes[value.domain], *value.shape), dtype=chunked.dtype))
        for chunk, prepared in chunked.walk(rows):
            for name, out, part in zip(
                whole.outputs, outputs, prepared.forward(chunk.rows, *chunked.part(chunk, tensors))[0]
            ):
                chunk.put(out, part, chunked.results[name].domain)
        # First those that the gradients are functions of.
        others = [place for place in range(len(tensors)) if place not in whole.kept]
        ctx.places = [*whole.kept, *others]
        ctx.save_for_backward(*[tensors[place] for place in ctx.places])
        if whole.non_differentiable:
            ctx.mark_non_differentiable(*(outputs[place] for place in whole.non_differentiable))
        ctx.call = chunked, rows
        return tuple(outputs)

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        chunked, rows = ctx.call
        whole, saved = chunked.whole, dict(zip(ctx.places, unpack_saved(ctx, grads)))
        tensors = [saved[place] for place in range(len(saved))]
        totals: list[Tensor | None] = [None] * len(tensors)
        for place, (name, x) in enumerate(zip(whole.inputs, tensors)):
            if name in chunked.wrt:
                is_shared = chunked.domains[name] in (One, S)
                # Sums over chunks are in float32, as all sums over edges.
                totals[place] = torch.zeros_like(x, dtype=torch.float32) if is_shared else torch.empty_like(x)
        for chunk, prepared in chunked.walk(rows):
            _, kept = prepared.forward(chunk.rows, *chunked.part(chunk, tensors))
            parts = [chunk.take(g, chunked.results[name].domain) for name, g in zip(whole.outputs, grads)]
            for name, total, part in zip(whole.inputs, totals, prepared.backward(chunk.rows, list(kept), *parts)):
                if total is not None:
                    chunk.put(total, part, chunked.domains[name])
        return None, None, *(None if total is None else total.to(x.dtype) for total, x in zip(totals, tensors))


_run = apply_of(_ChunkedFunction)
