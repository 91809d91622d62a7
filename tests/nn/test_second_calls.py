"""Second calls on a known graph: what has changed since the first call is noticed, and what has not stays as it was."""

from threading import Thread

import pytest
import torch
import torch_geometric.nn as pyg
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.aggr import MeanAggregation

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import elementwise
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both, trained

NODES, FEATURES = 12, 8
BOTH = pytest.mark.parametrize("name", ["GATv2Conv", "TransformerConv"])
SKIP = {"GATv2Conv": {"residual": True}, "TransformerConv": {"beta": True}}
LAYER = {"GATv2Conv": "lin_l", "TransformerConv": "lin_key"}


@pytest.fixture(autouse=True)
def rows():
    """Small graphs would take another schedule."""
    with pyg_dfgnn.local_settings(schedule="row_split"):
        yield


@pytest.fixture
def x():
    return torch.randn(NODES, FEATURES)


@pytest.fixture
def edge_index():
    return torch.randint(NODES, (2, 40))


def build(name, **options):
    """The conv and PyG's, with the same parameters."""
    return both(name, FEATURES, 4, dtype=torch.float32, std=0.3, heads=2, **SKIP[name], **options)


def outcome(call, *given):
    """What a call returns, or the type of its error."""
    try:
        return call(*given)
    except Exception as error:
        return type(error)


def assert_same(found, expected):
    assert isinstance(found, type) == isinstance(expected, type), (found, expected)
    if isinstance(found, type):
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, **elementwise("float32"))


def assert_passes(conv, oracle, x, *rest, call=None):
    """Check that the result is PyG's, and computed by kernels."""
    with emulated_device() as launched:
        found = trained(conv, x, *rest, call=call)
    assert "attention_forward" in launched
    assert_same(found, trained(oracle, x, *rest))


def first_call(conv, *given):
    with emulated_device() as launched:
        conv(*given)
    assert "attention_forward" in launched


@BOTH
def test_the_second_call_gives_what_the_first_gave(name, x, edge_index):
    conv, _ = build(name, dropout=0.4)
    results = []
    with emulated_device():
        for _ in range(2):
            torch.manual_seed(1)
            results.append(trained(conv, x, edge_index))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


# The module ----------------------------------------------------------------------------------------------------------


CHANGES = {
    "explain": lambda conv: setattr(conv, "explain", True),
    "decomposed_layers": lambda conv: setattr(conv, "decomposed_layers", 2),
    "node_dim": lambda conv: setattr(conv, "node_dim", -3),
    "aggr_module": lambda conv: setattr(conv, "aggr_module", MeanAggregation()),
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module(name, change, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    for each in (conv, oracle):
        CHANGES[change](each)
    with emulated_device() as launched:
        found = outcome(trained, conv, x, edge_index)
    assert not launched
    assert_same(found, outcome(trained, oracle, x, edge_index))


class Negated(pyg.Linear):
    def forward(self, x):
        return -super().forward(x)


def negate(conv, name):
    layer = getattr(conv, name)
    layer.forward = lambda x: -type(layer).forward(layer, x)


def sparsify(conv, name):
    layer = getattr(conv, name)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)


LAYERS = {
    "hook": lambda conv, name: getattr(conv, name).register_forward_hook(lambda _, __, out: 2 * out),
    "prune": lambda conv, name: prune.l1_unstructured(getattr(conv, name), "weight", 0.5),
    "weight_norm": lambda conv, name: parametrizations.weight_norm(getattr(conv, name)),
    "wrapped": lambda conv, name: setattr(conv, name, torch.nn.Sequential(getattr(conv, name), torch.nn.Tanh())),
    "subclass": lambda conv, name: setattr(getattr(conv, name), "__class__", Negated),
    "forward": negate,
    "no_bias": lambda conv, name: setattr(getattr(conv, name), "bias", None),
    "sparse": sparsify,
}


@BOTH
@pytest.mark.parametrize("change", LAYERS)
def test_a_changed_layer(name, change, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    for each in (conv, oracle):
        LAYERS[change](each, LAYER[name])
    assert_passes(conv, oracle, x, edge_index)


def unaligned(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


# The parameters stay the same objects.
IN_PLACE = {
    "values": ("weight", lambda data: 2 * data),
    "strides": ("weight", lambda data: data.t().contiguous().t()),
    "strides of the same memory": ("weight", lambda data: data.t()),
    "address": ("weight", unaligned),
    "address of a bias": ("bias", unaligned),
    "dtype": ("weight", torch.Tensor.double),
    "dtype of a bias": ("bias", torch.Tensor.double),
    "row_split": ("weight", lambda data: data[:4]),
    "columns": ("weight", lambda data: data[:, :4].contiguous()),
    "bias of one": ("bias", lambda data: data[:1]),
}


@BOTH
@pytest.mark.parametrize("change", IN_PLACE)
def test_a_parameter_changed_in_place(name, change, x, edge_index):
    conv, oracle = build(name)
    for _ in range(2):
        first_call(conv, x, edge_index)
    which, edit = IN_PLACE[change]
    for each in (conv, oracle):
        parameter = getattr(getattr(each, LAYER[name]), which)
        parameter.data = edit(parameter.data)
    with emulated_device():
        found = outcome(trained, conv, x, edge_index)
    assert_same(found, outcome(trained, oracle, x, edge_index))


def test_a_vector_in_float64_under_autocast(x, edge_index):
    conv, oracle = build("GATv2Conv")
    for each in (conv, oracle):
        each.att.data = each.att.data.double()
    with emulated_device(), torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = conv(x, edge_index), oracle(x, edge_index)
    assert found.dtype is expected.dtype is torch.float64
    torch.testing.assert_close(found, expected, **elementwise("16 bits"))


@BOTH
def test_a_weight_that_moves_between_the_passes(name, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)

    def call(*given):
        out = conv(*given)
        weight = getattr(conv, LAYER[name]).weight
        weight.data = weight.data.t().contiguous().t()
        return out

    assert_passes(conv, oracle, x, edge_index, call=call)


@BOTH
def test_an_input_that_shrinks_between_the_passes(name, x, edge_index):
    conv, _ = build(name)
    first_call(conv, x, edge_index)
    x.requires_grad_()
    with emulated_device():
        out = conv(x, edge_index)
        x.data = x.data[:4].clone()
        with pytest.raises(RuntimeError, match="gradient|size|shape"):
            out.sum().backward()


@BOTH
def test_convs_on_one_graph(name, x, edge_index):
    """Of one width: with other heads, and without gradients before with them."""
    pairs = []
    for heads in (2, 4):
        options = {**SKIP[name], "heads": heads}
        conv, oracle = (getattr(library, name)(FEATURES, 8 // heads, **options) for library in (ours, pyg))
        oracle.load_state_dict(conv.state_dict())
        pairs.append((conv, oracle))
    with torch.no_grad():
        for conv, oracle in pairs:
            for _ in range(2):
                with emulated_device():
                    found = conv(x, edge_index)
                assert_same(found, oracle(x, edge_index))
    for conv, oracle in pairs:
        assert_passes(conv, oracle, x, edge_index)


UNPACK = {
    "clone": torch.Tensor.clone,
    "address": unaligned,
    "strides": lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
}


@BOTH
@pytest.mark.parametrize("unpack", UNPACK)
@pytest.mark.parametrize("sizes", [(NODES,), (8,), (NODES, 8)], ids=["of nodes", "parameters", "all"])
def test_saved_tensors_that_come_back_elsewhere(name, unpack, sizes, x, edge_index):
    def change(tensor):
        return UNPACK[unpack](tensor) if tensor.size(0) in sizes else tensor

    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, change):
        assert_passes(conv, oracle, x, edge_index)


OPTIONS = [
    ("GATv2Conv", {"add_self_loops": False}),
    ("GATv2Conv", {"share_weights": True}),
    ("GATv2Conv", {"negative_slope": 0.7}),
    ("GATv2Conv", {"bias": None}),
    ("GATv2Conv", {"res": None}),
    ("TransformerConv", {"root_weight": False}),
    ("TransformerConv", {"lin_beta": None}),
    ("TransformerConv", {"heads": 4, "out_channels": 2}),
]


@pytest.mark.parametrize("name, options", [*OPTIONS, *[(name, {"flow": "target_to_source"}) for name in SKIP]], ids=str)
def test_a_changed_option(name, options, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    before = trained(oracle, x, edge_index)["out"]
    for each in (conv, oracle):
        for key, value in options.items():
            setattr(each, key, value)
    assert not torch.allclose(before, trained(oracle, x, edge_index)["out"])
    assert_passes(conv, oracle, x, edge_index)


def test_edge_features_later(x, edge_index):
    conv, oracle = build("TransformerConv")
    first_call(conv, x, edge_index)
    lin_edge = pyg.Linear(3, 8, bias=False)
    for each in (conv, oracle):
        del each.lin_edge
        each.lin_edge = lin_edge
    with emulated_device(), pytest.raises(AssertionError):
        conv(x, edge_index)
    edge_attr = torch.randn(40, 3)
    assert_passes(conv, oracle, x, edge_index, edge_attr)


@BOTH
def test_dropout_in_training_alone(name, x, edge_index):
    conv, oracle = build(name, dropout=0.9)
    first_call(conv, x, edge_index)
    assert_passes(conv.eval(), oracle.eval(), x, edge_index)
    with emulated_device():
        results = [conv.train()(x, edge_index) for _ in range(2)]
    assert not torch.equal(*results)


# The inputs ----------------------------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    pass


INPUTS = {
    "one dimension": lambda x, edges: (x[:, 0], edges),
    "three dimensions": lambda x, edges: (x[:, None], edges),
    "pair": lambda x, edges: ((x, x), edges),
    "half a pair": lambda x, edges: ((x, None), edges),
    "other nodes": lambda x, edges: (torch.cat([x, x]), edges),
    "float64": lambda x, edges: (x.double(), edges),
    "wrong width": lambda x, edges: (x[:, 1:], edges),
    "subclass": lambda x, edges: (x.as_subclass(Marked), edges),
    "sparse": lambda x, edges: (x, torch.sparse_coo_tensor(edges, torch.ones(40), (NODES, NODES)).coalesce()),
    "edge features": lambda x, edges: (x, edges, torch.randn(40, 3)),
    "weights": lambda x, edges: (x, edges, None, True),
    "edited": lambda x, edges: (x, edges.fill_(1)),
    "resized": lambda x, edges: (x, edges.resize_(2, 7)),
    "transposed": lambda x, edges: (x, edges.resize_(5, 2).t_().clamp_(max=4)),
    "meta": lambda x, edges: (x, edges.to("meta")),
}


@BOTH
@pytest.mark.parametrize("change", INPUTS)
def test_other_inputs(name, change, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    given = INPUTS[change](x, edge_index)
    with emulated_device():
        found = outcome(conv, *given)
    assert_same(found, outcome(oracle, *given))


# The context ---------------------------------------------------------------------------------------------------------


def forward_mode(conv, x, edge_index):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(conv(forward_ad.make_dual(x, torch.ones_like(x)), edge_index)).tangent


def autocast(conv, x, edge_index):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return conv(x, edge_index).new_zeros(1)


def fake(conv, x, edge_index):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = outcome(conv, mode.from_tensor(x), edge_index)
        return found if isinstance(found, type) else tuple(found.shape)


def traced(conv, x, edge_index):
    return torch.jit.trace(lambda each: conv.requires_grad_(False)(each, edge_index), x)(2 * x)


def in_thread(conv, x, edge_index):
    found = []
    thread = Thread(target=lambda: found.append(conv(x, edge_index)))
    thread.start()
    thread.join()
    return found[0]


def compiled(conv, x, edge_index):
    return torch.compile(conv, backend="aot_eager", fullgraph=True)(x, edge_index)


CONTEXTS = {
    "vmap": lambda conv, x, edges: torch.vmap(lambda each: conv(each, edges))(torch.stack([x, 2 * x])),
    "grad": lambda conv, x, edges: torch.func.grad(lambda each: conv(each, edges).sin().sum())(x),
    "jvp": lambda conv, x, edges: torch.func.jvp(lambda each: conv(each, edges), (x,), (x,)),
    "forward mode": forward_mode,
    "trace": traced,
    "compile": compiled,
    "autocast": autocast,
    "fake": fake,
    "thread": in_thread,
    "functional": lambda conv, x, edges: torch.func.functional_call(
        conv, {name: 2 * p for name, p in conv.named_parameters()}, (x, edges)
    ),
}


@BOTH
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.filterwarnings("ignore")
def test_contexts(name, context, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    with emulated_device():
        found = CONTEXTS[context](conv, x, edge_index)
    expected = oracle(x, edge_index) if context == "compile" else CONTEXTS[context](oracle, x, edge_index)
    assert_same(found, expected)


@BOTH
def test_settings(name, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    with pyg_dfgnn.local_settings(schedule="smmf", fallback="error"), emulated_device() as launched:
        if name == "GATv2Conv":
            with pytest.raises(UnsupportedError, match="smmf"):
                conv(x, edge_index)
            return
        found = trained(conv, x, edge_index)
    assert "attention_smmf_forward" in launched and "attention_forward" not in launched
    assert_same(found, trained(oracle, x, edge_index))


@BOTH
def test_gradients_twice_and_of_less(name, x, edge_index):
    conv, oracle = build(name)
    first_call(conv, x, edge_index)
    for each in (conv, oracle):
        each.requires_grad_(False)
    assert_passes(conv, oracle, x, edge_index)
    leaf = x.clone().requires_grad_()
    with emulated_device():
        loss = conv(leaf, edge_index).sin().sum()
        grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


@BOTH
def test_checkpoint_of_a_first_call(name, x, edge_index):
    """The forward pass and its repetition save the same tensors in the same order."""
    conv, oracle = build(name)
    assert_passes(conv, oracle, x, edge_index, call=lambda *given: checkpoint(conv, *given, use_reentrant=False))


def test_random_numbers_are_drawn_in_one_order(x, edge_index):
    conv, _ = build("GATv2Conv", dropout=0.5)
    conv.res = torch.nn.Sequential(conv.res, torch.nn.Dropout(0.5))
    results = []
    with emulated_device():
        for _ in range(2):
            torch.manual_seed(1)
            results.append(conv(x, edge_index))
    assert torch.equal(*results)


def test_sparse_matrix_of_inference_mode(x, edge_index):
    conv, _ = build("TransformerConv")
    indices = edge_index.unique(dim=1)
    with torch.inference_mode():
        adj = torch.sparse_coo_tensor(indices, torch.ones(indices.size(1)), (NODES, NODES), is_coalesced=True)
    with torch.no_grad(), emulated_device():
        assert torch.equal(conv(x, adj), conv(x, adj))


@pytest.mark.parametrize("why", ["device", "dtype"])
def test_what_no_kernel_takes_is_not_checked_for_one(why, x, edge_index):
    """PyG broadcasts a vector."""
    conv, oracle = build("GATv2Conv")
    first_call(conv, x, edge_index)
    vector = torch.nn.Parameter(torch.randn(1, 1, 4))
    for each in (conv, oracle):
        each.att = vector
    if why == "device":
        Graph.of(edge_index, NODES, self_loops=True)
        assert_same(conv(x, edge_index), oracle(x, edge_index))
    else:
        with emulated_device():
            found = conv.double()(x.double(), edge_index)
        assert_same(found, oracle.double()(x.double(), edge_index))
