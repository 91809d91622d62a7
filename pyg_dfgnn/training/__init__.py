"""Training of models for the classification of nodes or graphs: :func:`pyg_dfgnn.training.run.train`."""

import sys

from pyg_dfgnn.errors import end_without_extra, need_extra

# Python imports the package before the command in it that `python -m` asks for.
check = end_without_extra if sys.argv[:1] == ["-m"] else need_extra
check("hydra", "training runs", "train")
