"""Everything: tasks get the room that they state, calls go on where one stopped, and rows come back case by case."""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pyg_dfgnn.bench import check, everything, overhead, schedule, table2
from pyg_dfgnn.bench.bring_back import CASES, RUNS, bring_back, merge
from pyg_dfgnn.bench.experiment import Experiment
from pyg_dfgnn.bench.profile import Profiled
from pyg_dfgnn.bench.results import Table, source_digest
from pyg_dfgnn.bench.schedule import Gpu, Task, is_done, run
from pyg_dfgnn.paths import configs_dir

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(schedule, "POLL_S", 0.01)
    monkeypatch.setattr(schedule, "GRACE_S", 0.5)


def gpus(count):
    return [Gpu(f"{place + 4}", 100.0) for place in range(count)]


def fake(folder, name, sleep_s=0.1, then="", **stated):
    """A task that writes down when it starts and ends, and which GPUs it sees."""
    log = f"{folder}/events"
    script = f'echo "start {name} $CUDA_VISIBLE_DEVICES" >> {log}; sleep {sleep_s}; {then or ":"}; '
    return Task(name, ("sh", "-c", f'{script} echo "end {name} $CUDA_VISIBLE_DEVICES" >> {log}'), 1.0, **stated)


def events(folder):
    return [(*line.split(" "),) for line in (folder / "events").read_text().splitlines()]


def starts(folder):
    return [name for what, name, _ in events(folder) if what == "start"]


def most_at_once(folder, tasks, cores):
    """The largest number of tasks side by side, after a look at what these took at any time."""
    by_name, running, most = {task.name: task for task in tasks}, {}, 0
    for what, name, devices in events(folder):
        if what == "end":
            del running[name]
            continue
        running[name] = devices.split(",") if devices else []
        most = max(most, len(running))
        share, memory = Counter(), Counter()
        for each, places in running.items():
            assert len(set(places)) == by_name[each].gpus
            share.update(dict.fromkeys(places, by_name[each].share))
            memory.update(dict.fromkeys(places, by_name[each].memory_gb))
        assert all(value <= 1 + 1e-6 for value in share.values()) and all(value <= 95 for value in memory.values())
        assert sum(by_name[each].cores for each in running) <= cores
        assert len(running) == 1 or not any(by_name[each].alone for each in running)
    return most


@pytest.mark.parametrize("count, side_by_side", [(1, 2), (2, 2), (4, 3)])
def test_order_and_sharing(tmp_path, capsys, count, side_by_side):
    tasks = [fake(tmp_path, "host", alone=True), fake(tmp_path, "data", gpus=0, share=0.0, cores=1)]
    tasks += [fake(tmp_path, "both", gpus=2), *(fake(tmp_path, f"timed-{place}", 0.2) for place in range(3))]
    tasks += [fake(tmp_path, f"shared-{place}", 0.2, share=0.4, cores=0.5) for place in range(4)]
    tasks += [fake(tmp_path, f"large-{place}", share=0.3, memory_gb=50.0) for place in range(2)]
    outcome = run(tasks, tmp_path, gpus(count), 64)
    expected = [task.name for task in tasks if count > 1 or task.name != "both"]
    assert sorted(outcome.done) == sorted(expected) and not outcome.failed and not outcome.left
    assert outcome.not_run == ({"both": "needs 2 GPUs"} if count == 1 else {})
    assert most_at_once(tmp_path, tasks, 64) >= side_by_side
    order = re.findall(r"start (\S+)", capsys.readouterr().out)
    assert order[0] == "host" and set(order[-6:]) == {task.name for task in tasks[6:]}
    assert {devices for _, name, devices in events(tmp_path) if name == "data"} == {""}


def test_cores_are_shared_and_a_task_may_state_more_than_there_is(tmp_path):
    tasks = [fake(tmp_path, f"{place}", share=0.1, cores=2.0) for place in range(3)]
    assert len(run(tasks, tmp_path, gpus(1), 4).done) == 3
    assert most_at_once(tmp_path, tasks, 4) == 2
    large = fake(tmp_path, "large", cores=99.0, share=0.2, memory_gb=500.0)
    assert run([large], tmp_path, gpus(1), 4).done == ["large"]


def test_small_tasks_do_not_overtake_one_that_waits(tmp_path):
    tasks = [fake(tmp_path, "first", 0.2), fake(tmp_path, "both", gpus=2), fake(tmp_path, "small", share=0.1)]
    run(tasks, tmp_path, gpus(2), 64)
    assert starts(tmp_path) == ["first", "both", "small"]


def test_tasks_that_share_a_gpu_leave_others_whole(tmp_path):
    shared = [fake(tmp_path, f"shared-{place}", 0.4, share=0.5, cores=0.5) for place in range(2)]
    run([*shared, fake(tmp_path, "whole", 0.1)], tmp_path, gpus(2), 64)
    assert [name for what, name, _ in events(tmp_path)[:4] if what == "end"] == ["whole"]
    # With no such task each takes a GPU of its own.
    (tmp_path / "events").unlink()
    run(shared, tmp_path / "again", gpus(2), 64)
    assert len({devices for _, _, devices in events(tmp_path)}) == 2


def test_what_must_be_done_before(tmp_path, capsys):
    tasks = [fake(tmp_path, "use", share=0.1, after=("make", "made elsewhere")), fake(tmp_path, "make", share=0.1)]
    tasks += [fake(tmp_path, "bad", then="echo why; exit 3"), fake(tmp_path, "of bad", after=("bad",))]
    tasks += [fake(tmp_path, "of that", after=("of bad",)), fake(tmp_path, "no tool", lacks="no tool here")]
    outcome = run(tasks, tmp_path, gpus(1), 64)
    order = [(what, name) for what, name, _ in events(tmp_path)]
    assert order.index(("end", "make")) < order.index(("start", "use"))
    assert sorted(outcome.done) == ["make", "use"] and outcome.failed == ["bad"]
    assert outcome.not_run == {
        "of bad": "bad must be done before",
        "of that": "of bad must be done before",
        "no tool": "no tool here",
    }
    assert [is_done(task, tmp_path) for task in tasks] == [True, True, False, False, False, False]
    printed = capsys.readouterr().out
    assert re.search(r"FAILED bad: exit code 3; see \S*bad.log\n    why\n", printed)
    assert re.search(r"\[ +0 s\] start make on GPU 4, about 1 s\n", printed)
    assert re.search(r"done make after 0 s; \d of 6 done, about \d+ s left", printed)


def has_ended(pid):
    """Whether a process is over, or only waits for its parent to take note of it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_stops_in_time_and_goes_on(tmp_path):
    # The shell and a child in a session of its own do not listen to an interrupt.
    deaf = f"""{sys.executable} -S -c 'import os, time; os.setsid(); open("{tmp_path}/pid", "w").write(str(os.getpid()))
time.sleep(60)' & trap '' INT; wait; sleep 60"""
    tasks = [fake(tmp_path, "quick", share=0.1), fake(tmp_path, "slow", then=deaf, share=0.1)]
    tasks += [fake(tmp_path, "next", after=("slow",))]
    before = time.monotonic()
    outcome = run(tasks, tmp_path, gpus(1), 64, limit_s=3.0)
    assert time.monotonic() - before < 10
    assert outcome.done == ["quick"] and outcome.left == ["slow", "next"] and not outcome.interrupted
    assert has_ended(int((tmp_path / "pid").read_text()))
    (tmp_path / "events").unlink()
    tasks[1] = fake(tmp_path, "slow")
    assert run(tasks, tmp_path, gpus(1), 64).done == ["quick", "slow", "next"]
    assert starts(tmp_path) == ["slow", "next"]


def test_what_starts_over_needs_its_whole_time_and_an_empty_folder(tmp_path):
    for name in ("run", "rows"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    tasks = [fake(tmp_path, "run", resumes=False), fake(tmp_path, "rows")]
    tasks = [Task(**{**vars(task), "expected_s": 20.0}) for task in tasks]
    short = [Task(**{**vars(tasks[1]), "expected_s": 0.1})]
    assert run([tasks[0], *short], tmp_path, gpus(2), 64, limit_s=5.0).left == ["run"]
    assert (tmp_path / "run" / "half").exists()
    assert run(tasks, tmp_path, gpus(2), 64).done == ["rows", "run"]
    assert not (tmp_path / "run").exists() and (tmp_path / "rows" / "half").exists()


def test_what_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "HANGS_S", -9.8)
    later = Task(**{**vars(fake(tmp_path, "next", 0)), "expected_s": 3.0})
    outcome = run([fake(tmp_path, "hangs", 60), later], tmp_path, gpus(1), 64)
    assert outcome.failed == ["hangs"] and outcome.done == ["next"]


def test_keyboard_interrupt_ends_the_tasks(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        tasks = [fake(tmp_path, "slow", 0, then=f"kill -INT {os.getpid()}; sleep 60"), fake(tmp_path, "next")]
        outcome = run(tasks, tmp_path, gpus(1), 64)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.interrupted and outcome.left == ["slow", "next"] and starts(tmp_path) == ["slow"]


def test_names_differ(tmp_path):
    with pytest.raises(ValueError, match=r"names that differ \(got \['a'\]\)"):
        run([fake(tmp_path, "a"), fake(tmp_path, "a")], tmp_path, gpus(1), 4)


def write(path, *lines, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def test_merging_replaces_a_case_and_keeps_others(tmp_path):
    target = write(tmp_path / "all.csv", "case,kernel,us", "a,one,1", "a,two,2", "b,one,3", "c,one,4", end="\r\n")
    first = write(tmp_path / "1" / "all.csv", "case,kernel,us", "a,one,5", "a,three,6", "a,one,7", "d,on")
    second = write(tmp_path / "2" / "all.csv", "case,kernel,us", "d,one,8")
    expected = ["case,kernel,us", "b,one,3", "c,one,4", "a,one,7", "a,three,6", "d,one,8"]
    for _ in range(2):
        assert merge(target, [first, second], ["case"]) == 3
        assert target.read_bytes() == "".join(line + "\r\n" for line in expected).encode()
    assert merge(tmp_path / "new.csv", [second], ["case"]) == 1
    assert (tmp_path / "new.csv").read_bytes() == second.read_bytes()
    assert merge(tmp_path / "none.csv", [write(tmp_path / "empty.csv")], ["case"]) == 0
    with pytest.raises(ValueError, match="other columns"):
        merge(target, [write(tmp_path / "other.csv", "case,us", "a,1")], ["case"])
    assert not list(tmp_path.rglob("*.partial"))


def test_cases_are_columns_of_the_results():
    for pattern, columns in CASES.items():
        files = list(RESULTS.glob(pattern))
        assert files
        for path in files:
            first = next(columns for each, columns in CASES.items() if path.relative_to(RESULTS).match(each))
            if columns == first and not path.name.startswith("rounding"):
                assert set(columns.split()) <= set(path.open().readline().strip().split(","))


def some_rows(source, target, change, count=40):
    """The first rows of a result file with one column changed."""
    rows = Table.read(source)[:count]
    table = Table(target, rows[0])
    table.append({**row, **change} for row in rows)


def test_rows_come_back_with_their_pages(tmp_path, monkeypatch, capsys):
    work, results, stem = tmp_path / "work" / "gpu-1234", tmp_path / "results", "nvidia-h200"
    bench, model = f"bench/{stem}/fig13.csv", f"agnn_stack-{stem}"
    for name in (bench, f"table2/{model}.csv", f"table2/{model}-losses.csv"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / name, results / name)
    some_rows(RESULTS / bench, work / "fig13" / stem / "fig13.csv", {"digest": "new"}, 3)
    some_rows(RESULTS / f"table2/{model}.csv", work / "t2" / f"{model}.csv", {"digest": "new"}, 4)
    some_rows(RESULTS / f"table2/{model}-losses.csv", work / "t2" / f"{model}-losses.csv", {"digest": "new"})
    some_rows(RESULTS / f"check/{stem}.csv", work / "check-0" / f"{stem}.csv", {"digest": "new"})
    write(work / "multi_gpu" / "multi_gpu-gpu.csv", "check,processes", "a,1")
    metrics = {"task": "Cora", "model": "GAT", "metric": "accuracy", "convs": "ours", "device": "H200", "seed": 0}
    metrics |= {"test_accuracy": 0.83, "epochs": 2, "train_time_s": 1.5}
    for name in ("run", "stopped"):
        write(work / name / "metrics.json", json.dumps(metrics))
        write(work / name / "metrics.csv", "epoch,val_accuracy", "1,0.5", "2,0.75")
        write(work / name / ".hydra" / "overrides.yaml", "- experiment=gat_cora", "- seed=0")
    (work / "run.done").touch()
    intos = {"fig13": "bench", "t2": "table2", "check-0": "check", "multi_gpu": "", "run": RUNS, "stopped": RUNS}
    tasks = [Task(name, (), 1.0, into) for name, into in intos.items()] + [Task("never begun", (), 1.0, "check")]
    monkeypatch.chdir(tmp_path)
    problems = bring_back(tasks, work, Path("results"))
    assert len(problems) == 1 and "'check'" not in problems[0] and "model" in problems[0]
    assert Counter(row["digest"] for row in Table.read(results / bench))["new"] == 3
    assert len(Table.read(results / bench)) == len(Table.read(RESULTS / bench))
    assert len(Table.read(results / f"table2/{model}.csv")) == len(Table.read(RESULTS / f"table2/{model}.csv"))
    assert "sources `new` (40 rows)" in (results / f"check/{stem}.md").read_text()
    assert (results / f"table2/{model}.md").exists() and (results / f"table2/{model}.png").exists()
    assert "fig13" in (results / f"bench/{stem}/README.md").read_text()
    assert [row["run"] for row in Table.read(results / RUNS / "runs.csv")] == ["gpu-1234/run"]
    assert (results / RUNS / "table.md").exists()


@pytest.fixture(scope="module")
def real():
    return everything.tasks(Path("/work folder"), "gpu")


def words_of(task):
    """The module of a command and its arguments."""
    at = len(task.command) - 1 - task.command[::-1].index("-m")
    return task.command[at + 1], list(task.command[at + 2 :])


def test_real_tasks_are_there_and_say_where_they_write(real):
    names = [task.name for task in real]
    assert len(set(names)) == len(names)
    assert sum(task.name.startswith("table2-") for task in real) == 21
    assert {task.gpus for task in real} == {0, 1, 2}
    for task in real:
        assert find_spec(words_of(task)[0]) is not None
        assert set(task.after) <= set(names[: names.index(task.name)])
        own = f"/work folder/{task.name}"
        assert task.into is None or any(own in word and not word.split(own)[1][:1].strip("/") for word in task.command)
    timed = [task for task in real if task.into in ("bench", "table2", "")]
    assert timed and all(task.share == 1.0 for task in timed)
    assert [task.alone for task in real] == sorted((task.alone for task in real), reverse=True)
    assert {task.name for task in real if task.alone} >= {"overhead", "table2-gat_stack-cora"}
    # What takes longest begins first, so that no GPU is left over with it.
    seconds = [task.expected_s for task in real if task.gpus == 1 and not task.alone]
    assert seconds == sorted(seconds, reverse=True)


def test_real_commands_compose(real):
    profiled, checked = [], Counter()
    for task in real:
        module, words = words_of(task)
        if module == "pyg_dfgnn.training" and task.name.endswith("-0"):
            with initialize_config_dir(str(configs_dir()), version_base="1.3"):
                compose("train", [word for word in words if not word.startswith("hydra.")])
        elif module == "pyg_dfgnn.bench":
            with initialize_config_dir(str(configs_dir() / "bench"), version_base="1.3"):
                config = OmegaConf.to_container(compose("bench", words), resolve=True, throw_on_missing=True)
            experiment = Experiment.of(config)
            assert str(experiment.folder) == f"/work folder/{task.name}" and experiment.limit_s > 1e5
        elif module == "pyg_dfgnn.bench.table2":
            with initialize_config_dir(str(configs_dir()), version_base="1.3"):
                config = OmegaConf.to_container(compose("table2", words), resolve=True, throw_on_missing=True)
                options = table2.Options.of(config, "model")
                assert len(options.cells()) == 5
            assert str(options.folder) == f"/work folder/{task.name}" and options.total_limit_s > 1e5
        elif module == "pyg_dfgnn.bench.check":
            options = check._options(words)
            for cases in check.grid(options).values():
                for case in cases:
                    checked.update((graph, case) for graph in options.graphs)
        elif module == "pyg_dfgnn.bench.profile":
            profiled += [Profiled.of(word) for word in words if ":" in word]
    whole = check._options([])
    assert checked == Counter(
        (graph, case) for cases in check.grid(whole).values() for case in cases for graph in whole.graphs
    )
    assert len(profiled) == sum(len(cases.split()) for cases in everything.PROFILED.values())


def test_all_that_results_hold_is_measured_again(real):
    commands = [" ".join(words_of(task)[1]) for task in real]

    def measured(*words):
        return any(all(word in command.split() for word in words) for command in commands)

    for row in Table.read(RESULTS / RUNS / "runs.csv"):
        assert measured(*row["overrides"].split()) and any(row["overrides"] in command for command in commands)
    for path in RESULTS.glob("table2/*_stack-*.csv"):
        for row in Table.read(path):
            assert measured(f"model={row['model']}", f"datasets=[{row['dataset']}]")
    for path in RESULTS.glob("bench/*/*.csv"):
        for row in Table.read(path):
            assert measured(row["case"]) if path.stem == "profile" else measured(f"experiment={row['experiment']}")


def test_choosing(real):
    def chosen(only, skip=None):
        found = everything.choose(real, *(pattern and re.compile(pattern) for pattern in (only, skip)))
        return [task.name for task in found]

    assert chosen(None) == [task.name for task in real]
    assert chosen("^gt_pattern-auto") == ["data-gt_pattern", *(f"gt_pattern-auto_graph-{seed}" for seed in range(4))]
    assert chosen("^gt_pattern-auto", "data|-[123]$") == ["gt_pattern-auto_graph-0"]
    assert chosen("gt_pattern", "gt_pattern") == []


def command(monkeypatch, tmp_path, tasks, *words, count=1):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(everything, "gpus_at_hand", lambda: (gpus(count), "gpu" if count else ""))
    monkeypatch.setattr(everything, "tasks", lambda work, stem: tasks)
    return everything.main(words)


def test_command(tmp_path, monkeypatch, capsys):
    work = tmp_path / "outputs" / "everything" / f"gpu-{source_digest(table2.MEASURED_ROOMS)}"
    head, row = ",".join(overhead.FIELDS), ",".join("b" for _ in overhead.FIELDS)
    file = work / "rows" / "gpu-overhead.csv"
    rows = fake(tmp_path, "rows", then=f"mkdir -p {file.parent}; printf '{head}\\n{row}\\n' > {file}", into="bench")
    bad = fake(tmp_path, "bad", then="exit 1", into="check")
    assert command(monkeypatch, tmp_path, [rows, bad], "--skip", "bad") == 0
    assert (tmp_path / "results" / "bench" / "gpu-overhead.csv").read_text() == f"{head}\n{row}\n"
    assert command(monkeypatch, tmp_path, [rows, bad]) == 1
    assert starts(tmp_path) == ["rows", "bad"]
    assert "done: 1 of 2\nFAILED: bad\n" in capsys.readouterr().out
    slow = fake(tmp_path, "slow", 60, into="check")
    assert command(monkeypatch, tmp_path, [rows, slow], "--total-s", f"{everything.BRING_BACK_S + 3}") == 2
    assert "done: 1 of 2\nleft: slow\n" in capsys.readouterr().out
    assert command(monkeypatch, tmp_path, [rows, slow], "--list", count=0) == 0
    assert "slow: 1 GPU x 1, 0 GB, 4 cores, 1.0 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "count, words, message",
    [
        (0, (), "needs an NVIDIA GPU"),
        (1, ("--only", "nothing"), "leave no task"),
        (1, ("--total-s", "20"), "--total-s needs more than 50.5"),
        (1, ("--only", "("), "needs a regular expression"),
        (1, (), "another process is at work"),
    ],
)
def test_command_refuses(tmp_path, monkeypatch, capsys, count, words, message):
    work = tmp_path / "outputs" / "everything" / f"gpu-{source_digest(table2.MEASURED_ROOMS)}"
    work.mkdir(parents=True)
    with FileLock(work / "lock"), pytest.raises(SystemExit):
        command(monkeypatch, tmp_path, [fake(tmp_path, "a")], *words, count=count)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "events").exists()


def test_no_gpu_is_found_where_none_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert everything.gpus_at_hand() == ([], "")
