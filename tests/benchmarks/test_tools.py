"""The list of all commands."""

from hydra import compose, initialize_config_dir

from benchmarks import CONFIGS, measure, table2


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
