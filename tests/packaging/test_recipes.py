"""The recipe of CONTRIBUTING.md for an operator is followed on a copy, and its proof runs there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ENTRY = re.compile(r"```\w+\n(?:#|//) (\S+), before `([^\n]+)`\n(.*?)```", re.DOTALL)
RECIPE = PAGE[PAGE.index("### Add an operator of the IR") :].partition("\n## ")[0]
ENTRIES = ENTRY.findall(RECIPE)
PROOF = (
    "tests/kernels/test_relational_emulated.py::test_every_function",
    "tests/nn/test_messages.py::test_captured_forwards_equal_pyg[user-Corners]",
)


def written(folder, entries):
    """Write the entries of a recipe into a copy of the sources."""
    for name, anchor, lines in entries:
        text = (folder / name).read_text()
        assert text.count(anchor) == 1, f"{name} has no single line with {anchor}"
        start = text.rindex("\n", 0, text.index(anchor)) + 1
        (folder / name).write_text(text[:start] + lines + text[start:])


@pytest.fixture
def copy(tmp_path):
    for name in ("pyg_dfgnn", "kernels", "configs", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def proof(folder):
    """Run the proof in a folder; returns its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PROOF]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_the_recipe_for_an_operator_works(copy):
    assert len(ENTRIES) == 5
    written(copy, ENTRIES)
    output = proof(copy)
    assert "2 passed" in output, output


def test_the_proof_of_an_operator_fails_without_its_function_and_its_name(copy):
    written(copy, [entry for entry in ENTRIES if entry[0].startswith(("pyg_dfgnn/ir/pointwise", "tests/"))])
    output = proof(copy)
    assert "2 failed" in output and "point_erfc" in output, output
