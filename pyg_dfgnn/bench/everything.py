"""Repeats every measurement that ``results/`` holds, on all GPUs at hand, and brings the rows back there.

python -m pyg_dfgnn.bench.everything                           all of it
python -m pyg_dfgnn.bench.everything --list                    what that is; needs no GPU
python -m pyg_dfgnn.bench.everything --only '^check|peers-a'   some tasks, and what must be done before them
python -m pyg_dfgnn.bench.everything --skip 'pyg' --total-s 3600

What is timed has a GPU for itself, checks and training share them. Each task has a folder of its own below `--work`, by
sources and kind of GPU. At the end, also of a call that was interrupted, new rows take the place of those of the same
case in ``results/``, and pages and figures are written anew; other text there is left alone. The same command goes on
where it stopped. Left out are the experiments `heads` and `fig15`, whose rows are those of `peers` and `fig9`, and what
has its own README, was written by hand or came from throw-away scripts: `cora_gat`, `not_reached.md`, `tuning`,
the files `citation-*` and `rounding-*`.
Exit code: 0 all is done; 1 a task or the bringing back failed; 2 stopped early; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from filelock import FileLock, Timeout

from pyg_dfgnn.bench import check, schedule, table2
from pyg_dfgnn.bench.bring_back import RUNS, bring_back
from pyg_dfgnn.bench.cases.attention import SCORES
from pyg_dfgnn.bench.check_graphs import CHECK_GRAPHS
from pyg_dfgnn.bench.results import source_digest
from pyg_dfgnn.bench.schedule import Gpu, Task, is_done

BRING_BACK_S = 50.0
"""What merging rows and drawing all figures takes, about."""
SEEDS = range(4)
HOST_BOUND = ("cora", "citeseer", "pubmed_made_features")
"""Data sets of Table 2 where the host is the limit: nothing may run beside them."""
PROFILED = {
    "large": "a:add:1x128:float32 a:add:8x16:float32 a:cosine:8x16:bfloat16 a:dot:8x16:bfloat16 c:add:8x16:float32 "
    "d:cosine:1x128:float32 e:add:8x16:float32 e:cosine:1x128:float32 e:cosine:8x16:float32 e:dot:1x128:tf32",
    "small": "b:dot:1x128:float32 b:dot:8x16:float32 b:cosine:1x128:float32 b:add:1x128:float32 b:gatv2:1x128:float32",
    "heads": "e:gatv2:8x16:float32 e:gatv2:1x128:float32 e:add:8x16:bfloat16 e:cosine:8x16:bfloat16 "
    "a:add:8x16:bfloat16 a:dot:8x16:tf32 a:cosine:8x16:tf32 a:add:8x16:tf32 "
    "a:dot:1x128:tf32 a:cosine:1x128:tf32 a:add:1x128:tf32",
    "many_edges": "c:add:8x16:bfloat16 c:cosine:8x16:bfloat16 d:add:8x16:bfloat16 d:cosine:8x16:bfloat16 "
    "c:add:1x128:bfloat16 d:add:1x128:bfloat16",
    "more": "a:dot:8x16:float32 a:cosine:8x16:float32 a:gatv2:1x128:float32 d:add:1x128:float32 d:add:8x16:float32 "
    "d:gatv2:1x128:float32",
    "rest": "b:add:8x16:float32 b:dot:8x16:float32:forward b:gatv2:8x16:float32:forward b:cosine:8x16:float32:forward "
    "e:add:8x16:tf32 e:cosine:8x16:tf32 e:add:8x16:float32:forward e:add:8x16:tf32:forward",
    "replays": "cora:gatv2:1x128:float32:forward cora:cosine:1x128:float32:forward cora:dot:1x128:float32:forward "
    "b:gatv2:1x128:float32:forward b:cosine:1x128:float32:forward b:dot:1x128:float32:forward",
    "fusions": "mnist_like:dot:1x128:float32:smmf mnist_like:dot:1x128:float32:pmf mnist_like:add:1x128:float32:smmf "
    "mnist_like:add:1x128:float32:pmf reddit_like:add:1x128:float32:smmf reddit_like:add:1x128:float32:pmf",
}
"""What is slower than was asked for, and where another of DF-GNN's fusions is the faster one than in the paper."""
CHOICES = {
    "c": "c",
    "d": "d",
    "ppa": "ppa_like",
    "batches": "a,b,e,pattern_like",
    "images": "mnist_like,cifar10_like,cluster_like,voc_like,coco_like",
    "cited": "cora,citeseer,pubmed,reed98,cornell5",
    "real": "minesweeper,squirrel,tolokers,photo,ego_twitter",
}
"""The graphs of `experiment=choice`, in parts of about the same time."""
_GT = "scheduler=cosine trainer.epochs=16 trainer.loader.batch_size=128 optimizer.lr=0.001"
_MNIST = "scheduler=cosine trainer.epochs=50 trainer.patience=null"
_REDDIT = "data.task.scale=0.1 trainer.epochs=30"
TRAINED = (
    ("gt_pattern", "", _GT, {"pyg": (0.5, 24, 260), "auto_graph": (0.1, 10, 110)}),
    ("gt_cluster", "", _GT, {"pyg": (0.5, 24, 200), "auto_graph": (0.1, 10, 100)}),
    ("gt_tolokers", "", "", {"pyg": (0.4, 58, 370), "auto_graph": (0.08, 6, 160)}),
    ("gat_mnist_superpixels", "", _MNIST, {"pyg": (0.05, 3, 170), "auto_graph": (0.04, 3, 70)}),
    ("gat_reddit_like", "", _REDDIT, {"pyg": (0.2, 28, 160), "auto": (0.1, 8, 150)}),
    ("gat_cornell5", "", "", {"pyg": (0.1, 10, 150), "auto_graph": (0.03, 3, 60)}),
    ("agnn_cora", "", "", {"pyg": (0.03, 1.5, 110), "auto_graph": (0.03, 1.5, 70)}),
    ("gat_cora", "", "", {"pyg": (0.03, 1.5, 110), "auto_graph": (0.03, 1.5, 70)}),
    ("gatv2_cora", "", "", {"pyg": (0.03, 1.5, 110), "auto_graph": (0.03, 1.5, 70)}),
    ("gat_citeseer", "", "", {"pyg": (0.03, 1.5, 110), "auto_graph": (0.03, 1.5, 70)}),
    ("gat_pubmed", "data=pubmed_made_features", "", {"pyg": (0.03, 1.5, 80), "auto_graph": (0.03, 1.5, 40)}),
    ("gat_squirrel", "", "", {"pyg": (0.03, 2, 90), "auto_graph": (0.03, 1.5, 50)}),
)
"""Experiment, words before and after its backend, and by backend: share and GB of a GPU, seconds on an H200."""
MADE = {
    "gt_pattern": "pattern",
    "gt_cluster": "cluster",
    "gat_mnist_superpixels": "mnist_superpixels",
    "gat_reddit_like": "reddit_like task.scale=0.1",
}
"""Data that the runs of an experiment share, made once before them."""


def tasks(work: Path, stem: str) -> list[Task]:
    """What to run, the most sensitive first: host times, then data, then the longest, so that none is left over alone.

    Args:
        work: Folder below which each task has one of its own.
        stem: Name of the kind of GPU in file names.

    Returns:
        The tasks; seconds, GB and shares are those of an H200.
    """
    found = [*_table2(work), *_bench(work, stem), *_check(work), *_accuracy(work)]
    return sorted(found, key=lambda task: (not task.alone, task.gpus > 0, -task.gpus, -task.expected_s))


def _module(name: str, *words: str | Path) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pyg_dfgnn.{name}", *map(str, words))


def _table2(work: Path) -> Iterator[Task]:
    models, batches = ("transformer_stack", "gat_stack", "agnn_stack"), "pattern cluster pascalvoc_sp_like coco_sp_like"
    for model, dataset in product(models, (*HOST_BOUND, *batches.split())):
        name = f"table2-{model}-{dataset}"
        words = f"model={model}", f"datasets=[{dataset}]", f"folder={work / name}", "total_limit_s=1e6"
        alone = dataset in HOST_BOUND
        yield Task(name, _module("bench.table2", *words), 40 if alone else 70, "table2", cores=8, alone=alone)


def _bench(work: Path, stem: str) -> Iterator[Task]:
    def measured(name: str, expected_s: float, *words: str) -> Task:
        command = _module("bench", *words, f"folder={work / name}", "workers=8", "limit_s=1e6")
        return Task(name, command, expected_s, "bench", cores=8)

    name = "overhead"
    yield Task(name, _module("bench.overhead", "--out", work / name), 40, "bench", alone=True, resumes=False)
    for graph, expected_s in {"c": 150, "d": 110, "a": 200, "e": 130, "b": 110}.items():
        yield measured(f"peers-{graph}", expected_s, "experiment=peers", f"graphs=[{graph}]")
    for graph in "cd":
        yield measured(f"compile-{graph}", 280, "experiment=compile", f"graphs=[{graph}]")
    for part, graphs in CHOICES.items():
        yield measured(f"choice-{part}", 45, "experiment=choice", f"graphs=[{graphs}]")
    for name, expected_s in {"fig9": 60, "fig10b": 70, "fig12": 50, "tf32": 35}.items():
        yield measured(name, expected_s, f"experiment={name}")
    for name in ("fig10a", "fig11", "fig13", "fig14"):
        yield measured(name, 25, f"experiment={name}")
    for graph in ("mnist_like", "cifar10_like", "cluster_like", "pattern_like", "voc_like", "coco_like"):
        yield measured(f"fig9_compile-{graph}", 90, "experiment=fig9_compile", f"graphs=[{graph}]")
    yield measured("fig10a_compile", 120, "experiment=fig10a_compile")
    for graph, expected_s in {"ppa_like": 250, "reddit_like": 650, "proteins_like": 500}.items():
        yield measured(f"fig10b_compile-{graph}", expected_s, "experiment=fig10b_compile", f"graphs=[{graph}]")
    lacks = "" if shutil.which("ncu") else "Nsight Compute's 'ncu' is not on the PATH"
    for part, cases in PROFILED.items():
        name = f"profile-{part}"
        command = _module("bench.profile", "--out", work / name, *cases.split())
        yield Task(name, command, 18 * len(cases.split()), "bench", resumes=False, lacks=lacks)
    name = "multi_gpu"
    launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    words = "-m", "pyg_dfgnn.training.multi_gpu", "--csv", str(work / name / f"multi_gpu-{stem}.csv")
    yield Task(name, (*launcher, *words), 80, "", gpus=2, resumes=False)


def _check(work: Path) -> Iterator[Task]:
    largest = "cornell5"
    for score, edge, dropout in product(SCORES, check.EDGES, map(str, check.DROPOUTS)):
        if score == "cosine" and edge == "yes":
            continue
        shards = {"": (list(CHECK_GRAPHS), 0.3, 25)}
        # Inputs and gradients of every edge and channel, in float64 too, of the graph with the most edges.
        if edge == "yes" and score != "add":
            shards = {"": ([graph for graph in CHECK_GRAPHS if graph != largest], 0.3, 25)}
            shards[f"-{largest}"] = [largest], 0.3, 120
        for suffix, (graphs, share, memory_gb) in shards.items():
            name = f"check-{score}{'-edge' * (edge == 'yes')}-{dropout}{suffix}"
            words = ["--schedules", "row_split", "smem", "block_mma", "--scores", score, "--edges", edge]
            words += ["--dropouts", dropout, "--workers", "4", "--graphs", *graphs]
            command = _module("bench.check", "--out", work / name, *words)
            yield Task(name, command, 100, "check", share=share, memory_gb=memory_gb)


def _accuracy(work: Path) -> Iterator[Task]:
    sampler = any(find_spec(name) for name in ("pyg_lib", "torch_sparse"))
    lacks = {} if sampler else {"gat_reddit_like": "neither pyg_lib nor torch_sparse is installed"}
    for experiment, data in MADE.items():
        command = _module("datasets", "describe", *data.split())
        reason = lacks.get(experiment, "")
        yield Task(f"data-{experiment}", command, 20, gpus=0, share=0.0, cores=1, lacks=reason)
    for experiment, before, after, backends in TRAINED:
        for (backend, (share, memory_gb, expected_s)), seed in product(backends.items(), SEEDS):
            name = f"{experiment}-{backend}-{seed}"
            words = [f"experiment={experiment}", *before.split(), f"backend={backend}", *after.split(), f"seed={seed}"]
            yield Task(
                name,
                _module("training", *words, f"hydra.run.dir={work / name}"),
                expected_s,
                RUNS,
                share=share,
                memory_gb=memory_gb,
                cores=1.0 if share >= 0.2 else 0.6,
                resumes=False,
                after=(f"data-{experiment}",) if experiment in MADE else (),
                environment={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                lacks=lacks.get(experiment, ""),
            )


def choose(found: Sequence[Task], only: re.Pattern[str] | None, skip: re.Pattern[str] | None) -> list[Task]:
    """Tasks whose name has `only` and has not `skip`, and what must be done before them unless it has `skip` too."""
    names = {task.name for task in found if only is None or only.search(task.name)}
    # What must be done before stands before.
    for task in reversed(found):
        if task.name in names and not (skip and skip.search(task.name)):
            names |= set(task.after)
    return [task for task in found if task.name in names and not (skip and skip.search(task.name))]


def gpus_at_hand() -> tuple[list[Gpu], str]:
    """The visible GPUs of the kind of the first one, and the name of that kind in file names; empty without a GPU."""
    # In a process of its own, for a context here would take memory of a GPU that others are timed on.
    code = (
        "import torch; from pyg_dfgnn.bench.results import file_stem\n"
        "for place in range(torch.cuda.device_count()):\n"
        "    memory = torch.cuda.get_device_properties(place).total_memory\n"
        "    print('GPU', file_stem(torch.device('cuda', place)), memory / 1e9)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = re.split(r"\s*,\s*", visible) if visible else map(str, range(len(lines)))
    found = [(stem, Gpu(name, float(memory))) for name, (stem, memory) in zip(names, lines)]
    return [gpu for stem, gpu in found if stem == found[0][0]], found[0][0] if found else ""


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"needs a regular expression (got {text!r}: {error})") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_pattern, metavar="REGEX", help="tasks whose name has it")
    parser.add_argument("--skip", type=_pattern, metavar="REGEX", help="but not those whose name has it")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="seconds for all, bringing back included")
    parser.add_argument("--work", type=Path, default=Path("outputs/everything"), help="folder (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only name the tasks and what they take")
    options = parser.parse_args(arguments)
    gpus, stem = gpus_at_hand()
    work = options.work.resolve() / f"{stem or 'no-gpu'}-{source_digest(table2.MEASURED_ROOMS)}"
    chosen = choose(tasks(work, stem or "no-gpu"), options.only, options.skip)
    if not chosen:
        parser.error("--only and --skip leave no task")
    if options.list:
        for task in chosen:
            needs = (
                f"{task.gpus} GPU x {task.share:g}, {task.memory_gb:g} GB, {task.cores:g} cores, {task.expected_s} s"
            )
            state = "done" if is_done(task, work) else task.lacks or ("alone" if task.alone else "")
            print(f"{task.name}: {needs}; {state}\n    {shlex.join(task.command)}")
        return 0
    if not gpus:
        parser.error("this needs an NVIDIA GPU that torch can use; --list shows the tasks without one")
    limit_s = options.total_s - BRING_BACK_S
    if limit_s < schedule.GRACE_S:
        parser.error(f"--total-s needs more than {BRING_BACK_S + schedule.GRACE_S:g} (got {options.total_s:g})")
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / "lock", timeout=0):
            outcome = schedule.run(chosen, work, gpus, os.cpu_count() or 1, limit_s)
            problems = bring_back(chosen, work, Path("results"))
    except Timeout:
        parser.error(f"another process is at work in {work}")
    for title, names in (
        ("done", [f"{len(outcome.done)} of {len(chosen)}"]),
        ("not run", [f"{name} ({reason})" for name, reason in outcome.not_run.items()]),
        ("left", outcome.left),
        ("FAILED", outcome.failed),
        ("NOT BROUGHT BACK", problems),
    ):
        if names:
            print(f"{title}: {', '.join(names)}")
    if outcome.interrupted:
        return 130
    return 1 if outcome.failed or problems else 2 if outcome.left else 0


if __name__ == "__main__":
    # A shell may have started us deaf to the keyboard; no end from elsewhere may leave children behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup a closed terminal does not count.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    sys.exit(main())
