"""The operators on a GPU: against float64, torch.compile, autocast, capture, streams, devices, wrong arguments.

The larger grid of shapes and graphs is that of `--grid=full`.
"""

from functools import partial
from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch.attention import row_split as dispatch_rows
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.ops import dot_attention, traversal
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import assert_all_close, tolerance
from pyg_dfgnn.reference.zoo import EdgeList, hub, random, zoo
from pyg_dfgnn.runtime import launcher
from tests.ops.problems import DENSE, SCORES, SPARSE, Problem, assert_equal, check_opcheck, pairs

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
# Long enough for the host to get ahead of the device.
SLEEP_CYCLES = 1_000_000_000
CASES = [*zoo(), hub(3000)]
# heads, channels, dtype, edge features and dropout
SETUPS = [
    (3, 7, torch.float32, False),
    (8, 16, torch.float32, True),
    (1, 128, torch.float32, False),
    (2, 40, torch.bfloat16, True),
    (1, 64, torch.float16, False),
]


def problem_of(score, case=SPARSE, full=False, **options):
    """As in the tests on the CPU, on the GPU, with rows of 128 values."""
    if full:
        options = {"edge": score != "cosine", "dropout_p": 0.5, **options}
    return Problem(score, case, **{"heads": 8, "channels": 16, "device": DEVICE, **options})


def setup_of(score, case, heads, channels, dtype, full):
    return problem_of(score, case, full, heads=heads, channels=channels, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(compile_once):
    """What the grid needs, found by running it."""
    with compile_once():
        for score, setup, case in product(SCORES, SETUPS, [*CASES, DENSE]):
            problem = setup_of(score, case, *setup)
            problem.run()
            problem.call(return_weights=True)


def keep_of(problem, weights):
    """The dropout factors [E, H] behind returned weights."""
    plain = problem.call(dropout_p=0.0, return_weights=True)[1]
    assert not bool(((plain == 0) & (weights != 0)).any())
    return torch.where(weights > 0, 1 / (1 - problem.dropout_p), 0.0).double()


def assert_matches(problem, actual, keep=None):
    """Against float64; a gradient that vanishes by cancellation is measured against the gradient that was given."""
    expected = problem.expected(keep)
    floor = problem.grad_out.double().norm()
    compared = {}
    for name, (got, want) in pairs(actual, expected).items():
        if want.numel() and want.norm() < 1e-6 * floor:
            assert (got.double() - want).norm() <= tolerance(problem.dtype).relative * floor, name
        else:
            compared[name] = (got, want)
    assert_all_close(compared, problem.dtype)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"H{s[0]}-C{s[1]}-{s[2]}{'-full' if s[3] else ''}")
def test_against_float64(score, setup, case):
    problem = setup_of(score, case, *setup)
    actual = problem.run_with_weights(seed=3)
    assert actual["out"].dtype == problem.dtype
    assert_matches(problem, actual, problem.kept(seed=3))
    assert_equal(problem.run(seed=3), actual)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_sweeps_over_blocks_of_columns(score, full, monkeypatch):
    monkeypatch.setattr(dispatch_rows, "_blocks", lambda *sizes: 3)
    monkeypatch.setattr(dispatch_rows, "is_local", lambda *sizes: False)
    monkeypatch.setattr(dispatch_rows, "ORDERED_EDGES", 8)
    problem = problem_of(score, random(60, 12, 1000, seed=6), full)
    launches = []
    launch = launcher.launch

    def counted(kernel, *arguments):
        launches.append(kernel.entry)
        launch(kernel, *arguments)

    monkeypatch.setattr(traversal, "launch", counted)
    actual = problem.run(seed=3)
    actual["weights"] = problem.call(seed=3, return_weights=True)[1]
    # With `dout_dlogit` of the forward pass at hand, the pass over targets reads nodes only.
    targets = 0 if score == "add" and not full else 1
    for entry, passes in (("forward", 2), ("backward_targets", targets), ("backward_sources", 1)):
        assert launches.count(f"attention_{entry}") == 3 * passes
        assert (f"attention_{entry}_merge" in launches) == (passes > 0)
    assert_matches(problem, actual, problem.kept(seed=3))


def test_float64_takes_the_reference(score):
    problem = problem_of(score, dtype=torch.float64)
    assert_all_close(pairs(problem.run(), problem.expected()))


def test_nan_reaches_only_the_rows_that_read_it(score):
    """Packed rows, empty ones among them, do not see each other's neighbours."""
    problem = problem_of(score, heads=1, channels=4)
    source, target = problem.edge_index
    clean = problem.run()
    name = {"dot": "value", "add": "value"}.get(score, "x_src")
    for row in range(8):
        poisoned = problem.inputs[name].clone()
        poisoned[row] = float("nan")
        rows = torch.zeros(8, dtype=torch.bool, device=DEVICE).index_fill_(0, target[source == row], True)
        actual = problem.run(**{name: poisoned})
        assert torch.equal(actual["out"].isnan().flatten(1).any(1), rows), row
        assert torch.equal(actual["out"][~rows], clean["out"][~rows]), row


def test_huge_logits_stay_finite():
    problem = problem_of("add", DENSE)
    problem.inputs["alpha_src"] *= 1e4
    assert all(bool(tensor.isfinite().all()) for tensor in problem.run().values())


def test_deterministic_mode(score):
    problem = problem_of(score, hub(3000), full=True)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(3):
            results.append(problem.run(seed=3))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert_equal(other, results[0])


@pytest.mark.slow
def test_more_elements_than_int32_counts():
    """Rows behind element 2^31 of [N, H, C], as targets and as sources."""
    num_nodes, heads, channels = (1 << 24) + 1000, 2, 64
    assert num_nodes * heads * channels > 1 << 31
    if torch.cuda.mem_get_info(DEVICE)[0] < 90e9:
        pytest.skip("needs 90 GB of free GPU memory")
    shape = (num_nodes, heads, channels)
    query, key, value = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    ends = torch.cat([torch.arange(256), torch.arange(num_nodes - 256, num_nodes)]).to(DEVICE)
    target = ends[torch.randint(512, (4096,), device=DEVICE)]
    source = torch.cat([ends, torch.randint(num_nodes, (4096 - 512,), device=DEVICE)])
    # Only these targets have a gradient, so the graph of these edges gives all gradients.
    rows, local_target = target.unique(return_inverse=True)
    columns, local_source = source.unique(return_inverse=True)
    grad_out = torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16)
    grad_out[rows] = torch.randn(rows.numel(), heads, channels, device=DEVICE, dtype=torch.bfloat16)

    graph = Graph.of(torch.stack([source, target]), num_nodes)
    out = dot_attention(graph, query, key, value)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)

    exact = [t.detach()[i].double().requires_grad_() for t, i in ((query, rows), (key, columns), (value, columns))]
    want, _ = reference.dot_attention(torch.stack([local_source, local_target]), rows.numel(), *exact)
    wanted = torch.autograd.grad(want, exact, grad_out[rows].double())
    compared = {"out": (out.detach()[rows], want.detach())}
    for name, grad, index, expected in zip(("query", "key", "value"), grads, (rows, columns, columns), wanted):
        compared[f"grad {name}"] = (grad[index], expected)
    assert_all_close(compared, torch.bfloat16)
    for tensor, index in ((out.detach(), rows), (grads[0], rows), (grads[1], columns), (grads[2], columns)):
        # Everywhere else there is nothing, up to the last row.
        others = torch.ones(num_nodes, dtype=torch.bool, device=DEVICE).index_fill_(0, index, False)
        sample = others.nonzero().view(-1)[:: 1 << 12]
        assert not bool(tensor[sample].any())


# torch.library and torch.compile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_opcheck(score, full):
    programs = check_opcheck(problem_of(score, full=full))
    assert {program.split(":")[1] for program in programs} == {"forward", "backward", "edge"}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(score, dtype, self_loops):
    problem = problem_of(score, DENSE if not self_loops else SPARSE, dtype=dtype)
    edges = EdgeSet(problem.edge_index, problem.case.num_src, problem.case.num_dst, self_loops)
    expected = problem.run(lambda **inputs: problem.op(edges, **inputs))
    call = compiled(problem.op)
    for _ in range(2):
        assert_equal(problem.run(lambda **inputs: call(edges, **inputs)), expected)


def test_compile_with_dropout(score):
    """Forward and backward of a compiled call draw one mask, another in each call."""
    problem = problem_of(score, DENSE, full=True)
    call = compiled(problem.op)
    masks = []
    for _ in range(2):
        weights = []

        def run(**inputs):
            out, alpha = call(problem.edges, **inputs, dropout_p=0.5, return_weights=True)
            weights.append(alpha)  # noqa: B023
            return out

        actual = problem.run(run)
        keep = keep_of(problem, weights[0])
        assert_matches(problem, {**actual, "weights": weights[0]}, keep)
        masks.append(keep)
    assert not torch.equal(*masks)


def test_compile_once_for_all_sizes(score):
    from torch._dynamo.utils import counters

    sources = {"dot": "key", "add": "alpha_src"}.get(score, "x_src")
    targets = {"dot": "query", "add": "alpha_dst"}.get(score, "x_dst")
    function = problem_of(score).op

    def op(edge_index, inputs):
        return function(EdgeSet(edge_index, inputs[sources].shape[0], inputs[targets].shape[0]), **inputs)

    counters.clear()
    call = compiled(op, dynamic=True)
    # No size equals another one: equal ones would be taken for the same.
    for num_src, num_dst in ((11, 13), (14, 19), (210, 300)):
        problem = problem_of(score, random(num_src, num_dst, 2 * num_dst))
        assert_equal(problem.run(lambda **inputs: call(problem.edge_index, inputs)), problem.run())  # noqa: B023
    assert counters["stats"]["unique_graphs"] == 1


def test_compile_for_cuda_graphs(score):
    """mode='reduce-overhead' replays what was recorded, but never the kernels of another graph."""
    torch._dynamo.reset()
    call = torch.compile(problem_of(score).op, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        problem = problem_of(score, random(24, 10, 200, seed=seed))
        torch.compiler.cudagraph_mark_step_begin()
        actual = problem.run(lambda **inputs: call(problem.edges, **inputs).clone())  # noqa: B023
        assert_equal({name: tensor.clone() for name, tensor in actual.items()}, problem.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    """A linear layer gives 16-bit features, its product with a parameter float32 scalars; both go in together."""
    problem = problem_of("add", DENSE, dtype=dtype)
    weight = torch.eye(16, device=DEVICE)
    with torch.autocast("cuda", dtype=dtype):
        value = problem.inputs["value"].float() @ weight
        assert value.dtype == dtype
        actual = problem.run(value=value)
        wide = problem.run(value=value.float())
    assert actual["out"].dtype == actual["grad value"].dtype == dtype
    assert wide["out"].dtype == wide["grad value"].dtype == actual["grad alpha_src"].dtype == torch.float32
    assert_matches(problem, actual)
    problem.dtype = torch.float32
    assert_matches(problem, wide)


# Capture --------------------------------------------------------------------------------------------------------------


def capture(problem, leaves, results):
    """Captures a forward and a backward pass; each replay overwrites the tensors in `results`."""

    def step():
        out, weights = problem.call(**leaves, return_weights=True)
        grads = torch.autograd.grad(out, list(leaves.values()), problem.grad_out)
        named = {"out": out.detach(), "weights": weights}
        results.update({**named, **{f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}})

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("case", [SPARSE, DENSE, hub(3000)], ids=str)
def test_capture_and_replay(score, case, full):
    """Each replay takes what the inputs hold then, and draws a mask of its own that both passes share."""
    problem = problem_of(score, case, full)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    results = {}
    captured = capture(problem, leaves, results)
    masks = []
    for replay in range(3):
        if replay == 2:
            torch.manual_seed(100)
            changed = Problem(**{name: getattr(problem, name) for name in OPTIONS})
            problem.inputs = changed.inputs
            problem.grad_out.copy_(changed.grad_out)
            with torch.no_grad():
                for name, leaf in leaves.items():
                    leaf.copy_(problem.inputs[name])
        captured.replay()
        torch.cuda.synchronize()
        actual = {name: tensor.clone() for name, tensor in results.items()}
        keep = keep_of(problem, actual["weights"]) if full else None
        assert_matches(problem, actual, keep)
        masks.append(keep)
    if full:
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


OPTIONS = ("score", "case", "heads", "channels", "edge", "dtype", "device", "dropout_p")


# Streams, devices, host -----------------------------------------------------------------------------------------------


def test_side_stream(score):
    """Kernels follow what their stream has queued, in both passes; the allocator knows of the other stream."""
    problem = problem_of(score, hub(3000))
    expected = problem.run()
    late = {name: torch.full_like(tensor, float("nan")) for name, tensor in problem.inputs.items()}
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for name, tensor in late.items():
            tensor.copy_(problem.inputs[name])
        actual = problem.run(**late)
    assert not side.query()
    for tensor in (*late.values(), problem.grad_out):
        tensor.record_stream(side)
    current.wait_stream(side)
    for tensor in actual.values():
        tensor.record_stream(current)
    del late
    # Freed memory that the side stream still reads must not be handed out here.
    rubbish = [torch.full_like(tensor, float("nan")) for tensor in problem.inputs.values()]
    assert_equal(actual, expected)
    assert len(rubbish) == len(problem.inputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(score):
    torch.manual_seed(5)
    first = problem_of(score, hub(3000), full=True)
    second = Problem(**{**{name: getattr(first, name) for name in OPTIONS}, "device": torch.device("cuda", 1)})
    second.inputs = {name: tensor.to("cuda:1") for name, tensor in first.inputs.items()}
    second.grad_out = first.grad_out.to("cuda:1")
    with torch.cuda.device(0):
        first.dropout_p = second.dropout_p = 0.0
        expected, actual = first.run(), second.run()
        assert torch.cuda.current_device() == 0
        assert {tensor.device.index for tensor in actual.values()} == {1}
        assert_equal({name: tensor.to(DEVICE) for name, tensor in actual.items()}, expected)
        with pytest.raises(ValueError, match="needs device cuda:0 .got cuda:1."):
            first.op(first.graph, **second.inputs)


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_a_cached_call_never_waits_for_the_device(score, full):
    problem = problem_of(score, hub(3000), full)
    inputs = {name: tensor.requires_grad_() for name, tensor in problem.inputs.items()}

    def step():
        out, weights = problem.call(**inputs, return_weights=True)
        torch.autograd.grad(out, list(inputs.values()), problem.grad_out)
        return weights

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_host_time_of_a_launch():
    from benchmarks.cases.attention import AttentionCase
    from benchmarks.graphs import benchmark_graph, compressed
    from benchmarks.timing import Timer

    graph, case, launches = benchmark_graph("b", DEVICE, small=True), AttentionCase("dot", "8x16"), []
    inputs = case.make_inputs(graph)
    with torch.no_grad(), launcher.override(lambda *launch: launches.append(launch)):
        case.fused(compressed(graph), inputs)
    ((spec, entry, grid, block, arguments, shared_bytes),) = launches
    kernel, raw = launcher.Kernel(spec, entry), launcher.addresses(arguments)
    launch = partial(launcher.launch, kernel, grid, block, raw, graph.device, shared_bytes)
    # Other processes on the machine lengthen some of the medians.
    assert min(Timer(graph.device).host_us(launch, 300) for _ in range(5)) <= 10.0


# Wrong arguments ------------------------------------------------------------------------------------------------------


def test_wrong_arguments_leave_the_context_usable(score):
    problem = problem_of(score, DENSE, full=True, dropout_p=0.0)
    expected = problem.run()
    num_src, num_dst, num_edges = problem.case.num_src, problem.case.num_dst, problem.edge_index.size(1)
    first, (source, target) = next(iter(problem.inputs)), problem.edge_index
    refused = [
        (ValueError, "needs device cuda:0 .got cpu.", problem.graph, {first: problem.inputs[first].cpu()}),
        (ValueError, "needs device cpu .got cuda:0.", Graph.of(problem.edge_index.cpu(), num_src, num_dst), {}),
        (ValueError, "needs shape", problem.graph, {first: problem.inputs[first][1:]}),
        (TypeError, "needs dtype", problem.graph, {first: problem.inputs[first].long()}),
        (ValueError, "needs shape", Graph.of(problem.edge_index, num_src + 1, num_dst), {}),
        (ValueError, "needs source ids", EdgeSet(problem.edge_index + num_src, num_src, num_dst), {}),
        (ValueError, "needs target ids", EdgeSet(torch.stack([source, target - 1]), num_src, num_dst), {}),
        (ValueError, "'dropout_p' needs", problem.graph, {"dropout_p": -1.0}),
        (TypeError, "'graph' needs", problem.edge_index, {}),
    ]
    if score != "cosine":
        name = "alpha_edge" if score == "add" else "edge"
        edge = problem.inputs[name]
        refused += [
            (ValueError, f"'{name}' needs shape .E={num_edges}", problem.graph, {name: edge[:-1]}),
            (ValueError, f"'{name}' needs device", problem.graph, {name: edge.cpu()}),
        ]
    for error, message, graph, changes in refused:
        with pytest.raises(error, match=message):
            problem.op(graph, **{**problem.inputs, **changes})
        torch.cuda.synchronize()
        assert_equal(problem.run(), expected)


def test_too_many_channels_take_the_reference(score):
    problem = problem_of(score, EdgeList("pair", torch.tensor([[0, 1, 1], [1, 0, 1]]), 2, 2), heads=1, channels=513)
    assert_all_close({"out": (problem.call(), problem.expected()["out"])})
