"""The aggregation op on a GPU."""

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.segment import aggregate
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.reference.zoo import hub, random, star
from pyg_dfgnn.settings import local_settings, settings
from pyg_dfgnn.statements.segment import MESSAGES, STATS

pytestmark = pytest.mark.cuda

CASES = (random(50, 40, 300, seed=1), random(3000, 2000, 40_000, seed=2), hub(70_000), star(5000, inward=False))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs_of(message, case, channels, dtype):
    torch.manual_seed(0)
    record = MESSAGES[message]
    rows = {"x": case.num_src} | ({"edge": case.num_edges} if record.edge == "vector" else {})
    rows |= {"key": case.num_src, "target": case.num_dst} if record.key else {}
    tensors = {name: torch.randn(count, channels, device="cuda").to(dtype) for name, count in rows.items()}
    if record.edge == "row":
        sizes = {"edge": (case.num_edges, 2), "lin_weight": (2, channels), "lin_bias": (channels,)}
        layer = {name: torch.randn(size, device="cuda") for name, size in sizes.items()}
        return tensors | layer | {"edge": layer["edge"].to(dtype)}
    return tensors | ({"edge": torch.randn(case.num_edges, device="cuda")} if record.edge == "scalar" else {})


def run(graph, inputs, **arguments):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = aggregate(graph, **leaves, **arguments)
    generator = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(out.shape, device="cuda", generator=generator).bfloat16().to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **{f"grad {name}": tensor for name, tensor in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("channels", [3, 128, 700])
@pytest.mark.parametrize("message", MESSAGES)
def test_against_float64(message, channels, case, dtype):
    settings(fallback="error")
    graph = Graph.of(case.edge_index.cuda(), case.num_src, case.num_dst)
    inputs = inputs_of(message, case, channels, dtype)
    # Rounded messages tie where exact ones do not.
    stats = ("mean", "max", "min") if message == "copy" else "mean"
    actual = run(graph, inputs, stats=stats, message=message)
    expected = run(graph, {name: tensor.double() for name, tensor in inputs.items()}, stats=stats, message=message)
    assert_all_close({name: (actual[name], expected[name]) for name in actual}, dtype, "segment")
    again = run(graph, inputs, stats=stats, message=message)
    assert all(torch.equal(actual[name], again[name]) for name in actual), "two runs differ"


@pytest.mark.parametrize("schedule", ["cusparse", "cusparse_alg3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cusparse(schedule, dtype):
    case = CASES[1]
    inputs = inputs_of("copy", case, 64, dtype)
    # The default algorithm adds up parts of a row in the dtype of the features.
    is_taken = schedule == "cusparse_alg3" or dtype is torch.float32
    with local_settings(schedule=schedule, fallback="error" if is_taken else "silent"):
        for _ in range(2):
            graph = Graph.of(case.edge_index.cuda(), case.num_src, case.num_dst)
            actual = run(graph, inputs)
            expected = run(graph, {"x": inputs["x"].double()})
            assert_all_close({name: (actual[name], expected[name]) for name in actual}, dtype, "segment")
    assert any(isinstance(key, tuple) and key[0] == "cusparse" for key in graph._derived) is is_taken


@pytest.mark.parametrize("schedule", ["feature_parallel", "neighbour_parallel"])
@pytest.mark.parametrize("channels", [8, 64])
def test_lanes_to_spare_take_rows_or_edges_as_asked(schedule, channels):
    for case in CASES:
        graph = Graph.of(case.edge_index.cuda(), case.num_src, case.num_dst)
        inputs = inputs_of("copy", case, channels, torch.float32)
        stats = ("mean", "max", "std")
        with local_settings(schedule=schedule, fallback="error"):
            actual = run(graph, inputs, stats=stats)
        expected = run(graph, {"x": inputs["x"].double()}, stats=stats)
        assert_all_close({name: (actual[name], expected[name]) for name in actual}, torch.float32, "segment")


def test_capture_and_replay_on_other_features():
    case = CASES[1]
    graph = Graph.of(case.edge_index.cuda(), case.num_src, case.num_dst)
    x = torch.randn(case.num_src, 32, device="cuda", requires_grad=True)

    def step():
        out = aggregate(graph, x, STATS)
        return out.detach(), *torch.autograd.grad(out.sum(), x)

    with local_settings(fallback="error"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = step()
        with torch.no_grad():
            x.normal_()
        captured.replay()
        for actual, expected in zip(results, step(), strict=True):
            assert torch.equal(actual, expected)


def test_more_than_2_to_the_31_elements():
    num_src = 5_000_000
    index = torch.randint(num_src, (2, 100_000), device="cuda")
    graph = Graph.of(index, num_src, num_src)
    x = torch.zeros(num_src, 512, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    out = aggregate(graph, x, "sum")
    degree = torch.bincount(index[1][index[0] == num_src - 1], minlength=num_src)
    assert torch.equal(out[:, -1].float(), degree.float())
