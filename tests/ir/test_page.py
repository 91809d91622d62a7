"""The page on programs runs and prints what it shows."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()


def test_page_prints_what_it_shows(capsys):
    scope: dict[str, object] = {}
    shown = re.findall(r"\n```\n(program .*?\n)```", PAGE, flags=re.DOTALL)
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) == len(examples) == 3
    for example, text in zip(examples, shown):
        exec(example, scope)
        assert capsys.readouterr().out == text
    assert scope["results"].keys() == {"out", "d_x", "d_weight"}  # type: ignore[attr-defined]
