"""Measure an experiment.

python -m pyg_dfgnn.bench                                the graphs of the targets with every implementation
python -m pyg_dfgnn.bench experiment=fig9                a named experiment of configs/bench/experiment
python -m pyg_dfgnn.bench -m experiment=fig9,fig11       several, one after the other
python -m pyg_dfgnn.bench graphs=[a,e] ops=[dot]         any value of configs/bench/bench.yaml
python -m pyg_dfgnn.bench experiment=fig9 device=cpu small=true   miniature graphs on a CPU
python -m pyg_dfgnn.bench experiment=loops loops=[molecules] models=[gin]   training steps of real loops, some of them
"""

import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.threads import let_threads_sleep

codes: list[int] = []


@hydra.main(version_base="1.3", config_path=str(configs_dir() / "bench"), config_name="bench")
def main(config: DictConfig) -> None:
    """Measure as configured."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    if "loops" in values:
        from pyg_dfgnn.bench.loops.run import run
    else:
        from pyg_dfgnn.bench.run import run

    codes.append(run(values))


if __name__ == "__main__":
    let_threads_sleep()
    # An error in one experiment ends the command with its traceback.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # Plots are drawn to a file; the backend of a notebook may be absent here.
    os.environ["MPLBACKEND"] = "agg"
    main()
    sys.exit(max(codes, default=0))
