"""What the documents show runs, names what exists, and states the numbers in ``results/``."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import published
from pyg_dfgnn.nn import DROP_INS
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.settings import FALLBACKS, SCHEDULES
from pyg_dfgnn.statements import score
from tests.configs.train import train_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in published.documents()}
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "results/README.md", "results/cora_gat/README.md")
README, TRAINING, MOLECULES = (DOCUMENTS[name] for name in ("README.md", "docs/training.md", "docs/molecules.md"))
COMMANDS = re.findall(r"^`?python train\.py ?([^#`\n]*)", README + TRAINING + MOLECULES, flags=re.MULTILINE)


def examples(name):
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", DOCUMENTS[name], flags=re.DOTALL)


@pytest.fixture(autouse=True)
def default(default_settings):
    """Settings that an example changes come back."""


def test_readme_is_short():
    assert len(README.splitlines()) <= 180


def test_readme_example_prints_what_is_shown(capsys, caplog):
    (example,) = examples("README.md")
    with caplog.at_level("INFO", logger="pyg_dfgnn"):
        exec(example, {})
    line, table = re.findall(r"\n\n```\n(.*?\n)```", README, flags=re.DOTALL)
    # Without logging the line is printed with the package's name before it.
    assert line.strip() in [f"pyg_dfgnn: {message}" for message in caplog.messages]
    printed = capsys.readouterr().out
    if not torch.cuda.is_available():
        assert printed.startswith(table) and "PyG's own path, because" in printed


SHOWN = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", flags=re.DOTALL)
"""A block of Python, and what it prints where the page shows it right below."""
PAGES = [name for name in DOCUMENTS if name.startswith("docs/") and examples(name)]
# They have tests of their own: test_own_score, tests/nn/test_message_page.py and tests/ir/test_page.py.
ELSEWHERE = {"docs/own_score.md", "docs/message_passing.md", "docs/programs.md"}


def run_page(name, capsys, is_run=lambda block: True):
    """Run the blocks of a page one after the other in one scope, compare what they print, and return the scope."""
    scope = {}
    for block, shown in SHOWN.findall(DOCUMENTS[name]):
        if is_run(block):
            exec(block, scope)
            printed = capsys.readouterr().out
            assert not shown or printed == shown
    return scope


@pytest.mark.parametrize("name", sorted(set(PAGES) - ELSEWHERE))
def test_examples_of_a_page_run(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # PyTorch's own compiler needs a C++ compiler on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run_page(name, capsys, lambda block: "NeighborLoader" not in block)


@pytest.mark.sparse
def test_examples_of_sampling_run(capsys):
    run_page("docs/your_loop.md", capsys)


def test_every_page_that_users_read_has_an_example_or_a_command():
    pages = ["install", "first_speedup", "your_loop", "message_passing", "edge_networks", "relational", "several_gpus"]
    pages += ["own_data", "deploy", "settings", "reading_a_plan", "troubleshooting", "measurements"]
    assert all("```" in DOCUMENTS[f"docs/{page}.md"] or "`python " in DOCUMENTS[f"docs/{page}.md"] for page in pages)


def test_first_speedup_shows_the_line_of_accelerate(caplog, capsys):
    with caplog.at_level("INFO", logger="pyg_dfgnn"):
        run_page("docs/first_speedup.md", capsys)
    (line,) = re.findall(r"^pyg_dfgnn: (accelerate: .*)$", DOCUMENTS["docs/first_speedup.md"], flags=re.MULTILINE)
    assert line in caplog.messages


def test_reasons_of_the_troubleshooting_page_are_those_of_the_package():
    table = DOCUMENTS["docs/troubleshooting.md"].partition("| the reason says |")[2].partition("\n\n")[0]
    reasons = [
        text for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for text in re.findall("`([^`]*)`", cell)
    ]
    sources = "".join(path.read_text() for path in SOURCES if path.suffix == ".py")
    assert len(reasons) > 10 and [reason for reason in reasons if reason not in sources] == []


def test_captured_steps(capsys):
    for example in examples("docs/capture.md"):
        scope = {}
        exec(example, scope)
        assert scope["value"].isfinite() and scope["step"].output.isfinite().all()
    assert "Step(GAT, Adam, c" in capsys.readouterr().out


def test_own_data_and_model_in_15_lines(tmp_path):
    """The page is followed by the letter, in an empty folder."""
    page = DOCUMENTS["docs/own_data.md"]
    code = examples("docs/own_data.md")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) == 15
    (tmp_path / "mine.py").write_text(code)
    files = re.findall(r"`(my/\w+/\w+\.yaml)`[^`]*```yaml\n(.*?)```", page.replace("`defaults`", ""), re.DOTALL)
    assert [name for name, _ in files] == ["my/data/rings.yaml", "my/model/net.yaml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (command,) = re.findall(r"^python (-m pyg_dfgnn\.training .*)$", page, flags=re.MULTILINE)
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (metrics,) = tmp_path.glob("outputs/rings-net/*/metrics.json")
    assert json.loads(metrics.read_text())["test_accuracy"] > 0.6


def test_own_score(capsys):
    """The scores of the page are those that the kernels are tested with, and its code runs."""
    tested = (ROOT / "tests/kernels/test_outside_score.py").read_text()
    blocks = examples("docs/own_score.md")
    stated = [block for block in blocks if "Score(" in block]
    assert len(stated) == 2 and all(block.strip() in tested for block in stated)
    try:
        given = {}
        exec("\n".join(blocks), given)
        wide = {name: given[name].double() for name in ("value", "left", "right")}
        out = given["edge_attention"](
            given["graph"],
            given["DISTANCE"],
            value=wide["value"],
            target_scalars=wide["left"],
            source_scalars=wide["right"],
            scale=0.5,
        )
        source, target = given["graph"].edge_index
        logits = -0.5 * (wide["left"][target] - wide["right"][source]) ** 2
        weights = logits.exp() / torch.zeros(100, 8).double().index_add(0, target, logits.exp())[target]
        messages = weights[..., None] * wide["value"][source]
        torch.testing.assert_close(out, torch.zeros(100, 8, 16).double().index_add(0, target, messages))
    finally:
        score._scores.pop("distance", None)
    assert capsys.readouterr().out == "torch.Size([100, 8, 16])\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    overrides = [word.split(",")[0] for word in shlex.split(command) if word not in ("-m", "--help")]
    train_config(*overrides)


EXTRAS = dict(
    re.findall(r"^(\w+) = (\[.*\])$", (ROOT / "pyproject.toml").read_text().partition("[tool")[0], re.MULTILINE)
)
SOURCES = [
    path
    for folder in ("pyg_dfgnn", "benchmarks", "configs", ".ci")
    for path in (ROOT / folder).rglob("*.*")
    if path.is_file()
]


def test_installations_name_extras_that_exist():
    """No index has this package: every command is for a clone."""
    texts = [*DOCUMENTS.values(), *(path.read_text() for path in SOURCES if path.suffix in (".py", ".yaml"))]
    commands = [line for text in texts for line in re.findall(r"pip install [^\n`#]*", text)]
    named = {extra for line in commands for extras in re.findall(r"\[([\w,]+)\]", line) for extra in extras.split(",")}
    hints = {extra for text in texts for extra in re.findall(r'need_extra\([^()]*"(\w+)"\)', text)}
    assert {"cuda13", "cuda12", "data", "sparse", "cluster", "reorder"} <= named | hints <= EXTRAS.keys()
    assert hints and not any("pyg_dfgnn[" in line for line in commands)
    # The builds of these packages import torch.
    assert all("--no-build-isolation" in line for line in commands if "sparse]" in line)


def test_each_installation_reads_real_data_and_names_the_small_build_of_torch():
    install = README.partition("## Install")[2].partition("##")[0]
    lines = re.findall(r"^pip install (.*?)(?: +#.*)?$", install, flags=re.MULTILINE)
    assert "torch --index-url https://download.pytorch.org/whl/cpu" in lines
    assert all("data" in line for line in lines if "torch" not in line)
    assert "scipy" in EXTRAS["data"] and "scikit-image" in EXTRAS["data"]


def rows_of(name):
    """First cell of a table -> the names in the second."""
    found = re.findall(r"^\| `(\w+)` \| ([^|]*)", DOCUMENTS[name], flags=re.MULTILINE)
    return {key: re.findall(r"`\"?(\w+)\"?`", cell) for key, cell in found}


def test_choices_are_all_there():
    rows = rows_of("docs/training.md")
    for group in ("model", "data", "backend", "optimizer", "scheduler", "trainer"):
        assert set(rows[group]) == {path.stem for path in (configs_dir() / group).glob("*.yaml")}


def test_layers_are_all_there():
    assert all(f"`{drop_in.__name__}`" in README for drop_in in DROP_INS.values())


def test_settings_are_all_there():
    assert set(rows_of("docs/schedules.md")) - {"schedule"} == {name for name in SCHEDULES if "+" not in name}
    assert set(rows_of("docs/settings.md")["fallback"]) == set(FALLBACKS)


@pytest.mark.parametrize("name", [*DOCUMENTS, *OTHERS])
def test_files_that_are_named_exist(name):
    """Links are followed in test_site."""
    pattern = r"`((?:pyg_dfgnn|kernels|tests|benchmarks|configs|examples|docs)/[\w./]+)`"
    for file in re.findall(pattern, (ROOT / name).read_text()):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("name", DOCUMENTS)
def test_numbers_are_those_of_the_results(name):
    """`python -m benchmarks.published` writes them anew."""
    assert published.renewed(DOCUMENTS[name]) == DOCUMENTS[name]


def test_figure_is_drawn_from_the_results(tmp_path):
    published.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000 and published.FIGURE.exists()


def test_results_take_at_most_two_megabytes():
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) <= 2_000_000
