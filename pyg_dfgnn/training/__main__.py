"""`python -m pyg_dfgnn.training` takes the arguments of train.py, for an installation without a checkout."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.threads import let_threads_sleep
from pyg_dfgnn.training.hints import hint

_SHOWS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
_OF_CONFIGS = (HydraException, OmegaConfBaseException)


@hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")
def main(cfg: DictConfig) -> float:
    """Train as configured; the metric is what a sweeper optimises."""
    from pyg_dfgnn.training.run import train

    # A sweep goes on with its other jobs.
    with nullcontext() if HydraConfig.get().mode is RunMode.MULTIRUN else _in_one_line():
        return train(cfg)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """A block whose errors about options, files and packages end the process with their message and status 1.

    The environment variable HYDRA_FULL_ERROR=1 lets them through, as all other errors, with a traceback.
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
            text = " ".join(text.partition("\nConfig search path")[0].split())
            text = "; ".join(filter(None, (text, hint(text, sys.argv[1:]))))
        sys.exit(f"{type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows the traceback)")


def command() -> None:
    """Train as the command line says; the exit status is 0, 1 after an error, and 130 after an interrupt."""
    let_threads_sleep()
    # Curves are drawn to a file; the backend of a notebook may be absent here.
    os.environ["MPLBACKEND"] = "agg"
    # Own models and data sets lie in the folder that the command runs in, which a console script does not search.
    sys.path.insert(0, os.getcwd())
    # Hydra leaves errors to this function.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    from pyg_dfgnn.distributed import Group

    try:
        with tempfile.TemporaryDirectory() as scratch, _in_one_line():
            if int(os.environ.get("RANK", 0)) > 0:
                # The run folder belongs to process 0.
                words = enumerate(sys.argv[1:], 1)
                first = next((at for at, word in words if "=" in word and word[0] != "-"), len(sys.argv))
                sys.argv[first:first] = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
            main()
        Group.close()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command()
