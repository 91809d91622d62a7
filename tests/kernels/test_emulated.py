"""The kernels, run by the package's own host code on the emulator, against the float64 reference and its gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.ops.core import draw_seed
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements.scores import SCORES
from tests.emu import ORDERS
from tests.emu.loader import compiler
from tests.kernels.covering import Row, covering
from tests.kernels.emulated import emulated_device

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host compiler (g++)")

# Largest error allowed. float32: rounding of sums of some tens of terms. 16 bit: a result is rounded once, by at most
# 2^-11 (fp16) or 2^-8 (bf16) of its size; some gradients are the sum of two rounded parts.
TOLERANCE = {
    (torch.float32, "out"): 1e-6,
    (torch.float32, "grad"): 2e-6,
    (torch.float16, "out"): 5e-4,
    (torch.float16, "grad"): 8e-4,
    (torch.bfloat16, "out"): 4e-3,
    (torch.bfloat16, "grad"): 6e-3,
}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CHUNK = 4


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


GRAPHS = {
    graph.__name__.removesuffix("_graph"): graph for graph in (sparse_graph, heavy_graph, dense_graph, square_graph)
}


def build_graph(edges: list[tuple[int, int]], num_src: int, num_dst: int) -> Graph:
    order = torch.randperm(len(edges))
    edge_index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()[:, order].contiguous()
    return Graph.of(edge_index, num_src, num_dst)


class Problem:
    """Inputs of one attention call, rounded to their dtype, and how to call an implementation on them."""

    def __init__(self, score: str, graph: Graph, heads: int, channels: int, dtype: torch.dtype, edge: bool) -> None:
        self.score, self.dtype = score, dtype
        nodes = {"src": (graph.num_src, heads, channels), "dst": (graph.num_dst, heads, channels)}
        edges = (graph.num_edges, heads, channels)
        same = graph.num_src == graph.num_dst
        shapes: dict[str, tuple[int, ...]] = {
            "dot": {"query": nodes["dst"], "key": nodes["src"], "value": nodes["src"]},
            "cosine": {"x_src": nodes["src"], **({} if same else {"x_dst": nodes["dst"]}), "beta": (1,)},
            "add": {"value": nodes["src"], "alpha_src": nodes["src"][:2], "alpha_dst": nodes["dst"][:2]},
            "gatv2": {"x_src": nodes["src"], "x_dst": nodes["dst"], "att": (heads, channels)},
        }[score]
        if edge:
            shapes["alpha_edge" if score == "add" else "edge"] = edges[:2] if score == "add" else edges
        parameters = ("beta", "att", "alpha_src", "alpha_dst", "alpha_edge")
        self.inputs = {
            name: torch.randn(shape).to(torch.float32 if name in parameters else dtype)
            for name, shape in shapes.items()
        }
        if score == "gatv2":
            self.inputs["att"] /= channels**0.5
        self.grad_out = torch.randn(nodes["dst"]).to(dtype)

    def run(self, call: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output and gradients of `call(**inputs)`, by name; with `dtype` the inputs are widened to it."""
        inputs = {
            name: (tensor.to(dtype) if dtype else tensor).requires_grad_() for name, tensor in self.inputs.items()
        }
        out = call(**inputs)
        grads = torch.autograd.grad(out, list(inputs.values()), self.grad_out.to(out.dtype))
        return {"out": out.detach(), **{f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)}}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each tensor. Gradients are measured by the largest of them all: the gradient of a score is a
    difference of two such terms, and vanishes with them left over where a row has one edge."""
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()}
    gradient = max(value for name, value in largest.items() if name.startswith("grad"))
    result = {}
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor).abs()
        scale = gradient if name.startswith("grad") else largest[name]
        result[name] = float(difference.max()) / scale if difference.numel() else 0.0
    return result


def check(
    problem: Problem, graph: Graph, dropout_p: float, order: str = "forward", same_order: bool = True
) -> list[str]:
    """Compares output, weights and all gradients with float64; returns the kernels that ran.

    Args:
        problem: What is computed.
        graph: On which graph.
        dropout_p: With which dropout.
        order: In which the emulator runs threads.
        same_order: Whether forward passes with and without gradients have to give the same bits.
    """
    fused, exact = (getattr(module, f"{problem.score}_attention") for module in (ops, reference))
    with emulated_device(order, seed=1) as launched:
        torch.manual_seed(5)
        actual = problem.run(lambda **inputs: fused(graph, **inputs, dropout_p=dropout_p))
        torch.manual_seed(5)
        with torch.no_grad():
            out, actual["weights"] = fused(graph, **problem.inputs, dropout_p=dropout_p, return_weights=True)
    assert not same_order or torch.equal(out, actual["out"]), "two runs differ"
    actual["out without gradients"] = out
    torch.manual_seed(5)
    keep = None
    if dropout_p > 0.0:
        keep = dropout_factor(torch.arange(graph.num_edges), out.shape[1], dropout_p, draw_seed(out.device))
    results: list[Tensor] = []

    def call(**inputs: Tensor) -> Tensor:
        out, weights = exact(graph.edge_index, graph.num_dst, **inputs, keep=keep)
        results.append(weights.detach())
        return out

    expected = problem.run(call, torch.float64)
    expected["weights"] = results[0]
    expected["out without gradients"] = expected["out"]
    found = errors(actual, expected)
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
        # Weights are float32 whatever the storage.
        dtype = torch.float32 if name == "weights" else problem.dtype
        assert found[name] <= TOLERANCE[dtype, "grad" if name.startswith("grad") else "out"], (name, found)
    return launched


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, default_settings):
    """Rows of more than a few edges count as heavy in the schedule under test."""
    settings(schedule="row_split")
    monkeypatch.setattr(row_split, "_max_edges", lambda *sizes: CHUNK)
    monkeypatch.setattr(row_split, "_ORDERED_EDGES", CHUNK)
    torch.manual_seed(0)


AXES = {
    "graph": tuple(GRAPHS),
    "heads": (1, 3, 8),
    "channels": (1, 7, 16, 40),
    "dtype": tuple(NAMES),
    "edge": (False, True),
    "dropout": (0.0, 0.4),
    "order": ORDERS,
}
CASES = [
    row
    for score in SCORES
    for row in covering({"score": [score], **AXES}, lambda row: not (row["edge"] and row["score"] == "cosine"))
]


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


@pytest.mark.parametrize("row", CASES, ids=map(label, CASES))
def test_against_float64(row):
    graph = build_graph(*GRAPHS[row["graph"]]())
    problem = Problem(row["score"], graph, row["heads"], row["channels"], row["dtype"], row["edge"])
    launched = check(problem, graph, row["dropout"], row["order"])
    passes = {"attention_forward", "attention_backward_targets", "attention_backward_sources"}
    if row["graph"] == "heavy":
        passes |= {f"{name}_merge" for name in passes}
    if row["score"] == "add" and not row["edge"]:
        passes -= {"attention_backward_targets", "attention_backward_targets_merge"}
        passes.add("attention_backward_nodes")
    assert passes <= set(launched)
    assert ("attention_backward_targets" in launched) == ("attention_backward_targets" in passes)


SCORE_AND_DTYPE = [
    pytest.param(score, dtype, id=f"{score}-{NAMES[dtype]}")
    for score, dtype in zip(SCORES, [*NAMES, torch.float32], strict=True)
]


# Several loads per lane, odd and even, and heads in groups of blocks.
@pytest.mark.parametrize("shape", [(2, 131), (5, 33), (1, 512), (40, 4)], ids=lambda shape: "H{}-C{}".format(*shape))
@pytest.mark.parametrize(("score", "dtype"), SCORE_AND_DTYPE)
def test_wide_rows(score, dtype, shape):
    graph = build_graph(*heavy_graph())
    check(Problem(score, graph, *shape, dtype, edge=score != "cosine"), graph, dropout_p=0.3)


@pytest.mark.parametrize("score", SCORES)
def test_thread_order_changes_no_bit(score):
    graph = build_graph(*heavy_graph())
    problem = Problem(score, graph, 3, 8, torch.float32, edge=score != "cosine")
    results = []
    for order in ORDERS:
        torch.manual_seed(5)
        with emulated_device(order, seed=2):
            call = getattr(ops, f"{score}_attention")
            results.append(problem.run(lambda **inputs: call(graph, **inputs, dropout_p=0.2)))  # noqa: B023
    for other in results[1:]:
        assert [name for name in other if not torch.equal(other[name], results[0][name])] == []


@pytest.mark.parametrize(("num_src", "num_dst"), [(4, 3), (1, 1), (0, 3), (3, 0)])
@pytest.mark.parametrize("score", SCORES)
def test_no_edges(score, num_src, num_dst):
    graph = build_graph([], num_src, num_dst)
    problem = Problem(score, graph, 2, 4, torch.float32, edge=False)
    call = getattr(ops, f"{score}_attention")
    with emulated_device():
        actual = problem.run(lambda **inputs: call(graph, **inputs))
    for name, tensor in actual.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("score", ["dot", "add"])
def test_an_infinite_value(score, train, name):
    """Reaches the targets of its source as infinity, wherever its edge lies in their rows, and no others."""
    graph = build_graph(*GRAPHS[name]())
    problem = Problem(score, graph, 2, 8, torch.float32, edge=False)
    call, exact = (getattr(module, f"{score}_attention") for module in (ops, reference))
    for source in range(0, graph.num_src, 3):
        inputs = {name: tensor.clone() for name, tensor in problem.inputs.items()}
        inputs["value"][source] = torch.inf
        inputs["value"].requires_grad_(train)
        with emulated_device():
            actual = call(graph, **inputs).detach()
        expected = exact(graph.edge_index, graph.num_dst, **inputs)[0].detach()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("negative_slope", [1.0, 0.0, -0.5, 3.0])
@pytest.mark.parametrize("tangent", [False, True], ids=["edges", "nodes"])
def test_slopes(tangent, negative_slope, monkeypatch):
    """The gradient of the target scalars, with the derivative that the forward pass leaves and without."""
    monkeypatch.setattr(row_split, "has_tangent", lambda *arguments: tangent)
    graph = build_graph(*heavy_graph())
    problem = Problem("add", graph, 3, 8, torch.float32, edge=False)
    call, exact = (module.add_attention for module in (ops, reference))
    with emulated_device() as launched:
        actual = problem.run(lambda **inputs: call(graph, **inputs, negative_slope=negative_slope))
        with torch.no_grad():
            inference = call(graph, **problem.inputs, negative_slope=negative_slope)
    assert torch.equal(inference, actual["out"])
    edges = graph.edge_index, graph.num_dst
    expected = problem.run(lambda **inputs: exact(*edges, **inputs, negative_slope=negative_slope)[0], torch.float64)
    assert ("attention_backward_nodes" in launched) == tangent
    for name, error in errors(actual, expected).items():
        assert error <= TOLERANCE[torch.float32, "grad"], name
    if negative_slope == 1.0:
        assert float(actual["grad alpha_dst"].abs().max()) < 1e-6


def test_target_scalars_that_do_not_matter():
    """Where all pre-activations have one sign the softmax does not depend on the target's term."""
    graph = build_graph(*heavy_graph())
    problem = Problem("add", graph, 2, 8, torch.float32, edge=False)
    problem.inputs["alpha_src"].abs_()
    problem.inputs["alpha_dst"].abs_()
    problem.inputs["value"] += 10.0
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.add_attention(graph, **inputs))
    assert not actual["grad alpha_dst"].any()


def test_a_single_edge():
    graph = build_graph([(0, 0)], 1, 1)
    check(Problem("dot", graph, 1, 1, torch.float32, edge=True), graph, 0.0)


def test_huge_logits_neither_overflow_nor_vanish():
    """The two best edges of a row share it, however large their logits are."""
    graph = Graph.of(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2]]), 3, 3)
    value = torch.randn(3, 1, 4)
    alpha_src, alpha_dst = torch.tensor([[5000.0], [5000.0], [-4000.0]]), torch.tensor([[9.0], [-1e5], [1e30]])
    with emulated_device() as launched:
        out = ops.add_attention(graph, value, alpha_src, alpha_dst)
    assert launched
    torch.testing.assert_close(out, value[:2].mean(0).expand(3, 1, 4), rtol=1e-6, atol=1e-6)


def test_without_target_scalars():
    graph = build_graph(*heavy_graph())
    problem = Problem("add", graph, 2, 6, torch.float32, edge=True)
    del problem.inputs["alpha_dst"]
    check(problem, graph, 0.0)


def test_square_graph_with_two_tensors():
    """Cosine attention where source and target have the same number of rows but are not the same tensor."""
    graph = build_graph(*square_graph())
    problem = Problem("cosine", graph, 2, 6, torch.float32, edge=False)
    problem.inputs["x_dst"] = torch.randn_like(problem.inputs["x_src"])
    check(problem, graph, 0.0)


def test_zero_rows_under_the_norm():
    """A zero vector has cosine 0 to all others, and a gradient that is not NaN."""
    graph = build_graph(*square_graph())
    problem = Problem("cosine", graph, 2, 6, torch.float32, edge=False)
    problem.inputs["x_src"][3] = 0.0
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.cosine_attention(graph, **inputs))
    expected = problem.run(
        lambda **inputs: reference.cosine_attention(graph.edge_index, graph.num_dst, **inputs)[0], torch.float64
    )
    keep = torch.arange(9) != 3  # The gradient at the zero vector itself is 1e12 times a difference of sums.
    for name in actual:
        rows = keep if name in ("out", "grad x_src") else slice(None)
        torch.testing.assert_close(actual[name][rows].double(), expected[name][rows], rtol=1e-5, atol=1e-5)
    assert actual["grad x_src"].isfinite().all()


@pytest.mark.parametrize("layout", ["strided", "misaligned"])
def test_memory_layout_of_inputs(layout):
    graph = build_graph(*dense_graph())
    problem = Problem("dot", graph, 2, 8, torch.bfloat16, edge=True)
    for name, tensor in problem.inputs.items():
        wider = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        shifted = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        problem.inputs[name] = (wider[..., ::2] if layout == "strided" else shifted).copy_(tensor)
    check(problem, graph, 0.0)


def test_gradients_of_strided_and_partial_outputs():
    graph = build_graph(*heavy_graph())
    problem = Problem("gatv2", graph, 2, 8, torch.float32, edge=True)
    problem.grad_out = torch.randn(8, 2, graph.num_dst).permute(2, 1, 0)
    check(problem, graph, 0.0)


def test_dropout_of_everything():
    graph = build_graph(*dense_graph())
    problem = Problem("dot", graph, 2, 8, torch.float32, edge=False)
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.dot_attention(graph, **inputs, dropout_p=1.0))
    for name, tensor in actual.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("score", "dtype"), SCORE_AND_DTYPE)
def test_sweeps_over_column_blocks(score, dtype, order, monkeypatch):
    """Each pass takes three launches, and rows are heavy in some of the column blocks only."""
    monkeypatch.setattr(row_split, "_blocks", lambda *arguments: 3)
    edges, num_src, num_dst = heavy_graph()
    graph = build_graph([(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges, num_src, num_dst)
    problem = Problem(score, graph, 3, 40, dtype, edge=score != "cosine")
    launched = check(problem, graph, 0.3, order)
    for name in ("attention_backward_targets", "attention_backward_sources"):
        assert launched.count(name) == 3, name
        assert launched.count(f"{name}_merge") >= 2, name
    # Once with gradients and once for the weights.
    assert launched.count("attention_forward") == 6


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_sweeps_that_leave_the_tangent(dtype, monkeypatch):
    monkeypatch.setattr(row_split, "_blocks", lambda *arguments: 3)
    edges, num_src, num_dst = heavy_graph()
    graph = build_graph([(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges, num_src, num_dst)
    launched = check(Problem("add", graph, 3, 40, dtype, edge=False), graph, 0.3)
    assert launched.count("attention_forward") == 6
    assert launched.count("attention_backward_nodes") == 1
    assert "attention_backward_targets" not in launched


NARROW_CASES = [
    pytest.param(dtype, order, id=f"{NAMES[dtype]}-{order}")
    for dtype in (torch.float16, torch.bfloat16)
    for order in ORDERS
]


@pytest.mark.parametrize(("dtype", "order"), NARROW_CASES)
@pytest.mark.parametrize("name", ["sparse", "edges"])
def test_packed_rows_of_whole_heads(name, dtype, order):
    """A lane per head on four rows of a warp, some without edges; the pass that leaves the tangent has two lanes."""
    edges, num_src, num_dst = sparse_graph() if name == "sparse" else ([(0, 2), (5, 2), (6, 2), (5, 0)], 7, 9)
    graph = build_graph(edges, num_src, num_dst)
    problem = AttentionProblem("add", 8, 16, dtype, graph.device, False, False)
    lanes = [
        row_split.plan_pass(problem, walk, graph).constants["HEAD_LANES"]
        for walk in ("forward", "dout_dlogit", "sources", "weights")
    ]
    assert lanes == [1, 2, 1, 1]
    launched = check(Problem("add", graph, 8, 16, dtype, edge=False), graph, 0.0, order, same_order=False)
    assert "attention_backward_nodes" in launched and "attention_backward_targets" not in launched


@pytest.mark.parametrize(("dtype", "order"), NARROW_CASES)
@pytest.mark.parametrize("square", [False, True], ids=["bipartite", "square"])
def test_sweeps_of_whole_heads(square, dtype, order, monkeypatch):
    """A lane per head on four edges of a row: hubs, rows without edges, and some without any in a block of columns."""
    monkeypatch.setattr(row_split, "_blocks", lambda *arguments: 3)
    edges, num_src, num_dst = heavy_graph()
    num_src, num_dst = (24, 24) if square else (num_src, num_dst)
    edges = edges + [(j, i) for i in range(num_dst - 2) for j in range(i % 3, 20, 2)] * 2
    graph = build_graph(edges, num_src, num_dst)
    problem = AttentionProblem("cosine", 8, 16, dtype, graph.device, False, False)
    for walk in ("targets", "sources"):
        found = row_split.plan_pass(problem, walk, graph)
        assert found.blocks == 3 and (found.constants["HEAD_LANES"], found.constants["EDGE_SLOTS"]) == (1, 4)
    launched = check(Problem("cosine", graph, 8, 16, dtype, edge=False), graph, 0.0, order)
    for name in ("attention_backward_targets", "attention_backward_sources"):
        assert launched.count(name) == 3 and launched.count(f"{name}_merge") >= 2


@pytest.mark.parametrize(
    ("score", "dtype"), [("add", torch.float32), ("cosine", torch.float32), ("dot", torch.bfloat16)], ids=str
)
def test_sweeps_of_rows_that_share_a_warp(score, dtype, monkeypatch):
    """Some rows have no edge in a block of columns while those beside them have."""
    monkeypatch.setattr(row_split, "_blocks", lambda *arguments: 3)
    num_src = num_dst = 12
    edges = [(j, i) for i in range(num_dst) for j in range(num_src) if i % 4 or j // 4 != i // 4] * 2
    graph = build_graph([*edges, *[(0, 1)] * 40], num_src, num_dst)
    packed = row_split.swept_constants(
        AttentionProblem(score, 1, 128, dtype, torch.device("cpu"), False, False), "forward"
    )
    assert packed["WARP_ROWS"] > 1
    launched = check(Problem(score, graph, 1, 128, dtype, edge=False), graph, 0.0)
    assert launched.count("attention_forward") == launched.count("attention_backward_sources") * 2 == 6
