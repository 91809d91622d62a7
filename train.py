"""Train a node classification model.

python train.py                                  small PATTERN, generated: no download
python train.py data=cora model=gat              any data set with any model
python train.py experiment=gt_pattern            a named setting of configs/experiment
python train.py -m seed=0,1,2 backend=auto,pyg   a sweep
python train.py resume=outputs/...               go on with a stopped run
torchrun --nproc_per_node=2 train.py             one process per GPU
"""

import os
import sys
import tempfile

# Threads that wait by spinning slow each other down many times over when the cores are shared. Read as torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hydra
from omegaconf import DictConfig

from pyg_dfgnn import training
from pyg_dfgnn.distributed import Group
from pyg_dfgnn.paths import configs_dir


@hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")
def main(cfg: DictConfig) -> float:
    """Train as configured; the metric is what a sweeper optimises."""
    return training.train(cfg)


if __name__ == "__main__":
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
