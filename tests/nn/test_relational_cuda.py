"""The relational drop-ins with their kernels on a GPU, against PyG's layers in float64 on the same device."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.nn.conv import hgt_conv
from pyg_dfgnn.reference.tolerances import tolerance
from tests.nn.relational import METADATA, WIDTHS, assert_near, cast, copied, hetero, named, results_of

pytestmark = pytest.mark.cuda

NUM_NODES, NUM_RELATIONS, EDGE_DIM = 300, 20, 5
MULTIPLICATIVE, WITHIN = {"attention_mode": "multiplicative-self-attention"}, {"attention_mechanism": "within-relation"}
TYPED = {
    "rgcn": ("RGCNConv", (24, 16, NUM_RELATIONS), {}),
    "rgcn_odd": ("RGCNConv", (13, 7, NUM_RELATIONS), {"aggr": "add", "root_weight": False}),
    "rgcn_max": ("RGCNConv", (24, 16, NUM_RELATIONS), {"aggr": "max"}),
    "rgcn_bases": ("RGCNConv", (24, 16, NUM_RELATIONS), {"num_bases": 4}),
    "rgcn_blocks": ("RGCNConv", (24, 16, NUM_RELATIONS), {"num_blocks": 4}),
    "fast_rgcn": ("FastRGCNConv", (24, 64, NUM_RELATIONS), {}),
    "rgat": ("RGATConv", (24, 16, NUM_RELATIONS), {}),
    "rgat_heads": ("RGATConv", (24, 8, NUM_RELATIONS), {"heads": 4, "edge_dim": EDGE_DIM, **WITHIN}),
    "rgat_products": ("RGATConv", (24, 16, NUM_RELATIONS), {"heads": 2, "concat": False, **MULTIPLICATIVE}),
    "film": ("FiLMConv", (24, 16, NUM_RELATIONS), {}),
    "film_max": ("FiLMConv", (24, 16, NUM_RELATIONS), {"aggr": "max", "act": torch.nn.Tanh()}),
    "heat": ("HEATConv", (24, 16, 3, NUM_RELATIONS, 4, EDGE_DIM, 6), {"heads": 2}),
}
DICTS = {
    "hgt": ("HGTConv", (WIDTHS, 16, METADATA), {}),
    "hgt_features": ("HGTConv", (16, 16, METADATA), {}),
    "hgt_heads": ("HGTConv", (WIDTHS, 32, METADATA), {"heads": 4}),
    "han": ("HANConv", (WIDTHS, 16, METADATA), {"heads": 2}),
}
LAYERS = {
    **TYPED,
    **DICTS,
    "rgcn_embeddings": ("RGCNConv", (NUM_NODES, 16, NUM_RELATIONS), {}),
    "hetero_linear": ("HeteroLinear", (24, 16, 5), {}),
    "hetero_dict_linear": ("HeteroDictLinear", (24, 16, [str(i) for i in range(12)]), {}),
}

NOT_COMPILED = ("han", "hgt_features", "rgcn_embeddings", "hetero_dict_linear")
COMPILED = [key for key in LAYERS if key not in NOT_COMPILED]
"""Those that torch.compile holds as calls of the operator."""
ways = pytest.mark.parametrize(
    "key,is_compiled",
    [*((key, False) for key in LAYERS), *(pytest.param(key, True, id=f"{key}-compiled") for key in COMPILED)],
)


@pytest.fixture(autouse=True)
def features_move_less(monkeypatch):
    """On a small graph, HGT's maps of types and relations would cost more together than one after the other."""
    monkeypatch.setattr(hgt_conv, "_features_move_less", lambda *_: True)


def compiled(layer):
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)


def arguments(key):
    """Arguments in float64: a hub, duplicates, nodes without edges, a relation without edges."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)

    if key in DICTS:
        return tuple(
            {name: value.cuda() for name, value in part.items()}
            for part in hetero(width=16 if key == "hgt_features" else None)
        )
    if key == "hetero_dict_linear":
        return ({str(i): draw(10 * i, 24) for i in range(12)},)
    if key == "hetero_linear":
        return draw(500, 24), torch.arange(500, device="cuda") % 4
    edge_index = torch.randint(NUM_NODES - 50, (2, 4000), generator=generator, device="cuda")
    edge_index[1, :1500] = 3
    edge_type = torch.randint(NUM_RELATIONS - 1, (4000,), generator=generator, device="cuda")
    x = None if key == "rgcn_embeddings" else draw(NUM_NODES, LAYERS[key][1][0])
    edge_attr = (draw(4000, EDGE_DIM),) if key in ("heat", "rgat_heads") else ()
    node_type = (torch.arange(NUM_NODES, device="cuda") % 3,) if key == "heat" else ()
    return x, edge_index, *node_type, edge_type, *edge_attr


def build(key, dtype):
    name, args, kwargs = copy.deepcopy(LAYERS[key])
    layer = getattr(ours, name)(*args, **kwargs).cuda()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    layer = layer.to(dtype)
    oracle = getattr(pyg, name)(*args, **kwargs).cuda().double()
    oracle.load_state_dict(layer.state_dict())
    return layer, oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", LAYERS)
def test_outputs_and_gradients(key, dtype):
    """Each tensor by the norm of all of its kind; several rounded values follow each other in 16 bits."""
    layer, oracle = build(key, dtype)
    args = arguments(key)
    with pyg_dfgnn.local_settings(fallback="error"):
        actual = results_of(layer, *cast(args, dtype))
    expected = results_of(oracle, *cast(cast(args, dtype), torch.float64))
    assert list(actual) == list(expected)
    assert_near(actual, expected, dtype, factor=1 if dtype is torch.float32 else 4)


@ways
def test_every_run_is_the_same_and_waits_for_nothing(key, is_compiled):
    layer, _ = build(key, torch.float32)
    function = compiled(layer) if is_compiled else layer
    args = copied(cast(arguments(key), torch.float32))

    def run():
        outputs = list(named(function(*args)).values())
        loss = torch.stack([out.square().sum() for out in outputs]).sum()
        return [*outputs, *torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)]

    with pyg_dfgnn.local_settings(fallback="error"):
        expected = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for first, second in zip(expected, actual, strict=True):
        assert first is second is None or torch.equal(first, second)


@ways
def test_under_autocast(key, is_compiled):
    layer, oracle = build(key, torch.float32)
    function = compiled(layer) if is_compiled else layer
    args = arguments(key)
    with torch.autocast("cuda", torch.bfloat16), pyg_dfgnn.local_settings(fallback="error"):
        outputs = named(function(*cast(args, torch.float32)))
    expected = named(oracle(*args))
    size = max(out.norm().item() for out in expected.values())
    for name, want in expected.items():
        assert (outputs[name].double() - want).norm().item() <= 0.04 * size, name


@pytest.mark.parametrize(
    "key,backend",
    [*((key, "aot_eager") for key in COMPILED), *((key, "inductor") for key in ("rgcn", "rgat_heads", "hgt_heads"))],
)
def test_compiled_calls_equal_eager_ones(key, backend):
    """What backward computes again is rounded as it was, but sums of gradients may be taken in another order."""
    layer, _ = build(key, torch.float32)
    args = cast(arguments(key), torch.float32)
    torch._dynamo.reset()
    function = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with pyg_dfgnn.local_settings(fallback="error"):
        expected = results_of(layer, *args)
        actual = {name.replace("_orig_mod.", ""): t for name, t in results_of(function, *args).items()}
    assert actual.keys() == expected.keys()
    for is_gradient in (False, True):
        size = max(t.norm().item() for n, t in expected.items() if n.startswith("d_") == is_gradient)
        for name in (name for name in expected if name.startswith("d_") == is_gradient):
            difference = (actual[name] - expected[name]).norm().item()
            assert difference <= tolerance(torch.float32, "backward", "relational").relative * size, name
