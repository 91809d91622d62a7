"""The relational family: what a layer computes of typed edges, how PyG and other schedules compute it.

Layers are our drop-ins, PyG's, torch.compile of PyG's, FASTEN's and our programs by Hector's passes. The reference is
the program of the layer in float64, which the interpreter runs in plain torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from benchmarks.case import Call, Family, Forward, Fused, HeadsCase, Implementation, TorchCompiled
from benchmarks.graphs import compressed
from pyg_dfgnn import nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import IndexSpace, One, U, interpret
from pyg_dfgnn.ir.layers import hgt, rgat, rgcn_mean
from pyg_dfgnn.ir.passes import Passes
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.ops.relational import apply, index_space_of, prepared_for
from pyg_dfgnn.reference.oracle import Inputs, float64_reference
from pyg_dfgnn.reference.zoo import EdgeList

Run = Callable[[Relational, Inputs], Tensor]
"""(program, inputs) -> its output on the edges."""


@dataclass(frozen=True)
class CaseEdges:
    """The types of a graph as layers take them; nodes of a type follow each other, and `sizes` are their numbers.

    `ends` are source type and target type of each relation, the first types of one without edges.
    """

    edge_index: Tensor
    edge_type: Tensor
    num_relations: int
    node_type: Tensor
    sizes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    @staticmethod
    def of(graph: EdgeList) -> CaseEdges:
        """From a graph of the bench; without types it has one relation, or one node type."""
        edge_type = torch.zeros_like(graph.edge_index[0]) if graph.edge_type is None else graph.edge_type.long()
        node_type = edge_type.new_zeros(graph.num_dst) if graph.node_type is None else graph.node_type
        pair = edge_type.new_zeros(graph.num_relations, 2)
        # All edges of a relation write the same types.
        pair[edge_type] = node_type[graph.edge_index].t()
        ends, sizes = tuple(map(tuple, pair.tolist())), tuple(node_type.bincount(minlength=1).tolist())
        return CaseEdges(graph.edge_index, edge_type, graph.num_relations, node_type, sizes, ends)

    @property
    def reached(self) -> set[int]:
        """The node types that a relation leads to."""
        return {target for _, target in self.ends}

    @property
    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Names of the types, as `HeteroData.metadata()` returns them."""
        edge_types = [(f"t{source}", f"r{i}", f"t{target}") for i, (source, target) in enumerate(self.ends)]
        return [f"t{i}" for i in range(len(self.sizes))], edge_types

    def edge_index_dict(self) -> dict[tuple[str, str, str], Tensor]:
        """Edges [2, E_r] of each relation, numbered inside their types."""
        graph = Data(edge_index=self.edge_index, num_nodes=sum(self.sizes))
        typed = graph.to_heterogeneous(self.node_type, self.edge_type, *self.metadata)
        return typed.edge_index_dict  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RelationalLayer:
    """One layer of the family.

    Attributes:
        conv: Name of its class.
        shapes: Shapes of its parameters: W for the width, H heads of C channels, R relations, T node types; Q for
            three widths, B for R * H.
        parameters: (inputs, edges) -> the module's parameters by their names.
        output: (inputs, heads, run, number of targets of each type, types with an output) -> the output, by a program.
        is_hetero: Whether it takes dicts by types.
        has_kink: Whether a function without a derivative at 0 follows products.
    """

    title: str
    conv: str
    shapes: Mapping[str, str]
    make: Callable[[Any, RelationalCase, CaseEdges], nn.Module]
    output: Callable[[Inputs, int, Run, Sequence[int], set[int]], Tensor]
    parameters: Callable[[Inputs, CaseEdges], Inputs] = lambda inputs, _: {n: x for n, x in inputs.items() if n != "x"}
    is_hetero: bool = False
    has_kink: bool = False


def _rgcn_output(inputs: Inputs, heads: int, run: Run, *_: Any) -> Tensor:
    """W_0 x_i + b + the sum over relations of the mean of W_r x_j."""
    out = run(rgcn_mean, {"x": inputs["x"], "weight": inputs["weight"]})
    return out + torch.addmm(inputs["bias"], inputs["x_dst"], inputs["root"])


def _rgat_output(inputs: Inputs, heads: int, run: Run, *_: Any) -> Tensor:
    """Sums of W_r x_j with additive attention over all relations of a target."""
    tensors = {"x": inputs["x"], "xd": inputs["x_dst"], **{name: inputs[name] for name in ("weight", "q", "k")}}
    return run(rgat(heads, "additive-self-attention", "across-relation"), tensors) + inputs["bias"]


def _hgt_output(inputs: Inputs, heads: int, run: Run, sizes: Sequence[int], reached: set[int]) -> Tensor:
    """The heterogeneous graph transformer; nodes of types that no relation leads to have no output, 0 here."""
    tensors = {"x": inputs["x"], "xd": inputs["x_dst"], "scale": inputs["p_rel"]}
    for name, weight, bias in zip("kqv", *(inputs[f"kqv_{what}"].chunk(3, 1) for what in ("weight", "bias"))):
        tensors |= {f"w{name}": weight.mT, f"b{name}": bias}
    for name, of in (("key", "k_rel"), ("value", "v_rel")):
        tensors[name] = inputs[of].unflatten(0, (heads, -1)).transpose(0, 1)
    total, outputs = run(hgt(heads), tensors), []
    for i, (part, x) in enumerate(zip(total.split(sizes), inputs["x_dst"].split(sizes))):
        out = torch.addmm(inputs["out_bias"][i], F.gelu(part), inputs["out_weight"][i].t())
        outputs.append(torch.lerp(x, out, inputs["skip"][i].sigmoid()) if i in reached else 0 * x)
    return torch.cat(outputs)


def _hgt_names(inputs: Inputs, edges: CaseEdges) -> Inputs:
    types, relations = edges.metadata
    names = {"k_rel.weight": inputs["k_rel"], "v_rel.weight": inputs["v_rel"]}
    for part in ("kqv", "out"):
        for what in ("weight", "bias"):
            of_types = zip(types, inputs[f"{part}_{what}"].unbind())
            names |= {f"{part}_lin.lins.{kind}.{what}": tensor for kind, tensor in of_types}
    names |= {f"skip.{kind}": tensor for kind, tensor in zip(types, inputs["skip"].unbind())}
    scales = inputs["p_rel"].unsqueeze(1).unbind()
    return names | {f"p_rel.{'__'.join(name)}": tensor for name, tensor in zip(relations, scales)}


LAYERS = {
    "rgcn": RelationalLayer(
        title="RGCN",
        conv="RGCNConv",
        shapes={"weight": "RWW", "root": "WW", "bias": "W"},
        make=lambda conv, case, edges: conv(case.width, case.width, edges.num_relations),
        output=_rgcn_output,
    ),
    "rgat": RelationalLayer(
        title="RGAT",
        conv="RGATConv",
        shapes={"weight": "RWW", "q": "WH", "k": "WH", "bias": "W"},
        make=lambda conv, case, edges: conv(case.width, case.channels, edges.num_relations, heads=case.heads),
        output=_rgat_output,
        has_kink=True,
    ),
    "hgt": RelationalLayer(
        title="HGT",
        conv="HGTConv",
        shapes={
            **{"kqv_weight": "TQW", "kqv_bias": "TQ", "out_weight": "TWW", "out_bias": "TW", "skip": "T1"},
            **{"k_rel": "BCC", "v_rel": "BCC", "p_rel": "RH"},
        },
        make=lambda conv, case, edges: conv(case.width, case.width, edges.metadata, case.heads),
        output=_hgt_output,
        parameters=_hgt_names,
        is_hetero=True,
    ),
}


@dataclass(frozen=True)
class RelationalCase(HeadsCase):
    """One layer as wide as its input."""

    titles = {name: layer.title for name, layer in LAYERS.items()}
    family = "gemm"

    @property
    def spec(self) -> RelationalLayer:
        return LAYERS[self.op]

    def shapes(self, graph: EdgeList) -> dict[str, tuple[int, ...]]:
        types = 1 if graph.node_type is None or not graph.num_dst else int(graph.node_type[-1]) + 1
        relations, width, heads = graph.num_relations, self.width, self.heads
        sizes = {"W": width, "H": heads, "C": self.channels, "R": relations, "T": types, "1": 1}
        sizes |= {"Q": 3 * width, "B": relations * heads}
        parameters = {name: tuple(sizes[axis] for axis in axes) for name, axes in self.spec.shapes.items()}
        return {"x": (graph.num_src, width), **parameters}

    def roles(self, graph: EdgeList) -> dict[str, str]:
        return {name: "src" if name == "x" else "param" for name in self.shapes(graph)}

    def make_inputs(self, graph: EdgeList) -> Inputs:
        """Normal features, and weights that keep their size.

        Where a kink follows, numbers have three bits: two products after one another are then exact in float32, and no
        edge is on another side of the kink than in float64, whatever the order of the sums.
        """
        generator = torch.Generator(device=graph.device).manual_seed(0)
        inputs = {}
        for name, shape in self.shapes(graph).items():
            drawn = torch.randn(shape, generator=generator, device=graph.device)
            scale = 1.0 if name == "x" else shape[-2 if len(shape) > 1 else -1] ** -0.5
            if self.spec.has_kink:
                drawn, scale = drawn.mul_(2).round_().clamp_(-3, 3).div_(2), 2.0 ** round(log2(scale))
            inputs[name] = drawn.mul_(scale)
        return inputs

    def call(self, namespace: Any, graph: EdgeList, conv: str = "") -> Call:
        """A module of a namespace as a function of the inputs."""
        spec, edges = self.spec, CaseEdges.of(graph)
        module: nn.Module = spec.make(getattr(namespace, conv or spec.conv), self, edges).to(graph.device)
        edge_index_dict, types = edges.edge_index_dict() if spec.is_hetero else {}, edges.metadata[0]

        def call(inputs: Inputs) -> Tensor:
            x, parameters = inputs["x"], spec.parameters(inputs, edges)
            if not spec.is_hetero:
                arguments = x, edges.edge_index, edges.edge_type
                return functional_call(module, parameters, arguments)  # type: ignore[no-any-return]
            x_dict = dict(zip(types, x.split(edges.sizes)))
            out = functional_call(module, parameters, (x_dict, edge_index_dict))
            return torch.cat([out[kind] if kind in out else torch.zeros_like(x) for kind, x in x_dict.items()])

        return call

    def reference(self, graph: EdgeList, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
        edges = CaseEdges.of(graph)
        num_types = len(edges.sizes)
        constants = {"edge_type": ("edge", edges.edge_type), "target_type": ("dst", edges.node_type)}

        def plain(edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None = None) -> Tensor:
            target_type, relations = inputs["target_type"], edges.num_relations
            part = Graph.of(edge_index, graph.num_src, num_dst, edge_type=inputs["edge_type"], num_relations=relations)
            rows = IndexSpace(part, source_type=edges.node_type, target_type=target_type, num_types=num_types)
            sizes = target_type.bincount(minlength=num_types).tolist()

            def run(program: Relational, inputs: Inputs) -> Tensor:
                shapes = {name: tuple(x.shape[program.domains[name] is not One :]) for name, x in inputs.items()}
                return interpret(program.program(**shapes), rows, inputs)["out"]

            return self.spec.output(inputs, self.heads, run, sizes, edges.reached)

        roles, rows_of = self.roles(graph), {"x_dst": "x"}
        return float64_reference(plain, roles, graph, inputs, grad_out, target_rows_of=rows_of, constants=constants)


class Ours(Fused):
    """This package's drop-ins."""

    def call(self, case: RelationalCase, graph: EdgeList) -> Call:  # type: ignore[override]
        return case.call(ours, graph)


class PyGRelational(Implementation):
    """PyG's layers: RGCNConv is a loop over relations, the others gather a weight or a row per edge."""

    name = "pyg"
    title = "PyG"
    conv = ""

    def call(self, case: RelationalCase, graph: EdgeList) -> Call:  # type: ignore[override]
        return case.call(torch_geometric.nn, graph, self.conv)


class FastPyG(PyGRelational):
    """PyG's FastRGCNConv, which gathers a weight per edge."""

    name = "pyg_fast"
    title = "PyG's FastRGCNConv"
    ops = ("rgcn",)
    conv = "FastRGCNConv"


class CompiledPyGRelational(TorchCompiled, PyGRelational):
    """``torch.compile`` of PyG's layers."""


class Fasten(Implementation):
    """RGCN on FASTEN's product of segments, whose factors are rounded to TF32 whatever torch allows.

    As its layer does it, rows of sources are gathered in the order of relations, and products are scattered to targets.
    That layer adds them up; a mean of each relation needs the share of each product first.

    Source: https://github.com/Deep-Learning-Profiling-Tools/fasten, ``FastenRGCNConv``.
    """

    name = "fasten"
    title = "FASTEN"
    dtypes = ("float32", "tf32")
    ops = ("rgcn",)

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
        edges = CaseEdges.of(graph)
        kind, order = edges.edge_type.sort(stable=True)
        source, target = edges.edge_index[:, order]
        segments = fasten.compact_tensor_types(None, kind, is_sorted=True, device=graph.device)
        pair = target * edges.num_relations + kind
        _, inverse, counts = pair.unique(return_inverse=True, return_counts=True)
        share = counts[inverse].float().reciprocal()[:, None]

        def forward() -> Tensor:
            x, weight = inputs["x"], inputs["weight"]
            messages = fasten.ops.fasten_segment_matmul(x.index_select(0, source), weight, segments, fasten.Engine.AUTO)
            out: Tensor = scatter(messages * share, target, dim_size=graph.num_dst, reduce="sum")
            return out + torch.addmm(inputs["bias"], x, inputs["root"])

        return forward


class Hector(Implementation):
    """Our programs by the passes that Hector has, on generated kernels; on a CPU the interpreter runs them as traced.

    Aggregation before transformation and compact rows of targets are ours alone. Without compaction each value of a
    relation has a row per edge.

    Source: Wu et al., Hector: An Efficient Programming and Compilation Framework for Implementing Relational Graph
        Neural Networks in GPU Architectures, ASPLOS 2024.
    """

    name = "hector"
    title = "ours as Hector, plain"
    is_ours = True
    passes: ClassVar[Passes] = Passes(frozenset({"aggregate_first", "reorder", "compact"}), frozenset())

    def prepare(self, case: RelationalCase, graph: EdgeList, inputs: Inputs) -> Forward:  # type: ignore[override]
        edges = CaseEdges.of(graph)
        node_type, reached = edges.node_type, edges.reached
        types: dict[str, Any] = {"source_type": node_type, "target_type": node_type, "num_types": len(edges.sizes)}
        related = compressed(replace(graph, edge_type=edges.edge_type))
        rows = index_space_of(related, **(types if case.op == "hgt" else {}))

        def run(program: Relational, tensors: Inputs) -> Tensor:
            arguments = program, rows, tensors, ("out",), self.passes
            # The rows do not keep their graph; this call does.
            prepared = prepared_for(*arguments)
            if related.device.type == "cuda" and isinstance(prepared, tuple):
                raise UnsupportedError(prepared, what=self.title)
            return apply(*arguments)["out"]

        return lambda: case.spec.output({**inputs, "x_dst": inputs["x"]}, case.heads, run, edges.sizes, reached)


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


KINDS = (Ours, PyGRelational, FastPyG, CompiledPyGRelational, Fasten, Hector, HectorCompact, HectorReordered)
RELATIONAL = Family(RelationalCase, {kind.name: kind for kind in KINDS})
