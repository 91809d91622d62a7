"""Relational layers as they are computed: by our drop-ins, PyG, torch.compile of PyG, FASTEN and Hector's schedules."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import scatter

from benchmarks.case import Call, Forward, Fused, Implementation, TorchCompiled
from benchmarks.cases.relational.case import CaseEdges, RelationalCase, counts_of
from benchmarks.graphs import compressed
from pyg_dfgnn import nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.ir import U
from pyg_dfgnn.ir.layers import hgt, rgat, rgcn_mean
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.relational import apply, index_space_of, prepared_for
from pyg_dfgnn.reference.oracle import Inputs
from pyg_dfgnn.reference.zoo import EdgeList


class RelationalImplementation(Implementation):
    """An implementation of some of the layers.

    Attributes:
        convs: Layer -> class that it is a function of; others are not computed.
    """

    convs: ClassVar[Mapping[str, str]] = {"rgcn": "RGCNConv", "rgat": "RGATConv", "hgt": "HGTConv"}

    def reasons(self, case: RelationalCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        return [] if case.op in self.convs else [f"has no {case.layer}"]


class Ours(RelationalImplementation, Fused):
    """This package's drop-ins."""

    def call(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Call:  # type: ignore[override]
        return case.call(ours, CaseEdges.of_list(graph))


class PyGRelational(RelationalImplementation):
    """PyG's layers: RGCNConv is a loop over relations, the others gather a weight or a row per edge."""

    name = "pyg"
    title = "PyG"

    def call(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Call:  # type: ignore[override]
        return case.call(torch_geometric.nn, CaseEdges.of_list(graph), self.convs[case.op])


class FastPyG(PyGRelational):
    """PyG's FastRGCNConv, which gathers a weight per edge."""

    name = "pyg_fast"
    title = "PyG's FastRGCNConv"
    convs: ClassVar[Mapping[str, str]] = {"rgcn": "FastRGCNConv"}


class CompiledPyGRelational(TorchCompiled, PyGRelational):
    """``torch.compile`` of PyG's layers."""


class Fasten(RelationalImplementation):
    """RGCN on FASTEN's product of segments, whose factors are rounded to TF32 whatever torch allows.

    As its layer does it, rows of sources are gathered in the order of relations, and products are scattered to targets.
    That layer adds them up; a mean of each relation needs the share of each product first.

    Source: https://github.com/Deep-Learning-Profiling-Tools/fasten, ``FastenRGCNConv``.
    """

    name = "fasten"
    title = "FASTEN"
    dtypes = ("float32", "tf32")
    convs: ClassVar[Mapping[str, str]] = {"rgcn": "FastenRGCNConv"}

    def reasons(self, case: RelationalCase, graph: EdgeList) -> list[str]:  # type: ignore[override]
        if reasons := super().reasons(case, graph):
            return reasons
        try:
            importlib.import_module(self.name)
        except ImportError as error:
            return ["fasten is not installed" if error.name == self.name else f"fasten cannot be imported: {error}"]
        return []

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        fasten = importlib.import_module(self.name)
        edges = CaseEdges.of_list(graph)
        kind, order = edges.edge_type.sort(stable=True)
        source, target = edges.edge_index[:, order]
        segments = fasten.compact_tensor_types(None, kind, is_sorted=True, device=graph.device)
        share = counts_of(target * edges.num_relations + kind).float().reciprocal()[:, None]

        def forward() -> Tensor:
            x, weight = inputs["x"], inputs["weight"]
            messages = fasten.ops.fasten_segment_matmul(x.index_select(0, source), weight, segments, fasten.Engine.AUTO)
            out: Tensor = scatter(messages * share, target, dim_size=graph.num_dst, reduce="sum")
            return out + torch.addmm(inputs["bias"], x, inputs["root"])

        return forward


class Hector(RelationalImplementation):
    """Our programs by the passes that Hector has, on generated kernels; on a CPU the interpreter runs them as traced.

    Aggregation before transformation and compact rows of targets are ours alone. Without compaction each value of a
    relation has a row per edge.

    Attributes:
        passes: The passes that run.

    Source: Wu et al., Hector: An Efficient Programming and Compilation Framework for Implementing Relational Graph
        Neural Networks in GPU Architectures, ASPLOS 2024.
    """

    name = "hector"
    title = "ours as Hector, plain"
    is_ours = True
    passes: ClassVar[Passes] = Passes(frozenset({"aggregate_first", "reorder", "compact"}), frozenset())

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        edges = CaseEdges.of_list(graph)
        node_type = edges.node_type
        types: dict[str, Any] = {"source_type": node_type, "target_type": node_type, "num_types": len(edges.sizes)}
        related = compressed(replace(graph, edge_type=edges.edge_type))
        rows = index_space_of(related, **(types if case.op == "hgt" else {}))

        def run(layer: Relational, tensors: Inputs) -> Tensor:
            arguments = layer, rows, tensors, ("out",), self.passes
            # The rows do not keep their graph; this call does.
            prepared = prepared_for(*arguments)
            if related.device.type == "cuda" and isinstance(prepared, tuple):
                raise UnsupportedError(prepared, what=self.title)
            return apply(*arguments)["out"]

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
            reached, outputs = {target for _, target in edges.ends}, []
            for i, (part, x_part) in enumerate(zip(total.split(edges.sizes), x.split(edges.sizes))):
                out = torch.addmm(inputs["out_bias"][i], F.gelu(part), inputs["out_weight"][i].t())
                outputs.append(torch.lerp(x_part, out, inputs["skip"][i].sigmoid()) if i in reached else 0 * x_part)
            return torch.cat(outputs)

        return transform


class HectorCompact(Hector):
    """With a row per distinct pair of source and relation."""

    name = "hector_c"
    title = "ours as Hector, compact"
    passes: ClassVar[Passes] = Passes(frozenset({"aggregate_first", "reorder"}), frozenset({U}))


class HectorReordered(Hector):
    """With compact rows and reordered linear maps."""

    name = "hector_cf"
    title = "ours as Hector, compact and reordered"
    passes: ClassVar[Passes] = Passes(frozenset({"aggregate_first"}), frozenset({U}))


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    kind.name: kind
    for kind in (Ours, PyGRelational, FastPyG, CompiledPyGRelational, Fasten, Hector, HectorCompact, HectorReordered)
}
