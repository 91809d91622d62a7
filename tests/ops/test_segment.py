"""The aggregation op: arguments, tracing, and what it keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck

from pyg_dfgnn.dispatch.segment import CusparsePlan, SegmentProblem
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.ops import host_codegen, segment
from pyg_dfgnn.ops.segment import aggregate
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.statements.segment import MESSAGES, STATS
from tests.covering import over
from tests.ops.problems import Recorder

EDGE_INDEX = torch.tensor([[0, 2, 2, 4, 4, 1, 0], [1, 1, 1, 3, 0, 0, 0]])
SIZES = 5, 4


def operands(message: str, channels: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    record, rows = MESSAGES[message], {"x": SIZES[0]}
    if record.edge == "vector":
        rows["edge"] = EDGE_INDEX.size(1)
    if record.key:
        rows |= {"key": SIZES[0], "target": SIZES[1]}
    tensors = {name: torch.randn(count, channels) for name, count in rows.items()}
    if record.edge == "row":
        tensors |= {"edge": torch.randn(EDGE_INDEX.size(1), 2), "lin_weight": torch.randn(2, channels)}
        tensors |= {"lin_bias": torch.randn(channels)}
    return tensors | ({"edge": torch.randn(EDGE_INDEX.size(1))} if record.edge == "scalar" else {})


def with_gradients(call, tensors):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    out = call(**leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize(
    "message, stats, options",
    [
        *((message, stats, {}) for message in MESSAGES for stats in ("sum", "mean", ("sum", "mean"))),
        *((message, stats, {"scaled": True}) for message in MESSAGES for stats in ("sum", "mean")),
        ("copy", "sum", {"self_loops": True}),
        ("copy", "sum", {"self_loops": True, "scaled": True}),
        ("weight", ("max", "sum", "var"), {}),
        ("copy", "mul", {}),
    ],
    ids=str,
)
def test_second_derivatives(message, stats, options, fused):
    """With all the gradients of the first ones, of which some inputs are no part."""
    options, drawn, results = dict(options), operands(message), []
    sizes = (5, 5) if options.get("self_loops") else SIZES
    if options.pop("scaled", False):
        drawn_scales = {"source_scale": torch.rand(sizes[0]), "target_scale": torch.rand(sizes[1])}
    else:
        drawn_scales = {}
    for dtype in (torch.float32, torch.float64):
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in drawn.items()}
        scales = {name: tensor.to(dtype) for name, tensor in drawn_scales.items()}
        out = aggregate(Graph.of(EDGE_INDEX, *sizes), stats=stats, message=message, **leaves, **scales, **options)
        grads = torch.autograd.grad(out.sin().sum(), list(leaves.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in grads), list(leaves.values()), allow_unused=True)
        results.append([*grads, *second])
    for actual, expected in zip(*results, strict=True):
        if expected is None:
            assert actual is None or not actual.any()
        else:
            torch.testing.assert_close(actual.double(), expected, **elementwise("float32"))


@over(
    # Gates are summed or averaged.
    allowed=lambda row: row["message"] != "gate" or isinstance(row["stats"], str),
    message=tuple(MESSAGES),
    stats=("sum", "mean", ("mean", "max", "std")),
)
def test_compiled_calls_equal_eager_ones(message, stats, fused):
    edges, tensors = EdgeSet(EDGE_INDEX, *SIZES), operands(message)

    def call(**tensors):
        return aggregate(edges, stats=stats, message=message, **tensors)

    torch._dynamo.reset()
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(with_gradients(traced, tensors), with_gradients(call, tensors), strict=True):
        torch.testing.assert_close(actual, expected, **elementwise("float32/rounding"))


@pytest.mark.parametrize("message", MESSAGES)
def test_opcheck(message, fused):
    stats = "sum" if message == "gate" else ("sum", "max", "min")
    with Recorder() as recorder:
        with_gradients(
            lambda **tensors: aggregate(EdgeSet(EDGE_INDEX, *SIZES), stats=stats, message=message, **tensors),
            operands(message),
        )
    assert {program.split(":")[1] for _, program in recorder.calls} == {"forward", "backward"}
    for (func, _), args in recorder.calls.items():
        opcheck(func, args)


def test_compiled_calls_with_self_loops_that_no_array_holds(fused):
    x = torch.randn(5, 6)

    def call(x):
        return aggregate(EdgeSet(EDGE_INDEX, 5, 5), x, self_loops=True)

    with Recorder() as recorder:
        expected = with_gradients(call, {"x": x})
    for (func, _), args in recorder.calls.items():
        opcheck(func, args)
    torch._dynamo.reset()
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    for actual, want in zip(with_gradients(traced, {"x": x}), expected, strict=True):
        torch.testing.assert_close(actual, want, **elementwise("float32/rounding"))


def test_an_output_may_be_edited_in_place(fused):
    """Sums do not read their output again; extremes are computed anew."""
    graph, x = Graph.of(EDGE_INDEX, *SIZES), torch.randn(SIZES[0], 3, requires_grad=True)
    for stats in ("sum", "max"):
        expected = torch.autograd.grad(aggregate(graph, x, stats).sum() * 2, x)[0]
        out = aggregate(graph, x, stats)
        out.mul_(2)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_nothing_per_edge_is_saved(fused):
    graph, x = Graph.of(EDGE_INDEX, *SIZES), torch.randn(SIZES[0], 3, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
        aggregate(graph, x, ("sum", "max", "min"))
    assert all(shape[0] in SIZES for shape in saved)


@pytest.mark.parametrize("num_src, num_dst, edges", [(0, 0, 0), (3, 2, 0), (1, 1, 1)])
def test_small_graphs(num_src, num_dst, edges, fused):
    graph = Graph.of(torch.zeros(2, edges, dtype=torch.int64), num_src, num_dst)
    x = torch.randn(num_src, 4, requires_grad=True)
    out = aggregate(graph, x, STATS)
    assert out.shape == (num_dst, len(STATS), 4) and out.isfinite().all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape and grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stats": "median"}, r"'stats'.*'median'"),
        ({"stats": ()}, r"'stats' needs at least one"),
        ({"message": "multiply"}, r"'message'.*'multiply'"),
        ({"message": "weight"}, r"'edge' needs a tensor for the message 'weight' \(got None\)"),
        ({"edge": torch.ones(7)}, r"'edge' needs None for the message 'copy' \(got a tensor\)"),
        ({"message": "weight", "edge": torch.ones(6)}, r"'edge' needs shape \[E=7\] \(got \[6\]\)"),
        ({"message": "add", "edge": torch.ones(7, 5)}, r"'edge' needs shape \[E=7, C=6\] \(got \[7, 5\]\)"),
        ({"x": torch.ones(4, 6)}, r"'x' needs shape \[N_src=5, C\] \(got \[4, 6\]\)"),
        ({"source_scale": torch.ones(4)}, r"'source_scale' needs shape \[N_src=5\] \(got \[4\]\)"),
        ({"stats": "mean", "target_scale": torch.ones(1)}, r"'target_scale' needs shape \[N_dst=4\] \(got \[1\]\)"),
        ({"stats": "mean", "target_scale": torch.ones(5)}, r"'target_scale' needs shape \[N_dst=4\] \(got \[5\]\)"),
        ({"stats": "var", "target_scale": torch.ones(4)}, r"'target_scale' needs None"),
        ({"self_loops": True}, r"'self_loops' needs as many sources as targets \(got 5 sources and 4 targets\)"),
        ({"stats": "mean", "self_loops": True}, r"'self_loops' needs False .* \(got mean of 'copy'\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    arguments = {"x": torch.ones(5, 6), **arguments}
    with pytest.raises(ValueError, match=message):
        aggregate(Graph.of(EDGE_INDEX, *SIZES), **arguments)


def test_a_capture_prepares_no_product_of_cusparse(monkeypatch):
    made, stream = [], SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(segment, "SpMM", lambda *operands: made.append(operands) or (lambda b, c: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    problem = SegmentProblem("copy", ("sum",), 4, torch.float32, torch.device("cpu"))
    graph = Graph.of(EDGE_INDEX.clone(), *SIZES)
    launch = segment.CusparseLaunch(problem, "forward", CusparsePlan("default"), graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="needs a call before the capture"):
        launch(graph, range(10))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch(graph, range(10))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stream.cuda_stream = 8
    launch(graph, range(10))
    assert len(made) == 1


def test_a_call_finds_its_plan_again(fused):
    graph, x = Graph.of(EDGE_INDEX.clone(), *SIZES), torch.randn(SIZES[0], 3)
    aggregate(graph, x, "mean")
    known = dict(graph.get("plans"))
    aggregate(graph, x.clone(), "mean")
    assert graph.get("plans") == known


@pytest.mark.parametrize("message", MESSAGES)
def test_graphs_of_other_sizes_compile_no_text_anew(message, fused, monkeypatch):
    """A batch of a training run is a new graph in each step."""
    stats = "sum" if message == "gate" else ("sum", "max", "std")

    def call(edge_index, sizes):
        tensors = operands(message)
        if sizes != SIZES:
            rows = {name: 1 if name.startswith("lin_") else 2 for name in tensors}
            tensors = {name: tensor.repeat(rows[name], *[1] * (tensor.dim() - 1)) for name, tensor in tensors.items()}
        graph = Graph.of(edge_index, *sizes)
        with_gradients(lambda **tensors: aggregate(graph, stats=stats, message=message, **tensors), tensors)

    call(EDGE_INDEX.clone(), SIZES)
    texts = []
    monkeypatch.setattr(
        host_codegen, "compile", lambda text, *args: texts.append(text) or compile(text, *args), raising=False
    )
    call(EDGE_INDEX.repeat(1, 2), tuple(2 * size for size in SIZES))
    assert not texts


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_reference_gives_the_dtype_of_the_kernels(message, dtype):
    graph = Graph.of(EDGE_INDEX, *SIZES)
    tensors = {name: t.to(dtype) if t.dim() > 1 else t for name, t in operands(message).items()}
    scale = {"source_scale": torch.rand(SIZES[0])}
    for stats in (
        ("sum", "mean") if message == "gate" else ("sum", "mean", "max", "var", ("sum", "mean"), ("sum", "var"))
    ):
        out = aggregate(graph, stats=stats, message=message, **tensors, **scale)
        wide = aggregate(graph, stats=stats, message=message, **{k: t.double() for k, t in tensors.items()}, **scale)
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), wide, **elementwise("16 bits"))


def test_vectors_of_two_dtypes_meet_in_the_wider_one():
    graph = Graph.of(EDGE_INDEX, *SIZES)
    x, edge = torch.randn(SIZES[0], 3, dtype=torch.bfloat16), torch.randn(EDGE_INDEX.size(1), 3)
    for stats in ("sum", "var", ("sum", "mean"), ("max", "std")):
        assert aggregate(graph, x, stats, message="add", edge=edge).dtype is torch.float32
