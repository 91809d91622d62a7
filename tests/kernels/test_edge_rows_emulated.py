"""Rows of edges that all heads share, on the emulator against float64: terms of edges are taken at their targets."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.reference.zoo import zoo
from pyg_dfgnn.runtime.launcher import override
from pyg_dfgnn.settings import settings
from tests.covering import covering, over
from tests.emu import ORDERS, needs_compiler
from tests.kernels import problems
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import GRAPHS, NAMES, batch_graph, build_graph, heavy_graph, take_sweeps
from tests.ops.problems import EdgeRows

pytestmark = needs_compiler

CHUNK = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, default_settings):
    """Rows of more than a few edges count as heavy."""
    settings(schedule="row_split", fallback="error")
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: CHUNK)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", CHUNK)


def problem_of(graph, heads, channels, edge_channels, dtype=torch.float32):
    return EdgeRows("dot", graph, heads, channels, dtype, edge_channels=edge_channels)


def check(problem, *arguments):
    """What the targets have for rows of edges is rounded, so 16-bit weights are too."""
    return problems.check(problem, *arguments, op="attention/edge_rows", exact_weights=False)


# Several loads of a lane, lanes without a channel, heads in groups of blocks, one head.
SIZES = ((1, 16, 8), (1, 128, 64), (3, 7, 5), (8, 16, 8), (8, 1, 7), (2, 40, 64), (40, 4, 3), (2, 9, 17), (5, 33, 1))
CASES = covering(
    {
        "graph": tuple(GRAPHS),
        "sizes": SIZES,
        "dtype": tuple(NAMES),
        "dropout": (0.0, 0.4),
        "order": ORDERS,
    },
    pairs=[("dtype", "dropout")],
)


def label(row):
    heads, channels, edge_channels = row["sizes"]
    sizes = f"H{heads}-C{channels}-D{edge_channels}"
    return f"{row['graph']}-{sizes}-{NAMES[row['dtype']]}-p{row['dropout']}-{row['order']}"


@pytest.mark.parametrize("row", CASES, ids=label)
def test_against_float64(row):
    graph = build_graph(*GRAPHS[row["graph"]]())
    launched = check(problem_of(graph, *row["sizes"], row["dtype"]), graph, row["dropout"], row["order"])
    passes = {"attention_forward", "attention_backward_targets", "attention_backward_sources"}
    if row["graph"] == "heavy":
        passes |= {f"{name}_merge" for name in passes}
    assert passes <= set(launched)


@over(sizes=((3, 40, 7), (8, 40, 20)), dtype=tuple(NAMES))
def test_sweeps_over_column_blocks(dtype, sizes, monkeypatch):
    take_sweeps(monkeypatch, 3)
    edges, num_src, num_dst = heavy_graph()
    graph = build_graph([(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges, num_src, num_dst)
    launched = check(problem_of(graph, *sizes, dtype), graph, 0.3)
    assert launched.count("attention_forward") == 6 and launched.count("attention_backward_targets") == 3


@over(sizes=((8, 16, 8), (2, 20, 7)), dtype=tuple(NAMES))
def test_chunks_joined_in_a_block(sizes, dtype, monkeypatch):
    monkeypatch.undo()
    hub = [(j % 40, 3) for j in range(300)] + [(j, j) for j in range(40)]
    graph = build_graph(hub, 40, 40)
    problem = problem_of(graph, *sizes, dtype)
    launched = check(problem, graph, 0.3)
    assert "attention_forward_merge" not in launched


@over(sizes=((8, 16, 8), (4, 12, 5)), dtype=tuple(NAMES))
def test_batches_in_shared_memory(sizes, dtype):
    settings(schedule="smem")
    graph = build_graph(*batch_graph())
    check(problem_of(graph, *sizes, dtype), graph, 0.3)


@pytest.mark.parametrize("case", zoo(), ids=str)
def test_zoo(case):
    problem = problem_of(case, 2, 6, 5)
    with emulated_device():
        actual = problem.run()
    problems.assert_largest_close(torch.float32, actual, problem.expected())


def test_an_infinite_row_reaches_its_target_alone():
    graph = build_graph(*heavy_graph())
    problem = problem_of(graph, 2, 8, 5)
    problem.inputs["edge_attr"][:, 0] = 0.0
    problem.inputs["edge_weight"][:, 0] = 0.0
    problem.inputs["edge_attr"][1, 0] = torch.inf
    with emulated_device():
        out = problem.call()
    target = int(graph.edge_index[1, 1])
    others = torch.arange(graph.num_dst) != target
    assert out[others].isfinite().all() and not out[target].isfinite().any()


def test_no_tensor_of_every_edge_and_channel(monkeypatch):
    """Neither kernels nor torch see a tensor of more than E * D numbers, in either direction."""
    monkeypatch.undo()
    graph = build_graph([(j % 9, i) for i in range(9) for j in range(60)], 9, 9)
    problem = problem_of(graph, 8, 16, 8)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in (result if isinstance(result, (tuple, list)) else [result]) if hasattr(t, "numel")
            )
            return result

    def run(spec, entry, grid, block, arguments, shared_bytes):
        sizes.extend(argument.numel() for argument in arguments if isinstance(argument, torch.Tensor))

    with emulated_device(), override(run):
        problem.run()
        with Sizes():
            problem.run()
    assert max(sizes) == graph.num_edges * 8
