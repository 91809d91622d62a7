"""Functional softmax, scatter and segment against PyG's in float64: values, gradients, launches, errors."""

import inspect

import numpy as np
import pytest
import torch
from torch_geometric import utils as pyg
from torch_geometric.index import ptr2index

import pyg_dfgnn
from pyg_dfgnn import utils
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.nn.pool import global_add_pool, global_max_pool, global_mean_pool
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("plain_torch"),
]

GROUPS = {
    "unsorted": torch.tensor([3, 0, 0, 3, 1, 3, 3, 5, 1]),
    "sorted": torch.tensor([0, 0, 1, 1, 1, 4, 6]),
    "hub": torch.cat([torch.full((300,), 2), torch.tensor([0, 4, 4])]),
    "one row": torch.tensor([0]),
    "no rows": torch.zeros(0, dtype=torch.int64),
}
PTR = torch.tensor([0, 3, 3, 4, 9, 9])


def trained(function, src, *args, **kwargs):
    """Output and gradient of a call."""
    src = src.detach().clone().requires_grad_()
    out = function(src, *args, **kwargs)
    grad = torch.linspace(-1, 2, out.numel()).view(out.shape)
    (grad,) = torch.autograd.grad(out, src, grad.to(out.dtype))
    return {"out": out, "grad": grad}


def assert_equals_pyg(name, src, launches, *args, wanted=None, **kwargs):
    """A call makes so many launches forward and backward and gives what PyG's function gives in float64."""
    with emulated_device() as launched, pyg_dfgnn.local_settings(fallback="error"):
        actual = trained(getattr(utils, name), src, *args, **kwargs)
    expected = trained(getattr(pyg, name), src.double(), *args, **kwargs) if wanted is None else wanted
    assert actual["out"].dtype == src.dtype and actual["out"].is_contiguous()
    assert_all_close({key: (value, expected[key]) for key, value in actual.items()}, dtype=src.dtype, op="segment")
    names = [name for name in launched if not name.endswith("_merge")]
    if src.numel():
        assert [names.count("segment_forward"), names.count("segment_backward_sources")] == launches


def values(groups, *rest):
    return torch.randn(GROUPS[groups].numel(), *rest)


@pytest.mark.parametrize("name", ["scatter", "segment", "softmax"])
def test_signature(name):
    own, pygs = (list(inspect.signature(getattr(library, name)).parameters.values()) for library in (utils, pyg))
    assert [(each.name, each.default) for each in own] == [(each.name, each.default) for each in pygs]


def reduced(x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """What a user may script."""
    return utils.scatter(x, group, 0, 3, "mean") + utils.softmax(x, group, None, 3).sum(0) + global_max_pool(x, group)


def test_torchscript_compiles_pygs_functions(monkeypatch):
    # TorchScript reads no function that fills new tensors with NaN.
    monkeypatch.undo()
    x, group = torch.randn(5, 2), torch.tensor([2, 0, 0, 1, 2])
    torch.testing.assert_close(torch.jit.script(reduced)(x, group), reduced(x, group))
    for function in (utils.scatter, global_add_pool, global_mean_pool, global_max_pool):
        torch.testing.assert_close(torch.jit.script(function)(x, group), function(x, group))
    torch.testing.assert_close(torch.jit.script(utils.softmax)(x, group), utils.softmax(x, group))
    ptr = torch.tensor([0, 2, 2, 5])
    torch.testing.assert_close(torch.jit.script(utils.segment)(x, ptr), utils.segment(x, ptr))


# Softmax --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_softmax(groups, rest):
    """Two reductions forward, one backward."""
    src = values(groups, *rest)
    assert_equals_pyg("softmax", src, [3, 0], GROUPS[groups])
    for number in (int, np.int64, torch.tensor):
        assert_equals_pyg("softmax", src, [3, 0], GROUPS[groups], num_nodes=number(9))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_of_offsets(dim):
    """The offsets come before an index, and any dimension may be normalised."""
    src, index = torch.randn(9, 9), ptr2index(PTR)
    wanted = trained(pyg.softmax, src.double(), index, None, 5, dim)
    for positions in (None, index):
        assert_equals_pyg("softmax", src, [3, 0], positions, PTR, dim=dim, wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_in_half_precision(dtype):
    # A sum in half precision, PyG's, is further from float64.
    assert_equals_pyg("softmax", values("unsorted", 4).to(dtype), [3, 0], GROUPS["unsorted"])


def test_softmax_of_equal_and_large_values():
    """Logits of minus infinity are masked, all alike share, large ones do not overflow."""
    index = torch.tensor([0, 0, 1, 1, 1])
    src = torch.tensor([[5.0, -torch.inf], [5.0, 1.0], [0.0, 1e4], [0.0, -1e4], [0.0, 3.0]])
    with emulated_device():
        out = utils.softmax(src, index)
        large = utils.softmax(300 * src[2:], index[2:] - 1)
    assert torch.equal(out, pyg.softmax(src, index)) and torch.equal(large, pyg.softmax(300 * src[2:], index[2:] - 1))
    assert torch.equal(out[:2, 0], torch.full((2,), 0.5)) and torch.equal(out[:2, 1], torch.tensor([0.0, 1.0]))


def test_softmax_leaves_its_input_and_output_free():
    """Either may be edited in place before backward, as with PyG's."""
    grads = []
    for softmax in (utils.softmax, pyg.softmax):
        leaf = torch.arange(8.0).view(4, 2).requires_grad_()
        src = 1 * leaf
        with emulated_device():
            out = softmax(src, torch.tensor([0, 1, 1, 1]))
            src.zero_()
            out.mul_(2)
            grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(*grads)


# Scatter and segment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min", "amax", "amin", "mul"])
@pytest.mark.parametrize("groups", ["unsorted", "no rows"])
def test_scatter(groups, reduce):
    for rest in ((), (3,)):
        assert_equals_pyg("scatter", values(groups, *rest), [1, 1], GROUPS[groups], 0, 7, reduce)
    assert_equals_pyg("scatter", values(groups, 2).t(), [1, 1], GROUPS[groups], dim=-1, reduce=reduce)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_segment(reduce):
    launches = [2, 0] if reduce in ("max", "min") else [1, 1]
    for src in (torch.randn(9), torch.randn(9, 2, 3), torch.randint(-1, 2, (9, 4)).float()):
        assert_equals_pyg("segment", src, launches, PTR, reduce)


def test_any_is_pygs():
    src, index = torch.randn(4, 3), torch.tensor([1, 1, 0, 3])
    with emulated_device() as launched:
        with pyg_dfgnn.local_settings(fallback="silent"):
            assert torch.equal(utils.scatter(src, index, reduce="any"), pyg.scatter(src, index, reduce="any"))
        with (
            pyg_dfgnn.local_settings(fallback="error"),
            pytest.raises(UnsupportedError, match="'any' has no fused kernel"),
        ):
            utils.scatter(src, index, reduce="any")
    assert launched == []


WRONG = {
    "index": ("scatter", (torch.zeros(4, 1, dtype=torch.int64),), {}, ValueError),
    "dim": ("scatter", (torch.zeros(4, dtype=torch.int64), 2), {}, ValueError),
    "reduce": ("scatter", (torch.zeros(4, dtype=torch.int64),), {"reduce": "median"}, ValueError),
    "a statistic": ("scatter", (torch.zeros(4, dtype=torch.int64),), {"reduce": "std"}, ValueError),
    "a segment's": ("segment", (torch.tensor([0, 4]),), {"reduce": "var"}, (RuntimeError, AssertionError)),
    "nothing": ("softmax", (), {}, NotImplementedError),
    "length": ("scatter", (torch.zeros(5, dtype=torch.int64),), {}, RuntimeError),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_pygs(case):
    name, args, kwargs, kind = WRONG[case]
    messages = []
    for library in (utils, pyg):
        with emulated_device(), pytest.raises(kind) as error:
            getattr(library, name)(torch.randn(4, 3), *args, **kwargs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("ptr", [[0, 9], [0, 3], [1, 4], [0, 3, 2, 4]])
def test_offsets_that_do_not_fit(ptr):
    """On a CPU PyG's code would read past the end."""
    with pytest.raises(ValueError, match="'ptr' needs"):
        utils.segment(torch.randn(4, 3), torch.tensor(ptr))


def test_a_group_out_of_range():
    """On a GPU PyG's code would end the process."""
    message = r"'index' needs values in \[0, num_groups=2\) \(got 0 to 3\)"
    with emulated_device():
        for function in (utils.scatter, utils.softmax):
            argument = {"dim_size" if function is utils.scatter else "num_nodes": 2}
            with pytest.raises(IndexError, match=message):
                function(torch.randn(3, 2), torch.tensor([0, 3, 1]), **argument)


@pytest.mark.parametrize("name", ["scatter", "segment", "softmax"])
def test_on_a_cpu_and_while_compiling(name):
    src = torch.randn(9, 4)
    where = PTR if name == "segment" else GROUPS["unsorted"]
    expected = getattr(pyg, name)(src, where)
    with pyg_dfgnn.local_settings(fallback="silent"):
        assert torch.equal(getattr(utils, name)(src, where), expected)
        compiled = torch.compile(getattr(utils, name), backend="eager", fullgraph=name == "segment")
        with emulated_device() as launched:
            torch.testing.assert_close(compiled(src, where), expected)
    assert launched == []


@pytest.mark.parametrize("name", ["scatter", "segment", "softmax"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_second_derivatives(name, reduce):
    """Also where the gradient of the output is a constant."""
    drawn, group, results = torch.randn(9, 2), torch.tensor([0, 0, 1, 1, 1, 1, 3, 3, 4]), []
    arguments = {
        "scatter": (group, 0, 5, reduce),
        "segment": (torch.tensor([0, 2, 6, 6, 8, 9]), reduce),
        "softmax": (group,),
    }
    for library, dtype in ((utils, torch.float32), (pyg, torch.float64)):
        src = drawn.to(dtype).requires_grad_()
        with emulated_device():
            # torch has no second derivative of segments.
            used = "scatter" if library is pyg and name == "segment" else name
            out = getattr(library, used)(src, *arguments[used])
            (grad,) = torch.autograd.grad(out[0].sum() + out.square().sum(), src, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum() + src.sum(), src)
        results.append([grad.detach().double(), second.double()])
    torch.testing.assert_close(*results, **elementwise("float32"))
