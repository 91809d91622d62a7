"""`python -m pyg_dfgnn.training` takes the arguments of train.py, for an installation without a checkout."""

from __future__ import annotations

import os
import sys
import tempfile

import hydra
from omegaconf import DictConfig

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.threads import let_threads_sleep


@hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")
def main(cfg: DictConfig) -> float:
    """Train as configured; the metric is what a sweeper optimises."""
    from pyg_dfgnn.training.run import train

    return train(cfg)


def command() -> None:
    """Train as the command line says."""
    let_threads_sleep()
    from pyg_dfgnn.distributed import Group

    try:
        with tempfile.TemporaryDirectory() as scratch:
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
