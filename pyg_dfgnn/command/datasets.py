"""The data sets of train.py, as their configs tell of them."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from pyg_dfgnn.command.layers import UserError
from pyg_dfgnn.errors import need_extra
from pyg_dfgnn.paths import configs_dir

_GROUPS = ("model", "optimizer", "scheduler", "trainer")


def _configs() -> dict[str, Path]:
    return {path.stem: path for path in sorted((configs_dir() / "data").glob("*.yaml"))}


def description_of(path: Path) -> str:
    """Return the comment at the head of a config."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def list_() -> int:
    """List the data sets that train.py takes as data=NAME."""
    configs = _configs()
    width = max(map(len, configs))
    for name, path in configs.items():
        print(f"{name:{width}}  {description_of(path).partition('. ')[0].rstrip('.')}")
    return 0


def describe(name: str) -> int:
    """Describe a data set: what it is, its options with their defaults, and the model that suits it.

    Args:
        name: Its name.

    Raises:
        UserError: There is no such data set, or hydra is missing.
    """
    configs = _configs()
    if name not in configs:
        close = get_close_matches(name, configs, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "pyg-dfgnn datasets list shows all"
        raise UserError(f"no data set is called {name!r}: {hint}")
    try:
        need_extra("hydra", "the options of data sets", "train")
    except ModuleNotFoundError as problem:
        raise UserError(str(problem)) from problem
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        cfg = compose("train", [f"data={name}"], return_hydra_config=True)
    choices = cfg.hydra.runtime.choices
    print(f"{name}: {description_of(configs[name])}")
    print(f"python train.py data={name}")
    print("chosen with it: " + ", ".join(f"{group}={choices[group]}" for group in _GROUPS))
    # References to folders stay as they are written.
    print(OmegaConf.to_yaml(OmegaConf.create({"data": OmegaConf.to_container(cfg.data)})), end="")
    return 0
