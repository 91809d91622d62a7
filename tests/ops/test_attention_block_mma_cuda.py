"""The schedule `block_mma` on a GPU: against float64 and `row_split`, TF32, capture, torch.compile and streams."""

from itertools import product

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import assert_all_close, relative_error, tolerance
from pyg_dfgnn.reference.zoo import EdgeList, sbm
from pyg_dfgnn.settings import local_settings, settings
from tests.kernels.block_mma import products
from tests.ops.problems import Problem, assert_like_rows, pairs
from tests.ops.test_attention_cuda import DEVICE, SLEEP_CYCLES, assert_equal, capture, compiled

pytestmark = pytest.mark.cuda

SCORES = ("dot", "cosine", "add")
# Heads, channels, dtype.
SETUPS = [
    (1, 128, torch.float32),
    (8, 16, torch.float32),
    (4, 64, torch.float32),
    (3, 20, torch.float32),
    (1, 128, torch.bfloat16),
    (8, 16, torch.bfloat16),
    (4, 64, torch.float16),
    (3, 40, torch.float16),
]
# Heads and channels of float32 that may be rounded.
SIZES = [(1, 128), (8, 16)]


def superpixels(num_graphs: int = 40, neighbours: int = 8) -> EdgeList:
    """A batch of graphs of 85 to 150 points with their nearest neighbours in the plane."""
    generator = torch.Generator().manual_seed(1)
    parts, first = [], 0
    for size in torch.randint(85, 151, (num_graphs,), generator=generator).tolist():
        points = torch.rand(size, 2, generator=generator)
        near = torch.cdist(points, points).fill_diagonal_(torch.inf).topk(neighbours, largest=False).indices
        parts.append(torch.stack([near.reshape(-1), torch.arange(size).repeat_interleave(neighbours)]) + first)
        first += size
    return EdgeList("superpixels", torch.cat(parts, dim=1), first, first)


def full(num_src: int, num_dst: int) -> EdgeList:
    """All pairs."""
    return EdgeList(f"full-{num_src}-{num_dst}", torch.ones(num_src, num_dst).nonzero().t(), num_src, num_dst)


SBM = sbm(num_graphs=30, nodes=110)
CASES = [SBM, superpixels(), full(300, 300), full(150, 90)]


def listed(case: EdgeList) -> bool:
    """Whether the columns of its windows are listed, which takes 16 bits or TF32."""
    return case.num_src != case.num_dst


GRID = [(setup, case) for setup, case in product(SETUPS, CASES) if not listed(case) or setup[2] != torch.float32]


def problem_of(score, case=SBM, heads=8, channels=16, dtype=torch.float32):
    problem = Problem(score, case, heads, channels, dtype=dtype, device=DEVICE)
    if score == "cosine" and case.num_src == case.num_dst:
        # One tensor for both ends, as in a layer.
        del problem.inputs["x_dst"]
    return problem


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(compile_once):
    """What the grid needs, found by running it."""
    with compile_once():
        for schedule, score, (setup, case) in product(("block_mma", "row_split"), SCORES, GRID):
            with local_settings(schedule=schedule):
                problem_of(score, case, *setup).run()
        for score, size, case in product(SCORES, SIZES, CASES):
            with local_settings(schedule="block_mma"), products("tf32"):
                problem_of(score, case, *size).run()


@pytest.fixture(autouse=True)
def schedule(general_schedule):
    settings(schedule="block_mma", fallback="error")


@pytest.fixture(params=SCORES)
def score(request):
    return request.param


def beta_size(problem):
    """Sum of the sizes of all terms of the gradient of beta, which cancel for the most part."""
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    beta = inputs["beta"].expand(problem.edge_index.size(1), problem.heads).clone().requires_grad_()
    out, _ = reference.cosine_attention(problem.edge_index, problem.case.num_dst, **{**inputs, "beta": beta})
    return float(torch.autograd.grad(out, beta, problem.grad_out.double())[0].abs().sum())


def assert_matches(problem, actual, expected, kind):
    """Against float64; the gradient of beta, a sum over all edges that cancels, by the size of its terms."""
    compared = pairs(actual, expected)
    if "grad beta" in compared:
        got, want = compared.pop("grad beta")
        assert abs(float(got - want)) <= tolerance(kind).relative * beta_size(problem)
    assert_all_close(compared, kind)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "case"), GRID, ids=[f"{case}-H{setup[0]}-C{setup[1]}-{setup[2]}" for setup, case in GRID]
)
def test_against_float64_and_rows(score, setup, case):
    problem = problem_of(score, case, *setup)
    actual = problem.run()
    assert_matches(problem, actual, problem.expected(), problem.dtype)
    assert_like_rows(problem, actual)
    assert_equal(problem.run(), actual)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids="H{0[0]}-C{0[1]}".format)
def test_tf32(score, size, case):
    """Within the bound of TF32 where torch allows it, and beyond that of float32: it was taken."""
    problem = problem_of(score, case, *size)
    expected = problem.expected()
    with products("tf32"):
        actual = problem.run()
    assert_matches(problem, actual, expected, "tf32")
    assert relative_error(actual["out"], expected["out"]) > 4 * tolerance(torch.float32).relative
    if not listed(case):
        assert_matches(problem, problem.run(), expected, torch.float32)


def test_deterministic_mode(score):
    problem = problem_of(score)
    expected = problem.run()
    with local_settings(deterministic=True):
        for _ in range(3):
            assert_equal(problem.run(), expected)


# Torch ----------------------------------------------------------------------------------------------------------------


def test_capture(score):
    """Each replay of a forward and a backward pass takes what the inputs hold then."""
    problem = problem_of(score)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    results = {}
    captured = capture(problem, leaves, results)
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for name, tensor in leaves.items():
                tensor.copy_(factor * problem.inputs[name])
        captured.replay()
        actual = {name: tensor.clone() for name, tensor in results.items() if name != "weights"}
        assert_equal(actual, problem.run(**{name: factor * tensor for name, tensor in problem.inputs.items()}))


def test_compile(score):
    """No graph break, and the bits of the call that is not compiled."""
    problem = problem_of(score)
    edges = problem.edges
    call = compiled(lambda **inputs: problem.op(edges, **inputs))
    assert_equal(problem.run(call), problem.run())


def test_another_stream(score):
    """Tiles are made on one stream, read on another and freed before that has read them."""
    first, problem = problem_of(score), problem_of(score)
    problem.inputs, problem.grad_out = first.inputs, first.grad_out
    expected = first.run()
    problem.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        actual = problem.run()
    shapes = [tensor.shape for tensor in tensors_of(problem.graph._derived)]
    problem.edge_index = None
    Graph.clear_cache()
    # Freed memory that the other stream still reads must not be handed out here.
    rubbish = [torch.full(shape, -1, dtype=torch.int32, device=DEVICE) for shape in shapes]
    torch.cuda.synchronize()
    assert_equal(actual, expected)
    assert len(rubbish) == len(shapes)


def test_weights_come_from_the_same_softmax(score):
    """Weights that are asked for are those of the output, although another kernel writes them."""
    problem = problem_of(score)
    out, weights = problem.call(return_weights=True)
    assert torch.equal(out, problem.call())
    assert relative_error(weights, problem.expected()["weights"]) < tolerance(torch.float32).relative
