"""The page on users' own layers runs and prints what it shows; the table of PyG's classes is current."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pyg_dfgnn.settings import local_settings
from tests.nn.message_coverage import NAMES, page, row
from tests.nn.message_coverage import PAGE as COVERAGE

ROWS = [line for line in COVERAGE.read_text().splitlines() if re.match(r"\| [A-Z]", line)]
PAGE = (Path(__file__).parents[2] / "docs" / "message_passing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, flags=re.DOTALL)


def test_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    assert len(BLOCKS) == len(re.findall("```python", PAGE)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "page.py").write_text("\n\n".join(code for code, _ in BLOCKS))
    monkeypatch.syspath_prepend(tmp_path)
    with local_settings(fallback="silent"):
        import_module("mine.page")
    del sys.modules["mine.page"], sys.modules["mine"]
    assert capsys.readouterr().out == "".join(shown for _, shown in BLOCKS)


# PANConv takes a SparseTensor.
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sparse] * (x == "PANConv")) for x in NAMES])
@pytest.mark.filterwarnings("ignore")
def test_row_of_a_class_of_pyg_is_current(name):
    assert row(name) in ROWS


def test_table_has_each_class_of_pyg():
    assert [line.split()[1] for line in ROWS] == NAMES
    assert COVERAGE.read_text() == page(ROWS)
