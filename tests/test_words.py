"""Names mean one thing each, and docstrings say what they describe by a noun of the field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyg_dfgnn
from benchmarks import CONFIGS

ROOT = Path(pyg_dfgnn.__file__).parent
BANNED = re.compile(r"(What|Whether it|Those|As|Of)\b")


def texts(path):
    """Line and text of each docstring of a file, those under constants among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value).strip()


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_noun_or_a_verb(path):
    assert [line for line, text in texts(path) if BANNED.match(text)] == []


ALIAS = re.compile(r"_?[A-Z][a-z]\w+")


def kinds(tree: ast.Module) -> Iterator[str]:
    """Names of the classes of a file and of its aliases of types.

    A drop-in bears the name of its base: upstream has a `Linear` in torch and one in PyG, and so have the drop-ins.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if not any(ast.unparse(base).rpartition(".")[2] == node.name for base in node.bases):
                yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if ALIAS.fullmatch(node.targets[0].id):
                yield node.targets[0].id


def homonyms(files: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Names of classes and aliases that stand for two things or more, and where they do."""
    places: dict[str, list[str]] = {}
    for path, tree in files.items():
        for name in kinds(tree):
            places.setdefault(name, []).append(path)
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("folder", [ROOT, CONFIGS.parent], ids=lambda folder: folder.name)
def test_a_class_name_means_one_thing(folder):
    files = {str(path.relative_to(folder)): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    assert len(files) > 20 and homonyms(files) == {}


def test_a_homonym_is_seen():
    one = ast.parse("class Call: ...\nclass Linear(torch.nn.Linear): ...\ndef f():\n    class Local: ...")
    two = ast.parse("Call = tuple[int, int]\nclass Linear(dense.Linear): ...\nclass Local: ...\nT = TypeVar('T')")
    three = ast.parse("T = TypeVar('T')\nLIMIT = 3")
    assert homonyms({"one": one, "two": two, "three": three}) == {"Call": ["one", "two"], "Local": ["one", "two"]}
