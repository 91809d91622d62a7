"""Models on PyG's convolutions and on ours: same parameters, same numbers."""

import pytest
import torch
import torch_geometric.nn
from torch_geometric.nn.models.schnet import InteractionBlock

import pyg_dfgnn.nn
from pyg_dfgnn.models import (
    AGNN,
    GAT,
    GCN,
    GIN,
    GINE,
    PNA,
    SAGE,
    ContinuousFilterNet,
    GATv2,
    GraphTransformer,
    ResGatedGCN,
    TransformerStack,
)
from pyg_dfgnn.models.continuous_filter import ContinuousFilterConv
from pyg_dfgnn.reference.tolerances import elementwise

SIZES = ("hidden_channels", "heads", "layers")
MODELS = {
    "gat": (GAT, {}),
    "gat_residual": (GAT, {"layers": 3, "residual": True, "out_heads": 2}),
    "gat_batch_norm": (GAT, {"layers": 3, "norm": "batch", "dropout": 0.0}),
    "gatv2": (GATv2, {}),
    "agnn": (AGNN, {"layers": 3}),
    "gt": (GraphTransformer, {"hidden_channels": 16, "heads": 4, "layers": 2}),
    "gt_layer_norm": (
        GraphTransformer,
        {"hidden_channels": 16, "heads": 2, "layers": 2, "norm": "layer", "pe_size": 0},
    ),
    "stack": (TransformerStack, {"hidden_channels": 16, "heads": 2, "layers": 3}),
    "gat_readout": (GAT, {"readout": True, "layers": 3}),
    "gat_checkpoint": (GAT, {"layers": 3, "bias": False, "checkpoint": True}),
    "gcn": (GCN, {"hidden_channels": 8}),
    "gcn_readout": (GCN, {"hidden_channels": 8, "layers": 3, "readout": True, "bias": False}),
    "gcn_batch_norm": (GCN, {"hidden_channels": 8, "layers": 3, "norm": "batch"}),
    "sage": (SAGE, {"hidden_channels": 8, "norm": "layer", "readout": True}),
    "sage_max": (SAGE, {"hidden_channels": 8, "aggr": "max"}),
    "sage_several": (SAGE, {"hidden_channels": 8, "aggr": ("mean", "max", "std")}),
    "gin": (GIN, {"hidden_channels": 8, "train_eps": True}),
    "gine": (GINE, {"hidden_channels": 8, "edge_channels": 2}),
    "resgated": (ResGatedGCN, {"hidden_channels": 8}),
    "continuous_filter": (ContinuousFilterNet, {"hidden_channels": 8, "layers": 2}),
    "pna": (PNA, {"hidden_channels": 8, "degrees": torch.tensor([2, 3, 7, 5, 1])}),
}
STACKS = (GCN, SAGE, GIN, GINE, ResGatedGCN, PNA)


def build(name, convs, seed=0):
    model, options = MODELS[name]
    torch.manual_seed(seed)
    return model(5, 3, convs, **options)


@pytest.fixture
def inputs():
    num_nodes, num_edges = 20, 90
    edge_index = torch.randint(num_nodes - 2, (2, num_edges))
    return torch.randn(num_nodes, 5), edge_index, torch.randn(num_nodes, 2)


def call(model, inputs, **graphs):
    x, edge_index, pe = inputs
    if getattr(model, "pe_size", 0):
        graphs["pe"] = pe
    if channels := getattr(model, "edge_channels", 0):
        graphs["edge_attr"] = x[edge_index[0], :channels] - x[edge_index[1], :channels]
    return model(x, edge_index, **graphs)


def test_a_continuous_filter_is_that_of_pyg():
    theirs = InteractionBlock(hidden_channels=8, num_gaussians=6, num_filters=8, cutoff=5.0).double()
    ours = ContinuousFilterConv(8, 6).double()
    ours.load_state_dict(
        {
            "lin.weight": theirs.conv.lin1.weight,
            **{f"filter.{key}": value for key, value in theirs.mlp.state_dict().items()},
            **{f"out.0.{key}": value for key, value in theirs.conv.lin2.state_dict().items()},
            **{f"out.2.{key}": value for key, value in theirs.lin.state_dict().items()},
        }
    )
    x, edge_index = torch.randn(9, 8).double(), torch.randint(9, (2, 30))
    distance, expanded = 5 * torch.rand(30).double(), torch.randn(30, 6).double()
    cut = 0.5 * (torch.cos(distance * torch.pi / 5.0) + 1.0)
    torch.testing.assert_close(ours(x, edge_index, expanded, cut[:, None]), theirs(x, edge_index, distance, expanded))


@pytest.mark.parametrize("name", MODELS)
def test_backends_interchange(name, inputs):
    theirs, ours = build(name, torch_geometric.nn).eval(), build(name, pyg_dfgnn.nn).eval()
    left, right = theirs.state_dict(), ours.state_dict()
    assert list(left) == list(right)
    for key in left:
        assert torch.equal(left[key], right[key]), f"{key}: the same seed needs the same initialisation"

    other = build(name, torch_geometric.nn, seed=1).eval()
    ours.load_state_dict(other.state_dict(), strict=True)
    expected = call(other, inputs)
    assert expected.shape == (20, 3)
    torch.testing.assert_close(call(ours, inputs), expected)
    other.load_state_dict(build(name, pyg_dfgnn.nn).state_dict(), strict=True)
    torch.testing.assert_close(call(other, inputs), call(theirs, inputs))


@pytest.mark.parametrize("name", MODELS)
def test_every_used_parameter_gets_a_gradient(name, inputs):
    model = build(name, torch_geometric.nn)
    call(model, inputs).square().sum().backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    # PyG's TransformerConv keeps lin_skip also without a root weight.
    assert all("lin_skip" in key for key in without)


def test_gat_follows_the_formula(inputs):
    x, edge_index, _ = inputs
    model = build("gat", torch_geometric.nn).eval()
    hidden = torch.nn.functional.elu(model.convs[0](x, edge_index))
    assert hidden.shape == (20, 64)
    torch.testing.assert_close(model(x, edge_index), model.convs[1](hidden, edge_index))


def test_gat_normalises_before_each_elu(inputs):
    x, edge_index, _ = inputs
    model = build("gat_batch_norm", torch_geometric.nn)
    assert [norm.num_features for norm in model.norms] == [64, 64]
    for conv, norm in zip(model.convs, model.norms):
        hidden = conv(x, edge_index)
        expected = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + norm.eps).sqrt()
        x = torch.nn.functional.elu(expected)
    torch.testing.assert_close(model(inputs[0], edge_index), model.convs[2](x, edge_index), **elementwise("float32"))


def test_a_checkpointed_model_takes_the_same_step(inputs):
    x, edge_index, _ = inputs
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = GAT(5, 3, pyg_dfgnn.nn, layers=3, checkpoint=checkpoint)
        torch.manual_seed(1)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = model(x, edge_index)
        out.square().sum().backward()
        gradients.append(([parameter.grad for parameter in model.parameters()], len(saved)))
    (plain, count), (again, fewer) = gradients
    assert fewer < count / 3
    for expected, actual in zip(plain, again, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_checkpointed_model_refuses_batch_norm():
    with pytest.raises(ValueError, match="'checkpoint' needs False with batch normalisation"):
        GAT(5, 3, torch_geometric.nn, norm="batch", checkpoint=True)


def test_sign_of_encodings_is_flipped_only_in_training(inputs):
    x, edge_index, pe = inputs
    model = GraphTransformer(5, 3, torch_geometric.nn, hidden_channels=16, layers=1, norm="layer", pe_size=2)
    model.eval()
    signs = [torch.tensor([a, b]) for a in (1.0, -1.0) for b in (1.0, -1.0)]
    allowed = [model(x, edge_index, pe=pe * sign) for sign in signs]
    assert torch.equal(model(x, edge_index, pe=pe), allowed[0])
    model.train()
    drawn = [model(x, edge_index, pe=pe) for _ in range(40)]
    hits = {next(i for i, flipped in enumerate(allowed) if torch.allclose(out, flipped, atol=1e-6)) for out in drawn}
    assert hits == {0, 1, 2, 3}


@pytest.mark.parametrize("pe", [None, torch.zeros(20, 3)], ids=["missing", "wrong"])
def test_encoding_is_checked(inputs, pe):
    x, edge_index, _ = inputs
    passed = "None" if pe is None else r"\[20, 3\]"
    with pytest.raises(ValueError, match=rf"'pe' needs shape \[N, pe_size=2\] \(got {passed}\)"):
        build("gt", torch_geometric.nn)(x, edge_index, pe=pe)


COUNTS = [
    *((model, name) for model in (GraphTransformer, TransformerStack, GAT) for name in SIZES),
    *((model, name) for model in (AGNN, *STACKS) for name in ("hidden_channels", "layers")),
    (GAT, "out_heads"),
]
SHARE = r"a value in \[0.0, 1.0\]"
WRONG = [
    *((model, name, 0, ValueError, "a value >= 1") for model, name in COUNTS),
    *((model, name, 4.5, TypeError, "an integer") for model, name in [*COUNTS, (GraphTransformer, "pe_size")]),
    (GraphTransformer, "pe_size", -1, ValueError, "a value >= 0"),
    (GINE, "edge_channels", 0, ValueError, "a value >= 1"),
    *((model, "dropout", 1.5, ValueError, SHARE) for model in (GraphTransformer, GAT, AGNN, *STACKS)),
    (GraphTransformer, "attention_dropout", -0.1, ValueError, SHARE),
    *((model, "norm", "graph", ValueError, ".*batch.*layer.*") for model in (GAT, GraphTransformer, *STACKS)),
]


@pytest.mark.parametrize(("model", "name", "value", "error", "needed"), WRONG)
def test_wrong_arguments(model, name, value, error, needed):
    with pytest.raises(error, match=rf"'{name}' needs {needed} \(got .*{value}'?\)"):
        model(5, 3, torch_geometric.nn, **{name: value})


@pytest.mark.parametrize(
    ("model", "conv"),
    [(GAT, "GATConv"), (GATv2, "GATv2Conv"), (AGNN, "AGNNConv"), (GraphTransformer, "TransformerConv")]
    + [(TransformerStack, "TransformerConv"), (GCN, "GCNConv"), (SAGE, "SAGEConv"), (GIN, "GINConv")]
    + [(GINE, "GINEConv"), (ResGatedGCN, "ResGatedGraphConv"), (PNA, "PNAConv")],
)
def test_namespace_without_the_convolution(model, conv):
    needed = rf"'convs' needs a namespace with {conv}, as torch_geometric.nn has \(got torch_geometric\)"
    with pytest.raises(ValueError, match=needed):
        model(5, 3, torch_geometric)


def test_channels_of_heads():
    with pytest.raises(ValueError, match=r"'hidden_channels' needs a multiple of heads=3 \(got 16\)"):
        TransformerStack(5, 3, torch_geometric.nn, hidden_channels=16, heads=3)


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_a_batch_are_classified_one_by_one(inputs, name):
    x, edge_index, pe = inputs
    model = build(name, torch_geometric.nn).eval()
    alone = [
        call(model, (x, edge_index, pe), batch=torch.zeros(20, dtype=torch.long), num_graphs=1),
        call(model, (2 * x, edge_index.flip(1), pe), batch=torch.zeros(20, dtype=torch.long), num_graphs=1),
    ]
    both = (torch.cat([x, 2 * x]), torch.cat([edge_index, edge_index.flip(1) + 20], dim=1), torch.cat([pe, pe]))
    # The third graph has no nodes.
    logits = call(model, both, batch=torch.arange(2).repeat_interleave(20), num_graphs=3)
    assert logits.shape == (3, 3)
    torch.testing.assert_close(logits[:2], torch.cat(alone))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_some_nodes_are_those_rows(name, inputs):
    model = build(name, torch_geometric.nn).eval()
    nodes = torch.tensor([7, 0, 19, 7])
    torch.testing.assert_close(call(model, inputs, nodes=nodes), call(model, inputs)[nodes])


def test_a_readout_makes_all_convolutions_hidden_layers(inputs):
    x, edge_index, _ = inputs
    model = build("gcn_readout", torch_geometric.nn).eval()
    for conv in model.convs:
        x = conv(x, edge_index).relu()
    assert x.shape == (20, 8) and all(conv.bias is None for conv in model.convs)
    torch.testing.assert_close(model(inputs[0], edge_index), model.lin_out(x))


@pytest.mark.parametrize("name", ["gcn_batch_norm", "sage"])
def test_stacks_normalise_before_each_relu(name, inputs):
    x, edge_index, _ = inputs
    model = build(name, torch_geometric.nn).eval()
    for conv, norm in zip(model.convs, model.norms):
        x = norm(conv(x, edge_index)).relu()
    last = model.lin_out or (lambda hidden: model.convs[-1](hidden, edge_index))
    torch.testing.assert_close(model(inputs[0], edge_index), last(x))


def test_the_scalers_of_pna_know_the_degrees():
    degrees = torch.tensor([0, 4, 0, 4])
    model = PNA(5, 3, torch_geometric.nn, degrees=degrees)
    means = [conv.aggr_module.avg_deg_lin.item() for conv in model.convs]
    assert means == [2.0, 2.0]
    other = PNA(5, 3, torch_geometric.nn)
    other.load_state_dict(model.state_dict())
    assert other.convs[0].aggr_module.avg_deg_lin.item() == 2.0
