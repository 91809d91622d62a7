"""`python -m pyg_dfgnn.training` takes the arguments of train.py, for an installation without a checkout."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.threads import let_threads_sleep
from pyg_dfgnn.training.messages import in_one_line


@hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")
def main(cfg: DictConfig) -> float:
    """Train as configured; the metric is what a sweeper optimises."""
    from pyg_dfgnn.training.run import train

    # A sweep goes on with its other jobs.
    with nullcontext() if HydraConfig.get().mode is RunMode.MULTIRUN else in_one_line():
        return train(cfg)


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
    from pyg_dfgnn.training.sweep import RunsOfSweep

    try:
        with tempfile.TemporaryDirectory() as scratch, in_one_line():
            if int(os.environ.get("RANK", 0)) > 0:
                # The run folder belongs to process 0.
                words = enumerate(sys.argv[1:], 1)
                first = next((at for at, word in words if "=" in word and word[0] != "-"), len(sys.argv))
                sys.argv[first:first] = [f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
            try:
                main()
            finally:
                RunsOfSweep.print_table()
        Group.close()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command()
