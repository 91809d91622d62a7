"""Each script in `examples/` runs as its docstring says, trains, and is listed in the index."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dfgnn.datasets.files import SEARCH
from tests.processes import run_file

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TRAINED = {
    "forces.py": ["--epochs=6"],
    "gat_cora.py": ["--epochs=52", "--generated"],
    "gps_superpixels.py": ["--epochs=3", "--graphs=100", "--generated"],
    "graphgym_layer.py": ["--epochs=12"],
    "lightning_module.py": ["--epochs=2"],
    "mesh_edge_network.py": ["--epochs=22"],
    "molecules.py": ["--epochs=2", "--generated"],
    "own_layer.py": ["--epochs=22"],
    "rgcn_aifb.py": ["--epochs=12", "--generated"],
    "sampled_sage.py": ["--epochs=2"],
}
"""Script that prints its losses -> its options."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def run(tmp_path):
    """Run a script of the examples in a process of its own, and return what it printed.

    On a CPU it comes from a server that has imported PyG, which takes longer than most of the scripts.
    """

    def run(script, *options, python=(), size=1, folder=ROOT, **environment):
        path, known = ROOT / "examples" / script, {"PYG_DFGNN_CACHE": str(tmp_path), **environment}
        if "--device=cuda" in options or python:
            known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **known}
            words = [sys.executable, *python, str(path), *options]
            done = subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True)
        else:
            done = run_file(path, options, tmp_path, folder, known, size)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def losses_of(printed):
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


def trains(printed):
    losses = losses_of(printed)
    return len(losses) > 1 and losses[-1] < losses[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", TRAINED)
def test_training(script, device, run):
    printed = run(script, *TRAINED[script], f"--device={device}")
    if printed.startswith("skipped: "):
        pytest.skip(printed.removeprefix("skipped: ").strip())
    assert trains(printed)
    last = TRAINED[script][0].partition("=")[2]
    assert f"epoch {last}: loss " in printed
    if "pyg_dfgnn.report(" in SCRIPTS[script]:
        assert re.search(r"^module +class +state +why\n.* (drop-in|compiled)\b", printed, flags=re.MULTILINE)


@pytest.mark.sparse
def test_sampling_with_torch_sparse(run):
    assert trains(run("sampled_sage.py", "--epochs=2", "--device=cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_is_loaded_in_a_new_process(device, run):
    printed = run("export_and_load.py", "--epochs=10", f"--device={device}")
    assert trains(printed)
    assert float(re.search(r"loaded: graph of 500 nodes, difference (\S+)", printed)[1]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_missing_data_are_told(device, run, tmp_path):
    options = ["--epochs=10", f"--device={device}"]
    printed = run("hetero_imdb.py", *options, folder=tmp_path, PYG_DFGNN_DATA="nowhere")
    assert "imdb.npz was not found: a generated graph stands in" in printed and trains(printed)


def test_a_missing_package_is_told(run, tmp_path):
    (tmp_path / "scipy.py").write_text("raise ModuleNotFoundError('not here', name='scipy')")
    options = ["--epochs=10", "--device=cpu"]
    printed = run("gat_cora.py", *options, python=["-B"], PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert "scipy is missing: a generated graph stands in" in printed and trains(printed)


@pytest.mark.parametrize("script", sorted(name for name, text in SCRIPTS.items() if "argparse" in text))
def test_help_describes_the_script_and_its_options(script, run):
    printed = run(script, "--help")
    if printed.startswith("skipped: "):
        pytest.skip(printed.removeprefix("skipped: ").strip())
    assert SCRIPTS[script].split('"""')[1].splitlines()[0] in printed and "default: " in printed


@pytest.mark.parametrize(
    ("script", "files"), [("gat_cora.py", "planetoid/Cora/raw"), ("rgcn_aifb.py", "entities/aifb/raw")]
)
def test_real_data(script, files, run):
    found = [folder for folder in SEARCH if (Path(folder) / files).is_dir()]
    if not found:
        pytest.skip(f"{files} is not here (PYG_DFGNN_DATA)")
    printed = run(script, "--epochs=10", "--device=cpu", PYG_DFGNN_DATA=str(Path(found[0]).resolve()))
    assert "generated" not in printed and trains(printed)


def by_process(printed):
    """Return the losses of each process."""
    lines = re.findall(r"process (\d) of \d, epoch \d+: loss (\d+\.\d{6})", printed)
    return {rank: [float(loss) for process, loss in lines if process == rank] for rank in sorted(dict(lines))}


def test_two_processes_print_equal_losses(run):
    losses = by_process(run("ddp.py", "--epochs=3", "--device=cpu", python=TORCHRUN))
    assert list(losses) == ["0", "1"] and losses["0"] == losses["1"]
    assert len(losses["0"]) == 3 and losses["0"][-1] < losses["0"][0]


def test_losses_of_a_graph_in_parts_are_those_of_one_process(run):
    options = ["--epochs=5", "--device=cpu"]
    losses = by_process(run("partitioned_graph.py", *options, size=2))
    (alone,) = by_process(run("partitioned_graph.py", *options)).values()
    assert list(losses) == ["0", "1"] and len(alone) == 5 and alone[-1] < alone[0]
    assert all(values == pytest.approx(alone, rel=1e-4) for values in losses.values())


def test_layers_of_dgl(run):
    differences = re.findall(r"^(\w+) -> \w+: difference (\S+)", run("from_dgl.py"), flags=re.MULTILINE)
    assert [name for name, _ in differences] == ["GraphConv", "GATConv", "RelGraphConv"]
    assert all(float(difference) < 1e-5 for _, difference in differences)


def test_index_lists_each_script_with_its_command():
    index = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| .+ \| `(.+)` \|$", index, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == list(SCRIPTS)
    for name, command in rows:
        assert command.endswith(f"examples/{name}")
        assert f"\n    {command}\n" in SCRIPTS[name].split('"""')[1]
