"""The schedule `block_mma` on the emulator, against the float64 reference and its gradients."""

import pytest
import torch

from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import diagonal_blocks
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference.tolerances import elementwise, largest_errors, relative_error, tolerance
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements.attention import FORWARD, SOURCES, TARGETS
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.covering import Row, covering, over
from tests.emu import ORDERS, needs_compiler
from tests.kernels.block_mma import (
    BLOCK_MMA,
    ENTRIES,
    GRAPHS,
    KINDS,
    ROWS_ENTRIES,
    SCORES,
    build_graph,
    check,
    check_tf32,
    check_tiles,
    long_graph,
    mix,
    problem_of,
    products,
    run,
)
from tests.kernels.emulated import emulated_device
from tests.kernels.passes import empty, launch, values_of
from tests.kernels.problems import assert_largest_close

pytestmark = needs_compiler


def fits(row: Row) -> bool:
    """Rows are multiples of 16 bytes, few enough of them wide to keep the tests short, and not all where listed."""
    aligned = row["channels"] * KINDS[row["kind"]].itemsize % 16 == 0
    taken = row["graph"] != "bipartite" or row["kind"] != "fp32"
    return aligned and taken and row["heads"] * row["channels"] <= 192


AXES = {"heads": (1, 2, 3, 8), "channels": (4, 8, 16, 20, 24, 40, 64, 128), "kind": tuple(KINDS)}
CASES = sorted(
    covering({"score": SCORES, **AXES, "graph": tuple(GRAPHS), "order": ORDERS}, fits, [("score", "kind")]),
    key=lambda row: (row["score"], row["kind"]),
)


def label(row: Row) -> str:
    return f"{row['score']}-{row['graph']}-H{row['heads']}-C{row['channels']}-{row['kind']}-{row['order']}"


@pytest.fixture(autouse=True)
def schedule(default_settings):
    settings(schedule="block_mma", fallback="error")


@pytest.fixture
def tf32():
    with products("tf32"):
        yield


@pytest.fixture(params=SCORES)
def score(request):
    return request.param


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", CASES, ids=map(label, CASES))
def test_against_float64(row):
    graph = build_graph(row["graph"])
    problem = problem_of(row["score"], graph, row["heads"], row["channels"], KINDS[row["kind"]])
    (check_tf32 if row["kind"] == "tf32" else check_tiles)(problem, graph, row["order"])


@over([("score", "name")], score=("dot", "cosine"), name=("batch", "bipartite", "isolated"), order=ORDERS)
def test_heads_in_pairs(score, name, order):
    """Of 16 channels, where products are rounded to TF32: four blocks of two heads."""
    graph = build_graph(name)
    planned = AttentionProblem(score, 8, 16, torch.float32, graph.device, False, False, tf32=True)
    assert FAMILY.candidates["block_mma"].plan_pass(planned, "targets", graph).constants["BLOCK_HEADS"] == 2
    check_tf32(problem_of(score, graph, 8, 16), graph, order)


@over(score=SCORES, sizes=((1, 32), (3, 16), (2, 8)))
def test_sums_over_a_long_segment(score, sizes):
    """Products of float32 are summed apart for each step."""
    heads, channels = sizes
    torch.manual_seed(1)
    graph = long_graph()
    problem = problem_of(score, graph, heads, channels)
    planned = AttentionProblem(score, heads, channels, torch.float32, graph.device, False, False)
    assert all(
        FAMILY.candidates["block_mma"].plan_pass(planned, direction, graph).constants["FOLD"]
        for direction in DIRECTIONS
    )
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
        graph.derived("diagonal_blocks", lambda: None)
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


@over(score=SCORES, kind=("fp16", "bf16", "tf32"))
def test_segments_and_listed_columns_agree(score, kind):
    """Two ways to lay out the columns of one graph."""
    problem = problem_of(score, build_graph("batch"), dtype=KINDS[kind])
    results = []
    for listed in (False, True):
        graph = build_graph("batch")
        if listed:
            graph.derived("diagonal_blocks", lambda: None)
        with products(kind):
            actual, launched = run(problem, graph)
        assert ENTRIES["forward"] in launched and (diagonal_blocks(graph) is None) == listed
        results.append(actual)
    found = largest_errors(results[1], {name: tensor.double() for name, tensor in results[0].items()})
    assert max(found.values()) < tolerance("tf32" if kind == "tf32" else KINDS[kind]).relative, found


# Numbers --------------------------------------------------------------------------------------------------------------


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
    actual, expected = run(problem, graph)[0], problem.expected()
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


@pytest.mark.parametrize("slope", [1.0, 0.0, -0.5])
def test_slopes(slope):
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    with emulated_device():
        actual = problem.run(lambda **inputs: problem.call(**inputs, negative_slope=slope))
    assert_largest_close(problem.dtype, actual, problem.expected(negative_slope=slope), BLOCK_MMA)


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
    expected = problem.expected()
    assert expected["out"].isnan().any()
    for key, tensor in actual.items():
        assert tensor[expected[key].isnan()].isnan().all(), key


def test_tf32_leaves_16_bits_alone(score, tf32):
    """Their products are exact anyway."""
    graph = build_graph("batch")
    problem = problem_of(score, graph, dtype=torch.bfloat16)
    rounded, _ = run(problem, graph)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    plain, _ = run(problem, graph)
    assert [name for name in plain if not torch.equal(plain[name], rounded[name])] == []


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


@over(
    [("name", "kind")],
    lambda row: (row["name"], row["kind"]) != ("bipartite", "fp32"),
    score=SCORES,
    name=("isolated", "bipartite"),
    kind=("fp32", "bf16", "tf32"),
)
def test_every_number_of_the_results_is_written(score, name, kind):
    """Also what other results do not show: row_stats, fp32 copy and bwd_row_stats, of rows without edges too.

    Listed columns take no full float32.
    """
    graph, dtype = build_graph(name), KINDS[kind]
    problem = AttentionProblem(score, 2, 16, dtype, graph.device, edge=False, dropout=False, tf32=kind == "tf32")
    expected, actual = (passes(problem, graph, schedule) for schedule in ("row_split", "block_mma"))
    for results in expected, actual:
        stats, of_backward = results["row_stats"], results["bwd_row_stats"]
        assert torch.equal(of_backward[..., :2], stats)
        # Any maximum will do, and the inverse is of a sum under it: together they are the same for all schedules.
        total = stats[..., 0] - stats[..., 1].log().nan_to_num(neginf=0.0)
        torch.testing.assert_close(of_backward[..., 3], total, **elementwise("float32/rounding"))
        results |= {"row_stats": total, "bwd_row_stats": of_backward[..., 2]}
    for name, tensor in actual.items():
        assert tensor.isfinite().all(), name
        # In 16 bits the weights are rounded before they meet the values, so sums in float32 differ as well.
        bound = tolerance("tf32" if kind == "tf32" else torch.float32 if name == "row_stats" else dtype).relative
        if name == "row_stats" and kind == "bf16":
            # The sum is of rounded weights too: at most their rounding, here of a logarithm.
            assert (tensor - expected[name]).abs().max() < torch.finfo(dtype).eps / 2
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
    for direction in DIRECTIONS:
        assert (ENTRIES[direction] in launched) == (direction not in by_rows), direction
        assert (ROWS_ENTRIES[direction] in launched) == (direction in by_rows), direction
