"""Drop-in aggregations and pools against PyG's in float64: values, gradients, launches, errors, what is left to PyG."""

import copy
import inspect
import pickle
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch_geometric.typing
from torch_geometric import utils as pyg_utils
from torch_geometric.index import ptr2index
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.nn import pool as pyg_pool

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn import fallback
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.convs import reasons_of

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def deterministic_mode():
    """Switch of torch's deterministic algorithms, which the end of the test puts back."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


STATISTICS = ["Sum", "Mean", "Max", "Min", "Var", "Std"]
CHANNELS = 6
DEGREES = torch.tensor([0, 3, 2, 4])


def make(name, library=ours, *args, **kwargs):
    return getattr(library, f"{name}Aggregation")(*args, **kwargs)


# Group of each row, and number of groups.
GROUPS = {
    "unsorted": (torch.tensor([3, 0, 0, 3, 1, 3, 3, 5, 1]), 7),
    "sorted": (torch.tensor([0, 0, 1, 1, 1, 4, 6]), 8),
    "hub": (torch.cat([torch.full((300,), 2), torch.tensor([0, 4, 4])]), 5),
    "all apart": (torch.randperm(9, generator=torch.Generator().manual_seed(0)), 9),
    "one row": (torch.tensor([0]), 1),
    "no rows": (torch.zeros(0, dtype=torch.int64), 3),
}
# Rows of a group that are alike, zeros among them, as ReLU leaves them.
VALUES = {
    "random": lambda shape: torch.randn(shape),
    "ties": lambda shape: torch.randint(-2, 2, shape).float(),
    "zeros": lambda shape: torch.randn(shape).clamp(max=0),
}


def trained(layer, x, grad=None, **kwargs):
    """Output and gradients of the input and the parameters of a call."""
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    out = layer(x, **kwargs)
    grad = torch.linspace(-1, 2, out.numel()).view(out.shape) if grad is None else grad
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype), allow_unused=True)
    results = {f"grad {name}": value for name, value in zip(leaves, grads, strict=True) if value is not None}
    return {"out": out, **results}


def assert_equals_pyg(own, pygs, x, launches, dtype=torch.float32, wanted=None, grad=None, **kwargs):
    """A call of a drop-in makes so many launches and gives what PyG's gives in float64 with arguments `wanted`."""
    x = x.to(dtype)
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = trained(own, x, grad, **kwargs)
    expected = trained(copy.deepcopy(pygs).double(), x.double(), grad, **(kwargs if wanted is None else wanted))
    assert actual["out"].dtype == dtype and actual["out"].is_contiguous()
    assert_all_close({name: (value, expected[name]) for name, value in actual.items()}, dtype=dtype, op="segment")
    assert actual.keys() == expected.keys()
    if launches is not None and x.numel():
        names = [name for name in launched if not name.endswith("_merge")]
        assert [names.count("segment_forward"), names.count("segment_backward_sources")] == launches


@needs_compiler
@over([("name", "values")], name=(*STATISTICS, "Mul"), groups=tuple(GROUPS), values=tuple(VALUES))
def test_statistics(name, groups, values):
    index, size = GROUPS[groups]
    x = VALUES[values]((index.numel(), CHANNELS))
    assert_equals_pyg(make(name), make(name, aggr), x, [1, 1], index=index, dim_size=size)


OFFSETS = torch.tensor([0, 3, 3, 4, 9, 9])


@needs_compiler
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", STATISTICS)
def test_offsets(name, values):
    """Torch divides a positive gradient among ties, and no negative one."""
    x = VALUES[values]((9, CHANNELS))
    launches = [2, 0] if name in ("Max", "Min") else [1, 1]
    for grad in (torch.randn(5, CHANNELS), None):
        assert_equals_pyg(make(name), make(name, aggr), x, launches, grad=grad, ptr=OFFSETS)


@needs_compiler
@over(
    name=("Max", "Min"),
    number=(0.0, 2.0, torch.inf, -torch.inf, torch.nan),
    dtype=(torch.float32, torch.float16),
    route=("ptr", "deterministic", "segment"),
)
def test_ties_of_offsets(name, number, dtype, route, deterministic_mode):
    """Rows of PyG's choice get the gradient: with offsets beside an index too where torch is to be deterministic."""
    x = torch.randint(-1, 2, (9, CHANNELS)).to(dtype).masked_fill(torch.rand(9, CHANNELS) < 0.5, number)
    deterministic_mode(route == "deterministic")
    own, pygs = make(name), make(name, aggr)
    deterministic_mode(False)
    if route == "segment":
        own, pygs = (partial(library.segment, reduce=name.lower()) for library in (pyg_dfgnn.utils, pyg_utils))
    kwargs = {"index": ptr2index(OFFSETS)} if route == "deterministic" else {}
    results = []
    for function in (own, pygs):
        leaf = x.clone().requires_grad_()
        with emulated_device() if function is own else nullcontext():
            out = function(leaf, ptr=OFFSETS, **kwargs)
            (grad,) = torch.autograd.grad(out, leaf, torch.linspace(-1, 2, out.numel()).view_as(out).to(dtype))
        results += [out.detach(), grad]
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results[1], results[3], equal_nan=True)


@needs_compiler
@over(name=STATISTICS, dtype=(torch.bfloat16, torch.float16))
def test_half_precision(name, dtype):
    index, size = GROUPS["unsorted"]
    x = VALUES["random"]((index.numel(), CHANNELS))
    assert_equals_pyg(make(name), make(name, aggr), x, [1, 1], dtype, index=index, dim_size=size)


SHAPES = [((9,), -1), ((9,), 0), ((9, 4), 0), ((9, 4), -2), ((4, 9), 1), ((4, 9), -1), ((2, 9, 3), -2), ((2, 3, 9), 2)]


@needs_compiler
@over(name=("Max", "Softmax"), shape_and_dim=(*SHAPES, ((9, 2, 3), 0), ((2, 9, 3, 1), -3)))
def test_shapes(name, shape_and_dim):
    """Any dimension, by an index or by offsets: PyG's plain torch has no offsets but of the first dimension."""
    shape, dim = shape_and_dim
    index = torch.tensor([3, 0, 0, 3, 1, 3, 3, 5, 1])
    x = torch.randn(shape)
    assert_equals_pyg(make(name), make(name, aggr), x, None, index=index, dim=dim)
    ptr = torch.tensor([0, 3, 3, 4, 9])
    wanted = {"index": ptr2index(ptr), "dim": dim, "dim_size": 4}
    assert_equals_pyg(make(name), make(name, aggr), x, None, wanted=wanted, ptr=ptr, dim=dim)


@needs_compiler
def test_one_group_without_index():
    assert_equals_pyg(make("Mean"), make("Mean", aggr), torch.randn(5, CHANNELS), [1, 1])


@needs_compiler
def test_wide_rows_and_narrow_index():
    index, size = GROUPS["unsorted"]
    x = torch.randn(index.numel(), 520)
    wanted = {"index": index, "dim_size": size}
    assert_equals_pyg(make("Sum"), make("Sum", aggr), x, [2, 2], wanted=wanted, index=index.int(), dim_size=size)


COMPOSED = {
    "softmax": ("Softmax", {}, [4, 1]),
    "temperature": ("Softmax", {"t": 0.3}, [4, 1]),
    "learnt": ("Softmax", {"t": 0.3, "learn": True}, [4, 1]),
    "per channel": ("Softmax", {"learn": True, "channels": CHANNELS}, [4, 1]),
    "softmax semi": ("Softmax", {"semi_grad": True}, [3, 1]),
    "power 1": ("PowerMean", {}, [1, 1]),
    "power": ("PowerMean", {"p": 2.5, "learn": True}, [1, 1]),
    "powers": ("PowerMean", {"p": 2.5, "learn": True, "channels": CHANNELS}, [1, 1]),
    "var semi": ("Var", {"semi_grad": True}, [2, 1]),
    "std semi": ("Std", {"semi_grad": True}, [2, 1]),
}


@needs_compiler
@pytest.mark.parametrize("groups", ["unsorted", "hub", "no rows"])
@pytest.mark.parametrize("case", COMPOSED)
def test_composed(case, groups):
    name, arguments, launches = COMPOSED[case]
    index, size = GROUPS[groups]
    # Powers of negative numbers are clamped.
    x = torch.randn(index.numel(), CHANNELS) + (2 if name == "PowerMean" else 0)
    own, pygs = make(name, ours, **arguments), make(name, aggr, **arguments)
    assert_equals_pyg(own, pygs, x, launches, index=index, dim_size=size)


MULTI = {
    "all": (["mean", "sum", "max", "min", "std", "var"], {}, [1, 1]),
    "repeated": (["max", "mean", "max"], {}, [1, 1]),
    "one": (["max"], {}, [1, 1]),
    "others between": (["mean", "softmax", "max", "mul"], {}, [5, 2]),
    "semi": (["mean", "std"], {"aggrs_kwargs": [{}, {"semi_grad": True}]}, [3, 2]),
    "modules": ([aggr.MeanAggregation(), aggr.MultiAggregation(["max", "min"])], {}, [2, 2]),
    "none": (["softmax", "powermean"], {}, [5, 2]),
    "reduced": (["mean", "max", "sum"], {"mode": "logsumexp"}, [1, 1]),
    "projected": (
        ["mean", "max"],
        {"mode": "proj", "mode_kwargs": {"in_channels": CHANNELS, "out_channels": 3}},
        [1, 1],
    ),
    "attention": (
        ["mean", "max"],
        {"mode": "attn", "mode_kwargs": {"in_channels": CHANNELS, "out_channels": 4, "num_heads": 2}},
        [1, 1],
    ),
}


@needs_compiler
@pytest.mark.parametrize("case", MULTI)
def test_multi(case):
    aggregations, arguments, launches = MULTI[case]
    index, size = GROUPS["unsorted"]
    x = 3 * torch.rand(index.numel(), CHANNELS) + 0.5
    pygs = aggr.MultiAggregation(copy.deepcopy(aggregations), **arguments)
    own = ours.MultiAggregation(copy.deepcopy(aggregations), **arguments)
    own.load_state_dict(pygs.state_dict())
    with pyg_dfgnn.local_settings(fallback="silent"):
        swapped = pyg_dfgnn.accelerate(copy.deepcopy(pygs))
    if case == "semi":
        # PyG forgets the flag of a deviation where it fuses.
        pygs.fused_aggr = None
    for layer in (own, swapped):
        if "mul" in aggregations:
            with emulated_device():
                assert_all_close(
                    {"out": (layer(x, index, dim_size=size), pygs.double()(x.double(), index, dim_size=size))}
                )
        else:
            assert_equals_pyg(layer, pygs, x, launches, index=index, dim_size=size)


REPEATED = [["std", "std"], ["var", "std", "var"], ["mean", "max", "mean"], ["std", "softmax", "std", "sum"]]
MODES = {
    **{mode: {"mode": mode} for mode in ("cat", "sum", "mean", "max", "min", "std", "var", "logsumexp")},
    "proj": {"mode": "proj", "mode_kwargs": {"in_channels": CHANNELS, "out_channels": 3}},
    "attn": {"mode": "attn", "mode_kwargs": {"in_channels": CHANNELS, "out_channels": 4}},
}


@needs_compiler
@over([("names", "mode")], names=REPEATED, mode=tuple(MODES), route=("index", "ptr", "3-D", "scaler"))
def test_repeated_names(names, mode, route):
    """PyG computes only the last of a repeated mean, variance or deviation by an index, and each by offsets."""
    pygs, own = (library.MultiAggregation(names, **MODES[mode]) for library in (aggr, ours))
    own.load_state_dict(pygs.state_dict())
    with pyg_dfgnn.local_settings(fallback="silent"):
        layers = [own, pyg_dfgnn.accelerate(copy.deepcopy(pygs))]
    index = torch.tensor([0, 0, 1, 3, 3, 3])
    kwargs = {"ptr": torch.tensor([0, 2, 3, 3, 6])} if route == "ptr" else {"index": index, "dim_size": 4}
    x = torch.ones(6, 2, CHANNELS) if route == "3-D" and mode != "attn" else torch.ones(6, CHANNELS)
    if route == "scaler":
        arguments = (["identity", "linear"], DEGREES)
        pygs = aggr.DegreeScalerAggregation(pygs, *arguments)
        layers = [ours.DegreeScalerAggregation(layer, *arguments) for layer in layers]
    if x.dim() == 3:
        kwargs["dim"] = 0
    expected = pygs.double()(x.double(), **kwargs)
    for layer in layers:
        with emulated_device(), pyg_dfgnn.local_settings(fallback="silent"):
            assert_all_close({"out": (layer(x, **kwargs), expected)}, op="segment")
            assert any("more than once" in reason for reason in reasons_of(layer, x, **kwargs))


@needs_compiler
@pytest.mark.parametrize("train_norm", [False, True])
@pytest.mark.parametrize("aggregations", [["mean", "max", "min", "std"], "sum", "softmax"], ids=str)
def test_degree_scaler(aggregations, train_norm):
    scalers = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    # PyG wraps one scaler in a list only where there is one aggregation.
    arguments = aggregations, scalers if isinstance(aggregations, list) else "linear", DEGREES, train_norm
    own, pygs = ours.DegreeScalerAggregation(*arguments), aggr.DegreeScalerAggregation(*arguments)
    index, size = GROUPS["unsorted"]
    launches = [4, 1] if aggregations == "softmax" else [1, 1]
    for shape, dim in (((index.numel(), 4), -2), ((index.numel(), 2, 3), 0)):
        assert_equals_pyg(own, pygs, torch.randn(shape), launches, index=index, dim_size=size, dim=dim)
    with emulated_device(), pytest.raises(ValueError, match="Unknown scaler 'cubic'"):
        ours.DegreeScalerAggregation(["mean"], ["cubic"], DEGREES)(torch.randn(2, 3), torch.tensor([0, 0]))


POOLS = ["global_add_pool", "global_mean_pool", "global_max_pool"]


@needs_compiler
@pytest.mark.parametrize("shape", [(7,), (7, 5), (2, 7, 3)], ids=str)
@pytest.mark.parametrize("size", [None, 6, np.int64(6), torch.tensor(6)], ids=["None", "int", "NumPy", "tensor"])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name, size, shape):
    own, pygs = getattr(ours, name), getattr(pyg_pool, name)
    x, batch = torch.randn(shape, requires_grad=True), torch.tensor([0, 0, 1, 3, 3, 3, 4])
    with emulated_device() as launched:
        out = own(x, batch, size)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert launched == ["segment_forward", "segment_backward_sources"]
    exact = x.detach().double().requires_grad_()
    expected = pygs(exact, batch, size)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), exact)
    assert_all_close({"out": (out, expected), "grad": (grad, expected_grad)}, op="segment")
    assert torch.equal(own(x, batch, size), pygs(x, batch, size)) and torch.equal(own(x, None), pygs(x, None))


# Errors and what is left to PyG ---------------------------------------------------------------------------------------


WRONG = {
    "dimension": lambda x: ((x, torch.zeros(4, dtype=torch.int64)), {"dim": 2}),
    "negative dimension": lambda x: ((x, torch.zeros(4, dtype=torch.int64)), {"dim": -3}),
    "dim_size": lambda x: ((x, torch.tensor([0, 0, 1, 2])), {"dim_size": 2}),
    "dim_size of offsets": lambda x: ((x,), {"ptr": torch.tensor([0, 2, 4]), "dim_size": 4}),
}


@needs_compiler
@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "fused"])
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["Sum", "Max", "Std", "Softmax", "Mul"])
def test_errors_are_pygs(name, case, fused):
    args, kwargs = WRONG[case](torch.randn(4, 3))
    messages = []
    for library in (ours, aggr):
        layer = make(name, library)
        with pytest.raises(ValueError) as error:
            if fused and library is ours:
                with emulated_device():
                    layer(*args, **kwargs)
            else:
                layer(*args, **kwargs)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "Encountered invalid" in messages[0]


@needs_compiler
def test_wrong_offsets():
    x, layer = torch.randn(4, 3), make("Sum")
    with emulated_device():
        with pytest.raises(ValueError, match="'ptr' needs offsets that begin at 0 and never descend"):
            layer(x, ptr=torch.tensor([0, 3, 2, 4]))
        with pytest.raises(ValueError, match=r"'x' needs shape \[N_src=3"):
            layer(x, ptr=torch.tensor([0, 2, 3]))


LEFT = {
    "float64": lambda x, i: (x.double(), i, "torch.float64 has no fused kernel (float32, float16, bfloat16)"),
    "integers": lambda x, i: (x.long(), i, "torch.int64 has no fused kernel (float32, float16, bfloat16)"),
    "index": lambda x, i: (x, torch_geometric.Index(i), "index is a Index"),
    "no channels": lambda x, i: (x[:, :0], i, "0 channels in one launch, the kernels take 1 to 512"),
}


@needs_compiler
@pytest.mark.parametrize("case", LEFT)
def test_what_pyg_takes(case):
    x, index, reason = LEFT[case](torch.randn(4, 3), torch.tensor([1, 1, 0, 3]))
    layer = make("Sum")
    with emulated_device() as launched:
        assert reasons_of(layer, x, index) == [reason]
        with pyg_dfgnn.local_settings(fallback="silent"):
            assert torch.equal(layer(x, index), make("Sum", aggr)(x, index)) and launched == []
        with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match="fused SumAggregation"):
            layer(x, index)


@needs_compiler
def test_delegates():
    x, index = torch.randn(4, 3), torch.tensor([1, 1, 0, 3])
    layer = make("Median")
    (reason,) = layer._standing_reasons()
    assert "has no fused kernel" in reason
    with emulated_device() as launched:
        assert torch.equal(layer(x, index, dim_size=5), make("Median", aggr)(x, index, dim_size=5)) and launched == []
        assert reasons_of(layer, x, index) == [reason]
        with (
            pyg_dfgnn.local_settings(fallback="error"),
            pytest.raises(UnsupportedError, match="fused MedianAggregation"),
        ):
            layer(x, index)
    (reason,) = reasons_of(ours.MultiAggregation(["median"]), x, index, device="cuda")
    assert "has no fused kernel" in reason


@pytest.mark.parametrize("name", [*STATISTICS, "Softmax", "Multi", "DegreeScaler"])
def test_transforms_are_left_to_torch(name, monkeypatch):
    reported = set()
    monkeypatch.setattr(fallback, "logged", reported)
    x, index = torch.randn(4, 3), torch.tensor([1, 1, 0, 3])
    arguments = {"Multi": (["mean", "max"],), "DegreeScaler": (["mean"], ["linear"], DEGREES)}.get(name, ())
    own, pygs = make(name, ours, *arguments), make(name, aggr, *arguments)
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    with emulated_device() as launched:
        assert torch.equal(compiled(x, index, dim_size=4), pygs(x, index, dim_size=4))
        jacobians = [torch.func.jacrev(partial(layer, index=index, dim_size=4))(x) for layer in (own, pygs)]
    assert torch.equal(*jacobians) and launched == []
    assert (f"{name}Aggregation", "torch traces or transforms the call") in reported


def test_a_compiled_call_on_a_cpu_is_told_as_any_other(monkeypatch):
    reported = set()
    monkeypatch.setattr(fallback, "logged", reported)
    torch._dynamo.reset()
    compiled = torch.compile(ours.SumAggregation(), backend="eager", fullgraph=True)
    compiled(torch.randn(4, 3), torch.tensor([1, 1, 0, 3]), dim_size=4)
    assert reported == {("", fallback.ON_CPU)}


@pytest.mark.parametrize("name", [*STATISTICS, "Softmax"])
def test_second_derivatives(name):
    drawn, index = torch.randn(9, 3), torch.tensor([1, 1, 0, 3, 0, 0, 4, 4, 1])
    results = []
    for library, dtype in ((ours, torch.float32), (aggr, torch.float64)):
        x = drawn.to(dtype).requires_grad_()
        with emulated_device() as launched:
            out = make(name, library)(x, index, dim_size=6)
            (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), x)
        assert bool(launched) is (library is ours)
        results.append([grad.detach().double(), second.double()])
    torch.testing.assert_close(*results, **elementwise("float32"))


# Graphs ---------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_the_graph_of_a_view_is_kept(monkeypatch):
    """PyG's convs reduce by a row of `edge_index`, a new tensor in each call."""
    built = []
    module = sys.modules["pyg_dfgnn.graph.graph"]
    build = module.build_index
    monkeypatch.setattr(module, "build_index", lambda *args: built.append(1) or build(*args))
    edge_index = torch.tensor([[0, 1, 2, 3], [2, 1, 1, 0]])
    x, layer = torch.randn(4, 3), make("Sum")
    with emulated_device():
        for row in (0, 1):
            for _ in range(3):
                assert torch.equal(
                    layer(x, edge_index[row], dim_size=4), make("Sum", aggr)(x, edge_index[row], dim_size=4)
                )
        assert len(built) == 2
        edge_index[1, 0] = 0
        assert torch.equal(layer(x, edge_index[1], dim_size=4), make("Sum", aggr)(x, edge_index[1], dim_size=4))
        assert len(built) == 3
        Graph.clear_cache()
        layer(x, edge_index[1], dim_size=4)
        assert len(built) == 4


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize(
    "aggregations", ["softmax", ["max", "median"], ["softmax", "powermean"], "median", ["lstm"]], ids=str
)
def test_describe_what_is_combined(aggregations, device):
    """A layer of several aggregations is fused if one of them is."""
    kwargs = [{"in_channels": 3, "out_channels": 3}] if aggregations == ["lstm"] else None
    layer = ours.DegreeScalerAggregation(aggregations, ["linear"], DEGREES, aggr_kwargs=kwargs)
    described = pyg_dfgnn.describe_plan(layer, torch.randn(4, 3), torch.tensor([1, 1, 0, 3]), device=device)
    fused = aggregations not in ("median", ["lstm"])
    assert described.fused is (fused and device is not None)
    assert bool(layer._standing_reasons()) is not fused
    assert "tensors are on cpu" in str(described.reasons) or device


class Layer(MessagePassing):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


@needs_compiler
@pytest.mark.parametrize("reduction", ["sum", "max", ["mean", "std"], "median"], ids=str)
def test_in_a_users_layer(reduction):
    """`accelerate` swaps the aggregation of a layer that has no drop-in itself."""
    x, edge_index = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3, 0], [2, 1, 1, 0, 1]])
    layer = Layer(aggr=reduction)
    expected = layer(x, edge_index)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(layer)
    inner = type(layer.aggr_module)
    assert inner is DROP_INS[inner.__bases__[-1]]
    with emulated_device() as launched:
        torch.testing.assert_close(layer(x, edge_index), expected)
        described = pyg_dfgnn.describe_plan(torch.nn.Sequential(layer)[0].aggr_module, x[:4], edge_index[1, :4])
    assert described.fused is bool(launched) is (reduction != "median")
    assert "in 3 groups" in str(described) or not launched


@needs_compiler
@pytest.mark.parametrize("kind", [aggr.SumAggregation, ours.SumAggregation])
def test_convs_know_their_sum(kind):
    """The gate takes the drop-in for the sum as it takes PyG's, which the sum of a drop-in conv stays."""
    x, edge_index = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3, 0], [2, 1, 1, 0, 1]])
    conv = torch_geometric.nn.GATConv(3, 4)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pyg_dfgnn.accelerate(conv)
    assert type(conv.aggr_module) is aggr.SumAggregation
    conv.aggr_module.__class__ = kind
    with emulated_device():
        assert reasons_of(conv, x, edge_index) == []


@pytest.mark.parametrize("name", [kind.__name__ for kind in DROP_INS if issubclass(kind, aggr.Aggregation)])
def test_a_drop_in_is_pygs_class(name):
    """Same name and parameters; it can be copied, pickled and scripted."""
    own, pygs = getattr(ours, name), getattr(aggr, name)
    assert own.__name__ == pygs.__name__ and issubclass(own, pygs) and DROP_INS[pygs] is own
    assert inspect.signature(own) == inspect.signature(pygs)
    arguments = {
        "MultiAggregation": (["mean", "max"],),
        "DegreeScalerAggregation": (["mean"], ["linear"], DEGREES),
        "QuantileAggregation": (0.3,),
    }.get(name, ())
    layer, upstream = own(*arguments), pygs(*arguments)
    assert repr(layer) == repr(upstream) and layer.state_dict().keys() == upstream.state_dict().keys()
    x, index = torch.rand(4, 3), torch.tensor([1, 1, 0, 3])
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is own and torch.equal(other(x, index, dim_size=4), upstream(x, index, dim_size=4))
    if name in ("MedianAggregation", "QuantileAggregation"):
        return  # PyG's own cannot be scripted.
    assert torch.equal(torch.jit.script(layer)(x, index, dim_size=4), upstream(x, index, dim_size=4))
