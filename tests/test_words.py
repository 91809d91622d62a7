"""Docstrings say what they describe by a noun of the field."""

import ast
import re
from pathlib import Path

import pytest

import pyg_dfgnn

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
