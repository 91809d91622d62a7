"""Which edges are left to PyG: what counts as new, for which layers and for how long."""

import gc

import pytest
import torch
from torch import nn
from torch_geometric.nn import HeteroLinear
from torch_geometric.nn import conv as pyg

import pyg_dfgnn
from pyg_dfgnn.errors import IdRangeError, UnsupportedError
from pyg_dfgnn.nn import on_cpu
from pyg_dfgnn.nn.conv import hetero, normalized, relational
from pyg_dfgnn.nn.dense import hetero_linear
from pyg_dfgnn.ops import visits
from pyg_dfgnn.ops.visits import is_new
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings, current
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

FEATURES = 8
SETTINGS = Settings()


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """Take edges on a CPU for those on a GPU."""
    monkeypatch.setattr(visits, "may_be_few", lambda _: current().leaves_few)
    monkeypatch.setattr(on_cpu.Shortcut, "is_open", False)
    yield
    visits._visits.clear()
    visits._last = visits._NONE


def edges():
    return random_edges(30, 30, 90)


def asked(layers, edge_index, times):
    return [[is_new(layer, edge_index) for layer in layers] for _ in range(times)]


def test_all_layers_know_the_edges_once_the_first_one_has_come_the_third_time():
    layers = [nn.Identity() for _ in range(3)]
    assert asked(layers, edges(), 4) == [[True] * 3] * 2 + [[False] * 3] * 2


def test_layers_ask_by_the_tensor_and_by_its_rows():
    layers, edge_index = [nn.Identity() for _ in range(2)], edges()
    answers = [[is_new(layers[0], edge_index[1]), is_new(layers[1], edge_index)] for _ in range(4)]
    assert answers == [[True] * 2] * 2 + [[False] * 2] * 2


def test_another_layer_stands_in_for_a_first_one_that_is_gone():
    edge_index, first = edges(), nn.Identity()
    assert is_new(first, edge_index)
    del first
    gc.collect()
    second, third = nn.Identity(), nn.Identity()
    assert asked([second, third], edge_index, 3)[-1] == [False, False]


@pytest.mark.parametrize("ends", [{"check_ids": "now"}, {"deterministic": True}, {"schedule": "autotune"}], ids=str)
def test_settings_end_what_is_new(ends):
    layers, edge_index = [nn.Identity() for _ in range(2)], edges()
    assert asked(layers, edge_index, 1) == [[True, True]]
    with pyg_dfgnn.local_settings(**ends):
        assert asked(layers, edge_index, 1) == [[False, False]]
    assert asked(layers, edge_index, 1) == [[True, True]]


def test_a_layer_within_a_layer_that_is_left_ends_nothing():
    inner = pyg_dfgnn.nn.GINConv(nn.Linear(FEATURES, FEATURES))
    edge_index = edges()

    class Network(nn.Module):
        def forward(self, x):
            self.seen = visits.step.is_left
            out = inner(x, edge_index)
            self.after = visits.step.is_left
            return out

    outer = pyg_dfgnn.nn.GINConv(Network())
    # With a hook, PyG's forward runs, the network in it.
    outer.register_propagate_forward_hook(lambda *_: None)
    outer(torch.randn(30, FEATURES), edge_index)
    assert outer.nn.seen and outer.nn.after and not visits.step.is_left
    with pytest.raises(RuntimeError):
        outer(torch.randn(30, FEATURES + 1), edge_index)
    assert not visits.step.is_left


LEFT = {
    "gin": (lambda cls: cls(nn.Linear(FEATURES, 4), train_eps=True), "GINConv", None),
    "gine": (lambda cls: cls(nn.Linear(FEATURES, 4), edge_dim=3), "GINEConv", "edge_attr"),
    "sage": (lambda cls: cls(FEATURES, 4), "SAGEConv", None),
    "sage_max": (lambda cls: cls(FEATURES, 4, aggr="max", normalize=True), "SAGEConv", None),
    "sage_project": (lambda cls: cls(FEATURES, 4, aggr="sum", project=True), "SAGEConv", None),
    "graph": (lambda cls: cls(FEATURES, 4), "GraphConv", None),
    "graph_mean": (lambda cls: cls(FEATURES, 4, aggr="mean"), "GraphConv", "edge_weight"),
}


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("ends", ["one", "bipartite", "no_target", "size"])
@pytest.mark.parametrize("name", LEFT)
def test_layers_on_few_new_edges_have_pygs_numbers_and_gradients(name, ends, hooked):
    make, kind, of_edges = LEFT[name]
    torch.manual_seed(0)
    upstream = make(getattr(pyg, kind)).double()
    layer = make(getattr(pyg_dfgnn.nn, kind)).double()
    layer.load_state_dict(upstream.state_dict())
    called = []
    if hooked:
        for each in (upstream, layer):
            each.register_message_forward_hook(lambda module, args, out: called.append(module) or 2 * out)
    num_src, num_dst = (30, 30) if ends == "one" else (30, 20)
    edge_index = random_edges(num_src, num_dst, 90)
    feats = {"edge_attr": torch.randn(90, 3).double(), "edge_weight": torch.rand(90).double(), None: None}[of_edges]
    given = {} if of_edges is None else {of_edges: feats.requires_grad_()}
    if ends in ("no_target", "size"):
        given["size"] = (num_src, num_dst)
    results = []
    for each in (upstream, layer):
        x_src = torch.randn(num_src, FEATURES, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        x_dst = None if ends == "no_target" else torch.ones(num_dst, FEATURES).double().requires_grad_()
        out = each(x_src if ends == "one" else (x_src, x_dst), edge_index.clone(), **given)
        inputs = [x for x in (x_src, None if ends == "one" else x_dst, *given.values()) if isinstance(x, torch.Tensor)]
        wanted = [*inputs, *each.parameters()]
        results.append((out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True)))
    for own, pygs in zip(*results, strict=True):
        torch.testing.assert_close(own, pygs, **elementwise("float64/rounding"))
    assert called == ([upstream, layer] if hooked else [])


NORMED = {
    "GCNConv": (lambda cls: cls(FEATURES, 4, improved=True), "weight"),
    "GCNConv-max": (lambda cls: cls(FEATURES, 4, aggr="max"), "weight"),
    "GCN2Conv": (lambda cls: cls(FEATURES, 0.1), "x_0 weight"),
    "SGConv": (lambda cls: cls(FEATURES, 4, K=2, add_self_loops=False), "weight"),
    "SSGConv": (lambda cls: cls(FEATURES, 4, alpha=0.2, K=2), "weight"),
    "TAGConv": (lambda cls: cls(FEATURES, 4), ""),
    "APPNP": (lambda cls: cls(3, 0.1), "weight"),
    "LGConv": (lambda cls: cls(), "weight"),
    "ARMAConv": (lambda cls: cls(FEATURES, 4, num_stacks=2), "weight"),
    "ChebConv": (lambda cls: cls(FEATURES, 4, K=3), ""),
    "ChebConv-rw": (lambda cls: cls(FEATURES, 4, K=2, normalization="rw"), "weight"),
    "ClusterGCNConv": (lambda cls: cls(FEATURES, 4, diag_lambda=0.5), ""),
}


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("batch", [(), pytest.param((2,), marks=pytest.mark.cuda)], ids=["rows", "batch of rows"])
@pytest.mark.parametrize("name", NORMED)
def test_normalised_convs_on_few_new_edges_have_pygs_numbers_and_gradients(name, batch, hooked):
    make, names = NORMED[name]
    kind, device = name.partition("-")[0], "cuda" if batch else "cpu"
    if batch and kind == "GCN2Conv":
        pytest.skip("PyG's GCN2Conv takes matrices alone")
    torch.manual_seed(0)
    upstream = make(getattr(pyg, kind)).double().to(device)
    layer = make(getattr(pyg_dfgnn.nn, kind)).double().to(device)
    layer.load_state_dict(upstream.state_dict())
    called, edge_index = [], edges().to(device)
    if hooked:
        for each in (upstream, layer):
            each.register_message_forward_hook(lambda module, args, out: called.append(module) or 2 * out)
    results = []
    for each in (upstream, layer):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(*batch, 30, FEATURES, generator=generator).double().to(device).requires_grad_()
        weight = torch.rand(90, generator=generator).double().to(device).requires_grad_()
        given = {"edge_weight": weight} if "weight" in names else {}
        out = each(x, *([x.detach()] if "x_0" in names else []), edge_index.clone(), **given)
        inputs = [x, *given.values(), *each.parameters()]
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True)))
    for own, pygs in zip(*results, strict=True):
        torch.testing.assert_close(own, pygs, **elementwise("float64/rounding"))
    assert set(called) == ({upstream, layer} if hooked else set())


@pytest.mark.parametrize(
    ("kind", "is_few"),
    [(pyg.SAGEConv, False), (pyg.GraphConv, True), (pyg.ClusterGCNConv, False), (pyg.ChebConv, False)],
)
def test_small_sums_are_left_unless_pygs_code_makes_their_edges(kind, is_few):
    options = {"K": 2} if kind is pyg.ChebConv else {}
    conv = pyg_dfgnn.accelerate(kind(FEATURES, FEATURES, **options))
    x, edge_index = torch.randn(30, FEATURES), edges()
    with emulated_device():
        assert [conv._is_left(x, edge_index) for _ in range(4)] == [True, True, is_few, is_few]


@needs_compiler
@pytest.mark.parametrize(
    ("width", "options", "takes_new"),
    [
        (FEATURES, {}, False),
        (FEATURES, {"towers": 2}, True),
        (FEATURES, {"edge_dim": 3}, True),
        (200, {"towers": 2}, False),
    ],
    ids=str,
)
def test_long_sums_take_kernels_on_new_edges_too(width, options, takes_new):
    degrees = torch.tensor([0, 3, 4, 5])
    conv = pyg.PNAConv(width, 4, ["mean", "max", "std"], ["identity", "attenuation"], degrees, **options)
    given = [torch.randn(30, width), edges(), *([torch.randn(90, 3)] if "edge_dim" in options else [])]
    want = conv(*given)
    pyg_dfgnn.accelerate(conv)
    counts = []
    with emulated_device() as launched:
        for _ in range(4):
            before = len(launched)
            torch.testing.assert_close(conv(*given), want, **elementwise("float32/gradients"))
            counts.append(len(launched) > before)
    assert counts == [takes_new, takes_new, True, True]


@needs_compiler
@pytest.mark.parametrize(("name", "is_small"), [("SumAggregation", True), ("SoftmaxAggregation", False)])
def test_small_sums_of_groups_are_left_and_softmaxes_are_not(name, is_small):
    layer, x, index = getattr(pyg_dfgnn.nn.aggr, name)(), torch.randn(40, FEATURES), torch.randint(5, (40,))
    with emulated_device() as launched:
        outs = [layer(x, index, dim_size=5) for _ in range(4)]
        assert bool(launched) is not is_small
        torch.testing.assert_close(outs[-1], outs[0])
        assert pyg_dfgnn.describe_plan(layer, x, index).fused is not is_small


@needs_compiler
def test_the_function_softmax_takes_small_groups_that_are_known():
    x, index = torch.randn(40, FEATURES), torch.randint(5, (40,))
    with emulated_device() as launched:
        outs = [pyg_dfgnn.utils.softmax(x, index, num_nodes=5) for _ in range(4)]
        assert launched
    torch.testing.assert_close(outs[-1], outs[0])


@needs_compiler
def test_small_sums_are_described_however_the_arguments_are_given():
    conv, x, edge_index = pyg_dfgnn.nn.GraphConv(FEATURES, FEATURES), torch.randn(30, FEATURES), edges()
    with emulated_device():
        for args, kwargs in (((x, edge_index), {}), ((x,), {"edge_index": edge_index}), ((x, edge_index, None), {})):
            assert "the edges are few" in str(pyg_dfgnn.describe_plan(conv, *args, **kwargs))
        assert pyg_dfgnn.describe_plan(pyg_dfgnn.nn.SAGEConv(FEATURES, FEATURES), x, edge_index).fused


@needs_compiler
def test_a_loop_over_few_relations_is_pygs_on_new_edges():
    edge_index, edge_type = edges(), torch.arange(90) % 3
    x, layers = torch.randn(30, FEATURES), [pyg.RGCNConv(FEATURES, 4, count) for count in (3, 90)]
    expected = [layer(x, edge_index, edge_type) for layer in layers]
    with emulated_device() as launched:
        pyg_dfgnn.accelerate(nn.ModuleList(layers))
        counts = []
        for layer, want in zip(layers, expected, strict=True):
            for _ in range(3):
                before = len(launched)
                torch.testing.assert_close(layer(x, edge_index, edge_type), want, **elementwise("float32/few_terms"))
                counts.append(len(launched) > before)
    assert counts == [False, False, True, True, True, True]


LISTS_OR_NORMS = {
    "RGATConv": (lambda: pyg.RGATConv(FEATURES, 4, 3, heads=2), "edge_type"),
    "FastRGCNConv": (lambda: pyg.FastRGCNConv(FEATURES, 4, 3), "edge_type"),
    "HEATConv": (lambda: pyg.HEATConv(FEATURES, 4, 2, 3, 4, FEATURES, 4), "node_type edge_type edge_attr"),
    "LGConv": (pyg.LGConv, ""),
    "ARMAConv": (lambda: pyg.ARMAConv(FEATURES, 4), ""),
    "TAGConv": (lambda: pyg.TAGConv(FEATURES, 4), ""),
}


@needs_compiler
@pytest.mark.parametrize("name", LISTS_OR_NORMS)
def test_convs_whose_lists_or_norms_take_longer_are_pygs_on_new_edges(name, monkeypatch):
    make, names = LISTS_OR_NORMS[name]
    for name_of in ("_KNOWN_NUMBERS", "_WEIGHTED_NUMBERS"):
        monkeypatch.setattr(normalized, name_of, 0)
    given = {
        "edge_type": torch.arange(90) % 3,
        "node_type": torch.arange(30) % 2,
        "edge_attr": torch.randn(90, FEATURES),
    }
    rest, x, edge_index = [given[name] for name in names.split()], torch.randn(30, FEATURES), edges()
    layer, other = make(), make()
    want = layer(x, edge_index, *rest)
    pyg_dfgnn.accelerate(nn.ModuleList([layer, other]))
    with emulated_device() as launched:
        counts = []
        for _ in range(3):
            before = len(launched)
            torch.testing.assert_close(layer(x, edge_index, *rest), want, **elementwise("float32/few_terms"))
            counts.append(len(launched) > before)
        assert counts == [False, False, True]
        # What takes PyG's code longer takes kernels at once.
        for name in ("LISTED_NUMBERS", "MEASURED_NUMBERS", "MOST_NUMBERS"):
            monkeypatch.setattr(relational, name, 90 * FEATURES)
        monkeypatch.setattr(normalized, "NEW_NUMBERS", 90)
        before = len(launched)
        other(x, edges(), *rest)
        assert len(launched) > before


@needs_compiler
@pytest.mark.parametrize("other", [nn.Linear, nn.Identity], ids=["torch's Linear", "no linear layer"])
def test_another_layer_inside_a_conv(other):
    layer = pyg_dfgnn.accelerate(pyg.HEATConv(FEATURES, 4, 2, 3, 4, FEATURES, 4))
    layer.lin = other(layer.lin.in_channels, 4)
    x, types, attr = torch.randn(30, FEATURES), torch.arange(30) % 2, torch.randn(90, FEATURES)
    given = x, edges(), types, torch.arange(90) % 3, attr
    with emulated_device(), pyg_dfgnn.local_settings(fallback="error"):
        if other is nn.Linear:
            outs = [layer(*given) for _ in range(3)]
            torch.testing.assert_close(outs[0], outs[2], **elementwise("float32/few_terms"))
            return
        with pytest.raises(UnsupportedError, match="att or lin is another layer"):
            layer(*given)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"is_sorted": True}, {"num_types": 17}, {"bias": False}], ids=str)
@pytest.mark.parametrize("taker", ["all types", "loop", "lists"])
def test_new_types_of_rows_are_taken_without_lists_if_they_are_few(taker, options, monkeypatch):
    if taker != "all types":
        monkeypatch.setattr(hetero_linear, "_FEW_NUMBERS", 0)
    if taker == "lists":
        monkeypatch.setattr(hetero_linear, "MEASURED_NUMBERS", 0)
    layer = HeteroLinear(FEATURES, 4, **{"num_types": 3, **options})
    x, types = torch.randn(30, FEATURES, requires_grad=True), torch.arange(30) % 3
    want = torch.stack([row @ layer.weight[type_] for row, type_ in zip(x, types, strict=True)])
    want = want if layer.bias is None else want + layer.bias[types]
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad(want.sin().sum(), inputs)
    own = pyg_dfgnn.accelerate(layer)
    counts = []
    with emulated_device() as launched:
        for _ in range(3):
            before = len(launched)
            out = own(x, types)
            torch.testing.assert_close(out, want, **elementwise("float32/few_terms"))
            for grad, other in zip(torch.autograd.grad(out.sin().sum(), inputs), gradients, strict=True):
                torch.testing.assert_close(grad, other, **elementwise("float32/few_terms"))
            counts.append(len(launched) > before)
    is_left = taker == "all types" or (taker == "loop" and options in ({}, {"bias": False}))
    assert counts == ([False, False, True] if is_left else [True] * 3)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_types_out_of_range_are_told_before_the_loop(wrong):
    layer, types = pyg_dfgnn.accelerate(HeteroLinear(FEATURES, 4, num_types=3)), torch.arange(30) % 3
    types[7] = wrong
    with emulated_device(), pytest.raises(IdRangeError, match=r"'type_vec' needs types in \[0, num_types=3\)"):
        layer(torch.randn(30, FEATURES), types)
    assert layer(torch.randn(0, FEATURES), types[:0]).shape == (0, 4)


@needs_compiler
def test_joint_edges_of_which_some_are_new_are_new():
    layer = pyg_dfgnn.accelerate(pyg.HGTConv(FEATURES, FEATURES, (["a", "b"], TYPES), heads=2))
    x, known = {name: torch.randn(30, FEATURES) for name in "ab"}, edges()
    with emulated_device() as launched:
        for _ in range(5):
            layer(x, {TYPES[0]: known, TYPES[1]: edges(), TYPES[2]: edges()})
        assert not launched


TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "by", "a")]


@needs_compiler
@pytest.mark.parametrize("kind", [pyg.HGTConv, pyg.HANConv])
@pytest.mark.parametrize("most", [1 << 24, 0], ids=["few pairs", "many pairs"])
def test_few_new_edges_of_few_types_take_no_lists(kind, most, monkeypatch):
    monkeypatch.setattr(hetero, "_PAIRED_NUMBERS", most)
    monkeypatch.setattr(hetero, "FEWEST_RELATIONS", 1)
    layer = kind(FEATURES, FEATURES, (["a", "b"], TYPES), heads=2)
    x = {name: torch.randn(30, FEATURES) for name in "ab"}
    known = {name: edges() for name in TYPES}
    want = layer(x, known)
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    with emulated_device() as launched:
        counts = []
        for _ in range(3):
            before, found = len(launched), layer(x, known)
            for name, rows in want.items():
                torch.testing.assert_close(found[name], rows, **elementwise("float32/few_terms"))
            counts.append(len(launched) > before)
        assert counts == [False, False, True]
        turned = {name: edges() for name in reversed(TYPES)}
        before = len(launched)
        found = layer(x, turned)
        for name, rows in want.items():
            torch.testing.assert_close(found[name], rows, **elementwise("float32/few_terms"))
        # PyG's HGTConv asks for the order of its edge types.
        assert (len(launched) > before) is (kind is pyg.HGTConv and not most)


@needs_compiler
@pytest.mark.parametrize("relations", [1, 2])
@pytest.mark.parametrize("kind", [pyg.FiLMConv, pyg.RGCNConv])
def test_one_relation_with_few_edges_is_pygs_also_where_they_are_known(kind, relations):
    edge_index, edge_type = edges(), torch.arange(90) % relations
    x, layer = torch.randn(30, FEATURES), kind(FEATURES, 4, relations)
    want = layer(x, edge_index, edge_type)
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    with emulated_device() as launched:
        for _ in range(4):
            torch.testing.assert_close(layer(x, edge_index, edge_type), want, **elementwise("float32/few_terms"))
        assert bool(launched) is (relations > 1)
        for args, kwargs in (
            ((x, edge_index, edge_type), {}),
            ((x,), {"edge_type": edge_type, "edge_index": edge_index}),
        ):
            assert pyg_dfgnn.describe_plan(layer, *args, **kwargs).fused is (relations > 1)


@needs_compiler
@pytest.mark.parametrize("name", ["SumAggregation", "MeanAggregation"])
def test_sums_along_another_dimension_are_pygs_up_to_four_times_the_rows(name):
    layer, index = getattr(pyg_dfgnn.nn.aggr, name)(), torch.randint(5, (40,))
    with emulated_device() as launched, pytest.MonkeyPatch.context() as patched:
        patched.setattr(visits, "_FEW_NUMBERS", 20 * 128)
        for shape, dim, is_few in (((40, 8), 0, False), ((40, 8), -2, False), ((2, 40, 8), 1, True)):
            before, x = len(launched), torch.randn(shape)
            outs = [layer(x, index, dim_size=5, dim=dim) for _ in range(4)]
            assert (len(launched) == before) is is_few
            torch.testing.assert_close(outs[-1], outs[0])


def test_the_calls_of_one_forward_count_once():
    layer, edge_index = nn.Identity(), edges()
    for turn in range(2):
        assert all(is_new(layer, edge_index, "propagate", turn) for _ in range(5))
    assert not is_new(layer, edge_index, "propagate", 2)


class Gate(pyg.MessagePassing):
    """Products of joined rows, which become products of nodes: many operations where PyG's code has few."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(self.lin(torch.cat([x_i, x_j], dim=-1))) * x_j


@needs_compiler
@pytest.mark.parametrize(("kind", "is_left"), [(Gate, True), (lambda: pyg.GENConv(FEATURES, FEATURES), False)])
def test_messages_of_more_operations_than_pygs_launches_are_left_on_few_edges(kind, is_left):
    x, edge_index = torch.randn(30, FEATURES), edges()
    layer = kind()
    want = layer(x, edge_index)
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    with emulated_device() as launched:
        for _ in range(4):
            torch.testing.assert_close(layer(x, edge_index), want, **elementwise("float32"))
    assert bool(launched) is not is_left


def test_compiled_calls_ask_nothing_of_edges_that_were_seen(monkeypatch):
    """torch.compile cannot trace a weak reference."""
    x, edge_index = torch.randn(30, FEATURES), edges()
    layer = pyg_dfgnn.accelerate(pyg.GraphConv(FEATURES, FEATURES))
    want = layer(x, edge_index)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, edge_index), want)


COMPILED = {
    "TransformerConv": lambda: pyg.TransformerConv(FEATURES, 4, heads=2),
    "GATConv": lambda: pyg.GATConv(FEATURES, 4, heads=2, add_self_loops=False),
    "TAGConv": lambda: pyg.TAGConv(FEATURES, 4, K=2),
}


@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_on_few_edges_are_pygs_and_many_take_kernels(name, monkeypatch):
    torch.manual_seed(0)
    layer, x, edge_index = COMPILED[name](), torch.randn(30, FEATURES), edges()
    want = layer(x, edge_index)
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    for most, takes_kernels in ((1 << 20, False), (0, True)):
        monkeypatch.setattr(visits, "_COMPILED_NUMBERS", most)
        torch._dynamo.reset()
        with emulated_device() as launched, torch.no_grad():
            found = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)(x, edge_index)
        torch.testing.assert_close(found, want)
        assert bool(launched) is takes_kernels
