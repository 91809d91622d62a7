"""The README's example runs, and its commands name configs that exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from pyg_dfgnn.nn import GATConv
from pyg_dfgnn.paths import configs_dir

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^`?python train\.py ?([^#`\n]*)", README, flags=re.MULTILINE)


EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_example(capsys):
    exec(EXAMPLES[0], {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([100, 32])\n") and "PyG's own path, because" in printed


def test_partitioned_example():
    (example,) = EXAMPLES[1:]
    given = {"edge_index": torch.randint(30, (2, 90)), "num_nodes": 30, "x": torch.randn(30, 4), "model": GATConv(4, 2)}
    exec(example, given)
    assert given["out"].shape == (30, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    overrides = [word.split(",")[0] for word in shlex.split(command) if word not in ("-m", "--help")]
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        compose("train", overrides)


def test_choices_are_all_there():
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+` ?)+)", README, flags=re.MULTILINE))
    for group in ("model", "data", "backend", "optimizer", "scheduler", "trainer"):
        choices = {path.stem for path in (configs_dir() / group).glob("*.yaml")}
        assert set(re.findall(r"\w+", rows[group])) == choices
