"""Train a model of nodes or graphs, for their classes or values, or of links.

python train.py                                  small PATTERN, generated: no download
python train.py data=cora                        a data set with the model that suits it
python train.py data=cora model=gatv2            any data set with any model
python train.py data=solubility                  values of molecules
python train.py experiment=gt_pattern            a named setting of configs/experiment
python train.py -m seed=0,1,2 backend=auto,pyg   a sweep
python train.py ... resume=outputs/...           resume a stopped run, given its other arguments
torchrun --nproc_per_node=2 train.py             one process per GPU
"""

import os
import sys

# Read while torch is loaded: see pyg_dfgnn.threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pyg_dfgnn.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
