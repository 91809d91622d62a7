"""The float64 grid: the oracle is exact, wrong kernels are refused, runs resume."""

import pytest
import torch

from pyg_dfgnn.bench import check, prepare
from pyg_dfgnn.bench.cases.attention import SCORES, AttentionCase, forward_backward, fused, plain
from pyg_dfgnn.bench.check_graphs import check_graph
from pyg_dfgnn.bench.oracle import compare, float64_reference
from pyg_dfgnn.bench.prepare import Prepared, collect_specs, rounded_problem
from pyg_dfgnn.bench.results import Table
from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.settings import Settings, current
from tests.kernels.emulated import emulated_device

FP32 = [torch.float32]


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["self_loops", "bipartite_wide", "isolated"])
def test_blocks_of_rows_give_what_one_pass_gives(name, score, edge):
    if score == "cosine" and edge:
        pytest.skip("the cosine score takes no edge features")
    graph, case = check_graph(name, "cpu", small=True), AttentionCase(score, 3, 5, edge, 0.5)
    inputs, grad_out = rounded_problem(case, graph, FP32)
    keep = check.keep_factors(case, graph)
    blocks = float64_reference(case, graph, inputs, grad_out, keep, chunk_bytes=8 * 15 * 7)
    leaves = {n: t.double().requires_grad_() for n, t in inputs.items()}
    tensors = dict(leaves)
    if score == "cosine":
        tensors.setdefault("x_dst", leaves["x_src"])
    out = plain(case, graph.edge_index, graph.num_dst, tensors, keep)
    whole = forward_backward(out, leaves, grad_out.double())
    assert blocks.keys() == whole.keys()
    for tensor in whole:
        torch.testing.assert_close(blocks[tensor], whole[tensor], rtol=1e-12, atol=1e-12, msg=tensor)


def test_inputs_are_exact_in_both_16_bit_types():
    graph, case = check_graph("self_loops", "cpu", small=True), AttentionCase("dot", 2, 7)
    inputs, grad_out = rounded_problem(case, graph, [torch.bfloat16, torch.float16])
    for tensor in (*inputs.values(), grad_out):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(tensor.to(dtype).float(), tensor)


def test_leaky_scores_have_exact_signs():
    graph, case = check_graph("self_loops", "cpu", small=True), AttentionCase("gatv2", 2, 7, edge=True)
    inputs, _ = rounded_problem(case, graph, FP32)
    source, target = graph.edge_index
    terms = inputs["x_src"][source], inputs["x_dst"][target], inputs["edge"]
    assert torch.equal(sum(terms).double(), sum(term.double() for term in terms))


def wrong_forward(case, graph, inputs):
    return fused(case, graph, inputs) * 1.001


def wrong_gradient(case, graph, inputs):
    first, *others = inputs
    return fused(case, graph, {first: inputs[first].detach() + 0 * inputs[first], **{n: inputs[n] for n in others}})


def drops_last_edge(case, graph, inputs):
    edge_index = graph.edge_index[:, :-1].contiguous()
    return fused(case, type(graph).of(edge_index, graph.num_src, graph.num_dst), inputs)


def forgets_a_row(case, graph, inputs):
    out = fused(case, graph, inputs)
    hole = torch.empty_like(out)
    hole[1:] = out[1:]
    return hole


def changes_between_runs(case, graph, inputs):
    changes_between_runs.calls = getattr(changes_between_runs, "calls", 0) + 1
    return fused(case, graph, inputs) * (1 + 2e-7 * changes_between_runs.calls)


def raises(case, graph, inputs):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("op", "status"),
    [
        (fused, "ok"),
        (wrong_forward, "breach"),
        (wrong_gradient, "breach"),
        (drops_last_edge, "breach"),
        (forgets_a_row, "breach"),
        (changes_between_runs, "not deterministic"),
        (raises, "error: RuntimeError: no such kernel"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_gate(op, status):
    graph = Prepared.of(check_graph("self_loops", "cpu", small=True))
    (row,) = check.check_point(AttentionCase("dot", 3, 16), graph, [("auto", "float32")], op)
    assert row["status"].startswith(status)


def test_the_gate_sees_a_wrong_mask():
    graph = Prepared.of(check_graph("block_model", "cpu", small=True))
    case = AttentionCase("add", 3, 16, dropout=0.5)
    keep = check.keep_factors(case, graph.bench)
    rows = [next(check.check_point(case, graph, [("auto", "float32")], keep=mask)) for mask in (keep, keep.flip(0))]
    assert [row["status"] for row in rows] == ["ok", "breach"]


def test_the_hub_row_is_compared_alone(monkeypatch):
    graph, case = check_graph("hub", "cpu", small=True), AttentionCase("dot", 1, 8)
    monkeypatch.setattr("pyg_dfgnn.bench.oracle.HUB_DEGREE", 100)
    inputs, grad_out = rounded_problem(case, graph, FP32)
    expected = float64_reference(case, graph, inputs, grad_out)
    actual = {name: tensor.clone() for name, tensor in expected.items()}
    actual["grad_key"][0] *= 1.5
    errors = compare(case, graph, actual, expected, grad_out)
    assert errors.worst[0] == "grad_key[hub]" and errors.hub["out"] == 0.0


def test_nan_is_the_worst_error():
    graph, case = check_graph("self_loops", "cpu", small=True), AttentionCase("dot", 1, 8)
    inputs, grad_out = rounded_problem(case, graph, FP32)
    expected = float64_reference(case, graph, inputs, grad_out)
    actual = {**expected, "grad_query": torch.full_like(expected["grad_query"], float("nan"))}
    assert compare(case, graph, actual, expected, grad_out).worst == ("grad_query", float("inf"))


OPTIONS = ["--small", "--device", "cpu", "--heads", "3", "--widths", "7", "--dtypes", "float32"]


def run(tmp_path, *extra, op=fused):
    return check.main([*OPTIONS, "--out", str(tmp_path), *extra], op)


def test_command_resumes_and_merges(tmp_path, capsys, monkeypatch):
    graphs = ["--graphs", "empty", "no_edges", "one_node", "self_loops", "hub"]
    assert run(tmp_path, *graphs, "--limit-seconds", "0") == 2
    assert run(tmp_path, *graphs, "--scores", "dot", "cosine") == 0
    (path,) = tmp_path.iterdir()
    assert len(path.read_text().splitlines()) == 1 + 3 * 2 * 5
    assert run(tmp_path, *graphs) == 0
    assert len(path.read_text().splitlines()) == 1 + 7 * 2 * 5
    monkeypatch.setattr(check, "check_point", raises)
    assert run(tmp_path, *graphs) == 0
    assert run(tmp_path, "--summary") == 0
    assert "| auto | dot | float32 | output | 20 | 0 | 0 |" in capsys.readouterr().out


def test_miniatures_have_a_file_of_their_own(tmp_path, monkeypatch):
    graphs = ["--graphs", "one_node", "--scores", "dot"]
    assert run(tmp_path, *graphs) == 0
    full = ["--device", "cpu", "--heads", "3", "--widths", "7", "--dtypes", "float32", "--out", str(tmp_path), *graphs]
    assert check.main(full) == 0
    small, whole = sorted(tmp_path.iterdir(), key=lambda path: -len(path.name))
    assert small.stem == whole.stem.replace("-cases", "-small-cases") and len(whole.read_text().splitlines()) == 1 + 4
    monkeypatch.chdir(tmp_path)
    assert check.main([*OPTIONS, *graphs]) == 0
    assert (tmp_path / "outputs" / "check" / small.name).read_text() == small.read_text()


def test_16_bits_without_kernels_are_not_judged(tmp_path, capsys):
    graphs = ["--graphs", "self_loops", "--scores", "dot"]
    assert run(tmp_path, *graphs, "--dtypes", "float32", "bfloat16", "float16") == 0
    (path,) = tmp_path.iterdir()
    statuses = {row["dtype"]: row["status"] for row in Table.read(path)}
    assert statuses.pop("float32") == "ok"
    assert all(status.startswith("not run: the reference rounds every step") for status in statuses.values())
    assert "tensors are on cpu" in statuses["bfloat16"]


def test_command_fails_on_a_breach(tmp_path, capsys):
    assert run(tmp_path, "--graphs", "self_loops", "--scores", "dot", op=wrong_forward) == 1
    assert "breach: dot-H3-C7 on self_loops, auto, float32, " in capsys.readouterr().out


def test_rows_of_other_sources_are_not_mixed_in(tmp_path, monkeypatch):
    graphs = ["--graphs", "one_node", "--scores", "dot"]
    assert run(tmp_path, *graphs, op=raises) == 1
    monkeypatch.setattr(check, "source_digest", lambda: "changed")
    assert run(tmp_path, *graphs) == 0


NO_ERRORS = {"out_error": "", "grad_error": "", "hub_error": ""}


def case_rows(score, count, **changes):
    row = {"schedule": "auto", "score": score, "edge": "no", "dropout": "0.0", "dtype": "float32", "status": "ok"}
    row |= {"out_error": "1e-7", "grad_error": "1e-6", "hub_error": "", "digest": "now", "heads": "1", "channels": "8"}
    return [{**row, "graph": f"g{index}", **changes} for index in range(count)]


def test_the_worst_error_of_each_group_of_tensors_is_kept():
    rows = case_rows("dot", 3)
    rows[1].update(grad_error="3e-6", hub_error="2e-6")
    rows += case_rows("dot", 1, status="breach", out_error="nan") + case_rows(
        "dot", 1, status="not run: no", **NO_ERRORS
    )
    output, gradients, hub = check.worst_errors(rows)
    assert (output["worst_error"], output["cases"], output["not_run"], output["failed"]) == ("nan", 4, 1, 1)
    assert (gradients["worst_error"], gradients["worst_case"]) == ("3e-6", "dot-H1-C8 on g1")
    assert (hub["tensors"], hub["worst_error"], hub["cases"]) == ("row of a hub", "2e-6", 1)


def test_scores_are_published_once_all_of_their_cases_have_run(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "HEADS", (1,))
    monkeypatch.setattr(check, "CHANNELS", (8,))
    table = Table(tmp_path / "gpu.csv", check.WORST_FIELDS)
    table.append(check.worst_errors(case_rows("dot", 1, digest="before") + case_rows("cosine", 1, digest="before")))
    complete = 2 * len(check.DROPOUTS) * len(check.CHECK_GRAPHS)
    check.publish(case_rows("dot", complete) + case_rows("cosine", 1), table)
    assert {(row["score"], row["digest"]) for row in table.rows()} == {("dot", "now"), ("cosine", "before")}


def test_unknown_choices_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--scores", "dott")
    assert "--scores needs some of dot, cosine, add, gatv2 (got dott)" in capsys.readouterr().err


def test_specs_are_collected_without_launching(monkeypatch):
    monkeypatch.setattr(dispatch, "fused_device_types", {"cpu"})
    graphs = [Prepared.of(check_graph(name, "cpu", small=True)) for name in ("empty", "block_model", "isolated")]
    cases = [AttentionCase(score, 3, 16) for score in SCORES]
    specs = collect_specs(cases, graphs, list(prepare.DTYPES))
    paths = {spec.path for spec in specs}
    assert "attention/forward.cu" in paths and any("backward" in path for path in paths)
    assert len(specs) == len(set(specs)) >= 2 * len(SCORES) * len(prepare.DTYPES)


def test_schedules_and_tf32_are_checked_by_name(tmp_path, capsys):
    with emulated_device() as launched:
        extra = [
            "--graphs",
            "one_node",
            "--scores",
            "dot",
            "--schedules",
            "auto",
            "row_split",
            "--dtypes",
            "float32",
            "tf32",
        ]
        assert run(tmp_path, *extra) == 0
    assert launched
    printed = capsys.readouterr().out
    assert all(f"| {schedule} | dot | tf32 | output | 4 | 0 | 0 |" in printed for schedule in ("auto", "row_split"))


def test_a_schedule_that_cannot_run_is_listed(monkeypatch):
    def unsupported(case, graph, inputs):
        assert current().fallback == "error"
        raise UnsupportedError(["rows are too long"], current().schedule)

    graph = Prepared.of(check_graph("self_loops", "cpu", small=True))
    rows = list(check.check_point(AttentionCase("dot", 3, 16), graph, [("row_split", "float32")], unsupported))
    assert [row["status"] for row in rows] == ["not run: rows are too long"]
    assert current() == Settings()
