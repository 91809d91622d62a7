"""The operators on the CPU: the reference path, and the fused path with its launches emulated."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import core as op_core
from pyg_dfgnn.ops import function as op_function
from pyg_dfgnn.ops import prepared
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.reference.zoo import EdgeList, random, zoo
from pyg_dfgnn.runtime.launcher import override
from pyg_dfgnn.settings import local_settings
from tests.covering import over
from tests.ops.problems import (
    DENSE,
    SCORES,
    Problem,
    Recorder,
    assert_equal,
    check_each_gradient_alone,
    check_gradient_through_the_weights,
    pairs,
    problem_of,
)

# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_reference_path_equals_the_reference(score, dtype, full):
    problem = problem_of(score, full=full, dtype=dtype)
    actual = problem.run_with_weights(seed=3)
    assert {tensor.dtype for tensor in actual.values()} == {dtype}
    assert_all_close(pairs(actual, problem.expected(problem.kept(seed=3))))


@over(score=SCORES, full=(False, True))
def test_gradcheck(score, full):
    case = EdgeList("small", torch.tensor([[0, 1, 1, 2], [1, 1, 0, 1]]), 3, 2)
    problem = problem_of(score, case, full=full, dtype=torch.float64)

    def call(*tensors):
        return problem.call(seed=1, **dict(zip(problem.inputs, tensors, strict=True)))

    tensors = [tensor.requires_grad_() for tensor in problem.inputs.values()]
    assert torch.autograd.gradcheck(call, tensors)


def test_float64_never_takes_the_kernels(score, fused):
    problem = problem_of(score, dtype=torch.float64)
    assert_all_close(pairs(problem.run(), problem.expected()))
    assert fused == []


@over(score=SCORES, case=[case for case in zoo() if case.edge_index.size(1) == 0])
def test_without_edges(score, case, path):
    problem = problem_of(score, case)
    out, weights = problem.call(return_weights=True)
    assert out.shape == (case.num_dst, 2, 4) and weights.shape == (0, 2)
    assert_equal(actual := problem.run(), {name: torch.zeros_like(tensor) for name, tensor in actual.items()})


@pytest.mark.parametrize("heads_channels", [(0, 4), (2, 0)], ids=["no-heads", "no-channels"])
def test_without_features(score, heads_channels, path):
    """Nothing to compute, nothing to launch, and no error."""
    heads, channels = heads_channels
    problem = problem_of(score, heads=heads, channels=channels)
    assert problem.call().shape == (8, heads, channels)


def test_beta_as_a_number(path):
    problem = problem_of("cosine")
    assert torch.equal(problem.call(beta=1.25), problem.call())


def test_defaults(path):
    """Arguments left out: no target scalars, targets that are the sources, the usual scale."""
    add = problem_of("add")
    assert torch.equal(add.call(alpha_dst=None), add.call(alpha_dst=torch.zeros(8, 2)))
    cosine = problem_of("cosine")
    x = cosine.inputs["x_src"]
    torch.testing.assert_close(cosine.call(x_dst=None), cosine.call(x_dst=x.clone()))
    torch.testing.assert_close(cosine.call(x_dst=x), cosine.call(x_dst=x.clone()))
    dot = problem_of("dot")
    assert torch.equal(dot.call(), dot.call(scale=0.5))
    assert not torch.equal(dot.call(), dot.call(scale=0.25))


def test_the_vector_of_gatv2_as_a_module_holds_it(path):
    problem = problem_of("gatv2", full=True)
    results = []
    for vector in (problem.inputs["att"], problem.inputs["att"][None]):
        for _ in range(2):
            # The second time the kernels are known.
            results.append(problem.run(seed=3, att=vector))
        assert results[-1]["grad att"].shape == vector.shape
        results[-1]["weights"] = problem.call(att=vector, dropout_p=0.0, return_weights=True)[1]
    assert_equal(results[1], results[3] | {"grad att": results[3]["grad att"][0]})
    assert_equal(results[0], results[1])


def test_target_and_source_in_one_tensor(path):
    """The gradient of a tensor in both roles is the sum of both."""
    problem = problem_of("cosine")
    x, beta = problem.inputs["x_src"], problem.inputs["beta"]
    leaf = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(problem.op(problem.graph, leaf, beta=beta), leaf, problem.grad_out)
    apart = problem.run(x_dst=x.clone())
    torch.testing.assert_close(once, apart["grad x_src"] + apart["grad x_dst"])


@over(score=SCORES, full=(False, True))
def test_gradient_through_the_weights(score, full, path):
    check_gradient_through_the_weights(problem_of(score, full=full))


@over(score=SCORES, full=(False, True))
def test_gradient_through_the_weights_where_operators_are_intercepted(score, full, fused):
    problem = problem_of(score, full=full)
    factor = torch.randn(problem.edge_index.size(1), problem.heads)
    problem.grad_out = torch.ones(())

    def loss(**inputs):
        out, weights = problem.call(**inputs, return_weights=True)
        return out.square().sum() + (factor * weights).sum()

    expected = problem.run(loss, seed=3)
    torch.manual_seed(3)
    with Recorder() as recorder:
        assert_equal(problem.run(loss), expected)
    assert recorder.calls


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
def test_weights_are_in_the_order_of_the_edges(score, self_loops, path):
    """Duplicates and self-loops too; each target's weights sum to 1."""
    problem = problem_of(score)
    graph = Graph.of(problem.edge_index, 8, self_loops=self_loops)
    assert torch.equal(graph.edge_index, problem.edge_index) != self_loops
    out, weights = problem.op(graph, **problem.inputs, return_weights=True)
    assert not weights.requires_grad
    looped = Problem(score, EdgeList("looped", graph.edge_index, 8, 8))
    looped.inputs = problem.inputs
    expected = looped.expected()
    assert_all_close({"out": (out, expected["out"]), "weights": (weights, expected["weights"])}, torch.float32)
    sums = torch.zeros(8, 2).index_add_(0, graph.edge_index[1], weights)
    torch.testing.assert_close(sums, (graph.csr.rowptr.diff() > 0).float()[:, None].expand(8, 2))


# Column blocks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_cache(monkeypatch):
    """Graphs of a few nodes exceed the cache, rows of a few edges count as heavy."""
    monkeypatch.setitem(gpu.known, torch.device("cpu"), replace(gpu.H200, cache_bytes=4096))
    monkeypatch.setattr(row_split, "_MIN_BLOCK_EDGES", 1)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", 4)


@over(score=SCORES, full=(False, True))
def test_sweeps_over_blocks_of_columns(score, full, fused, small_cache):
    problem = problem_of(score, random(24, 10, 480, seed=4, name="denser"), full=full, channels=64)
    actual = problem.run_with_weights(seed=3)
    # Two forward passes, one backward pass.
    for entry, passes in (("forward", 2), ("backward_targets", 1), ("backward_sources", 1)):
        if entry == "backward_targets" and score == "add" and not full:
            assert fused.count("attention_backward_nodes") == 1
        else:
            assert fused.count(f"attention_{entry}") > passes and f"attention_{entry}_merge" in fused
    assert_all_close(pairs(actual, problem.expected(problem.kept(seed=3))))


# Autograd -------------------------------------------------------------------------------------------------------------


def test_each_gradient_alone(score, path):
    check_each_gradient_alone(problem_of(score, full=True))


def test_no_gradient_is_asked_for(score, path):
    problem = problem_of(score)
    assert not problem.call().requires_grad
    leaf = next(iter(problem.inputs.values())).clone().requires_grad_()
    with torch.no_grad():
        assert not problem.call(**{next(iter(problem.inputs)): leaf}).requires_grad


@pytest.fixture
def ways(fused, monkeypatch):
    """Which autograd functions calls go through; a call without any launches its kernels at once."""
    taken = []

    def counted(name, function):
        return lambda *arguments: taken.append(name) or function(*arguments)

    monkeypatch.setattr(op_core, "apply_fused", counted("eager", op_core.apply_fused))
    monkeypatch.setattr(op_function.Traced, "apply", counted("traced", op_function.Traced.apply))
    return taken


def test_no_autograd_without_a_gradient(score, fused, ways):
    problem = problem_of(score, full=True)
    results = []
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        leaves = {
            name: tensor.clone().requires_grad_(context is not nullcontext) for name, tensor in problem.inputs.items()
        }
        torch.manual_seed(3)
        with context():
            results.append(problem.call(**leaves))
            assert fused.count("attention_forward") == len(results) and not results[-1].requires_grad
    assert ways == []
    torch.manual_seed(3)
    with_grad = problem.call(**{name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()})
    assert ways == ["eager"] and with_grad.requires_grad
    assert all(torch.equal(out, with_grad) for out in results)


def test_softmax_is_only_written_where_it_is_read(score, fused):
    problem = problem_of(score)
    softmax_shape = (problem.case.num_dst, problem.heads, 2)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    written = []

    def run(spec, entry, grid, block, arguments, shared_bytes):
        if entry == "attention_forward":
            written.append(any(isinstance(a, torch.Tensor) and a.shape == softmax_shape for a in arguments))

    with override(run):
        problem.call()
        problem.call(return_weights=True)
        problem.call(**leaves)
        problem.call(**leaves, return_weights=True)
    assert written == [False, True, True, True]


def test_what_intercepts_operators_sees_them(score, fused, ways):
    """Also after a call whose kernels the graph remembers."""
    problem = problem_of(score)
    expected = problem.call()
    name, tensor = next(iter(problem.inputs.items()))
    with Recorder() as recorder:
        assert torch.equal(problem.call(), expected)
    assert recorder.calls and ways == ["traced"]
    # Forward mode and torch.func, for which there are no rules, are refused and not ignored.
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        problem.call(**{name: forward_ad.make_dual(tensor, torch.ones_like(tensor))})
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda tensor: problem.call(**{name: tensor}).sum())(tensor)
    assert ways == ["traced"] * 3


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "grad"])
def test_what_a_transform_has_left_behind(score, fused, tracked):
    """Outside of a torch.func transform its tensors count as what they wrap, also after a call that is remembered."""
    problem = problem_of(score)
    left = {}

    def keep(inputs):
        left.update({name: tensor * 1 for name, tensor in inputs.items()})
        return sum(tensor.sum() for tensor in inputs.values())

    torch.func.grad(keep)(problem.inputs)
    leaf = next(reversed(problem.inputs))
    expected = problem.call()
    for name in problem.inputs:
        given = {name: left[name]}
        if tracked and name != leaf:
            given[leaf] = problem.inputs[leaf].clone().requires_grad_()
        assert torch.equal(problem.call(**given), expected), name


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_second_derivatives(score, dropout_p, fused):
    """With the weights that the forward pass has dropped."""
    problem, results = problem_of(score, edge=score != "cosine"), []
    for dtype in (torch.float32, torch.float64):
        inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in problem.inputs.items()}
        leaves, out = list(inputs.values()), problem.call(3, **inputs, dropout_p=dropout_p)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        directions = [torch.arange(grad.numel(), dtype=dtype).cos().view_as(grad) for grad in grads]
        results.append([*grads, *torch.autograd.grad(grads, leaves, directions)])
    assert_all_close({f"grad {place}": pair for place, pair in enumerate(zip(*results, strict=True))})


def test_double_backward_of_the_reference_path(score):
    problem = problem_of(score, dtype=torch.float64)
    tensors = [tensor.requires_grad_() for tensor in problem.inputs.values()]

    def call(*tensors):
        return problem.call(**dict(zip(problem.inputs, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(call, tensors)


def test_repeated_runs_are_equal_bit_by_bit(score, path):
    problem = problem_of(score, DENSE, full=True)
    first = problem.run(seed=3)
    assert_equal(problem.run(seed=3), first)


def test_the_graph_is_built_once(score, fused, monkeypatch):
    from pyg_dfgnn.graph import graph as graph_module

    builds = []
    build = graph_module.build
    monkeypatch.setattr(graph_module, "build", lambda *args, **options: builds.append(1) or build(*args, **options))
    problem = problem_of(score)
    for _ in range(2):
        problem.run()
    compiled = torch.compile(problem.op, backend="aot_eager", fullgraph=True)
    problem.run(lambda **inputs: compiled(problem.edges, **inputs))
    assert len(builds) == 1


def test_a_graph_remembers_a_bounded_number_of_calls(fused, monkeypatch):
    """A scale that changes in each step must not fill the memory."""
    monkeypatch.setattr(prepared, "MAX_PLANS", 5)
    problem = problem_of("dot")
    for step in range(10):
        problem.call(scale=1.0 + step)
    assert len(problem.graph.derived("plans", dict)) == 5
    assert_all_close({"out": (problem.call(scale=0.5), problem.expected()["out"])})


def test_arguments_are_checked_again_after_a_good_call(score, path):
    problem = problem_of(score)
    problem.call()
    for name, tensor in problem.inputs.items():
        with pytest.raises(ValueError, match="needs (shape|one element)"):
            problem.call(**{name: torch.cat([tensor, tensor])})
    for p, error in ((True, TypeError), (2.0, ValueError), ("0", TypeError)):
        with pytest.raises(error, match="'dropout_p' needs"):
            problem.call(dropout_p=p)


def test_settings_and_devices_are_asked_again(fused):
    """What decides the path may change between two calls on one graph."""
    problem = problem_of("dot")
    problem.call()
    launched = len(fused)
    with local_settings(schedule="row_split"):
        problem.call()
    assert len(fused) == launched + 1
    fused_device_types.discard("cpu")
    problem.call()
    assert len(fused) == launched + 1


def test_equal_settings_of_another_block_are_known(fused, monkeypatch):
    problem = problem_of("dot")
    with local_settings(schedule="pmf"):
        problem.call()
    monkeypatch.setattr(op_core, "check_graph", None)
    with local_settings(schedule="pmf"):
        problem.call()
    assert fused[-1] == "attention_pmf_forward"
    with local_settings(schedule="row_split"), pytest.raises(TypeError, match="not callable"):
        problem.call()


# Dropout --------------------------------------------------------------------------------------------------------------


def test_the_seed_decides_the_mask(score, path):
    problem = problem_of(score, full=True)

    def weights(seed):
        return problem.call(seed=seed, return_weights=True)[1]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1) == 0, weights(2) == 0)
    torch.manual_seed(1)
    first, second = (problem.call(return_weights=True)[1] for _ in range(2))
    assert not torch.equal(first == 0, second == 0)


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_dropout_statistics(p, path):
    """Each weight is 0 with probability p, independently of its edge and head, else scaled by 1 / (1 - p)."""
    case = random(40, 20, 500, seed=5)
    problem = problem_of("add", case, heads=8, dropout_p=p)
    plain = problem.call(dropout_p=0.0, return_weights=True)[1]
    masks = []
    for seed in range(4):
        ratio = problem.call(seed=seed, return_weights=True)[1] / plain
        torch.testing.assert_close(ratio[ratio > 0], torch.full_like(ratio[ratio > 0], 1 / (1 - p)))
        masks.append((ratio > 0).float())
    kept = torch.stack(masks)

    def assert_rate(sample, expected):
        # Five standard deviations of the mean of independent draws.
        deviation = math.sqrt(expected * (1 - expected) / sample.numel())
        assert abs(sample.mean().item() - expected) < 5 * deviation

    assert_rate(kept, 1 - p)
    for part in (*kept.unbind(0), *kept.unbind(2)):
        assert_rate(part, 1 - p)
    both = (1 - p) ** 2
    assert_rate(kept[1:] * kept[:-1], both)
    assert_rate(kept[:, 1:] * kept[:, :-1], both)
    for shift in (1, 4):
        assert_rate(kept[..., shift:] * kept[..., :-shift], both)


def test_dropout_of_everything(score, path):
    problem = problem_of(score, full=True, dropout_p=1.0)
    actual = problem.run()
    actual["weights"] = problem.call(return_weights=True)[1]
    assert_equal(actual, {name: torch.zeros_like(tensor) for name, tensor in actual.items()})


def test_no_random_number_is_drawn_without_dropout(score, path):
    problem = problem_of(score)
    state = torch.get_rng_state()
    problem.run()
    assert torch.equal(torch.get_rng_state(), state)


# Not-a-number ---------------------------------------------------------------------------------------------------------


def test_nan_reaches_only_the_rows_that_read_it(score, path):
    """Rows side by side in a warp, empty ones among them, do not see each other's neighbours."""
    problem = problem_of(score, full=True, dropout_p=0.0)
    source, target = problem.edge_index
    clean = problem.run()
    for name, tensor in problem.inputs.items():
        if name in ("beta", "att"):
            continue
        for row in range(tensor.size(0)):
            poisoned = tensor.clone()
            poisoned[row] = math.nan
            if "edge" in name:
                touched = torch.arange(source.numel()) == row
            else:
                touched = (target if name in ("query", "x_dst", "alpha_dst") else source) == row
            rows = torch.zeros(8, dtype=torch.bool).index_fill_(0, target[touched], True)
            actual = problem.run(**{name: poisoned})
            assert torch.equal(actual["out"].isnan().flatten(1).any(1), rows), (name, row)
            assert torch.equal(actual["out"][~rows], clean["out"][~rows]), (name, row)
            senders = torch.zeros(8, dtype=torch.bool).index_fill_(0, source[rows[target]], True)
            for grad_name, grad in actual.items():
                if grad_name in ("out", "grad beta", "grad att"):
                    continue
                if "edge" in grad_name:
                    untouched = ~rows[target]
                elif grad_name in ("grad query", "grad x_dst", "grad alpha_dst"):
                    untouched = ~rows
                else:
                    untouched = ~senders
                if grad_name == f"grad {name}":
                    # The gradient of a cosine at NaN is NaN, whoever reads it.
                    untouched = untouched & (torch.arange(grad.size(0)) != row)
                assert torch.equal(grad[untouched], clean[grad_name][untouched]), (name, row, grad_name)


def test_nan_in_the_gradient_of_one_row(score, path):
    problem = problem_of(score, full=True, dropout_p=0.0)
    source, target = problem.edge_index
    clean = problem.run()
    problem.grad_out = problem.grad_out.clone()
    problem.grad_out[7] = math.nan
    actual = problem.run()
    senders = torch.zeros(8, dtype=torch.bool).index_fill_(0, source[target == 7], True)
    for name, grad in actual.items():
        if name in ("out", "grad beta", "grad att"):
            continue
        if "edge" in name:
            touched = target == 7
        elif name in ("grad query", "grad x_dst", "grad alpha_dst"):
            touched = torch.arange(8) == 7
        else:
            touched = senders
        assert grad[touched].isnan().any(), name
        assert torch.equal(grad[~touched], clean[name][~touched]), name
