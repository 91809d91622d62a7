"""Graphs with relations and node types, and the programs that every pass is tested on."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import (
    D,
    E,
    IndexSpace,
    One,
    R,
    S,
    U,
    V,
    concat,
    dot,
    max_to,
    mean_to,
    relational,
    softmax,
    sum_to,
    to,
)
from pyg_dfgnn.ir.layers import hgt, hgt_features, rgat, rgcn_bases, rgcn_mean, rgcn_sum
from pyg_dfgnn.ir.program import Program
from pyg_dfgnn.ir.trace import Var
from pyg_dfgnn.reference.zoo import EdgeList, edges, hub, many_relations, random

TYPES = 3


def _typed(graph: EdgeList, num_relations: int, seed: int = 1) -> EdgeList:
    """The graph with random relations, the last of which has no edges where there is more than one."""
    generator = torch.Generator().manual_seed(seed)
    used = max(num_relations - 1, 1)
    types = torch.randint(used, (graph.num_edges,), generator=generator)
    return replace(graph, name=f"{graph.name}-R{num_relations}", edge_type=types, num_relations=num_relations)


def _repeated(graph: EdgeList) -> EdgeList:
    assert graph.edge_type is not None
    return replace(
        graph, name="duplicates", edge_index=graph.edge_index.repeat(1, 3), edge_type=graph.edge_type.repeat(3)
    )


GRAPHS = {
    graph.name: graph
    for graph in (
        many_relations(40, 12, 150),
        replace(many_relations(12, 5, 300), name="dense"),
        many_relations(30, 1000, 200),
        _typed(edges("no-edges", [], 4), 3),
        _typed(edges("isolated", [(1, 3), (3, 1), (3, 6)], 9), 4),
        _typed(random(10, 10, 30, name="one"), 1),
        _repeated(_typed(random(8, 8, 20), 3)),
        _typed(edges("loop", [(0, 0)], 1), 2),
    )
}

"""Graphs whose sources are their targets."""
ALL_GRAPHS = {
    **GRAPHS,
    "bipartite": _typed(random(9, 5, 40, name="bipartite"), 4),
    "no-targets": _typed(edges("no-targets", [], 3, 0), 2),
    "hub": _typed(hub(60), 3),
}


def graph_of(edge_list: EdgeList) -> Graph:
    assert edge_list.edge_type is not None
    return Graph.of(
        edge_list.edge_index,
        edge_list.num_src,
        edge_list.num_dst,
        edge_type=edge_list.edge_type,
        num_relations=edge_list.num_relations,
    )


def rows_of(edge_list: EdgeList) -> IndexSpace:
    types = [torch.arange(n) % TYPES for n in (edge_list.num_src, edge_list.num_dst)]
    return IndexSpace(graph_of(edge_list), source_type=types[0], target_type=types[1], num_types=TYPES)


@relational
def film(x: S, xd: D, weight: R, gamma: R, beta: R):
    """A sum over relations of means of relu(gamma W x + beta), with gamma and beta by (target, relation)."""
    scaled = (xd @ gamma) * (x @ weight) + xd @ beta
    return sum_to(D, mean_to(V, scaled.apply("relu")), over=V)


@relational
def gatv2(x: S, xd: D, edge: E, w: One, wd: One, we: One, att: One):
    """One relation, edge features, and a softmax per channel group."""
    hidden = (x @ w + xd @ wd + edge @ we).apply("leaky_relu", attrs=(0.2,)).view(2, 3)
    alpha = softmax(dot(hidden, att), among=D)
    return {"out": sum_to(D, alpha[..., None] * (x @ w).view(2, 3)), "alpha": alpha}


@relational
def logits(x: S, xd: D, weight: R, att: R):
    """Products in a row, which can be reordered, and an unused and a repeated one."""
    _ = x @ weight
    source, target = dot(x @ weight, att), dot(xd @ weight, att)
    return softmax(source + target, among=V)


@relational
def pairs(x: S, xd: D, weight: One):
    """What a user writes on edges: a map of joined gathered rows, and its largest value."""
    joined = concat(to(E, x), to(E, xd))
    shares = (joined - joined.emit("amax").view(1)).apply("exp")
    outputs = {"out": max_to(D, joined @ weight), "mean": mean_to(D, to(U, x) * 2.0), "x": to(E, x)}
    return {**outputs, "shares": sum_to(D, shares)}


@relational
def joined_heads(x: S, xd: D, gate: One):
    """A softmax over the heads of an edge, and what its heads make together: channels, and one number."""
    heads, channels = gate.shape
    rows = x.view(heads, channels)
    share = dot(rows, gate) + xd
    share = (share - share.emit("amax").view(1)).apply("exp")
    weighted = rows * (share / share.emit("fold", attrs=((1,),)))[..., None]
    mixed, total = weighted.emit("fold", attrs=((channels,),)), weighted.emit("fold", attrs=((),))
    return {"most": max_to(D, mixed * total.view(1)), "sum": sum_to(D, mixed.view(1, channels)), "total": total}


@relational
def edge_maps(x: S, xd: D, pos: S, posd: D, edge: E, w: One, wp: One, gate: One):
    """Maps of short rows of edges, given and computed, to wide ones, and of wide ones to a number per head."""
    heads = gate.shape[-1]
    near = (posd - pos) * 0.5
    hidden = (x + xd + edge @ w).apply("tanh") + near @ wp
    alpha = softmax(hidden @ gate, among=D).view(heads, 1)
    rows = (hidden.view(heads, -1) + x.view(heads, -1)).apply("leaky_relu", attrs=(0.1,))
    return {"out": sum_to(D, alpha * rows), "most": max_to(D, hidden)}


@relational
def queries(q: D, k: S, x: S):
    """Attention of two heads whose queries and keys have another width than what they weight."""
    alpha = softmax(dot(q.view(2, -1), k.view(2, -1)), among=D)
    return sum_to(D, (alpha[..., None] * x.view(2, -1)).view(-1))


@relational
def gaussians(x: S, edge: E, mu: One, sigma: One):
    """Parts of the source, each weighted by a Gaussian of the coordinates of an edge."""
    kernels, size = mu.shape
    far = (edge.view(1, size) - mu) ** 2 * -0.5 / (sigma**2 + 1.0)
    weight = far.emit("fold", attrs=((kernels, 1),)).apply("exp")
    parts = x.view(kernels, -1) * weight
    return sum_to(D, parts.emit("fold", attrs=((1, parts.shape[-1]),)).view(-1))


@relational
def typed_gaussians(x: S, edge: E, mu: R):
    """Parts of the source, each weighted by a Gaussian of the coordinates of an edge, around a centre per relation."""
    kernels, size = mu.shape
    weight = ((edge.view(1, size) - mu) ** 2 * -0.5).emit("fold", attrs=((kernels, 1),)).apply("exp")
    parts = x.view(kernels, -1) * weight
    return sum_to(D, parts.emit("fold", attrs=((1, parts.shape[-1]),)).view(-1))


@relational
def many_gaussians(x: S, edge: E, mu: One, sigma: One, g: One):
    """A matrix per edge, each number of which is a sum of Gaussians of the coordinates of the edge, on the source."""
    features, channels, kernels, size = mu.shape
    far = (edge.view(1, 1, 1, size) - mu) ** 2 * -0.5 / (sigma**2 + 1.0)
    weight = far.emit("fold", attrs=((features, channels, kernels, 1),)).apply("exp").view(features, channels, kernels)
    matrix = (weight * g).emit("fold", attrs=((features, channels, 1),)).view(features, channels)
    product = x.view(features, 1) * matrix
    return sum_to(D, product.emit("fold", attrs=((1, channels),)).view(-1))


POINTWISE_CHAIN = "sigmoid tanh gelu silu softplus elu relu abs exp sin cos erf neg atan asinh".split()


@relational
def pointwise(x: S, e: E):
    """Every pointwise function."""
    y = x.apply("softplus") + e * e
    out = (y + 1.0).apply("log") + (y + 0.5).apply("sqrt") + y**3 - 2.0 / (y * y + 1.0)
    for name in POINTWISE_CHAIN:
        out = out + (x - e).apply(name)
    out = out + x.apply("maximum", e) + x.emit("detach") * e
    positive = x.apply("greater", e)
    out = out + positive.apply("where", x * e, e - x) + x.apply("clamp", attrs=(-0.5, 0.5))
    return sum_to(D, out.permute(0).view(2, 2))


def part(x: Var, begin: int, end: int) -> Var:
    return x.emit("slice", attrs=(begin, end))


@relational
def thirds(x: S, vectors: S, edge: E, unit: E):
    """Numbers and vectors of an edge, each of a third of a product of rows (PaiNN)."""
    rows, width = edge * x, edge.shape[-1] // 3
    scalar, along, of_vectors = (part(rows, k * width, (k + 1) * width) for k in range(3))
    moved = vectors * of_vectors.view(1, width) + along.view(1, width) * unit.view(3, 1)
    return {"out": sum_to(D, scalar), "vectors": sum_to(D, moved)}


@relational
def overlapping(x: S, xd: D, edge: E):
    """Ranges of a row that share numbers, and leave some at both ends, which the row as a whole has too."""
    rows, size = edge.apply("tanh") * x + xd, edge.shape[-1]
    first, second = part(rows, 1, size - 2), part(rows, 2, size - 1)
    return {"out": sum_to(D, first * second.apply("sigmoid")), "most": max_to(D, rows * edge)}


@relational
def apart(x: S, edge: E):
    """Ranges of a row with a rest before, between and behind them."""
    rows, width = edge.apply("sigmoid") + x, (edge.shape[-1] - 3) // 2
    return sum_to(D, part(rows, 1, 1 + width) * part(rows, 2 + width, 2 + 2 * width))


@relational
def uneven(x: S, edge: E):
    """A row in parts of several sizes, with a number left."""
    rows, size = edge * x, edge.shape[-1]
    first, second, third = part(rows, 0, size - 6), part(rows, size - 6, size - 3), part(rows, size - 3, size - 1)
    return {
        "out": sum_to(D, first.apply("tanh") * part(third, 1, 2)),
        "few": sum_to(D, third),
        "three": mean_to(D, second),
    }


@relational
def rejoined(x: S, edge: E, weight: One):
    """Halves of a row that change places, beside the row and with a bias of all."""
    rows, half = edge * x, edge.shape[-1] // 2
    turned = concat(part(rows, half, 2 * half), part(rows, 0, half))
    return sum_to(D, (turned + weight) * rows * part(edge, 0, 1))


PARTS: dict[str, Program] = {
    "thirds": thirds.program(x=(15,), vectors=(3, 5), edge=(15,), unit=(3,)),
    "thirds-64": thirds.program(x=(192,), vectors=(3, 64), edge=(192,), unit=(3,)),
    "overlapping": overlapping.program(x=(11,), xd=(11,), edge=(11,)),
    "overlapping-40": overlapping.program(x=(40,), xd=(40,), edge=(40,)),
    "apart": apart.program(x=(13,), edge=(13,)),
    "apart-70": apart.program(x=(70,), edge=(70,)),
    "uneven": uneven.program(x=(11,), edge=(11,)),
    "uneven-70": uneven.program(x=(70,), edge=(70,)),
    "rejoined": rejoined.program(x=(6,), edge=(6,), weight=(6,)),
    "rejoined-68": rejoined.program(x=(68,), edge=(68,), weight=(68,)),
}
"""Programs whose parts of rows of edges lie on no lanes before passes have pushed slices down to stored rows."""
PROGRAMS: dict[str, Program] = {
    "rgcn-mean": rgcn_mean.program(x=(6,), weight=(6, 4)),
    "rgcn-sum": rgcn_sum.program(x=(3,), weight=(3, 8)),
    "rgcn-bases": rgcn_bases.program(x=(5,), basis=(2, 5, 3), comp=(2,)),
    "hgt-1": hgt(1).program(
        x=(4,),
        xd=(4,),
        wk=(4, 6),
        bk=(6,),
        wq=(4, 6),
        bq=(6,),
        wv=(4, 6),
        bv=(6,),
        key=(1, 6, 6),
        value=(1, 6, 6),
        scale=(1,),
    ),
    "hgt-4": hgt(4).program(
        x=(5,),
        xd=(5,),
        wk=(5, 8),
        bk=(8,),
        wq=(5, 8),
        bq=(8,),
        wv=(5, 8),
        bv=(8,),
        key=(4, 2, 2),
        value=(4, 2, 2),
        scale=(4,),
    ),
    "hgt-features": hgt_features.program(
        x=(1, 4),
        xd=(1, 4),
        query=(1, 4, 4),
        query_bias=(1, 4),
        target=(1, 4),
        offset=(1,),
        value=(1, 4, 4),
        value_bias=(1, 4),
    ),
    "film": film.program(x=(4,), xd=(3,), weight=(4, 5), gamma=(3, 5), beta=(3, 5)),
    "gatv2": gatv2.program(x=(4,), xd=(3,), edge=(2,), w=(4, 6), wd=(3, 6), we=(2, 6), att=(2, 3)),
    "logits": logits.program(x=(4,), xd=(4,), weight=(4, 6), att=(6,)),
    "pairs": pairs.program(x=(3,), xd=(2,), weight=(5, 4)),
    "edge-maps": edge_maps.program(x=(8,), xd=(8,), pos=(3,), posd=(3,), edge=(5,), w=(5, 8), wp=(3, 8), gate=(8, 2)),
    "queries": queries.program(q=(6,), k=(6,), x=(10,)),
    "joined-heads": joined_heads.program(x=(15,), xd=(3,), gate=(3, 5)),
    "gaussians": gaussians.program(x=(8,), edge=(3,), mu=(2, 3), sigma=(2, 3)),
    "typed-gaussians": typed_gaussians.program(x=(8,), edge=(6,), mu=(2, 6)),
    "many-gaussians": many_gaussians.program(x=(5,), edge=(3,), mu=(5, 4, 2, 3), sigma=(5, 4, 2, 3), g=(5, 4, 2)),
    "pointwise": pointwise.program(x=(4,), e=(4,)),
}
for _mode in ("additive", "multiplicative"):
    for _mechanism in ("across", "within"):
        _traced = rgat(2, f"{_mode}-self-attention", f"{_mechanism}-relation")
        PROGRAMS[f"rgat-{_mode}-{_mechanism}"] = _traced.program(
            x=(6,),
            xd=(6,),
            weight=(6, 8),
            q=(8, 2 if _mode == "additive" else 4),
            k=(8, 2 if _mode == "additive" else 4),
        )
PROGRAMS |= {name: program for name, program in PARTS.items() if "-" not in name}


@dataclass(frozen=True)
class Case:
    """A program with a graph, inputs in float64 and the gradients of its outputs by name."""

    program: Program
    rows: IndexSpace
    inputs: dict[str, Tensor]
    upstream: dict[str, Tensor]

    def upstream_named(self, prefix: str) -> dict[str, Tensor]:
        """The gradients as inputs of the differentiated program."""
        return {prefix + name: gradient for name, gradient in self.upstream.items()}


@cache
def rows_named(name: str) -> IndexSpace:
    return rows_of(ALL_GRAPHS[name])


def case(program: Program, graph: str, seed: int = 0) -> Case:
    rows, generator = rows_named(graph), torch.Generator().manual_seed(seed)

    def draw(i: int) -> Tensor:
        value = program.values[i]
        size = () if value.domain is One else (rows.sizes[value.domain],)
        return torch.randn(*size, *value.shape, dtype=torch.float64, generator=generator)

    inputs = {name: draw(i).requires_grad_() for name, i in program.inputs.items()}
    return Case(program, rows, inputs, {name: draw(i) for name, i in program.outputs})
