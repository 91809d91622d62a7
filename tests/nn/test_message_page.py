"""The page on users' own layers runs and prints what it shows; the table of PyG's classes is current."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pyg_dfgnn.settings import local_settings
from tests.nn import message_coverage

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
@pytest.mark.sparse
@pytest.mark.filterwarnings("ignore")
def test_table_of_pygs_classes_is_current():
    assert message_coverage.PAGE.read_text() == message_coverage.page()
