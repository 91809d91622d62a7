"""The one table of tolerances, and what compares with it."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyg_dfgnn.reference.tolerances import (
    BACKWARD,
    ELEMENTWISE,
    FORWARD,
    TOLERANCES,
    assert_all_close,
    assert_close,
    largest_errors,
    relative_error,
    tolerance,
    worst_beside,
)


def test_relative_error():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0
    assert relative_error(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), want) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.full((4,), 0.5), torch.zeros(4)) == 1
    with pytest.raises(ValueError, match=r"needs shape \[2\] \(got \[3\]\)"):
        relative_error(torch.zeros(3), want)


def test_largest_errors():
    """An output is measured by itself, a gradient by the largest of all gradients."""
    want = {"out": torch.tensor([1.0, -2.0]), "grad_x": torch.tensor([0.0, 1e-8]), "grad_w": torch.tensor([4.0])}
    got = {"out": torch.tensor([1.0, -1.0]), "grad_x": torch.tensor([1.0, 0.0]), "grad_w": torch.tensor([4.0])}
    assert largest_errors(got, want) == {"out": 0.5, "grad_x": 0.25, "grad_w": 0.0}


def test_beyond_the_bound_the_error_of_pyg_decides():
    errors, pygs = {"out": 3e-6, "grad_x": 5e-6}, {"out": 1e-6, "grad_x": 4e-6}
    assert not worst_beside(errors, 2e-6).is_right
    assert worst_beside(errors, 2e-6, pygs) == ("out", 3e-6, 2e-6)
    assert worst_beside({**errors, "out": 1e-6}, 2e-6, pygs) == ("grad_x", 5e-6, 8e-6)
    assert worst_beside({**errors, "out": 1e-6}, 2e-6, pygs).is_right
    # What is not finite allows nothing and is never right.
    assert worst_beside(errors, 2e-6, {"out": float("nan"), "grad_x": float("inf")}) == ("grad_x", 5e-6, 2e-6)
    assert not worst_beside({"out": float("nan")}, 2e-6, {"out": 1.0}).is_right


@pytest.mark.parametrize("op, dtype, direction", TOLERANCES)
def test_bounds_are_tight(op, dtype, direction):
    bound, _, reason = TOLERANCES[op, dtype, direction]
    name, want = {FORWARD: "out", BACKWARD: "grad_x"}[direction], torch.ones(100, dtype=torch.float64)
    assert_close(name, want * (1 + 0.9 * bound), want, dtype, op)
    with pytest.raises(AssertionError, match=f"worst is '{name}'"):
        assert_all_close({name: (want * (1 + 1.1 * bound), want), "other": (want, want)}, dtype, op)
    assert reason


def test_a_schedule_without_a_row_has_that_of_its_op():
    assert tolerance(torch.float32, op="attention/row_split") == tolerance("float32")
    assert tolerance("float16", BACKWARD, "attention/block_mma").largest > tolerance("float16", BACKWARD).largest
    with pytest.raises(KeyError):
        tolerance("int8")


def inline_bounds(tree: ast.Module) -> Iterator[tuple[float, float]]:
    """Bounds `rtol` and `atol` that calls have as numbers, and not from the table; those of 0 are exact comparisons."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        bounds = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
        if bounds.get("rtol") or bounds.get("atol"):
            yield bounds.get("rtol", 0.0), bounds.get("atol", 0.0)


def test_bounds_of_elements_that_many_tests_share_are_in_the_table():
    assert all(0 < row.rtol < 0.1 and 0 < row.atol < 0.1 and row.reason for row in ELEMENTWISE.values())
    assert len({row[:2] for row in ELEMENTWISE.values()}) == len(ELEMENTWISE)
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    found = Counter(bounds for path in files for bounds in inline_bounds(ast.parse(path.read_text())))
    assert found and {bounds: times for bounds, times in found.items() if times > 2} == {}
    assert found.keys().isdisjoint({row[:2] for row in ELEMENTWISE.values()})


def test_inline_bounds_are_seen():
    text = "f(a, b, rtol=1e-4, atol=1e-5)\nf(rtol=0, atol=0)\nf(**elementwise('float32'))\nf(x, atol=1e-3)"
    assert list(inline_bounds(ast.parse(text))) == [(1e-4, 1e-5), (0.0, 1e-3)]
