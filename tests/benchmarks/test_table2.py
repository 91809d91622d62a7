"""Table 2 on a CPU: phases, the comparison of losses, what cannot run, resumed results, and the table."""

import csv
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import CONFIGS, isolated, table2, table2_steps
from benchmarks.cases import unfused_nn
from benchmarks.table2_steps import PHASES, STEP_BY_STEP, Phases, Reference, agree
from tests.configs.train import train_config
from tests.processes import CONTEXT

TINY = [
    "device=cpu",
    "batch_size=2",
    "num_batches=2",
    "datasets=[pattern]",
    "backends=[pyg,unfused,auto]",
    "pace.steps=4",
    "pace.warm_up=2",
    "pace.wall_s=0",
    "pace.rounds=2",
    "limit_s=null",
    "model.hidden_channels=8",
    "model.layers=2",
    "+arguments.max_size=6",
    "+arguments.num_patterns=2",
]


@pytest.fixture
def options(tmp_path, monkeypatch):
    """options(*overrides) of a tiny table."""
    monkeypatch.setattr(table2, "training_config", lambda overrides: train_config(*overrides))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):

        def make(*overrides):
            cfg = compose("table2", [*TINY, f"folder={tmp_path}", *overrides], return_hydra_config=True)
            name = cfg.hydra.runtime.choices["model"]
            del cfg.hydra
            return table2.Options.of(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), name)

        yield make


@pytest.fixture
def table(options, tmp_path):
    """table(*overrides) -> (exit code, rows)."""

    def measure(*overrides):
        code = table2.run(options(*overrides))
        (path,) = tmp_path.glob("*.csv")
        with path.open(newline="") as file:
            return code, list(csv.DictReader(file))

    return measure


@pytest.mark.parametrize("model", ["transformer_stack", "gat_stack", "agnn_stack"])
def test_backends_agree_and_are_timed(table, capsys, model):
    extra = ["model.heads=2"] if model == "gat_stack" else []
    code, rows = table(f"model={model}", *extra)
    assert code == 0 and [row["backend"] for row in rows] == ["pyg", "unfused", "auto"]
    for row in rows:
        assert row["status"] == "ok" and row["once"] == "False" and row["n"] == "2"
        assert all(float(row[f"{phase}_ms"]) >= 0 for phase in (*PHASES, "sum", "step"))
        parts = sum(float(row[f"{phase}_ms"]) for phase in ("preprocess", "forward", "backward"))
        assert float(row["sum_ms"]) <= float(row["step_ms"]) and parts == pytest.approx(float(row["sum_ms"]), rel=0.5)
    assert [row["reference"] for row in rows] == ["", "pyg", "pyg"]
    assert all(float(row["loss_difference"]) < 1e-4 and float(row["gradient_difference"]) < 1e-4 for row in rows[1:])
    printed = capsys.readouterr().out
    assert "| pattern | auto |" in printed and "| pattern | unfused |" in printed and "1.00x" in printed


@pytest.mark.parametrize("model", ["gcn_stack", "sage_max_stack", "gin_stack", "resgated_stack", "pna_stack"])
def test_models_without_attention_are_timed(table, model):
    code, rows = table(f"model={model}", "backends=[pyg,auto]")
    assert code == 0 and [(row["backend"], row["status"]) for row in rows] == [("pyg", "ok"), ("auto", "ok")]
    assert float(rows[1]["loss_difference"]) < 1e-4 and float(rows[1]["gradient_difference"]) < 1e-4


def test_a_model_of_edge_features_is_timed_where_there_are_some(table):
    superpixels = ["~arguments.max_size", "~arguments.num_patterns"]
    code, rows = table(
        "model=gine_stack", "datasets=[pascalvoc_sp_like,pattern]", "backends=[pyg,auto]", "batch_size=1", *superpixels
    )
    assert code == 0 and [row["status"][:7] for row in rows] == ["ok", "ok", "not run", "not run"]
    assert float(rows[1]["loss_difference"]) < 1e-4 and float(rows[1]["gradient_difference"]) < 1e-4
    assert "needs one that takes no edge features for PATTERN" in rows[2]["status"]


def test_one_whole_graph_is_prepared_once(table):
    _, rows = table("datasets=[reddit_like_small]", "backends=[pyg,auto]")
    assert {row["status"] for row in rows} == {"ok"} and {row["once"] for row in rows} == {"True"}
    for row in rows:
        assert float(row["transfer_ms"]) >= 0 and float(row["preprocess_ms"]) >= 0
        assert float(row["forward_ms"]) + float(row["backward_ms"]) == pytest.approx(float(row["sum_ms"]), rel=0.5)


def test_what_disagrees_has_no_time(table, monkeypatch):
    unfused = unfused_nn.unfused_attention
    monkeypatch.setattr(unfused_nn, "unfused_attention", lambda *args: 1.01 * unfused(*args))
    code, rows = table()
    wrong = rows[1]
    # A wrong first gradient is no matter of rounding.
    assert not any(wrong[name] for name in STEP_BY_STEP)
    assert code == 1 and wrong["status"].startswith("WRONG: loss difference") and wrong["status"].endswith("from pyg")
    assert wrong["step_ms"] == wrong["wall_ms"] == "" and float(wrong["gradient_difference"]) > 1e-3
    assert rows[2]["status"] == "ok"


def test_a_nan_disagrees():
    reference = Reference(None, {}, [1.0, 2.0], torch.ones(3))
    differences = reference.differences([1.0, float("nan")], torch.ones(3))
    assert not differences["loss_difference"] <= 1e9 and differences["gradient_difference"] == 0
    assert not agree(differences, 1e9)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ((1e-3, 1e-3), True),
        ((2e-3, 1e-6), False),
        ((2e-3, 1e-6, 1e-3, 1e-3, 1e-3), True),
        ((2e-3, 1e-6, 1e-6, 1.1e-3, 1e-6), False),
        ((2e-3, 1e-6, 1.1e-3, 1e-6, 1e-6), False),
        ((2e-3, 1e-6, 1e-6, 1e-6, 1.1e-3), False),
        ((2e-3, 2e-3, 0.0, 0.0, 0.0), False),
        ((1e-6, 2e-3), False),
        ((2e-3, 1e-6, float("nan"), 1e-6, 1e-6), False),
        ((float("nan"), 1e-6, float("nan"), float("nan"), float("nan")), False),
    ],
)
def test_what_agrees(differences, expected):
    names = ("loss_difference", "gradient_difference", *STEP_BY_STEP)
    assert agree(dict(zip(names, differences)), 1e-3) is expected


@pytest.fixture
def disturb(monkeypatch):
    """disturb(name, function): after each step of a backend, function(its number, model) is called."""

    def after_each_step(name, function):
        make = table2_steps._step

        def disturbed(backend, model, *rest):
            step, numbers = make(backend, model, *rest), count()

            def call(batch):
                result = step(batch)
                if backend.name == name:
                    function(next(numbers), model)
                return result

            return call

        monkeypatch.setattr(table2_steps, "_step", disturbed)

    return after_each_step


@pytest.fixture
def drifted(monkeypatch):
    """The losses are as far apart as training may carry a difference of rounding."""
    differences = {"loss_difference": 1.0, "gradient_difference": 0.0}
    monkeypatch.setattr(table2_steps.Reference, "differences", lambda *_: dict(differences))


@pytest.mark.usefixtures("drifted")
def test_losses_that_drift_apart_are_compared_step_by_step(table):
    code, rows = table("backends=[pyg,unfused]")
    assert code == 0 and rows[1]["status"] == "ok" and rows[1]["loss_difference"] == "1.00e+00"
    loss, gradient, update = (rows[1][name] for name in STEP_BY_STEP)
    assert max(float(loss), float(gradient)) < 1e-5 and float(update) < 1e-4
    assert not any(rows[0][name] for name in STEP_BY_STEP)


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_steps_that_are_wrong_later_have_no_time(table, disturb, wrong):
    """Once in 1.03 times the output, once in 1.03 times the gradient alone, from the second step on."""

    def spoil(step, model):
        if step > 0:
            return
        if wrong == "forward":
            model.register_forward_hook(lambda module, inputs, out: 1.03 * out)
        else:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: 1.03 * gradient)
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 1.2)

    disturb("unfused", spoil)
    code, rows = table("backends=[pyg,unfused]")
    assert code == 1 and rows[1]["status"].startswith("WRONG: loss difference") and rows[1]["step_ms"] == ""
    assert "step gradient difference" in rows[1]["status"] and float(rows[1]["gradient_difference"]) < 1e-4
    loss, gradient, _ = (float(rows[1][name]) for name in STEP_BY_STEP)
    assert gradient > 1e-3 and (loss > 1e-3) is (wrong == "forward")


@pytest.mark.usefixtures("drifted")
@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01])
def test_wrong_updates_have_no_time(table, monkeypatch, factor):
    make = table2_steps._step

    def wrong(backend, model, optimizer, *rest):
        optimizer.param_groups[0]["lr"] *= factor if backend.name == "unfused" else 1.0
        return make(backend, model, optimizer, *rest)

    monkeypatch.setattr(table2_steps, "_step", wrong)
    code, rows = table("backends=[pyg,unfused]")
    loss, gradient, update = (float(rows[1][name]) for name in STEP_BY_STEP)
    assert code == 1 and loss < 1e-5 and gradient < 1e-5 and update == pytest.approx(abs(factor - 1), rel=1e-2)


def test_what_cannot_run_says_why(table, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(unfused_nn, "unfused_attention", refuse)
    code, rows = table()
    assert code == 0 and [row["status"] for row in rows] == ["ok", "not run: out of memory", "ok"]


def test_results_are_resumed(table, monkeypatch):
    table("backends=[pyg,auto]")
    _, rows = table("backends=[pyg,auto]")
    assert [row["backend"] for row in rows] == ["pyg", "auto"]
    # A new backend needs the losses of the first again, in a process that lacks them.
    _, rows = table()
    assert [row["backend"] for row in rows] == ["pyg", "auto", "pyg", "unfused"]
    # Other sources: only ours is measured anew.
    monkeypatch.setattr(table2, "source_digest", lambda rooms: "other")
    _, rows = table()
    assert [row["backend"] for row in rows[4:]] == ["pyg", "auto"] and rows[-1]["digest"] == "other"


def test_a_limit_ends_one_cell_alone(table, monkeypatch):
    monkeypatch.setattr(isolated, "multiprocessing", SimpleNamespace(get_context=lambda _: CONTEXT))
    code, rows = table("limit_s=0.01", "backends=[pyg,auto]")
    assert code == 0 and {row["status"] for row in rows} == {"no result within 0.01 s"}
    code, rows = table("limit_s=120", "backends=[pyg,auto]")
    assert code == 0 and [row["status"] for row in rows[2:]] == ["ok", "ok"]


def test_total_limit(table):
    code, rows = table("total_limit_s=0")
    assert code == 2 and [row["backend"] for row in rows] == ["pyg"]


def test_the_table_of_the_paper():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        options = table2.Options.of(OmegaConf.to_container(compose("table2"), resolve=True), "transformer_stack")
        cells = options.cells()
    assert (options.model["layers"], options.model["hidden_channels"], options.model["heads"]) == (8, 128, 1)
    assert options.batch_size == 1024 and options.pace.steps == 50 and len(cells) == 7 * 5
    assert options.folder.parts == ("results" if torch.cuda.is_available() else "outputs", "table2")
    assert options.optimizer["lr"] == 1e-3
    assert [cell.backend.name for cell in cells[:4]] == ["pyg", "unfused", "auto", "auto_graph"]
    assert cells[2].backend.is_ours and cells[3].backend.cuda_graph and not cells[0].backend.is_ours
    sizes = {cell.dataset: cell.task.get("num_train") for cell in cells}
    assert sizes["pattern"] == sizes["coco_sp_like"] == 2048 and sizes["cora"] is None


def test_phases_follow_each_other():
    phases = Phases(torch.device("cpu"))
    phases.start()
    for phase in ("forward", "backward", "optimizer"):
        phases(phase)
    durations = phases.durations_ms()
    assert list(durations) == ["forward", "backward", "optimizer", "sum", "step"]
    assert durations["sum"] == durations["forward"] + durations["backward"] <= durations["step"]


def test_phases_of_the_capture_that_was_replayed(monkeypatch):
    """Events of a captured graph are recorded anew by each replay; here time is a counter."""
    clock, capturing = iter(range(100)), False

    class Event:
        def __init__(self, enable_timing, external):
            assert enable_timing and external is capturing

        def record(self):
            self.time = next(clock)

        def elapsed_time(self, end):
            return end.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    phases = Phases(torch.device("cuda"))
    for _ in range(2):
        phases.start()
        capturing = True
        for phase in ("forward", "backward", "optimizer"):
            phases(phase)
        capturing = False
    for captured in (0, 1, 0):
        phases.start()
        phases("transfer")
        next(clock)
        for event in phases._captures[captured].values():
            event.record()
        expected = {"transfer": 1, "forward": 2, "backward": 1, "optimizer": 1, "sum": 3, "step": 5}
        assert phases.durations_ms() == expected


@pytest.mark.parametrize(("values", "name"), [((0, 0), "warm_up"), ((2, 2), "steps")])
def test_wrong_pace(options, values, name):
    with pytest.raises(ValueError, match=f"'{name}' needs a value >= "):
        options(f"pace.warm_up={values[0]}", f"pace.steps={values[1]}")


def test_sums_in_turns_are_compared_with_each_other(table):
    code, rows = table("datasets=[reddit_like_small]", "backends=[pyg,auto]", "pace.rounds=3")
    reference, ours = rows
    assert code == 0 and not reference["reference_sum_ms"] and float(ours["reference_sum_ms"]) > 0
    # Of each turn of five the first step is left out.
    assert ours["n"] == str(3 * (table2_steps.TURN - 1)) and reference["n"] == "2"
    expected = float(ours["reference_sum_ms"]) / float(ours["sum_ms"])
    assert table2.faster(rows, "sum_ms") == {
        ("reddit_like_small", "pyg"): 1.0,
        ("reddit_like_small", "auto"): expected,
    }
    before = [{**row, "reference_sum_ms": ""} for row in rows]
    alone = float(reference["sum_ms"]) / float(ours["sum_ms"])
    assert table2.faster(before, "sum_ms")["reddit_like_small", "auto"] == alone


def test_latest_row_counts():
    cells = [{"model": "m", "dataset": "d", "backend": backend, "at": at} for at in (0, 1) for backend in "ab"]
    assert [row["at"] for row in table2.latest(cells, table2.CELL)] == [1, 1]


def test_rows_of_another_setting_and_failures_do_not_count(options):
    first, other = options(), options("num_batches=3")
    # Turns do not change what a time is.
    assert first.setting == options("pace.rounds=3").setting != other.setting
    cells = first.cells()
    rows = [
        {**first.provenance(), "dataset": cell.dataset, "backend": cell.backend.name, "status": "ok"} for cell in cells
    ]
    assert table2.missing(cells, rows, first.provenance()) == []
    assert table2.missing(cells, rows, other.provenance()) == cells
    rows[-1]["status"] = "no result within 1 s"
    assert table2.missing(cells, rows, first.provenance())[-1] == cells[-1]


def test_what_runs_out_of_memory_is_the_last_of_its_process(options, monkeypatch):
    statuses = ["ok", table2.OUT_OF_MEMORY, "ok"]
    monkeypatch.setattr(isolated, "results", lambda *_: iter([{"status": status} for status in statuses]))
    some = options("limit_s=60")
    assert [row["status"] for row in table2._rows(some, some.cells())] == statuses[:2]
