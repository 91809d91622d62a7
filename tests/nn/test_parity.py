"""The fused branch of every drop-in against PyG's own conv with the same parameters: outputs, weights, gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch_geometric import EdgeIndex

from pyg_dfgnn import Graph
from tests.covering import over
from tests.nn.convs import both as build
from tests.nn.parity import (
    BIPARTITE,
    EDGES,
    FORMS,
    NUM_NODES,
    adjacency,
    as_pyg_takes,
    assert_parity,
    assert_same,
    flat,
    simple,
    sparse_tensor,
)

pytestmark = pytest.mark.usefixtures("fused_on_cpu")

HEADS, CHANNELS, EDGE_DIM, F_SRC, F_DST = 3, 4, 2, 6, 5
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
DROP_INS = (*ATTENTION, "AGNNConv")


def assert_weights_parity(convs, x, edge_index, *args, **kwargs):
    """Same returned adjacency and attention weights, of the same kinds and in the same order."""
    ours_conv, pyg_conv = convs
    kwargs["return_attention_weights"] = True
    with torch.no_grad():
        assert ours_conv._call(x, edge_index, *args, **kwargs).reasons == []
        actual = ours_conv(x, edge_index, *args, **kwargs)
        edge_index = as_pyg_takes(edge_index, pyg_conv.flow) if isinstance(edge_index, Graph) else edge_index
        expected = pyg_conv(x, edge_index, *args, **kwargs)
    assert len(actual) == len(expected) == 2
    for i, (a, b) in enumerate(zip(flat(actual), flat(expected))):
        assert_same(a, b, f"result {i}")


@over(
    [("name", "form"), ("name", "loops"), ("form", "loops")],
    # It adds no self-loops.
    lambda row: not (row["loops"] and row["name"] == "TransformerConv"),
    name=DROP_INS,
    form=tuple(FORMS),
    loops=(False, True),
    dtype=(torch.float32, torch.float64),
)
def test_every_form_of_edge_index(name, form, loops, dtype):
    if name == "TransformerConv":
        convs = build(name, F_SRC, CHANNELS, heads=HEADS, dtype=dtype)
    elif name == "AGNNConv":
        convs = build(name, add_self_loops=loops, dtype=dtype)
    else:
        convs = build(name, F_SRC, CHANNELS, heads=HEADS, add_self_loops=loops, dtype=dtype)
    x, edge_index = torch.randn(NUM_NODES, F_SRC, dtype=dtype), FORMS[form]()
    assert_parity(convs, x, edge_index)
    if name != "AGNNConv":
        assert_weights_parity(convs, x, edge_index)


OPTIONS = {
    "GATConv": {
        "mean_heads": {"concat": False},
        "no_bias": {"bias": False},
        "slope": {"negative_slope": 0.7},
        "residual": {"residual": True},
        "residual_mean": {"residual": True, "concat": False},
        "one_head": {"heads": 1},
        "target_to_source": {"flow": "target_to_source"},
        "target_to_source_no_loops": {"flow": "target_to_source", "add_self_loops": False},
    },
    "GATv2Conv": {
        "mean_heads": {"concat": False},
        "no_bias": {"bias": False},
        "slope": {"negative_slope": 0.7},
        "residual": {"residual": True},
        "residual_mean": {"residual": True, "concat": False},
        "share_weights": {"share_weights": True},
        "target_to_source": {"flow": "target_to_source"},
        "target_to_source_no_loops": {"flow": "target_to_source", "add_self_loops": False},
    },
    "TransformerConv": {
        "mean_heads": {"concat": False},
        "no_bias": {"bias": False},
        "beta": {"beta": True},
        "beta_mean": {"beta": True, "concat": False},
        "no_root": {"root_weight": False},
        "no_root_beta": {"root_weight": False, "beta": True},
        "target_to_source": {"flow": "target_to_source"},
    },
}


@over(
    [("edge_dim", "as_graph")],
    option=[(name, option) for name in OPTIONS for option in OPTIONS[name]],
    edge_dim=(None, EDGE_DIM),
    as_graph=(False, True),
)
def test_every_option(option, edge_dim, as_graph):
    name, option = option
    convs = build(name, F_SRC, CHANNELS, **{"heads": HEADS, "edge_dim": edge_dim, **OPTIONS[name][option]})
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    args = (torch.randn(EDGES.size(1), EDGE_DIM, dtype=torch.float64),) if edge_dim else ()
    edges = Graph.of(EDGES, NUM_NODES) if as_graph else EDGES
    assert_parity(convs, x, edges, *args)
    assert_weights_parity(convs, x, edges, *args)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_agnn_options(flow, requires_grad):
    convs = build("AGNNConv", requires_grad, flow=flow)
    assert_parity(convs, torch.randn(NUM_NODES, F_SRC, dtype=torch.float64), EDGES)


@over(
    [("name", "flow", "loops", "edge_dim", "as_graph")],
    name=ATTENTION,
    flow=("source_to_target", "target_to_source"),
    loops=(False, True),
    edge_dim=(None, EDGE_DIM),
    as_graph=(False, True),
)
def test_bipartite(name, flow, loops, edge_dim, as_graph):
    kwargs = {"heads": HEADS, "edge_dim": edge_dim, "flow": flow}
    if name != "TransformerConv":
        # PyG's reductions of edge features are out of bounds where there are more targets than sources.
        kwargs.update(add_self_loops=loops, fill_value=0.5, residual=True)
    convs = build(name, (F_SRC, F_DST), CHANNELS, **kwargs)
    num_src = 3
    if flow == "target_to_source" and name != "TransformerConv":
        num_src = 5  # PyG is consistent here for node sets of one size only
    x = torch.randn(num_src, F_SRC, dtype=torch.float64), torch.randn(5, F_DST, dtype=torch.float64)
    edges = BIPARTITE.flip(0) if flow == "target_to_source" else BIPARTITE
    args = (torch.randn(edges.size(1), EDGE_DIM, dtype=torch.float64),) if edge_dim else ()
    if as_graph:
        # Of TransformerConv x is a pair of source and target in either flow.
        sizes = (num_src, 5) if name == "TransformerConv" or flow == "source_to_target" else (5, num_src)
        edges = Graph.of(edges, *sizes, flow=flow)
    assert_parity(convs, x, edges, *args)
    assert_weights_parity(convs, x, edges, *args)


@pytest.mark.parametrize("form", ["coo", "csr", "edge_index", "sparse_tensor"])
@pytest.mark.parametrize("name", ATTENTION)
def test_bipartite_sparse(name, form):
    convs = build(name, (F_SRC, F_DST), CHANNELS, heads=HEADS)
    # More sources than targets: PyG's self-loops in a sparse layout are out of bounds the other way round.
    edges = simple(BIPARTITE.flip(0), 5, 3)
    if form == "edge_index":
        edge_index = EdgeIndex(edges, sparse_size=(5, 3))
    elif form == "sparse_tensor":
        edge_index = sparse_tensor(edges, 5, 3)
    else:
        edge_index = adjacency(edges, form, 5, 3)
    x = torch.randn(5, F_SRC, dtype=torch.float64), torch.randn(3, F_DST, dtype=torch.float64)
    assert_parity(convs, x, edge_index)
    assert_weights_parity(convs, x, edge_index)


@pytest.mark.parametrize("loops", [False, True])
def test_gat_without_target_features(loops):
    convs = build("GATConv", (F_SRC, F_DST), CHANNELS, heads=HEADS, add_self_loops=loops)
    x = torch.randn(5, F_SRC, dtype=torch.float64)
    flipped = BIPARTITE.flip(0)
    for num_dst in (3, 5):
        assert_parity(convs, (x, None), flipped, None, (5, num_dst))
        assert_weights_parity(convs, (x, None), flipped, size=(5, num_dst))
    assert_parity(convs, (x, None), flipped)
    assert_parity(convs, (x, None), adjacency(simple(flipped, 5, 3), "csr", 5, 3))


def test_gat_with_size():
    convs = build("GATConv", F_SRC, CHANNELS, heads=HEADS, edge_dim=EDGE_DIM)
    edge_attr = torch.randn(EDGES.size(1), EDGE_DIM, dtype=torch.float64)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, EDGES, edge_attr, (NUM_NODES, NUM_NODES))


def test_gat_shared_transformation_of_a_pair():
    convs = build("GATConv", F_SRC, CHANNELS, heads=HEADS)
    x = torch.randn(3, F_SRC, dtype=torch.float64), torch.randn(5, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, BIPARTITE)


def test_gat_pair_of_transformations_on_one_node_set():
    convs = build("GATConv", (F_SRC, F_SRC), CHANNELS, heads=HEADS)
    assert_parity(convs, torch.randn(NUM_NODES, F_SRC, dtype=torch.float64), EDGES)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_reduced_features_of_loops_between_two_node_sets(name):
    """PyG's own reduction is out of bounds with more targets than sources: padding the sources asks the same of it."""
    convs = build(name, (F_SRC, F_DST), CHANNELS, heads=HEADS, edge_dim=EDGE_DIM)
    x_src, x_dst = torch.randn(3, F_SRC, dtype=torch.float64), torch.randn(5, F_DST, dtype=torch.float64)
    edge_attr = torch.randn(BIPARTITE.size(1), EDGE_DIM, dtype=torch.float64)
    out = convs[0]((x_src, x_dst), BIPARTITE, edge_attr)
    padded = convs[1]((torch.cat([x_src, torch.zeros(2, F_SRC, dtype=torch.float64)]), x_dst), BIPARTITE, edge_attr)
    # Targets 3 and 4 get loops from the padding, the others have the same edges in both calls.
    assert_same(out[:3].detach(), padded[:3].detach(), "out")


FILL_VALUES = {
    "number": 0.5,
    "int": 2,
    "vector": torch.tensor([0.3, -1.2]),
    "row": torch.tensor([[0.3, -1.2]]),
    **{reduce: reduce for reduce in ("mean", "add", "min", "max", "mul")},
}


@over(
    [("name", "fill"), ("name", "form")],
    name=("GATConv", "GATv2Conv"),
    fill=tuple(FILL_VALUES),
    form=("tensor", "int32", "edge_index", "edge_index_by_col", "graph"),
)
def test_fill_value_of_self_loops(name, fill, form):
    convs = build(name, F_SRC, CHANNELS, heads=HEADS, edge_dim=EDGE_DIM, fill_value=FILL_VALUES[fill])
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    # Distinct values: among ties PyG and we share one scatter, but a test of ties belongs there.
    edge_attr = torch.randn(EDGES.size(1), EDGE_DIM, dtype=torch.float64)
    assert_parity(convs, x, FORMS[form](), edge_attr)
    assert_weights_parity(convs, x, FORMS[form](), edge_attr)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_edge_weights_of_one_dimension(name):
    convs = build(name, F_SRC, CHANNELS, heads=HEADS, edge_dim=1)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, EDGES, torch.randn(EDGES.size(1), dtype=torch.float64))


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_edge_features_of_a_sparse_adjacency(name, explicit, layout):
    """As an argument in the order of the adjacency, or as its values."""
    kwargs = {} if name == "TransformerConv" else {"add_self_loops": False}
    convs = build(name, F_SRC, CHANNELS, heads=HEADS, edge_dim=EDGE_DIM, **kwargs)
    edges = simple(EDGES)
    features = torch.randn(edges.size(1), EDGE_DIM, dtype=torch.float64)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    if explicit:
        assert_parity(convs, x, adjacency(edges, layout), features)
        assert_weights_parity(convs, x, adjacency(edges, layout), features)
    else:
        assert_parity(convs, x, adjacency(edges, layout, values=features))


@pytest.mark.parametrize("name", ATTENTION)
def test_edge_features_of_a_sparse_tensor(name):
    kwargs = {} if name == "TransformerConv" else {"add_self_loops": False}
    convs = build(name, F_SRC, CHANNELS, heads=HEADS, edge_dim=EDGE_DIM, **kwargs)
    edges = simple(EDGES)
    features = torch.randn(edges.size(1), EDGE_DIM, dtype=torch.float64)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, sparse_tensor(edges, value=features))
    assert_weights_parity(convs, x, sparse_tensor(edges, value=features))


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("value", [None, torch.rand(simple(EDGES).size(1))], ids=["none", "weights"])
def test_a_sparse_tensor_with_edge_dim_and_self_loops_is_refused(name, value):
    for conv in build(name, F_SRC, CHANNELS, edge_dim=1):
        with pytest.raises(NotImplementedError, match="SparseTensor"):
            conv(torch.randn(NUM_NODES, F_SRC).double(), sparse_tensor(simple(EDGES), value=value))


def test_values_of_one_dimension_are_no_edge_features():
    convs = build("GATConv", F_SRC, CHANNELS, heads=HEADS, edge_dim=1)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, adjacency(simple(EDGES), "coo", values=torch.rand(simple(EDGES).size(1))))


@pytest.mark.parametrize("value", [None, False])
def test_which_flags_ask_for_weights(value):
    """GATConv goes by the truth of the flag, TransformerConv by its type."""
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    with torch.no_grad():
        for name in ATTENTION:
            convs = build(name, F_SRC, CHANNELS)
            kinds = [type(conv(x, EDGES, return_attention_weights=value)) for conv in convs]
            assert kinds[0] is kinds[1]


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_returned_adjacency_is_the_users(name):
    """Writing to what the conv returns must not reach the cached graph."""
    conv, _ = build(name, F_SRC, CHANNELS)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    with torch.no_grad():
        before, (edge_index, _) = conv(x, EDGES, return_attention_weights=True)
        edge_index.zero_()
        torch.testing.assert_close(conv(x, EDGES), before)


@pytest.mark.parametrize("name", ATTENTION)
def test_dropout(name):
    """Dropped weights are zero, the others are scaled; evaluation drops nothing."""
    conv, pyg_conv = build(name, F_SRC, CHANNELS, heads=64, dropout=0.5)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.float64)
    conv.eval(), pyg_conv.eval()
    assert_same(conv(x, EDGES).detach(), pyg_conv(x, EDGES).detach(), "out")
    conv.train()
    outs = [conv(x, EDGES).detach() for _ in range(2)]
    assert not torch.equal(*outs)
    torch.manual_seed(3)
    first = conv(x, EDGES).detach()
    torch.manual_seed(3)
    assert torch.equal(first, conv(x, EDGES).detach())
    if name != "TransformerConv":
        with torch.no_grad():
            _, (_, kept) = conv(x, EDGES, return_attention_weights=True)
            _, (_, full) = conv.eval()(x, EDGES, return_attention_weights=True)
        dropped = kept == 0
        assert 0.4 < dropped.double().mean() < 0.6
        torch.testing.assert_close(kept[~dropped], 2 * full[~dropped])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTENTION)
def test_dropping_everything(name, dtype):
    convs = build(name, F_SRC, CHANNELS, heads=HEADS, dropout=1.0, dtype=dtype)
    assert_parity(convs, torch.randn(NUM_NODES, F_SRC, dtype=dtype), EDGES)


def test_frozen_parameters_and_constant_inputs():
    for name in DROP_INS:
        conv, _ = build(name, *((F_SRC, CHANNELS) if name != "AGNNConv" else ()))
        conv.requires_grad_(False)
        assert not conv(torch.randn(NUM_NODES, F_SRC, dtype=torch.float64), EDGES).requires_grad


@pytest.mark.parametrize("name", DROP_INS)
def test_no_nodes(name):
    convs = build(name, *((F_SRC, CHANNELS) if name != "AGNNConv" else ()))
    x = torch.randn(0, F_SRC, dtype=torch.float64)
    assert_parity(convs, x, torch.empty(2, 0, dtype=torch.long))


@pytest.mark.parametrize("name", DROP_INS)
def test_autocast_gives_the_dtype_of_pyg(name):
    convs = build(name, *((F_SRC, CHANNELS) if name != "AGNNConv" else ()), dtype=torch.float32)
    x = torch.randn(NUM_NODES, F_SRC)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = convs[0](x, EDGES), convs[1](x, EDGES)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", DROP_INS)
def test_half_features_with_wider_parameters(name):
    """A module that the user has left in float32 while its input is bfloat16."""
    if name != "AGNNConv":
        pytest.skip("a linear layer refuses mixed dtypes")
    convs = build(name, dtype=torch.float32)
    x = torch.randn(NUM_NODES, F_SRC, dtype=torch.bfloat16)
    assert convs[0](x, EDGES).dtype == convs[1](x, EDGES).dtype


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "backward_pre", "global", "replaced"])
def test_hooks_of_the_edge_transformation_are_called(kind):
    conv, _ = build("GATConv", F_SRC, CHANNELS, edge_dim=EDGE_DIM)
    x, edge_attr = torch.randn(NUM_NODES, F_SRC).double(), torch.randn(EDGES.size(1), EDGE_DIM).double()
    plain = conv(x, EDGES, edge_attr)
    seen, lin = [], conv.lin_edge

    def hook(*_):
        seen.append(1)

    if kind == "global":
        handle = register_module_forward_hook(lambda module, *_: hook() if module is lin else None)
    elif kind == "replaced":
        forward = lin.forward
        lin.forward = lambda edge_attr: hook() or forward(edge_attr)
        handle = nullcontext()
    else:
        register = {"backward": "full_backward", "backward_pre": "full_backward_pre"}.get(kind, kind)
        handle = getattr(lin, f"register_{register}_hook")(hook)
    with handle:
        out = conv(x, EDGES, edge_attr)
        out.sum().backward()
    torch.testing.assert_close(out, plain)
    assert len(seen) == 1
