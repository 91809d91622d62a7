"""One wording for every refused argument."""

import pickle

import numpy as np
import pytest
import torch

from pyg_dfgnn.errors import (
    UnsupportedError,
    as_device,
    as_integer,
    check_bool,
    check_choice,
    check_device,
    check_dtype,
    check_integer,
    check_range,
    check_shape,
    need_extra,
)


def message(error, function, *args):
    with pytest.raises(error) as caught:
        function(*args)
    return str(caught.value)


def test_shape():
    check_shape("edge_attr", torch.zeros(10, 4), ("E", 4), "[E, edge_dim=4]")
    got = message(ValueError, check_shape, "edge_attr", torch.zeros(10, 3), ("E", 4), "[E, edge_dim=4]")
    assert got == "'edge_attr' needs shape [E, edge_dim=4] (got [10, 3])"
    got = message(ValueError, check_shape, "a_src", torch.zeros(5), ("N", "H"), "[N, H]")
    assert got == "'a_src' needs shape [N, H] (got [5])"
    assert message(TypeError, check_shape, "x", None, ("N",), "[N]") == "'x' needs a torch.Tensor (got None)"


def test_dtype():
    check_dtype("x", torch.zeros(1), (torch.float32, torch.float16))
    got = message(TypeError, check_dtype, "x", torch.zeros(1).double(), (torch.float32, torch.float16))
    assert got == "'x' needs dtype torch.float32 or torch.float16 (got torch.float64)"
    assert "'x' needs dtype torch.int32 (got" in message(TypeError, check_dtype, "x", torch.zeros(1), torch.int32)


def test_device():
    check_device("x", torch.zeros(1), torch.device("cpu"))
    got = message(ValueError, check_device, "x", torch.zeros(1, device="meta"), torch.device("cpu"))
    assert got == "'x' needs device cpu (got meta)"


def test_as_device():
    assert as_device("device", "cuda:1") == torch.device("cuda", 1)
    for value in ("gpu", ["cuda"]):
        want = f"'device' needs a device, such as 'cuda' or 'cuda:1' (got {value!r})"
        assert message(ValueError, as_device, "device", value) == want


def test_choice():
    check_choice("fallback", "log", ("log", "error"))
    got = message(ValueError, check_choice, "fallback", "shout", ("log", "error"))
    assert got == "'fallback' needs one of 'log', 'error' (got 'shout')"


@pytest.mark.parametrize(
    "value, low, high, want",
    [
        (2.0, 0, 1, "'dropout_p' needs a value in [0, 1] (got 2.0)"),
        (-1, 0, None, "'dropout_p' needs a value >= 0 (got -1)"),
        (5, None, 4, "'dropout_p' needs a value <= 4 (got 5)"),
        (float("nan"), 0, 1, "'dropout_p' needs a value in [0, 1] (got nan)"),
    ],
)
def test_range(value, low, high, want):
    assert message(ValueError, check_range, "dropout_p", value, low, high) == want


def test_range_takes_bounds_and_refuses_other_types():
    check_range("dropout_p", 0, 0, 1)
    check_range("dropout_p", 1.0, 0, 1)
    assert message(TypeError, check_range, "p", "0.5", 0, 1) == "'p' needs a number (got str '0.5')"
    assert message(TypeError, check_range, "p", True, 0, 1) == "'p' needs a number (got bool True)"


def test_integer():
    check_integer("heads", 4, 1)
    check_integer("seed", -1)
    assert message(TypeError, check_integer, "heads", 4.5) == "'heads' needs an integer (got float 4.5)"
    assert message(TypeError, check_integer, "heads", True) == "'heads' needs an integer (got bool True)"
    assert message(ValueError, check_integer, "heads", 0, 1) == "'heads' needs a value >= 1 (got 0)"


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor([3]).int()])
def test_as_integer(value):
    number = as_integer("num_nodes", value)
    assert number == 3 and type(number) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), 3.0, torch.tensor(3.0), torch.ones(2).long(), "3"]
)
def test_no_integer(value):
    assert message(TypeError, as_integer, "num_nodes", value).startswith("'num_nodes' needs an integer (got ")


def test_a_long_value_is_cut():
    got = message(TypeError, check_integer, "heads", list(range(1000)))
    assert got.startswith("'heads' needs an integer (got list [0, 1, 2,") and got.endswith("...)") and len(got) < 130


def test_bool():
    check_bool("concat", False)
    assert message(TypeError, check_bool, "concat", 1) == "'concat' needs True or False (got int 1)"


def test_unsupported_keeps_its_reasons():
    error = UnsupportedError(["'x' is on the CPU", "double backward"], "schedule 'row_split'")
    assert error.reasons == ["'x' is on the CPU", "double backward"]
    assert str(error) == "schedule 'row_split' cannot run here: 'x' is on the CPU; double backward"
    again = pickle.loads(pickle.dumps(error))
    assert again.reasons == error.reasons and str(again) == str(error)


def test_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=r'pictures need nothing_like_it: pip install "\.\[data\]"'):
        need_extra("nothing_like_it.part", "pictures", "data")


def test_missing_package_that_is_built_with_torch_sees_torch():
    with pytest.raises(ModuleNotFoundError, match=r'nothing_like_it: pip install --no-build-isolation "\.\[sparse'):
        need_extra("nothing_like_it", "samples", "sparse")


def test_missing_package_of_a_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "is_there.py").write_text("import nothing_like_it.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^pictures need nothing_like_it: ") as raised:
        need_extra("is_there", "pictures", "data")
    assert raised.value.name == "nothing_like_it"
