"""Graphs, inputs and checks that the tests of the schedule `block_mma` on the emulator share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import assert_all_close, relative_error, tolerance
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import NAMES, assert_largest_close
from tests.kernels.problems import problem_of as problem_on
from tests.ops.problems import Problem, pairs

BLOCK_MMA = "attention/block_mma"
SCORES = ("dot", "cosine", "add")
ENTRIES = {
    "forward": "attention_block_mma_forward",
    "targets": "attention_block_mma_backward_targets",
    "sources": "attention_block_mma_backward_sources",
}


def side_by_side(*parts: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Dense boolean matrices [sources, targets] on the diagonal of one, as edges in random order."""
    edges = torch.block_diag(*parts).nonzero()
    return edges[torch.randperm(edges.size(0))].t().contiguous(), sum(map(len, parts)), sum(p.size(1) for p in parts)


def batch_graph() -> tuple[torch.Tensor, int, int]:
    """Small graphs of all sizes: less than a warp's rows, more than a window's, one of a single node."""
    return side_by_side(*(torch.rand(size, size) < 0.3 for size in (17, 1, 70, 5)))


def full_graph() -> tuple[torch.Tensor, int, int]:
    """All pairs, over an odd number of steps."""
    return side_by_side(torch.ones(41, 41, dtype=torch.bool))


def isolated_graph() -> tuple[torch.Tensor, int, int]:
    """Rows without edges and nodes of no graph, between others."""
    first, second = (torch.rand(size, size) < 0.4 for size in (24, 40))
    first[:, 5:8] = False
    second[33:] = False
    return side_by_side(first, torch.zeros(7, 7, dtype=torch.bool), second)


def bipartite_graph() -> tuple[torch.Tensor, int, int]:
    """Sources that are not the targets: columns are listed. Some windows have a few, some blocks an odd number."""
    dense = torch.rand(75, 50) < 0.25
    dense[:, 20:34] = False
    return side_by_side(dense)


def far_graph() -> tuple[torch.Tensor, int, int]:
    """One segment by a few long edges, sparse but for the first and the last nodes."""
    dense = torch.zeros(90, 90, dtype=torch.bool)
    dense[:30, :30] = torch.rand(30, 30) < 0.4
    dense[60:, 60:] = torch.rand(30, 30) < 0.4
    dense[0, 89] = dense[88, 2] = True
    return side_by_side(dense)


def long_graph() -> Graph:
    """One graph of more nodes than are summed in one go."""
    dense = torch.rand(210, 210) < 0.04
    dense.fill_diagonal_(True)
    dense[0, 209] = True
    return Graph.of(*side_by_side(dense))


GRAPHS = {
    graph.__name__.removesuffix("_graph"): graph
    for graph in (batch_graph, full_graph, isolated_graph, bipartite_graph, far_graph)
}


# Storage, and float32 whose products are rounded: all that listed columns take.
KINDS = {**{name: dtype for dtype, name in NAMES.items()}, "tf32": torch.float32}


def build_graph(name: str) -> Graph:
    torch.manual_seed(1)
    return Graph.of(*GRAPHS[name]())


def problem_of(score: str, graph: Graph, heads=2, channels=16, dtype=torch.float32) -> Problem:
    torch.manual_seed(0)
    return problem_on(score, graph, heads, channels, dtype)


@contextmanager
def products(kind: str) -> Iterator[None]:
    """Lets products of float32 be rounded if the kind is "tf32"."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if kind == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def run(problem: Problem, graph: Graph, order: str = "forward") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Output and gradients by name, and the kernels that ran."""
    with emulated_device(order, seed=1) as launched:
        return problem.run(), launched


def check(problem: Problem, graph: Graph, order: str = "forward") -> list[str]:
    """Compares output and all gradients with float64; returns the kernels that ran."""
    actual, launched = run(problem, graph, order)
    expected = problem.expected()
    cosine = problem.score == "cosine"
    known = {"grad beta": beta_error(problem, graph, actual, expected)} if cosine else {}
    for name, tensor in actual.items():
        assert tensor.dtype == problem.inputs.get(name.removeprefix("grad "), problem.grad_out).dtype, name
    assert_largest_close(problem.dtype, actual, expected, BLOCK_MMA, known)
    return launched


def only_tiles(launched: list[str]) -> bool:
    return [name for name in launched if name != "attention_inverse_norm"] == list(ENTRIES.values())


def check_tiles(problem: Problem, graph: Graph, order: str = "forward") -> None:
    """:func:`check`, and that nothing else ran."""
    assert only_tiles(check(problem, graph, order))


def check_tf32(problem: Problem, graph: Graph, order: str = "forward") -> dict[str, float]:
    """The same within the bounds of rounded products; returns the relative errors."""
    with products("tf32"):
        actual, launched = run(problem, graph, order)
    assert only_tiles(launched)
    expected = problem.expected()
    compared = pairs(actual, expected)
    if compared.pop("grad beta", None):
        assert beta_error(problem, graph, actual, expected) <= tolerance("tf32").relative
    assert_all_close(compared, "tf32")
    return {name: relative_error(*pair) for name, pair in compared.items()}


def beta_error(
    problem: Problem, graph: Graph, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> float:
    """Of the gradient of beta, by the size of its terms: they cancel over all edges and leave their rounding behind."""
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    beta = inputs.pop("beta").expand(graph.num_edges, problem.grad_out.size(1)).clone().requires_grad_()
    out, _ = reference.cosine_attention(graph.edge_index, graph.num_dst, **inputs, beta=beta)
    (terms,) = torch.autograd.grad(out, beta, problem.grad_out.double())
    torch.testing.assert_close(terms.sum(), expected["grad beta"][0])
    return float((actual["grad beta"] - expected["grad beta"]).abs() / terms.abs().sum())


ROWS_ENTRIES = {
    "forward": "attention_forward",
    "targets": "attention_backward_targets",
    "sources": "attention_backward_sources",
}


def mix(monkeypatch: pytest.MonkeyPatch, by_rows: tuple[str, ...]) -> None:
    """Lets the schedule `row_split` take some of the passes."""
    choose = dispatch.choose

    def mixed(family, problem, graph, directions, current, **options):
        chosen = choose(family, problem, graph, directions, current, **options)
        rows = choose(family, problem, graph, directions, replace(current, schedule="row_split"), **options)
        return tuple(b if a.direction in by_rows else a for a, b in zip(chosen, rows, strict=True))

    monkeypatch.setattr(dispatch, "choose", mixed)
