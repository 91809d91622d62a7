"""What an installation holds, and that it finds its CUDA text and configs from anywhere."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pyg_dfgnn
from pyg_dfgnn import paths
from pyg_dfgnn.command.info import TESTED

ROOT = Path(__file__).parents[2]


def relative(folder, *patterns):
    return {str(path.relative_to(folder)) for pattern in patterns for path in folder.rglob(pattern)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy to build from, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("pyg_dfgnn", "kernels", "configs", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=300)
    (file,) = target.glob("*.whl")
    return zipfile.ZipFile(file)


def test_every_room_is_a_listed_package():
    """`packages` of pyproject.toml is written by hand, because CUDA text and configs lie outside the package."""
    text = re.search(r"^packages = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE).group(1)
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "pyg_dfgnn").rglob("*.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"pyg_dfgnn.kernels", "pyg_dfgnn.configs"}
    assert ast.literal_eval(text) == sorted(expected)


def test_wheel_content(wheel):
    expected = {f"pyg_dfgnn/{path}" for path in relative(ROOT / "pyg_dfgnn", "*.py", "py.typed")}
    expected |= {f"pyg_dfgnn/kernels/{path}" for path in relative(paths.kernels_dir(), "*.cu", "*.cuh")}
    expected |= {f"pyg_dfgnn/configs/{path}" for path in relative(paths.configs_dir(), "*.yaml")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_source_distribution_has_what_a_wheel_needs_and_no_tests(source, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=300)
    (file,) = tmp_path.glob("*.tar.gz")
    packed = {path.partition("/")[2] for path in tarfile.open(file).getnames()}
    for folder, patterns in (("pyg_dfgnn", ["*.py"]), ("kernels", ["*.cu", "*.cuh"]), ("configs", ["*.yaml"])):
        assert {f"{folder}/{path}" for path in relative(ROOT / folder, *patterns)} <= packed
    assert not [path for path in packed if path.startswith("tests")]


def test_wheel_finds_its_files(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = "from pyg_dfgnn import paths; print(paths.kernels_dir()); print(paths.configs_dir())"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "pyg_dfgnn" / name) for name in ("kernels", "configs")]


def test_wheel_trains(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "pyg_dfgnn.training", "--help"]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("train is powered by Hydra.") and "model: agnn, " in done.stdout


def test_checkout_finds_its_files():
    assert (paths.kernels_dir() / "attention").is_dir()
    assert (paths.configs_dir() / "train.yaml").is_file()


def test_incomplete_installation_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "pyg_dfgnn" / "paths.py"))
    with pytest.raises(FileNotFoundError, match="'nothing' was found neither in .* nor in .*: reinstall pyg_dfgnn"):
        paths._find("nothing")


def test_the_citation_names_the_last_release_and_the_package_a_later_version_once_it_has_changed():
    changes = (ROOT / "CHANGELOG.md").read_text()
    release, day = re.search(r"^## (\d\S*) \((.*)\)$", changes, re.MULTILINE).groups()
    assert f"\nversion: {release}\ndate-released: {day}\n" in (ROOT / "CITATION.cff").read_text()
    unreleased = changes.partition("\n## Unreleased\n")[2].partition("\n## ")[0].strip()
    assert (pyg_dfgnn.__version__ != release) == bool(unreleased)


BLOCKED = """
import importlib, pkgutil, sys

# PyG itself needs tqdm.
extras = "hydra omegaconf matplotlib pandas pymetis PIL scipy skimage cupy torch_sparse torch_scatter tensorboard wandb"
sys.modules.update(dict.fromkeys(extras.split()))
import pyg_dfgnn
for module in pkgutil.walk_packages(pyg_dfgnn.__path__, "pyg_dfgnn."):
    if not module.name.startswith("pyg_dfgnn.training") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
try:
    import pyg_dfgnn.training
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_library_needs_no_extra():
    """All but training can be imported without the packages of any extra; training names its own."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "hydra" in done.stdout and ".[train]" in done.stdout


def test_make_lists_its_targets():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split()
    shown = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(None, 1) for line in shown.splitlines())
    assert sorted(lines) == sorted(phony) and all(lines.values())


def test_clean_deletes_what_tools_have_made_and_keeps_runs(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    made, kept = (
        ("build", "pyg_dfgnn/__pycache__", ".venv/lib/__pycache__"),
        ("pyg_dfgnn", "outputs/__pycache__", "multirun"),
    )
    for folder in (*made, *kept):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    subprocess.run(["make", "--silent", "clean"], cwd=tmp_path, check=True)
    assert [folder for folder in (*made, *kept) if (tmp_path / folder).exists()] == list(kept)


def test_documents_and_info_name_the_same_releases():
    required = (ROOT / "pyproject.toml").read_text()
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/install.md")]
    for name, title in (("torch", "PyTorch"), ("torch_geometric", "PyTorch Geometric")):
        oldest, newest = TESTED[name]
        row = f"| {title} | {oldest} or newer; tested with {oldest} to {newest} |"
        assert f'"{name}>={oldest}"' in required and all(row in page for page in pages)


def test_the_suite_of_other_releases_is_there():
    """The script that runs on the oldest and the newest releases names files and functions of today."""
    script = runpy.run_path(str(ROOT / ".ci" / "try_versions.py"))
    for name in script["TESTS"]:
        file, _, function = name.partition("::")
        assert not function or f"\ndef {function.partition('[')[0]}(" in (ROOT / file).read_text(), name
    oldest, newest = script["pairs"]().values()
    assert oldest == [f"{name}=={TESTED[name][0]}.*" for name in TESTED] and newest == list(TESTED)
