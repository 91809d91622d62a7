"""One relational layer of one size as data, its reference in plain torch, and PyG's modules called on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.case import Call, HeadsCase
from benchmarks.graphs import NODE_TYPE
from pyg_dfgnn import nn as ours
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.oracle import Inputs, float64_reference
from pyg_dfgnn.reference.zoo import EdgeList

EPSILON = 1e-16
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class CaseEdges:
    """The types of a graph as layers take them.

    Attributes:
        edge_index: Sources and targets [2, E].
        edge_type: Relation of each edge [E].
        num_relations: Number of relations R.
        sizes: Number of nodes of each type; nodes of a type follow each other.
        ends: Source type and target type of each relation; of one without edges the first types.
    """

    edge_index: Tensor
    edge_type: Tensor
    num_relations: int
    sizes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        edge_index: Tensor, edge_type: Tensor | None, num_relations: int, num_nodes: int, node_type: Any
    ) -> CaseEdges:
        """From the arrays of a graph; None stands for one relation, or one node type."""
        edge_type = torch.zeros_like(edge_index[0]) if edge_type is None else edge_type.long()
        if node_type is None:
            sizes, ends = (num_nodes,), ((0, 0),) * num_relations
        else:
            sizes = tuple(node_type.bincount().tolist())
            pair = torch.zeros(num_relations, 2, dtype=torch.int64, device=edge_type.device)
            # All edges of a relation write the same types.
            pair[edge_type] = node_type[edge_index].t()
            ends = tuple((source, target) for source, target in pair.tolist())
        return CaseEdges(edge_index, edge_type, num_relations, sizes, ends)

    @staticmethod
    def of_list(graph: EdgeList) -> CaseEdges:
        """From the edges of a graph of the bench."""
        return CaseEdges.of(graph.edge_index, graph.edge_type, graph.num_relations, graph.num_dst, graph.node_type)

    @staticmethod
    def of_graph(graph: Graph) -> CaseEdges:
        """From a `Graph` that :func:`~benchmarks.graphs.compressed` has made."""
        relations = 1 if graph.relation is None else graph.num_relations
        return CaseEdges.of(graph.edge_index, graph.relation, relations, graph.num_dst, graph.get(NODE_TYPE))

    @property
    def node_type(self) -> Tensor:
        """Type of each node [N]."""
        device = self.edge_index.device
        return torch.arange(len(self.sizes), device=device).repeat_interleave(torch.tensor(self.sizes, device=device))

    @property
    def reached(self) -> Tensor:
        """1 for each node type that a relation leads to, else 0, [T]."""
        reached = torch.zeros(len(self.sizes), device=self.edge_index.device)
        reached[[target for _, target in self.ends]] = 1.0
        return reached

    @property
    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Names of the types, as `HeteroData.metadata()` returns them."""
        edge_types = [(f"t{source}", f"r{i}", f"t{target}") for i, (source, target) in enumerate(self.ends)]
        return [f"t{i}" for i in range(len(self.sizes))], edge_types

    def edge_index_dict(self) -> dict[tuple[str, str, str], Tensor]:
        """Edges [2, E_r] of each relation, numbered inside their types."""
        first = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        order = self.edge_type.argsort(stable=True)
        counts = self.edge_type.bincount(minlength=self.num_relations).tolist()
        parts = self.edge_index[:, order].split(counts, dim=1)
        return {
            name: part - part.new_tensor([[first[source]], [first[target]]])
            for name, part, (source, target) in zip(self.metadata[1], parts, self.ends)
        }


@dataclass(frozen=True)
class RelationalLayer:
    """One layer of the family.

    Attributes:
        title: Its name in tables and figures.
        conv: Its class.
        shapes: (width, heads, relations, node types) -> shapes of its parameters by kind.
        module: (namespace, class name, case, edges) -> the module.
        parameters: (inputs, edges) -> the module's parameters by their names.
        plain: (edge_index, num_dst, inputs, heads) -> the output in plain torch.
        is_hetero: Whether it takes dicts by types.
        has_kink: Whether a function without a derivative at 0 follows products.
    """

    title: str
    conv: str
    shapes: Callable[[int, int, int, int], Shapes]
    module: Callable[[Any, str, Any, CaseEdges], nn.Module]
    parameters: Callable[[Inputs, CaseEdges], Inputs]
    plain: Callable[[Tensor, int, Inputs, int], Tensor]
    is_hetero: bool = False
    has_kink: bool = False


def counts_of(group: Tensor) -> Tensor:
    """The size of the group of each position."""
    _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
    return counts[inverse]


def _by_type(x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
    """Each row of x times the weight of its type, one type at a time; the rows stay in their order."""
    order, counts = kind.argsort(stable=True), kind.bincount(minlength=len(weight)).tolist()
    parts = [part @ weight[i] for i, part in enumerate(x[order].split(counts)) if counts[i]]
    if not parts:
        return x.new_zeros(0, *(x[:0] @ weight[0]).shape[1:]) + 0 * weight.sum()
    return torch.cat(parts)[order.argsort()]


def _softmax(logits: Tensor, target: Tensor, num_dst: int) -> Tensor:
    """Softmax of the rows [E, H] that share a target."""
    index = target[:, None].expand_as(logits)
    most = logits.new_zeros(num_dst, logits.size(1)).scatter_reduce(
        0, index, logits.detach(), "amax", include_self=False
    )
    exp = (logits - most[target]).exp()
    return exp / (exp.new_zeros(most.shape).index_add(0, target, exp) + EPSILON)[target]


def plain_rgcn(edge_index: Tensor, num_dst: int, inputs: Inputs, heads: int) -> Tensor:
    """W_0 x_i + b + the sum over relations of the mean of W_r x_j, by explicit pairs of target and relation."""
    source, target = edge_index
    kind, weight = inputs["edge_type"], inputs["weight"]
    share = counts_of(target * len(weight) + kind).to(weight.dtype).reciprocal()
    messages = _by_type(inputs["x"][source], weight, kind) * share[:, None]
    out = inputs["x_dst"] @ inputs["root"] + inputs["bias"]
    return out.index_add(0, target, messages)


def plain_rgat(edge_index: Tensor, num_dst: int, inputs: Inputs, heads: int) -> Tensor:
    """Sums of W_r x_j with additive attention over all relations of a target."""
    source, target = edge_index
    kind, weight = inputs["edge_type"], inputs["weight"]
    z, query = (_by_type(x, weight, kind) for x in (inputs["x"][source], inputs["x_dst"][target]))
    alpha = _softmax(F.leaky_relu(query @ inputs["q"] + z @ inputs["k"], 0.2), target, num_dst)
    messages = (alpha[:, :, None] * z.unflatten(1, (heads, -1))).flatten(1)
    return inputs["bias"].expand(num_dst, -1).clone().index_add(0, target, messages)


def plain_hgt(edge_index: Tensor, num_dst: int, inputs: Inputs, heads: int) -> Tensor:
    """The heterogeneous graph transformer; nodes of types that no relation leads to have no output, 0 here."""
    source, target = edge_index
    kind, x, x_dst = inputs["edge_type"], inputs["x"], inputs["x_dst"]
    size = x.size(1)
    node_type, target_type = inputs["node_type"], inputs["target_type"]

    def projected(x: Tensor, types: Tensor, part: int) -> Tensor:
        columns = slice(part * size, (part + 1) * size)
        weight, bias = inputs["kqv_weight"][:, columns], inputs["kqv_bias"][:, columns]
        return (_by_type(x, weight.mT, types) + bias[types]).unflatten(1, (heads, -1))

    def related(rows: Tensor, weight: Tensor) -> Tensor:
        weight = weight.unflatten(0, (heads, -1))
        return torch.stack([_by_type(rows[:, h], weight[h], kind) for h in range(heads)], dim=1)

    key = related(projected(x, node_type, 0)[source], inputs["k_rel"])
    value = related(projected(x, node_type, 2)[source], inputs["v_rel"])
    query = projected(x_dst, target_type, 1)[target]
    logits = (query * key).sum(-1) * inputs["p_rel"][kind] / sqrt(size // heads)
    messages = (_softmax(logits, target, num_dst)[:, :, None] * value).flatten(1)
    total = x.new_zeros(num_dst, size).index_add(0, target, messages)
    out = _by_type(F.gelu(total), inputs["out_weight"].mT, target_type) + inputs["out_bias"][target_type]
    skip = inputs["skip"][target_type].sigmoid()
    return (skip * out + (1 - skip) * x_dst) * inputs["reached"][target_type, None]


def _rgcn_shapes(width: int, heads: int, relations: int, types: int) -> Shapes:
    return {"weight": (relations, width, width), "root": (width, width), "bias": (width,)}


def _rgat_shapes(width: int, heads: int, relations: int, types: int) -> Shapes:
    return {"weight": (relations, width, width), "q": (width, heads), "k": (width, heads), "bias": (width,)}


def _hgt_shapes(width: int, heads: int, relations: int, types: int) -> Shapes:
    size = width // heads
    return {
        **{"kqv_weight": (types, 3 * width, width), "kqv_bias": (types, 3 * width)},
        **{"out_weight": (types, width, width), "out_bias": (types, width), "skip": (types, 1)},
        **{"k_rel": (heads * relations, size, size), "v_rel": (heads * relations, size, size)},
        "p_rel": (relations, heads),
    }


def _rgcn(namespace: Any, conv: str, case: RelationalCase, edges: CaseEdges) -> nn.Module:
    return getattr(namespace, conv)(case.width, case.width, edges.num_relations)  # type: ignore[no-any-return]


def _rgat(namespace: Any, conv: str, case: RelationalCase, edges: CaseEdges) -> nn.Module:
    size = case.width // case.heads
    return getattr(namespace, conv)(case.width, size, edges.num_relations, heads=case.heads)  # type: ignore[no-any-return]


def _hgt(namespace: Any, conv: str, case: RelationalCase, edges: CaseEdges) -> nn.Module:
    return getattr(namespace, conv)(case.width, case.width, edges.metadata, case.heads)  # type: ignore[no-any-return]


def _own_names(inputs: Inputs, edges: CaseEdges) -> Inputs:
    return {name: tensor for name, tensor in inputs.items() if name != "x"}


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
    "rgcn": RelationalLayer("RGCN", "RGCNConv", _rgcn_shapes, _rgcn, _own_names, plain_rgcn),
    "rgat": RelationalLayer("RGAT", "RGATConv", _rgat_shapes, _rgat, _own_names, plain_rgat, has_kink=True),
    "hgt": RelationalLayer("HGT", "HGTConv", _hgt_shapes, _hgt, _hgt_names, plain_hgt, is_hetero=True),
}


@dataclass(frozen=True)
class RelationalCase(HeadsCase):
    """One layer as wide as its input."""

    titles = {name: layer.title for name, layer in LAYERS.items()}
    family = "gemm"

    @property
    def spec(self) -> RelationalLayer:
        """Entry of the layer in :data:`LAYERS`."""
        return LAYERS[self.op]

    @property
    def target_rows_of(self) -> dict[str, str]:
        return {"x_dst": "x"}

    def shapes(self, graph: EdgeList) -> Shapes:
        """Shape of each input."""
        types = 1 if graph.node_type is None or not graph.num_dst else int(graph.node_type[-1]) + 1
        parameters = self.spec.shapes(self.width, self.heads, graph.num_relations, types)
        return {"x": (graph.num_src, self.width), **parameters}

    def roles(self, graph: EdgeList) -> dict[str, str]:
        return {name: "src" if name == "x" else "param" for name in self.shapes(graph)}

    def shape(self, name: str, graph: EdgeList) -> tuple[int, ...]:
        return self.shapes(graph)[name]

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

    def call(self, namespace: Any, edges: CaseEdges, conv: str = "") -> Call:
        """A module of a namespace as a function of the inputs."""
        spec = self.spec
        module = spec.module(namespace, conv or spec.conv, self, edges).to(edges.edge_index.device)
        if not spec.is_hetero:

            def call(inputs: Inputs) -> Tensor:
                arguments = inputs["x"], edges.edge_index, edges.edge_type
                return functional_call(module, spec.parameters(inputs, edges), arguments)  # type: ignore[no-any-return]

            return call
        edge_index_dict, types = edges.edge_index_dict(), edges.metadata[0]

        def call_hetero(inputs: Inputs) -> Tensor:
            x_dict = dict(zip(types, inputs["x"].split(edges.sizes)))
            out = functional_call(module, spec.parameters(inputs, edges), (x_dict, edge_index_dict))
            return torch.cat([out[kind] if kind in out else torch.zeros_like(x) for kind, x in x_dict.items()])

        return call_hetero

    def fused(self, graph: Graph, inputs: Inputs) -> Tensor:
        return self.call(ours, CaseEdges.of_graph(graph))(inputs)

    def plain(self, edge_index: Tensor, num_dst: int, inputs: Inputs, keep: Tensor | None) -> Tensor:
        """Return the reference output in plain torch; the inputs also hold the constants of :meth:`reference`."""
        return self.spec.plain(edge_index, num_dst, inputs, self.heads)

    def reference(
        self, graph: EdgeList, inputs: Inputs, grad_out: Tensor, keep: Tensor | None = None
    ) -> dict[str, Tensor]:
        edges = CaseEdges.of_list(graph)
        constants = {"edge_type": ("edge", edges.edge_type), "node_type": ("src", edges.node_type)}
        constants |= {"target_type": ("dst", edges.node_type), "reached": ("param", edges.reached.double())}
        roles, rows = self.roles(graph), self.target_rows_of
        return float64_reference(
            self.plain, roles, graph, inputs, grad_out, keep, target_rows_of=rows, constants=constants
        )
