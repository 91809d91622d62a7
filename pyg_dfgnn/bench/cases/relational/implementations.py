"""Relational layers as they are computed: by our drop-ins, by PyG, by torch.compile of PyG, by Hector's schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch_geometric.nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dfgnn import nn as ours
from pyg_dfgnn.bench.case import DTYPES, MEMORY_FRACTION, Forward, Implementation
from pyg_dfgnn.bench.cases.relational.case import Edges, RelationalCase, finish_hgt
from pyg_dfgnn.bench.graphs import compressed
from pyg_dfgnn.ir import D, Domain, E, Program, R, Rows, S, Td, Ts, U, V, interpret
from pyg_dfgnn.ir.layers import hgt, rgat, rgcn_mean
from pyg_dfgnn.ir.passes import optimise
from pyg_dfgnn.ir.passes.compact import MOST_PAIRS
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList


class RelationalImplementation(Implementation):
    """An implementation whose memory is predicted from the graph.

    Attributes:
        convs: Layer -> class that it is a function of; others are not computed.
    """

    convs: ClassVar[Mapping[str, str]] = {"rgcn": "RGCNConv", "rgat": "RGATConv", "hgt": "HGTConv"}

    def elements(self, case: RelationalCase, edges: Edges, training: bool) -> float:
        """Numbers of the largest tensors that are alive at once, beside inputs, output and their gradients."""
        return 0.0

    def reasons(self, case: RelationalCase, graph: EdgeList, training: bool, memory_bytes: float) -> list[str]:  # type: ignore[override]
        if case.op not in self.convs:
            return [f"has no {case.layer}"]
        needed = 4.0 * self.elements(case, Edges.of_list(graph), training)
        return [f"needs {needed / 1e9:.0f} GB"] if needed > MEMORY_FRACTION * memory_bytes else []


class Ours(RelationalImplementation):
    """This package's drop-ins."""

    name = "fused"
    title = "ours"
    dtypes = tuple(DTYPES)
    error_bound = 0.0

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        call = case.call(ours, Edges.of_list(graph))
        return lambda: call(inputs)


class PyG(RelationalImplementation):
    """PyG's layers: RGCNConv is a loop over relations, the others gather a weight or a row per edge."""

    name = "pyg"
    title = "PyG"

    def elements(self, case: RelationalCase, edges: Edges, training: bool) -> float:
        num_edges, width = edges.edge_type.numel(), case.width
        if case.op == "rgcn":
            # Each relation keeps its sums for backward.
            return sum(edges.sizes) * width * (edges.num_relations if training else 2)
        if case.op == "rgat":
            return num_edges * width * (width * (2 if training else 1) + 4)
        rows = sum(edges.sizes[source] for source, _ in edges.ends)
        return width * ((5 if training else 3) * rows + (6 if training else 4) * num_edges)

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        call = case.call(torch_geometric.nn, Edges.of_list(graph), self.convs[case.op])
        return lambda: call(inputs)


class FastPyG(PyG):
    """PyG's FastRGCNConv, which gathers a weight per edge."""

    name = "pyg_fast"
    title = "PyG's FastRGCNConv"
    convs: ClassVar[Mapping[str, str]] = {"rgcn": "FastRGCNConv"}

    def elements(self, case: RelationalCase, edges: Edges, training: bool) -> float:
        num_edges = edges.edge_type.numel()
        return num_edges * (case.width * case.width * (2 if training else 1) + edges.num_relations + 2 * case.width)


class CompiledPyG(PyG):
    """``torch.compile`` of PyG's layers."""

    name = "compile"
    title = "torch.compile of PyG"

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        torch._dynamo.reset()
        call = case.call(torch_geometric.nn, Edges.of_list(graph), self.convs[case.op])
        compiled = torch.compile(call, backend=self.backend, dynamic=False)
        return lambda: compiled(inputs)


class _Scheduled(torch.autograd.Function):
    """A program and the program of its gradients: (forward, backward, rows, names of inputs, inputs) to the output."""

    @staticmethod
    def forward(
        ctx: Any, forward: Program, backward: Program, rows: Rows, names: Sequence[str], *tensors: Tensor
    ) -> Tensor:
        ctx.program, ctx.rows, ctx.names = backward, rows, names
        ctx.save_for_backward(*tensors)
        return interpret(forward, rows, dict(zip(names, tensors)))["out"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs = {**dict(zip(ctx.names, ctx.saved_tensors)), "d_out": grad}
        results = interpret(ctx.program, ctx.rows, inputs)
        return None, None, None, None, *(results[f"d_{name}"] for name in ctx.names)


class Hector(RelationalImplementation):
    """Our programs by the passes that Hector has, run by the interpreter: its schedules, not its kernels.

    The backward pass computes the forward values that it needs again. Without compaction each value of a relation has a
    row per edge.

    Attributes:
        off: Passes that are left out.

    Source: Wu et al., Hector: An Efficient Programming and Compilation Framework for Implementing Relational Graph
        Neural Networks in GPU Architectures, ASPLOS 2024.
    """

    name = "hector"
    title = "ours as Hector, plain (interpreted)"
    off: ClassVar[Collection[str]] = ("aggregate_first", "reorder", "compact")

    def elements(self, case: RelationalCase, edges: Edges, training: bool) -> float:
        return edges.edge_type.numel() * case.width * (6 if training else 3)

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        edges = Edges.of_list(graph)
        node_type, reached = edges.node_type, edges.reached
        types: dict[str, Any] = {"source_type": node_type, "target_type": node_type, "num_types": len(edges.sizes)}
        related = compressed(replace(graph, edge_type=edges.edge_type))
        rows = Rows(related, **(types if case.op == "hgt" else {}))
        programs: dict[Any, tuple[Program, Program]] = {}

        def run(layer: Any, tensors: Inputs) -> Tensor:
            if layer not in programs:
                programs[layer] = self.programs(layer, rows, tensors)
            return _Scheduled.apply(*programs[layer], rows, tuple(tensors), *tensors.values())  # type: ignore[no-any-return]

        heads = case.heads
        if case.op == "rgcn":

            def forward() -> Tensor:
                out = run(rgcn_mean, {"x": inputs["x"], "weight": inputs["weight"]})
                return out + torch.addmm(inputs["bias"], inputs["x"], inputs["root"])

            return forward
        if case.op == "rgat":
            attention = rgat(heads, "additive-self-attention", "across-relation")

            def attend() -> Tensor:
                tensors = {"x": inputs["x"], "xd": inputs["x"], **{name: inputs[name] for name in ("weight", "q", "k")}}
                return run(attention, tensors) + inputs["bias"]

            return attend
        transformer = hgt(heads)

        def transform() -> Tensor:
            x, tensors = inputs["x"], {"x": inputs["x"], "xd": inputs["x"]}
            for name, weight, bias in zip("kqv", *(inputs[f"kqv_{what}"].chunk(3, 1) for what in ("weight", "bias"))):
                tensors |= {f"w{name}": weight.mT, f"b{name}": bias}
            for name in ("k", "v"):
                weight = inputs[f"{name}_rel"].unflatten(0, (heads, -1)).transpose(0, 1)
                tensors["key" if name == "k" else "value"] = weight
            total = run(transformer, {**tensors, "scale": inputs["p_rel"]})
            return finish_hgt(total, x, node_type, {**inputs, "reached": reached.to(x.dtype)})

        return transform

    def programs(self, layer: Any, rows: Rows, tensors: Inputs) -> tuple[Program, Program]:
        """The program of the output, and that of the gradients of all inputs."""
        domains: Mapping[str, Domain] = layer.domains
        one_row = {name for name, domain in domains.items() if domain not in (R, S, D, Ts, Td)}
        shapes = {name: tuple(t.shape if name in one_row else t.shape[1:]) for name, t in tensors.items()}
        traced = layer.program(**shapes)
        traced = Program(traced.name, traced.values, tuple(pair for pair in traced.outputs if pair[0] == "out"))
        # Hector has compact rows of sources alone, however many there are: targets have as many rows as edges.
        edges = rows.sizes[E]
        sizes = {**rows.sizes, U: min(rows.sizes[U], int(MOST_PAIRS * edges)), V: edges}
        forward, both = (optimise(traced, sizes, wrt=wrt, off=self.off)[-1].program for wrt in ((), tuple(tensors)))
        gradients = tuple(pair for pair in both.outputs if pair[0] != "out")
        return forward, Program(both.name, both.values, gradients)


class HectorCompact(Hector):
    """With a row per distinct pair of source and relation."""

    name = "hector_c"
    title = "ours as Hector, compact (interpreted)"
    off: ClassVar[Collection[str]] = ("aggregate_first", "reorder")


class HectorReordered(Hector):
    """With compact rows and reordered linear maps."""

    name = "hector_cf"
    title = "ours as Hector, compact and reordered (interpreted)"
    off: ClassVar[Collection[str]] = ("aggregate_first",)


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    kind.name: kind for kind in (Ours, PyG, FastPyG, CompiledPyG, Hector, HectorCompact, HectorReordered)
}
