"""No behaviour rests on `assert`: the package uses it for types that cannot be others, and runs alike without."""

import ast
import os
import subprocess
import sys

import pytest

from tests.test_layering import PACKAGE, ROOT, parsed, relative

SOURCES = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "train.py"]
_OPTIONS = ("functions_and_their_options", "options_of_an_embedding")
PART = ("tests/test_errors.py", *(f"tests/nn/test_message_traps.py::test_{name}" for name in _OPTIONS))
"""Tests of what is refused."""


def narrows(test):
    """Whether a condition tells a type checker more of a name than it knows, and does nothing else."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(narrows, test.values))
    match test:
        case ast.Compare(value, [ast.IsNot()], [ast.Constant(None)]):
            return is_name(value)
        case ast.Call(ast.Name("isinstance"), [value, _], []):
            return is_name(value)
    return False


def is_name(node):
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_name(node.value))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_types_are_asserted(path):
    asserts = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
    lines = [node.lineno for node in asserts if node.msg is not None or not narrows(node.test)]
    assert not lines, f"lines {lines} of {relative(path)}: raise an error where a condition may fail"


def test_a_part_of_the_tests_without_asserts():
    # pytest rewrites the asserts of tests, which so stay.
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *PART]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
