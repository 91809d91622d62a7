"""Measure an experiment.

python -m benchmarks                                the graphs of the targets with every implementation
python -m benchmarks experiment=fig9                a named experiment of benchmarks/configs/experiment
python -m benchmarks -m experiment=fig9,fig11       several, one after the other
python -m benchmarks graphs=[a,e] ops=[dot]         any value of benchmarks/configs/bench.yaml
python -m benchmarks experiment=fig9 device=cpu small=true   miniature graphs on a CPU
python -m benchmarks experiment=loops loops=[molecules] models=[gin]   training steps of real loops, some of them
"""

import os
import sys
from typing import Any

from benchmarks import CONFIGS
from pyg_dfgnn.errors import end_without_extra

end_without_extra("hydra", "measurements", "train")

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from pyg_dfgnn.training.messages import in_one_line  # noqa: E402

codes: list[int] = []


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="bench")
def main(config: DictConfig) -> None:
    """Measure as configured."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    if "loops" in values:
        from benchmarks.loops.run import run
    else:
        from benchmarks.run import run

    codes.append(run(values))


if __name__ == "__main__":
    # Hydra leaves errors to the block below.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Plots are drawn to a file; the backend of a notebook may be absent here.
    os.environ["MPLBACKEND"] = "agg"
    with in_one_line(CONFIGS, "bench"):
        main()
    sys.exit(max(codes, default=0))
