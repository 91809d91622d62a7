"""Coming from DGL: three of its layers beside ours, with the arguments that differ and where each parameter goes.

    python examples/from_dgl.py

DGL is not imported. `dgl_*` restate in plain PyTorch what its layers compute of a `state_dict` with its names and
shapes; ours take the same numbers, and the script prints the largest difference.

g = dgl.graph((source, target))              edge_index = torch.stack([source, target])
g = dgl.add_self_loop(g)                     edge_index, _ = torch_geometric.utils.add_self_loops(edge_index)
dgl.batch(graphs)                            torch_geometric.data.Batch.from_data_list(graphs)
layer(g, x)                                  layer(x, edge_index)
"""

import torch
from torch import Tensor
from torch_geometric.utils import scatter, softmax, to_undirected

from pyg_dfgnn.nn import GATConv, GCNConv, RGCNConv

N, IN, OUT, HEADS, RELATIONS = 50, 8, 4, 3, 5


def dgl_graph_conv(state: dict, x: Tensor, edge_index: Tensor) -> Tensor:
    """Return `dgl.nn.GraphConv(IN, OUT)(g, x)`: norm="both", which does not add self-loops."""
    source, target = edge_index
    out_degree, in_degree = (ids.bincount(minlength=N).clamp(min=1)[:, None] for ids in (source, target))
    total = scatter((x / out_degree.sqrt())[source], target, dim_size=N) / in_degree.sqrt()
    return total @ state["weight"] + state["bias"]


def dgl_gat_conv(state: dict, x: Tensor, edge_index: Tensor) -> Tensor:
    """Return `dgl.nn.GATConv(IN, OUT, HEADS)(g, x)`, of shape [N, HEADS, OUT]."""
    source, target = edge_index
    z = (x @ state["fc.weight"].t()).view(N, HEADS, OUT)
    score = (z * state["attn_l"]).sum(-1)[source] + (z * state["attn_r"]).sum(-1)[target]
    weight = softmax(torch.nn.functional.leaky_relu(score, 0.2), target, num_nodes=N)
    return scatter(weight[..., None] * z[source], target, dim_size=N) + state["bias"].view(HEADS, OUT)


def dgl_rel_graph_conv(state: dict, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    """Return `dgl.nn.RelGraphConv(IN, OUT, RELATIONS)(g, x, edge_type)`: a sum over the edges of all relations."""
    source, target = edge_index
    messages = torch.einsum("ei,eio->eo", x[source], state["linear_r.W"][edge_type])
    return scatter(messages, target, dim_size=N) + x @ state["loop_weight"] + state["h_bias"]


def main() -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(N, IN), to_undirected(torch.randint(N, (2, 150)))
    edge_type = torch.randint(RELATIONS, (edge_index.size(1),))

    # GCN: DGL adds no self-loops. It divides by degrees out and in, ours by degrees in: the same with edges both ways.
    # norm="none" is normalize=False; norm="right" is SAGEConv(IN, OUT, root_weight=False).
    graph_conv = {"weight": torch.randn(IN, OUT), "bias": torch.randn(OUT)}
    gcn = GCNConv(IN, OUT, add_self_loops=False)
    gcn.load_state_dict({"lin.weight": graph_conv["weight"].t(), "bias": graph_conv["bias"]})

    # GAT: heads are joined to [N, HEADS * OUT] unless concat=False, which takes their mean. attn_drop is dropout,
    # feat_drop and activation are steps of one's own, and allow_zero_in_degree=True is always so.
    gat_conv = {"fc.weight": torch.randn(HEADS * OUT, IN), "bias": torch.randn(HEADS * OUT)}
    gat_conv |= {"attn_l": torch.randn(1, HEADS, OUT), "attn_r": torch.randn(1, HEADS, OUT)}
    gat = GATConv(IN, OUT, heads=HEADS, negative_slope=0.2, add_self_loops=False)
    names = {"lin.weight": "fc.weight", "att_src": "attn_l", "att_dst": "attn_r", "bias": "bias"}
    gat.load_state_dict({ours: gat_conv[theirs] for ours, theirs in names.items()})

    # RGCN: ours takes the mean of each relation unless aggr="add" (norm=1/c of DGL's call is aggr="mean").
    # self_loop is root_weight; regularizer="basis", num_bases=B is num_bases=B; "bdd" is num_blocks=B.
    rel_graph_conv = {"linear_r.W": torch.randn(RELATIONS, IN, OUT), "h_bias": torch.randn(OUT)}
    rel_graph_conv |= {"loop_weight": torch.randn(IN, OUT)}
    rgcn = RGCNConv(IN, OUT, RELATIONS, aggr="add")
    names = {"weight": "linear_r.W", "root": "loop_weight", "bias": "h_bias"}
    rgcn.load_state_dict({ours: rel_graph_conv[theirs] for ours, theirs in names.items()})

    with torch.no_grad():
        pairs = {
            "GraphConv -> GCNConv": (dgl_graph_conv(graph_conv, x, edge_index), gcn(x, edge_index)),
            "GATConv -> GATConv": (dgl_gat_conv(gat_conv, x, edge_index), gat(x, edge_index).view(N, HEADS, OUT)),
            "RelGraphConv -> RGCNConv": (
                dgl_rel_graph_conv(rel_graph_conv, x, edge_index, edge_type),
                rgcn(x, edge_index, edge_type),
            ),
        }
    for name, (theirs, ours) in pairs.items():
        print(f"{name}: difference {(ours - theirs).abs().max():.1e} of values up to {theirs.abs().max():.1f}")


if __name__ == "__main__":
    main()
