"""Graphs, inputs and checks that the tests of the attention kernels on the emulator share."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import direction_of, largest_errors, tolerance
from tests.covering import Row, covering
from tests.emu import ORDERS
from tests.kernels.emulated import emulated_device
from tests.ops.problems import Problem

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def sparse_graph() -> tuple[list[tuple[int, int]], int, int]:
    """About one edge per target, some targets and sources without any, a duplicate: rows packed in a warp."""
    return [(i * 7 % 23, i) for i in range(31) if i % 5] + [(7, 1), (22, 30), (22, 30)], 24, 33


def heavy_graph() -> tuple[list[tuple[int, int]], int, int]:
    """Targets and sources with many more edges than a chunk holds, next to light ones and isolated ones."""
    edges = [(j, 3) for j in range(19)] + [(2, i) for i in range(13)] + [(j, 8) for j in range(5)]
    return edges + [(4, 5), (4, 5), (4, 5), (0, 0)], 20, 14


def dense_graph() -> tuple[list[tuple[int, int]], int, int]:
    """All pairs, some twice: the edges of a row spread over the slots of a warp."""
    return [(j, i) for i in range(5) for j in range(11)] + [(1, 2), (1, 2), (10, 4)], 11, 5


def square_graph() -> tuple[list[tuple[int, int]], int, int]:
    """Sources and targets are the same nodes."""
    return [(i, i * i % 9) for i in range(9)] + [(i, (i + 1) % 9) for i in range(9)] + [(i, 4) for i in range(8)], 9, 9


def batch_graph() -> tuple[list[tuple[int, int]], int, int]:
    """Small graphs side by side: single nodes, nodes without edges, loops and a duplicate."""
    generator = torch.Generator().manual_seed(3)
    edges, first = [(0, 1), (0, 1)], 0
    for size in (5, 1, 9, 3, 3, 12, 2, 7, 4):
        pairs = (torch.rand(size, size, generator=generator) < 0.5).nonzero() + first
        edges += [(int(j), int(i)) for j, i in pairs]
        first += size
    return edges, first, first


GRAPHS = {
    graph.__name__.removesuffix("_graph"): graph for graph in (sparse_graph, heavy_graph, dense_graph, square_graph)
}

AXES = {
    "graph": tuple(GRAPHS),
    "heads": (1, 3, 8),
    "channels": (1, 7, 16, 40),
    "dtype": tuple(NAMES),
    "dropout": (0.0, 0.4),
    "order": ORDERS,
}


def build_graph(edges: list[tuple[int, int]], num_src: int, num_dst: int, device: str = "cpu") -> Graph:
    order = torch.randperm(len(edges))
    edge_index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()[:, order].contiguous()
    return Graph.of(edge_index.to(device), num_src, num_dst)


def problem_of(
    score: str, graph: Graph, heads: int, channels: int, dtype: torch.dtype = torch.float32, edge: bool = False
) -> Problem:
    """Inputs on a graph; where its sources are its targets, the cosine score takes one tensor for both."""
    return Problem(score, graph, heads, channels, dtype, edge, own_targets=graph.num_src != graph.num_dst)


def label(row: Row) -> str:
    options = ["edge"] * row["edge"] + ["dropout"] * (row["dropout"] > 0)
    return "-".join(
        [
            row["score"],
            row["graph"],
            f"H{row['heads']}",
            f"C{row['channels']}",
            NAMES[row["dtype"]],
            *options,
            row["order"],
        ]
    )


def cases(scores: Sequence[str], pairs: Sequence[Sequence[str]], **axes: Sequence[Any]) -> list[Row]:
    """Covers the axes and `operands`, which are a score and whether it has edge features; see :func:`covering`."""
    operands = [(score, edge) for score in scores for edge in (False, True) if not (edge and score == "cosine")]
    rows = covering({"operands": operands, **axes}, pairs=pairs)
    return [{"score": row["operands"][0], "edge": row["operands"][1], **row} for row in rows]


def assert_largest_close(
    dtype: torch.dtype,
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    op: str = "attention",
    known: dict[str, float] | None = None,
    exact_weights: bool = True,
) -> None:
    """Compares by the largest error of each tensor; weights are float32 whatever the storage.

    Args:
        dtype: Storage of the features.
        actual: Results by name.
        expected: In float64.
        op: An op of the table of tolerances.
        known: Errors of some tensors that are measured otherwise.
        exact_weights: Whether weights are computed from the inputs as they are, without tensors of the storage between.
    """
    found = largest_errors(actual, expected) | (known or {})
    for name, error in found.items():
        stored = torch.float32 if name == "weights" and exact_weights else dtype
        assert error <= tolerance(stored, direction_of(name), op).largest, (name, found)


def check(
    problem: Problem,
    graph: Graph,
    dropout_p: float,
    order: str = "forward",
    same_order: bool = True,
    op: str = "attention",
    exact_weights: bool = True,
) -> list[str]:
    """Compares output, weights and all gradients with float64; returns the kernels that ran.

    Args:
        problem: What is computed.
        graph: On which graph.
        dropout_p: With which dropout.
        order: In which the emulator runs threads.
        same_order: Whether forward passes with and without gradients have to give the same bits.
        op: An op of the table of tolerances.
        exact_weights: As for :func:`assert_largest_close`.
    """
    problem.dropout_p = dropout_p
    with emulated_device(order, seed=1) as launched:
        actual = problem.run(seed=5)
        with torch.no_grad():
            out, actual["weights"] = problem.call(seed=5, return_weights=True)
    assert not same_order or torch.equal(out, actual["out"]), "two runs differ"
    actual["out without gradients"] = out
    expected = problem.expected(problem.kept(seed=5))
    expected["out without gradients"] = expected["out"]
    assert_largest_close(problem.dtype, actual, expected, op, exact_weights=exact_weights)
    return launched


def take_sweeps(monkeypatch: pytest.MonkeyPatch, count: int, local: bool = False) -> None:
    """Let attention sweep so many blocks of columns, or take rows one after the other on a graph found to be local."""
    monkeypatch.setattr(row_split, "_blocks", lambda *arguments: count)
    monkeypatch.setattr(row_split, "is_local", lambda *arguments: local)
