"""Relational layers on emulated kernels, against PyG's in float64, under an error for whatever has no kernel."""

import pytest
import torch

import pyg_dfgnn
from pyg_dfgnn.nn.conv import hgt_conv
from tests.covering import over
from tests.emu import needs_compiler
from tests.ir.cases import GRAPHS
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both
from tests.nn.relational import METADATA, WIDTHS, assert_near, cast, hetero, results_of

pytestmark = needs_compiler

EDGES = GRAPHS["relations-12"]
LAYERS = {
    "rgcn": ("RGCNConv", (8, 8, EDGES.num_relations), {}),
    "embeddings": ("RGCNConv", (EDGES.num_src, 8, EDGES.num_relations), {}),
    "film": ("FiLMConv", (8, 8, EDGES.num_relations), {}),
    "hgt": ("HGTConv", (WIDTHS, 8, METADATA), {"heads": 2}),
    "hgt_features": ("HGTConv", (8, 8, METADATA), {}),
    "typed": ("HeteroLinear", (8, 8, 5), {}),
}


def arguments(key):
    if key.startswith("hgt"):
        return hetero(width=None if key == "hgt" else 8)
    x = torch.randn(EDGES.num_src, 8, dtype=torch.float64)
    if key == "typed":
        return x, torch.arange(EDGES.num_src) % 4
    return None if key == "embeddings" else x, EDGES.edge_index, EDGES.edge_type


@pytest.mark.parametrize("key,is_compiled", [*((key, False) for key in LAYERS), ("rgcn", True), ("hgt", True)])
def test_outputs_and_gradients(key, is_compiled, monkeypatch):
    monkeypatch.setattr(hgt_conv, "_features_move_less", lambda *_: key == "hgt_features")
    name, args, kwargs = LAYERS[key]
    layer, oracle = both(name, *args, dtype=torch.float32, **kwargs)
    function, call = layer, arguments(key)
    if is_compiled:
        torch._dynamo.reset()
        function = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = {n.replace("_orig_mod.", ""): t for n, t in results_of(function, *cast(call, torch.float32)).items()}
    assert "relational_traversal" in launched and (key == "embeddings" or "segment_gemm" in launched)
    expected = results_of(oracle.double(), *cast(cast(call, torch.float32), torch.float64))
    assert list(actual) == list(expected)
    assert_near(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_film_choose_the_branch_of_float64(dtype):
    """What its ReLUs take is not rounded to 16 bits: on the wrong side of 0, a hub's whole gradient is another one."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(250, (2, 4000), generator=generator)
    edge_index[1, :1500] = 3
    edge_type = torch.randint(19, (4000,), generator=generator)
    x = torch.randn(300, 24, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    layer, oracle = both("FiLMConv", 24, 16, 20, dtype=dtype)
    for parameter in layer.parameters():
        parameter.data.mul_(0.6)
    oracle.load_state_dict(layer.state_dict())
    call = cast((x, edge_index, edge_type), dtype)
    with emulated_device(), pyg_dfgnn.local_settings(fallback="error"):
        actual = results_of(layer, *call)
    expected = results_of(oracle.double(), *cast(call, torch.float64))
    assert actual["out"].dtype is dtype
    assert_near(actual, expected, dtype)


@over(
    [("frozen", "heads_and_channels", "in_channels"), ("in_channels", "mode", "mechanism", "edge_dim")],
    frozen=((), ("weight", "att", "basis"), ("k", "bias")),
    mode=("additive", "multiplicative"),
    mechanism=("within", "across"),
    num_bases=(None, 5),
    heads_and_channels=((1, 3), (3, 54)),
    in_channels=(1, 16),
    edge_dim=(None, 3),
    concat=(False, True),
)
def test_options_of_attention_on_few_edges(
    frozen, mode, mechanism, num_bases, heads_and_channels, in_channels, edge_dim, concat
):
    """Kernels run whatever the options are and whichever gradients are asked for."""
    heads, channels = heads_and_channels
    options = {"num_bases": num_bases, "heads": heads, "edge_dim": edge_dim, "concat": concat}
    options |= {"attention_mode": f"{mode}-self-attention", "attention_mechanism": f"{mechanism}-relation"}
    convs = both("RGATConv", in_channels, channels, 13, dtype=torch.float32, std=0.2, **options)
    for conv in convs:
        for name, parameter in conv.named_parameters():
            parameter.requires_grad_(name not in frozen)
    edge_index, edge_type = torch.randint(17, (2, 5)), torch.randint(13, (5,))
    call = torch.randn(17, in_channels), edge_index, edge_type
    call += () if edge_dim is None else (torch.randn(5, edge_dim),)
    with emulated_device(), pyg_dfgnn.local_settings(fallback="error"):
        actual = results_of(convs[0], *call)
    expected = results_of(convs[1].double(), *cast(call, torch.float64))
    assert_near(actual, expected, torch.float32)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_over_one_feature(heads):
    """Weights of several heads meet one number per node."""
    options = {"heads": heads, "attention_mechanism": "within-relation", "num_bases": 5}
    layer, oracle = both("RGATConv", 1, 54, 2, dtype=torch.float32, std=0.2, **options)
    call = torch.randn(17, 1), torch.randint(17, (2, 5)), torch.randint(2, (5,))
    with emulated_device(), pyg_dfgnn.local_settings(fallback="error"):
        actual = results_of(layer, *call)
    assert_near(actual, results_of(oracle.double(), *cast(call, torch.float64)), torch.float32)
