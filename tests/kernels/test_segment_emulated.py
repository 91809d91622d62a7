"""The aggregation kernels on the emulator: every statistic, message and gradient against float64."""

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch import segment, traversal
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.segment import STATISTICS, aggregate
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements.segment import MESSAGES
from tests.emu import ORDERS
from tests.emu.loader import compiler
from tests.kernels.covering import Row, covering
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import GRAPHS, NAMES, assert_largest_close, build_graph

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host C++ compiler")

CHUNK = 4
STATS = (("mean",), ("max",), ("min", "std"), STATISTICS)
AXES = {
    "message": tuple(MESSAGES),
    "stats": STATS,
    "channels": (7, 16, 130, 520),
    "dtype": tuple(NAMES),
}
RUNS = {
    "graph": tuple(GRAPHS),
    "layout": ("light", "heavy", "swept"),
    "values": ("normal", "tied"),
    "scaled": (False, True),
    "order": ORDERS,
}
"""How each kernel is run, one after the other."""


def is_possible(row: Row) -> bool:
    """Gates are summed only; in 16 bits rounded messages may tie where exact ones do not."""
    if row["message"] == "gate" and row["stats"] not in (("sum",), ("mean",)):
        return False
    extremes = {"max", "min"} & set(row["stats"])
    return row["dtype"] == torch.float32 or not extremes or (row["message"] == "copy" and not row["scaled"])


def inputs_of(row: Row, graph: Graph) -> dict[str, Tensor]:
    """Operands of the message; tied values are few, zeros among them."""
    message, channels = MESSAGES[row["message"]], row["channels"]
    sizes = {"x": (graph.num_src, channels)}
    if message.edge:
        sizes["edge"] = (graph.num_edges,) if message.edge == "scalar" else (graph.num_edges, channels)
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
    """Every pair of values of what kernels are compiled for, each run in another way."""
    runs = covering(RUNS)
    return list(filter(is_possible, ({**row, **runs[i % len(runs)]} for i, row in enumerate(covering(AXES)))))


@pytest.mark.parametrize("row", rows(), ids=label)
def test_statistics_and_gradients(row, monkeypatch):
    settings(fallback="error")
    torch.manual_seed(0)
    graph = build_graph(*GRAPHS[row["graph"]]())
    if row["layout"] != "light":
        monkeypatch.setattr(segment, "max_edges_of", lambda *sizes: CHUNK)
        monkeypatch.setattr(segment, "ORDERED_EDGES", CHUNK)
    if row["layout"] == "swept":
        monkeypatch.setattr(segment, "_SWEPT_EDGES", 0)
        monkeypatch.setattr(segment, "_CACHE_SHARE", 1e-5)
    inputs, scales = inputs_of(row, graph), {}
    if row["scaled"]:
        scales["source_scale"] = torch.rand(graph.num_src) + 0.5
        if not {"var", "std"} & set(row["stats"]):
            scales["target_scale"] = torch.rand(graph.num_dst) + 0.5
    grad = torch.randn(graph.num_dst, len(row["stats"]), row["channels"]).to(row["dtype"])
    with emulated_device(row["order"], seed=1) as launched:
        actual = run(row, graph, inputs, scales, grad)
        with torch.no_grad():
            without = aggregate(graph, stats=row["stats"], message=row["message"], **inputs, **scales)
    assert {"segment_forward", "segment_backward_sources"} <= set(launched)
    assert torch.equal(without, actual["out"]), "forward passes with and without gradients differ"
    wide = [{name: tensor.double() for name, tensor in some.items()} for some in (inputs, scales)]
    op = "segment/moments" if {"var", "std"} & set(row["stats"]) else "segment"
    assert_largest_close(row["dtype"], actual, run(row, graph, *wide, grad.double()), op)


@pytest.mark.parametrize("stats", STATISTICS)
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
        by_index = aggregate(Graph.of_index(index[shuffled], 3), x[shuffled], STATISTICS)
        by_ptr = aggregate(Graph.of_ptr(ptr), x, STATISTICS)
    expected = aggregate(Graph.of_ptr(ptr), x.double(), STATISTICS)
    for actual in (by_index, by_ptr):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_edges_of_a_hub_are_taken_in_chunks():
    graph = build_graph([(i % 7, 0) for i in range(3000)], 7, 3)
    assert (
        segment.ROW_SPLIT.plan_pass(
            segment.SegmentProblem("copy", ("sum",), 8, torch.float32, graph.device), "forward", graph
        ).max_edges
        < 3000
    )
    assert traversal.max_edges_of(graph.num_edges, 3000) < 3000
    x = torch.randn(7, 8)
    with emulated_device() as launched:
        out = aggregate(graph, x, "mean")
    assert "segment_forward_merge" in launched
    torch.testing.assert_close(out.double(), aggregate(graph, x.double(), "mean"), rtol=1e-6, atol=1e-6)
