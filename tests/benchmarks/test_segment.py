"""Timings of aggregations: each implementation is right, a wrong one is refused, and the experiment runs on a CPU."""

from dataclasses import replace

import pytest

from benchmarks import run, tables
from benchmarks.case import Fused, forward_backward, rounded_problem
from benchmarks.cases import case_of
from benchmarks.cases.segment import (
    AGGREGATIONS,
    SEGMENT,
    CompiledPyGSegment,
    PyGSegment,
    SegmentCase,
    SegmentReduce,
    TorchCsr,
    TorchMm,
)
from benchmarks.graphs import benchmark_graph
from tests.benchmarks.quick import QUICK, composed, graph_of, layers_in
from tests.kernels.emulated import emulated_device

KINDS = [Fused(), PyGSegment(), CompiledPyGSegment("eager"), TorchCsr(), TorchMm(), SegmentReduce()]
GRAPHS = ["h", "no-edges", "isolated", "bipartite-wide", "hub"]


def rows_of(tmp_path, *overrides):
    """Exit code and rows of a quick run, those of the graph's build left out."""
    code = run.run(composed("experiment=segment", *QUICK, f"folder={tmp_path}", *overrides))
    return code, layers_in(tmp_path)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("op", AGGREGATIONS)
@pytest.mark.parametrize("implementation", KINDS, ids=lambda kind: kind.name)
def test_implementations_agree_with_float64(implementation, op, name):
    graph, case = graph_of(name), case_of(op, "8")
    if isinstance(implementation, TorchCsr) and op == "weight":
        # torch's sampled product joins equal edges on a CPU.
        graph = replace(graph, edge_index=graph.edge_index.unique(dim=1))
    reasons = implementation.reasons(case, graph)
    if reasons:
        assert reasons == [f"has no {case.layer}"]
        return
    inputs, grad_out = rounded_problem(case, graph, "float32")
    expected = case.reference(graph, inputs, grad_out)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    actual = forward_backward(implementation.prepare(case, graph, leaves)(), leaves, grad_out)
    if isinstance(implementation, SegmentReduce) and op == "max":
        # On a CPU its backward pass counts ties across features.
        del expected["grad_x"]
    worst, error = case.errors(graph, actual, expected, grad_out).worst
    assert error < case.bound("float32"), f"{worst}: {error:.2e}"


@pytest.mark.parametrize("op", AGGREGATIONS)
def test_traffic(op):
    graph, case = benchmark_graph("e", "cpu"), SegmentCase(op, "128")
    forward, backward, both = (case.compulsory_bytes(graph, name, 4) for name in ("fwd", "bwd", "fwd+bwd"))
    assert both == forward + backward and backward >= forward
    if op == "sum":
        assert forward == 4 * (2 * 128 * graph.num_dst + graph.num_dst + graph.num_edges)


@pytest.mark.parametrize("size", ["0", "1x128", "-3", "many"])
def test_sizes_of_another_form_are_refused(size):
    with pytest.raises(ValueError, match=rf"'sizes' needs a list of numbers of features.*\(got '{size}'\)"):
        case_of("sum", size)


def test_a_tiny_version_of_the_experiment_runs_on_a_cpu(tmp_path):
    few = ["graphs=[h]", "sizes=[8]", "dtypes=[float32]", "implementations=[fused,pyg,csr,sparse_mm,segment_reduce]"]
    _, rows = rows_of(tmp_path, *few, "schedules=[auto]")
    status = {(row["op"], row["implementation"], row["direction"]): row["status"] for row in rows}
    assert len(rows) == len(status) == 5 * 5 * 2
    assert status.pop(("max", "segment_reduce", "fwd+bwd")) in ("ok", "WRONG")
    for (op, implementation, _), text in status.items():
        ops = SEGMENT.implementations[implementation].ops
        has_it = ops is None or op in ops
        assert text == "ok" if has_it else text.startswith("not run: has no ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedules_of_ours_are_named_and_cusparse_needs_a_gpu(tmp_path, dtype):
    few = ["graphs=[h]", "ops=[sum]", "sizes=[8]", f"dtypes=[{dtype}]", "implementations=[fused]"]
    with emulated_device():
        code, rows = rows_of(tmp_path, *few, "directions=[fwd]")
    by_schedule = {row["schedule"]: row for row in rows}
    assert code == 0 and by_schedule["row_split"]["ran"] == "forward=row_split sources=row_split"
    for name in ("cusparse", "cusparse_alg3"):
        assert by_schedule[name]["status"].startswith("not run: cuSPARSE needs a GPU")
        # 16 bits are not enough for the parts of a row.
        assert ("16 bits" in by_schedule[name]["status"]) is (name == "cusparse" and dtype == "bfloat16")


def test_peers_have_the_names_of_the_experiment():
    experiment = run.Experiment.of(composed("experiment=segment"))
    keys = {(job.case.op, job.case.size, job.dtype, job.direction) for job in experiment.jobs("a")}
    peers = [peer for peer in run.Table.read(tables.PACKAGES) if peer["op"] in experiment.ops]
    assert peers and {peer["graph"] for peer in peers} <= set(experiment.graphs)
    assert {tuple(peer[name] for name in ("op", "size", "dtype", "direction")) for peer in peers} <= keys
