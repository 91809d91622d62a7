"""The programs of RGCN, RGAT and HGT equal PyG's layers in float64, in outputs and all gradients."""

import torch
from torch import Tensor
from torch_geometric.nn import FastRGCNConv, HGTConv, RGATConv, RGCNConv

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import IndexSpace, interpret
from pyg_dfgnn.ir.layers import hgt, rgat, rgcn_bases, rgcn_mean, rgcn_sum
from pyg_dfgnn.ir.passes import optimise
from pyg_dfgnn.ir.trace import Relational
from pyg_dfgnn.reference.tolerances import elementwise
from tests.covering import over
from tests.ir.cases import GRAPHS, TYPES, rows_named

WHERE = {"graph": tuple(GRAPHS), "is_optimised": (False, True)}


def run(traced: Relational, graph: str, is_optimised: bool, **inputs: Tensor) -> dict[str, Tensor]:
    """Interpret a layer as traced or after all passes."""
    shapes = {n: tuple(x.shape[traced.domains[n].value != "1" :]) for n, x in inputs.items()}
    program = traced.program(**shapes)
    if is_optimised:
        program = optimise(program, rows_named(graph).sizes)[-1].program
    return interpret(program, rows_named(graph), inputs)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def compare(conv: torch.nn.Module, leaves: dict[str, Tensor], got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare outputs and, for random upstream gradients, the gradients of inputs and of all parameters."""
    leaves = {**leaves, **dict(conv.named_parameters())}
    assert got.keys() == want.keys()
    gradients = []
    for outputs in (got, want):
        upstream = [
            torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3)) for y in want.values()
        ]
        used = [(outputs[name], g) for name, g in zip(want, upstream) if outputs[name].requires_grad]
        pulled = torch.autograd.grad(
            [y for y, _ in used], list(leaves.values()), [g for _, g in used], allow_unused=True
        )
        gradients.append([torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), pulled)])
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], **elementwise("float64"), msg=lambda text, n=name: f"{n}: {text}"
        )
    for name, mine, theirs in zip(leaves, *gradients):
        torch.testing.assert_close(mine, theirs, **elementwise("float64"), msg=lambda text, n=name: f"d_{n}: {text}")


@over(
    [(*WHERE,), ("conv_class", "aggr", "num_bases", "is_optimised")],
    **WHERE,
    conv_class=(RGCNConv, FastRGCNConv),
    aggr=("mean", "sum"),
    num_bases=(None, 3),
)
def test_rgcn(graph, is_optimised, conv_class, aggr, num_bases):
    edges = GRAPHS[graph]
    torch.manual_seed(1)
    conv = conv_class(6, 4, edges.num_relations, num_bases=num_bases, aggr=aggr).double()
    x = draw(edges.num_src, 6)
    want = conv(x, edges.edge_index, edges.edge_type)
    if num_bases is None:
        layer = rgcn_mean if aggr == "mean" else rgcn_sum
        out = run(layer, graph, is_optimised, x=x, weight=conv.weight)["out"]
    elif aggr == "mean":
        out = run(rgcn_bases, graph, is_optimised, x=x, basis=conv.weight, comp=conv.comp)["out"]
    else:
        weight = torch.einsum("rb,bkn->rkn", conv.comp, conv.weight)
        out = run(rgcn_sum, graph, is_optimised, x=x, weight=weight)["out"]
    compare(conv, {"x": x}, {"out": out + x @ conv.root + conv.bias}, {"out": want})


MODES = (("additive-self-attention", 1, 1), ("additive-self-attention", 3, 1), ("multiplicative-self-attention", 2, 2))


@over(
    [(*WHERE,), ("mechanism", "mode", "is_optimised")],
    **WHERE,
    mechanism=("across-relation", "within-relation"),
    mode=MODES,
)
def test_rgat(graph, is_optimised, mechanism, mode):
    mode, heads, dim = mode
    edges = GRAPHS[graph]
    torch.manual_seed(1)
    conv = RGATConv(
        6, 4, edges.num_relations, heads=heads, dim=dim, attention_mode=mode, attention_mechanism=mechanism
    ).double()
    # PyG leaves what this mode does not use without values.
    torch.nn.init.ones_(conv.l2)
    x = draw(edges.num_src, 6)
    want, (_, alpha) = conv(x, edges.edge_index, edges.edge_type, return_attention_weights=True)
    layer = rgat(heads, mode, mechanism)
    results = run(layer, graph, is_optimised, x=x, xd=x, weight=conv.weight, q=conv.q, k=conv.k)
    compare(
        conv, {"x": x}, {"out": results["out"] + conv.bias, "alpha": results["alpha"]}, {"out": want, "alpha": alpha}
    )


@over([(*WHERE,)], **WHERE, heads=(1, 4))
def test_hgt(graph, is_optimised, heads):
    """The graph's nodes are typed in turn, and each of its relations is split by the types of its ends."""
    edges = GRAPHS[graph]
    names = [f"t{t}" for t in range(TYPES)]
    metadata, edge_index_dict, relations = _split(edges, names)
    torch.manual_seed(1)
    conv = HGTConv(8, 8, (names, metadata), heads=heads).double()
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = draw(edges.num_src, 8)
    x_dict = {name: x[t::TYPES] for t, name in enumerate(names)}
    want = conv(x_dict, edge_index_dict)
    out = _hgt(conv, x, names, metadata, edges, relations, heads, is_optimised)
    got = {}
    for t, name in enumerate(names):
        if name in conv.dst_node_types:
            share = conv.skip[name].sigmoid()
            got[name] = (
                share * conv.out_lin.lins[name](torch.nn.functional.gelu(out[t::TYPES])) + (1 - share) * x_dict[name]
            )
    compare(conv, {"x": x}, got, want)


def _split(edges, names):
    """Edge types of the splits, edges by local numbers, and the relation of each edge among all splits."""
    source, target = edges.edge_index
    key = (edges.edge_type * TYPES + source % TYPES) * TYPES + target % TYPES
    # An edge type without edges comes last; it also makes a type of targets where there is no edge.
    present = [*key.unique().tolist(), edges.num_relations * TYPES * TYPES]
    metadata, edge_index_dict = [], {}
    for number in present:
        relation, s, t = number // TYPES**2, number // TYPES % TYPES, number % TYPES
        edge_type = names[s], f"r{relation}", names[t]
        metadata.append(edge_type)
        edge_index_dict[edge_type] = edges.edge_index[:, key == number] // TYPES
    return metadata, edge_index_dict, torch.bucketize(key, torch.tensor(present))


def _hgt(conv, x, names, metadata, edges, relations, heads, is_optimised):
    """The interpreted message passing of a PyG layer on the graph with split relations."""
    kqv = [
        torch.stack([getattr(conv.kqv_lin.lins[n], part) for n in names]).tensor_split(3, 1)
        for part in ("weight", "bias")
    ]
    (wk, wq, wv), (bk, bq, bv) = [w.transpose(1, 2) for w in kqv[0]], kqv[1]
    key, value = (
        lin.weight.view(heads, len(metadata), 8 // heads, 8 // heads).transpose(0, 1)
        for lin in (conv.k_rel, conv.v_rel)
    )
    scale = torch.cat([conv.p_rel["__".join(edge_type)] for edge_type in metadata])
    types = torch.arange(edges.num_src) % TYPES
    graph = Graph.of(edges.edge_index, edges.num_src, edge_type=relations, num_relations=len(metadata))
    rows = IndexSpace(graph, source_type=types, target_type=types, num_types=TYPES)
    inputs = dict(x=x, xd=x, wk=wk, bk=bk, wq=wq, bq=bq, wv=wv, bv=bv, key=key, value=value, scale=scale)
    program = hgt(heads).program(**{name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()})
    if is_optimised:
        program = optimise(program, rows.sizes)[-1].program
    return interpret(program, rows, inputs)["out"]
