"""Programs of the IR through the registered operator: the name of one is its text.

What a traced call says of a graph is how it is found again: its anchors and sizes. All that depends on the numbers of
edges and of pairs is chosen when the operator runs: the passes, the steps and their kernels. So nothing that a forward
pass could leave has a known number or shape, and the backward program starts from the inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.equal_edges import Seen, graph_of
from pyg_dfgnn.graph.hetero import joint_graph
from pyg_dfgnn.graph.relations import one_relation
from pyg_dfgnn.ir import D, DensePairs, Domain, E, IndexSpace, One, Program, R, S, interpret
from pyg_dfgnn.ir.dense_pairs import sizes_of
from pyg_dfgnn.ir.domains import Ts
from pyg_dfgnn.ir.layers import layer_of
from pyg_dfgnn.ir.text import program_of, text_of
from pyg_dfgnn.ops.function import ops, run_traced
from pyg_dfgnn.ops.relational.new_edges import joint_pairs_of, pairs_of, program_on_new
from pyg_dfgnn.ops.relational.program import index_space_of, run, selected
from pyg_dfgnn.ops.visits import COMPILED_VISITS, new_visit

KIND = "program"
"""Start of the names of the programs."""


_seen: Seen = {}
"""The edges that the operator was called with, of all compiled graphs."""
_visitors: dict[str, torch.nn.Module] = {}
"""Name of a program -> what stands for the layer that visits edges."""


class RowSet(NamedTuple):
    """Anchors and sizes that name the rows of a graph without building them.

    ============= ================================== ================================================================
    kind          anchors                            sizes
    ============= ================================== ================================================================
    "edges"       `edge_index`                       `num_src`, `num_dst`
    "relation"    `edge_index`                       likewise; all edges have one relation
    "relations"   `edge_index`, `edge_type`          `num_src`, `num_dst`, `num_relations`
    "types"       `type_vec`                         `num_types`
    "joint"       `edge_index` of each edge type     `num_nodes`, `num_relations`, then of each edge type its relation,
                                                     and first node and number of nodes of its sources and its targets
    ============= ================================== ================================================================

    Attributes:
        kind: See the table.
        anchors: Tensors.
        sizes: Numbers.
        transposed: Whether row 0 of the edges holds the targets.
    """

    kind: str
    anchors: Sequence[Tensor]
    sizes: Sequence[Any]
    transposed: bool = False

    @property
    def num_edges(self) -> Any:
        """The number of edges."""
        return sum(anchor.shape[-1] for anchor in self.anchors[: None if self.kind == "joint" else 1])

    def domain_sizes(self) -> dict[Domain, Any]:
        """Return the numbers of rows that are known before the rows are built."""
        first, second = self.sizes[0], self.sizes[min(1, len(self.sizes) - 1)]
        if self.kind == "types":
            return {S: self.num_edges, D: first, Ts: first, E: self.num_edges}
        if self.kind == "joint":
            return {S: first, D: first, R: second, E: self.num_edges}
        return {S: first, D: second, R: self.sizes[2] if self.kind == "relations" else 1, E: self.num_edges}

    def graph(self) -> Graph:
        """Return the graph, kept for as long as the anchors live unchanged."""
        (first, *others), sizes = self.anchors, self.sizes
        if self.kind == "types":
            return Graph.of_index(first, *sizes)
        if self.kind == "joint":
            return joint_graph(self.anchors, tuple(sizes))
        types = (others[0], sizes[2]) if others else None
        graph = graph_of(_seen, first, sizes[0], sizes[1], self.transposed, types)
        if graph is None:
            graph = Graph.resolve(first, *others, *sizes[:2], False, self.transposed, *sizes[2:])
        return one_relation(graph) if self.kind == "relation" else graph

    def has_new_edges(self, name: str) -> bool:
        """Return whether edges are new to a program of this name."""
        edge_sets = self.anchors if self.kind == "joint" else self.anchors[:1]
        if any(edges.dtype is not torch.int64 for edges in edge_sets):
            return False
        visitor = _visitors.setdefault(name, torch.nn.Module().eval())
        # All sets are asked, since each is known by its visits. Several layers of a compiled graph have one program.
        return any([new_visit(visitor, edges, most=COMPILED_VISITS) > 0 for edges in edge_sets])

    def pairs(self) -> DensePairs:
        """Return all pairs of the edges."""
        if self.kind == "joint":
            return joint_pairs_of(self.anchors, tuple(self.sizes))
        num_src, num_dst, num_relations = self.sizes
        return pairs_of(self.anchors[0], self.anchors[1], (num_src, num_dst, num_relations), self.transposed)

    def index_space(self, graph: Graph) -> IndexSpace:
        """Return the rows of the graph."""
        if self.kind == "types":
            return index_space_of(graph, source_type=self.anchors[0], num_types=self.sizes[0])
        return index_space_of(graph)


class Name(NamedTuple):
    """Parts of the name of a program in the operator.

    Attributes:
        kind: Kind of its :class:`RowSet`.
        transposed: Of its row set.
        program: The program.
        wrt: Inputs whose gradients are the results; None for the outputs.
    """

    kind: str
    transposed: bool
    program: Program
    wrt: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The name."""
        return f"{KIND}:{json.dumps([self.kind, self.transposed, self.wrt, text_of(self.program)])}"


@cache
def _read(name: str) -> Name:
    kind, transposed, wrt, text = json.loads(name.partition(":")[2])
    return Name(kind, transposed, program_of(text), None if wrt is None else tuple(wrt))


class _Programs:
    """Runner of the programs of the IR (:class:`~pyg_dfgnn.ops.function.Runner`)."""

    def run(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> list[Tensor]:
        """Run a program on tensors, which the registered operator was given."""
        known = _read(name)
        row_set, by_name = RowSet(known.kind, anchors, sizes, known.transposed), _by_name(known, inputs)
        ready, dtypes = None, {tensor.dtype for tensor in by_name.values()}
        may_pair = row_set.kind in ("relations", "joint") and dtypes == {torch.float32}
        if may_pair and row_set.has_new_edges(name):
            rows = row_set.domain_sizes()
            ready = program_on_new(known.program, sizes_of(rows[S], rows[D], rows[R], rows[E]), known.wrt)
        if ready is not None:
            given = {each: by_name[each] for each in ready.inputs}
            results = list(interpret(ready, row_set.pairs(), given).values())
        else:
            graph = row_set.graph()
            results = run(known.program, row_set.index_space(graph), by_name, known.wrt)
        # Results of an operator share no memory, and have the strides that tracers were told.
        taken = {tensor.data_ptr() for tensor in inputs if tensor is not None}
        for place, result in enumerate(map(Tensor.contiguous, results)):
            results[place] = result.clone() if result.data_ptr() in taken else result
            taken.add(result.data_ptr())
        return results

    def empty_results(
        self, name: str, anchors: Sequence[Tensor], sizes: Sequence[Any], inputs: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return empty results of the shapes and dtypes that a program gives."""
        known = _read(name)
        by_name = _by_name(known, inputs)
        if known.wrt is not None:
            return [torch.empty_like(by_name[each], memory_format=torch.contiguous_format) for each in known.wrt]
        like = next(iter(by_name.values()), anchors[0].new_empty(0, dtype=torch.float32))
        rows = RowSet(known.kind, anchors, sizes, known.transposed).domain_sizes()
        results = []
        for _, i in known.program.outputs:
            value = known.program.values[i]
            size: list[Any] = [] if value.domain is One else [rows.get(value.domain)]
            if size == [None]:
                # The number of pairs is not known before the graph is built.
                size = [torch.library.get_ctx().new_dynamic_size()]
            results.append(like.new_empty([*size, *value.shape]))
        return results

    def num_outputs(self, name: str) -> int:
        """Return the number of outputs of a program."""
        return len(_read(name).program.outputs)

    def reads_outputs(self, name: str) -> bool:
        """Return that backward starts from the inputs."""
        return False

    def backward(self, name: str, present: Sequence[bool], needed: Sequence[bool]) -> tuple[str, Sequence[int]]:
        """Return the program of the gradients that are needed, and their inputs."""
        known, places = _read(name), [place for place, is_needed in enumerate(needed) if is_needed]
        inputs = tuple(known.program.inputs)
        return known._replace(wrt=tuple(inputs[place] for place in places)).text, places

    def reference(
        self,
        name: str,
        anchors: Sequence[Tensor],
        sizes: Sequence[int],
        inputs: Sequence[Tensor | None],
        numbers: Sequence[float],
    ) -> Sequence[Tensor]:
        """Return the outputs of a program by the interpreter."""
        known = _read(name)
        row_set = RowSet(known.kind, anchors, sizes, known.transposed)
        graph = row_set.graph()
        return list(interpret(known.program, row_set.index_space(graph), _by_name(known, inputs)).values())


ops[KIND] = _Programs()


def _by_name(known: Name, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the inputs of a program by name; those of a program of gradients end with the outputs', under "d_"."""
    names = list(known.program.inputs)
    by_name: dict[str, Any] = dict(zip(names, inputs, strict=False))
    if known.wrt is not None:
        outputs = known.program.outputs
        by_name |= {"d_" + name: grad for (name, _), grad in zip(outputs, inputs[-len(outputs) :], strict=True)}
    return by_name


# Marked constant: torch.compile runs these functions while it traces and leaves nothing of them in the graph.
@torch.compiler.assume_constant_result
def _lead(layer: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the inputs of a layer that have rows."""
    return tuple(name for name, domain in layer_of(layer).domains.items() if domain is not One)


@torch.compiler.assume_constant_result
def _name_of(
    layer: tuple[Any, ...], shapes: tuple[tuple[str, tuple[int, ...]], ...], outputs: Any, kind: str, transposed: bool
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the name of a layer's program for row shapes, and the names of its inputs and outputs."""
    program = layer_of(layer).program(**dict(shapes))
    program = program if outputs is None else selected(program, outputs)
    names = tuple(name for name, _ in program.outputs)
    return Name(kind, transposed, program).text, tuple(program.inputs), names


def apply_traced(
    layer: tuple[Any, ...], rows: RowSet, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Run the program of a layer through the registered operator, with gradients, while torch.compile traces.

    Args:
        layer: What :func:`~pyg_dfgnn.ir.layers.layer_of` takes.
        rows: The rows.
        inputs: As for :func:`~pyg_dfgnn.ops.relational.apply`.
        outputs: Names of the outputs that are wanted; all by default.
    """
    lead = _lead(layer)
    # The length of a range is a constant to torch.compile, as a width has to be.
    shapes = tuple(
        (name, tuple(len(range(size)) for size in x.shape[1 if name in lead else 0 :])) for name, x in inputs.items()
    )
    wanted = None if outputs is None else tuple(outputs)
    name, order, names = _name_of(layer, shapes, wanted, rows.kind, rows.transposed)
    results = run_traced(name, rows.anchors, rows.sizes, (), [inputs[each] for each in order])
    return dict(zip(names, results, strict=True))
