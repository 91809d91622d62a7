"""The operators on the CPU: memory layouts, dtypes, and what happens to inputs and outputs."""

import math
from contextlib import nullcontext

import pytest
import torch

from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.reference.zoo import EdgeList
from pyg_dfgnn.settings import local_settings
from tests.covering import over
from tests.ops.problems import SCORES, SPARSE, Recorder, assert_equal, pairs, problem_of


def strided(tensor):
    return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]


def misaligned(tensor):
    return torch.cat([tensor.new_full((1,), math.nan), tensor.flatten()])[1:].view(tensor.shape)


def reversed_axes(tensor):
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


@over(
    [("score", "layout"), ("layout", "dtype")],
    score=SCORES,
    layout=(strided, misaligned, reversed_axes),
    dtype=(torch.float32, torch.bfloat16),
)
def test_layouts(score, layout, dtype, fused):
    problem = problem_of(score, full=True, dtype=dtype)
    expected = problem.run(seed=3)
    problem.grad_out = layout(problem.grad_out)
    assert_equal(problem.run(seed=3, **{name: layout(tensor) for name, tensor in problem.inputs.items()}), expected)
    assert fused


def test_expanded_tensors(score, fused):
    """Stride 0 in inputs and, as `out.sum()` makes it, in the gradient of the output."""
    problem = problem_of(score, full=True)
    rows = {name: tensor[:1].expand_as(tensor) for name, tensor in problem.inputs.items()}
    problem.grad_out = torch.ones(()).expand_as(problem.grad_out)
    actual = problem.run(seed=3, **rows)
    problem.grad_out = problem.grad_out.clone()
    assert_equal(actual, problem.run(seed=3, **{name: tensor.clone() for name, tensor in rows.items()}))


def test_inputs_are_not_changed(score, fused):
    problem = problem_of(score, full=True)
    before = {name: tensor.clone() for name, tensor in problem.inputs.items()}
    grad_out = problem.grad_out.clone()
    problem.run()
    assert_equal(problem.inputs, before)
    assert torch.equal(problem.grad_out, grad_out)


def test_heads_side_by_side(score, path):
    problem = problem_of(score, full=True)
    expected = problem.run(seed=3)
    out, weights = problem.call(seed=3, concat=True, return_weights=True)
    assert torch.equal(out, expected["out"].flatten(1)) and weights.dim() == 2
    for _ in range(2):
        # The second time the kernels are known.
        torch.manual_seed(3)
        assert_equal(
            problem.run(lambda **inputs: problem.call(**inputs, concat=True).view_as(expected["out"])), expected
        )


@over(
    [("dtype", "concat", "intercepted"), ("score", "concat")],
    score=SCORES,
    dtype=(torch.float32, torch.bfloat16),
    concat=(False, True),
    intercepted=(False, True),
)
def test_an_editable_output(score, dtype, concat, intercepted, path):
    problem = problem_of(score, dtype=dtype)
    problem.grad_out = problem.grad_out.flatten(1) if concat else problem.grad_out
    results = []
    for edit in (torch.relu, torch.relu_):
        with Recorder() if intercepted else nullcontext():
            results.append(problem.run(lambda **inputs: edit(problem.call(**inputs, concat=concat))))  # noqa: B023
    assert_equal(*results)


@pytest.mark.parametrize("schedule", ["smem", "block_mma", "smmf", "pmf"])
def test_an_editable_output_of_other_schedules(schedule, fused):
    case = EdgeList("distinct", SPARSE.edge_index.unique(dim=1), SPARSE.num_src, SPARSE.num_dst)
    problem = problem_of("dot", case, channels=16)
    with local_settings(schedule=schedule, fallback="error"):
        expected = problem.run(lambda **inputs: torch.relu(problem.call(**inputs)))
        assert_equal(problem.run(lambda **inputs: torch.relu_(problem.call(**inputs))), expected)


def test_a_graph_that_is_kept(score, fused):
    """Backward lets go of the output; another one computes it again, with the gradient of the first."""
    problem = problem_of(score)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    out = problem.call(**leaves)
    node = out.grad_fn
    assert node.out is not None
    first = torch.autograd.grad(out, list(leaves.values()), problem.grad_out, retain_graph=True)
    assert node.out is None
    assert all(map(torch.equal, first, torch.autograd.grad(out, list(leaves.values()), problem.grad_out)))
    assert fused.count("attention_forward") == 2


MIXED = {
    "dot": ({"query": torch.bfloat16}, torch.float32),
    "cosine": ({"x_src": torch.bfloat16, "beta": torch.float64}, torch.float32),
    "add": ({"alpha_src": torch.bfloat16, "alpha_dst": torch.float16}, torch.float32),
    "gatv2": ({"x_dst": torch.bfloat16, "att": torch.bfloat16}, torch.float32),
}


def test_mixed_dtypes(score, path):
    """Features are promoted to their common dtype; each gradient has the dtype of its tensor."""
    dtypes, common = MIXED[score]
    problem = problem_of(score)
    for name, dtype in dtypes.items():
        problem.inputs[name] = problem.inputs[name].to(dtype)
    actual = problem.run()
    assert actual["out"].dtype == common
    for name, tensor in problem.inputs.items():
        assert actual[f"grad {name}"].dtype == tensor.dtype
    expected = problem.expected()
    for dtype in {tensor.dtype for tensor in actual.values()}:
        some = {name: tensor for name, tensor in actual.items() if tensor.dtype == dtype}
        # A gradient in float64 has been computed in float32.
        assert_all_close(pairs(some, expected), torch.float32 if dtype == torch.float64 else dtype)


def test_two_half_types_meet_in_float32(fused):
    problem = problem_of("dot")
    out = problem.call(query=problem.inputs["query"].half(), key=problem.inputs["key"].bfloat16())
    assert out.dtype == torch.float32 and fused == ["attention_forward"]


def test_autocast_changes_nothing(score, path):
    """The operators take what they are given; under autocast the layers around them decide the dtypes."""
    problem = problem_of(score)
    plain = problem.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = problem.run()
    assert {tensor.dtype for tensor in under.values()} == {torch.float32}
    assert_equal(under, plain)
