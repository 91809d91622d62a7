"""The reference ops against PyG's convs with the same weights, and their gradients against finite differences."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, TransformerConv

from pyg_dfgnn.reference import attention

# Duplicate edges (0 -> 1 twice), self-loops (2 -> 2), a target without edges (4), a source without edges (3).
EDGE_INDEX = torch.tensor([[0, 0, 1, 2, 2, 4, 0, 1], [1, 1, 0, 2, 3, 1, 3, 3]])
NUM_NODES, HEADS, CHANNELS, EDGE_DIM = 5, 3, 4, 2


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def assert_equals(conv, x, edge_attr, out, weights):
    expected, (_, expected_weights) = conv(x, EDGE_INDEX, edge_attr, return_attention_weights=True)
    assert_close(out, expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("bipartite", [False, True])
def test_add_attention_equals_gat_conv(edge_dim, bipartite):
    num_src = NUM_NODES + 2 if bipartite else NUM_NODES
    conv = GATConv((6, 6), CHANNELS, heads=HEADS, edge_dim=edge_dim, add_self_loops=False, bias=False).double()
    x_src, x_dst, edge_attr = rand(num_src, 6), rand(NUM_NODES, 6), rand(EDGE_INDEX.size(1), EDGE_DIM)
    value = conv.lin_src(x_src).view(-1, HEADS, CHANNELS)
    alpha_dst = (conv.lin_dst(x_dst).view(-1, HEADS, CHANNELS) * conv.att_dst).sum(-1)
    alpha_edge = None
    if edge_dim:
        alpha_edge = (conv.lin_edge(edge_attr).view(-1, HEADS, CHANNELS) * conv.att_edge).sum(-1)
    out, weights = attention.add_attention(
        EDGE_INDEX, NUM_NODES, value, (value * conv.att_src).sum(-1), alpha_dst, alpha_edge=alpha_edge
    )
    assert_equals(conv, (x_src, x_dst), edge_attr if edge_dim else None, out.flatten(1), weights)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_gatv2_attention_equals_gatv2_conv(edge_dim):
    conv = GATv2Conv((6, 7), CHANNELS, heads=HEADS, edge_dim=edge_dim, add_self_loops=False, negative_slope=0.3)
    conv = conv.double()
    x_src, x_dst, edge_attr = rand(NUM_NODES + 2, 6), rand(NUM_NODES, 7), rand(EDGE_INDEX.size(1), EDGE_DIM)
    out, weights = attention.gatv2_attention(
        EDGE_INDEX,
        NUM_NODES,
        conv.lin_l(x_src).view(-1, HEADS, CHANNELS),
        conv.lin_r(x_dst).view(-1, HEADS, CHANNELS),
        conv.att[0],
        edge=conv.lin_edge(edge_attr).view(-1, HEADS, CHANNELS) if edge_dim else None,
        negative_slope=0.3,
    )
    assert_equals(conv, (x_src, x_dst), edge_attr if edge_dim else None, out.flatten(1) + conv.bias, weights)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
def test_dot_attention_equals_transformer_conv(edge_dim):
    conv = TransformerConv((6, 7), CHANNELS, heads=HEADS, edge_dim=edge_dim, root_weight=False).double()
    x_src, x_dst, edge_attr = rand(NUM_NODES + 2, 6), rand(NUM_NODES, 7), rand(EDGE_INDEX.size(1), EDGE_DIM)
    out, weights = attention.dot_attention(
        EDGE_INDEX,
        NUM_NODES,
        conv.lin_query(x_dst).view(-1, HEADS, CHANNELS),
        conv.lin_key(x_src).view(-1, HEADS, CHANNELS),
        conv.lin_value(x_src).view(-1, HEADS, CHANNELS),
        edge=conv.lin_edge(edge_attr).view(-1, HEADS, CHANNELS) if edge_dim else None,
    )
    assert_equals(conv, (x_src, x_dst), edge_attr if edge_dim else None, out.flatten(1), weights)


def test_cosine_attention_equals_agnn_conv():
    conv = AGNNConv(add_self_loops=False).double()
    conv.beta.data.fill_(1.7)
    x = rand(NUM_NODES, 6)
    x[1] = 0  # below the clamp of the norm
    out, _ = attention.cosine_attention(EDGE_INDEX, NUM_NODES, x.unsqueeze(1), beta=conv.beta)
    assert_close(out.squeeze(1), conv(x, EDGE_INDEX))


def test_cosine_attention_of_two_node_sets():
    x_src, x_dst = rand(NUM_NODES + 2, HEADS, CHANNELS), rand(NUM_NODES, HEADS, CHANNELS)
    out, weights = attention.cosine_attention(EDGE_INDEX, NUM_NODES, x_src, x_dst, beta=2.0)
    similarity = F.cosine_similarity(x_src[EDGE_INDEX[0]], x_dst[EDGE_INDEX[1]], dim=-1)
    into_3 = EDGE_INDEX[1] == 3
    expected = (2.0 * similarity[into_3]).softmax(dim=0)
    assert_close(weights[into_3], expected)
    assert_close(out[3], (expected.unsqueeze(-1) * x_src[EDGE_INDEX[0, into_3]]).sum(0))


def cases(keep=None):
    """Every op as (function of its tensors, tensors): the set the properties below run over."""
    num_edges = EDGE_INDEX.size(1)
    node, edge = partial(rand, NUM_NODES, HEADS, CHANNELS), partial(rand, num_edges, HEADS, CHANNELS)

    def call(op, names):
        return lambda *tensors: op(EDGE_INDEX, NUM_NODES, **dict(zip(names, tensors, strict=True)), keep=keep)

    return {
        "dot": (call(attention.dot_attention, ("query", "key", "value", "edge")), [node(), node(), node(), edge()]),
        "cosine": (call(attention.cosine_attention, ("x_src", "x_dst", "beta")), [node(), node(), rand(1)]),
        "add": (
            call(attention.add_attention, ("value", "alpha_src", "alpha_dst", "alpha_edge")),
            [node(), rand(NUM_NODES, HEADS), rand(NUM_NODES, HEADS), rand(num_edges, HEADS)],
        ),
        "gatv2": (
            call(attention.gatv2_attention, ("x_src", "x_dst", "att", "edge")),
            [node(), node(), rand(HEADS, CHANNELS), edge()],
        ),
    }


SCORES = ["dot", "cosine", "add", "gatv2"]


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gradcheck(score, dropout):
    keep = 2.0 * (torch.rand(EDGE_INDEX.size(1), HEADS) < 0.5).double() if dropout else None
    function, tensors = cases(keep)[score]
    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("score", SCORES)
def test_weights_sum_to_one_and_empty_rows_are_zero(score):
    function, tensors = cases()[score]
    out, weights = function(*tensors)
    sums = torch.zeros(NUM_NODES, HEADS, dtype=torch.float64).index_add(0, EDGE_INDEX[1], weights)
    assert_close(sums[:4], torch.ones(4, HEADS, dtype=torch.float64))
    assert (out[4] == 0).all() and (sums[4] == 0).all()


@pytest.mark.parametrize("score", SCORES)
def test_nan_stays_in_the_rows_it_reaches(score):
    function, tensors = cases()[score]
    tensors[-1 if score == "dot" else 0].select(0, 2).fill_(math.nan)
    out, _ = function(*tensors)
    # Node 2 sends to 2 and 3; in the case of dot it is edge 2, 1 -> 0.
    poisoned = torch.tensor([True, False, False, False, False] if score == "dot" else [False, False, True, True, False])
    assert torch.equal(out.isnan().flatten(1).any(1), poisoned)


@pytest.mark.parametrize("score", SCORES)
def test_dropout_factor_scales_the_weights(score):
    keep = 2.0 * (torch.rand(EDGE_INDEX.size(1), HEADS) < 0.5).double()
    torch.manual_seed(1)
    function, tensors = cases(keep)[score]
    torch.manual_seed(1)
    plain, _ = cases()[score]
    assert_close(function(*tensors)[1], plain(*tensors)[1] * keep)


def test_large_logits_stay_finite():
    value, alpha = rand(NUM_NODES, HEADS, CHANNELS), torch.full((NUM_NODES, HEADS), -1e4, dtype=torch.float64)
    out, weights = attention.add_attention(EDGE_INDEX, NUM_NODES, value, alpha, negative_slope=1.0)
    assert_close(weights[EDGE_INDEX[1] == 1], torch.full((3, HEADS), 1 / 3, dtype=torch.float64))
    assert out.isfinite().all()


@pytest.mark.parametrize("num_dst", [0, 3])
def test_no_edges(num_dst):
    empty = torch.empty(2, 0, dtype=torch.long)
    out, weights = attention.add_attention(empty, num_dst, rand(NUM_NODES, HEADS, CHANNELS), rand(NUM_NODES, HEADS))
    assert torch.equal(out, torch.zeros(num_dst, HEADS, CHANNELS, dtype=torch.float64))
    assert weights.shape == (0, HEADS)
