"""Commands for users: what is installed, whether kernels run and how fast, training, data sets, and the cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pyg_dfgnn
from pyg_dfgnn.command import cache, datasets, doctor, info, speed
from pyg_dfgnn.command.layers import FUNCTION, UserError


def train(overrides: Sequence[str]) -> int:
    """Train as train.py does, with its overrides, such as data=cora model=gat."""
    try:
        from pyg_dfgnn.training.__main__ import command
    except ModuleNotFoundError as problem:
        raise UserError(str(problem)) from problem
    sys.argv[1:] = overrides
    command()
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs a number of at least 1 (got {text})")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyg-dfgnn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pyg_dfgnn {pyg_dfgnn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(function: Callable[..., int], name: str = "", to: Any = commands) -> argparse.ArgumentParser:
        line = (function.__doc__ or "").strip().splitlines()[0]
        added: argparse.ArgumentParser = to.add_parser(name or function.__name__, help=line, description=line)
        added.set_defaults(function=function)
        return added

    add(info.info)
    add(doctor.doctor)
    timed = add(speed.speed)
    timed.add_argument("source", nargs="?", metavar="module:function", help=FUNCTION)
    timed.add_argument("--steps", type=_positive, default=speed.STEPS, help="timed steps, by default %(default)s")
    # Listed here; its arguments are Hydra's.
    add(train)
    of_data = commands.add_parser("datasets", help="List or describe the data sets of train.py.")
    actions = of_data.add_subparsers(dest="action", required=True)
    add(datasets.list_, "list", actions)
    add(datasets.describe, "describe", actions).add_argument("name", help="name of a data set, as in data=NAME")
    of_cache = commands.add_parser("cache", help="Clear or fill the cache of compiled kernels.")
    actions = of_cache.add_subparsers(dest="action", required=True)
    add(cache.clear, "clear", actions)
    warmed = add(cache.warm, "warm", actions)
    warmed.add_argument("source", nargs="?", metavar="module:function", help=FUNCTION)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its status is the result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["train"]:
            return train(words[1:])
        options = vars(_parser().parse_args(words))
        for name in ("command", "action"):
            options.pop(name, None)
        status: int = options.pop("function")(**options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Such as `head` has read all that it wants. Python would try to write the rest as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return status
