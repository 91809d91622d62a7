"""The schedule `block_mma` on the emulator, against the float64 reference and its gradients."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import DIRECTIONS
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import KEY, diagonal_blocks
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import assert_all_close, relative_error, tolerance
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements.attention import FORWARD, SOURCES, TARGETS
from tests.emu import ORDERS
from tests.emu.loader import compiler
from tests.kernels.covering import Row, covering
from tests.kernels.emulated import emulated_device
from tests.kernels.passes import empty, launch, values_of
from tests.kernels.test_emulated import NAMES, TOLERANCE, Problem, errors

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host compiler (g++)")

SCORES = ("dot", "cosine", "add")
ENTRIES = {
    "forward": "attention_block_mma_forward",
    "targets": "attention_block_mma_backward_targets",
    "sources": "attention_block_mma_backward_sources",
}
# What is allowed of the bound for the other schedules. float32: two TF32 numbers hold 22 of the 24 bits of a factor.
# 16 bit: each weight is rounded too before it meets a value; half as much again is left of that in a sum.
SHARE = {torch.float32: 2.0, torch.float16: 1.5, torch.bfloat16: 1.5}


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


def fits(row: Row) -> bool:
    """Rows are multiples of 16 bytes, few enough of them wide to keep the tests short, and not all where listed."""
    aligned = row["channels"] * KINDS[row["kind"]].itemsize % 16 == 0
    taken = row["graph"] != "bipartite" or row["kind"] != "fp32"
    return aligned and taken and row["heads"] * row["channels"] <= 192


AXES = {"heads": (1, 2, 3, 8), "channels": (4, 8, 16, 20, 24, 40, 64, 128), "kind": tuple(KINDS)}
CASES = sorted(
    covering({"score": SCORES, **AXES, "graph": tuple(GRAPHS), "order": ORDERS}, fits),
    key=lambda row: (row["score"], row["kind"]),
)


def label(row: Row) -> str:
    return f"{row['score']}-{row['graph']}-H{row['heads']}-C{row['channels']}-{row['kind']}-{row['order']}"


def build_graph(name: str) -> Graph:
    torch.manual_seed(1)
    return Graph.of(*GRAPHS[name]())


def problem_of(score: str, graph: Graph, heads=2, channels=16, dtype=torch.float32) -> Problem:
    torch.manual_seed(0)
    return Problem(score, graph, heads, channels, dtype, edge=False)


@pytest.fixture(autouse=True)
def schedule(default_settings):
    settings(schedule="block_mma", fallback="error")


@contextmanager
def products(kind: str) -> Iterator[None]:
    """Lets products of float32 be rounded if the kind is "tf32"."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if kind == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def tf32():
    with products("tf32"):
        yield


@pytest.fixture(params=SCORES)
def score(request):
    return request.param


def run(problem: Problem, graph: Graph, order: str = "forward") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Output and gradients by name, and the kernels that ran."""
    call = getattr(ops, f"{problem.score}_attention")
    with emulated_device(order, seed=1) as launched:
        return problem.run(lambda **inputs: call(graph, **inputs)), launched


def exact(problem: Problem, graph: Graph) -> dict[str, torch.Tensor]:
    """The same in float64, by the reference."""
    call = getattr(reference, f"{problem.score}_attention")
    return problem.run(lambda **inputs: call(graph.edge_index, graph.num_dst, **inputs)[0], torch.float64)


def check(problem: Problem, graph: Graph, order: str = "forward") -> list[str]:
    """Compares output and all gradients with float64; returns the kernels that ran."""
    actual, launched = run(problem, graph, order)
    expected = exact(problem, graph)
    found = errors(actual, expected)
    if problem.score == "cosine":
        found["grad beta"] = beta_error(problem, graph, actual, expected)
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
        assert tensor.dtype == problem.inputs.get(name.removeprefix("grad "), problem.grad_out).dtype, name
        bound = SHARE[problem.dtype] * TOLERANCE[problem.dtype, "grad" if name.startswith("grad") else "out"]
        assert found[name] <= bound, (name, found)
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
    expected = exact(problem, graph)
    compared = {name: (tensor, expected[name]) for name, tensor in actual.items()}
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


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", CASES, ids=map(label, CASES))
def test_against_float64(row):
    graph = build_graph(row["graph"])
    problem = problem_of(row["score"], graph, row["heads"], row["channels"], KINDS[row["kind"]])
    (check_tf32 if row["kind"] == "tf32" else check_tiles)(problem, graph, row["order"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["batch", "bipartite", "isolated"])
@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_heads_in_pairs(score, name, order):
    """Of 16 channels, where products are rounded to TF32: four blocks of two heads."""
    graph = build_graph(name)
    planned = AttentionProblem(score, 8, 16, torch.float32, graph.device, False, False, tf32=True)
    assert FAMILY.candidates["block_mma"].plan_pass(planned, "targets", graph).constants["BLOCK_HEADS"] == 2
    check_tf32(problem_of(score, graph, 8, 16), graph, order)


@pytest.mark.parametrize(("heads", "channels"), [(1, 32), (3, 16), (2, 8)])
def test_sums_over_a_long_segment(score, heads, channels):
    """Products of float32 are summed apart for each step."""
    torch.manual_seed(1)
    graph = long_graph()
    problem = problem_of(score, graph, heads, channels)
    planned = AttentionProblem(score, heads, channels, torch.float32, graph.device, False, False)
    assert all(FAMILY.candidates["block_mma"].plan_pass(planned, walk, graph).constants["FOLD"] for walk in DIRECTIONS)
    check_tiles(problem, graph)


@pytest.mark.parametrize(
    ("name", "kind"), [("batch", "fp32"), ("bipartite", "bf16"), ("bipartite", "tf32")], ids=lambda value: value
)
def test_thread_order_changes_no_bit(score, name, kind):
    graph = build_graph(name)
    problem = problem_of(score, graph, dtype=KINDS[kind])
    with products(kind):
        first, *others = (run(problem, graph, order)[0] for order in ORDERS)
    for other in others:
        assert [name for name in first if not torch.equal(other[name], first[name])] == []


@pytest.mark.parametrize(
    ("listed", "kind"), [(False, "fp32"), (True, "fp16"), (True, "tf32")], ids=["segments", "listed", "listed-tf32"]
)
def test_rows_without_edges(score, listed, kind):
    """Exact zeros, in the output and in every gradient that has a row per node."""
    graph = build_graph("isolated")
    if listed:
        graph.derived(KEY, lambda: None)
    with products(kind):
        actual, _ = run(problem_of(score, graph, dtype=KINDS[kind]), graph)
    empty = {side: (adjacency.rowptr.diff() == 0) for side, adjacency in (("dst", graph.csr), ("src", graph.csc))}
    assert int(empty["dst"].sum()) >= 10 and int(empty["src"].sum()) >= 14
    rows = {"out": "dst", "grad query": "dst", "grad alpha_dst": "dst"}
    rows |= {f"grad {name}": "src" for name in ("key", "value", "alpha_src")}
    for name, side in rows.items():
        if name in actual:
            assert not bool(actual[name][empty[side]].any()), name
            assert bool(actual[name][~empty[side]].flatten(1).any(1).all()), name
    if score == "cosine":
        alone = empty["dst"] & empty["src"]
        assert not bool(actual["grad x_src"][alone].any()) and bool(alone.any())


@pytest.mark.parametrize("kind", ["fp16", "bf16", "tf32"])
def test_segments_and_listed_columns_agree(score, kind):
    """Two ways to lay out the columns of one graph."""
    problem = problem_of(score, build_graph("batch"), dtype=KINDS[kind])
    results = []
    for listed in (False, True):
        graph = build_graph("batch")
        if listed:
            graph.derived(KEY, lambda: None)
        with products(kind):
            actual, launched = run(problem, graph)
        assert ENTRIES["forward"] in launched and (diagonal_blocks(graph) is None) == listed
        results.append(actual)
    found = errors(results[1], {name: tensor.double() for name, tensor in results[0].items()})
    assert max(found.values()) < tolerance("tf32" if kind == "tf32" else KINDS[kind]).relative, found


# Numbers --------------------------------------------------------------------------------------------------------------


def test_huge_logits_neither_overflow_nor_vanish():
    """The two best edges of a row share it, however large their logits are."""
    graph = Graph.of(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2]]), 3)
    value = torch.randn(3, 1, 4)
    alpha_src, alpha_dst = torch.tensor([[5000.0], [5000.0], [-4000.0]]), torch.tensor([[9.0], [-1e5], [1e30]])
    with emulated_device() as launched:
        out = ops.add_attention(graph, value, alpha_src, alpha_dst)
    assert launched == [ENTRIES["forward"]]
    torch.testing.assert_close(out, value[:2].mean(0).expand(3, 1, 4), rtol=1e-6, atol=1e-6)


def test_huge_logits_of_missing_edges():
    """A source whose logits would win everywhere: its targets take it alone, the others do not see it."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs["alpha_src"][::9] = 1e30
    check_tiles(problem, graph)


def test_products_far_apart():
    """Logits of many thousands, exact in float32: the best edges of a row share it."""
    graph = build_graph("batch")
    problem = problem_of("dot", graph)
    for name in ("query", "key"):
        problem.inputs[name] = 64.0 * torch.randint(-3, 4, problem.inputs[name].shape).float()
    actual, expected = run(problem, graph)[0], exact(problem, graph)
    assert relative_error(actual["out"], expected["out"]) < 1e-6
    assert relative_error(actual["grad value"], expected["grad value"]) < 1e-6


def test_rows_of_minus_infinity():
    """As `row_split` has it: 0."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs["alpha_dst"][3:30] = -torch.inf
    call = problem.inputs
    with emulated_device() as launched:
        out = ops.add_attention(graph, **call)
    assert launched == [ENTRIES["forward"]]
    assert not bool(out[3:30].any()) and bool(out.isfinite().all())


def test_a_non_finite_feature_stays_in_its_graph(score):
    """Its own graph may turn to NaN as a whole, the others of the batch keep every bit."""
    graph = build_graph("batch")
    problem = problem_of(score, graph)
    clean, _ = run(problem, graph)
    name = "x_src" if score == "cosine" else "value"
    problem.inputs[name] = problem.inputs[name].detach().clone()
    problem.inputs[name][20] = torch.nan
    actual, _ = run(problem, graph)
    others = torch.ones(graph.num_dst, dtype=torch.bool)
    others[18:88] = False
    assert not bool(actual["out"][20 if score == "cosine" else graph.csc.col[graph.csc.rowptr[20]]].isfinite().all())
    for name, tensor in actual.items():
        if name != "grad beta":
            assert torch.equal(tensor[others], clean[name][others]), name


def test_zero_rows_under_the_norm():
    """A zero vector has cosine 0 to all others, and a gradient that is finite."""
    graph = build_graph("batch")
    problem = problem_of("cosine", graph)
    problem.inputs["x_src"][3] = 0.0
    actual, expected = run(problem, graph)[0], exact(problem, graph)
    keep = (
        torch.arange(graph.num_dst) != 3
    )  # The gradient at the zero vector itself is 1e12 times a difference of sums.
    for name, tensor in actual.items():
        rows = keep if name in ("out", "grad x_src") else slice(None)
        torch.testing.assert_close(tensor[rows].double(), expected[name][rows], rtol=1e-5, atol=1e-5)
        assert tensor.isfinite().all(), name


def test_square_graph_with_two_tensors():
    """Cosine attention where source and target have the same number of rows but are not the same tensor."""
    graph = build_graph("batch")
    problem = problem_of("cosine", graph)
    problem.inputs["x_dst"] = torch.randn_like(problem.inputs["x_src"])
    check_tiles(problem, graph)


@pytest.mark.parametrize("slope", [1.0, 0.0, -0.5])
def test_slopes(slope):
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.add_attention(graph, **inputs, negative_slope=slope))
    ends = graph.edge_index, graph.num_dst
    expected = problem.run(
        lambda **inputs: reference.add_attention(*ends, **inputs, negative_slope=slope)[0], torch.float64
    )
    found = errors(actual, expected)
    assert max(found.values()) <= SHARE[torch.float32] * TOLERANCE[torch.float32, "grad"], found


@pytest.mark.parametrize("name", ["batch", "bipartite"])
def test_tf32(score, name):
    """Rounded where torch allows it, and no more than that: the sums stay in float32."""
    graph = build_graph(name)
    problem = problem_of(score, graph)
    rounded = check_tf32(problem, graph)
    assert min(rounded.values()) > 4 * tolerance(torch.float32).relative, rounded
    if name == "batch":
        check_tiles(problem, graph)
    else:
        with pytest.raises(UnsupportedError, match="listed columns do not pay in full float32"):
            run(problem, graph)


def test_nan_stays_under_tf32(score, tf32):
    """Of the pattern that arithmetic gives it on a GPU, whose rounding up would overflow."""
    graph = build_graph("batch")
    problem = problem_of(score, graph)
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    name = {"cosine": "x_src", "add": "value"}.get(score, "key")
    problem.inputs[name][graph.edge_index[0, 0], 0, 0] = nan
    actual, _ = run(problem, graph)
    expected = exact(problem, graph)
    assert expected["out"].isnan().any()
    for key, tensor in expected.items():
        assert actual[key][tensor.isnan()].isnan().all(), key


def test_tf32_leaves_16_bits_alone(score, tf32):
    """Their products are exact anyway."""
    graph = build_graph("batch")
    problem = problem_of(score, graph, dtype=torch.bfloat16)
    rounded, _ = run(problem, graph)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    plain, _ = run(problem, graph)
    assert [name for name in plain if not torch.equal(plain[name], rounded[name])] == []


# Maxima that are fixed ------------------------------------------------------------------------------------------------

LATE = 80
"""First of the columns of `late_graph` whose logits may be far above those before."""


def late_graph() -> Graph:
    """A graph of several windows and many steps. Row 20 has no edges, row 72 has none to the first 32 columns."""
    torch.manual_seed(1)
    dense = torch.ones(96, 96, dtype=torch.bool)
    dense[:, 20] = dense[:32, 72] = False
    return Graph.of(*side_by_side(dense))


def late_problem(graph: Graph, heads: int, dtype: torch.dtype, rise: float) -> Problem:
    """In the last head the late logits of rows 0 to 15 are larger by `rise`; all logits of row 90 are above 64.

    The products are exact, so that logits of any size are as accurate as small ones.
    """
    problem = problem_of("dot", graph, heads, dtype=dtype)
    query, key = (problem.inputs[name].mul_(4).round_().div_(8) for name in ("query", "key"))
    query[..., :2] = key[..., 0] = 0.0
    key[LATE:, :, 0] = key[..., 1] = 2.0
    query[:16, -1, 0] = 2 * rise
    query[90, :, 1] = 96.0
    return problem


def forward_pass(
    problem: Problem, graph: Graph, kind: str = "fp32", slope: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output and maxima, to base 2, that a forward pass leaves for others, and the columns of a step."""
    heads, channels = problem.grad_out.shape[1:]
    planned = AttentionProblem(
        problem.score, heads, channels, problem.dtype, graph.device, False, False, tf32=kind == "tf32"
    )
    x = {name: tensor.detach() for name, tensor in problem.inputs.items()}
    values = values_of(planned, graph) | {"slope": slope}
    if problem.score == "dot":
        values |= {"target": x["query"], "key": x["key"], "value": x["value"]}
    elif problem.score == "cosine":
        inverse = 1 / x["x_src"].float().norm(dim=-1)
        values |= {"target": x["x_src"], "value": x["x_src"], "parameter": x["beta"]}
        values |= {"target_scalars": inverse, "source_scalars": inverse}
    else:
        values |= {"value": x["value"], "target_scalars": x["alpha_dst"], "source_scalars": x["alpha_src"]}
    values |= {"out": torch.empty_like(problem.grad_out), "row_stats": torch.empty(graph.num_dst, heads, 2)}
    with emulated_device():
        constants = launch(FORWARD, "block_mma", planned, graph, values)
    return values["out"], values["row_stats"][..., 0], constants["STEP"]


def largest(logits: torch.Tensor, graph: Graph, columns: int | None = None) -> torch.Tensor:
    """Of the logits [targets, heads, sources] the largest per row, to base 2, over its edges to the first columns."""
    edges = torch.zeros(graph.num_dst, 1, graph.num_src, dtype=torch.bool)
    edges[graph.edge_index[1], 0, graph.edge_index[0]] = True
    return (logits / math.log(2)).masked_fill(~edges, -torch.inf)[..., :columns].amax(-1)


def products_of(problem: Problem) -> torch.Tensor:
    """The logits of the dot score [targets, heads, sources] in float64."""
    query, key = (problem.inputs[name].detach().double() for name in ("query", "key"))
    return torch.einsum("ihc,jhc->ihj", query, key) * query.size(-1) ** -0.5


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_out_of_bounds_start_again(kind, heads):
    """The maximum of the first steps stays until a sum is too large; then only the block of that row starts again."""
    graph = late_graph()
    problem = late_problem(graph, heads, KINDS[kind], rise=29.0)
    out, maxima, step = forward_pass(problem, graph, kind)
    logits = products_of(problem)
    rows, first, later = (largest(logits, graph, columns) for columns in (None, step, 32 + step))
    close = {"rtol": 0.0, "atol": 0.02 if kind == "tf32" else 1e-4}
    # The whole block of rows 0 to 15, one row of which has no edges.
    taken = torch.arange(32) != 20
    torch.testing.assert_close(maxima[:32, -1][taken].double(), rows[:32, -1][taken], **close)
    assert bool((rows[:16, -1] > 40).all()) and not bool(maxima[20].any())
    # What other rows fixed is left alone, and so are the heads beside it: once all rows of a warp have edges.
    torch.testing.assert_close(maxima[48:64].double(), first[48:64], **close)
    torch.testing.assert_close(maxima[64:80].double(), later[64:80], **close)
    assert all(bool((rows > fixed + 0.1)[48:80].any()) for fixed in (first, later))
    # Large maxima are fixed nowhere in a warp.
    torch.testing.assert_close(maxima[80:].double(), rows[80:], **close)
    if heads > 1:
        torch.testing.assert_close(maxima[:16, 0].double(), first[:16, 0], **close)
    expected = exact(problem, graph)["out"]
    if kind == "tf32":
        assert_all_close({"out": (out, expected)}, "tf32")
    else:
        bound = SHARE[problem.dtype] * TOLERANCE[problem.dtype, "out"]
        assert (out - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_all_passes_after_a_start_again(kind):
    graph = late_graph()
    (check_tf32 if kind == "tf32" else check_tiles)(late_problem(graph, 2, KINDS[kind], rise=29.0), graph)


@pytest.mark.parametrize(("kind", "rise"), [("fp32", 20.0), ("bf16", 20.0), ("tf32", 20.0), ("fp16", 4.0)])
def test_sums_within_bounds_stay(kind, rise):
    """Weights far above 1, in all passes."""
    graph = late_graph()
    problem = late_problem(graph, 2, KINDS[kind], rise)
    _, maxima, step = forward_pass(problem, graph, kind)
    logits = products_of(problem)
    rows, first = largest(logits, graph), largest(logits, graph, step)
    torch.testing.assert_close(maxima[:16].double(), first[:16], rtol=0.0, atol=0.02 if kind == "tf32" else 1e-4)
    assert bool((rows - first > rise)[:16, -1].all())
    (check_tf32 if kind == "tf32" else check_tiles)(problem, graph)


@pytest.mark.parametrize(
    ("kind", "beta", "bound"),
    [
        *(("fp32", beta, True) for beta in (0.0, 0.25, -2.0, 13.5)),
        *(("fp32", beta, False) for beta in (-14.0, 30.0)),
        *(("fp16", beta, True) for beta in (-2.5, 0.0)),
        *(("fp16", beta, False) for beta in (3.0, 20.0)),
        *(("bf16", beta, True) for beta in (-13.0, 1.0)),
        ("bf16", 50.0, False),
        ("tf32", -13.0, True),
    ],
)
def test_cosine_takes_the_bound_of_a_small_beta(kind, beta, bound):
    graph = build_graph("isolated")
    problem = problem_of("cosine", graph, dtype=KINDS[kind])
    problem.inputs["beta"].fill_(beta)
    _, maxima, _ = forward_pass(problem, graph, kind)
    has_edges = graph.csr.rowptr.diff() > 0
    expected = abs(beta) / math.log(2)
    assert torch.allclose(maxima[has_edges], torch.tensor(expected), rtol=1e-6, atol=0.0) == bound
    assert not bool(maxima[~has_edges].any())
    (check_tf32 if kind == "tf32" else check_tiles)(problem, graph)


def add_logits(problem: Problem, slope: float) -> torch.Tensor:
    source, target = (problem.inputs[name].detach().double() for name in ("alpha_src", "alpha_dst"))
    return torch.nn.functional.leaky_relu(target[..., None] + source.t(), slope)


@pytest.mark.parametrize(
    ("kind", "slope", "spread", "factored"),
    [
        *(("fp32", slope, 1.0, True) for slope in (0.0, 0.2, 1.0)),
        *(("fp32", slope, 1.0, False) for slope in (-0.5, 1.5)),
        ("fp32", 0.2, 3.0, True),
        ("fp32", 0.0, 30.0, False),
        ("fp32", 0.2, 30.0, False),
        ("fp16", 0.2, 0.5, True),
        ("fp16", 0.2, 2.0, False),
        ("bf16", 0.0, 3.0, True),
        ("bf16", 0.2, 30.0, False),
        ("tf32", 0.2, 2.0, True),
    ],
)
def test_add_takes_factors_of_close_scalars(kind, slope, spread, factored):
    """Where the scalars of the sources lie close together, it is that of all columns and heads, with an edge or not."""
    graph = build_graph("far")
    problem = problem_of("add", graph, dtype=KINDS[kind])
    scalars = problem.inputs["alpha_src"].mul_(spread)
    scalars -= scalars.max()
    _, maxima, _ = forward_pass(problem, graph, kind, slope)
    logits, has_edges = add_logits(problem, slope), graph.csr.rowptr.diff() > 0
    source, target = (problem.inputs[name].detach().double() for name in ("alpha_src", "alpha_dst"))
    rows = largest(logits, graph)
    window = torch.nn.functional.leaky_relu(target + source.max(), slope) / math.log(2)
    torch.testing.assert_close(
        maxima[has_edges].double(), (window if factored else rows)[has_edges], rtol=1e-6, atol=1e-6
    )
    assert bool((window > rows + 0.1)[has_edges].any())
    ends = graph.edge_index, graph.num_dst
    with products(kind), emulated_device():
        actual = problem.run(lambda **inputs: ops.add_attention(graph, **inputs, negative_slope=slope))
    expected = problem.run(
        lambda **inputs: reference.add_attention(*ends, **inputs, negative_slope=slope)[0], torch.float64
    )
    if kind == "tf32":
        assert_all_close({name: (tensor, expected[name]) for name, tensor in actual.items()}, "tf32")
        return
    for name, error in errors(actual, expected).items():
        assert error <= SHARE[problem.dtype] * TOLERANCE[problem.dtype, "grad" if "grad" in name else "out"], name


@pytest.mark.parametrize("name", ["alpha_src", "alpha_dst"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e30, -1e30])
def test_scalars_of_add_that_no_factor_holds(name, number):
    """As `row_split` has it, in the rows that see the number and in those that do not."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs[name][20] = number
    results = {}
    for schedule in ("row_split", "block_mma"):
        with settings(schedule=schedule, fallback="error"), torch.no_grad(), emulated_device() as launched:
            results[schedule] = ops.add_attention(graph, **problem.inputs)
        assert (ENTRIES["forward"] in launched) == (schedule == "block_mma")
    torch.testing.assert_close(results["block_mma"], results["row_split"], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert bool(results["block_mma"][:17].isfinite().all())


@pytest.mark.parametrize("number", [1e3, -1e5, 1e8, 1e20])
def test_weights_of_large_scalars_sum_to_one(number):
    """A target's scalar that rounds those of its sources: all passes must see the same logits."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs["alpha_dst"][::2] = number
    with torch.no_grad(), emulated_device() as launched:
        _, weights = ops.add_attention(graph, **problem.inputs, return_weights=True)
    assert ENTRIES["forward"] in launched
    total = torch.zeros(graph.num_dst, 2).index_add_(0, graph.edge_index[1], weights)[graph.csr.rowptr.diff() > 0]
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0.0, atol=5e-6)


@pytest.mark.parametrize("longest", [300, 513])
def test_bound_of_the_longest_segment(longest):
    """A graph whose edges are refilled has shorter segments than it has room for; factors take 512 columns at most."""
    graph = build_graph("batch")
    blocks = replace(diagonal_blocks(build_graph("batch")), longest=longest)
    graph.derived(KEY, lambda: blocks)
    problem = problem_of("add", graph, channels=8)
    _, maxima, _ = forward_pass(problem, graph)
    is_largest = torch.isclose(maxima.double(), largest(add_logits(problem, 0.2), graph), rtol=1e-6, atol=1e-6)
    assert bool(is_largest[graph.csr.rowptr.diff() > 0].all()) == (longest > 512)
    check_tiles(problem, graph)


@pytest.mark.parametrize("size", [512, 520])
def test_segment_around_the_most_columns_of_factors(size):
    torch.manual_seed(1)
    dense = torch.rand(size, size) < 0.025
    dense.fill_diagonal_(True)
    dense[0, -1] = True
    graph = Graph.of(*side_by_side(dense))
    problem = problem_of("add", graph, 2, 8)
    planned = AttentionProblem("add", 2, 8, torch.float32, graph.device, False, False)
    chosen = FAMILY.candidates["block_mma"].plan_pass(planned, "forward", graph)
    assert chosen.constants["FACTORED"] == (size <= 512)
    with torch.no_grad(), emulated_device() as launched:
        out = ops.add_attention(graph, **problem.inputs)
    assert launched == [ENTRIES["forward"]]
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    expected, _ = reference.add_attention(graph.edge_index, graph.num_dst, **inputs)
    bound = SHARE[torch.float32] * TOLERANCE[torch.float32, "out"]
    assert (out - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("name", ["key", "query"])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_gradients_of_rows_that_are_no_numbers(kind, name):
    """All sources of a row whose weights are NaN get no finite gradient: a loss that went wrong does not hide."""
    graph = build_graph("batch")
    problem = problem_of("dot", graph, dtype=KINDS[kind])
    problem.inputs[name][20] = torch.nan
    actual, _ = run(problem, graph)
    source, target = graph.edge_index
    rows = target[source == 20] if name == "key" else torch.tensor([20])
    assert not bool(actual["out"][rows].isfinite().any()) and len(rows) > 0
    seen = source[torch.isin(target, rows)].unique()
    assert not bool(actual["grad value"][seen].isfinite().any()) and len(seen) > 10


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["strided", "misaligned"])
def test_memory_layout_of_inputs(score, layout):
    graph = build_graph("batch")
    problem = problem_of(score, graph)
    for name, tensor in problem.inputs.items():
        wider = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        shifted = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        problem.inputs[name] = (wider[..., ::2] if layout == "strided" else shifted).copy_(tensor)
    assert not any(
        tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        for name, tensor in problem.inputs.items()
        if name != "beta"
    )
    problem.grad_out = torch.randn(16, 2, graph.num_dst).permute(2, 1, 0)
    check_tiles(problem, graph)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "tf32"])
@pytest.mark.parametrize("name", ["isolated", "bipartite"])
def test_every_number_of_the_results_is_written(score, name, kind):
    """Also what other results do not show: softmax, fp32 copy and records, of rows without edges too."""
    if (name, kind) == ("bipartite", "fp32"):
        pytest.skip("listed columns take no full float32")
    graph, dtype = build_graph(name), KINDS[kind]
    problem = AttentionProblem(score, 2, 16, dtype, graph.device, edge=False, dropout=False, tf32=kind == "tf32")
    expected, actual = (passes(problem, graph, schedule) for schedule in ("row_split", "block_mma"))
    for found in expected, actual:
        softmax, records = found["softmax"], found["records"]
        assert torch.equal(records[..., :2], softmax)
        # Any maximum will do, and the inverse is of a sum under it: together they are the same for all schedules.
        total = softmax[..., 0] - softmax[..., 1].log2().nan_to_num(neginf=0.0)
        torch.testing.assert_close(records[..., 3], total, rtol=1e-6, atol=1e-6)
        found |= {"softmax": total, "records": records[..., 2]}
    for name, tensor in actual.items():
        assert tensor.isfinite().all(), name
        # In 16 bits the weights are rounded before they meet the values, so sums in float32 differ as well.
        bound = tolerance("tf32" if kind == "tf32" else torch.float32 if name == "softmax" else dtype).relative
        if name == "softmax" and kind == "bf16":
            # The sum is of rounded weights too: at most their rounding, here of a logarithm to base 2.
            assert (tensor - expected[name]).abs().max() < torch.finfo(dtype).eps / 2 / math.log(2)
        else:
            assert relative_error(tensor, expected[name]) < bound, name


@pytest.mark.parametrize("name", ["isolated", "bipartite"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["dot", "add"])
def test_weights_of_16_bits_sum_to_one_as_rounded(score, dtype, name):
    """Their sum is of what meets the values: values that are all 1 give 1, but for rounding in float32."""
    graph = build_graph(name)
    problem = AttentionProblem(score, 2, 16, dtype, graph.device, edge=False, dropout=False)
    exact = passes(problem, graph, "block_mma", value=1.0)["out_fp32"][graph.csr.rowptr.diff() > 0]
    assert exact.numel() > 0 and (exact - 1.0).abs().max() < tolerance(torch.float32).relative


def passes(
    problem: AttentionProblem, graph: Graph, schedule: str, value: float | None = None
) -> dict[str, torch.Tensor]:
    """All that the three passes of a schedule write, into memory full of NaN; with all values the same if given."""
    values = values_of(problem, graph)
    if value is not None:
        values["value"] = torch.full_like(values["value"], value)
    torch.manual_seed(0)
    num_src, num_dst, heads, channels = graph.num_src, graph.num_dst, problem.heads, problem.channels
    values["grad_out"] = torch.randn(num_dst, heads, channels).to(problem.dtype)
    record = problem.record
    scalars = record.node_scalars == "input"
    results = {
        "out": empty(num_dst, heads, channels, dtype=problem.dtype),
        "row_stats": empty(num_dst, heads, 2),
        "out_fp32": empty(num_dst, heads, channels),
        "bwd_row_stats": empty(num_dst, heads, 4),
        "grad_target": empty(num_dst, heads) if scalars else empty(num_dst, heads, channels, dtype=problem.dtype),
        "grad_parameter_rows": empty(num_dst, heads) if record.parameter == () else None,
        "grad_key": empty(num_src, heads, channels, dtype=problem.dtype) if record.key else None,
        "grad_value": empty(num_src, heads, channels, dtype=problem.dtype),
        "grad_source": empty(num_src, heads) if scalars else None,
    }
    results = {name: tensor for name, tensor in results.items() if tensor is not None}
    with emulated_device() as launched:
        launch(FORWARD, schedule, problem, graph, values | results)
        backward = values | results | {"out": results["out_fp32"]}
        launch(TARGETS, schedule, problem, graph, backward)
        launch(SOURCES, schedule, problem, graph, backward)
    assert (set(launched) == set(ENTRIES.values())) == (schedule == "block_mma")
    return results


# Mixtures -------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    "by_rows",
    [("forward",), ("targets",), ("sources",), ("targets", "sources"), ("forward", "sources")],
    ids="+".join,
)
def test_rows_may_take_some_passes(score, by_rows, monkeypatch):
    """All schedules save the same for each other."""
    graph = build_graph("batch")
    mix(monkeypatch, by_rows)
    launched = check(problem_of(score, graph), graph)
    for walk in DIRECTIONS:
        assert (ENTRIES[walk] in launched) == (walk not in by_rows), walk
        assert (ROWS_ENTRIES[walk] in launched) == (walk in by_rows), walk


@pytest.mark.parametrize("by_rows", [("targets",), ("sources",), ("targets", "sources")], ids="+".join)
def test_rows_may_take_the_backward_of_a_fixed_maximum(score, by_rows, monkeypatch):
    """Maxima that are far from the largest logits, and the weights of the edges under them."""
    mix(monkeypatch, by_rows)
    graph = late_graph() if score == "dot" else build_graph("far")
    problem = late_problem(graph, 2, torch.float32, 20.0) if score == "dot" else problem_of(score, graph)
    if score == "cosine":
        problem.inputs["beta"].fill_(-10.0)
    if score == "add":
        problem.inputs["alpha_src"].mul_(6.0)
    launched = check(problem, graph)
    assert {walk for walk in DIRECTIONS if ROWS_ENTRIES[walk] in launched} == {*by_rows}
    with torch.no_grad(), emulated_device():
        _, weights = getattr(ops, f"{score}_attention")(graph, **problem.inputs, return_weights=True)
    inputs = {name: tensor.detach().double() for name, tensor in problem.inputs.items()}
    _, expected = getattr(reference, f"{score}_attention")(graph.edge_index, graph.num_dst, **inputs)
    assert (weights - expected).abs().max() <= SHARE[torch.float32] * TOLERANCE[torch.float32, "grad"]
