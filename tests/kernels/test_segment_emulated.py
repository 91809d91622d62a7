"""The aggregation kernels on the emulator: every statistic, message and gradient against float64."""

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch import segment, traversal
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.segment import aggregate
from pyg_dfgnn.reference.tolerances import elementwise, relative_error
from pyg_dfgnn.settings import local_settings, settings
from pyg_dfgnn.statements.segment import MESSAGES, MOMENTS, STATS
from tests.covering import Row, covering, over
from tests.emu import ORDERS, needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import GRAPHS, NAMES, assert_largest_close, batch_graph, build_graph, square_graph

pytestmark = needs_compiler

CHUNK = 4
AXES = {
    "message": tuple(MESSAGES),
    "stats": (("mean",), ("max",), ("std", "mul"), STATS),
    "channels": (7, 16, 130, 520),
    "dtype": tuple(NAMES),
}
RUNS = {
    "graph": tuple(GRAPHS),
    "layout": ("light", "heavy", "swept", "local"),
    "values": ("normal", "tied"),
    "scaled": (False, True),
    "order": ORDERS,
}
"""How each kernel is run, one after the other."""


def is_possible(row: Row) -> bool:
    """Gates are summed only; in 16 bits rounded messages may tie where exact ones do not."""
    if row["message"] == "gate" and row["stats"] != ("mean",):
        return False
    extremes = {"max", "min"} & set(row["stats"])
    return row["dtype"] == torch.float32 or not extremes or (row["message"] == "copy" and not row["scaled"])


def inputs_of(row: Row, graph: Graph) -> dict[str, Tensor]:
    """Operands of the message; tied values are few, zeros among them."""
    message, channels = MESSAGES[row["message"]], row["channels"]
    sizes = {"x": (graph.num_src, channels)}
    if message.edge:
        sizes["edge"] = (graph.num_edges, *{"scalar": (), "vector": (channels,), "row": (2,)}[message.edge])
    if message.edge == "row":
        sizes |= {"lin_weight": (2, channels), "lin_bias": (channels,)}
    if message.key:
        sizes |= {"key": sizes["x"], "target": (graph.num_dst, channels)}
    drawn = {name: torch.randn(size) for name, size in sizes.items()}
    if row["values"] == "tied":
        drawn = {name: tensor.round() for name, tensor in drawn.items()}
    return {name: tensor if tensor.dim() == 1 else tensor.to(row["dtype"]) for name, tensor in drawn.items()}


def run(
    row: Row, graph: Graph, inputs: dict[str, Tensor], scales: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = aggregate(graph, stats=row["stats"], message=row["message"], **leaves, **scales)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach(), **{f"grad {name}": tensor for name, tensor in zip(leaves, grads, strict=True)}}


def label(row: Row) -> str:
    return "-".join(
        [row["message"], "+".join(row["stats"]), row["graph"], f"C{row['channels']}", NAMES[row["dtype"]]]
        + [row["layout"], row["values"], "scaled" if row["scaled"] else "plain", row["order"]]
    )


def rows() -> list[Row]:
    """What kernels are compiled for, each run in another way that is possible."""
    runs, found = covering(RUNS), []
    for row in covering(AXES, lambda row: is_possible({**row, "scaled": False})):
        run = next(run for run in runs if is_possible({**row, **run}))
        found.append({**row, **run})
        # The next row takes another.
        runs.remove(run)
        runs.append(run)
    return found


def take_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout != "light":
        monkeypatch.setattr(segment, "max_edges_of", lambda *sizes: CHUNK)
        monkeypatch.setattr(segment, "ORDERED_EDGES", CHUNK)
    if layout in ("swept", "local"):
        monkeypatch.setattr(segment, "_SWEPT_EDGES", 0)
        monkeypatch.setattr(segment, "_CACHE_SHARE", 1e-5)
        monkeypatch.setattr(traversal, "LOCAL_MISSES", -1.0 if layout == "swept" else 1.0)


@pytest.mark.parametrize("row", rows(), ids=label)
def test_statistics_and_gradients(row, monkeypatch):
    settings(fallback="error")
    torch.manual_seed(0)
    graph = build_graph(*GRAPHS[row["graph"]]())
    take_layout(row["layout"], monkeypatch)
    inputs, scales = inputs_of(row, graph), {}
    if row["scaled"]:
        scales["source_scale"] = torch.rand(graph.num_src) + 0.5
        if not set(MOMENTS) & set(row["stats"]):
            scales["target_scale"] = torch.rand(graph.num_dst) + 0.5
    grad = torch.randn(graph.num_dst, len(row["stats"]), row["channels"]).to(row["dtype"])
    with emulated_device(row["order"], seed=1) as launched:
        actual = run(row, graph, inputs, scales, grad)
        with torch.no_grad():
            without = aggregate(graph, stats=row["stats"], message=row["message"], **inputs, **scales)
    assert {"segment_forward", "segment_backward_sources"} <= set(launched)
    assert torch.equal(without, actual["out"]), "forward passes with and without gradients differ"
    wide = [{name: tensor.double() for name, tensor in some.items()} for some in (inputs, scales)]
    assert_largest_close(row["dtype"], actual, run(row, graph, *wide, grad.double()), "segment")


@over(
    [("layout", "stats")],
    layout=RUNS["layout"],
    stats=("sum", ("mean", "std"), ("max", "mul")),
    numbers=(1, 2, 4),
    channels=(7, 128),
    dtype=tuple(NAMES),
    graph=tuple(GRAPHS),
    allowed=lambda row: row["dtype"] == torch.float32 or row["stats"] != ("max", "mul"),
)
def test_a_linear_layer_of_the_edges(layout, stats, numbers, channels, dtype, graph, monkeypatch):
    """Its gradients are sums over all edges, in sweeps, in chunks and in order."""
    settings(fallback="error")
    torch.manual_seed(0)
    edges = build_graph(*GRAPHS[graph]())
    take_layout(layout, monkeypatch)
    sizes = {"x": (edges.num_src, channels), "edge": (edges.num_edges, numbers)}
    inputs = {name: torch.randn(size).to(dtype) for name, size in sizes.items()}
    inputs |= {"lin_weight": torch.randn(numbers, channels), "lin_bias": torch.randn(channels)}
    row = {"message": "relu_linear", "stats": stats}
    shape = (channels,) if isinstance(stats, str) else (len(stats), channels)
    grad = torch.randn(edges.num_dst, *shape).to(dtype)
    with emulated_device() as launched:
        actual = run(row, edges, inputs, {}, grad)
    assert {"segment_forward", "segment_backward_sources"} <= set(launched)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    assert_largest_close(dtype, actual, run(row, edges, wide, {}, grad.double()), "segment")


@over(
    [("layout", "scaled")],
    layout=RUNS["layout"],
    scaled=RUNS["scaled"],
    dtype=tuple(NAMES),
    channels=(7, 130, 520),
    graph=("square", "batch", "empty"),
)
def test_self_loops_that_no_array_holds(layout, scaled, dtype, channels, graph, monkeypatch):
    settings(fallback="error")
    torch.manual_seed(0)
    edges, num_nodes, _ = {"square": square_graph, "batch": batch_graph, "empty": lambda: ([], 3, 3)}[graph]()
    take_layout(layout, monkeypatch)
    x, grad = (torch.randn(num_nodes, channels).to(dtype) for _ in range(2))
    scales = {f"{end}_scale": torch.rand(num_nodes) + 0.5 for end in ("source", "target")} if scaled else {}

    def results(edges, x, grad, **how):
        leaf = x.detach().requires_grad_()
        out = aggregate(build_graph(edges, num_nodes, num_nodes), leaf, **how)
        return {"out": out.detach(), "grad x": torch.autograd.grad(out, leaf, grad)[0]}

    with emulated_device() as launched:
        actual = results(edges, x, grad, **scales, self_loops=True)
    assert {"segment_forward", "segment_backward_sources"} <= set(launched)
    wide = {name: tensor.double() for name, tensor in scales.items()}
    stored = results([*edges, *((i, i) for i in range(num_nodes))], x.double(), grad.double(), **wide)
    assert_largest_close(dtype, actual, stored, "segment")
    reference = results(edges, x.double(), grad.double(), **wide, self_loops=True)
    for name, tensor in reference.items():
        torch.testing.assert_close(tensor, stored[name], **elementwise("float64/rounding"))


def hub_values() -> dict[str, Tensor]:
    """Features that cost a variance digits: a mean large beside it, and an outlier where deviations begin."""
    noise = torch.randn(900, 6)
    return {"offset": 100 + noise, "outlier": torch.cat([torch.full((1, 6), 1e4), noise[1:]])}


@pytest.mark.parametrize("values", hub_values())
def test_deviations_of_a_hub_keep_their_digits(values, monkeypatch):
    monkeypatch.setattr(segment, "_SWEPT_EDGES", 0)
    monkeypatch.setattr(segment, "_CACHE_SHARE", 1e-4)
    monkeypatch.setattr(traversal, "LOCAL_MISSES", -1.0)
    torch.manual_seed(0)
    x = hub_values()[values]
    graph = build_graph([(i, i % 30 * (i % 2)) for i in range(900)] + [(i, 0) for i in range(1, 900, 2)], 900, 30)
    results = []
    for features in (x, x.double()):
        leaf = features.requires_grad_()
        with emulated_device() as launched:
            out = aggregate(graph, leaf, ("mean", "std"))
            results.append((out.detach(), *torch.autograd.grad(out[:, 1].sum(), leaf)))
        assert (launched.count("segment_forward") > 1) == (features.dtype == torch.float32)
    # The mean that is left between launches is rounded once.
    bound = {"offset": 1e-5, "outlier": 3e-7}[values]
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < bound


def test_a_product_has_the_gradients_of_torch():
    """No zero, one, several in a group, a group without rows."""
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 4])
    x = torch.tensor([[2.0, -1.5, 3.0, 0.0, 4.0, 0.0, 0.0, 5.0, 0.0]]).t().repeat(1, 3)
    results = []
    for features in (x, x.double()):
        leaf = features.requires_grad_()
        with emulated_device():
            out = aggregate(Graph.of_index(index, 5), leaf, "mul")
            results.append((out.detach(), *torch.autograd.grad(out, leaf, torch.arange(1.0, 16).view(5, 3).to(out))))
    leaf = x.double().requires_grad_()
    rows = index.unsqueeze(1).expand_as(x)
    out = torch.ones(5, 3, dtype=torch.float64).scatter_reduce(0, rows, leaf, "prod")
    torchs = out.detach(), *torch.autograd.grad(out, leaf, torch.arange(1.0, 16, dtype=torch.float64).view(5, 3))
    for kernels, reference, expected in zip(*results, torchs, strict=True):
        assert torch.equal(reference, expected) and torch.equal(kernels.double(), expected)


@pytest.mark.parametrize("stats", ["sum", ("mean", "max", "std")], ids=str)
@pytest.mark.parametrize("edges", [60, 2000], ids=["short rows", "long rows"])
def test_lanes_to_spare_take_rows_or_edges_as_asked(edges, stats):
    """A row of 8 numbers leaves 30 lanes of a warp; both schedules run on short rows and on long ones."""
    torch.manual_seed(0)
    graph = build_graph([(i % 31, i % 20) for i in range(edges)] + [(i % 31, 3) for i in range(300)], 31, 20)
    x = torch.randn(31, 8, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    expected = aggregate(graph, wide, stats)
    (want,) = torch.autograd.grad(expected.square().sum(), wide)
    problem = segment.SegmentProblem("copy", ("sum",), 8, torch.float32, graph.device)
    for schedule, slots in (("feature_parallel", 1), ("neighbour_parallel", 16)):
        plan = segment.FAMILY.by_name[schedule].plan_pass(problem, "forward", graph)
        assert plan.schedule == schedule and plan.constants["EDGE_SLOTS"] == slots
        with local_settings(schedule=schedule, fallback="error"), emulated_device() as launched:
            out = aggregate(graph, x, stats)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert "segment_backward_sources" in launched
        torch.testing.assert_close(out.double(), expected, **elementwise("float32/few_terms"))
        torch.testing.assert_close(grad.double(), want, **elementwise("float32/gradients"))


def test_infinity_reaches_the_mean_beside_a_deviation():
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    x = torch.tensor([[torch.inf], [1.0], [2.0], [3.0], [-torch.inf], [torch.inf], [-torch.inf]])
    for edges in (7, 1):
        with pytest.MonkeyPatch.context() as patch, emulated_device():
            patch.setattr(segment, "max_edges_of", lambda *sizes, longest=edges: longest)
            out = aggregate(Graph.of_index(index, 3), x, ("std", "mean", "sum"))
        expected = [[torch.nan, torch.inf, torch.inf], [torch.nan, -torch.inf, -torch.inf], [torch.nan] * 3]
        torch.testing.assert_close(out.squeeze(2), torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("stats", STATS)
def test_nan_and_infinity_reach_the_statistic(stats):
    index = torch.tensor([0, 0, 1, 1, 2])
    x = torch.tensor([[1.0], [torch.nan], [-torch.inf], [-torch.inf], [torch.inf]])
    with emulated_device():
        out = aggregate(Graph.of_index(index, 4), x, stats)
    expected = aggregate(Graph.of_index(index, 4), x.double(), stats)
    torch.testing.assert_close(out.double(), expected, equal_nan=True)


def test_reduction_of_rows_by_index_and_by_ptr():
    index, ptr = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 3, 3, 5])
    x = torch.randn(5, 6)
    with emulated_device():
        shuffled = torch.randperm(5)
        by_index = aggregate(Graph.of_index(index[shuffled], 3), x[shuffled], STATS)
        by_ptr = aggregate(Graph.of_ptr(ptr), x, STATS)
    expected = aggregate(Graph.of_ptr(ptr), x.double(), STATS)
    for actual in (by_index, by_ptr):
        torch.testing.assert_close(actual.double(), expected, **elementwise("float32/few_terms"))


def test_edges_of_a_hub_are_taken_in_chunks():
    graph = build_graph([(i % 7, 0) for i in range(3000)], 7, 3)
    assert (
        segment.FAMILY.candidates["row_split"]
        .plan_pass(segment.SegmentProblem("copy", ("sum",), 8, torch.float32, graph.device), "forward", graph)
        .max_edges
        < 3000
    )
    assert traversal.max_edges_of(graph.num_edges, 3000) < 3000
    x = torch.randn(7, 8)
    with emulated_device() as launched:
        out = aggregate(graph, x, "mean")
    assert "segment_forward_merge" in launched
    torch.testing.assert_close(out.double(), aggregate(graph, x.double(), "mean"), **elementwise("float32/rounding"))
