"""The cost of orders of nodes beside their gain, and the list of all commands."""

from hydra import compose, initialize_config_dir

from benchmarks import CONFIGS, measure, orders, table2
from benchmarks.graphs import recipe_of
from benchmarks.results import Table
from benchmarks.run import FIELDS


def test_orders_are_set_against_their_gain(tmp_path, capsys):
    words = "--small --device cpu --graphs c+degree c+rcm --folder".split()
    for _ in range(2):
        assert orders.main([*words, str(tmp_path)]) == 0
    assert "python -m benchmarks experiment=reorder" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-small/reorder-cost.csv")
    costs_of = Table.read(path)
    assert [row["graph"] for row in costs_of] == ["c+degree", "c+rcm"] and all(float(r["cost_s"]) > 0 for r in costs_of)
    row = {**dict.fromkeys(FIELDS, ""), "op": "dot", "layer": "GT", "size": "1x128", "dtype": "float32", "status": "ok"}
    row |= {"implementation": "fused", "schedule": "auto", "direction": "fwd+bwd", "state": "warm"}
    times = [{**row, "graph": name, "median_ms": ms} for name, ms in {"c": 2.0, "c+degree": 1.5, "c+rcm": 2.5}.items()]
    Table(path.with_name("reorder.csv"), FIELDS).append(times)
    costs_of = [{**cost, "cost_s": "10"} for cost in costs_of]
    half = [{**each, "dtype": "bfloat16", "median_ms": float(each["median_ms"]) ** 2} for each in times]
    table = orders.gains_table(costs_of, [*times, *half])
    assert "| 1.33 (20,000), 1.78 |" in table and "| 0.80, 0.64 |" in table
    assert orders.main([*words, str(tmp_path)]) == 0
    assert "| 1.33 (" in capsys.readouterr().out


def test_the_experiment_names_reordered_graphs():
    names = orders.experiment_graphs()
    assert len({name.partition("+")[0] for name in names}) == 4 and all(recipe_of(name).order for name in names)


def test_commands_of_training_steps_compose():
    assert table2.CONFIGS == CONFIGS
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for words in measure.commands().values():
            if "benchmarks.table2" in words:
                cfg = compose("table2", words[2:])
                assert cfg.model.get("dropout", 0.0) == 0.0 and cfg.model.hidden_channels == 128


def test_everything_is_listed_and_goes_on_where_it_stopped(monkeypatch, capsys):
    assert measure.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "-m benchmarks experiment=fig9\n" in listed
    codes = iter([2, 0, 1])

    class Finished:
        def __init__(self, words):
            self.returncode = next(codes)

    monkeypatch.setattr(measure.subprocess, "run", Finished)
    assert measure.main(["fig9", "check"]) == 1
    assert "FAILED: check (exit code 1)" in capsys.readouterr().out
