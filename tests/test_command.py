"""`python -m pyg_dfgnn`: what it tells of an installation, and what it does where something lacks."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import pyg_dfgnn
from pyg_dfgnn import command
from pyg_dfgnn.command import cache, datasets, doctor, speed
from pyg_dfgnn.command import layers as layers_module
from pyg_dfgnn.command.info import TESTED, _tested
from pyg_dfgnn.command.layers import LAYERS, UserError, builtin_cases, loss_of, users_case
from pyg_dfgnn.paths import configs_dir
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.processes import run_script

CPU = torch.device("cpu")
WORDS = ("info", "doctor", "speed", "train", "datasets", "cache")

MINE = """
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = SAGEConv(4, 8), torch.nn.Dropout(), SAGEConv(8, 2)

    def forward(self, data):
        return self.second(self.drop(self.first(data.x, data.edge_index)), data.edge_index)

def whole():
    torch.manual_seed(1)
    return Model(), Data(x=torch.randn(20, 4), edge_index=torch.randint(20, (2, 60)))

def arguments():
    return GCNConv(4, 4), (torch.randn(20, 4), torch.randint(20, (2, 60)))

number = 3

def nothing():
    return Model()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of a user's own in the folder that the command runs in."""
    (tmp_path / "users_module.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield "users_module"
    sys.modules.pop("users_module", None)


def failed(words, capsys):
    assert command.main(words) == 1
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_info_names_versions_and_says_what_is_not_there(capsys):
    assert command.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"torch {version('torch')} (tested with 2." in shown and "kernels on disk: " in shown
    assert "NVRTC" in shown and "driver" in shown
    assert torch.cuda.is_available() or "PyTorch finds no GPU; pyg_dfgnn.describe_plan(" in shown


def test_info_names_a_package_that_lacks(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["info"]) == 0
    assert "NVRTC: unknown, cupy is not installed\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "end"),
    [("2.9.1", ", this is older than these"), ("2.10.0+cu128", ""), ("3.0.0a0", ", this is newer than these")],
)
def test_info_says_whether_a_release_was_tested(found, end):
    tested = "tested with {} to {}".format(*TESTED["torch"])
    assert _tested("torch", found) == tested + end


def test_commands_are_listed_by_the_module():
    done = subprocess.run([sys.executable, "-m", "pyg_dfgnn", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in WORDS)


def test_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"pyg_dfgnn {pyg_dfgnn.__version__}\n"


def test_unknown_command_lists_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["clear-cache"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in WORDS)


def test_a_reader_that_stops_is_no_error():
    code = "import sys\nfrom pyg_dfgnn.command import main\nsys.exit(main(['datasets', 'list']))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" 2>&1 | head -n 1', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 1 and done.stdout.startswith("aifb")


# Doctor ---------------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_doctor_run_kernels(name):
    with emulated_device() as launched:
        assert doctor.error_of(LAYERS[name], CPU) < 1e-4
    assert launched


def test_doctor_says_what_it_cannot_tell_and_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert command.main(["doctor"]) == 0 and "cannot be told" in capsys.readouterr().out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["doctor"]) == 1 and "finds no GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["doctor"]) == 1 and ".[cuda13]" in capsys.readouterr().out


def test_doctor_reports_a_family_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (7, 5))
    errors = dict(zip(LAYERS.values(), (1e-7, 0.5, 1e-6, 1e-6)))
    monkeypatch.setattr(doctor, "error_of", lambda make, device: errors[make])
    assert doctor.doctor() == 1
    shown = capsys.readouterr().out
    assert "GPU 0 has compute capability 7.5" in shown and "FAILED: aggregation on GPU 1" in shown
    assert "ok: attention on GPU 1" in shown


# Models of users ------------------------------------------------------------------------------------------------------


def test_a_function_of_a_user_gives_a_model_with_a_batch_or_arguments(mine):
    for name, kinds in (("whole", ["Data"]), ("arguments", ["Tensor", "Tensor"])):
        case = users_case(f"{mine}:{name}")
        assert [type(each).__name__ for each in case.arguments] == kinds and case.name == name
        assert loss_of(case.model(*case.arguments)).requires_grad
    assert (
        "x=[20, 4]" in users_case(f"{mine}:whole").text and users_case(f"{mine}:arguments").text == "[20, 4], [2, 60]"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("users_module", "the function needs the form module:function (got 'users_module')"),
        ("nowhere:whole", "nowhere:whole: No module named 'nowhere'"),
        ("users_module:hole", "users_module:hole: the module 'users_module' has no 'hole'"),
        ("users_module:number", "users_module:number: 'number' needs a function (got int)"),
        ("users_module:nothing", "the result needs (model, batch) or (model, tuple of arguments) (got Model)"),
    ],
)
@pytest.mark.parametrize("words", [["speed"], ["cache", "warm"]], ids=" ".join)
def test_a_wrong_function_is_one_line(mine, capsys, words, source, said):
    out, error = failed([*words, source], capsys)
    assert out == "" and error.startswith("FAILED: ") and error.rstrip().endswith(said) and error.count("\n") == 1


def test_a_model_without_gradients_is_refused():
    with pytest.raises(UserError, match="no tensor that has a gradient"):
        loss_of({"out": torch.ones(2)})


# Speed ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_speed_and_warm_say_what_they_cannot_tell(mine, capsys):
    _, said = failed(["speed"], capsys)
    assert said == "FAILED: PyTorch finds no GPU, and kernels run on no CPU: how fast they are cannot be told\n"
    shown, said = failed(["speed", f"{mine}:whole"], capsys)
    assert "SAGEConv  drop-in" in shown and "how fast they are cannot be told" in said
    _, said = failed(["cache", "warm"], capsys)
    assert said.endswith("for which one to compile cannot be told\n")


@needs_compiler
def test_speed_runs_kernels_beside_pygs_code_and_says_what_was_fused(mine, capsys, monkeypatch):
    monkeypatch.setattr(speed, "_WARM_UP", 1)
    cases = [*builtin_cases(30, 120, 8), users_case(f"{mine}:whole")]
    before = [[each.clone() for each in case.model.parameters()] for case in cases]
    with emulated_device() as launched:
        found = [speed.compare(case, CPU, 2) for case in cases]
    assert launched and all(each.pyg_ms > 0 and each.ours_ms > 0 and each.difference < 1e-4 for each in found)
    for case, parameters in zip(cases, before):
        # Copies are trained.
        assert all(one.equal(other) for one, other in zip(case.model.parameters(), parameters))
    for each in found[:-1]:
        assert each.calls.splitlines()[1].split()[2:] == ["1", "0", "0"], each.calls
    speed.print_table(found)
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["attention", "aggregation", "relations"]
    assert "GATConv" in shown and "drop-in" in shown and "second  SAGEConv" in shown


@needs_compiler
def test_speed_of_wrong_gradients_is_not_told(monkeypatch):
    own = pyg_dfgnn.accelerate

    def wrong(model):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return own(model)

    monkeypatch.setattr(pyg_dfgnn, "accelerate", wrong)
    with emulated_device(), pytest.raises(UserError, match="attention: .* differs from PyG's by .* no times are taken"):
        speed.compare(builtin_cases(30, 120, 8)[0], CPU, 2)


def test_steps_are_a_number(capsys):
    with pytest.raises(SystemExit):
        command.main(["speed", "--steps", "0"])
    assert "needs a number of at least 1 (got 0)" in capsys.readouterr().err


# Training and data ----------------------------------------------------------------------------------------------------


TRAIN = """
from pyg_dfgnn.command import main
try:
    main(["train", "model.width=3", "--cfg", "job"])
except SystemExit as error:
    print(error)
main(["train", "data=cora", "seed=7", "--cfg", "job"])
"""


def test_train_passes_overrides_on(tmp_path):
    shown, _ = run_script(TRAIN, tmp_path)
    assert "Could not override 'model.width'" in shown.splitlines()[0]
    assert "seed: 7" in shown and "name: Cora" in shown


WITHOUT_HYDRA = """
import sys
from importlib.metadata import version
sys.modules["hydra"] = None
from pyg_dfgnn.command import main
print(main(["train", "data=cora"]), main(["datasets", "describe", "cora"]), main(["datasets", "list"]))
"""


def test_without_hydra_the_extra_is_named(tmp_path):
    shown, said = run_script(WITHOUT_HYDRA, tmp_path)
    assert shown.splitlines()[-1] == "1 1 0"
    first, second = said.splitlines()
    assert all(line.startswith("FAILED: ") and 'pip install ".[train]"' in line for line in (first, second))


def test_every_data_set_has_a_description(capsys):
    assert command.main(["datasets", "list"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == {path.stem for path in (configs_dir() / "data").glob("*.yaml")}
    assert lines["cora"] == "Classify papers of Cora, which are linked by citations, from their words"
    # A comment of several lines, of which the list has the first sentence.
    whole = datasets.description_of(configs_dir() / "data" / "papers100M_like.yaml")
    assert whole.startswith(f"{lines['papers100M_like']}. ") and whole.endswith("no int64 edge_index is made.")


def test_a_data_set_is_described(capsys):
    assert command.main(["datasets", "describe", "pattern"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("pattern: Graphs generated from a seed") and "python train.py data=pattern\n" in shown
    assert "trainer=mini_batch" in shown and "  task:\n    _target_: pyg_dfgnn.datasets.pattern\n" in shown
    _, said = failed(["datasets", "describe", "corra"], capsys)
    assert said == "FAILED: no data set is called 'corra': did you mean cora?\n"
    _, said = failed(["datasets", "describe", "zzz"], capsys)
    assert "pyg-dfgnn datasets list shows all" in said


# Cache ----------------------------------------------------------------------------------------------------------------


def test_cache_is_cleared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert command.main(["cache", "clear"]) == 0
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel.cubin").write_bytes(b"12345")
    assert command.main(["cache", "clear"]) == 0 and "1 files, 5 bytes" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_warming_launches_the_kernels_of_later_training():
    with emulated_device() as launched:
        for case in builtin_cases(30, 120, 8):
            cache.run_all(case)
        warmed = set(launched)
        launched.clear()
        for case in builtin_cases(30, 120, 8):
            model = pyg_dfgnn.accelerate(case.model)
            loss_of(model(*case.arguments)).backward()
    assert set(launched) <= warmed and launched


@pytest.mark.cuda
def test_speed_and_warm_on_a_gpu(mine, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert command.main(["cache", "warm", f"{mine}:whole"]) == 0 and "compiled " in capsys.readouterr().out
    assert command.main(["speed", "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert "medians of 3 training steps" in shown and all(name in shown for name in layers_module.LAYERS)
