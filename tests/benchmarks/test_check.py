"""The float64 grid: wrong kernels are refused, runs resume, the worst errors are published."""

import pytest
import torch

from benchmarks import check
from benchmarks.case import DTYPES, rounded_problem
from benchmarks.cases.attention import SCORES, AttentionCase
from benchmarks.results import Table
from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.settings import current
from tests.kernels.emulated import emulated_device

CPU = torch.device("cpu")
FUSED = AttentionCase.fused


def check_graph(name):
    return check.check_graph(name, CPU, small=True)


def test_inputs_are_exact_in_both_16_bit_types():
    graph, case = check_graph("self-loops"), AttentionCase("dot", 2, 7)
    inputs, grad_out = rounded_problem(case, graph, ["bfloat16", "float16"])
    for tensor in (*inputs.values(), grad_out):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(tensor.to(dtype).float(), tensor)


def test_leaky_scores_have_exact_signs():
    graph, case = check_graph("self-loops"), AttentionCase("gatv2", 2, 7, edge=True)
    inputs, _ = rounded_problem(case, graph, ["float32"])
    source, target = graph.edge_index
    terms = inputs["x_src"][source], inputs["x_dst"][target], inputs["edge"]
    assert torch.equal(sum(terms).double(), sum(term.double() for term in terms))


def wrong_forward(case, graph, inputs):
    return FUSED(case, graph, inputs) * 1.001


def wrong_gradient(case, graph, inputs):
    first, *others = inputs
    return FUSED(case, graph, {first: inputs[first].detach() + 0 * inputs[first], **{n: inputs[n] for n in others}})


def drops_last_edge(case, graph, inputs):
    edge_index = graph.edge_index[:, :-1].contiguous()
    return FUSED(case, type(graph).of(edge_index, graph.num_src, graph.num_dst), inputs)


def forgets_a_row(case, graph, inputs):
    out = FUSED(case, graph, inputs)
    hole = torch.empty_like(out)
    hole[1:] = out[1:]
    return hole


def changes_between_runs(case, graph, inputs):
    changes_between_runs.calls = getattr(changes_between_runs, "calls", 0) + 1
    return FUSED(case, graph, inputs) * (1 + 2e-7 * changes_between_runs.calls)


def raises(case, graph, inputs):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("op", "status"),
    [
        (FUSED, "ok"),
        (wrong_forward, "breach"),
        (wrong_gradient, "breach"),
        (drops_last_edge, "breach"),
        (forgets_a_row, "breach"),
        (changes_between_runs, "not deterministic"),
        (raises, "failed: RuntimeError: no such kernel"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_gate(op, status, monkeypatch):
    monkeypatch.setattr(AttentionCase, "fused", op)
    graph = check_graph("self-loops")
    (row,) = check.check_point(AttentionCase("dot", 3, 16), graph, [("auto", "float32")])
    assert row["status"].startswith(status)


def test_the_gate_sees_a_wrong_mask():
    graph = check_graph("batch")
    case = AttentionCase("add", 3, 16, dropout=0.5)
    keep = check.keep_factors(case, graph)
    rows = [next(check.check_point(case, graph, [("auto", "float32")], keep=mask)) for mask in (keep, keep.flip(0))]
    assert [row["status"] for row in rows] == ["ok", "breach"]


OPTIONS = ["--small", "--device", "cpu", "--cases", "H3-C7", "--dtypes", "float32"]


def run(tmp_path, *extra):
    return check.main([*OPTIONS, "--out", str(tmp_path), *extra])


def test_command_resumes_and_merges(tmp_path, capsys, monkeypatch):
    graphs = ["--graphs", "no-nodes", "no-edges", "one-node", "self-loops", "hub"]
    assert run(tmp_path, *graphs, "--limit-seconds", "0") == 2
    assert run(tmp_path, *graphs, "--cases", "(dot|cosine)-H3-C7") == 0
    (path,) = tmp_path.iterdir()
    assert len(path.read_text().splitlines()) == 1 + 3 * 2 * 5
    assert run(tmp_path, *graphs) == 0
    assert len(path.read_text().splitlines()) == 1 + 7 * 2 * 5
    monkeypatch.setattr(check, "check_point", raises)
    assert run(tmp_path, *graphs) == 0
    assert "| auto | dot | float32 | output | 20 | 0 | 0 |" in capsys.readouterr().out


def test_miniatures_have_a_file_of_their_own(tmp_path, monkeypatch):
    graphs = ["--graphs", "one-node", "--cases", "dot-H3-C7"]
    assert run(tmp_path, *graphs) == 0
    full = ["--device", "cpu", "--cases", "H3-C7", "--dtypes", "float32", "--out", str(tmp_path), *graphs]
    assert check.main(full) == 0
    small, whole = sorted(tmp_path.iterdir(), key=lambda path: -len(path.name))
    assert small.stem == whole.stem.replace("-cases", "-small-cases") and len(whole.read_text().splitlines()) == 1 + 4
    monkeypatch.chdir(tmp_path)
    assert check.main([*OPTIONS, *graphs]) == 0
    assert (tmp_path / "outputs" / "check" / small.name).read_text() == small.read_text()


def test_16_bits_without_kernels_are_not_judged(tmp_path, capsys):
    graphs = ["--graphs", "self-loops", "--cases", "dot-H3-C7"]
    assert run(tmp_path, *graphs, "--dtypes", "float32", "bfloat16", "float16") == 0
    (path,) = tmp_path.iterdir()
    statuses = {row["dtype"]: row["status"] for row in Table.read(path)}
    assert statuses.pop("float32") == "ok"
    assert all(status.startswith("not run: the reference rounds every step") for status in statuses.values())
    assert "tensors are on cpu" in statuses["bfloat16"]


def test_command_fails_on_a_breach(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(AttentionCase, "fused", wrong_forward)
    assert run(tmp_path, "--graphs", "self-loops", "--cases", "dot-H3-C7") == 1
    assert "breach: dot-H3-C7 on self-loops, auto, float32, " in capsys.readouterr().out


def test_rows_of_other_sources_are_not_mixed_in(tmp_path, monkeypatch):
    graphs = ["--graphs", "one-node", "--cases", "dot-H3-C7"]
    with monkeypatch.context() as patch:
        patch.setattr(AttentionCase, "fused", raises)
        assert run(tmp_path, *graphs) == 1
    monkeypatch.setattr(check, "source_digest", lambda: "changed")
    assert run(tmp_path, *graphs) == 0


NO_ERRORS = {"output_error": "", "gradient_error": "", "hub_error": ""}


def case_rows(op, count, **changes):
    row = {"schedule": "auto", "op": op, "case": f"{op}-H1-C8", "dtype": "float32", "status": "ok", "bound": "5e-06"}
    row |= {"output_error": "1e-7", "gradient_error": "1e-6", "hub_error": "", "digest": "now"}
    return [{**row, "graph": f"g{index}", **changes} for index in range(count)]


def test_the_worst_error_of_each_group_of_tensors_is_kept():
    rows = case_rows("dot", 3)
    rows[1].update(gradient_error="3e-6", hub_error="2e-6")
    rows += case_rows("dot", 1, status="breach", output_error="nan")
    rows += case_rows("dot", 1, status="not run: no", **NO_ERRORS)
    output, gradients, hub = check.worst_errors(rows)
    assert (output["worst_error"], output["cases"], output["not_run"], output["failed"]) == ("nan", 4, 1, 1)
    assert (gradients["worst_error"], gradients["worst_case"]) == ("3e-6", "dot-H1-C8 on g1")
    assert (hub["tensors"], hub["worst_error"], hub["cases"]) == ("row of a hub", "2e-6", 1)


def test_an_operation_is_published_once_all_of_its_cases_have_run(tmp_path):
    table = Table(tmp_path / "gpu.csv", check.WORST_FIELDS)
    table.append(check.worst_errors(case_rows("dot", 1, digest="before") + case_rows("cosine", 1, digest="before")))
    of_dot = [case for cases in check.all_groups().values() for case in cases if case.op == "dot"]
    check.publish(case_rows("dot", len(of_dot) * len(check.CHECK_GRAPHS)) + case_rows("cosine", 1), table)
    assert {(row["op"], row["digest"]) for row in table.rows()} == {("dot", "now"), ("cosine", "before")}


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--graphs", "moon"), "invalid choice: 'moon'"), (("--cases", "("), "needs a regular expression")],
)
def test_unknown_choices_are_refused(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        run(tmp_path, *words)
    assert message in capsys.readouterr().err


def test_specs_are_collected_without_launching(monkeypatch):
    monkeypatch.setattr(dispatch, "fused_device_types", {"cpu"})
    graphs = [check_graph(name) for name in ("no-nodes", "batch", "isolated")]
    cases = [AttentionCase(score, 3, 16) for score in SCORES]
    specs = check.collect_specs(cases, graphs, list(DTYPES))
    paths = {spec.path for spec in specs}
    assert "attention/forward.cu" in paths and any("backward" in path for path in paths)
    assert len(specs) == len(set(specs)) >= 2 * len(SCORES) * len(DTYPES)


def test_schedules_and_tf32_are_checked_by_name(tmp_path, capsys):
    with emulated_device() as launched:
        extra = "--graphs one-node --cases dot-H3-C7 --schedules auto row_split --dtypes float32 tf32".split()
        assert run(tmp_path, *extra) == 0
    assert launched
    printed = capsys.readouterr().out
    assert all(f"| {schedule} | dot | tf32 | output | 4 | 0 | 0 |" in printed for schedule in ("auto", "row_split"))


def test_a_schedule_that_cannot_run_is_listed(monkeypatch):
    before = current()

    def unsupported(case, graph, inputs):
        assert current().fallback == "error"
        raise UnsupportedError(["rows are too long"], current().schedule)

    monkeypatch.setattr(AttentionCase, "fused", unsupported)
    graph = check_graph("self-loops")
    rows = list(check.check_point(AttentionCase("dot", 3, 16), graph, [("row_split", "float32")]))
    assert [row["status"] for row in rows] == ["not run: rows are too long"]
    assert current() == before
