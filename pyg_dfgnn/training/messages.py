"""Errors as a command tells them to its user: one line, with the names that the user may have meant."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.paths import configs_dir

_SHOWS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
_OF_CONFIGS = (HydraException, OmegaConfBaseException)
_CHAINED = ", set env var HYDRA_FULL_ERROR=1 to see chained exception."
_KEY = re.compile(r"Could not override '([^']+)'")
_OPEN = re.compile(r"(model|optimizer|scheduler|data\.task|trainer\.loader|backend\.settings)\.")
_CHOICE = re.compile(r"Could not find '([^']+)/([^'/]+)'")


@contextmanager
def in_one_line(configs: Path | None = None, name: str = "train") -> Iterator[None]:
    """A block whose errors about options, files and packages end the process with their message and status 1.

    The environment variable HYDRA_FULL_ERROR=1 lets them through, as all other errors, with a traceback.

    Args:
        configs: Folder of the configs of the command; None: that of train.py.
        name: Name of the config that others are added to.
    """
    from torch import OutOfMemoryError

    expected = (*_OF_CONFIGS, ValueError, TypeError, OSError, ImportError, UnsupportedError, OutOfMemoryError)
    try:
        yield
    except expected as error:
        if _SHOWS_TRACEBACK:
            raise
        text = str(error)
        if isinstance(error, _OF_CONFIGS):
            text = text.replace(_CHAINED, f": {_first_cause(error)};")
            text = " ".join(text.partition("\nConfig search path")[0].split())
            text = with_hint(text, sys.argv[1:], configs or configs_dir(), name)
        sys.exit(f"{type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows the traceback)")


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def with_hint(problem: str, words: Sequence[str], configs: Path, name: str) -> str:
    """Return the message of an error of Hydra with "did you mean ...?" where something is close, or a missing extra.

    Advice to append an option with + stays where options are arguments of a class or function.

    Args:
        problem: The message.
        words: Arguments of the command.
        configs: As in :func:`in_one_line`.
        name: As in :func:`in_one_line`.
    """
    if "'hydra/launcher/submitit_slurm'" in problem:
        return f'{problem.rstrip(".")}; jobs of Slurm need the extra cluster: pip install ".[cluster]"'
    key, choice = _KEY.search(problem), _CHOICE.search(problem)
    close: list[str] = []
    if choice is not None:
        names = sorted(
            {file.stem for folder in [configs, *_own(words)] for file in (folder / choice[1]).glob("*.yaml")}
        )
        close = [f"{choice[1]}={each}" for each in get_close_matches(choice[2], names)]
    elif key is not None:
        close = _close(key[1], _options(words, configs, name))
        if not _OPEN.match(key[1]):
            problem = problem.partition(". To append to your config")[0]
    return f"{problem}; did you mean {' or '.join(close)}?" if close else problem


def _close(key: str, keys: Sequence[str]) -> list[str]:
    """Return the options that are like a key, or end as it does."""
    by_end: dict[str, list[str]] = {}
    for each in keys:
        by_end.setdefault(each.rpartition(".")[2], []).append(each)
    ends = get_close_matches(key.rpartition(".")[2], by_end)
    group, dot, _ = key.rpartition(".")
    # An option of the group that was named comes first.
    like = [name for end in ends for name in by_end[end]]
    like = [name for name in like if dot and name.startswith(f"{group}.")] or like
    return list(dict.fromkeys([*get_close_matches(key, keys, cutoff=0.8), *like]))[:3]


def _own(words: Sequence[str]) -> list[Path]:
    """Return the folder of the user's configs, if words name one."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    own = parser.parse_known_args(words)[0].config_dir
    return [] if own is None else [own.absolute()]


def _options(words: Sequence[str], configs: Path, name: str) -> list[str]:
    """Return the dotted names of all options under the groups that words choose."""
    groups = {path.name for path in configs.iterdir() if path.is_dir()}
    # Of a sweep the first choice.
    chosen = [word.partition(",")[0] for word in words if word.partition("=")[0].lstrip("+") in groups]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            config = OmegaConf.to_container(compose(name, [*chosen, *map(_search, _own(words))]))
    except (HydraException, OmegaConfBaseException):
        return sorted(groups)
    return sorted(groups | set(_flat(config)))


def _search(folder: Path) -> str:
    return f"hydra.searchpath=['file://{folder}']"


def _flat(config: Any, before: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
