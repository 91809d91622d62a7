"""Drop-in for torch's Linear, which stands in the networks of nodes that layers take and in users' own layers."""

import torch

from pyg_dfgnn.nn.dense.linear import KernelLinear


class Linear(KernelLinear, torch.nn.Linear):
    """Torch's `Linear` with a kernel for large products in float32: same arguments, parameters, results and gradients.

    `Y = X W^T + b`; under autocast, where TF32 is allowed, and for other products torch's code runs, which no setting
    reports.
    """

    def _channels(self) -> int:
        return self.out_features
